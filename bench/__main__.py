"""Run benchmarks by name, all but those of BY_NAME_ONLY without a name; one line of JSON each.

A line also goes to bench/results/NAME.jsonl. BENCH_QUICK=1 shrinks everything to a smoke test.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from bench.measure import QUICK, Figures, machine

RESULTS = Path(__file__).parent / "results"
BENCHMARKS = {
    "decide": "bench.decide:run",
    "decide_quota": "bench.decide_quota:run",
    "decide_sizes": "bench.decide_sizes:run",
    "trace": "bench.trace:run",
    "curve_fit": "bench.curve_fit:run",
    "up": "bench.up:run",
    "switch": "bench.switch:run",
    "keras_switch": "bench.switch:run_keras",
    "reclaim": "bench.reclaim:run",
    "resize": "bench.resize:run",
    "agree_overhead": "bench.agree_overhead:run",
    "capes_table2": "bench.capes_table2:run",
    "ten_preemptions": "bench.preemptions:run",
    "overhead": "bench.overhead:run",
    "paper_table": "bench.paper:run",
    "thousand": "bench.thousand:run",
    "ten_thousand": "bench.ten_thousand:run",
}
BY_NAME_ONLY = {
    "compare_live": "bench.compare_live:run",
    "compare_live_elastic": "bench.elastic_live:run",
    "machine_switch": "bench.machine_switch:run",
    "pod_switch": "bench.pod_switch:run",
    "pod_driver": "bench.pod_driver:run",
}


def main(names: list[str]) -> int:
    """Run the benchmarks of these names; return 1 if one of them could not be measured."""
    known = BENCHMARKS | BY_NAME_ONLY
    if names == ["machine"]:
        print(json.dumps(machine()))
        return 0
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return int(not all([_measured(name) for name in names or BENCHMARKS]))
    except KeyboardInterrupt:
        print("Interrupted: everything that was started has been stopped.", file=sys.stderr)
        return 130


def _measured(name: str) -> bool:
    """Run one benchmark and print its line; return False, with the reason printed, if it failed."""
    load, started_s = os.getloadavg()[0], time.monotonic()
    module, _, function = (BENCHMARKS | BY_NAME_ONLY)[name].partition(":")
    try:
        with _only_results_on_stdout():
            run: Callable[[], Figures] = getattr(importlib.import_module(module), function)
            found = run()
    except Exception:
        traceback.print_exc()
        print(f"{name} could not be measured", file=sys.stderr)
        return False
    line = json.dumps(
        {
            "benchmark": name,
            **found,
            "quick": QUICK,
            "took_s": round(time.monotonic() - started_s, 1),
            "load_1m_before": round(load, 2),
            "machine": machine(),
        }
    )
    print(line, flush=True)
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a") as file:
        file.write(line + "\n")
    return True


@contextlib.contextmanager
def _only_results_on_stdout() -> Iterator[None]:
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _interrupt(_: int, __: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
