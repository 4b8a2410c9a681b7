"""QSSF and its estimator in tiny worlds."""

from __future__ import annotations

from dataclasses import replace
from threading import Thread
from typing import Any

import pytest

from hermes_ops.core.model import Gpu, Job, Phase, Snapshot
from hermes_ops.policies.qssf import (
    FEWEST,
    Experience,
    PastJob,
    Qssf,
    TrainingSet,
    historical_s,
    learnt_s,
)
from tests.builders import arriving as job

ANN = PastJob("ann", "vc", "resnet50", 1, 0.0, 100.0)


def decide(
    *jobs: Job, gpus: int = 1, memory: Experience | None = None
) -> tuple[list[str], Experience]:
    snapshot = Snapshot(1_000.0, tuple(Gpu(i) for i in range(gpus)), jobs)
    policy = Qssf()
    plan, after = policy.decide(snapshot, policy.initial() if memory is None else memory)
    return [grant.job for grant in plan.grants], after


def test_the_closest_names_of_the_same_user_and_gpus_count_first() -> None:
    jobs = [
        ANN,
        replace(ANN, gpus=2, seconds=900.0),
        replace(ANN, name="transformer", seconds=5_000.0),
        replace(ANN, user="bob", seconds=7_000.0),
    ]
    assert historical_s(jobs, replace(ANN, name="resnet5")) == 100.0
    assert historical_s(jobs, replace(ANN, gpus=8)) == 500.0  # the name, with any number of GPUs
    assert historical_s(jobs, replace(ANN, name="zzz")) == 2_000.0  # the user
    assert historical_s(jobs, replace(ANN, user="eve")) == 3_250.0  # all
    assert historical_s([], ANN) is None


def past_of_two_users() -> tuple[PastJob, ...]:
    short = [replace(ANN, submitted_s=3_600.0 * n, seconds=50.0 + n) for n in range(FEWEST)]
    return (*short, *(replace(p, user="bob", seconds=p.seconds * 100) for p in short))


def test_the_model_learns_whose_jobs_are_long_and_says_the_same_twice() -> None:
    training = TrainingSet(1, past_of_two_users())
    short_s, long_s = learnt_s(training, ANN), learnt_s(training, replace(ANN, user="bob"))
    assert short_s is not None
    assert long_s is not None
    assert 10 * short_s < long_s
    assert learnt_s(TrainingSet(2, past_of_two_users()), ANN) == short_s


def test_fitting_a_model_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads of scikit-learn now and then leave the process without warning filters."""
    monkeypatch.setattr(Thread, "start", lambda thread: pytest.fail(f"starts {thread}"))
    assert learnt_s(TrainingSet(3, past_of_two_users()), ANN) is not None


def test_no_model_is_fitted_on_few_jobs() -> None:
    assert learnt_s(TrainingSet(1, (ANN,) * (FEWEST - 1)), ANN) is None


def known(*past: PastJob) -> Experience:
    return Experience(ended=past, training=TrainingSet(len(past), past), seen=len(past))


def test_the_job_that_is_predicted_to_be_shortest_starts_first() -> None:
    memory = known(ANN, replace(ANN, user="bob", seconds=10.0))
    jobs = (job(0, user="ann", model_name="resnet50"), job(1, user="bob", model_name="resnet50"))
    assert decide(*jobs, memory=memory)[0] == ["s/1"]


def test_the_prediction_counts_every_gpu() -> None:
    jobs = (job(0, user="ann", min_gpus=4), job(1, user="ann", min_gpus=1))
    assert decide(*jobs, gpus=4, memory=known(ANN))[0] == ["s/1"]


def test_what_runs_is_never_stopped() -> None:
    runs = job(0, user="ann", phase=Phase.RUNNING, gpus_held=(0,))
    memory = known(ANN, replace(ANN, user="bob", seconds=1.0))
    assert decide(runs, job(1, user="bob"), memory=memory)[0] == ["s/0"]


def test_the_shortest_blocks_the_line_of_its_virtual_cluster_only() -> None:
    memory = known(ANN, replace(ANN, user="bob", seconds=1.0))
    runs = job(0, phase=Phase.RUNNING, gpus_held=(0,))
    wide = job(1, user="bob", virtual_cluster="a", min_gpus=3)
    behind = job(2, user="ann", virtual_cluster="a")
    other = job(3, user="ann", virtual_cluster="b")
    assert decide(runs, wide, behind, other, gpus=3, memory=memory)[0] == ["s/0", "s/3"]


def test_run_times_are_learnt_from_ended_jobs_once_each() -> None:
    ended = job(0, user="ann", phase=Phase.ENDED, service_gpu_s=80.0, min_gpus=2)
    _, memory = decide(ended, job(1))
    _, memory = decide(ended, job(1), memory=memory)
    assert [past.seconds for past in memory.ended] == [40.0]
    assert memory.seen == 1


def test_a_prediction_is_made_once() -> None:
    waits = job(1, user="ann", min_gpus=2)
    _, memory = decide(waits, gpus=1, memory=known(ANN))
    assert memory.predicted == ((waits.id, 200.0),)
    longer = replace(memory, ended=(replace(ANN, seconds=900.0),))
    assert decide(waits, gpus=1, memory=longer)[1].predicted == ((waits.id, 200.0),)


def test_the_model_is_fitted_anew_only_after_a_quarter_more() -> None:
    memory = known(*past_of_two_users())
    fitted = memory.training
    for number in range(FEWEST):
        ended = job(number, phase=Phase.ENDED, service_gpu_s=5.0)
        _, memory = decide(ended, memory=memory)
        if memory.training != fitted:
            break
    assert number + 1 == len(fitted.jobs) // 4


@pytest.mark.parametrize(
    "parameters",
    [{"history_weight": 2.0}, {"remembered": 0}, {"remembered": 2.5}, {"placement": "x"}],
)
def test_impossible_parameters_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=r"history_weight|remembered|placement"):
        Qssf(**parameters)


def test_the_shortest_blocks_its_line_too_while_no_node_has_room_for_it() -> None:
    nodes = tuple(Gpu(i, f"node-{i // 3}") for i in range(6))
    runs = [job(n, phase=Phase.RUNNING, gpus_held=(3 * n,)) for n in (0, 1)]
    wide = job(2, user="bob", virtual_cluster="a", min_gpus=3)
    behind = job(3, user="ann", virtual_cluster="a")
    other = job(4, user="ann", virtual_cluster="b", min_gpus=2)
    snapshot = Snapshot(1_000.0, nodes, (*runs, wide, behind, other))
    plan, _ = Qssf().decide(snapshot, known(ANN, replace(ANN, user="bob", seconds=1.0)))
    assert [grant.job for grant in plan.grants] == ["s/0", "s/1", "s/4"]


def test_a_job_whose_node_has_left_the_pool_blocks_nobody() -> None:
    away = job(1, phase=Phase.WAITING, nodes=("elsewhere",))
    assert decide(away, job(2), memory=known(ANN))[0] == ["s/2"]
