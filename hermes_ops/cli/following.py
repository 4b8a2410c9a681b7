"""The live table of a sweep, until it has ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hermes_ops.cli.census import Census
from hermes_ops.cli.locating import ENDED, Place, state_of
from hermes_ops.cli.notices import Notices
from hermes_ops.core.secondary import why_no_best
from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.report.table import shown as as_text

if TYPE_CHECKING:
    from hermes_ops.cli.connection import Connection

UNKNOWN = "unknown"
PERIOD_S = 0.5
SILENCE_S = 30.0  # then the user is told that Airflow does not answer
STATE_PERIOD_S = 2.0  # Airflow is asked less often than the view is read: it has trials to serve
ROWS = 40
STYLES = {"running": "bold green", "starting": "green", "stopping": "yellow", "ended": "dim"}


def follow(
    connection: Connection,
    place: Place,
    *,
    quiet: bool,
    warnings: list[dict[str, str]] | None = None,
) -> dict[str, Any]:
    """Show the sweep until it has ended; its document.

    `warnings`: those that its user has been told; None: those that its plan has left are told.
    """
    from hermes_ops.airflow.folders import home
    from hermes_ops.cli.outcome import document

    notices = Notices(connection, place, warnings)
    census = Census(home())
    census.start()
    try:
        _until_the_end(connection, place, quiet, notices)
    finally:
        most = census.close()
    found = document(connection, place, most)
    found["warnings"] = notices.warnings or []
    if not quiet:
        _print_end(connection, place.sweep, found)
    return found


def _until_the_end(connection: Connection, place: Place, quiet: bool, notices: Notices) -> None:
    from hermes_ops.airflow.control.publish import read_view

    sweep = place.sweep
    console = Console()
    shown = Live(console=console, refresh_per_second=4, transient=True)
    live = console.is_terminal and not quiet
    said, is_found = "", quiet
    if live:
        shown.start()
    try:
        asked_at, state = 0.0, ""
        silence = Silence(sweep, time.monotonic())
        while state not in ENDED:
            if time.monotonic() - asked_at >= STATE_PERIOD_S:
                asked_at, state = time.monotonic(), _state(connection, place)
                _tell(silence.heard(asked_at, state))
            view = read_view(connection.pool)
            _tell(*notices.due(time.monotonic(), view))
            if view is not None and sweep in view.get("sweeps", {}):
                is_found = is_found or _print_comparison(console, connection, sweep)
                if live:
                    shown.update(table(view, sweep))
                elif not quiet and (line := progress_line(view, sweep)) != said:
                    said = line
                    console.print(line)
            time.sleep(PERIOD_S)
    finally:
        if live:
            shown.stop()


@dataclass(slots=True)
class Silence:
    """How long Airflow has not answered, by a monotonic clock; says so once each time."""

    sweep: str
    since_s: float
    said: bool = False

    def heard(self, now_s: float, state: str) -> str | None:
        """What to tell the user now, if anything, after this answer ("unknown": none)."""
        if state != UNKNOWN:
            self.since_s, self.said = now_s, False
            return None
        if self.said or now_s - self.since_s < SILENCE_S:
            return None
        self.said = True
        return (
            f"Airflow has not answered for {now_s - self.since_s:.0f} s: waiting for it. "
            "If the stack was shut down, `hermes up` brings it back and the sweep goes on; "
            f"Ctrl-C ends this view only, `hermes sweep watch {self.sweep}` shows it again."
        )


def _tell(*lines: str | None) -> None:
    for words in lines:
        if words is not None:
            Console(stderr=True).print(Text(words))


def _state(connection: Connection, place: Place) -> str:
    try:
        found = state_of(connection.airflow, place)
    except Unavailable:  # it is being restarted; the sweep goes on without us
        return UNKNOWN
    if found is None:
        raise HermesError(f"the sweep {place.sweep!r} has been deleted in Airflow.")
    return found


def progress_line(view: Mapping[str, Any], sweep: str) -> str:
    """The sweep in one line, for logs."""
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


def table(view: Mapping[str, Any], sweep: str) -> Group:
    """The pool's view of one sweep."""
    facts = view["sweeps"][sweep]
    mine = [j for j in view["jobs"] if j["id"].rpartition("/")[0] == sweep]
    shown = Table("trial", "state", "GPU", "epoch", "value", "convergence", "priority",
                  "preemptions", "why", title=f"{sweep} · policy {view['policy']}")  # fmt: skip
    begun = [j for j in mine if j["phase"] != "pending"]
    for job in begun[:ROWS]:
        shown.add_row(*map(Text, _cells(job)), style=STYLES.get(job["phase"], ""))
    waiting = facts["trials"] - facts["ended"] - facts["open"]
    total = max(1, facts["trials"])
    bar = ProgressBar(total=total, completed=facts["ended"], width=40)
    note = f"{facts['ended']}/{facts['trials']} trials ended, {waiting} not begun"
    if facts["closing"]:
        note += f" — ending: {facts['closing']}"
    return Group(shown, bar, Text(f" {note}"))  # the bar ends without a line's end


def _cells(job: Mapping[str, Any]) -> tuple[str, ...]:
    total = job["total_steps"]
    return (
        job["id"].rpartition("/")[2],
        job["phase"],
        ",".join(map(str, job["gpus"])),
        f"{job['step']}/{total}" if total else str(job["step"]),
        as_text(job["value"]),
        as_text(job["terms"].get("convergence")),
        str(job["rank"] or ""),
        str(job["preemptions"]),
        job["reason"][:60],
    )


def _print_end(connection: Connection, sweep: str, found: Mapping[str, Any]) -> None:
    console = Console()
    best = found["best"]
    console.print(end_table(sweep, found))
    for line in missed_bounds(found):
        console.print(Text(line))
    if best is None:
        console.print(Text(why_no_best(found)))
    else:
        settings = ", ".join(f"{k}={as_text(v)}" for k, v in best["config"].items())
        console.print(Text(f"Best: trial {best['number']} ({as_text(best['best'])}) {settings}"))
    console.print(
        f"{found['wall_seconds']:.0f} s, at most {found['max_slots_used']} of "
        f"{found['pool_slots']} GPUs in use at once"
    )
    console.print(f"MLflow   {_page(connection, sweep)}", soft_wrap=True)
    _print_comparison(console, connection, sweep)


def end_table(sweep: str, found: Mapping[str, Any]) -> Table:
    """The trials of a sweep's document, with the last values of the metrics that it names."""
    names = [*(found["trials"][0].get("metrics") or ())] if found["trials"] else []
    shown = Table("trial", "state", "epochs", "final", "best", title=f"{sweep}: {found['state']}")
    for heading in (*names, "segments", "preemptions", "GPU-seconds"):
        shown.add_column(Text(heading))
    best = found["best"]
    for trial in found["trials"]:
        seen = (as_text(trial["metrics"][name]["last"]) for name in names)
        cells = (trial["number"], trial["state"], trial["steps"], as_text(trial["final"]),
                 as_text(trial["best"]), *seen, trial["segments"], trial["preemptions"],
                 f"{trial['gpu_seconds']:.1f}")  # fmt: skip
        is_best = best is not None and trial["number"] == best["number"]
        shown.add_row(*map(str, cells), style="bold green" if is_best else "")
    return shown


def missed_bounds(found: Mapping[str, Any], most: int = 10) -> list[str]:
    """A line for each of the first trials that miss a bound, and one that counts the others."""
    missed = [(t["number"], t["violates"]) for t in found["trials"] if t.get("violates")]
    lines = [
        f"Trial {number} misses a bound: {'; '.join(words)}" for number, words in missed[:most]
    ]
    rest = len(missed) - most
    return [*lines, f"{rest} more trials miss a bound"] if rest > 0 else lines


def _print_comparison(console: Console, connection: Connection, sweep: str) -> bool:
    """Print where MLflow shows the trials side by side; False while it does not know the sweep."""
    from hermes_ops.tracking.summary import find

    try:
        ref = find(connection.tracker, sweep)
    except HermesError:
        return False
    address = connection.tracker.comparison_url(ref)
    console.print(f"Compare  {address}", soft_wrap=True, highlight=False)
    return True


def _page(connection: Connection, sweep: str) -> str:
    from hermes_ops.tracking.summary import find

    ref = find(connection.tracker, sweep)
    return connection.tracker.run_url(ref.experiment_id, ref.parent_run_id)
