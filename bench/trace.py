"""A trace of 82,247 jobs on 400 GPUs: seconds and memory of whole simulations."""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from dataclasses import replace
from math import log
from pathlib import Path
from statistics import fmean

from bench.measure import ONE_CORE, QUICK, ROOT, Figures, environment, timed
from hermes_ops.policies import make_policy
from hermes_ops.simulator.engine import layout, simulate
from hermes_ops.simulator.traces import read_trace

TRACE = Path(os.environ.get("BENCH_TRACE", ROOT / "examples" / "traces" / "philly_82k.csv.gz"))
GPUS = "400"
JOBS = (1_000, 3_000) if QUICK else (20_000, 82_247)
TIMEOUT_S = 1_800.0


def run() -> Figures:
    """CPU seconds and peak memory under FIFO and 2D-LAS, each in a process of its own.

    `cpu_s` is all of it: reading the whole trace, too. `growth` is the exponent with which the
    seconds of simulating grow from the first jobs of the trace to all of them. The trace is the
    example unless BENCH_TRACE names another file.
    """
    found: Figures = {"gpus": int(GPUS), "trace": TRACE.name}
    for policy in ("fifo", "2d-las"):
        sizes = {f"jobs_{jobs}": _measured(policy, jobs) for jobs in JOBS}
        found[policy] = sizes | {"growth": _growth(sizes)}
    return found


def _measured(policy: str, jobs: int) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = (sys.executable, "-m", "bench.trace", policy, jobs, out)
        timed(command, environment(BENCH_TRACE=str(TRACE), **ONE_CORE), TIMEOUT_S)
        figures: Figures = json.loads(out.read_text())
    return figures


def _growth(sizes: dict[str, Figures]) -> float:
    few, many = (sizes[f"jobs_{jobs}"] for jobs in JOBS)
    times = many["simulating_s"] / few["simulating_s"]
    return round(log(times) / log(many["jobs"] / few["jobs"]), 2)


def main(policy: str, jobs: int, out: Path) -> None:
    """Simulate the trace's first jobs and write the figures as JSON."""
    started_s = time.process_time()
    trace = read_trace(TRACE)
    trace = replace(trace, jobs=trace.jobs[:jobs])
    read_s = time.process_time()
    done = simulate(trace, layout(GPUS), make_policy(policy, {}))
    ended_s = time.process_time()
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    completions = [o.completion_s for o in done.outcomes if o.completion_s is not None]
    figures = {
        "jobs": len(trace.jobs),
        "cpu_s": round(ended_s - started_s, 2),
        "simulating_s": round(ended_s - read_s, 2),
        "decisions": done.decisions,
        "us_a_decision": round((ended_s - read_s) / done.decisions * 1e6, 1),
        "peak_mib": round(peak_kib / 1024, 1),
        "mean_completion_seconds": round(fmean(completions), 1),
        "preemptions": sum(o.preemptions for o in done.outcomes),
    }
    out.write_text(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
