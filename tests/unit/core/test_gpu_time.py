"""The GPU time of users in the day and the month, counted from snapshot to snapshot."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.gpu_time import GpuTime
from hermes_ops.core.model import Phase, Snapshot
from tests.builders import job, world

HOUR_S = 3_600.0
USERS = ("ann", "bob")
BEGIN_S = 1_795_651_200.0 + 12 * HOUR_S
"""Noon of the 26th of November 2026."""
Round = tuple[float, tuple[int, ...]]
"""The seconds since the round before, and the GPUs that each of USERS and a third hold then."""
rounds = st.lists(
    st.tuples(
        st.integers(0, 60).map(lambda hours: hours * HOUR_S), st.tuples(*[st.integers(0, 3)] * 3)
    ),
    min_size=1,
    max_size=6,
)


def snapshot(held: Sequence[int], now_s: float) -> Snapshot:
    """Return a snapshot in which each user holds that many GPUs, by jobs of one GPU."""
    users = [user for user, gpus in zip((*USERS, "eve"), held, strict=True) for _ in range(gpus)]
    jobs = (job(n, Phase.RUNNING, gpus_held=(n,), user=user) for n, user in enumerate(users))
    return world(*jobs, gpus=9, now_s=now_s)


def observed(history: Sequence[Round], begin_s: float) -> tuple[GpuTime, list[float]]:
    """Return the time that is counted from snapshot to snapshot, and the times of these."""
    time, now_s, times = GpuTime(), begin_s, []
    for passed_s, held in history:
        now_s += passed_s
        times.append(now_s)
        time = time.advance(snapshot(held, now_s), USERS)
    return time, times


def spans(history: Sequence[Round], times: Sequence[float]) -> list[tuple[str, float, float, int]]:
    """Return what limited users held between the snapshots."""
    pairs = zip(times, times[1:], history, strict=False)
    return [
        (user, start_s, end_s, gpus)
        for start_s, end_s, (_, held) in pairs
        for user, gpus in zip(USERS, held[:2], strict=True)
    ]


def amounts(time: GpuTime) -> tuple[dict[str, float], dict[str, float]]:
    """Return the GPU-seconds of the day and of the month, of the users that have some."""
    day = {user: gpu_s for user, gpu_s in time.day if gpu_s}
    return day, {user: gpu_s for user, gpu_s in time.month if gpu_s}


@given(rounds)
def test_time_that_was_observed_is_that_of_the_same_segments_on_record(
    history: list[Round],
) -> None:
    time, times = observed(history, BEGIN_S)
    recorded = GpuTime.from_spans(spans(history, times), times[-1])
    assert amounts(time) == amounts(recorded)
    assert dict(time.held) == {u: n for u, n in zip(USERS, history[-1][1][:2], strict=True) if n}


def test_a_pod_that_waits_for_its_node_uses_no_gpu_time() -> None:
    waits = job(0, Phase.RUNNING, gpus_held=(0,), user="ann", uses_gpus=False)
    trains = job(1, Phase.RUNNING, gpus_held=(1,), user="bob")
    time = GpuTime()
    for now_s in (BEGIN_S, BEGIN_S + HOUR_S):
        time = time.advance(world(waits, trains, gpus=2, now_s=now_s), USERS)
    assert amounts(time) == ({"bob": HOUR_S}, {"bob": HOUR_S})
    assert time.held == (("bob", 1),)


@given(rounds, rounds)
def test_time_on_record_and_the_time_observed_since_add_up_to_all(
    before: list[Round], after: list[Round]
) -> None:
    """A controller reads the past once, and has observed the pool for a while by then."""
    history = [*before, *after]
    _, times = observed(history, BEGIN_S)
    start = len(before)
    earlier = GpuTime.from_spans(spans(before, times[: start + 1]), times[start])
    own, _ = observed([(0.0, after[0][1]), *after[1:]], times[start])
    whole = GpuTime.from_spans(spans(history, times), times[-1])
    assert amounts(own.plus(earlier)) == amounts(whole)
    assert own.plus(earlier).held == own.held
    assert GpuTime().plus(earlier) == earlier
    assert own.plus(GpuTime()) == own
