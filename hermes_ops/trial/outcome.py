"""How a segment ended: a pure function of what was seen."""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence
from typing import NamedTuple

from hermes_ops.trial.failure import (
    Cause,
    Failure,
    classify,
    is_error_at_stop,
    is_final,
    lines_since,
    no_objective,
)

FINISHED, PREEMPTED, INFRASTRUCTURE = 0, 75, 70
_MOST_REFUSED = 3  # lines that were not read, in a reason
_NO_SPACE = ("No space left on device", "[Errno 28]", "Disk quota exceeded", "[Errno 122]")


class Outcome(str, enum.Enum):  # noqa: UP042 - enum.StrEnum is not in Python 3.9
    """The four ends of a segment."""

    FINISHED = "finished"
    PREEMPTED = "preempted"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class Facts(NamedTuple):
    """What the supervisor knows when the script has gone."""

    exit_code: int  # negative: killed by that signal
    asked_to_stop: bool
    ended_at_max_epochs: bool
    verdict: str | None  # why the supervisor ended it as failed
    has_checkpoint: bool
    objective: str | None
    objective_reported: bool
    trained_to_end: bool  # the hook saw every epoch through, or the last epoch was reported
    tail: Sequence[str]
    diverged: bool = False  # the verdict is that the objective is not finite
    direction: str | None = None
    reported: Sequence[str] = ()  # names of metrics, over the trial's whole life
    tail_at_stop: Sequence[str] = ()  # the last lines when it was told to stop
    refused: Sequence[str] = ()  # lines that were not read, and why
    worked_before: bool = False  # an earlier segment has reported values, and this one none


class Ending(NamedTuple):
    """The outcome, its reason for a person, and the exit code of hermes-trial.

    Of a failure also its cause, and whether trying the trial again may help.
    """

    outcome: Outcome
    reason: str
    code: int
    cause: str = ""
    retryable: bool = True


def judge(facts: Facts) -> Ending:
    """Decide the outcome.

    A script that ends with 0 after SIGTERM and has a checkpoint counts as preempted unless it is
    known to have trained to its end: a clean exit on SIGTERM must not pass for a finished trial.
    """
    if facts.verdict is not None:
        cause = Cause.DIVERGED if facts.diverged else Cause.OTHER
        return _failed(facts, facts.verdict, cause)
    if facts.ended_at_max_epochs:
        return _finished(facts)
    if facts.exit_code == PREEMPTED:
        return _stopped(facts)
    if facts.asked_to_stop and not (facts.exit_code == 0 and facts.trained_to_end):
        return _told_to_stop(facts)
    if facts.exit_code == 0:
        return _finished(facts)
    return _broken(facts)


def _finished(facts: Facts) -> Ending:
    if facts.objective is not None and not facts.objective_reported:
        found = no_objective(facts.objective, facts.direction, facts.reported)
        reason = "; ".join([f"{found.line}: {found.remedy}", *facts.refused[:_MOST_REFUSED]])
        return _failed(facts, reason, found.cause)
    return Ending(Outcome.FINISHED, "", FINISHED)


def _told_to_stop(facts: Facts) -> Ending:
    """Tell a script that has stopped from one that raised an error instead."""
    if _out_of_space(facts):
        return _failed(facts, _no_space())
    fresh = lines_since(facts.tail_at_stop, facts.tail)
    if is_error_at_stop(facts.exit_code, fresh):
        ending = _broken(facts._replace(tail=fresh))
        return ending._replace(reason=f"told to stop, it failed: {ending.reason}")
    return _stopped(facts)


def _broken(facts: Facts) -> Ending:
    """Return the failure of a script that has ended by an error or a signal."""
    if _out_of_space(facts):
        return _failed(facts, _no_space())
    found = classify(facts.exit_code, facts.tail)
    return _failed(facts, _why(facts, found), found.cause)


def _stopped(facts: Facts) -> Ending:
    if facts.has_checkpoint:
        return Ending(Outcome.PREEMPTED, "", PREEMPTED)
    return Ending(Outcome.INTERRUPTED, "stopped without a checkpoint: it starts anew", PREEMPTED)


def _failed(facts: Facts, reason: str, cause: Cause = Cause.OTHER) -> Ending:
    code = facts.exit_code if facts.exit_code > 0 else 128 - facts.exit_code
    if code in (FINISHED, PREEMPTED, INFRASTRUCTURE, 128) or code > 255:
        code = 1
    retryable = not is_final(cause, facts.worked_before)
    return Ending(Outcome.FAILED, reason, code, cause.value, retryable)


def _why(facts: Facts, found: Failure) -> str:
    last = next((line.strip() for line in reversed(facts.tail) if line.strip()), "no output")
    if facts.exit_code < 0:
        return f"killed by {_signal_name(-facts.exit_code)}: {last}"
    why = f"exit code {facts.exit_code}: {found.line or last}"
    return f"{why}: {found.remedy}" if found.remedy else why


def _out_of_space(facts: Facts) -> bool:
    return any(mark in line for line in facts.tail[-15:] for mark in _NO_SPACE)


def _no_space() -> str:
    return "no space left on the device (a checkpoint could not be written; the one before is kept)"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
