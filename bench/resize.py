"""The time from the decision to resize a trial until its first batch at the new size."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench import stack
from bench.horovod_env import VARIABLES, interpreter
from bench.measure import QUICK, SCRIPTS, Figures, NotMeasuredError, await_, figures, read_lines
from bench.switch import first_line

SLOTS = 4
CYCLES = 1 if QUICK else 5
WAIT_S = 300.0
SETTLED_S = 2.0
RESTLESS = ("--policy", "doubling", "--policy-option", "guard_k=0")

Moments = tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Script:
    """A script of several workers: its sweep, the moments of a resize and the parts in between."""

    name: str
    sweep: Callable[[Path], Figures]
    moments: Callable[[stack.Sweep, float, Figures], Moments]
    parts: tuple[str, ...]


def run() -> Figures:
    """Measure trials of workers that shrink to one for three others, and grow as they end."""
    found: dict[str, Figures] = {script.name: {} for script in SCRIPTS_MEASURED}
    for name, options in (("with_standby", ()), ("without_standby", ("--standby", 0))):
        with stack.running(SLOTS, *RESTLESS, *options) as own:
            for script in SCRIPTS_MEASURED:
                found[script.name][name] = _measured(own, script)
    return {
        **found,
        "slots": SLOTS,
        "cycles": CYCLES,
        "target_s": 4.0,
        "target_agree_and_leave_s": 0.5,
    }


def _measured(own: stack.Stack, script: Script) -> Figures:
    """Let a trial of that script change its size in cycles, and split the time that it takes."""
    with tempfile.TemporaryDirectory() as folder:
        lasts = _files(Path(folder) / "main", 1)
        main = own.start(script.sweep(lasts[0]))
        _await_size(main, SLOTS)
        for cycle in range(CYCLES):
            others = Path(folder) / f"others-{cycle}"
            files = _files(others, SLOTS - 1)
            own.start(others_sweep(f"others-{cycle}", others, SLOTS - 1, 1))
            _await_size(main, 1)
            for file in files[:2]:
                file.unlink()
            _await_size(main, 2)
            files[2].unlink()
            _await_size(main, SLOTS)
        found = list(_resizes(main, script))
        own.hermes("sweep", "stop", main.id)
    return _split(found, script.parts)


def stub_sweep(lasts: Path) -> Figures:
    """Return a sweep of one trial of 1 to 4 stub workers that lasts while the file is there."""
    config = others_sweep("stub", lasts.with_name("main"), 1, {"min": 1, "max": SLOTS})
    config["trial"]["workers"] = "one_per_gpu"
    return config


def horovod_sweep(lasts: Path | None, **changes: Any) -> Figures:  # noqa: ANN401 - keys of `trial`
    """Return a sweep of one Horovod trial of 1 to 4 workers that lasts while the file is there."""
    config = stack.stub_sweep("horovod", 1, pause_s=0.05)
    command = ["python", "horovod_stamped.py", "--rate", "0.002", "--pause", "0.05"]
    config["trial"].update(
        command=[*command, *(("--while", str(lasts)) if lasts is not None else ())],
        python=str(interpreter()),
        environment=VARIABLES,
        gpus={"min": 1, "max": SLOTS},
        workers="one_per_gpu",
    )
    config["search"]["space"] = {"rate": {"type": "uniform", "low": 0.002, "high": 0.003}}
    config["trial"].update(changes)
    return config


def others_sweep(name: str, lasts: Path, trials: int, gpus: Any) -> Figures:  # noqa: ANN401 - a key
    """Return a sweep of stubs of so many GPUs, each of which lasts while its file is there."""
    config = stack.stub_sweep(name, trials, "--while", lasts, pause_s=0.3)
    config["trial"]["command"][1] = "ranks.py"
    config["trial"].update(gpus=gpus, directory=str(SCRIPTS))
    return config


def _files(lasts: Path, trials: int) -> list[Path]:
    files = [lasts.with_name(f"{lasts.name}-{number}") for number in range(trials)]
    for file in files:
        file.touch()
    return files


def stamps(sweep: stack.Sweep) -> list[dict[str, Any]]:
    """Return the stamps of the first batch of each segment of the sweep's trial."""
    return read_lines(sweep.trial(0) / "stamps.jsonl")


def _await_size(sweep: stack.Sweep, size: int) -> None:
    """Wait until the sweep's trial has trained on that many GPUs for a while."""
    what = f"training with {size} workers"
    await_(lambda: [s["size"] for s in stamps(sweep)][-1:] == [size], WAIT_S, what, 0.2)
    time.sleep(SETTLED_S)


def _resizes(sweep: stack.Sweep, script: Script) -> Iterator[tuple[str, Moments]]:
    """Yield "old_to_new" and the Unix seconds of each event, of each resize of the trial."""
    written = stamps(sweep)
    for decision in (d for d in sweep.decisions() if d["action"] == "resize"):
        decided_s, size = decision["time_s"], len(decision["gpus"])
        before = [s["size"] for s in written if s["line_s"] < decided_s]
        after = next((s for s in written if s["line_s"] > decided_s), None)
        if not before or after is None or after["size"] != size:
            continue  # another decision came before it had trained
        yield f"{before[-1]}_to_{size}", (decided_s, *script.moments(sweep, decided_s, after))


def _stub_moments(sweep: stack.Sweep, decided_s: float, after: Figures) -> Moments:
    return (
        *_left(sweep, decided_s),
        first_line(sweep, 0, "segments.jsonl", "start_s", decided_s),
        after["line_s"],
        after["first_batch_s"],
    )


def _left(sweep: stack.Sweep, decided_s: float) -> tuple[float | None, float | None]:
    """Return when the task saw the stop flag, and when all its processes had left."""
    seen_s = stack.first_after(sweep.task_log(0), "It is to stop", decided_s)
    return seen_s, first_line(sweep, 0, "segments.jsonl", "end_s", decided_s)


def _horovod_moments(sweep: stack.Sweep, decided_s: float, after: Figures) -> Moments:
    seen_s, end_s = _left(sweep, decided_s)
    events = read_lines(sweep.trial(0) / "events.jsonl")
    saved = [
        event
        for event in events
        if event["kind"] == "checkpoint" and decided_s < event["time_s"] < after["line_s"]
    ]
    agreed_s = saved[-1]["time_s"] - saved[-1]["seconds"] if saved else None
    restored = [e["time_s"] for e in events if e["kind"] == "restored"]
    return (
        seen_s,
        agreed_s,
        saved[-1]["time_s"] if saved else None,
        end_s,
        first_line(sweep, 0, "segments.jsonl", "start_s", decided_s),
        after["line_s"],
        after["init_s"],
        next((time_s for time_s in restored if time_s > after["init_s"]), None),
        after["first_batch_s"],
    )


def _split(found: list[tuple[str, Moments]], names: tuple[str, ...]) -> Figures:
    """Summarise the resizes by old and new size, whole and in consecutive parts."""
    if not found:
        raise NotMeasuredError("no resize was seen from the decision to the first batch")
    shown: Figures = {}
    for change in sorted({change for change, _ in found}):
        lines = [moments for name, moments in found if name == change]
        parts: dict[str, list[float]] = {part: [] for part in names}
        for moments in lines:
            for part, (before_s, after_s) in zip(names, pairwise(moments), strict=True):
                if before_s is not None and after_s is not None:
                    parts[part].append(after_s - before_s)
        whole = [m[-1] - m[0] for m in lines if m[0] is not None and m[-1] is not None]
        shown[change] = {
            "decision_to_first_batch_s": figures(whole),
            **{part: figures(values) for part, values in parts.items()},
        }
    return shown


STUB = Script(
    "stub",
    stub_sweep,
    _stub_moments,
    ("decision_to_flag_seen_s", "agree_and_leave_s", "next_lease_s", "start_s", "first_batch_s"),
)
HOROVOD = Script(
    "horovod",
    horovod_sweep,
    _horovod_moments,
    (
        "decision_to_flag_seen_s",
        "agree_s",
        "checkpoint_s",
        "exit_s",
        "next_lease_s",
        "start_s",
        "init_s",
        "restore_s",
        "first_batch_s",
    ),
)
SCRIPTS_MEASURED = (STUB, HOROVOD)
