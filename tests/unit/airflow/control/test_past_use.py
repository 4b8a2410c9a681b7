from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest

from hermes_ops.airflow.control.quota_settings import past_use
from hermes_ops.airflow.metadata_rows import PastRun, RunRow
from hermes_ops.airflow.records import encode
from hermes_ops.config.pool_quota import parse_quota
from tests.unit.airflow.builders import run_row, segment

HALF_LIFE_S = 3_600.0
VISION = parse_quota(
    {"teams": [{"name": "vision", "users": ["ann"]}], "half_life_hours": 1.0}, "test"
)
NOW_S = 1_000_000.0


class Records:
    """Airflow's records of some runs, each with the segment of one trial."""

    def __init__(self, *runs: tuple[RunRow, Any]) -> None:
        self.runs = runs
        self.since_s = 0.0

    def single_connection(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def sweeps_since(self, since_s: float, most: int | None) -> tuple[PastRun, ...]:
        self.since_s = since_s
        return tuple(PastRun(run, None) for run, _ in self.runs[:most])

    def segments(self, run: RunRow, task_id: str) -> tuple[str, ...]:
        assert task_id == "trial"
        found = next(record for own, record in self.runs if own is run)
        return (json.dumps(encode(found)), "null")


def used(*runs: tuple[RunRow, Any]) -> dict[str, float]:
    records: Any = Records(*runs)
    use = past_use(records, "gpus", VISION, NOW_S)
    assert records.since_s == NOW_S - 5 * HALF_LIFE_S
    return dict(use.teams.gpu_s)


def of_user(user: str, **changes: Any) -> RunRow:
    return replace(run_row(**changes), triggered_by=user)


def ended(*spans: tuple[float, float], sizes: tuple[int, ...]) -> Any:
    return segment(running=False, spans=spans, sizes=sizes)


def test_a_half_life_ago_counts_half_and_gpus_count_each() -> None:
    short_s = 1e-3
    now = ended((NOW_S - short_s, NOW_S), sizes=(3,))
    before = ended((NOW_S - HALF_LIFE_S - short_s, NOW_S - HALF_LIFE_S), sizes=(1,))
    found = used((of_user("ann"), now), (of_user("bob"), before))
    assert found == pytest.approx({"vision": 3 * short_s, "": short_s / 2}, rel=1e-3)


def test_what_a_trial_used_before_it_began_from_scratch_counts() -> None:
    span = (NOW_S - 1e-3, NOW_S)
    now = replace(ended(span, sizes=(3,)), earlier_spans=(span, span), earlier_sizes=(1, 2))
    assert used((of_user("ann"), now)) == pytest.approx({"vision": 6e-3}, rel=1e-3)


def test_a_running_segment_counts_until_now() -> None:
    runs = segment(started_s=NOW_S - 1e-3, gpus=(0, 1))
    assert used((of_user("ann"), runs)) == pytest.approx({"vision": 2e-3}, rel=1e-3)


def test_gpus_count_for_the_time_for_which_they_were_held_whatever_a_start_is_said_to_take() -> (
    None
):
    span = (NOW_S - 2e-3, NOW_S - 1e-3)
    started_up = replace(ended((NOW_S - 1e-3, NOW_S - 1e-3), sizes=(1,)), held=(span,))
    runs = segment(started_s=NOW_S - 1e-3, gpus=(0, 1), startup_s=1e9)
    assert used((of_user("ann"), started_up)) == pytest.approx({"vision": 1e-3}, rel=1e-3)
    assert used((of_user("ann"), runs)) == pytest.approx({"vision": 2e-3}, rel=1e-3)


def test_a_pod_that_waits_for_a_node_holds_no_gpu_yet() -> None:
    waits = segment(started_s=NOW_S - 9.0, gpus=(0, 1), waited_s=None)
    assert used((of_user("ann"), waits)) == {}


def test_sweeps_of_another_pool_and_records_without_a_segment_do_not_count() -> None:
    span = ended((NOW_S - 9.0, NOW_S), sizes=(1,))
    assert used((of_user("ann", pool="other"), span)) == {}
    assert used((replace(of_user("ann"), sweep={}), span)) == {}


def test_a_future_span_does_not_count() -> None:
    assert used((of_user("ann"), ended((NOW_S + 5.0, NOW_S + 9.0), sizes=(1,)))) == {}


def test_the_gpu_time_of_limited_users_is_counted_from_the_begin_of_the_month_on() -> None:
    data = {
        "teams": [],
        "users": [{"name": "ann", "gpu_hours_per_month": 9.0}, {"name": "bob", "gpus": 1}],
        "half_life_hours": 1.0,
    }
    day_s = 86_400.0
    spans = [(NOW_S - 2 * day_s, NOW_S - 2 * day_s + 5.0), (NOW_S - 9.0, NOW_S)]
    of_each = [(of_user(user), ended(*spans, sizes=(2, 1))) for user in ("ann", "bob")]
    records: Any = Records(*of_each)
    time = past_use(records, "gpus", parse_quota(data, "test"), NOW_S).users
    assert (time.day, time.month) == ((("ann", 9.0),), (("ann", 19.0),))
    assert records.since_s == 0.0  # 1970 began with that month


def test_every_sweep_of_the_month_counts_for_a_limit_of_gpu_hours() -> None:
    data = {"teams": [], "users": [{"name": "ann", "gpu_hours_per_month": 1.0}]}
    second = ended((NOW_S - 2.0, NOW_S - 1.0), sizes=(1,))
    records: Any = Records(*[(of_user("ann"), second) for _ in range(1_500)])
    time = past_use(records, "gpus", parse_quota(data, "test"), NOW_S).users
    assert time.month == (("ann", 1_500.0),)
