"""What the alerts stand on: idle GPUs, slow starts, silent trials, old checkpoints, failures."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.airflow.control.monitoring import Monitor
from hermes_ops.airflow.control.pool_health import (
    FIRST_VALUE_S,
    SILENT_S,
    FailureCounter,
    idle_gpus,
    is_silent,
    longest_start_s,
    oldest_checkpoint_s,
    silent_trials,
)
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.core.model import Gpu, Job, JobId, Phase, Point, Snapshot, SweepId
from tests.unit.airflow.builders import lease, row, segment

NOW_S = 100_000.0
SWEEP = SweepId("s")


def job(number: int, phase: Phase, *gpus: int, **changes: Any) -> Job:
    made = Job(JobId(f"s/{number}"), SWEEP, 0.0, phase, gpus_held=gpus)
    return replace(made, **changes)


def pool(*jobs: Job, gpus: int = 4) -> Snapshot:
    return Snapshot(NOW_S, tuple(Gpu(i, "ab"[i // 2]) for i in range(gpus)), jobs)


# -- idle GPUs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.PENDING, Phase.WAITING])
def test_free_gpus_are_idle_while_a_trial_waits(phase: Phase) -> None:
    assert idle_gpus(pool(job(0, Phase.RUNNING, 0), job(1, phase)), {}) == 3


def test_free_gpus_that_nobody_waits_for_are_not_idle() -> None:
    assert idle_gpus(pool(job(0, Phase.RUNNING, 0), job(1, Phase.ENDED)), {}) == 0


def test_no_gpu_is_idle_where_all_are_held() -> None:
    held = [job(n, Phase.RUNNING, n) for n in range(4)]
    assert idle_gpus(pool(*held, job(9, Phase.WAITING)), {}) == 0


def test_trials_beyond_the_limit_of_their_sweep_do_not_wait_for_gpus() -> None:
    leaving = pool(job(0, Phase.RUNNING, 0), job(1, Phase.STOPPING), job(2, Phase.PENDING))
    assert idle_gpus(leaving, {SWEEP: 2}) == 0
    assert idle_gpus(leaving, {SWEEP: 3}) == 3
    other = job(3, Phase.WAITING, sweep=SweepId("other"))
    assert idle_gpus(pool(*leaving.jobs, other), {SWEEP: 2}) == 3


def test_a_trial_that_fits_on_no_free_gpus_does_not_count() -> None:
    held = [job(n, Phase.RUNNING, n) for n in range(3)]
    assert idle_gpus(pool(*held, job(9, Phase.WAITING, min_gpus=2)), {}) == 0
    elsewhere = job(9, Phase.WAITING, nodes=("a",))
    assert idle_gpus(pool(*held, elsewhere), {}) == 0
    assert idle_gpus(pool(*held, replace(elsewhere, nodes=("a", "b"))), {}) == 1


# -- starts --------------------------------------------------------------------------------------


def test_the_longest_start_is_that_of_the_oldest_grant() -> None:
    slow = job(0, Phase.STARTING, 0, started_s=NOW_S - 300)
    quick = job(1, Phase.STARTING, 1, started_s=NOW_S - 2)
    assert longest_start_s(pool(quick, slow)) == 300
    assert longest_start_s(pool(replace(slow, phase=Phase.RUNNING))) == 0


# -- silent trials -------------------------------------------------------------------------------


def running(*values_s: float, trained_s: float, began_s: float = 0.0, at_start: int = 0) -> Job:
    """A trial whose values came after so many seconds of training; this segment began later."""
    curve = tuple(Point(n, 0.5, s) for n, s in enumerate(values_s, start=1))
    started_s = NOW_S - (trained_s - began_s)
    return job(0, Phase.RUNNING, 0, 1, curve=curve, started_s=started_s, service_at_s=NOW_S,
               service_gpu_s=2 * trained_s, steps_at_start=at_start,
               min_gpus=2, max_gpus=2)  # fmt: skip


def test_a_trial_that_reports_at_its_usual_pace_is_not_silent() -> None:
    hourly = running(3_600, 7_200, 10_800, trained_s=10_800 + 3 * 3_600)
    assert not is_silent(hourly, NOW_S)
    assert is_silent(replace(hourly, service_gpu_s=2 * (10_801 + 3 * 3_600)), NOW_S)


def test_a_trial_with_fast_steps_may_validate_and_save_for_twenty_minutes() -> None:
    assert not is_silent(running(1, 2, 3, trained_s=3 + SILENT_S), NOW_S)
    assert is_silent(running(1, 2, 3, trained_s=4 + SILENT_S), NOW_S)


def test_a_trial_without_any_value_is_given_longer() -> None:
    assert not is_silent(running(trained_s=FIRST_VALUE_S), NOW_S)
    assert is_silent(running(trained_s=FIRST_VALUE_S + 1), NOW_S)


def test_a_resumed_trial_may_repeat_the_steps_since_its_checkpoint() -> None:
    ten = tuple(1_000.0 * n for n in range(1, 11))
    resumed = running(*ten, trained_s=10_000 + 12_000, began_s=10_000, at_start=0)
    assert not is_silent(resumed, NOW_S)
    assert is_silent(replace(resumed, steps_at_start=10), NOW_S)


def test_only_running_trials_are_silent() -> None:
    silent = running(1, 2, trained_s=50_000)
    assert silent_trials(pool(silent)) == 1
    assert silent_trials(pool(replace(silent, phase=Phase.STARTING))) == 0


# -- checkpoints ---------------------------------------------------------------------------------


def trial(**changes: Any) -> TrialRecords:
    return TrialRecords(row(0, "running"), lease(), None, segment(**changes))


def test_the_age_of_a_checkpoint_counts_while_its_trial_trains() -> None:
    fresh = trial(started_s=NOW_S - 900, checkpointed_s=NOW_S - 60)
    old = trial(started_s=NOW_S - 900, checkpointed_s=NOW_S - 700)
    resumed = trial(started_s=NOW_S - 30, checkpointed_s=NOW_S - 90_000)
    assert oldest_checkpoint_s([fresh, old, resumed], NOW_S) == 700
    assert oldest_checkpoint_s([resumed], NOW_S) == 30


def test_a_trial_that_never_writes_a_checkpoint_has_none_that_is_old() -> None:
    assert oldest_checkpoint_s([trial(started_s=0.0)], NOW_S) == 0


# -- failures ------------------------------------------------------------------------------------


def failed(number: int, failures: int, cause: str = "other") -> TrialRecords:
    return TrialRecords(row(number), lease(), None, segment(failures=failures, cause=cause))


def found(
    counter: FailureCounter, *trials: TrialRecords, sweep: str = "s"
) -> list[tuple[str, int]]:
    return list(counter.new_failures({sweep: trials}))


def test_each_failure_counts_once() -> None:
    counter = FailureCounter()
    assert found(counter, failed(0, 0)) == []
    assert found(counter, failed(0, 1), failed(1, 2, "diverged")) == [("other", 1), ("diverged", 2)]
    assert found(counter, failed(0, 1), failed(1, 2, "diverged")) == []
    assert found(counter, failed(0, 2), failed(1, 2, "diverged")) == [("other", 1)]


def test_failures_from_before_the_controller_began_do_not_count() -> None:
    counter = FailureCounter()
    assert found(counter, failed(0, 3)) == []
    assert found(counter, failed(0, 4)) == [("other", 1)]


def test_a_trial_whose_failures_are_forgiven_counts_its_next_one() -> None:
    counter = FailureCounter()
    found(counter, failed(0, 3))
    assert found(counter, failed(0, 0)) == []
    assert found(counter, failed(0, 1)) == [("other", 1)]


def test_a_sweep_that_goes_on_later_does_not_count_anew() -> None:
    counter = FailureCounter()
    found(counter, failed(0, 1))
    assert found(counter, sweep="other") == []
    assert found(counter, failed(0, 1)) == []


# -- the exporter --------------------------------------------------------------------------------


def value(monitor: Monitor, name: str, **labels: str) -> float | None:
    return monitor.registry.get_sample_value(name, {"pool": "gpus", **labels})


def test_a_round_shows_how_its_trials_get_on() -> None:
    monitor = Monitor()
    slow = job(1, Phase.STARTING, 2, started_s=NOW_S - 7)
    snapshot = pool(slow, running(1, 2, trained_s=50_000), job(2, Phase.PENDING))
    monitor.observed(snapshot)
    assert value(monitor, "hermes_gpus_idle") == 1
    assert value(monitor, "hermes_trial_start_seconds") == 7
    assert value(monitor, "hermes_trials_silent") == 1
    monitor.observed(snapshot, {SWEEP: 2})
    assert value(monitor, "hermes_gpus_idle") == 0
    old = trial(started_s=NOW_S - 900, checkpointed_s=NOW_S - 700)
    monitor.observed_trials({"s": [old, failed(1, 0)]}, NOW_S)
    monitor.observed_trials({"s": [old, failed(1, 2)]}, NOW_S)
    assert value(monitor, "hermes_checkpoint_age_seconds") == 700
    assert value(monitor, "hermes_trial_failures_total", cause="other") == 2


def test_the_disk_is_that_of_the_state_folder(tmp_path: Path) -> None:
    monitor = Monitor()
    monitor.watch_disk(tmp_path)
    free = value(monitor, "hermes_state_folder_free_bytes") or 0.0
    assert 0 < free <= (value(monitor, "hermes_state_folder_size_bytes") or 0.0)


def test_a_folder_that_cannot_be_read_has_no_size(tmp_path: Path) -> None:
    monitor = Monitor()
    monitor.watch_disk(tmp_path / "gone")
    assert math.isnan(value(monitor, "hermes_state_folder_free_bytes") or 0.0)
