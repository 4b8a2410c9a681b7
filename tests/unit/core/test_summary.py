from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.summary import (
    ENDED_STATES,
    Segment,
    alike,
    failure_lines,
    final_state,
    most_gpus,
    sweep_state,
)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("val_loss is NaN at step 3", "val_loss is NaN at step 17"),
        ("exit code 1: argument --lr: invalid value: '1e-05'", "exit code 1: argument --lr: "
         "invalid value: '0.25'"),
        ("exit code 1: <Model at 0x7f3a> is gone", "exit code 1: <Model at 0x81bb> is gone"),
        ("no folder run-3fa94c1e8b", "no folder run-90c2d7aa01"),
    ],
)  # fmt: skip
def test_what_differs_from_trial_to_trial_makes_no_other_failure(one: str, other: str) -> None:
    (group,) = alike([(1, other), (0, one)])
    assert (group.numbers, group.reason) == ((0, 1), one)


def test_failures_of_other_kinds_are_told_apart_the_most_frequent_first() -> None:
    failures = [(0, "no data"), (1, "NaN at step 3"), (2, "NaN at step 9"), (3, "no disk")]
    assert failure_lines(failures) == [
        "2 trials failed alike (1, 2): NaN at step 3",
        "Trial 0 failed: no data",
        "Trial 3 failed: no disk",
    ]
    assert failure_lines(failures, most=1)[-1] == "2 more trials failed in other ways"


def test_one_reason_of_all_failures_is_said_once() -> None:
    assert failure_lines([(n, f"NaN at step {n}") for n in range(8)]) == [
        "8 trials failed alike: NaN at step 0"
    ]
    assert failure_lines([]) == []


@given(st.lists(st.tuples(st.integers(0, 99), st.text(max_size=20)), max_size=20))
def test_every_failed_trial_is_in_exactly_one_group(failures: list[tuple[int, str]]) -> None:
    numbers = sorted(n for group in alike(failures) for n in group.numbers)
    assert numbers == sorted(n for n, _ in failures)


@pytest.mark.parametrize(
    ("closed", "failed", "has_best", "state"),
    [
        (False, False, True, "finished"),
        (False, False, False, "failed"),
        (True, False, True, "cancelled"),
        (True, False, False, "cancelled"),
        (False, True, False, "failed"),
        (False, True, True, "failed"),
    ],
)
def test_a_sweep_ends_in_the_state_that_its_end_gives_it(
    closed: bool, failed: bool, has_best: bool, state: str
) -> None:
    assert final_state(closed=closed, failed=failed, has_best=has_best) == state
    assert state in ENDED_STATES


@pytest.mark.parametrize(
    ("airflow", "recorded", "state"),
    [
        ("success", "cancelled", "cancelled"),
        ("success", "finished", "finished"),
        ("failed", "failed", "failed"),
        ("failed", "cancelled", "cancelled"),
        ("failed", "running", "failed"),  # MLflow was away when it ended
        ("failed", None, "failed"),
        ("running", "finished", "running"),
        ("queued", None, "queued"),
        ("skipped", "finished", "skipped"),
        (None, None, "running"),
    ],
)
def test_a_sweep_has_one_state_whatever_airflow_calls_it(
    airflow: str | None, recorded: str | None, state: str
) -> None:
    assert sweep_state(airflow, recorded) == state


def held(gpus: tuple[int, ...], start_s: float, end_s: float | None) -> Segment:
    return Segment(trial=0, epoch=1, gpus=gpus, start_s=start_s, end_s=end_s)


@pytest.mark.parametrize(
    ("segments", "most"),
    [
        ([], 0),
        ([held((0,), 0, 5), held((1,), 6, 9)], 1),
        ([held((0,), 0, 5), held((1,), 4, 9)], 2),
        ([held((0,), 0, 5), held((1,), 5, 9)], 1),
        ([held((0, 1), 0, 5), held((2,), 1, None), held((0,), 6, 7)], 3),
        ([held((0,), 0, 5), held((0,), 4.9, 9)], 1),  # a hand-over on one GPU
        ([held((0,), 3, None), held((1,), 90, None)], 2),
    ],
)
def test_gpus_at_once_are_counted_from_the_segments(segments: list[Segment], most: int) -> None:
    assert most_gpus(segments) == most
