from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.airflow.control.feeds import CurveFeed, woken_after_s
from hermes_ops.airflow.folders import metrics_wake_file
from hermes_ops.errors import Unavailable
from hermes_ops.tracking.curves import CurveReader
from hermes_ops.tracking.runs import LatestMetric, TrialRun
from tests.unit.airflow.builders import SWEEP, sweep_with

POINTS = {0: ((1, 0.5, 1_000),)}


class Reader:
    """Reads what it is given; `away` while MLflow does not answer."""

    away = False
    metrics: list[str] = []  # noqa: RUF012 - one for all readers of a test

    def __init__(self, tracker: Any, metric: str, *, constraint_metrics: Iterable[str]) -> None:
        self.constraint_metrics = {name: POINTS for name in constraint_metrics}
        self.metrics += [metric, *self.constraint_metrics]

    def fetch(self, ref: Any) -> Any:
        if self.away:
            raise Unavailable("MLflow did not answer")
        return SimpleNamespace(points=POINTS, constraint_metrics=self.constraint_metrics)


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> CurveFeed:
    monkeypatch.setattr("hermes_ops.tracking.curves.CurveReader", Reader)
    monkeypatch.setattr(Reader, "metrics", [])
    monkeypatch.setattr(Reader, "away", False)
    outside: Any = None
    return CurveFeed(outside, lambda: 100.0)


def test_a_sweep_has_no_curves_and_no_age_before_the_first_answer(feed: CurveFeed) -> None:
    feed.follow({SWEEP: sweep_with().spec})
    assert (feed.curves(SWEEP), feed.age_s(SWEEP)) == ({}, None)
    assert feed.constraint_metrics(SWEEP) == {}


def test_the_curves_of_the_objective_are_read(feed: CurveFeed) -> None:
    for _ in range(2):  # following again begins nothing anew
        feed.follow({SWEEP: sweep_with().spec})
    feed.read_once()
    assert (feed.curves(SWEEP), feed.age_s(SWEEP)) == (POINTS, 0.0)
    assert Reader.metrics == ["val_loss"]


@pytest.mark.parametrize(("target", "read"), [(0.1, ["latency"]), (None, [])])
def test_of_the_metrics_beside_it_those_are_read_whose_bounds_end_the_sweep(
    feed: CurveFeed, target: float | None, read: list[str]
) -> None:
    objective = {"metric": "val_loss", "target": target}
    metrics = [{"name": "latency", "at_most": 20}, {"name": "size"}]
    feed.follow({SWEEP: sweep_with(objective=objective, metrics=metrics).spec})
    feed.read_once()
    assert feed.constraint_metrics(SWEEP) == {name: POINTS for name in read}
    assert Reader.metrics == ["val_loss", *read]


def test_an_mlflow_that_is_away_leaves_the_curves_and_lets_them_age(
    feed: CurveFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed.follow({SWEEP: sweep_with().spec})
    feed.read_once()
    monkeypatch.setattr(Reader, "away", True)
    feed.clock = lambda: 130.0
    feed.read_once()
    assert (feed.curves(SWEEP), feed.age_s(SWEEP)) == (POINTS, 30.0)


def test_a_sweep_that_has_gone_is_forgotten(feed: CurveFeed) -> None:
    feed.follow({SWEEP: sweep_with().spec})
    feed.read_once()
    feed.follow({})
    assert (feed.curves(SWEEP), feed.age_s(SWEEP)) == ({}, None)


def test_the_background_work_ends_when_it_is_told_to(feed: CurveFeed) -> None:
    feed.follow({SWEEP: sweep_with().spec})
    feed.start()
    feed.close()
    assert feed._thread is not None
    assert not feed._thread.is_alive()


class Passing:
    """An event that never comes, and time that passes only while somebody waits for it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def wait(self, timeout_s: float) -> bool:
        self.now_s += timeout_s
        return False


@pytest.fixture
def passing(feed: CurveFeed, monkeypatch: pytest.MonkeyPatch) -> Passing:
    """The time of the feed's pauses."""
    found = Passing()
    monkeypatch.setattr(feed, "_stop", found)
    monkeypatch.setattr("hermes_ops.airflow.control.feeds.time.monotonic", lambda: found.now_s)
    return found


def test_a_feed_that_is_not_woken_reads_after_a_second(feed: CurveFeed, passing: Passing) -> None:
    feed._pause(1.0, 0.5)
    assert passing.now_s == pytest.approx(1.0, abs=0.06)


def test_metrics_that_were_sent_are_read_sooner_but_not_before_the_least_pause(
    feed: CurveFeed, passing: Passing
) -> None:
    metrics_wake_file().wake()
    feed._pause(1.0, 0.5)
    assert passing.now_s == pytest.approx(0.5, abs=0.06)
    feed._pause(passing.now_s + 1.0, passing.now_s + 0.5)  # one nudge, one sooner reading
    assert passing.now_s == pytest.approx(1.5, abs=0.12)


def test_only_a_changed_curve_is_news_and_it_is_told_once(
    feed: CurveFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {0: ((1, 0.5, 1_000),)}
    found = SimpleNamespace(points=points, constraint_metrics={})
    monkeypatch.setattr(Reader, "fetch", lambda own, ref: SimpleNamespace(**vars(found)))
    feed.follow({SWEEP: sweep_with().spec})
    assert not feed.has_news()
    feed.read_once()
    assert (feed.has_news(), feed.has_news()) == (True, False)
    feed.read_once()
    assert not feed.has_news()
    found.points = {0: (*points[0], (2, 0.4, 2_000))}
    feed.read_once()
    assert feed.has_news()


def test_a_curve_that_a_reader_finds_unchanged_is_no_news(feed: CurveFeed) -> None:
    """Readers keep a curve's points as they are, object and all, until it grows."""
    first, second = LatestMetric(0.5, 1, 1_000), LatestMetric(0.4, 2, 2_000)
    latest = [first]

    def trials(*_: Any, **__: Any) -> list[TrialRun]:
        metrics = {"val_loss": latest[-1]}
        return [TrialRun(0, "run-0", {}, "running", {}, metrics, "RUNNING", 1, None)]

    tracker: Any = SimpleNamespace(trials=trials, history=lambda *_: tuple(latest))
    plan = sweep_with().spec
    feed.follow({SWEEP: plan})
    feed._readers = {SWEEP: (CurveReader(tracker, "val_loss"), plan.ref)}
    news = []
    for known in ([first], [first], [first, second], [first, second]):
        latest[:] = known
        feed.read_once()
        news.append(feed.has_news())
    assert news == [True, False, True, False]


@pytest.mark.parametrize(
    ("took_s", "after_s"), [(0.01, 0.5), (0.1, 1.0), (0.2, 2.0), (1.8, 4.8), (10.0, 13.0)]
)
def test_a_reading_that_was_slow_once_does_not_hide_new_values_for_long(
    took_s: float, after_s: float
) -> None:
    assert woken_after_s(took_s) == pytest.approx(after_s)
