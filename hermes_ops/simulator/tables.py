"""The tables of simulations: one row a job, one row a policy."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

from hermes_ops.simulator.comparison import Comparison, Interval, PolicyResult
from hermes_ops.simulator.metrics import Metrics, fairness, jain_index
from hermes_ops.simulator.workload import SimulationRun

COLUMNS = (
    "job", "sweep", "user", "gpus", "submitted_s", "seconds", "state", "first_start_s", "ended_s",
    "completion_s", "waited_s", "trained_s", "service_gpu_s", "lost_gpu_s", "preemptions",
    "fairness",
)  # fmt: skip
SHOWN = {
    "time_to_best_seconds": "best finished, s",
    "time_to_good_seconds": "within 1 %, s",
    "mean_completion_seconds": "completion, s",
    "makespan_seconds": "makespan, s",
    "preemptions": "preemptions",
    "lost_gpu_seconds": "lost GPU-s",
    "decision_ms": "decision, ms",
}
ONLY_CURVES = ("time_to_best_seconds", "time_to_good_seconds")


def jobs_csv(run: SimulationRun) -> str:
    """Return the CSV: a header, and a line a job by submission; empty cells without a value."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    rho = fairness(run)
    for o in run.outcomes:
        work = o.work
        cells = (
            work.id, work.sweep, work.user, work.gpus, work.submitted_s, work.seconds, o.state,
            o.first_start_s, o.ended_s, o.completion_s, o.waited_s, o.trained_s, o.service_gpu_s,
            o.lost_gpu_s, o.preemptions, rho.get(work.id),
        )  # fmt: skip
        writer.writerow(["" if cell is None else cell for cell in cells])
    return out.getvalue()


def completions_csv(comparison: Comparison, *, numbered: bool) -> str:
    """Return the CSV of every job's completion time, in seconds to the thousandth.

    `numbered`: the seeds are numbers of workloads. The cell of a job that did not finish is empty.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("policy", "number" if numbered else "seed", "job", "completion_s"))
    for result in comparison.results:
        for job, completion_s in result.jobs:
            seconds = "" if completion_s is None else round(completion_s, 3)
            writer.writerow((result.policy, result.seed, job, seconds))
    return out.getvalue()


def document(comparison: Comparison, *, numbered: bool = False) -> dict[str, object]:
    """Return the JSON document of a comparison; a metric that a seed does not have is null.

    `numbered`: the seeds are numbers of workloads, and the mean completion of each is there too.
    """
    return {
        **({"by_number": _by_number(comparison)} if numbered else {}),
        "policies": {policy: _intervals(comparison, policy) for policy in comparison.policies},
        "workload": comparison.workload,
        "gpus": comparison.gpus,
        "seeds": len(comparison.seeds),
        **_teams(comparison),
    }


def _teams(comparison: Comparison) -> dict[str, object]:
    """Return the figures of each team by policy, of the first seed; nothing without teams."""
    teams: dict[str, object] = {}
    for policy in comparison.policies:
        results = comparison.results_of(policy)[0].teams
        rho = [r.fairness_mean for r in results if r.fairness_mean is not None]
        if results:
            by_name = {result.team: result.document() for result in results}
            teams[policy] = {"jain_index": jain_index(rho), "by_team": by_name}
    return {"teams": teams} if teams else {}


def team_rows(comparison: Comparison) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header, and a row a team: its mean waiting in seconds under each policy.

    Below them Jain's index over the teams' mean finish-time fairness, the fairness of all jobs, and
    the utilisation; no rows without teams.
    """
    every = [comparison.results_of(policy)[0].teams for policy in comparison.policies]
    header = ("team", "jobs", *(f"{policy}: waiting, s" for policy in comparison.policies))
    rows = [
        (
            same[0].team or "none",
            number(same[0].jobs),
            *(number(r.mean_waiting_seconds) for r in same),
        )
        for same in zip(*every, strict=True)
    ]
    if rows:
        rows += _fairness_rows([comparison.results_of(policy)[0] for policy in comparison.policies])
    return header, rows


def _fairness_rows(results: Sequence[PolicyResult]) -> list[tuple[str, ...]]:
    """Return the rows on how fairly and how fully each policy used the GPUs."""
    figures: dict[str, list[float | None]] = {
        "Jain's index of fairness": [
            jain_index([t.fairness_mean for t in r.teams if t.fairness_mean is not None])
            for r in results
        ],
        "fairness, median": [r.metrics.fairness_median for r in results],
        "fairness, p99": [r.metrics.fairness_p99 for r in results],
        "utilisation": [r.metrics.utilisation for r in results],
    }
    return [
        (name, "", *("–" if value is None else number(value) for value in values))
        for name, values in figures.items()
    ]


def _by_number(comparison: Comparison) -> Mapping[str, Mapping[str, float | None]]:
    """Return the mean completion by number and policy."""
    by_number: dict[str, dict[str, float | None]] = {str(n): {} for n in comparison.seeds}
    for result in comparison.results:
        mean_s = result.metrics.document()["mean_completion_seconds"]
        by_number[str(result.seed)][result.policy] = mean_s
    return by_number


def _intervals(comparison: Comparison, policy: str) -> Mapping[str, Mapping[str, float | None]]:
    names = comparison.results_of(policy)[0].metrics.document()
    return {name: _ends(comparison.interval(policy, name)) for name in names}


def _ends(interval: Interval | None) -> Mapping[str, float | None]:
    if interval is None:
        return {"mean": None, "low": None, "high": None}
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


def comparison_rows(comparison: Comparison) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header, and one row a policy; columns of curves only where there are any."""
    with_curves = any(result.regret for result in comparison.results)
    shown = {k: v for k, v in SHOWN.items() if with_curves or k not in ONLY_CURVES}
    header = ["policy", *shown.values()]
    metric = "time_to_best_seconds" if with_curves else "mean_completion_seconds"
    header.append(f"speed-up over {comparison.policies[0]}")
    rows = [
        (
            policy,
            *(cell(comparison.interval(policy, name)) for name in shown),
            cell(comparison.speed_up(policy, metric)),
        )
        for policy in comparison.policies
    ]
    return tuple(header), rows


def metric_rows(metrics: Metrics) -> list[tuple[str, str]]:
    """Return the figures of one run by name, without those that are None."""
    figures = metrics.document().items()
    return [(name.replace("_", " "), number(value)) for name, value in figures if value is not None]


def cell(interval: Interval | None) -> str:
    """Format `mean (low–high)`, the mean alone when the interval is a point, a dash for None."""
    if interval is None:
        return "–"
    if interval.low == interval.high:
        return number(interval.mean)
    return f"{number(interval.mean)} ({number(interval.low)}–{number(interval.high)})"


def number(value: float) -> str:
    """Format a number: three significant digits or more, two decimals at most, thousands."""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 1e-6:
        return "0"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
