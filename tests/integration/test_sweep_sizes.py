"""Trials that take a range of GPUs: they grow when GPUs are free, and shrink when others come."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

RANGE = {"min": 1, "max": 2}


@pytest.fixture(scope="module")
def resized(lab: Any, harness: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trial alone on two GPUs, and a second one that comes and goes while the first one lasts."""
    return harness.resized_by_another(lab, tmp_path_factory.mktemp("resized"))


def test_a_trial_shrinks_for_another_and_grows_again_when_that_has_ended(resized: Any) -> None:
    first, second, _ = resized
    assert (first.sizes(), second.sizes()) == ([2, 1, 2], [1])
    assert first.states() == second.states() == {0: "finished"}
    outcomes = [segment["outcome"] for segment in first.segments(0)]
    assert outcomes == ["preempted", "preempted", "finished"]
    assert first.log("trial", 0).count("Trial 0 keeps its slots") == 2


def test_the_pool_is_never_over_committed_by_a_resize(resized: Any) -> None:
    *_, sampler = resized
    assert sampler.most == 2
    assert sampler.doubly_held == []


def test_a_resized_trial_has_one_run_and_the_curve_of_one_that_was_never_stopped(
    resized: Any, harness: Any
) -> None:
    first, *_ = resized
    assert set(first.runs()) == {0}
    first.assert_whole(0, harness.alike(1)[0])


def test_the_decisions_and_the_document_say_the_sizes(resized: Any, lab: Any) -> None:
    first, *_ = resized
    resizes = [d for d in first.decisions() if d["action"] == "resize"]
    assert [len(d["gpus"]) for d in resizes] == [1, 2]
    shown = lab.hermes("sweep", "show", first.id, "--json")
    (trial,) = json.loads(shown.stdout)["trials"]
    assert trial["sizes"] == [2, 1, 2]


def test_a_policy_of_one_size_gives_the_least(lab: Any, harness: Any) -> None:
    with lab.policy("fifo"):
        sweep = lab.run(harness.stub("least", harness.alike(1), 3, 0.0, trial={"gpus": RANGE}))
    assert sweep.sizes() == [1]
