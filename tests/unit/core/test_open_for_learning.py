from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.model import Gpu, Job, Phase, Plan, Snapshot, SweepId
from hermes_ops.core.plan import check
from hermes_ops.core.sweep_limits import OpenForLearning
from hermes_ops.core.wrapper import Wrapper
from hermes_ops.policies import make_policy
from tests.builders import granted, trial

LEARNS = frozenset({SweepId("s")})


def plan(*jobs: Job, gpus: int = 2, per_gpu: int = 2, name: str = "fifo") -> Plan:
    snapshot = Snapshot(100.0, tuple(Gpu(n) for n in range(gpus)), jobs)
    policy = OpenForLearning(make_policy(name, {}), LEARNS, per_gpu)
    found, _ = policy.decide(snapshot, policy.initial())
    check(snapshot, found)
    return found


def test_a_search_that_learns_opens_no_more_trials_than_the_bound() -> None:
    open_ones = (trial(0, 1.0), trial(1, 1.0), trial(2, 1.0))
    full = (*open_ones, trial(3, 1.0, gpu=0), trial(4), trial(5))
    assert len(begun := granted(plan(*full, name="asha"))) == 2
    assert {"s/4", "s/5"}.isdisjoint(begun)
    assert granted(plan(*open_ones[:1], trial(4), trial(5), name="asha")) == ["s/4", "s/5"]


def test_the_gpus_that_a_search_may_not_use_go_to_another_sweep() -> None:
    stuck = [replace(trial(n, 1.0), phase=Phase.STOPPING) for n in range(4)]
    other = replace(trial(9), sweep=SweepId("t"))
    assert granted(plan(*stuck, trial(4), other)) == ["s/9"]


def test_a_trial_that_is_not_opened_yet_has_that_as_its_reason() -> None:
    found = plan(*(trial(n, 1.0) for n in range(4)), trial(4))
    assert "learns from results, so 4 trials" in found.reasons[trial(4).id].text


def test_a_sweep_that_does_not_learn_opens_as_many_as_its_policy_likes() -> None:
    others = [replace(trial(n), sweep=SweepId("t")) for n in range(6)]
    assert len(plan(*others, gpus=6, per_gpu=1).grants) == 6


@dataclass(frozen=True, slots=True)
class Watching(Wrapper[Any]):
    """Notes which trials it sees with a configuration."""

    known: list[str] = field(default_factory=list)

    def decide(self, snapshot: Snapshot, memory: Any) -> tuple[Plan, Any]:
        self.known.extend(job.id for job in snapshot.jobs if job.configuration)
        return self.policy.decide(snapshot, memory)


def test_no_policy_sees_the_configuration_of_a_trial_that_a_search_has_not_opened() -> None:
    rate = (("rate", 0.5),)
    begun, new = (replace(job, configuration=rate) for job in (trial(0, 1.0), trial(1)))
    other = replace(trial(9), configuration=rate, sweep=SweepId("t"))  # drawn without results
    snapshot = Snapshot(100.0, (Gpu(0),), (begun, new, other))
    policy = OpenForLearning(watching := Watching(make_policy("fifo", {})), LEARNS)
    policy.decide(snapshot, policy.initial())
    assert watching.known == [begun.id, other.id]


PHASES = st.sampled_from([Phase.PENDING, Phase.WAITING, Phase.STOPPING, Phase.ENDED])


@pytest.mark.parametrize("name", ["fifo", "asha", "frontrunner"])
@given(phases=st.lists(PHASES, max_size=12), gpus=st.integers(1, 4), per_gpu=st.integers(1, 3))
def test_no_plan_opens_more_trials_of_a_learning_sweep_than_there_is_room_for(
    name: str, phases: list[Phase], gpus: int, per_gpu: int
) -> None:
    jobs = [replace(trial(n), phase=phase) for n, phase in enumerate(phases)]
    found = plan(*jobs, gpus=gpus, per_gpu=per_gpu, name=name)
    begun = sum(job.is_open for job in jobs)
    opened = {grant.job for grant in found.grants if grant.job in {
        job.id for job in jobs if job.phase is Phase.PENDING}}  # fmt: skip
    assert len(opened) <= max(0, gpus * per_gpu - begun)
    assert found.reasons.keys() >= {job.id for job in jobs if job.phase in (
        Phase.PENDING, Phase.WAITING)}  # fmt: skip
