"""One sweep of eight trials as pods on four GPUs: preempted, resumed, all accounts agree."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from tests.integration import harness
from tests.k8s.conftest import preempted_with_the_same_curve
from tests.k8s.faults import pods_seen

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(1500)]

RATES = [0.01, 0.02, 0.03, 0.04, 0.6, 0.7, 0.8, 0.9]  # the last ones fall fastest
EPOCHS, PAUSE_S, GPUS = 16, 0.8, 4
SWEEP_S = 600.0


@pytest.fixture(scope="module", params=[False, True], ids=["worker", "triggerer"])
def told(lab: Any, request: pytest.FixtureRequest) -> Any:
    """The sweep, and what was seen of its pods meanwhile; they are held by a worker or not."""
    pod = {"deferrable": request.param}
    content = lab.pod_sweep("pods", RATES, EPOCHS, PAUSE_S, pod=pod)
    with lab.policy("hermes", guard_k=0), lab.sampled_pods() as sampler:
        sweep = lab.start(content)
        sweep.await_end(SWEEP_S)
    return sweep, sampler


def test_every_trial_of_pods_is_finished_and_all_accounts_agree(told: Any) -> None:
    sweep, _ = told
    tasks = sweep.tasks()
    assert sweep.state == "success"
    assert sweep.states() == dict.fromkeys(range(len(RATES)), "finished")
    assert {tasks["trial", n]["state"] for n in range(len(RATES))} == {"success"}
    assert {tasks["trial", n]["try_number"] for n in range(len(RATES))} == {1}


def test_a_trial_preempted_as_a_pod_goes_on_with_the_same_curve(told: Any) -> None:
    sweep, _ = told
    for number in preempted_with_the_same_curve(sweep, RATES, EPOCHS):
        outcomes = [segment["outcome"] for segment in sweep.segments(number)]
        assert outcomes == ["preempted"] * (len(outcomes) - 1) + ["finished"]


def test_no_more_gpus_are_used_than_there_are_and_none_by_two_pods(told: Any) -> None:
    sweep, sampler = told
    assert 1 <= sampler.most_gpus <= GPUS
    assert sampler.twice == []
    held = []
    for number in range(len(RATES)):
        for pod, segment in zip(pods_seen(sweep, number), sweep.segments(number), strict=True):
            held.append((pod["devices"], pod["started_s"], segment["end_s"]))
    assert all(device for device, _, _ in held)
    assert len({device for device, _, _ in held}) == GPUS
    for (one, begun, ended), (other, begun_too, ended_too) in combinations(held, 2):
        assert one != other or ended <= begun_too or ended_too <= begun


def test_a_pod_is_not_root_has_no_token_and_sees_its_own_folder_alone(told: Any) -> None:
    sweep, _ = told
    for fact in (fact for number in range(len(RATES)) for fact in pods_seen(sweep, number)):
        assert fact["user"] > 0
        assert (fact["token"], fact["root_writable"], fact["seen"]) == (False, False, ["trial"])
        assert fact["cuda"] == "0"


def test_the_log_of_the_pods_is_the_tasks_log(told: Any) -> None:
    sweep, _ = told
    log = sweep.log("trial", 7)
    assert "devices GPU-" in log
    for number in range(len(RATES)):
        log = sweep.log("trial", number)
        assert all(f"epoch={epoch} loss=" in log for epoch in range(1, EPOCHS + 1))


def test_no_pod_is_left(told: Any, lab: Any) -> None:
    sweep, _ = told
    harness.await_(lambda: not lab.cluster.pods(sweep=sweep.id), 120.0)  # fails if they stay
    assert lab.cluster.pods(sweep=sweep.id) == []
