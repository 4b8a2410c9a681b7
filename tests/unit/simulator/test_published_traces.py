"""FIFO, SRTF and SRSF on public traces, against results that two other programs agree on.

Mean completion time and makespan in seconds, GPUs counted only, nothing lost by switching: from the
public Tiresias simulator and from an independent program.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from statistics import fmean

import pytest

from hermes_ops.policies import make_policy
from hermes_ops.simulator.engine import layout, simulate
from hermes_ops.simulator.oracle import oracle
from hermes_ops.simulator.traces import read_trace
from hermes_ops.simulator.workload import Workload

TRACES = Path(__file__).parents[3] / "examples" / "traces"
KNOWN: dict[tuple[str, int], dict[str, tuple[float, int]]] = {
    ("tiresias_60_job", 8): {
        "fifo": (1556.48, 5747),
        "srtf": (519.87, 4901),
        "srsf": (563.38, 4962),
    },
    ("tiresias_60_job", 16): {
        "fifo": (200.82, 3335),
        "srtf": (192.12, 3271),
        "srsf": (195.90, 3315),
    },
    ("philly_480", 64): {
        "fifo": (225_904, 2_190_718),
        "srtf": (107_758, 2_092_937),
        "srsf": (105_160, 1_941_867),
    },
    ("muri_philly_trace3", 64): {
        "fifo": (991_167, 8_171_961),
        "srtf": (180_116, 8_171_961),
        "srsf": (172_684, 8_171_961),
    },
}
CASES = [(trace, gpus, name) for (trace, gpus), row in KNOWN.items() for name in row]


@lru_cache(maxsize=4)
def trace_of(name: str) -> Workload:
    return read_trace(TRACES / f"{name}.csv")


@pytest.mark.parametrize(("trace", "gpus", "name"), CASES)
def test_published_results_are_reproduced_to_the_last_digit(
    trace: str, gpus: int, name: str
) -> None:
    mean_s, makespan_s = KNOWN[trace, gpus][name]
    workload = trace_of(trace)
    policy = make_policy(name, {}, {"oracle": oracle(workload)})
    run = simulate(workload, layout(str(gpus)), policy)
    completions = [o.completion_s for o in run.outcomes if o.completion_s is not None]
    assert len(completions) == len(workload.jobs)
    digits = 0 if isinstance(mean_s, int) else 2
    assert round(fmean(completions), digits) == mean_s
    assert max(o.ended_s or 0.0 for o in run.outcomes) == makespan_s
    assert sum(o.lost_gpu_s for o in run.outcomes) == pytest.approx(0.0, abs=1e-3)
