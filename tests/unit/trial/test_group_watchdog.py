"""When a group of workers is taken to wait for ever: by what its workers show, and the time."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.trial.supervisor.group_watchdog import (
    LEAST_QUIET_S,
    GroupProgress,
    GroupWatchdog,
    quiet_limit_s,
    why_stuck,
)

START_S = 600.0


def trains(**more: float) -> GroupProgress:
    """Both ranks train; rank 0 has made its last step at 1000 s."""
    return GroupProgress(2, training=2, progress_s=1000.0)._replace(**more)  # type: ignore[arg-type]  # of its fields


@pytest.mark.parametrize(
    ("progress", "limit_s"),
    [
        (trains(), START_S),
        (trains(epoch_s=5.0, usual_s=1.0, longest_s=2.0), LEAST_QUIET_S),
        (trains(epoch_s=20.0, usual_s=20.0, longest_s=20.0), 400.0),
        (trains(epoch_s=50.0, usual_s=1.0, longest_s=140.0), 420.0),
        (trains(epoch_s=200.0, usual_s=1.0, longest_s=2.0), 400.0),
        (trains(epoch_s=9000.0, usual_s=1.0, longest_s=2.0), START_S),
        (GroupProgress(2, progress_s=1000.0), inf),
        (GroupProgress(2, progress_s=1000.0, epoch_s=30.0, usual_s=30.0, longest_s=40.0), 600.0),
    ],
)
def test_the_limit_follows_the_usual_step_the_longest_pause_and_the_epoch(
    progress: GroupProgress, limit_s: float
) -> None:
    assert quiet_limit_s(progress, START_S) == limit_s
    if limit_s < inf:
        assert why_stuck(progress, START_S, 1000.0 + limit_s - 0.1) is None
        reason = why_stuck(progress, START_S, 1000.0 + limit_s)
        assert reason is not None
        assert "the ranks of the trial do not agree: rank 0 has made no step for" in reason


def test_ranks_of_which_some_train_and_others_do_not_have_the_time_of_a_start() -> None:
    progress = GroupProgress(3, training=1, uneven_since_s=10.0)
    assert why_stuck(progress, START_S, 609.9) is None
    reason = why_stuck(progress, START_S, 610.0)
    assert reason is not None
    assert "1 of 3 have been training and the others not" in reason


def test_an_evaluation_by_rank_0_alone_after_short_epochs_is_no_deadlock() -> None:
    watchdog = GroupWatchdog(2, first_step=0, by_steps=False)
    looks = [(float(now_s), {0: now_s, 1: now_s}, now_s // 20) for now_s in range(201)]
    progress = follow(watchdog, looks)
    assert why_stuck(progress, START_S, 200.0 + 240.0) is None
    assert why_stuck(progress, START_S, 200.0 + 300.0) is not None


def test_a_group_of_which_nothing_is_expected_is_never_stuck() -> None:
    assert why_stuck(GroupProgress(2), START_S, 1e9) is None


Look = tuple[float, dict[int, int], int]


def follow(watchdog: GroupWatchdog, looks: Iterable[Look]) -> GroupProgress:
    """Return what is known after looks at the files of the ranks and the step, at those times."""
    for now_s, marks, step in looks:
        watchdog.observe(marks, step, now_s)
    return watchdog.progress


def test_steps_by_the_file_of_rank_0_are_progress_and_its_epochs_are_measured() -> None:
    watchdog = GroupWatchdog(2, first_step=3, by_steps=False)
    progress = follow(
        watchdog,
        [
            (1.0, {0: 1}, 3),
            (2.0, {0: 2, 1: 2}, 3),
            (3.0, {0: 3, 1: 2}, 3),
            (7.0, {0: 3, 1: 7}, 3),  # a touch of rank 1 is no progress
            (9.0, {0: 3, 1: 7}, 4),
            (10.0, {0: 10, 1: 7}, 4),
        ],
    )
    assert progress == GroupProgress(
        2, training=2, progress_s=10.0, usual_s=1.0, longest_s=6.0, epoch_s=7.0
    )


def test_the_ranks_are_uneven_from_the_first_that_trains_until_all_do_or_none() -> None:
    watchdog = GroupWatchdog(3, first_step=0, by_steps=False)
    assert follow(watchdog, [(1.0, {}, 0)]).uneven_since_s is None
    assert follow(watchdog, [(2.0, {1: 1}, 0), (3.0, {1: 1, 2: 1}, 0)]).uneven_since_s == 2.0
    assert follow(watchdog, [(4.0, {0: 1, 1: 1, 2: 1}, 0)]).uneven_since_s is None
    assert follow(watchdog, [(5.0, {1: 1}, 0)]).uneven_since_s == 5.0
    ended = follow(watchdog, [(6.0, {}, 0)])
    assert (ended.uneven_since_s, ended.progress_s) == (None, None)


def test_training_that_is_announced_has_to_begin_unless_it_is_over() -> None:
    watchdog = GroupWatchdog(2, first_step=0, by_steps=False)
    watchdog.announce(5.0)
    assert follow(watchdog, [(6.0, {}, 0)]).uneven_since_s == 5.0
    watchdog.withdraw()
    assert follow(watchdog, [(7.0, {}, 0)]).uneven_since_s is None


def test_the_time_between_two_trainings_is_no_pause() -> None:
    both = {0: 1, 1: 1}
    watchdog = GroupWatchdog(2, first_step=0, by_steps=False)
    looks: list[Look] = [(1.0, both, 0), (2.0, both, 1), (3.0, {}, 1), (900.0, both, 1)]
    progress = follow(watchdog, looks)
    assert (progress.progress_s, progress.longest_s, progress.epoch_s) == (900.0, 1.0, 1.0)


def test_the_first_epoch_of_each_fit_has_the_time_of_a_start() -> None:
    watchdog, both = GroupWatchdog(2, first_step=0, by_steps=False), {0: 1, 1: 1}
    watchdog.announce(0.0)
    follow(watchdog, [(1.0, both, 0), (2.0, {0: 2, 1: 2}, 1), (3.0, {}, 1)])
    assert quiet_limit_s(watchdog.progress, START_S) == LEAST_QUIET_S
    watchdog.announce(10.0)
    again = follow(watchdog, [(11.0, both, 1), (12.0, {0: 3, 1: 3}, 1)])
    assert quiet_limit_s(again, START_S) == START_S, "its validation is yet to be traced"
    over = follow(watchdog, [(13.0, {0: 3, 1: 3}, 2)])
    assert quiet_limit_s(over, START_S) == LEAST_QUIET_S


def test_without_the_hook_the_steps_alone_count_from_the_first_one() -> None:
    watchdog = GroupWatchdog(2, first_step=4, by_steps=True)
    assert follow(watchdog, [(50.0, {}, 4)]).progress_s is None
    first = follow(watchdog, [(60.0, {}, 5), (70.0, {}, 5)])
    assert (first.progress_s, quiet_limit_s(first, START_S)) == (60.0, inf)
    later = follow(watchdog, [(75.0, {}, 6), (80.0, {}, 6)])
    assert (later.progress_s, later.usual_s, later.epoch_s) == (75.0, 15.0, 15.0)
    unknown = GroupWatchdog(2, first_step=4, by_steps=False)
    assert follow(unknown, [(60.0, {}, 5), (75.0, {}, 6)]).progress_s is None


@given(
    st.lists(
        st.tuples(
            st.floats(0.01, 500.0),
            st.dictionaries(st.integers(0, 2), st.integers(0, 5)),
            st.integers(0, 3),
        ),
        max_size=40,
    ),
    st.booleans(),
)
def test_whatever_is_seen_a_group_is_never_stuck_right_after_a_sign_of_progress(
    looks: list[tuple[float, dict[int, int], int]], by_steps: bool
) -> None:
    watchdog, now_s, step = GroupWatchdog(3, 0, by_steps), 0.0, 0
    for pause_s, marks, more in looks:
        now_s, step = now_s + pause_s, step + more
        progress = watchdog.observe(marks, step, now_s)
        assert progress.training == len(marks)
        assert progress.progress_s is None or progress.progress_s <= now_s
        assert progress.usual_s <= progress.longest_s
        if progress.progress_s == now_s or progress.uneven_since_s == now_s:
            assert why_stuck(progress, START_S, now_s) is None
        if progress.uneven_since_s is not None:
            assert 0 < progress.training < 3
