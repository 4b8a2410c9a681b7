"""The live table of a sweep until it has ended, with notices."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from hermes_ops.airflow.explanation import (
    away_lines,
    deadline_line,
    problem_lines,
    trouble_line,
)
from hermes_ops.cli.outcome import document, fetch_config, print_comparison, print_outcome
from hermes_ops.cli.sweep_check import dag_obstacle, slots_of
from hermes_ops.cli.sweep_location import ENDED_AIRFLOW_STATES, SweepLocation, airflow_state
from hermes_ops.cli.tables import TableColumn, TableRow, fit_table, output_console
from hermes_ops.config import SweepConfig, never_fits
from hermes_ops.config.sweep_warnings import WARNINGS_TAG, from_tag, sentence
from hermes_ops.core.summary import normalised, sweep_state
from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.report.table import format_cell

if TYPE_CHECKING:
    from hermes_ops.cli.connection import Connection


UNKNOWN = "unknown"
PERIOD_S = 0.5
NOTICE_PERIOD_S = 5.0
SILENCE_S = 30.0  # then the user is told that Airflow does not answer
STATE_PERIOD_S = 2.0  # Airflow is asked less often than the view is read: it has trials to serve
ROWS = 40
_PROGRESS = ""  # key of the progress line among those that were printed
STYLES = {"running": "bold green", "starting": "green", "stopping": "yellow", "ended": "dim"}


def follow(
    connection: Connection,
    place: SweepLocation,
    *,
    quiet: bool,
    warnings: list[dict[str, str]] | None = None,
) -> dict[str, Any]:
    """Show the sweep until it has ended; return its document.

    `warnings`: those that have been shown already; None: show those that its plan has found.
    """
    notices = Notices(connection, place, warnings)
    state = _show_until_end(connection, place, quiet, notices)
    result = document(connection, place)
    result["state"] = sweep_state(state, result["state"])
    result["warnings"] = notices.warnings or []
    if not quiet:
        print_outcome(connection, place.sweep, result)
    return result


def _show_until_end(
    connection: Connection, place: SweepLocation, quiet: bool, notices: Notices
) -> str:
    """Show the sweep until it has ended; return its state in Airflow then."""
    from hermes_ops.airflow.control.pool_file import read_view

    sweep = place.sweep
    console = output_console()
    display = Live(console=console, refresh_per_second=4, transient=True)
    is_live = console.is_terminal and not quiet
    printed: dict[str, str] = {}
    is_found = quiet
    if is_live:
        display.start()
    try:
        polled_at, state = 0.0, ""
        outage = OutageNotice(f"hermes sweep watch {sweep}", time.monotonic())
        while state not in ENDED_AIRFLOW_STATES:
            if time.monotonic() - polled_at >= STATE_PERIOD_S:
                polled_at, state = time.monotonic(), _state(connection, place)
                _print_notices(outage.after_response(polled_at, state))
            view = read_view(connection.pool)
            _print_notices(*notices.due(time.monotonic(), view, over=state in ENDED_AIRFLOW_STATES))
            if view is not None and sweep in view.get("sweeps", {}):
                is_found = is_found or print_comparison(console, connection, sweep)
                if is_live:
                    display.update(live_table(view, sweep, console.width))
                elif not quiet:
                    _print_lines(console, new_lines(view, sweep, printed))
            time.sleep(PERIOD_S)
    finally:
        if is_live:
            display.stop()
    return state


def _print_lines(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def new_lines(view: Mapping[str, Any], sweep: str, printed: dict[str, str]) -> list[str]:
    """Return the lines of the sweep that a log does not have yet, and note them in `printed`.

    These are the progress if it has changed, and once each kind of failure: of trials, of steps of
    the sweep, of the controller's rounds.
    """
    line = progress_line(view, sweep)
    failures = view["sweeps"][sweep].get("failures", ())
    problems = filter(None, [trouble_line(view), *away_lines(view), *problem_lines(view, sweep)])
    failed = {normalised(words): words for words in (*failures, *problems)}
    fresh = [line] if printed.get(_PROGRESS) != line else []
    fresh += [words for key, words in failed.items() if key not in printed]
    printed.update(failed | {_PROGRESS: line})
    return fresh


@dataclass(slots=True)
class OutageNotice:
    """The notice that Airflow has not answered for a while, once each time.

    Times are those of a monotonic clock. `command` shows the same again.
    """

    command: str
    since_s: float
    is_shown: bool = False

    def after_response(self, now_s: float, state: str) -> str | None:
        """Return the notice that is due after this state; UNKNOWN stands for no response."""
        if state != UNKNOWN:
            self.since_s, self.is_shown = now_s, False
            return None
        if self.is_shown or now_s - self.since_s < SILENCE_S:
            return None
        self.is_shown = True
        return (
            f"Airflow has not answered for {now_s - self.since_s:.0f} s: waiting for it. "
            "If the stack was shut down, `hermes up` brings it back and the sweep goes on; "
            f"Ctrl-C ends this view only, `{self.command}` shows it again."
        )


def _print_notices(*lines: str | None) -> None:
    for words in lines:
        if words is not None:
            output_console(stderr=True).print(Text(words))


def _state(connection: Connection, place: SweepLocation) -> str:
    try:
        state = airflow_state(connection.airflow, place)
    except Unavailable:  # it is being restarted; the sweep goes on without us
        return UNKNOWN
    if state is None:
        raise HermesError(f"the sweep {place.sweep!r} has been deleted in Airflow.")
    return state


def progress_line(view: Mapping[str, Any], sweep: str) -> str:
    """Return the sweep's progress in one line, for logs."""
    facts = view["sweeps"][sweep]
    mine = [j for j in view["jobs"] if j["id"].rpartition("/")[0] == sweep]
    running = [j["id"].rpartition("/")[2] for j in mine if j["phase"] == "running"]
    preemptions = sum(j["preemptions"] for j in mine)
    values = [j["value"] for j in mine if isinstance(j["value"], float)]
    return (
        f"{facts['ended']}/{facts['trials']} trials ended, {facts['open']} open, "
        f"training: {', '.join(running) or 'none'}, preemptions: {preemptions}, "
        f"values: {len(values)}"
    )


COLUMNS = (
    TableColumn("trial"),
    TableColumn("state"),
    TableColumn("GPU"),
    TableColumn("epoch"),
    TableColumn("value"),
    TableColumn("convergence", spare=True),
    TableColumn("priority", spare=True),
    TableColumn("preemptions", spare=True),
    TableColumn("why", wraps=True),
)


def live_table(view: Mapping[str, Any], sweep: str, width: int = 160) -> Group:
    """Return the pool's view of one sweep as a table, and below it why trials have failed."""
    facts = view["sweeps"][sweep]
    mine = [j for j in view["jobs"] if j["id"].rpartition("/")[0] == sweep]
    begun = [j for j in mine if j["phase"] != "pending"]
    rows = (TableRow(_cells(job), _style(job)) for job in begun[:ROWS])
    shown = fit_table(f"{sweep} · policy {view['policy']}", COLUMNS, rows, width)
    waiting = facts["trials"] - facts["ended"] - facts["open"]
    total = max(1, facts["trials"])
    bar = ProgressBar(total=total, completed=facts["ended"], width=40)
    note = f"{facts['ended']}/{facts['trials']} trials ended, {waiting} not begun"
    if line := deadline_line(view, sweep, time.time()):
        note += f". {line}"
    if facts["closing"]:
        note += f" — ending: {facts['closing']}"
    problems = filter(None, [trouble_line(view), *away_lines(view), *problem_lines(view, sweep)])
    failed = (Text(line, style="red") for line in (*facts.get("failures", ()), *problems))
    return Group(shown, bar, Text(f" {note}"), *failed)  # the bar ends without a line's end


def _style(job: Mapping[str, Any]) -> str:
    return "red" if job.get("final") == "failed" else STYLES.get(job["phase"], "")


def _cells(job: Mapping[str, Any]) -> tuple[str, ...]:
    total = job["total_steps"]
    return (
        job["id"].rpartition("/")[2],
        job.get("final") or job["phase"],
        ",".join(map(str, job["gpus"])),
        f"{job['step']}/{total}" if total else str(job["step"]),
        format_cell(job["value"]),
        format_cell(job["terms"].get("convergence")),
        str(job["rank"] or ""),
        str(job["preemptions"]),
        job["reason"],
    )


@dataclass(slots=True)
class Notices:
    """Finds the notices on a followed sweep, each once.

    `warnings`: documents of the warnings that have been shown; None until those of its plan are
    known.
    """

    connection: Connection
    place: SweepLocation
    warnings: list[dict[str, str]] | None
    config: SweepConfig | None = None
    _polled_s: float = -NOTICE_PERIOD_S
    _shown: set[str] = field(default_factory=set)
    _advised: bool = False

    def due(
        self, now_s: float, view: Mapping[str, Any] | None, *, over: bool = False
    ) -> Iterator[str]:
        """Yield the new notices; `now_s` is of a monotonic clock, `view` the pool's newest.

        `over`: the sweep has ended, so that nothing keeps it from starting.
        """
        if over or now_s - self._polled_s >= NOTICE_PERIOD_S:
            self._polled_s = now_s
            yield from self._new(self._from_services(over))
        yield from self._new(not_preemptible(view or {}, self.place.sweep))
        if not self._advised and (line := advice(view or {}, self.place.sweep)):
            self._advised = True
            yield line

    def _new(self, lines: Iterator[str]) -> Iterator[str]:
        for line in lines:
            if line not in self._shown:
                self._shown.add(line)
                yield line

    def _from_services(self, over: bool) -> Iterator[str]:
        """Yield the notices from the services' responses; none while one does not answer."""
        try:
            yield from self._from_plan()
            yield from () if over else self._obstacles()
        except HermesError:
            return

    def _obstacles(self) -> Iterator[str]:
        airflow, dag = self.connection.airflow, self.place.dag_id
        warned_keys = {warning["where"] for warning in self.warnings or ()}
        if "Airflow" not in warned_keys and (obstacle := dag_obstacle(airflow, dag)):
            why, remedy = obstacle
            yield f"The DAG {dag} {why}: no trial of {self.place.sweep} starts until you {remedy}."
        if self.config is None or warned_keys & {"trial.gpus", "pool"}:
            return
        pool = self.config.pool
        slots = slots_of(airflow, pool)
        reason = (
            None if slots is None else never_fits(self.config.trial.gpu_range.least, pool, slots)
        )
        if reason is not None:
            yield f"{self.place.sweep}: {reason}. Give the pool more slots, or stop the sweep."

    def _from_plan(self) -> Iterator[str]:
        """Fetch the plan's configuration, and yield its warnings if they have not been shown."""
        from hermes_ops.tracking.tracker import require_sweep

        if self.config is None:
            try:
                self.config = fetch_config(self.connection, self.place)
            except HermesError:  # not planned yet
                return
        if self.warnings is None:
            tracker = self.connection.tracker
            tags = tracker.sweep(require_sweep(tracker, self.place.sweep, self.config.name)).tags
            self.warnings = from_tag(tags.get(WARNINGS_TAG, ""))
            for warning in self.warnings:
                yield f"Warning: {sentence(warning)}"


def not_preemptible(view: Mapping[str, Any], sweep: str) -> Iterator[str]:
    """Yield a line for each reason why trials of the sweep cannot be preempted now."""
    facts = view.get("sweeps", {}).get(sweep, {})
    for reason in dict.fromkeys(facts.get("not_preemptible", {}).values()):
        yield f"Trials that cannot be preempted while they train: {reason}."


def advice(view: Mapping[str, Any], sweep: str) -> str:
    """Return the advice on a trial whose values are not read; empty if all are."""
    facts = view.get("sweeps", {}).get(sweep, {})
    return next((f"Trial {n}: {text}" for n, text in facts.get("advice", {}).items()), "")
