"""Impossible plans are refused; possible ones become exact actions."""

from __future__ import annotations

from functools import partial
from math import nan
from typing import Any

import pytest

from hermes_ops.core.model import Grant, Job, JobId, Phase, Plan, Reason, Snapshot
from hermes_ops.core.plan import LazyReasons, Resize, Start, Stop, check, diff, overlay
from hermes_ops.errors import PlanError
from tests import builders

WHY = Reason("because")


job = partial(builders.job, max_gpus=2)
world = partial(builders.world, gpus=2, now_s=0.0)


def runs(name: str, *gpus: int, **facts: Any) -> Job:
    return job(name, Phase.RUNNING, gpus_held=gpus, **facts)


def plan(*grants: tuple[str, tuple[int, ...]], ends: tuple[str, ...] = (), **more: Any) -> Plan:
    ids = tuple(JobId(e) for e in ends)
    return Plan(tuple(Grant(JobId(j), gpus) for j, gpus in grants), ids, **more)


FIXED = runs("a", 0, preemptible=False)
PENDING, QUEUED = job("p", Phase.PENDING), job("q", Phase.PENDING)


@pytest.mark.parametrize(
    ("fact", "snapshot", "bad"),
    [
        ("not a job", world(), plan(("x", (0,)))),
        ("not a job", world(), plan(ends=("x",))),
        ("not a job", world(), plan(ranking=(JobId("x"),))),
        ("but is ended", world(job("a", Phase.ENDED)), plan(("a", (0,)))),
        ("but is stopping", world(job("a", Phase.STOPPING)), plan(("a", (0,)))),
        ("has ended", world(job("a", Phase.ENDED)), plan(ends=("a",))),
        ("pool does not have", world(PENDING), plan(("p", (7,)))),
        ("given twice", world(PENDING, runs("a", 0)), plan(("p", (0,)), ("a", (0,)))),
        ("given twice", world(PENDING), plan(("p", (0, 0)))),
        ("given twice", world(PENDING, QUEUED), plan(("p", (1,)), ("q", (1,)))),
        (
            "given twice",  # one of two jobs that share the GPU is stopped
            world(PENDING, runs("a", 0, share_held=0.5), runs("b", 0, share_held=0.5)),
            Plan((Grant(JobId("p"), (0,)), Grant(JobId("b"), (0,), share=0.5))),
        ),
        ("two grants", world(runs("a", 0)), plan(("a", (0,)), ("a", (1,)))),
        ("two grants", world(runs("a", 0), PENDING), plan(("a", (0,)), ("p", (1,)), ("a", (0,)))),
        ("0 GPUs", world(PENDING), plan(("p", ()))),
        ("3 GPUs", world(PENDING, gpus=3), plan(("p", (0, 1, 2)))),
        ("two grants", world(PENDING), plan(("p", (0,)), ("p", (1,)))),
        ("not preemptible", world(FIXED), plan()),
        ("not preemptible", world(FIXED), plan(("a", (1,)))),
        ("not preemptible", world(FIXED), plan(("a", (0, 1)))),
        *(
            ("a share of", world(PENDING), Plan((Grant(JobId("p"), (0,), share=share),)))
            for share in (0.0, -0.5, 1.5, nan)
        ),
        ("is to be ended", world(PENDING), plan(("p", (0,)), ends=("p",))),
        ("is to be ended", world(runs("a", 0)), plan(("a", (0,)), ends=("a",))),
    ],
)
def test_an_impossible_plan_is_refused(fact: str, snapshot: Snapshot, bad: Plan) -> None:
    with pytest.raises(PlanError, match=fact):
        check(snapshot, bad)


@pytest.mark.parametrize(
    ("snapshot", "good"),
    [
        (world(runs("a", 0)), plan()),
        (world(FIXED), plan(ends=("a",))),
        (world(FIXED, gpus=0), plan()),
        (world(job("a", Phase.STOPPING), PENDING), plan(("p", (0,)))),
        (world(runs("a", 0), runs("b", 1), PENDING), plan(("b", (1,)), ("p", (0,)))),
        (world(FIXED, runs("b", 0, preemptible=False)), plan(("a", (0,)))),
    ],
)
def test_a_possible_plan_passes(snapshot: Snapshot, good: Plan) -> None:
    check(snapshot, good)


def actions(snapshot: Snapshot, target: Plan) -> tuple[Any, ...]:
    reasons = {job.id: WHY for job in snapshot.jobs}
    return diff(snapshot, Plan(target.grants, target.ends, reasons=reasons))


A, B, P = JobId("a"), JobId("b"), JobId("p")


@pytest.mark.parametrize(
    ("what", "snapshot", "target", "expected"),
    [
        ("nothing to do", world(runs("a", 0)), plan(("a", (0,))), ()),
        ("the order of indices is no change", world(runs("a", 1, 0)), plan(("a", (0, 1))), ()),
        ("a start", world(PENDING), plan(("p", (1,))), (Start(P, (1,), WHY),)),
        (
            "stops come first",
            world(PENDING, runs("a", 0), runs("b", 1)),
            plan(("p", (0,))),
            (Stop(A, WHY), Stop(B, WHY), Start(P, (0,), WHY)),
        ),
        (
            "a starting job loses its grant",
            world(job("a", Phase.STARTING, gpus_held=(0,))),
            plan(),
            (Stop(A, WHY),),
        ),
        (
            "more GPUs",
            world(runs("a", 0)),
            plan(("a", (0, 1))),
            (Resize(A, (0, 1), WHY),),
        ),
        ("as many but other GPUs", world(runs("a", 0)), plan(("a", (1,))), (Stop(A, WHY),)),
        ("an end", world(runs("a", 0)), plan(ends=("a",)), (Stop(A, WHY, final=True),)),
        (
            "an end of a waiting job",
            world(job("a", Phase.WAITING)),
            plan(ends=("a",)),
            (Stop(A, WHY, final=True),),
        ),
        ("a stopping job is left alone", world(job("a", Phase.STOPPING)), plan(), ()),
    ],
)
def test_the_actions_are_exactly_the_difference(
    what: str, snapshot: Snapshot, target: Plan, expected: tuple[Any, ...]
) -> None:
    check(snapshot, target)
    assert actions(snapshot, target) == expected, what


def test_the_free_gpus_are_those_of_the_pool_of_which_no_job_keeps_anything() -> None:
    gone, shared = runs("a", 1, 7), runs("b", 2, share_held=0.5)
    assert world(gone, shared, PENDING, gpus=4).free == {0, 1, 3}
    assert world(gpus=0).free == frozenset()


@pytest.mark.parametrize(
    ("stopped", "free"),
    [((), {3}), (("a",), {0, 3}), (("b",), {3}), (("b", "c"), {1, 3}), (("a", "p", "x"), {0, 3})],
)
def test_a_shared_gpu_is_free_once_all_that_share_it_have_stopped(
    stopped: tuple[str, ...], free: set[int]
) -> None:
    sharing = (runs(name, 1, share_held=0.5) for name in "bc")
    snapshot = world(runs("a", 0), *sharing, runs("d", 2), PENDING, gpus=4)
    assert snapshot.free_without([JobId(name) for name in stopped]) == free


def test_another_plan_for_the_same_snapshot_is_compared_anew() -> None:
    snapshot = world(runs("a", 0), PENDING)
    kept = plan(("a", (0,)))
    check(snapshot, kept)
    assert diff(snapshot, kept) == ()
    moved = plan(("a", (1,)), reasons={JobId("a"): WHY})
    assert diff(snapshot, moved) == (Stop(JobId("a"), WHY),)
    with pytest.raises(PlanError, match="two grants"):
        check(snapshot, plan(("a", (0,)), ("p", (1,)), ("p", (1,))))


A, B, C = JobId("s/1"), JobId("s/2"), JobId("s/3")


def never(job: JobId) -> Reason:
    raise AssertionError(f"{job} was asked for")


def test_what_lies_above_is_read_and_what_lies_below_is_not_made() -> None:
    found = overlay(LazyReasons({A: None, B: None}, never), {B: Reason("above"), C: Reason("new")})
    assert (found[B].text, found[C].text) == ("above", "new")
    assert list(found) == [A, B, C]
    assert len(found) == 3


def test_what_is_not_covered_is_read_from_below() -> None:
    below = LazyReasons({A: None}, lambda job: Reason(f"below {job}"))
    assert overlay(below, {B: Reason("above")}).get(A) == Reason("below s/1")


def test_a_job_in_neither_has_no_reason() -> None:
    found = overlay(LazyReasons({A: None}, never), {})
    assert found.get(B) is None
    assert found.get(B, Reason("none")) == Reason("none")
    with pytest.raises(KeyError):
        found[B]
