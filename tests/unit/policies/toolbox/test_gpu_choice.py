"""Which of equal GPUs a job gets: those that it can use soonest_usable."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.model import Gpu, Phase, Policy, Snapshot
from hermes_ops.core.plan import check
from hermes_ops.policies import POLICIES, make_policy, needs_oracle, needs_shares
from hermes_ops.policies.toolbox.fill import soonest_usable
from hermes_ops.policies.toolbox.sized_grants import SizingProblem
from tests.builders import arriving, trial, world

RANGE: dict[str, Any] = {"min_gpus": 1, "max_gpus": 4}


def leaving(*gpus: int) -> Any:
    return trial("s/leaving", 3.0, phase=Phase.STOPPING, gpus_to_leave=gpus)


@pytest.mark.parametrize(
    "name", [name for name in POLICIES if not (needs_oracle(name) or needs_shares(name))]
)
def test_a_trial_starts_on_an_idle_gpu_before_one_that_another_has_yet_to_leave(name: str) -> None:
    policy: Policy[Any] = make_policy(name, {})
    snapshot = world(leaving(0), trial("s/0", phase=Phase.PENDING), gpus=2)
    plan, _ = policy.decide(snapshot, policy.initial())
    check(snapshot, plan)
    assert plan.gpus_of(snapshot.queue[0].id) == (1,)


def test_a_job_that_grows_keeps_its_gpus_and_another_starts_on_an_idle_one() -> None:
    grows = arriving(0, Phase.RUNNING, gpus_held=(3,), **RANGE)
    starts = arriving(1, Phase.WAITING, **RANGE)
    problem = SizingProblem.from_snapshot(world(grows, starts, gpus=4))
    grants = {grant.job: grant.gpus for grant in problem.grants({grows.id: 3, starts.id: 1})}
    assert grants == {grows.id: (0, 1, 3), starts.id: (2,)}


def test_a_job_that_shrinks_gives_up_gpus_that_others_get_last() -> None:
    shrinks = arriving(0, Phase.RUNNING, gpus_held=(0, 1), **RANGE)
    starts = [arriving(n, Phase.WAITING, **RANGE) for n in (1, 2)]
    problem = SizingProblem.from_snapshot(world(shrinks, *starts, gpus=3))
    sizes = dict.fromkeys((shrinks.id, *(job.id for job in starts)), 1)
    grants = {grant.job: grant.gpus for grant in problem.grants(sizes)}
    assert grants == {shrinks.id: (0,), starts[0].id: (2,), starts[1].id: (1,)}


@given(
    nodes=st.lists(st.sampled_from("ab"), min_size=1, max_size=6),
    busy=st.sets(st.integers(0, 5)),
    own=st.sets(st.integers(0, 5)),
    draw=st.data(),
)
def test_a_choice_stays_on_its_nodes_and_no_sooner_gpu_there_is_left(
    nodes: list[str], busy: set[int], own: set[int], draw: st.DataObject
) -> None:
    gpus = tuple(Gpu(index, node) for index, node in enumerate(nodes))
    indices = st.sets(st.sampled_from(range(len(gpus))), min_size=1)
    able = draw.draw(indices)
    chosen = tuple(sorted(draw.draw(st.sets(st.sampled_from(sorted(able)), min_size=1))))
    snapshot = Snapshot(0.0, gpus, (leaving(*sorted(busy)),))
    mine = own & able
    found = soonest_usable(snapshot, chosen, able.difference(chosen), sorted(mine))
    assert sorted(nodes[gpu] for gpu in found) == sorted(nodes[gpu] for gpu in chosen)
    assert able.issuperset(found)
    assert found == tuple(sorted(set(found)))

    def waits(gpu: int) -> int:
        return 0 if gpu in mine else 1 + (gpu in busy)

    for gpu in found:
        others = (other for other in able.difference(found) if nodes[other] == nodes[gpu])
        assert all(waits(gpu) <= waits(other) for other in others)
