"""How a segment ended: a pure function of the supervisor's observations."""

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
    last_line,
    lines_since,
    no_objective,
)

FINISHED, PREEMPTED, INFRASTRUCTURE = 0, 75, 70

_KILL = int(signal.SIGKILL)
_MOST_REFUSED = 3  # lines that were not read, in a reason
_NO_SPACE = ("No space left on device", "[Errno 28]", "Disk quota exceeded", "[Errno 122]")


class SegmentOutcome(str, enum.Enum):  # noqa: UP042 - enum.StrEnum is not in Python 3.9
    """The four ends of a segment."""

    FINISHED = "finished"
    PREEMPTED = "preempted"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class SegmentFacts(NamedTuple):
    """The observations of the supervisor when the script has ended."""

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
    unwritten: str = ""  # why values that were reported are not in the metrics file
    worked_before: bool = False  # an earlier segment has reported values, and this one none


class SegmentEnding(NamedTuple):
    """The outcome, its reason for a person, and the exit code of hermes-trial.

    Of a failure also its cause, and whether trying the trial again may help.
    """

    outcome: SegmentOutcome
    reason: str
    code: int
    cause: str = ""
    retryable: bool = True


def judge(facts: SegmentFacts) -> SegmentEnding:
    """Decide the outcome.

    A script that ends with 0 after SIGTERM and has a checkpoint counts as preempted unless it is
    known to have trained to its end: a clean exit on SIGTERM must not pass for a finished trial.
    """
    if facts.unwritten or facts.verdict is not None:
        return _ended_by_us(facts)
    if facts.ended_at_max_epochs:
        return _finished(facts)
    if facts.exit_code == PREEMPTED:
        return _stopped(facts)
    if facts.asked_to_stop and not (facts.exit_code == 0 and facts.trained_to_end):
        return _stopped_or_failed(facts)
    if facts.exit_code == 0:
        return _finished(facts)
    return _broken(facts)


def _ended_by_us(facts: SegmentFacts) -> SegmentEnding:
    """Return the failure of a script that the supervisor has ended, or whose values are lost."""
    if facts.unwritten and not facts.diverged:
        return _failed(facts, facts.unwritten, Cause.NO_SPACE)
    cause = Cause.DIVERGED if facts.diverged else Cause.OTHER
    return _failed(facts, facts.verdict or "", cause)


def _finished(facts: SegmentFacts) -> SegmentEnding:
    if facts.objective is not None and not facts.objective_reported:
        failure = no_objective(facts.objective, facts.direction, facts.reported)
        notes = facts.refused[:_MOST_REFUSED]
        reason = "; ".join([f"{failure.line}: {failure.remedy}", *notes, *_suggestions(facts)])
        return _failed(facts, reason, failure.cause)
    return SegmentEnding(SegmentOutcome.FINISHED, "", FINISHED)


def _suggestions(facts: SegmentFacts) -> list[str]:
    """Return what would have the last lines read, if nothing was and the notes do not say it."""
    from hermes_ops.trial.output.advice import LEAD, advice  # only where it is asked for

    if facts.objective is None or facts.reported or any(LEAD in note for note in facts.refused):
        return []
    return [text for text in (advice(facts.tail, facts.objective),) if text]


def _stopped_or_failed(facts: SegmentFacts) -> SegmentEnding:
    """Tell a script that has stopped from one that raised an error instead."""
    if line := _line_on_space(facts):
        return _failed(facts, no_space(line), Cause.NO_SPACE)
    fresh = lines_since(facts.tail_at_stop, facts.tail)
    if is_error_at_stop(facts.exit_code, fresh):
        ending = _broken(facts._replace(tail=fresh))
        return ending._replace(reason=f"told to stop, it failed: {ending.reason}")
    return _stopped(facts)


def _broken(facts: SegmentFacts) -> SegmentEnding:
    """Return the failure of a script that has ended by an error or a signal."""
    if line := _line_on_space(facts):
        return _failed(facts, no_space(line), Cause.NO_SPACE)
    failure = classify(facts.exit_code, facts.tail)
    return _failed(facts, _why(facts, failure), failure.cause)


def _stopped(facts: SegmentFacts) -> SegmentEnding:
    if facts.has_checkpoint:
        return SegmentEnding(SegmentOutcome.PREEMPTED, "", PREEMPTED)
    return SegmentEnding(
        SegmentOutcome.INTERRUPTED,
        "stopped without a checkpoint: it restarts from scratch",
        PREEMPTED,
    )


def _failed(facts: SegmentFacts, reason: str, cause: Cause) -> SegmentEnding:
    code = facts.exit_code if facts.exit_code > 0 else 128 - facts.exit_code
    if code in (FINISHED, PREEMPTED, INFRASTRUCTURE, 128) or code > 255:
        code = 1
    retryable = not is_final(cause, facts.worked_before)
    return SegmentEnding(SegmentOutcome.FAILED, reason, code, cause.value, retryable)


def _why(facts: SegmentFacts, failure: Failure) -> str:
    last = last_line(facts.tail)
    if facts.exit_code < 0:
        who = " (the kernel does so where memory runs out)" if facts.exit_code == -_KILL else ""
        return f"killed by {_signal_name(-facts.exit_code)}{who}: {last}"
    why = f"exit code {facts.exit_code}: {failure.line or last}"
    return f"{why}: {failure.remedy}" if failure.remedy else why


def _line_on_space(facts: SegmentFacts) -> str:
    """Return the last line of the output that speaks of a full disk; empty without one."""
    lines = (line.strip() for line in reversed(facts.tail[-15:]))
    return next((line for line in lines if any(mark in line for mark in _NO_SPACE)), "")


def no_space(detail: str) -> str:
    """Return why a segment ended whose disk is full; `detail` says what could not be written."""
    return (
        f"no space left on the device: {detail}: free some space there, the last complete "
        "checkpoint is kept"
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
