"""The live table of a sweep, until it has ended."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from hermes_ops.airflow.problems import problem_lines, trouble_line
from hermes_ops.cli.census import Census
from hermes_ops.cli.locating import ENDED, Place, state_of
from hermes_ops.cli.notices import Notices
from hermes_ops.cli.tables import TableColumn, TableRow, fitted, print_whole
from hermes_ops.core.failures import alike, failure_lines, normalised
from hermes_ops.core.secondary import why_no_best
from hermes_ops.core.sweep_state import ENDED_STATES, sweep_state
from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.report.table import shown as as_text

if TYPE_CHECKING:
    from hermes_ops.cli.connection import Connection

UNKNOWN = "unknown"
PERIOD_S = 0.5
SILENCE_S = 30.0  # then the user is told that Airflow does not answer
STATE_PERIOD_S = 2.0  # Airflow is asked less often than the view is read: it has trials to serve
ROWS = 40
MOST_SETTINGS, LONGEST_SETTING = 20, 80
_PROGRESS = ""  # key of the line of progress among those that were said
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
        state = _until_the_end(connection, place, quiet, notices)
    finally:
        most = census.close()
    found = document(connection, place, most)
    found["state"] = sweep_state(state, found["state"])
    found["warnings"] = notices.warnings or []
    if not quiet:
        print_standing(connection, place.sweep, found)
    return found


def _until_the_end(connection: Connection, place: Place, quiet: bool, notices: Notices) -> str:
    """Show the sweep until it has ended; return what Airflow calls its state then."""
    from hermes_ops.airflow.control.publish import read_view

    sweep = place.sweep
    console = Console()
    shown = Live(console=console, refresh_per_second=4, transient=True)
    live = console.is_terminal and not quiet
    said: dict[str, str] = {}
    is_found = quiet
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
            _tell(*notices.due(time.monotonic(), view, over=state in ENDED))
            if view is not None and sweep in view.get("sweeps", {}):
                is_found = is_found or _print_comparison(console, connection, sweep)
                if live:
                    shown.update(table(view, sweep, console.width))
                elif not quiet:
                    _print_lines(console, unsaid(view, sweep, said))
            time.sleep(PERIOD_S)
    finally:
        if live:
            shown.stop()
    return state


def _print_lines(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def unsaid(view: Mapping[str, Any], sweep: str, said: dict[str, str]) -> list[str]:
    """Return what a log does not say yet of the sweep, and note it in `said`.

    That is the line of its progress when it has changed, and once each way in which trials fail,
    and in which steps of it or the controller's rounds do.
    """
    line = progress_line(view, sweep)
    failures = view["sweeps"][sweep].get("failures", ())
    problems = filter(None, [trouble_line(view), *problem_lines(view, sweep)])
    failed = {normalised(words): words for words in (*failures, *problems)}
    fresh = [line] if said.get(_PROGRESS) != line else []
    fresh += [words for key, words in failed.items() if key not in said]
    said.update(failed | {_PROGRESS: line})
    return fresh


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


def table(view: Mapping[str, Any], sweep: str, width: int = 160) -> Group:
    """The pool's view of one sweep, and below it why trials have failed."""
    facts = view["sweeps"][sweep]
    mine = [j for j in view["jobs"] if j["id"].rpartition("/")[0] == sweep]
    begun = [j for j in mine if j["phase"] != "pending"]
    rows = (TableRow(_cells(job), _style(job)) for job in begun[:ROWS])
    shown = fitted(f"{sweep} · policy {view['policy']}", COLUMNS, rows, width)
    waiting = facts["trials"] - facts["ended"] - facts["open"]
    total = max(1, facts["trials"])
    bar = ProgressBar(total=total, completed=facts["ended"], width=40)
    note = f"{facts['ended']}/{facts['trials']} trials ended, {waiting} not begun"
    if facts["closing"]:
        note += f" — ending: {facts['closing']}"
    problems = filter(None, [trouble_line(view), *problem_lines(view, sweep)])
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
        as_text(job["value"]),
        as_text(job["terms"].get("convergence")),
        str(job["rank"] or ""),
        str(job["preemptions"]),
        job["reason"],
    )


def print_standing(connection: Connection, sweep: str, found: Mapping[str, Any]) -> None:
    """Print a sweep's document: its trials, why they failed, the best one, its page in MLflow."""
    console = Console()
    best = found["best"]
    print_whole(console, end_table(sweep, found, console.width))
    for line in (*why_ended(found), *missed_bounds(found)):
        console.print(Text(line))
    if best is not None:
        settings = settings_line(best["config"])
        console.print(Text(f"Best: trial {best['number']} ({as_text(best['best'])}) {settings}"))
    elif found["state"] in ENDED_STATES:
        console.print(Text(why_no_best(found)))
    console.print(
        f"{found['wall_seconds']:.0f} s, at most {found['max_slots_used']} of "
        f"{found['pool_slots']} GPUs in use at once"
    )
    console.print(f"MLflow   {_page(connection, sweep)}", soft_wrap=True)
    _print_comparison(console, connection, sweep)


def settings_line(config: Mapping[str, Any]) -> str:
    """Return a configuration in one line; of many parameters the first, of long texts the start."""
    shown = [f"{name}={_short(as_text(v))}" for name, v in islice(config.items(), MOST_SETTINGS)]
    rest = len(config) - len(shown)
    return ", ".join([*shown, f"and {rest} more"] if rest else shown)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_SETTING else text[:LONGEST_SETTING] + "…"


def why_ended(found: Mapping[str, Any]) -> list[str]:
    """Why the sweep has ended as it has, and a line for each way in which trials failed."""
    failed = [(t["number"], t.get("reason") or "") for t in found["trials"]
              if t["state"] == "failed"]  # fmt: skip
    reason, lines = found.get("reason") or "", failure_lines(failed)
    groups = alike(failed)
    if len(groups) == 1 and groups[0].reason in reason:
        lines = []  # the sweep's reason says it already
    return [f"{found['state'].capitalize()}: {reason}", *lines] if reason else lines


def end_table(sweep: str, found: Mapping[str, Any], width: int = 160) -> RenderableType:
    """The trials of a sweep's document, with the last values of the metrics that it names."""
    names = [*(found["trials"][0].get("metrics") or ())] if found["trials"] else []
    heads = ("trial", "state", "epochs", "final", "best", *names, "segments", "preemptions",
             "GPU-seconds")  # fmt: skip
    best = found["best"]
    rows = []
    for trial in found["trials"]:
        seen = (as_text(trial["metrics"][name]["last"]) for name in names)
        cells = (trial["number"], trial["state"], trial["steps"], as_text(trial["final"]),
                 as_text(trial["best"]), *seen, trial["segments"], trial["preemptions"],
                 f"{trial['gpu_seconds']:.1f}")  # fmt: skip
        is_best = best is not None and trial["number"] == best["number"]
        rows.append(TableRow(tuple(map(str, cells)), "bold green" if is_best else ""))
    return fitted(f"{sweep}: {found['state']}", [TableColumn(h) for h in heads], rows, width)


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
