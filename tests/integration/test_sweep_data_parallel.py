"""Trials of Horovod and of PyTorch DDP under policies that size them, on a real scheduler."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.integration.samplers import WorkerSampler, sampling

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

SLOTS, EPOCHS, PAUSE_S = 4, 200, 12.0
WAIT_S = 480.0  # a start of four workers on a busy machine
TRIALS, SHORT = 8, 25
TPE = {
    "algorithm": "tpe",
    "seed": 1,
    "max_trials": TRIALS,
    "space": {"rate": {"type": "loguniform", "low": 0.0002, "high": 0.01}},
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("horovod", marks=pytest.mark.horovod),
        pytest.param("ddp", marks=pytest.mark.torch),
    ],
)
def resized(
    request: pytest.FixtureRequest,
    lab: Any,
    harness: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """A trial alone on four slots, and a second one that comes and ends while the first lasts.

    Once the first is let go on its own it may change its size again: its epochs are short then.
    """
    sweep_file = {"horovod": harness.horovod, "ddp": harness.ddp}[request.param]
    folder, log = tmp_path_factory.mktemp("resized"), tmp_path_factory.mktemp("workers")
    first_lasts, second_lasts = harness.slow_file(folder), harness.slow_file(folder)
    looking = WorkerSampler(log)
    with lab.pool(SLOTS), lab.policy("doubling", guard_k=0), sampling(looking):
        first = lab.start(sweep_file("alone", log, first_lasts, EPOCHS, pause=PAUSE_S))
        harness.await_(lambda: first.sizes() == [4] and first.lines(0) > 1, WAIT_S)
        second = lab.start(sweep_file("joins", log, second_lasts, EPOCHS, pause=PAUSE_S))
        harness.await_(lambda: first.sizes()[-1] == 2 and second.sizes() == [2], WAIT_S)
        harness.await_(lambda: second.lines(0) > 1 and len(looking.alive()) == SLOTS, WAIT_S)
        second_lasts.unlink()
        harness.await_(lambda: first.sizes()[-1] == 4 and len(looking.alive()) == SLOTS, WAIT_S)
        first_lasts.unlink()
        for sweep in (first, second):
            sweep.await_end(WAIT_S)
    return first, second, looking


def test_horovod_trials_shrink_for_each_other_and_grow_again(resized: Any) -> None:
    first, second, looking = resized
    assert (first.sizes()[:3], second.sizes()[0]) == ([4, 2, 4], 2)
    assert first.states() == second.states() == {0: "finished"}
    assert {s["outcome"] for s in first.segments(0)[:-1]} == {"preempted"}
    assert looking.most == SLOTS


def test_each_segment_has_a_rank_for_each_of_its_gpus(resized: Any) -> None:
    first, second, looking = resized
    for sweep in (first, second):
        groups = looking.groups(sweep.id)
        assert [len(group) for group in groups] == sweep.sizes()
        for group in groups:
            assert {worker["size"] for worker in group} == {len(group)}
            assert sorted(worker["rank"] for worker in group) == [*range(len(group))]


def test_all_ranks_leave_each_segment_after_the_same_batch(resized: Any) -> None:
    first, second, looking = resized
    for sweep in (first, second):
        for group in looking.groups(sweep.id):
            batches = {looking.batches(worker) for worker in group}
            assert len(batches) == 1
            assert batches != {0}


def test_the_curve_goes_on_without_a_jump(resized: Any) -> None:
    """Each epoch is there once, and none is worse than the one before by more than its noise."""
    for sweep in resized[:2]:
        curve = sweep.curve(0)
        assert [step for step, _ in curve] == list(range(1, EPOCHS + 1))
        assert all(after <= 1.05 * before + 1e-6 for (_, before), (_, after) in pairwise(curve))
        assert curve[-1][1] < 0.1 * curve[0][1]


@pytest.fixture(scope="module")
def searched(lab: Any, harness: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A search for the best of eight Horovod trials under the elastic policy for sweeps."""
    log = tmp_path_factory.mktemp("workers")
    lasts = harness.slow_file(tmp_path_factory.mktemp("searched"))
    looking = WorkerSampler(log)
    content = harness.horovod("search", log, lasts, SHORT, pause=1.5, search=TPE)
    with (
        lab.pool(SLOTS),
        lab.policy("elastic-frontrunner", guard_k=0),
        sampling(looking),
    ):
        sweep = lab.start(content)
        sweep.await_end(WAIT_S)
    return sweep, looking


@pytest.mark.horovod
def test_a_search_whose_trials_change_their_size_finds_the_best_of_them(searched: Any) -> None:
    sweep, _ = searched
    assert sweep.states() == dict.fromkeys(range(TRIALS), "finished")
    assert sum(decision["action"] == "resize" for decision in sweep.decisions()) >= 3
    lowest = {number: min(loss for _, loss in sweep.curve(number)) for number in range(TRIALS)}
    best = sweep.document()["best"]
    assert best["number"] == min(lowest, key=lambda number: lowest[number])


@pytest.mark.horovod
def test_never_more_workers_of_a_search_live_than_there_are_slots(searched: Any) -> None:
    sweep, looking = searched
    assert looking.most == SLOTS
    assert looking.alive() == []
    assert {size for number in range(TRIALS) for size in sweep.sizes(number)} > {1}
