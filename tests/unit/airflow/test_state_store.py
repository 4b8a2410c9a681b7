from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException
from airflow.sdk.execution_time.context import NEVER_EXPIRE

from hermes_ops.airflow.client import TaskKey
from hermes_ops.airflow.control.cleanup.state_retention import (
    DAY_S,
    MOST_AT_ONCE,
    PERIOD_S,
    SOON_S,
    PlanValueRetention,
    StateRetention,
)
from hermes_ops.airflow.metadata_rows import StoredKey
from hermes_ops.airflow.records import CONFIG_XCOM
from hermes_ops.airflow.state_store import KeyValues, LastingStore, refused_setting, write_record
from hermes_ops.airflow.sweep.ended_sweep import NUMBERS_XCOM, plan_values
from hermes_ops.airflow.sweep.tasks import PlanOperator
from hermes_ops.errors import HermesError, Unavailable
from tests.unit.airflow.builders import pending, retrying, sweep_with


class DatedStore(dict[str, Any]):
    """A task's state store; keeps with which retention each value was stored last."""

    def __init__(self) -> None:
        self.retentions: dict[str, Any] = {}

    def set(self, key: str, value: Any, *, retention: Any = None) -> None:
        self[key], self.retentions[key] = value, retention

    def delete(self, key: str) -> None:
        self.pop(key, None)


def test_whatever_a_task_stores_never_expires_pieces_too() -> None:
    dated = DatedStore()
    store = LastingStore(dated)
    store.set("hermes_segment", {"epoch": 1})
    large = {"config": {f"p{n}": "x" * 80 for n in range(1_000)}}
    write_record(KeyValues(store.get, store.set, store.delete), "hermes_sweep", large)
    assert len(dated) > 2
    assert set(map(id, dated.retentions.values())) == {id(NEVER_EXPIRE)}


def test_a_store_that_lasts_reads_and_deletes_as_the_tasks_own_does() -> None:
    store = LastingStore(DatedStore())
    store.set("a", 1)
    assert (store.get("a"), store.get("b", 2)) == (1, 2)
    store.delete("a")
    assert store.get("a") is None


def test_airflows_own_defaults_are_not_refused() -> None:
    assert refused_setting() is None


@pytest.mark.parametrize(
    ("variable", "value", "fix"),
    [
        ("AIRFLOW__STATE_STORE__CLEAR_ON_SUCCESS", "True", "Set it to False"),
        ("AIRFLOW__STATE_STORE__BACKEND", "mine.Store", "Remove the setting"),
        ("AIRFLOW__WORKERS__STATE_STORE_BACKEND", "mine.Store", "Remove the setting"),
    ],
)
def test_a_setting_that_loses_records_is_refused_before_a_sweep_is_planned(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, fix: str
) -> None:
    monkeypatch.setenv(variable, value)
    operator = PlanOperator(task_id="plan", trial_task="trial")
    with pytest.raises(AirflowFailException, match=fix):
        operator.execute({"task_state_store": DatedStore()})


def stored(number: int) -> StoredKey:
    return StoredKey("hermes_sweep", "s", "trial", number, "hermes_segment")


class Airflow:
    """Airflow's database and its interface; trials that are named are refused."""

    def __init__(
        self, found: list[StoredKey], errors: dict[int, HermesError] | None = None
    ) -> None:
        self.found, self.errors = found, errors or {}
        self.asked = 0
        self.kept: list[int] = []

    def expiring(self, ended: Any, held: int, most: int) -> tuple[StoredKey, ...]:
        self.asked += 1
        return tuple(self.found[:most])

    def keep_state(self, task: TaskKey, key: str) -> None:
        if (error := self.errors.get(task.map_index)) is not None:
            raise error
        self.kept.append(task.map_index)
        self.found = [s for s in self.found if s.map_index != task.map_index]


def looked(airflow: Airflow, *times_s: float) -> None:
    outside: Any = airflow
    retention: Any = StateRetention(outside, outside)
    for now_s in times_s:
        retention.run_if_due(now_s)
        if retention._thread is not None:
            retention._thread.join()


def test_dated_records_are_looked_for_at_once_and_then_once_an_hour() -> None:
    airflow = Airflow([stored(0), stored(1)])
    looked(airflow, 100.0, 101.0, 100.0 + PERIOD_S - 1)
    assert (airflow.kept, airflow.asked) == ([0, 1], 1)
    looked(airflow, 100.0, 100.0 + PERIOD_S)
    assert airflow.asked == 3


def test_many_dated_records_are_renewed_in_turns() -> None:
    airflow = Airflow([stored(n) for n in range(MOST_AT_ONCE + 5)])
    looked(airflow, 0.0, SOON_S, SOON_S + 1)
    assert airflow.kept == list(range(MOST_AT_ONCE + 5))
    assert airflow.asked == 2


def test_a_record_that_is_refused_costs_no_other_one_its_renewal() -> None:
    airflow = Airflow([stored(n) for n in range(3)], {1: HermesError("too large")})
    looked(airflow, 0.0)
    assert airflow.kept == [0, 2]


def test_an_airflow_that_is_away_is_asked_once_and_again_later() -> None:
    airflow = Airflow([stored(n) for n in range(3)], {0: Unavailable("away")})
    looked(airflow, 0.0)
    assert airflow.kept == []
    airflow.errors = {}
    looked(airflow, PERIOD_S)
    assert airflow.kept == [0, 1, 2]


class XComs(dict[str, Any]):
    """What the plan of a sweep has left in Airflow; keeps what was dated anew."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        self.renewed: list[str] = []

    def xcom(self, task: TaskKey, key: str) -> Any:
        assert (task.task_id, task.map_index) == ("plan", -1)
        return self.get(key)

    def add_xcom(self, task: TaskKey, key: str, value: Any) -> None:
        self[key] = value

    def renew_xcom(self, task: TaskKey, key: str, value: Any) -> None:
        assert self[key] == value
        self.renewed.append(key)


def watched(xcoms: XComs, sweep: Any, *times_s: float) -> None:
    outside: Any = xcoms
    retention = PlanValueRetention(outside)
    for now_s in times_s:
        retention.run_if_due([sweep], now_s)
        if retention._thread is not None:
            retention._thread.join()


def test_what_a_plan_has_left_is_dated_anew_once_a_day() -> None:
    xcoms = XComs(return_value=[0, 1], hermes_config={"a": 1})
    watched(xcoms, sweep_with(pending(0)), DAY_S - 1)
    assert xcoms.renewed == []
    watched(xcoms, sweep_with(pending(0)), DAY_S, DAY_S + 1, 2 * DAY_S - 1)
    assert xcoms.renewed == [NUMBERS_XCOM, CONFIG_XCOM]
    watched(xcoms, sweep_with(pending(0)), DAY_S, 2 * DAY_S)
    assert len(xcoms.renewed) == 6


def test_xcoms_without_which_a_trial_cannot_start_are_restored_soon_after_it_could_not() -> None:
    xcoms = XComs()
    own = sweep_with(pending(0), retrying(1))
    watched(xcoms, own, DAY_S)
    assert xcoms == plan_values(own.spec.record, own.id)
    xcoms.clear()
    watched(xcoms, own, DAY_S, DAY_S + SOON_S - 1)
    assert xcoms.keys() == {NUMBERS_XCOM, CONFIG_XCOM}
    xcoms.clear()
    outside: Any = xcoms
    retention = PlanValueRetention(outside)
    for now_s in (DAY_S, DAY_S + SOON_S):
        xcoms.clear()
        retention.run_if_due([own], now_s)
        assert retention._thread is not None
        retention._thread.join()
        assert xcoms[NUMBERS_XCOM] == list(range(8))


def test_a_sweeps_xcoms_that_cannot_be_renewed_cost_no_round_and_are_renewed_the_next_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Away(XComs):
        is_away = True

        def xcom(self, task: TaskKey, key: str) -> Any:
            if self.is_away:
                raise Unavailable("away")
            return super().xcom(task, key)

    xcoms = Away(return_value=[0], hermes_config={"a": 1})
    outside: Any = xcoms
    retention = PlanValueRetention(outside)
    for now_s in (DAY_S, 2 * DAY_S):
        retention.run_if_due([sweep_with(pending(0))], now_s)
        assert retention._thread is not None
        retention._thread.join()
        if xcoms.is_away:
            assert xcoms.renewed == []
            assert "are not renewed: away" in caplog.text
        xcoms.is_away = False
    assert xcoms.renewed == [NUMBERS_XCOM, CONFIG_XCOM]
