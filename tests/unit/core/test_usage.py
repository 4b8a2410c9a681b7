from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.summary import Segment
from hermes_ops.core.usage import BY, TrialUse, Usage, usage

DAY_S = 86_400.0


def segment(start_s: float, end_s: float | None, gpus: int = 1, outcome: str = "finished",
            startup_s: float | None = None) -> Segment:  # fmt: skip
    return Segment(0, 1, tuple(range(gpus)), start_s, end_s, outcome=outcome, startup_s=startup_s)


def trial(*segments: Segment, user: str = "ann") -> TrialUse:
    return TrialUse(f"{user}-sweep", user, "vision", 0.0, segments)


def test_a_trial_waits_loses_its_start_up_trains_and_is_preempted() -> None:
    life = trial(segment(10.0, 40.0, 2, "preempted", startup_s=5.0), segment(70.0, 80.0))
    assert usage([life], "user") == (Usage("ann", 1, 70.0, 10.0, 40.0, 1),)
    (one,) = usage([life], "user")
    assert one.trained_gpu_seconds == 60.0


def test_a_segment_that_runs_counts_until_now() -> None:
    assert usage([trial(segment(10.0, None))], "team", now_s=25.0) == (
        Usage("vision", 1, 15.0, 0.0, 10.0),
    )


def test_a_segment_that_never_trained_is_all_lost() -> None:
    short = trial(segment(0.0, 3.0, 2, "preempted", startup_s=5.0))
    assert usage([short], "user") == (Usage("ann", 1, 6.0, 6.0, 0.0, 1),)


def test_what_lies_before_the_date_does_not_count() -> None:
    life = trial(segment(10.0, 40.0, outcome="preempted"), segment(50.0, 80.0))
    assert usage([life], "sweep", since_s=45.0) == (Usage("ann-sweep", 1, 30.0, 0.0, 5.0, 0),)
    assert usage([life], "sweep", since_s=90.0) == ()


def test_a_day_has_its_own_part_and_the_preemption_is_where_it_happened() -> None:
    night = trial(segment(DAY_S - 10.0, DAY_S + 20.0, outcome="preempted"))
    assert usage([night], "day") == (
        Usage("1970-01-01", 1, 10.0, 0.0, DAY_S - 10.0, 0),
        Usage("1970-01-02", 1, 20.0, 0.0, 0.0, 1),
    )


@given(st.data())
def test_the_sums_do_not_depend_on_the_groups(data: st.DataObject) -> None:
    moments = st.lists(st.integers(0, 400_000), min_size=2, max_size=8, unique=True).map(sorted)
    trials = []
    for _ in range(data.draw(st.integers(0, 4))):
        times = data.draw(moments)
        segments = [
            segment(float(start), float(end), data.draw(st.integers(1, 4)), outcome, 7.0)
            for start, end in zip(times[::2], times[1::2], strict=False)
            for outcome in [data.draw(st.sampled_from(["preempted", "finished"]))]
        ]
        trials.append(trial(*segments, user=data.draw(st.sampled_from(["ann", "bob"]))))
    since_s = float(data.draw(st.integers(0, 300_000)))
    sums = []
    for by in BY:
        rows = usage(trials, by, since_s, 400_000.0)
        sums.append(
            (
                sum(row.gpu_seconds for row in rows),
                sum(row.lost_gpu_seconds for row in rows),
                sum(row.waiting_seconds for row in rows),
                sum(row.preemptions for row in rows),
            )
        )
    for found in sums:
        assert found == pytest.approx(sums[0])
