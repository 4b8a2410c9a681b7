"""Horovod trials under a policy that sizes them, on a real scheduler."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.horovod, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("HERMES_TEST_HOROVOD_PYTHON", ROOT / ".venvs/horovod/bin/python"))
SLOTS, EPOCHS = 4, 600
WAIT_S = 240.0  # a start of four workers on a busy machine
VARIABLES = {
    "TF_USE_LEGACY_KERAS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


def _sweep(harness: Any, name: str, log: Path, slow_while: Path) -> Any:
    """Return a sweep of one Horovod trial of 1 to 4 workers."""
    options = ["--rate", "{rate}", "--epochs", str(EPOCHS), "--slow-while", str(slow_while)]
    trial = {
        "gpus": {"min": 1, "max": SLOTS},
        "workers": "one_per_gpu",
        "python": str(PYTHON),
        "environment": {"WORKERS_LOG": str(log), **VARIABLES},
    }
    return harness.config(
        name,
        {"rate": [0.002]},
        "horovod_train.py",
        *options,
        trial=trial,
        budget={"max_epochs": EPOCHS},
    )


def _sizes(sweep: Any) -> list[int]:
    return [len(segment["gpus"]) for segment in sweep.segments(0)]


@pytest.fixture(scope="module")
def resized(lab: Any, harness: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trial alone on four slots, and a second one that comes and ends while the first lasts.

    Once the first is let go on its own it may change its size again: its epochs are short then.
    """
    if not PYTHON.exists():
        message = f"no interpreter with Horovod at {PYTHON}: run make horovod-env"
        if os.environ.get("HERMES_TEST_HOROVOD") == "required":
            pytest.fail(message)
        pytest.skip(message)
    folder, log = tmp_path_factory.mktemp("resized"), tmp_path_factory.mktemp("workers")
    first_lasts, second_lasts = harness.slow_file(folder), harness.slow_file(folder)
    looking = harness.WorkerSampler(log)
    with lab.pool(SLOTS), lab.policy("doubling", guard_k=0), harness.sampling(looking):
        first = lab.start(_sweep(harness, "alone", log, first_lasts))
        harness.await_(lambda: _sizes(first) == [4] and first.lines(0) > 3, WAIT_S)
        second = lab.start(_sweep(harness, "joins", log, second_lasts))
        harness.await_(lambda: _sizes(first)[-1] == 2 and _sizes(second) == [2], WAIT_S)
        harness.await_(lambda: second.lines(0) > 3 and len(looking.alive()) == SLOTS, WAIT_S)
        second_lasts.unlink()
        second.await_end()
        harness.await_(lambda: _sizes(first)[-1] == 4 and len(looking.alive()) == SLOTS, WAIT_S)
        first_lasts.unlink()
        first.await_end()
    return first, second, looking


def test_horovod_trials_shrink_for_each_other_and_grow_again(resized: Any) -> None:
    first, second, looking = resized
    assert (_sizes(first)[:3], _sizes(second)[0]) == ([4, 2, 4], 2)
    assert first.states() == second.states() == {0: "finished"}
    assert {s["outcome"] for s in first.segments(0)[:-1]} == {"preempted"}
    assert looking.most == SLOTS


def test_each_segment_has_a_rank_for_each_of_its_gpus(resized: Any) -> None:
    first, second, looking = resized
    expected = sorted([*_sizes(first), *_sizes(second)])
    sizes = [fact["size"] for fact in looking.starts if fact["rank"] == 0]
    assert sorted(sizes) == expected
    for size in set(expected):
        ranks = [fact["rank"] for fact in looking.starts if fact["size"] == size]
        assert sorted(ranks) == sorted([*range(size)] * expected.count(size))


def test_the_curve_goes_on_without_a_jump(resized: Any) -> None:
    """Each epoch is there once, and none is worse than the one before by more than its noise."""
    for sweep in resized[:2]:
        curve = sweep.curve(0)
        assert [step for step, _ in curve] == list(range(1, EPOCHS + 1))
        assert all(after <= 1.05 * before + 1e-6 for (_, before), (_, after) in pairwise(curve))
        assert curve[-1][1] < 0.1 * curve[0][1]
