"""Why a trial runs or waits, and what fails in its pool: text for the command line and the page."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hermes_ops.airflow.control.decisions import read_of_trial
from hermes_ops.airflow.control.pool_file import read_view
from hermes_ops.core.amounts import counted, duration, figure, first_lines, on_gpus, utc_text
from hermes_ops.core.priority_class import DEFAULT_CLASS
from hermes_ops.errors import HermesError, Refused, Unavailable

if TYPE_CHECKING:
    from hermes_ops.tracking import SweepRef, Tracker

MOST_LINES, MOST_QUEUED = 10, 20
_IN_POOL = ("starting", "running", "stopping", "waiting", "pending")

SILENT_S = 120.0
"""Age of a view after which its controller makes no rounds."""


def trouble_line(view: Mapping[str, Any] | None) -> str:
    """Return since when and why the controller's rounds fail; empty while they do not."""
    trouble = (view or {}).get("trouble")
    if not trouble:
        return ""
    return (
        f"The controller's rounds have failed since {utc_text(trouble['since_s'])} "
        f"({trouble['rounds']} in a row), so no trial is started or stopped: {trouble['reason']}"
    )


def silence_line(view: Mapping[str, Any] | None, now_s: float) -> str:
    """Return since when the controller has made no round; empty while it makes some."""
    if view is None or now_s - view["time_s"] <= SILENT_S or trouble_line(view):
        return ""
    since = utc_text(view["time_s"])
    return f"The controller has made no round since {since}: see its log."


def absence_line(view: Mapping[str, Any] | None, job: Mapping[str, Any] | None) -> str:
    """Return that the machine of a trial is away, since when and why; empty while it is not.

    A trial that may go on elsewhere has no such machine.
    """
    nodes = (job or {}).get("nodes") or ()
    machines = (view or {}).get("machines") or {}
    away = [name for name in nodes if "away_since_s" in machines.get(name, {})]
    if (job or {}).get("phase") == "ended" or not away or len(away) < len(nodes):
        return ""
    return "Its machine is away: " + "; ".join(_absence(n, machines[n]) for n in away)


def away_lines(view: Mapping[str, Any] | None) -> list[str]:
    """Return a line for each machine of the pool that is away."""
    machines = (view or {}).get("machines") or {}
    away = ((name, machine) for name, machine in machines.items() if "away_since_s" in machine)
    return [f"The machine is away: {_absence(name, machine)}" for name, machine in away]


def _absence(name: str, machine: Mapping[str, Any]) -> str:
    return f"{name} since {utc_text(machine['away_since_s'])}, as {machine['reason']}"


def problem_lines(
    view: Mapping[str, Any] | None, sweep: str | None = None, trial: int | None = None
) -> list[str]:
    """Return a line for each step that fails of a sweep, or of one trial of it.

    Without a sweep: of all of them. At most ten, then one that counts the others.
    """
    lines = [
        _line(p)
        for p in (view or {}).get("problems", ())
        if (sweep is None or p["sweep"] in (sweep, "")) and trial in (None, p["trial"])
    ]
    return first_lines(lines, MOST_LINES, "{} more steps fail")


def _line(problem: Mapping[str, Any]) -> str:
    whose = problem["sweep"] or "the pool"
    if problem["trial"] is not None:
        whose = f"trial {problem['trial']} of {whose}"
    times = "once" if problem["tries"] == 1 else f"{problem['tries']} times"
    return (
        f"Problem of {whose}: {problem['step']} failed {times} since "
        f"{utc_text(problem['since_s'])}: {problem['reason']}"
    )


def interruption_lines(view: Mapping[str, Any] | None, sweep: str, trial: int) -> list[str]:
    """Return a line if the trial backs off after interruptions; else nothing."""
    facts = (view or {}).get("sweeps", {}).get(sweep) or {}
    text = (facts.get("interrupted") or {}).get(str(trial))
    if not text:
        return []
    hint = f". {UNENDED}" if str(trial) in facts.get("stuck", ()) else ""
    return [f"Trial {trial} of {sweep} {text}{hint}"]


def stuck_lines(view: Mapping[str, Any] | None, sweeps: Iterable[str] | None = None) -> list[str]:
    """Return a line for each trial that is interrupted again and again, of these sweeps or all.

    At most ten, then one that counts the others.
    """
    facts = (view or {}).get("sweeps", {})
    named = facts if sweeps is None else [s for s in sweeps if s in facts]
    stuck = [(s, int(number)) for s in named for number in facts[s].get("stuck", ())]
    lines = [line for trial in stuck for line in interruption_lines(view, *trial)]
    return first_lines(lines, MOST_LINES, "{} more trials are interrupted in this way")


UNENDED = (
    "Its script has not failed, so it is tried again without end: remove the cause, or mark its "
    "task as failed in Airflow"
)
"""What people can do about a trial that is interrupted again and again."""

NO_VIEW = "no controller of its pool has worked in this state folder (HERMES_HOME)"

UNDECIDED = "nothing was decided about it yet"


@dataclass(frozen=True, slots=True)
class TrialEnd:
    """The final state of a trial, why it ended so, and of one that was retried why it failed first.

    `steps` is the last step that it reported; empty where that is not known.
    """

    state: str
    reason: str = ""
    first_failure: str = ""
    steps: str = ""

    @property
    def words(self) -> str:
        """The end in a sentence, in several lines if the trial was retried."""
        steps = f" after step {self.steps}" if self.steps not in ("", "0") else ""
        text = f"has ended{steps}: {self.state.replace('_', ' ')}"
        text += f", because: {self.reason}" if self.reason else ""
        if not self.first_failure:
            return text + ("" if text.endswith(".") else ".")
        first = "\n".join(f"    {line}" for line in self.first_failure.splitlines())
        return f"{text}\n  it was tried more than once; its first failure was:\n{first}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """A trial's job in the pool's view, None when it is not there, and all its decisions.

    The decisions are newest first, each as `decisions.jsonl` has it; `age_s`: of the standing.
    `ended`: the final state of one that has ended, and why, as far as MLflow tells.
    `deadline`: when its sweep ends at the latest, empty without a deadline.
    `not_preemptible`: why it cannot be preempted now; empty where it can.
    `limited`: how many GPUs it gets at most, and why; empty where it gets all of its range.
    `problems`: a line for each step that fails for it now, and one if the controller's rounds fail.
    `has_view`: whether a controller has written the pool's view here.
    """

    trial: str
    standing: Mapping[str, Any] | None
    policy: str
    age_s: float
    decisions: Sequence[Mapping[str, Any]]
    ended: TrialEnd | None = None
    problems: Sequence[str] = ()
    not_preemptible: str = ""
    deadline: str = ""
    limited: str = ""
    has_view: bool = True

    @property
    def now(self) -> str:
        """The trial's state in one sentence."""
        job = self.standing
        if self.ended is not None:
            return f"{self.trial} {self.ended.words}"
        if job is None and not self.has_view:
            return f"What {self.trial} does now is not known here: {NO_VIEW}."
        if job is None:
            return f"{self.trial} is not in the pool now."
        value = "no value yet" if job["value"] is None else f"value {short(job['value'])}"
        return (
            f"{self.trial} is {job['phase']}{on_gpus(job['gpus'])}, at step {job['step']}, "
            f"{value}, {job['preemptions']} preemptions "
            f"(policy {self.policy}, {self.age_s:.1f} s ago)"
            f"{_node_restriction(job.get('nodes') or ())}"
        )


def ownership(job: Mapping[str, Any]) -> str:
    """Return the owner of a job of the view, its team and class, and whether it borrows its GPUs.

    Empty where the view has no owner. The normal class is left out.
    """
    user, team, of_class = (job.get(key) or "" for key in ("user", "team", "class"))
    words = [*([f"user {user}"] if user else []), *([f"team {team}"] if team else [])]
    words += [f"class {of_class}"] if of_class not in ("", DEFAULT_CLASS) else []
    words += ["its GPUs are borrowed"] if job.get("borrows") else []
    return ", ".join(words)


def notice_lines(view: Mapping[str, Any] | None) -> list[str]:
    """Return a line for each trial that loses its GPUs to another team soon."""
    jobs = (view or {}).get("jobs", ())
    return [f"Notice: {job['id']} {job['reason']}" for job in jobs if job.get("notice_s")]


def quota_lines(view: Mapping[str, Any] | None) -> list[str]:
    """Return a line for each team of the pool's quota: what it holds; none without a quota.

    Then a line for each limit of a user's GPU-hours.
    """
    quota = (view or {}).get("quota") or {}
    teams = [_team_line(team) for team in quota.get("teams", ())]
    return [*teams, *(_user_line(user) for user in quota.get("users", ()))]


def queue_document(view: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the trials of a pool with a quota: those that hold GPUs, then the others, by rank.

    Each has its owner, team, class and whether its GPUs are borrowed; none without a quota.
    """
    if not (view or {}).get("quota"):
        return []
    jobs = [job for job in (view or {}).get("jobs", ()) if job["phase"] in _IN_POOL]
    jobs.sort(key=lambda job: (not job["gpus"], job["rank"] is None, job["rank"] or 0))
    return [
        {
            "trial": job["id"],
            "state": job["phase"],
            "rank": job["rank"],
            "gpus": job["gpus"],
            "user": job.get("user") or "",
            "team": job.get("team") or "",
            "class": job.get("class") or DEFAULT_CLASS,
            "borrowed": bool(job.get("borrows")),
            "notice_until_s": job.get("notice_s"),
        }
        for job in jobs
    ]


def queue_lines(view: Mapping[str, Any] | None) -> list[str]:
    """Return a line for each trial of `queue_document`, at most twenty, and one for the others."""
    lines = [_queue_line(row) for row in queue_document(view)]
    return first_lines(lines, MOST_QUEUED, "and {} more trials")


def _queue_line(row: Mapping[str, Any]) -> str:
    rank = f" at rank {row['rank']}" if row["rank"] else ""
    place = on_gpus(row["gpus"]) or rank
    whose = ", ".join(f"{kind} {row[kind]}" for kind in ("user", "team", "class") if row[kind])
    loan = "" if not row["gpus"] else ", borrowed" if row["borrowed"] else ", own"
    return f"{row['trial']} {row['state']}{place}: {whose}{loan}"


def scaling_line(view: Mapping[str, Any] | None) -> str:
    """Return that the pool is smaller than what its quota guarantees; empty where it is not."""
    return str(((view or {}).get("quota") or {}).get("scaling") or "")


def _team_line(team: Mapping[str, Any]) -> str:
    whose = f"Team {team['team']}" if team["team"] else "Users of no team"
    limit = "" if team["limit"] is None else f", at most {team['limit']}"
    waiting = "waits" if team["waiting"] == 1 else "wait"
    return (
        f"{whose}: {counted(team['held'], 'GPU')} held, {team['borrowed']} of them borrowed; "
        f"{team['guaranteed']} guaranteed{limit}; {counted(team['waiting'], 'trial')} {waiting}"
    )


def _user_line(user: Mapping[str, Any]) -> str:
    used, limit = figure(user["gpu_hours"], 4), figure(user["limit_gpu_hours"], 4)
    return f"User {user['user']}: {used} of {limit} GPU-hours of this {user['period']} used"


def deadline_line(view: Mapping[str, Any] | None, sweep: str, now_s: float) -> str:
    """Return the deadline of a sweep of the view and the time left; empty without one."""
    at_s = ((view or {}).get("sweeps", {}).get(sweep) or {}).get("deadline_s")
    if at_s is None:
        return ""
    left = f"in {duration(at_s - now_s)}" if at_s > now_s else "which has passed"
    return f"Deadline of {sweep}: {utc_text(at_s)}, {left}"


def deadline_lines(view: Mapping[str, Any] | None, now_s: float) -> list[str]:
    """Return a line for each sweep of the view that has a deadline."""
    sweeps = (view or {}).get("sweeps", {})
    return [line for sweep in sweeps if (line := deadline_line(view, sweep, now_s))]


def explain(pool: str, tracker: Tracker, trial: str) -> Explanation:
    """Return the explanation of the trial SWEEP/NUMBER.

    HermesError when nothing is known of it; Unavailable when only MLflow could know it and does not
    answer.
    """
    sweep, number = parse_trial_name(trial)
    current_view = read_view(pool)
    view = current_view or {"jobs": [], "time_s": 0.0, "policy": "?"}
    job = next((j for j in view["jobs"] if j["id"] == trial), None)
    decisions = _decisions(tracker, sweep, number, needed=job is None)
    over = job is None or job["phase"] == "ended"
    ended = trial_end(tracker, sweep, number) if over else None
    if job is None and not decisions and ended is None:
        ended = _end_before_begin(view, sweep, number)
    problems = [
        *filter(None, [trouble_line(view), absence_line(view, job)]),
        *problem_lines(view, sweep, number),
        *interruption_lines(view, sweep, number),
    ]
    if job is None and not decisions and ended is None and not problems:
        why = "" if current_view else f", as {NO_VIEW}"
        raise HermesError(
            f"nothing is known of trial {trial!r}{why}: `hermes sweep list` shows the sweeps."
        )
    age_s = max(0.0, time.time() - view["time_s"])
    facts = view.get("sweeps", {}).get(sweep, {})
    return Explanation(
        trial,
        job,
        view["policy"],
        age_s,
        tuple(reversed(decisions)),
        ended,
        tuple(problems),
        facts.get("not_preemptible", {}).get(str(number), ""),
        deadline_line(view, sweep, time.time()),
        facts.get("limited", {}).get(str(number), ""),
        current_view is not None,
    )


def _end_before_begin(view: Mapping[str, Any], sweep: str, number: int) -> TrialEnd | None:
    """Return the end of a trial that had not begun when its sweep was closed; else None."""
    facts = view.get("sweeps", {}).get(sweep) or {}
    if not facts.get("closing") or number >= facts["trials"]:
        return None
    return TrialEnd("cancelled", f"its sweep ends before it began ({facts['closing']})")


def trial_end(tracker: Tracker, sweep: str, number: int) -> TrialEnd | None:
    """Return the trial's end from MLflow; None before its end, or if MLflow does not answer.

    Raise HermesError for a trial that its sweep has never had.
    """
    from hermes_ops.tracking.runs import RUN_STATUS, WHY_TAGS
    from hermes_ops.tracking.tracker import require_sweep

    try:
        ref = require_sweep(tracker, sweep)
        runs, whole = tracker.trials(ref), tracker.sweep(ref)
    except HermesError:
        return None
    if whole.state in RUN_STATUS and all(run.number != number for run in runs):
        _refuse_beyond(tracker, ref, number)
        why = next((f": {whole.tags[tag]}" for tag in WHY_TAGS if whole.tags.get(tag)), "")
        return TrialEnd("cancelled", f"its sweep had ended before it began ({whole.state}{why})")
    for run in runs:
        if run.number == number and run.state in RUN_STATUS:
            tags = (run.tags.get(f"hermes.{n}", "") for n in ("reason", "first_failure", "steps"))
            return TrialEnd(run.state, *tags)
    return None


def _refuse_beyond(tracker: Tracker, sweep: SweepRef, number: int) -> None:
    """Raise HermesError if the sweep has no trial of that number, as far as MLflow tells."""
    from hermes_ops.config import parse
    from hermes_ops.tracking.artifacts import fetch_sweep_file

    try:
        document = fetch_sweep_file(tracker.artifacts, sweep.parent_run_id, sweep.sweep_id)
        trials = parse(document, sweep.sweep_id, None).trial_count
    except HermesError:  # an outage, a deleted file, or another version
        return
    if number >= trials:
        raise HermesError(no_such_trial(sweep.sweep_id, number, trials))


def no_such_trial(sweep: str, number: int, trials: int) -> str:
    """Return the message on the number of a trial that its sweep does not have."""
    theirs = f"its {trials} trials have the numbers 0 to {trials - 1}"
    return f"the sweep {sweep!r} has no trial {number}: " + (
        f"{theirs}." if trials > 1 else "its only one has the number 0."
    )


def parse_trial_name(trial: str) -> tuple[str, int]:
    """Return the sweep and the number of `SWEEP/NUMBER`; HermesError for anything else."""
    if not re.fullmatch(r"(?s).+/[0-9]{1,9}", trial):
        raise HermesError(f"{trial!r} is no trial: write SWEEP/NUMBER, for example digits-1/3.")
    sweep, _, number = trial.rpartition("/")
    return sweep, int(number)


def _node_restriction(nodes: Sequence[str]) -> str:
    if not nodes:
        return ""
    return f"; it may run on {' or '.join(nodes)} only, where its checkpoints are or will be"


def short(value: object) -> str:
    """Return a term of a score, in four digits."""
    return figure(value, 4) if isinstance(value, float) else str(value)


def _decisions(
    tracker: Tracker, sweep: str, number: int, *, needed: bool
) -> Sequence[Mapping[str, Any]]:
    """Return a trial's decisions in this machine's log, else MLflow's (Unavailable if `needed`)."""
    from hermes_ops.tracking.tracker import require_sweep

    local = read_of_trial(sweep, number)
    if local is not None:
        return local
    try:
        recorded = tracker.read_decisions(require_sweep(tracker, sweep).parent_run_id)
    except Refused:
        return ()
    except Unavailable:
        if needed:
            raise
        return ()
    return [decision for decision in recorded if decision.get("trial") == number]
