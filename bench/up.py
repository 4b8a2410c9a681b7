"""The seconds of `hermes up` and `hermes down`, and the memory of a stack without trials."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from pathlib import Path

from bench import stack
from bench.measure import QUICK, Figures, figures

REPEATS = 1 if QUICK else 3
SETTLE_S = 2.0 if QUICK else 20.0
SLOTS = 2


def run() -> Figures:
    """Measure cold (an empty state folder) and warm (the stack has been up before) starts."""
    cold_s, warm_s, down_s, memory = [], [], [], []
    for _ in range(REPEATS):
        with stack.folder() as own:
            cold_s.append(_up_s(own))
            down_s.append(_down_s(own))
            warm_s.append(_up_s(own))
            stack.settle(SETTLE_S)
            memory.append(pss_mib(own.home))
            down_s.append(_down_s(own))
    return {
        "up_cold_s": figures(cold_s, 2),
        "up_warm_s": figures(warm_s, 2),
        "down_s": figures(down_s, 2),
        "pss_mib": figures((sum(m.values()) for m in memory), 0),
        "pss_of_program_mib": {k: round(v, 1) for k, v in sorted(memory[-1].items())},
        "target_pss_mib": 2048,
        "slots": SLOTS,
    }


def _up_s(own: stack.Stack) -> float:
    started_s = time.monotonic()
    own.up(SLOTS)
    return time.monotonic() - started_s


def _down_s(own: stack.Stack) -> float:
    started_s = time.monotonic()
    own.down()
    return time.monotonic() - started_s


def pss_mib(home: Path) -> dict[str, float]:
    """Return the proportional set size of every process of the home, by program, in MiB."""
    import psutil

    found: defaultdict[str, float] = defaultdict(float)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environment = process.environ()
            if environment.get("HERMES_HOME") == str(home):
                name = environment.get("HERMES_PROGRAM") or process.name()
                found[name] += process.memory_full_info().pss / 2**20
    return found
