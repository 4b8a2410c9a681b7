from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.model import Gpu, Job, Phase, Plan, Snapshot, SweepId
from hermes_ops.core.plan import check
from hermes_ops.core.sweep_limits import MaxUnreported
from hermes_ops.core.wrapper import Wrapper
from hermes_ops.policies import make_policy
from tests.builders import granted, trial

LEARNS = frozenset({SweepId("s")})


def plan(*jobs: Job, gpus: int = 2, per_gpu: int = 2, name: str = "fifo") -> Plan:
    snapshot = Snapshot(100.0, tuple(Gpu(n) for n in range(gpus)), jobs)
    policy = MaxUnreported(make_policy(name, {}), LEARNS, per_gpu)
    found, _ = policy.decide(snapshot, policy.initial())
    check(snapshot, found)
    return found


def unread(number: int, phase: Phase = Phase.WAITING) -> Job:
    """Return an open trial without a loss."""
    return replace(trial(number), phase=phase)


def test_a_search_that_learns_opens_no_more_trials_without_a_loss_than_the_bound() -> None:
    full = (*(unread(n) for n in range(3)), unread(3, Phase.STOPPING), trial(4), trial(5))
    assert {"s/4", "s/5"}.isdisjoint(granted(plan(*full, name="asha")))
    assert granted(plan(unread(0, Phase.STOPPING), trial(4), trial(5), name="asha")) == [
        "s/4",
        "s/5",
    ]


def test_a_trial_that_has_reported_a_loss_leaves_its_room_to_another() -> None:
    paused = [trial(n, 1.0) for n in range(9)]
    assert "s/9" in granted(plan(*paused, trial(9), gpus=4, per_gpu=1, name="asha"))


def test_a_trial_whose_node_has_left_the_pool_leaves_its_room_to_another() -> None:
    away = [replace(unread(n), nodes=("elsewhere",)) for n in range(4)]
    assert granted(plan(*away, trial(4), trial(5))) == ["s/4", "s/5"]


def test_the_gpus_that_a_search_may_not_use_go_to_another_sweep() -> None:
    stuck = [unread(n, Phase.STOPPING) for n in range(4)]
    other = replace(trial(9), sweep=SweepId("t"))
    assert granted(plan(*stuck, trial(4), other)) == ["s/9"]


def test_a_trial_that_is_not_opened_yet_has_that_as_its_reason() -> None:
    found = plan(*(unread(n) for n in range(4)), trial(4))
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
    policy = MaxUnreported(watching := Watching(make_policy("fifo", {})), LEARNS)
    policy.decide(snapshot, policy.initial())
    assert watching.known == [begun.id, other.id]


PHASES = st.sampled_from([Phase.PENDING, Phase.WAITING, Phase.STOPPING, Phase.ENDED])


@pytest.mark.parametrize("name", ["fifo", "asha", "frontrunner"])
@given(
    states=st.lists(st.tuples(PHASES, st.booleans()), max_size=12),
    gpus=st.integers(1, 4),
    per_gpu=st.integers(1, 3),
)
def test_no_plan_opens_more_trials_of_a_learning_sweep_than_there_is_room_for(
    name: str, states: list[tuple[Phase, bool]], gpus: int, per_gpu: int
) -> None:
    jobs = [
        replace(trial(n, *[1.0] * (reports and phase is not Phase.PENDING)), phase=phase)
        for n, (phase, reports) in enumerate(states)
    ]
    found = plan(*jobs, gpus=gpus, per_gpu=per_gpu, name=name)
    unknown = sum(job.is_open and not job.curve for job in jobs)
    opened = {grant.job for grant in found.grants if grant.job in {
        job.id for job in jobs if job.phase is Phase.PENDING}}  # fmt: skip
    assert len(opened) <= max(0, gpus * per_gpu - unknown)
    assert found.reasons.keys() >= {job.id for job in jobs if job.phase in (
        Phase.PENDING, Phase.WAITING)}  # fmt: skip
