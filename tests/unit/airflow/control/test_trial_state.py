from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings

from hermes_ops.airflow.control.trial_state import (
    IMPOSSIBLE,
    MOVES,
    STATES,
    TrialRecords,
    TrialState,
    classify,
)
from hermes_ops.airflow.metadata_rows import ENDED_TASK_STATES
from hermes_ops.airflow.records import HELD_POOL_SLOTS
from hermes_ops.core.model import Phase
from tests.unit.airflow.builders import row
from tests.unit.airflow.control.trial_records import (
    EXAMPLES,
    OTHER_OUTCOME,
    PAUSED,
    WAITS,
    S,
    any_records,
    is_live,
    is_open,
    is_told,
    keeps_slots,
)

DOCUMENT = Path(__file__).parents[4] / "docs" / "architecture.md"
BEGIN, END = "<!-- states of a trial: begin -->", "<!-- states of a trial: end -->"
REWRITE = (
    "REWRITE_DOCS=1 .venv/bin/pytest tests/unit/airflow/control/test_trial_state.py -k the_document"
)


def is_final(t: TrialRecords) -> bool:
    return t.row.state in ENDED_TASK_STATES or t.final is not None


def has_force(t: TrialRecords) -> bool:
    if t.lease is None or t.lease.revoked:
        return False
    return t.segment is None or t.segment.epoch < t.lease.epoch or is_open(t)


def is_marked_here(t: TrialRecords) -> bool:
    """Return whether the controller has ended this very task instance, not an earlier one."""
    return t.segment is not None and t.segment.task == t.row.id


def waits_after_its_end(t: TrialRecords) -> bool:
    return t.final is not None and t.row.state in WAITS


def is_cleared(t: TrialRecords) -> bool:
    held = t.row.pool_slots >= HELD_POOL_SLOTS
    return waits_after_its_end(t) and held and not is_marked_here(t)


def awaits_mark(t: TrialRecords) -> bool:
    failed_here = t.final == "failed" and is_marked_here(t)
    ended_here = failed_here or t.final in ("stopped_early", "cancelled")
    return waits_after_its_end(t) and ended_here and not is_cleared(t)


def is_ahead(t: TrialRecords) -> bool:
    return t.lease is not None and t.segment is not None and t.segment.epoch > t.lease.epoch


def is_spent(t: TrialRecords) -> bool:
    """Return whether the lease of a trial is used up or revoked, and no live task uses it."""
    if is_final(t) or t.lease is None or is_ahead(t) or has_force(t):
        return False
    return not (is_open(t) and is_live(t))


def is_revoked(t: TrialRecords) -> bool:
    return t.lease is not None and t.lease.revoked


def is_training(t: TrialRecords) -> bool:
    return not is_final(t) and is_open(t) and is_live(t)


def has_no_task(t: TrialRecords) -> bool:
    return not is_final(t) and is_open(t) and not is_live(t) and not is_revoked(t)


def is_scheduled(t: TrialRecords) -> bool:
    return t.row.state == "scheduled"


def runs_without_lease(t: TrialRecords) -> bool:
    return t.lease is None and t.segment is not None and t.segment.running


HOLDS: Mapping[TrialState, Callable[[TrialRecords], bool]] = {
    S.PENDING: lambda t: not is_final(t) and t.lease is None and not runs_without_lease(t),
    S.GRANTED: lambda t: not is_final(t) and has_force(t) and not is_open(t),
    S.RUNNING: lambda t: is_training(t) and has_force(t) and not is_told(t),
    S.STOPPING: lambda t: is_training(t) and has_force(t) and is_told(t) and not t.left,
    S.RELEASED: lambda t: is_training(t) and has_force(t) and is_told(t) and bool(t.left),
    S.UNATTENDED: lambda t: has_no_task(t) and not t.left,
    S.PREEMPTED: lambda t: has_no_task(t) and t.left == PAUSED,
    S.CONCLUDING: lambda t: has_no_task(t) and t.left == OTHER_OUTCOME,
    S.RESIZING: lambda t: is_spent(t) and keeps_slots(t),
    S.LEAVING: lambda t: is_spent(t) and not is_scheduled(t) and not keeps_slots(t),
    S.WAITING: lambda t: is_spent(t) and is_scheduled(t) and t.left != PAUSED,
    S.REVOKED_RUNNING: lambda t: is_training(t) and is_revoked(t) and not is_told(t),
    S.REVOKED_STOPPING: lambda t: is_training(t) and is_revoked(t) and is_told(t),
    S.REVOKED_PREEMPTED: lambda t: is_spent(t) and t.left == PAUSED,
    S.ENDING: lambda t: (
        is_final(t)
        and t.row.state not in ENDED_TASK_STATES
        and not is_cleared(t)
        and not awaits_mark(t)
    ),
    S.UNMARKED: awaits_mark,
    S.UNREPORTED: lambda t: (
        t.row.state in ENDED_TASK_STATES and t.lease is not None and not t.final
    ),
    S.CLEARED: is_cleared,
    S.ENDED: lambda t: t.row.state in ENDED_TASK_STATES and (t.lease is None or bool(t.final)),
    S.SEGMENT_WITHOUT_LEASE: lambda t: not is_final(t) and runs_without_lease(t),
    S.SEGMENT_AHEAD: lambda t: not is_final(t) and is_ahead(t) and is_scheduled(t),
    S.SEGMENT_AHEAD_LEAVING: lambda t: not is_final(t) and is_ahead(t) and not is_scheduled(t),
}


@settings(max_examples=2_000)
@given(any_records())
def test_every_combination_of_records_has_exactly_one_state(trial: TrialRecords) -> None:
    assert [state for state, holds in HOLDS.items() if holds(trial)] == [classify(trial)]


@given(any_records())
def test_the_phase_of_a_policy_follows_from_the_records(trial: TrialRecords) -> None:
    waits = is_scheduled(trial) or (keeps_slots(trial) and not is_ahead(trial))
    expected = Phase.WAITING if waits else Phase.STOPPING
    if is_final(trial):
        expected = Phase.ENDED
    elif trial.lease is None:
        expected = Phase.PENDING
    elif has_force(trial):
        trains = is_open(trial) and is_live(trial)
        stops = bool(trial.left) or (trains and is_told(trial))
        expected = Phase.RUNNING if trains else Phase.STARTING
        expected = Phase.STOPPING if stops else expected
    assert trial.phase is expected


@given(any_records())
def test_a_state_is_impossible_only_where_a_record_is_missing_or_restored(
    trial: TrialRecords,
) -> None:
    if trial.state in IMPOSSIBLE:
        assert runs_without_lease(trial) or is_ahead(trial)
        assert STATES[trial.state].meaning.startswith("Impossible")


@pytest.mark.parametrize("state", TrialState)
def test_each_state_is_that_of_some_records(state: TrialState) -> None:
    task_state, *records = EXAMPLES[state]
    assert TrialRecords(row(0, task_state), *records).state is state  # type: ignore[arg-type]


def test_a_trial_can_come_from_its_beginning_to_each_possible_state_and_from_there_to_its_end() -> (
    None
):
    possible = set(TrialState) - IMPOSSIBLE - {S.REVOKED_PREEMPTED}  # a result that came late
    forward = {(m.source, m.target) for m in MOVES}
    backward = {(target, source) for source, target in forward}
    assert reached({S.PENDING}, forward) == possible
    assert reached({S.ENDED}, backward) == set(TrialState) - IMPOSSIBLE


def reached(states: set[TrialState], moves: set[tuple[TrialState, TrialState]]) -> set[TrialState]:
    """Return the states that these moves lead to, from any of `states`."""
    more = states | {target for source, target in moves if source in states}
    return states if more == states else reached(more, moves)


def drawn() -> str:
    """Return the states and moves of the code as a diagram and two tables in Markdown."""
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> pending"]
    lines += [f"    {m.source.value} --> {m.target.value}: {m.actor} {m.event}" for m in MOVES]
    lines += ["    ended --> [*]", "```", "", "| state | phase | what the records say |"]
    lines += ["| --- | --- | --- |"]
    lines += [f"| `{s.value}` | {i.phase.value} | {i.meaning} |" for s, i in STATES.items()]
    return "\n".join(lines)


def test_the_document_shows_the_states_and_moves_of_the_code() -> None:
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    shown, after = rest.split(END)
    if os.environ.get("REWRITE_DOCS"):
        DOCUMENT.write_text(f"{before}{BEGIN}\n{drawn()}\n{END}{after}")
        return
    assert shown.strip() == drawn(), f"docs/architecture.md differs; rewrite it: {REWRITE}"
