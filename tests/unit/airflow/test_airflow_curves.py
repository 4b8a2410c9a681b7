from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.airflow.control.curves import CurveFeed
from hermes_ops.errors import Unavailable
from tests.unit.airflow.worlds import SWEEP, book

POINTS = {0: ((1, 0.5, 1_000),)}


class Reader:
    """Reads what it is given; `away` while MLflow does not answer."""

    away = False
    metrics: list[str] = []  # noqa: RUF012 - one for all readers of a test

    def __init__(self, tracker: Any, metric: str, *, beside: Iterable[str]) -> None:
        self.beside = {name: POINTS for name in beside}
        self.metrics += [metric, *self.beside]

    def read(self, ref: Any) -> Any:
        if self.away:
            raise Unavailable("MLflow did not answer")
        return SimpleNamespace(points=POINTS, beside=self.beside)


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> CurveFeed:
    monkeypatch.setattr("hermes_ops.tracking.CurveReader", Reader)
    monkeypatch.setattr(Reader, "metrics", [])
    monkeypatch.setattr(Reader, "away", False)
    outside: Any = None
    return CurveFeed(outside, lambda: 100.0)


def test_a_sweep_has_no_curves_and_no_age_before_the_first_answer(feed: CurveFeed) -> None:
    feed.follow({SWEEP: book().plan})
    assert (feed.curves(SWEEP), feed.age_s(SWEEP)) == ({}, None)
    assert feed.beside(SWEEP) == {}


def test_the_curves_of_the_objective_are_read(feed: CurveFeed) -> None:
    for _ in range(2):  # following again begins nothing anew
        feed.follow({SWEEP: book().plan})
    feed.read_once()
    assert (feed.curves(SWEEP), feed.age_s(SWEEP)) == (POINTS, 0.0)
    assert Reader.metrics == ["val_loss"]


@pytest.mark.parametrize(("target", "read"), [(0.1, ["latency"]), (None, [])])
def test_of_the_metrics_beside_it_those_are_read_whose_bounds_end_the_sweep(
    feed: CurveFeed, target: float | None, read: list[str]
) -> None:
    objective = {"metric": "val_loss", "target": target}
    metrics = [{"name": "latency", "at_most": 20}, {"name": "size"}]
    feed.follow({SWEEP: book(objective=objective, metrics=metrics).plan})
    feed.read_once()
    assert feed.beside(SWEEP) == {name: POINTS for name in read}
    assert Reader.metrics == ["val_loss", *read]


def test_an_mlflow_that_is_away_leaves_the_curves_and_lets_them_age(
    feed: CurveFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed.follow({SWEEP: book().plan})
    feed.read_once()
    monkeypatch.setattr(Reader, "away", True)
    feed.clock = lambda: 130.0
    feed.read_once()
    assert (feed.curves(SWEEP), feed.age_s(SWEEP)) == (POINTS, 30.0)


def test_a_sweep_that_has_gone_is_forgotten(feed: CurveFeed) -> None:
    feed.follow({SWEEP: book().plan})
    feed.read_once()
    feed.follow({})
    assert (feed.curves(SWEEP), feed.age_s(SWEEP)) == ({}, None)


def test_the_background_work_ends_when_it_is_told_to(feed: CurveFeed) -> None:
    feed.follow({SWEEP: book().plan})
    feed.start()
    feed.close()
    assert feed._thread is not None
    assert not feed._thread.is_alive()
