"""The states of a trial, as a table: what may follow what."""

from __future__ import annotations

from enum import Enum

from hermes_ops.errors import IllegalMove


class TrialState(Enum):
    """Where a trial stands, in the words that users read everywhere."""

    PENDING = "pending"  # not begun, no configuration
    WAITING = "waiting"  # has its configuration, holds no GPU
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED_EARLY = "stopped_early"
    CANCELLED = "cancelled"


_S = TrialState
MOVES: dict[TrialState, frozenset[TrialState]] = {
    # WAITING: its lease was withdrawn before the script began. FAILED: it cannot even be started.
    _S.PENDING: frozenset({_S.WAITING, _S.RUNNING, _S.FAILED, _S.CANCELLED}),
    _S.WAITING: frozenset({_S.RUNNING, _S.FAILED, _S.STOPPED_EARLY, _S.CANCELLED}),
    # WAITING: preempted, or failed with failures left, or its machine vanished.
    _S.RUNNING: frozenset(
        {_S.WAITING, _S.FINISHED, _S.FAILED, _S.STOPPED_EARLY, _S.CANCELLED},
    ),
    _S.FINISHED: frozenset(),
    _S.FAILED: frozenset(),
    _S.STOPPED_EARLY: frozenset(),
    _S.CANCELLED: frozenset(),
}


def is_final(state: TrialState) -> bool:
    """True for a state that a trial never leaves."""
    return not MOVES[state]


def move(state: TrialState, to: TrialState) -> TrialState:
    """The new state; IllegalMove when the table has no such move (a state to itself is none)."""
    if to not in MOVES[state]:
        legal = ", ".join(sorted(s.value for s in MOVES[state])) or "nothing: it is final"
        raise IllegalMove(
            f"a trial that is {state.value} cannot become {to.value} (legal: {legal}); "
            "its state was left as it is"
        )
    return to
