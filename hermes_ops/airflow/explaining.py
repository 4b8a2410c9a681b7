"""Why a trial runs or waits: what is known of it, for the command line and the page alike."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hermes_ops.airflow.control.decisions import read_local
from hermes_ops.airflow.control.publish import read_view
from hermes_ops.airflow.problems import problem_lines, trouble_line
from hermes_ops.core.amounts import figure
from hermes_ops.errors import HermesError, Refused, Unavailable

if TYPE_CHECKING:
    from hermes_ops.tracking import Tracker

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
        """Its end in a sentence, in lines of its own where it was tried more than once."""
        steps = f" after step {self.steps}" if self.steps not in ("", "0") else ""
        text = f"has ended{steps}: {self.state.replace('_', ' ')}"
        text += f", because: {self.reason}" if self.reason else ""
        if not self.first_failure:
            return text + ("" if text.endswith(".") else ".")
        first = "\n".join(f"    {line}" for line in self.first_failure.splitlines())
        return f"{text}\n  it was tried more than once; its first failure was:\n{first}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """A trial's standing in the pool now, None when it is not there, and all its decisions.

    The decisions are newest first, each as `decisions.jsonl` has it; `age_s`: of the standing.
    `ended`: the final state of one that has ended, and why, as far as MLflow tells.
    `problems`: a line for each step that fails for it now, and one if the controller's rounds fail.
    """

    trial: str
    standing: Mapping[str, Any] | None
    policy: str
    age_s: float
    decisions: Sequence[Mapping[str, Any]]
    ended: TrialEnd | None = None
    problems: Sequence[str] = ()

    @property
    def now(self) -> str:
        """Its standing in one sentence."""
        job = self.standing
        if self.ended is not None:
            return f"{self.trial} {self.ended.words}"
        if job is None:
            return f"{self.trial} is not in the pool now."
        return (
            f"{self.trial} is {job['phase']}{on_gpus(job['gpus'])}, at step {job['step']}, "
            f"value {job['value']}, {job['preemptions']} preemptions "
            f"(policy {self.policy}, {self.age_s:.1f} s ago){_bound(job.get('nodes') or ())}"
        )


def explain(pool: str, tracker: Tracker, trial: str) -> Explanation:
    """What is known of the trial SWEEP/NUMBER.

    HermesError when that is nothing; Unavailable when only MLflow could tell and is away.
    """
    sweep, number = parts(trial)
    view = read_view(pool) or {"jobs": [], "time_s": 0.0, "policy": "?"}
    job = next((j for j in view["jobs"] if j["id"] == trial), None)
    found = [d for d in _decisions(tracker, sweep, needed=job is None) if d.get("trial") == number]
    over = job is None or job["phase"] == "ended"
    ended = trial_end(tracker, sweep, number) if over else None
    problems = [*filter(None, [trouble_line(view)]), *problem_lines(view, sweep, number)]
    if job is None and not found and ended is None and not problems:
        raise HermesError(
            f"nothing is known of trial {trial!r}: `hermes sweep list` shows the sweeps."
        )
    age_s = max(0.0, time.time() - view["time_s"])
    return Explanation(
        trial, job, view["policy"], age_s, tuple(reversed(found)), ended, tuple(problems)
    )


def trial_end(tracker: Tracker, sweep: str, number: int) -> TrialEnd | None:
    """How MLflow says that the trial has ended; None while it has not, or MLflow is away."""
    from hermes_ops.tracking.runs import RUN_STATUS
    from hermes_ops.tracking.summary import find

    try:
        ref = find(tracker, sweep)
        runs, whole = tracker.trials(ref), tracker.sweep(ref)
    except HermesError:
        return None
    if whole.state in RUN_STATUS and all(run.number != number for run in runs):
        return TrialEnd("cancelled", f"its sweep had ended before it began ({whole.state})")
    for run in runs:
        if run.number == number and run.state in RUN_STATUS:
            told = (run.tags.get(f"hermes.{n}", "") for n in ("reason", "first_failure", "steps"))
            return TrialEnd(run.state, *told)
    return None


def parts(trial: str) -> tuple[str, int]:
    """The sweep and the number of `SWEEP/NUMBER`; HermesError for anything else."""
    if not re.fullmatch(r"(?s).+/[0-9]{1,9}", trial):
        raise HermesError(f"{trial!r} is no trial: write SWEEP/NUMBER, for example digits-1/3.")
    sweep, _, number = trial.rpartition("/")
    return sweep, int(number)


def on_gpus(gpus: Sequence[int]) -> str:
    """` on GPU 0, 1`; empty without any."""
    return f" on GPU {', '.join(map(str, gpus))}" if gpus else ""


def _bound(nodes: Sequence[str]) -> str:
    if not nodes:
        return ""
    return f"; it may run on {' or '.join(nodes)} only, where its checkpoints are or will be"


def short(value: object) -> str:
    """A term of a score in four digits."""
    return figure(value, 4) if isinstance(value, float) else str(value)


def _decisions(tracker: Tracker, sweep: str, *, needed: bool) -> Sequence[Mapping[str, Any]]:
    """From this machine's log, or where there is none from MLflow's (Unavailable if `needed`)."""
    from hermes_ops.tracking.summary import find

    found: Sequence[Mapping[str, Any]] = read_local(sweep)
    if found:
        return found
    try:
        return tracker.read_decisions(find(tracker, sweep).parent_run_id)
    except Refused:
        return ()
    except Unavailable:
        if needed:
            raise
        return ()
