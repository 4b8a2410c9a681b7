"""A thousand short trials through the real scheduler."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from bench import stack
from bench.measure import QUICK, Figures, NotMeasuredError, await_, figures, read_lines

TRIALS = int(os.environ.get("BENCH_TRIALS", "24" if QUICK else "1000"))
SLOTS = 8
PAUSE_S = 0.2
SECONDS_A_TRIAL = 10.0
"""The maximum average seconds that the benchmark waits for a trial."""


def run() -> Figures:
    """Measure trials a second, and the share of the slots' time in which no script ran."""
    with stack.running(SLOTS) as own:
        sweep = own.start(stack.stub_sweep("thousand", TRIALS, "--no-checkpoint", pause_s=PAUSE_S))
        await_(
            lambda: _results(sweep) >= TRIALS, 120.0 + TRIALS * SECONDS_A_TRIAL, "all trials", 2.0
        )
        return _figures(sweep)


def _results(sweep: stack.Sweep) -> int:
    """Return the number of ended trials (each writes result.json at its end)."""
    return sum(1 for _ in sweep.folder.glob("trials/*/result.json"))


def _figures(sweep: stack.Sweep) -> Figures:
    begun = [d["time_s"] for d in sweep.decisions() if d["action"] == "start"]
    stamps = [_stamps(sweep, number) for number in range(TRIALS)]
    ran = [s["ran_s"] for s in stamps if "ran_s" in s]
    if not ran or not begun:
        raise NotMeasuredError("no trial has run to its end")
    wall_s = max(s.get("end_s", 0.0) for s in stamps) - min(begun)
    segments = Counter(
        len(read_lines(sweep.trial(number) / "segments.jsonl")) // 2 for number in range(TRIALS)
    )
    return {
        "trials": TRIALS,
        "trials_run_to_their_end": len(ran),
        "trials_in_more_than_one_segment": TRIALS - segments[1],
        "slots": SLOTS,
        "wall_s": round(wall_s, 2),
        "trials_per_s": round(len(ran) / wall_s, 3),
        "script_s": figures(ran),
        "slot_s_per_trial": round(SLOTS * wall_s / len(ran), 3),
        "share_of_slot_time_lost": round(1.0 - sum(ran) / (SLOTS * wall_s), 4),
    }


def _stamps(sweep: stack.Sweep, number: int) -> dict[str, Any]:
    """Return the stamps of a trial's last run."""
    merged: dict[str, Any] = {}
    for line in read_lines(sweep.trial(number) / "stamps.jsonl"):
        merged |= line
    return merged
