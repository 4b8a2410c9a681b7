"""The table of a trial's states."""

from __future__ import annotations

import itertools

import pytest

from hermes_ops.core.lifecycle import MOVES, TrialState, is_final, move
from hermes_ops.errors import IllegalMove

FINAL = {"finished", "failed", "stopped_early", "cancelled"}


def test_the_final_states_are_the_last_four() -> None:
    assert {state.value for state in TrialState if is_final(state)} == FINAL


@pytest.mark.parametrize(("state", "to"), list(itertools.product(TrialState, TrialState)))
def test_a_move_is_in_the_table_or_raises(state: TrialState, to: TrialState) -> None:
    if to in MOVES[state]:
        assert move(state, to) is to
        return
    with pytest.raises(IllegalMove, match=f"{state.value} cannot become {to.value}"):
        move(state, to)


def test_a_running_trial_can_reach_every_other_state_but_pending() -> None:
    assert MOVES[TrialState.RUNNING] == set(TrialState) - {TrialState.PENDING, TrialState.RUNNING}


def test_every_state_can_be_reached_and_every_open_one_can_end() -> None:
    assert set().union(*MOVES.values()) == set(TrialState) - {TrialState.PENDING}
    assert all(any(is_final(to) for to in MOVES[s]) for s in TrialState if not is_final(s))
