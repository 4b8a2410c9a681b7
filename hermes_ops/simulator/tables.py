"""The tables of simulations: one row a job, one row a policy."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

from hermes_ops.simulator.compare import Comparison
from hermes_ops.simulator.intervals import Interval
from hermes_ops.simulator.metrics import Metrics, fairness
from hermes_ops.simulator.workload import Run

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


def jobs_csv(run: Run) -> str:
    """One line a job in order of submission, a header first; empty where there is no value."""
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


def document(found: Comparison) -> dict[str, object]:
    """The JSON document of a comparison; a metric that a seed never came to is null throughout."""
    return {
        "policies": {policy: _intervals(found, policy) for policy in found.policies},
        "workload": found.workload,
        "gpus": found.gpus,
        "seeds": len(found.seeds),
    }


def _intervals(found: Comparison, policy: str) -> Mapping[str, Mapping[str, float | None]]:
    names = found.of(policy)[0].metrics.document()
    return {name: _ends(found.interval(policy, name)) for name in names}


def _ends(interval: Interval | None) -> Mapping[str, float | None]:
    if interval is None:
        return {"mean": None, "low": None, "high": None}
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


def comparison_rows(found: Comparison) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The header, and one row a policy; columns of curves only where there are any."""
    with_curves = any(result.regret for result in found.results)
    shown = {k: v for k, v in SHOWN.items() if with_curves or k not in ONLY_CURVES}
    header = ["policy", *shown.values()]
    metric = "time_to_best_seconds" if with_curves else "mean_completion_seconds"
    header.append(f"speed-up over {found.policies[0]}")
    rows = [
        (
            policy,
            *(cell(found.interval(policy, name)) for name in shown),
            cell(found.speed_up(policy, metric)),
        )
        for policy in found.policies
    ]
    return tuple(header), rows


def metric_rows(metrics: Metrics) -> list[tuple[str, str]]:
    """The figures of one run by name, without those that it never came to."""
    found = metrics.document().items()
    return [(name.replace("_", " "), number(value)) for name, value in found if value is not None]


def cell(interval: Interval | None) -> str:
    """`mean (low–high)`, the mean alone when the interval is a point, a dash for nothing."""
    if interval is None:
        return "–"
    if interval.low == interval.high:
        return number(interval.mean)
    return f"{number(interval.mean)} ({number(interval.low)}–{number(interval.high)})"


def number(value: float) -> str:
    """At least three significant digits, no more decimals than two, thousands parted."""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 1e-6:
        return "0"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
