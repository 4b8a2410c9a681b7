"""The use of a pool by teams, whose weight halves with time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.gpu_time import DecayedUse
from hermes_ops.core.model import Job, Phase, Snapshot
from hermes_ops.core.quota import Quota, TeamQuota
from tests.builders import job, world

TEAMS = ("a", "b", "")
Round = tuple[float, tuple[int, ...]]
"""The seconds since the round before, and the GPUs that each of TEAMS holds from then on."""
rounds = st.lists(
    st.tuples(st.integers(0, 5_000).map(float), st.tuples(*[st.integers(0, 3)] * len(TEAMS))),
    min_size=1,
    max_size=6,
)
half_lives = st.sampled_from([100.0, 1_000.0, 86_400.0])


def pool_of(half_life_s: float) -> Quota:
    return Quota((TeamQuota("a"), TeamQuota("b")), half_life_s=half_life_s)


def snapshot(held: Sequence[int], now_s: float) -> Snapshot:
    """Return a snapshot in which each team holds that many GPUs, by one job."""
    jobs: list[Job] = []
    first = 0
    for team, gpus in zip(("a", "b", "of no team"), held, strict=True):
        if gpus:
            indices = tuple(range(first, first + gpus))
            facts = {"gpus_held": indices, "min_gpus": gpus, "virtual_cluster": team}
            jobs.append(job(f"{team}/0", Phase.RUNNING, **facts))
            first += gpus
    return world(*jobs, gpus=9, now_s=now_s)


def observed(history: Sequence[Round], half_life_s: float) -> tuple[DecayedUse, list[float]]:
    """Return the use that is counted from snapshot to snapshot, and their times."""
    use, now_s, times = DecayedUse(), 50.0, []
    for passed_s, held in history:
        now_s += passed_s
        times.append(now_s)
        use = use.advance(snapshot(held, now_s), pool_of(half_life_s))
    return use, times


def spans(history: Sequence[Round], times: Sequence[float]) -> list[tuple[str, float, float, int]]:
    """Return what teams held between the snapshots."""
    pairs = zip(times, times[1:], history, strict=False)
    return [
        (team, start_s, end_s, gpus)
        for start_s, end_s, (_, held) in pairs
        for team, gpus in zip(TEAMS, held, strict=True)
        if gpus
    ]


def amounts(use: DecayedUse) -> dict[str, float]:
    return {team: gpu_s for team, gpu_s in use.gpu_s if gpu_s > 1e-6}


@given(rounds, half_lives)
def test_use_that_was_observed_is_that_of_the_same_segments_on_record(
    history: list[Round], half_life_s: float
) -> None:
    use, times = observed(history, half_life_s)
    recorded = DecayedUse.from_spans(spans(history, times), half_life_s, times[-1])
    assert amounts(use) == pytest.approx(amounts(recorded))
    assert dict(use.held) == {t: n for t, n in zip(TEAMS, history[-1][1], strict=True) if n}


@given(rounds, rounds, half_lives)
def test_use_on_record_and_the_use_observed_since_add_up_to_all(
    before: list[Round], after: list[Round], half_life_s: float
) -> None:
    """A controller reads the past once, and has observed the pool for a while by then."""
    _, times = observed([*before, *after], half_life_s)
    start = len(before)
    earlier = DecayedUse.from_spans(spans(before, times[: start + 1]), half_life_s, times[start])
    own = DecayedUse()
    for at_s, (_, held) in zip(times[start:], after, strict=True):
        own = own.advance(snapshot(held, at_s), pool_of(half_life_s))
    whole = DecayedUse.from_spans(spans([*before, *after], times), half_life_s, times[-1])
    assert amounts(own.plus(earlier, half_life_s)) == pytest.approx(amounts(whole))
    assert DecayedUse().plus(earlier, half_life_s) == earlier


def test_a_gpu_hour_counts_half_after_one_half_life_and_a_quarter_after_two() -> None:
    segment = [("a", 0.0, 10.0, 3)]
    at_once, later, latest = (
        dict(DecayedUse.from_spans(segment, 1_000.0, 10.0 + passed_s).gpu_s)["a"]
        for passed_s in (0.0, 1_000.0, 2_000.0)
    )
    assert at_once == pytest.approx(30.0, rel=0.01)
    assert (later, latest) == pytest.approx((at_once / 2, at_once / 4))


def test_a_clock_that_is_set_back_counts_no_use() -> None:
    use, _ = observed([(0.0, (2, 0, 0)), (100.0, (2, 0, 0))], 1_000.0)
    back = use.advance(snapshot((2, 0, 0), 20.0), pool_of(1_000.0))
    assert amounts(back) == pytest.approx(amounts(use))
    assert back.at_s == 20.0


def test_a_team_that_has_used_what_its_weight_promises_counts_half() -> None:
    use = DecayedUse((("a", 300.0), ("b", 100.0)))
    assert use.factors({"a": 3.0, "b": 1.0}) == pytest.approx({"a": 1.5, "b": 0.5})
    assert use.factors({"a": 1.0, "b": 1.0}) == pytest.approx({"a": 2**-1.5, "b": 2**-0.5})
    assert DecayedUse().factors({"a": 3.0, "b": 1.0}) == {"a": 3.0, "b": 1.0}


def test_a_pod_that_waits_for_its_node_is_no_use_of_its_team() -> None:
    waits = job("a/0", Phase.RUNNING, gpus_held=(0,), virtual_cluster="a", uses_gpus=False)
    use = DecayedUse()
    for now_s in (50.0, 150.0):
        use = use.advance(world(waits, gpus=2, now_s=now_s), pool_of(100.0))
    assert (use.gpu_s, use.held) == ((), ())
