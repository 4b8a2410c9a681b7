"""A container's log, each line once, over breaks of the connection."""

from __future__ import annotations

from collections.abc import Iterator

from hermes_ops.errors import Unavailable
from hermes_ops.kubernetes.logs import PAUSE_S, LogFollower
from tests.unit.kubernetes.pods import FakePods

LINES = [f"2026-01-01T00:00:0{n}.{fraction}Z line {n}" for n, fraction in ((1, "9"), (2, "15"))]


class Breaking(FakePods):
    """Its log breaks off after the first line, and is whole the second time."""

    asked: list[int | None]

    def log(self, name: str, since_s: int | None) -> Iterator[str]:
        self.asked.append(since_s)
        yield LINES[0]
        if len(self.asked) == 1:
            raise Unavailable("the connection broke")
        yield LINES[1]


def test_no_line_is_lost_or_doubled_when_the_connection_breaks() -> None:
    pods = Breaking()
    pods.asked = []
    said: list[str] = []
    follower = LogFollower(pods, "p", said.append, lambda: None)

    def on_end() -> None:
        if len(pods.asked) == 2:
            follower.finish(0.0)

    follower.on_end = on_end
    follower.run()
    assert said == ["line 1", "line 2"]
    assert pods.asked[:2] == [None, 5]
    assert PAUSE_S < 1.0


def test_times_of_different_precision_are_in_order() -> None:
    said: list[str] = []
    stamps = ("2026-01-01T00:00:01.9Z a", "2026-01-01T00:00:01.95Z b", "2026-01-01T00:00:02Z c")
    pods = FakePods(lines=stamps)
    follower = LogFollower(pods, "p", said.append, lambda: None)
    follower.finish(0.0)
    follower.run()
    assert said == ["a", "b", "c"]
