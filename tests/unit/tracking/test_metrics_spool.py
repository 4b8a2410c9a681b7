from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.summary import Segment
from hermes_ops.errors import Unavailable, Unsupported
from hermes_ops.tracking import LatestMetric, MetricSender, Tracker
from hermes_ops.tracking.runs import curve_of
from hermes_ops.tracking.sender import SeenSteps, load_offset, read_lines, save_offset


def line(step: int, name: str = "loss") -> str:
    return json.dumps({"name": name, "value": 0.5, "step": step, "time_ms": step}) + "\n"


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(-5, 30)), max_size=80))
def test_a_pair_is_new_exactly_once(pairs: list[tuple[str, int]]) -> None:
    seen, met = SeenSteps(), set()
    for pair in pairs:
        assert seen.add(*pair) == (pair not in met)
        met.add(pair)


def test_regular_steps_take_one_range_however_many_they_are() -> None:
    seen = SeenSteps()
    for step in range(0, 1_000_000, 50):
        assert seen.add("loss", step)
    assert seen._ranges == {"loss": [range(0, 999_951, 50)]}


def test_irregular_steps_are_forgotten_rather_than_filling_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hermes_ops.tracking.sender._MAX_RANGES", 10)
    seen = SeenSteps()
    for i in range(100):
        seen.add("loss", -i)
        seen.add(f"name {i}", 1)
    assert sum(map(len, seen._ranges.values())) <= 10
    one_name = SeenSteps()
    monkeypatch.undo()
    for i in range(5_000):
        one_name.add("loss", -i)
    assert len(one_name._ranges["loss"]) <= 1_000


def test_a_line_without_end_longer_than_a_block_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_ops.tracking.sender._BLOCK_BYTES", 100)
    file = tmp_path / "metrics.jsonl"
    file.write_text(line(1) + "x" * 1_000 + "\n" + line(2))
    found = [metric.step for metric, _ in read_lines(file, 0) if metric is not None]
    assert found == [1, 2]


def test_a_damaged_offset_counts_as_none(tmp_path: Path) -> None:
    state = tmp_path / "sent.json"
    assert load_offset(state) == 0
    for text in ("", "{", "[]", '{"offset": "x"}', '{"offset": null}'):
        state.write_text(text)
        assert load_offset(state) == 0
    save_offset(state, 17)
    assert load_offset(state) == 17
    assert [f.name for f in tmp_path.iterdir()] == ["sent.json"]


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_server_that_is_away_is_unavailable_with_the_address_and_without_the_password() -> None:
    port = closed_port()
    tracker = Tracker(f"http://me:secret@127.0.0.1:{port}")
    with pytest.raises(Unavailable, match=str(port)) as caught:
        tracker.find_sweep("x")
    assert "secret" not in str(caught.value)
    tracker.close()


@pytest.mark.parametrize("uri", ["sqlite:///x.db", "file:/tmp/x", "databricks", ""])
def test_an_address_that_is_no_server_is_refused_with_the_remedy(uri: str) -> None:
    with pytest.raises(Unsupported, match="mlflow server"):
        Tracker(uri)


def test_the_sender_asks_an_absent_server_less_and_less_often(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(line(1))
    now = [0.0]
    asked: list[float] = []

    class NotingTracker(Tracker):
        def log_metrics(self, run_id: str, metrics: Sequence[Mapping[str, Any]]) -> None:
            asked.append(now[0])
            super().log_metrics(run_id, metrics)

    tracker = NotingTracker(f"http://127.0.0.1:{closed_port()}")
    sender = MetricSender(
        "run", tmp_path / "metrics.jsonl", tmp_path / "sent.json", tracker, clock=lambda: now[0]
    )
    while now[0] < 100:
        assert sender.pump() == 0
        now[0] += 0.25
    gaps = [b - a for a, b in pairwise(asked)]
    assert gaps == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    tracker.close()


def test_a_drain_in_vain_ends_at_its_limit(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(line(1))
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    tracker = Tracker(f"http://127.0.0.1:{closed_port()}")
    sender = MetricSender(
        "run",
        tmp_path / "metrics.jsonl",
        tmp_path / "sent.json",
        tracker,
        clock=lambda: now[0],
        sleep=sleep,
    )
    assert not sender.drain(3.0)
    assert now[0] == pytest.approx(3.0)
    tracker.close()


def test_of_two_values_for_a_step_the_earlier_stands() -> None:
    history = [LatestMetric(0.9, 1, 50), LatestMetric(0.7, 2, 60), LatestMetric(0.8, 1, 40)]
    assert curve_of(history) == ((1, 0.8, 40), (2, 0.7, 60))


def test_autologged_epochs_from_zero_do_not_double_the_collected_ones() -> None:
    collected = [LatestMetric(1 / s, s, s * 100) for s in (1, 2, 3)]
    autologged = [LatestMetric(1 / (s + 1), s, (s + 1) * 100 + 5) for s in (0, 1, 2)]
    assert curve_of([*collected, *autologged]) == tuple((s, 1 / s, s * 100) for s in (1, 2, 3))


def test_a_segment_is_itself_after_json() -> None:
    segment = Segment(3, 2, (0, 1), 10.5, None, 4, None, "")
    for kept in (segment, replace(segment, startup_s=1.5, restore_s=0.25)):
        assert Segment.from_json(3, json.loads(json.dumps(kept.to_json()))) == kept
    assert Segment.from_json(3, segment.to_json()[:7]) == segment  # as an older release wrote it
