"""Jobs that lose their GPUs leave their queues at once, as if one after the other."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.model import Gpu, Job, JobId, Phase, Snapshot
from hermes_ops.policies.toolbox.multilevel_queues import (
    Clock,
    Crossing,
    MultilevelQueues,
    QueuesMemory,
)
from tests.builders import job

LIMITS = (100.0, 1_000.0)
IDS = [JobId(f"s/{n}") for n in range(8)]


def one_by_one(queues: MultilevelQueues, gone: list[Crossing]) -> None:
    """Let the jobs leave, the last one first: each of those that go on to the front."""
    for _, level, job_id in reversed(gone):
        found = queues.snapshot.index.get(job_id)
        if found is None or found.phase is Phase.ENDED:
            queues._drop(level, job_id)
            queues.clocks.pop(job_id, None)
        elif job_id in queues.running[level]:
            queues._drop(level, job_id)
            queues.waiting[level] = (job_id, *queues.waiting[level])


@st.composite
def left_queues(draw: st.DrawFn) -> tuple[Snapshot, QueuesMemory, list[Crossing]]:
    """Draw jobs of which some have ended or are gone, their queues, and those that had GPUs."""
    places = [(job_id, draw(st.integers(0, 2)), draw(st.booleans())) for job_id in IDS]
    places = draw(st.permutations(places))
    runs, waits = (
        tuple(
            tuple(job_id for job_id, at, runs in places if at == level and runs is running)
            for level in range(3)
        )
        for running in (True, False)
    )
    gone = [(draw(st.floats(0, 9)), level, job_id) for job_id, level, _ in places]
    gone = sorted(draw(st.lists(st.sampled_from(gone), unique=True)))
    phases = st.sampled_from([None, Phase.ENDED, Phase.WAITING, Phase.STOPPING])
    jobs: list[Job] = [job(job_id, phase) for job_id in IDS if (phase := draw(phases)) is not None]
    clocks = tuple(Clock(job_id, inf, 0.0) for job_id in IDS)
    return Snapshot(0.0, (Gpu(0),), tuple(jobs)), QueuesMemory(runs, waits, (), clocks), gone


@given(left_queues())
def test_jobs_leave_their_queues_together_as_one_after_the_other(
    drawn: tuple[Snapshot, QueuesMemory, list[Crossing]],
) -> None:
    snapshot, memory, gone = drawn
    together, single = (MultilevelQueues(snapshot, QueuesMemory(), LIMITS) for _ in range(2))
    for queues in (together, single):
        queues.running, queues.waiting = list(memory.running), list(memory.waiting)
        queues.clocks = {clock.job: clock for clock in memory.clocks}
    together._leave(gone)
    one_by_one(single, gone)
    assert (together.running, together.waiting) == (single.running, single.waiting)
    assert together.clocks == single.clocks
