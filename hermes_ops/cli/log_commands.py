"""`hermes logs`: what the script of a trial wrote, from Airflow's log of its task."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hermes_ops.airflow.metadata_rows import ENDED_TASK_STATES
from hermes_ops.airflow.trial_log import (
    LogCursor,
    LogExcerpt,
    LoggedSegment,
    Message,
    has_log,
    missing_reason,
    parse_messages,
    recent_lines,
)
from hermes_ops.cli import INTERRUPTED
from hermes_ops.cli.completion import complete_trials
from hermes_ops.cli.connection import Connection, Home
from hermes_ops.cli.sweep_location import (
    ENDED_AIRFLOW_STATES,
    SweepLocation,
    airflow_state,
    locate_or_explain,
)
from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.trial.files import parse_object

if TYPE_CHECKING:
    from hermes_ops.airflow.client import TaskKey

PERIOD_S = 1.0
WRITING = ("running", "deferred")
"""States of a task in which its log grows."""


def register(app: typer.Typer) -> None:
    """Add the command of this module to the application."""
    app.command("logs")(logs)


def logs(
    trial: Annotated[
        str,
        typer.Argument(
            help="SWEEP/NUMBER, for example digits-…/3.", autocompletion=complete_trials
        ),
    ],
    *,
    last: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Only the last N segments.")
    ] = None,
    tail: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Only the last N lines.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the trial has ended.")
    ] = False,
    home: Home = None,
) -> None:
    """Print what the script of a trial wrote, in all its segments."""
    from hermes_ops.airflow.explanation import parse_trial_name

    sweep, number = parse_trial_name(trial)
    connection = Connection.from_home(home)
    log = TrialLog(connection, locate_or_explain(connection, sweep), number)
    excerpt = LogExcerpt(last, tail)
    if follow:
        _follow(log, excerpt)
        return
    recent = recent_lines()
    for messages in log.fetch():
        excerpt.extend(parse_messages(messages, recent))
    for line in excerpt.rendered():
        typer.echo(line)


@dataclass(frozen=True, slots=True)
class TrialLog:
    """The log of one trial's task, of all its tries."""

    connection: Connection
    place: SweepLocation
    number: int

    @property
    def task(self) -> TaskKey:
        """The trial's task."""
        return self.place.trial(self.number)

    @property
    def trial(self) -> str:
        """The trial as commands name it."""
        return f"{self.place.sweep}/{self.number}"

    def fetch(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the messages of each try, oldest first; HermesError if there are none."""
        state = self.state()
        attempts = self.attempts()
        if not attempts:
            raise HermesError(self.without_begin(state))
        is_found, messages = False, []
        for attempt in attempts:
            messages = self.messages(attempt)
            if has_log(messages):
                is_found = True
                yield messages
            elif attempt != attempts[-1]:
                typer.echo(self.without_log(messages, attempt), err=True)
        if not is_found:
            begun = state in (*WRITING, *ENDED_TASK_STATES)
            raise HermesError(self.without_log(messages) if begun else self.without_begin(state))

    def state(self) -> str:
        """Return the state of the task, empty before it has one; HermesError without the trial."""
        instance = self.connection.airflow.task_instance(self.task)
        if instance is None:
            self._refuse_unknown()
        return str((instance or {}).get("state") or "")

    def attempts(self) -> list[int]:
        """Return the numbers of the tries that have begun, oldest first.

        Airflow does not list each one: it forgets those that its scheduler has reset.
        """
        return list(range(1, max(self.connection.airflow.tries(self.task), default=0) + 1))

    def messages(self, attempt: int) -> list[dict[str, Any]]:
        """Return the messages of a try; of one that Airflow forgot, from the stack's own folder."""
        return self.connection.airflow.task_log(self.task, attempt) or self._local(attempt)

    def _local(self, attempt: int) -> list[dict[str, Any]]:
        from hermes_ops.airflow.folders import home
        from hermes_ops.airflow.prune.removal import log_folder

        run = log_folder(home() / "airflow" / "logs", self.task.dag_id, self.task.run_id)
        task = run / f"task_id={self.task.task_id}" / f"map_index={self.task.map_index}"
        try:
            lines = (task / f"attempt={attempt}.log").read_bytes().split(b"\n")
        except OSError:
            return []
        return [entry for line in lines if (entry := parse_object(line)) is not None]

    def _refuse_unknown(self) -> None:
        """Raise HermesError if there is no such trial, and none to come from a plan."""
        from hermes_ops.airflow.explanation import no_such_trial
        from hermes_ops.cli.outcome import fetch_config

        try:
            trials = fetch_config(self.connection, self.place).trial_count
        except HermesError:
            state = airflow_state(self.connection.airflow, self.place)
            if state is None or state in ENDED_AIRFLOW_STATES:
                raise
            return
        if self.number >= trials:
            raise HermesError(no_such_trial(self.place.sweep, self.number, trials))

    def without_begin(self, state: str) -> str:
        """Return the message on a trial that has not begun."""
        if state in ENDED_TASK_STATES:
            return f"the trial {self.trial} had not begun when its sweep ended: it wrote nothing."
        return (
            f"the trial {self.trial} has not begun, so it has written nothing yet: "
            f"`hermes explain {self.trial}` says why."
        )

    def without_log(self, messages: Iterable[Message], attempt: int | None = None) -> str:
        """Return the message on a log that Airflow cannot show, of one try or of all."""
        from hermes_ops.airflow.client import task_page

        reason = missing_reason(messages)
        which = "" if attempt is None else f" of try {attempt}"
        return (
            f"Airflow has no log{which} of the trial {self.trial}"
            + (f" ({reason})" if reason else "")
            + ": it was deleted, or the machine that has it is away; its page is "
            + f"{self.connection.airflow_url}/{task_page(self.task)}"
        )


def _follow(log: TrialLog, excerpt: LogExcerpt) -> None:
    """Print what is there, then every new line, until the trial has ended."""
    try:
        _print_until_end(log, excerpt)
    except KeyboardInterrupt:
        again = f"`hermes logs {log.trial} --follow`"
        typer.echo(f"\nThe trial {log.trial} goes on. {again} shows it again.", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _print_until_end(log: TrialLog, excerpt: LogExcerpt) -> None:
    from hermes_ops.cli.live_view import UNKNOWN, OutageNotice

    tail = LogTail(log)
    outage = OutageNotice(f"hermes logs {log.trial} --follow", time.monotonic())
    has_ended = has_shown = False
    while not has_ended:
        try:
            parts, has_ended = tail.poll()
            state = ""
        except Unavailable:  # it is being restarted; the trial goes on without us
            parts, state = [], UNKNOWN
        if (notice := outage.after_response(time.monotonic(), state)) is not None:
            typer.echo(notice, err=True)
        if tail.has_begun:
            for line in _lines_to_print(excerpt, parts, is_first=not has_shown):
                typer.echo(line)
            has_shown = True
        if not has_ended:
            time.sleep(PERIOD_S)


def _lines_to_print(
    excerpt: LogExcerpt, parts: Sequence[LoggedSegment | str], *, is_first: bool
) -> Iterator[str]:
    """Yield the excerpt of what was there before, or what is new."""
    if is_first:
        excerpt.extend(parts)
        yield from excerpt.rendered()
        return
    for part in parts:
        if isinstance(part, str) or excerpt.begins(part):
            yield str(part)


@dataclass(slots=True)
class LogTail:
    """Reads what is new in the log of a trial."""

    log: TrialLog
    has_begun: bool = False
    _state: str = ""
    _is_awaited: bool = False
    _cursor: LogCursor | None = None
    _recent: deque[str] = field(default_factory=recent_lines)

    def poll(self) -> tuple[list[LoggedSegment | str], bool]:
        """Return what is new, and whether the trial has ended, so that nothing more comes.

        HermesError if it has ended and there is no log of it.
        """

        state = self.log.state()  # before the log: what comes after its end is read too
        before, self._state = self._state, state
        messages = list(self._fetch()) if state != before or state in WRITING else []
        self.has_begun = self.has_begun or has_log(messages)
        if not self.has_begun:
            self._refuse_or_wait(state, messages)
        return list(parse_messages(messages, self._recent)), state in ENDED_TASK_STATES

    def _refuse_or_wait(self, state: str, messages: Sequence[Message]) -> None:
        """Raise HermesError if the trial has ended; else tell once that it is awaited."""
        if state in ENDED_TASK_STATES:
            has_run = self._cursor is not None
            missing = self.log.without_log(messages) if has_run else self.log.without_begin(state)
            raise HermesError(missing)
        if not self._is_awaited:
            self._is_awaited = True
            typer.echo(f"The trial {self.log.trial} has not begun: waiting for it.", err=True)

    def _fetch(self) -> Iterator[Message]:
        """Yield the new messages: first what is left of earlier tries."""
        airflow = self.log.connection.airflow
        newest = max(self.log.attempts(), default=0)
        begun = 0 if self._cursor is None else self._cursor.attempt
        if newest > begun:
            if self._cursor is not None:
                yield from self._cursor.fetch()
            for attempt in range(begun + 1, newest):
                yield from self.log.messages(attempt)
            self._cursor = LogCursor(airflow, self.log.task, newest)
        if self._cursor is not None:
            yield from self._cursor.fetch()
