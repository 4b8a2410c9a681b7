"""How a segment ended: a pure function of what was seen."""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence
from typing import NamedTuple

FINISHED, PREEMPTED, INFRASTRUCTURE = 0, 75, 70
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


class Ending(NamedTuple):
    """The outcome, its reason for a person, and the exit code of hermes-trial."""

    outcome: Outcome
    reason: str
    code: int


def judge(facts: Facts) -> Ending:
    """Decide the outcome.

    A script that ends with 0 after SIGTERM and has a checkpoint counts as preempted unless it is
    known to have trained to its end: a clean exit on SIGTERM must not pass for a finished trial.
    """
    if facts.verdict is not None:
        return _failed(facts, facts.verdict)
    if facts.ended_at_max_epochs:
        return _finished(facts)
    if facts.exit_code == PREEMPTED:
        return _stopped(facts)
    if facts.asked_to_stop and not (facts.exit_code == 0 and facts.trained_to_end):
        return _stopped(facts) if not _out_of_space(facts) else _failed(facts, _no_space())
    if facts.exit_code == 0:
        return _finished(facts)
    return _failed(facts, _why(facts))


def _finished(facts: Facts) -> Ending:
    if facts.objective is not None and not facts.objective_reported:
        return _failed(
            facts,
            f"it ended without ever reporting {facts.objective!r}: name the objective as the "
            f"script reports it, print `{facts.objective}=VALUE`, set trial.metric_pattern or call "
            "hermes_ops.trial.report()",
        )
    return Ending(Outcome.FINISHED, "", FINISHED)


def _stopped(facts: Facts) -> Ending:
    if facts.has_checkpoint:
        return Ending(Outcome.PREEMPTED, "", PREEMPTED)
    return Ending(Outcome.INTERRUPTED, "stopped without a checkpoint: it starts anew", PREEMPTED)


def _failed(facts: Facts, reason: str) -> Ending:
    code = facts.exit_code if facts.exit_code > 0 else 128 - facts.exit_code
    if code in (FINISHED, PREEMPTED, INFRASTRUCTURE, 128) or code > 255:
        code = 1
    return Ending(Outcome.FAILED, reason, code)


def _why(facts: Facts) -> str:
    if _out_of_space(facts):
        return _no_space()
    last = next((line.strip() for line in reversed(facts.tail) if line.strip()), "no output")
    if facts.exit_code < 0:
        return f"killed by {_signal_name(-facts.exit_code)}: {last}"
    return f"exit code {facts.exit_code}: {last}"


def _out_of_space(facts: Facts) -> bool:
    return any(mark in line for line in facts.tail[-15:] for mark in _NO_SPACE)


def _no_space() -> str:
    return "no space left on the device (a checkpoint could not be written; the one before is kept)"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
