"""What a trial's script wrote: Airflow's log of the trial's task, without what Airflow itself says.

A task's log has a message for each line of the script, and others by Hermes: why the trial waits,
or that its segment begins. The latter has fields by which it is known; a script's line has none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from hermes_ops.core.amounts import on_gpus, utc_text
from hermes_ops.trial.output.line_reader import TAIL_LINES, plain

if TYPE_CHECKING:
    from hermes_ops.airflow.client import AirflowClient, TaskKey

Message = Mapping[str, Any]

_OWN_LOGGERS = ("airflow.task.operators.", "hermes_ops.")
_PREPARED = "task.stdout"  # before the task has taken over the process that was started for it


def log_segment_start(log: Any, number: int, epoch: int, gpus: Sequence[int]) -> None:  # noqa: ANN401 - Airflow's own
    """Write into the task's log that a segment begins; `number` counts from 1."""
    fields = {"segment": number, "lease_epoch": epoch, "gpus": list(gpus)}
    log.info("Segment %s begins%s", number, on_gpus(gpus), **fields)


@dataclass(frozen=True, slots=True)
class LoggedSegment:
    """A segment as the task's log has it; `began_s` in Unix time, None if the log has no time."""

    number: int
    epoch: int
    gpus: tuple[int, ...]
    began_s: float | None = None

    def __str__(self) -> str:
        since = "" if self.began_s is None else f", {utc_text(self.began_s)}"
        return f"==> segment {self.number}{on_gpus(self.gpus)}{since} <=="


def recent_lines() -> deque[str]:
    """Return an empty store of the newest lines, more than the last ones that an error has."""
    return deque(maxlen=2 * TAIL_LINES)


def parse_messages(
    messages: Iterable[Message], recent: deque[str]
) -> Iterator[LoggedSegment | str]:
    """Yield the beginnings of segments, and the lines without escapes and control characters.

    An error has the script's last lines again: they are left out where the log has them already.
    `recent` keeps the newest lines from one call to the next.
    """
    for message in messages:
        logger = str(message.get("logger", ""))
        if not logger.startswith(_OWN_LOGGERS) and logger != _PREPARED:
            continue
        if (segment := _segment_of(message)) is not None:
            yield segment
            continue
        lines = _lines_of(message)
        if message.get("level") == "error" and lines[-1] in recent:
            del lines[1:]
        recent.extend(lines)
        yield from lines


def _segment_of(message: Message) -> LoggedSegment | None:
    number, epoch, gpus = (message.get(name) for name in ("segment", "lease_epoch", "gpus"))
    if not isinstance(number, int) or not isinstance(epoch, int) or not isinstance(gpus, list):
        return None
    return LoggedSegment(number, epoch, tuple(gpus), _time_s(message))


def _time_s(message: Message) -> float | None:
    try:
        return datetime.fromisoformat(str(message.get("timestamp"))).timestamp()
    except ValueError:
        return None


def _lines_of(message: Message) -> list[str]:
    """Return the lines of a message; of a progress bar the last state, as a terminal shows it."""
    lines = str(message.get("event", "")).split("\n")
    return [plain(line.rstrip("\r").rpartition("\r")[2]) for line in lines]


@dataclass(slots=True)
class LogExcerpt:
    """The last segments of a log and their last lines, in bounded memory; None: all of them."""

    segments: int | None = None
    lines: int | None = None
    _kept: deque[tuple[LoggedSegment | None, deque[str]]] = field(init=False)

    def __post_init__(self) -> None:
        self._kept = deque(maxlen=self.segments)

    def extend(self, parts: Iterable[LoggedSegment | str]) -> None:
        """Add what follows in the log."""
        for part in parts:
            if isinstance(part, LoggedSegment):
                self.begins(part)
                continue
            if not self._kept:
                self._kept.append((None, deque(maxlen=self.lines)))
            self._kept[-1][1].append(part)

    def begins(self, segment: LoggedSegment) -> bool:
        """Add a segment; False if it is the newest one, which a later run of the task goes on."""
        newest = self._kept[-1][0] if self._kept else None
        if newest is not None and newest.epoch == segment.epoch:
            return False
        self._kept.append((segment, deque(maxlen=self.lines)))
        return True

    def rendered(self) -> Iterator[str]:
        """Yield the lines, each segment's below its head."""
        total = sum(len(lines) for _, lines in self._kept)
        skipped = 0 if self.lines is None else max(0, total - self.lines)
        for segment, lines in self._kept:
            shown = list(lines)[skipped:]
            skipped = max(0, skipped - len(lines))
            if segment is not None and (shown or self.lines is None):
                yield str(segment)
            yield from shown


@dataclass(slots=True)
class LogCursor:
    """The position in the log of one try of a task: fetches new messages, each once."""

    airflow: AirflowClient
    task: TaskKey
    attempt: int
    _token: str | None = None
    _seen: int = 0

    def fetch(self) -> list[dict[str, Any]]:
        """Return the messages since the last call.

        Airflow gives a token for what comes next only while the task runs. Without a new one the
        last one is sent again, and what it has brought already is left out.
        """
        messages, token = self.airflow.task_log_since(self.task, self.attempt, self._token)
        fresh = messages[self._seen :]
        self._token, self._seen = (token, 0) if token else (self._token, len(messages))
        return fresh


def has_log(messages: Iterable[Message]) -> bool:
    """Return whether the log of a try is there: a task logs something before it does anything."""
    return any("logger" in message for message in messages)


def missing_reason(messages: Iterable[Message]) -> str:
    """Return what Airflow says of a log that it cannot read; empty if it says nothing."""
    events = (str(message.get("event", "")) for message in messages)
    return plain(next((event for event in events if not event.startswith("::")), ""))
