"""The simulation beside which `bench compare_live_elastic` puts what it has measured."""

from __future__ import annotations

import pytest

from bench.elastic_live import SIZES, Contest, LiveJob, compared, costs_of, epoch_seconds

EPOCHS_S = {1: 1.0, 2: 0.6, 3: 0.45, 4: 0.4}


def live(epochs: int, known_s: float, took_s: float, *, resized: bool = False) -> LiveJob:
    """Return a job that began to train 2 s after it was known, and 1 s after it was resized."""
    first = (known_s, known_s + 1.5, known_s + 2.0, 4)
    again = (known_s + 10.0, known_s + 10.75, known_s + 11.0, 2)
    seen = tuple((size, seconds) for size, seconds in EPOCHS_S.items())
    starts = (first, again) if resized else (first,)
    return LiveJob(epochs, known_s, known_s + took_s, starts, (0.25,) * resized, seen)


def test_an_epoch_takes_the_median_by_workers_and_that_of_the_script_where_none_was_seen() -> None:
    assert epoch_seconds([live(5, 0.0, 9.0), live(5, 0.0, 9.0)]) == EPOCHS_S
    assert sorted(epoch_seconds([])) == list(SIZES)


def test_a_resize_costs_what_those_of_the_policy_did_and_a_first_start_more() -> None:
    costs, first_s = costs_of([live(5, 0.0, 9.0), live(5, 0.0, 9.0, resized=True)], [])
    assert (costs.checkpoint_s, costs.handover_s, costs.startup_s) == (0.25, 0.75, 0.25)
    assert costs.handover_s + first_s == pytest.approx(2.0)


def test_a_policy_without_resizes_takes_the_costs_of_the_others() -> None:
    costs, _ = costs_of([live(5, 0.0, 9.0)], [live(5, 0.0, 9.0, resized=True)])
    assert costs.handover_s == 0.75


def test_a_job_of_fixed_size_takes_its_start_and_its_epochs() -> None:
    jobs = [live(10, 100.0, 8.2)]
    found = compared(Contest("fifo", 2), jobs, EPOCHS_S, costs_of(jobs, jobs))
    assert found["simulated_mean_completion_s"] == pytest.approx(8.0)
    assert found["measured_mean_completion_s"] == pytest.approx(8.2)
    assert found["relative"] == pytest.approx(8.0 / 8.2 - 1.0, abs=1e-4)


def test_a_job_makes_way_for_another_in_the_simulation_too() -> None:
    jobs = [live(100, 0.0, 60.0, resized=True), live(100, 30.0, 60.0)]
    found = compared(Contest("doubling"), jobs, EPOCHS_S, costs_of(jobs, jobs))
    assert found["simulated_resizes"] >= 1
    assert found["simulated_makespan_s"] > 42.0  # of one job alone on all GPUs
