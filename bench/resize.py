"""The time from the decision to resize a trial until its first batch at the new size."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench import stack
from bench.measure import QUICK, SCRIPTS, Figures, NotMeasuredError, await_, figures, read_lines
from bench.switch import first_line

SLOTS = 4
CYCLES = 1 if QUICK else 5
WAIT_S = 300.0
SETTLED_S = 2.0
RESTLESS = ("--policy", "doubling", "--policy-option", "guard_k=0")
PARTS = (
    "decision_to_flag_seen_s",
    "flag_seen_to_segment_end_s",
    "segment_end_to_next_start_s",
    "next_start_to_first_line_s",
    "first_line_to_first_batch_s",
)


def run() -> Figures:
    """Measure a trial of workers that shrinks to one for three others, and grows as they end."""
    return {
        "with_standby": _measured(),
        "without_standby": _measured("--standby", 0),
        "slots": SLOTS,
        "cycles": CYCLES,
        "target_s": 4.0,
    }


def _measured(*options: object) -> Figures:
    with tempfile.TemporaryDirectory() as folder, stack.running(SLOTS, *RESTLESS, *options) as own:
        lasts = Path(folder) / "main"
        _files(lasts, 1)
        main = own.start(_sweep("main", lasts, 1))
        _await_size(main, 4)
        for cycle in range(CYCLES):
            others = Path(folder) / f"others-{cycle}"
            files = _files(others, 3)
            own.start(_sweep(f"others-{cycle}", others, 3))
            _await_size(main, 1)
            for file in files[:2]:
                file.unlink()
            _await_size(main, 2)
            files[2].unlink()
            _await_size(main, 4)
        found = list(_resizes(main))
        own.hermes("sweep", "stop", main.id)
    return _split(found)


def _sweep(name: str, lasts: Path, trials: int) -> Figures:
    """Return a sweep of trials of 1 to 4 workers, each of which lasts while its file is there."""
    config = stack.stub_sweep(name, trials, "--while", lasts, pause_s=0.3)
    config["trial"]["command"][1] = "ranks.py"
    config["trial"].update(gpus={"min": 1, "max": SLOTS}, workers="one_per_gpu")
    config["trial"]["directory"] = str(SCRIPTS)
    return config


def _files(lasts: Path, trials: int) -> list[Path]:
    files = [lasts.with_name(f"{lasts.name}-{number}") for number in range(trials)]
    for file in files:
        file.touch()
    return files


def _stamps(sweep: stack.Sweep) -> list[dict[str, Any]]:
    return read_lines(sweep.trial(0) / "stamps.jsonl")


def _await_size(sweep: stack.Sweep, size: int) -> None:
    """Wait until the sweep's trial has trained on that many GPUs for a while."""
    what = f"training with {size} workers"
    await_(lambda: [s["size"] for s in _stamps(sweep)][-1:] == [size], WAIT_S, what, 0.2)
    time.sleep(SETTLED_S)


def _resizes(sweep: stack.Sweep) -> Iterator[tuple[str, list[float | None]]]:
    """Yield "old_to_new" and the Unix seconds of each event, of each resize of the trial."""
    stamps, log = _stamps(sweep), sweep.task_log(0)
    for decision in (d for d in sweep.decisions() if d["action"] == "resize"):
        decided_s, size = decision["time_s"], len(decision["gpus"])
        before = [s["size"] for s in stamps if s["line_s"] < decided_s]
        after = next((s for s in stamps if s["line_s"] > decided_s), None)
        if not before or after is None or after["size"] != size:
            continue  # another decision came before it had trained
        yield (
            f"{before[-1]}_to_{size}",
            [
                decided_s,
                stack.first_after(log, "It is to stop", decided_s),
                first_line(sweep, 0, "segments.jsonl", "end_s", decided_s),
                first_line(sweep, 0, "segments.jsonl", "start_s", decided_s),
                after["line_s"],
                after["first_batch_s"],
            ],
        )


def _split(found: list[tuple[str, list[float | None]]]) -> Figures:
    """Summarise the resizes by old and new size, whole and in consecutive parts."""
    if not found:
        raise NotMeasuredError("no resize was seen from the decision to the first batch")
    shown: Figures = {}
    for change in sorted({change for change, _ in found}):
        lines = [moments for name, moments in found if name == change]
        parts: dict[str, list[float]] = {part: [] for part in PARTS}
        for moments in lines:
            for part, (before_s, after_s) in zip(PARTS, pairwise(moments), strict=True):
                if before_s is not None and after_s is not None:
                    parts[part].append(after_s - before_s)
        whole = [m[-1] - m[0] for m in lines if m[0] is not None and m[-1] is not None]
        shown[change] = {
            "decision_to_first_batch_s": figures(whole),
            **{part: figures(values) for part, values in parts.items()},
        }
    return shown
