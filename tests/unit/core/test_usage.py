from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.guards import Quantum
from hermes_ops.core.model import JobId, SweepId
from hermes_ops.core.quota import Quota, TeamQuota
from hermes_ops.core.summary import Segment
from hermes_ops.core.usage import BY, TrialUse, Usage, usage
from hermes_ops.core.within_quota import WithinQuota
from hermes_ops.policies import make_policy
from hermes_ops.simulator.engine import layout, simulate
from hermes_ops.simulator.workload import Costs, Work, Workload

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


def test_nobody_waits_from_an_end_of_the_sweep_or_trial_until_it_was_continued() -> None:
    life = trial(segment(10.0, 40.0, outcome="preempted"), segment(900.0, 910.0))
    ended = ((50.0, 800.0), (60.0, 880.0))  # the sweep, and the trial in it
    for spans in (ended, ended[::-1]):
        (one,) = usage([replace(life, ended_spans=spans)], "user")
        assert one.waiting_seconds == 10.0 + (50.0 - 40.0) + (900.0 - 880.0)


def test_a_trial_that_had_not_begun_as_its_sweep_ended_waits_before_and_after() -> None:
    life = replace(trial(segment(900.0, 910.0)), ended_spans=((50.0, 800.0),))
    (one,) = usage([life], "user")
    assert one.waiting_seconds == 50.0 + 100.0


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


LOANS = Quota((TeamQuota("vision", 2), TeamQuota("speech", 3)))


def held(team: str, user: str, start_s: float, end_s: float, *gpus: int) -> TrialUse:
    """A trial that held these GPUs once."""
    return TrialUse(f"{user}-sweep", user, team, start_s, (Segment(0, 1, gpus, start_s, end_s),))


def test_what_a_team_holds_beyond_its_guarantee_is_borrowed_from_idle_guarantees() -> None:
    trials = [
        held("vision", "ann", 0.0, 10.0, 0, 1, 2),
        held("vision", "bob", 5.0, 10.0, 3),
        held("speech", "eve", 8.0, 10.0, 4),
    ]
    rows = {row.key: row for row in usage(trials, "team", 0.0, 100.0, LOANS)}
    assert rows["vision"].borrowed_gpu_seconds == pytest.approx(5 * 1 + 5 * 2)
    assert rows["speech"].borrowed_gpu_seconds == 0.0
    assert rows["speech"].lent_gpu_seconds == pytest.approx(15.0)
    assert rows["vision"].lent_gpu_seconds is None
    users = {row.key: row for row in usage(trials, "user", 0.0, 100.0, LOANS)}
    assert users["ann"].borrowed_gpu_seconds == pytest.approx(5 * 1 + 5 * 2 * 3 / 4)
    assert users["bob"].borrowed_gpu_seconds == pytest.approx(5 * 2 * 1 / 4)
    assert users["eve"].lent_gpu_seconds is None


def test_only_what_is_idle_of_a_guarantee_is_lent() -> None:
    """Vision holds four GPUs more than its own; speech leaves only one of its three idle."""
    trials = [
        held("vision", "ann", 0.0, 10.0, *range(6)),
        held("speech", "eve", 0.0, 10.0, 6, 7),
    ]
    rows = {row.key: row for row in usage(trials, "team", 0.0, 100.0, LOANS)}
    assert rows["vision"].borrowed_gpu_seconds == pytest.approx(40.0)
    assert rows["speech"].lent_gpu_seconds == pytest.approx(10.0)


def test_a_day_has_the_loans_of_its_own_hours() -> None:
    night = held("vision", "ann", DAY_S - 10.0, DAY_S + 20.0, 0, 1, 2)
    days = usage([night], "day", 0.0, 2 * DAY_S, LOANS)
    assert [row.borrowed_gpu_seconds for row in days] == pytest.approx([10.0, 20.0])
    assert [row.lent_gpu_seconds for row in days] == pytest.approx([10.0, 20.0])


def test_a_trial_that_starts_next_on_a_preempted_trials_gpu_has_caused_that() -> None:
    loser = trial(segment(0.0, 10.0, 2, "preempted"), segment(90.0, 95.0), user="ann")
    taker = TrialUse("bob-sweep", "bob", "speech", 0.0, (Segment(0, 1, (1,), 12.0, 20.0),))
    later = replace(taker, user="eve", segments=(Segment(0, 1, (0,), 13.0, 20.0),))
    elsewhere = replace(taker, user="dan", pool="other")
    rows = {row.key: row for row in usage([later, elsewhere, loser, taker], "user")}
    caused = {key: row.preemptions_caused for key, row in rows.items()}
    assert caused == {"ann": 0, "bob": 1, "dan": 0, "eve": 0}
    assert (rows["ann"].preemptions, rows["bob"].preemptions) == (1, 0)


def test_a_preemption_for_which_nobody_starts_soon_was_caused_by_nobody() -> None:
    loser = trial(segment(0.0, 10.0, 1, "preempted"), segment(40.0, 45.0))
    late = held("speech", "bob", 71.0, 80.0, 0)
    assert sum(row.preemptions_caused for row in usage([loser, late], "team")) == 0


def test_a_price_follows_from_the_gpu_seconds_that_were_held() -> None:
    (row,) = usage([held("vision", "ann", 0.0, 1_800.0, 0, 1)], "team")
    assert row.document(2.5)["price"] == 2.5
    assert "price" not in row.document()


def test_the_shares_of_all_and_what_was_idle_add_up_to_the_time_of_the_pool() -> None:
    """In a simulated pool with teams that borrow and reclaim, counted GPU by GPU."""
    works = [
        Work(
            JobId(f"{team}/{number}"),
            40.0 * number,
            600.0 + 50 * number,
            gpus=1 + number % 2,
            sweep=SweepId(team),
            user=f"{team}-{number % 3}",
            virtual_cluster=team,
            costs=Costs(5.0, 2.0, 1.0),
        )
        for team in ("vision", "speech", "")
        for number in range(6)
    ]
    quota = Quota((TeamQuota("vision", 2), TeamQuota("speech", 1)))
    policy = WithinQuota(make_policy("2d-las", {}), quota, Quantum())
    run = simulate(Workload("teams", tuple(works)), layout("2x2"), policy)
    owners = {work.id: work for work in works}
    trials = [
        TrialUse(
            owners[s.job].sweep,
            owners[s.job].user,
            owners[s.job].virtual_cluster,
            s.begin_s,
            (Segment(0, 1, s.gpus, s.begin_s, s.end_s),),
        )
        for s in run.segments
    ]
    end_s = max(s.end_s for s in run.segments)
    busy_s = [
        sum(s.end_s - s.begin_s for s in run.segments if gpu.index in s.gpus) for gpu in run.gpus
    ]
    idle_s = [end_s - seconds for seconds in busy_s]
    for by in BY:
        rows = usage(trials, by, 0.0, end_s, quota)
        shares = sum(row.gpu_seconds for row in rows)
        assert shares + sum(idle_s) == pytest.approx(4 * end_s, rel=1e-3)
        borrowed = [row.borrowed_gpu_seconds for row in rows]
        assert 0 < sum(borrowed) < shares
        assert sum(borrowed) == pytest.approx(
            sum(row.borrowed_gpu_seconds for row in usage(trials, "team", 0.0, end_s, quota))
        )
