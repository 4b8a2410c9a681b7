"""One job of fixed work with 2 workers, with 4, and with 4 from a part of its work on.

Source: Capes et al. (arXiv 1908.08082), Table 2.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from bench import stack
from bench.measure import QUICK, Figures, NotMeasuredError, await_, figures, read_lines
from bench.resize import horovod_sweep, others_sweep, stamps

FEW, MANY = 2, 4
EPOCHS = 3 if QUICK else 12
CYCLES = 1 if QUICK else 3
WAIT_S = 600.0
# The job that was there first has as many GPUs as are free: it grows once the other one has ended.
POLICY = ("--policy", "elastic-fifo", "--policy-option", "guard_k=0")
BOTH = {"min": FEW, "max": MANY, "sizes": "powers_of_two"}


def run() -> Figures:
    """Measure the seconds of the job in each of the cases, and what a change of size costs."""
    took: dict[str, list[float]] = {}
    restarts_s: list[float] = []
    with stack.running(MANY, *POLICY) as own, tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        _alone(own, "warm-up", MANY, epochs=1)  # teaches the standby interpreters their imports
        for cycle in range(CYCLES):
            for name, gpus in (("two_s", FEW), ("four_s", MANY)):
                took.setdefault(name, []).append(_alone(own, f"{name}-{cycle}", gpus))
            for part, done in (("a_third", EPOCHS // 3), ("two_thirds", 2 * EPOCHS // 3)):
                seconds, restart_s = _growing(own, f"{part}-{cycle}", done, place)
                took.setdefault(f"four_after_{part}_s", []).append(seconds)
                restarts_s.append(restart_s)
    return {
        **{name: figures(seconds) for name, seconds in took.items()},
        **{
            f"saved_by_four_after_{part}_s": figures(_saved(took, part))
            for part in ("a_third", "two_thirds")
        },
        "restart_s": figures(restarts_s),
        "epochs": EPOCHS,
        "cycles": CYCLES,
    }


def _saved(took: dict[str, list[float]], part: str) -> list[float]:
    """Return by how much the job ended sooner than with 2 workers throughout, in each cycle."""
    return [
        two_s - four_s
        for two_s, four_s in zip(took["two_s"], took[f"four_after_{part}_s"], strict=True)
    ]


def _job(own: stack.Stack, name: str, gpus: Any, epochs: int = EPOCHS) -> stack.Sweep:  # noqa: ANN401 - a key
    """Start the job; a batch takes as long on any number of workers, an epoch has fewer of them."""
    config = horovod_sweep(None, gpus=gpus)
    command = config["trial"]["command"]
    command[command.index("--pause") + 1] = "0.1"
    command += ["--epochs", str(epochs)]
    return own.start({**config, "name": name, "budget": {"max_epochs": epochs}})


def _alone(own: stack.Stack, name: str, gpus: int, epochs: int = EPOCHS) -> float:
    """Return the seconds of the job on that many GPUs."""
    return _seconds(_job(own, name, gpus, epochs))


def _growing(own: stack.Stack, name: str, done: int, place: Path) -> tuple[float, float]:
    """Return the seconds of the job on 2 GPUs and on 4 once so many epochs are done.

    Also return the seconds from the decision to grow until the first batch on 4.
    """
    lasts = place / name
    file = lasts.with_name(f"{name}-0")
    file.touch()
    other = own.start(others_sweep(f"other-{name}", lasts, 1, FEW))
    await_(lambda: bool(stamps(other)), WAIT_S, "training on the other GPUs", 0.1)
    job = _job(own, name, BOTH)
    await_(lambda: _step(job) >= done, WAIT_S, f"{done} epochs", 0.02)
    file.unlink()
    seconds = _seconds(job)
    grown = [d["time_s"] for d in job.decisions() if d["action"] == "resize"]
    first_s = [s["first_batch_s"] for s in stamps(job) if s["size"] == MANY]
    if len(grown) != 1 or len(first_s) != 1:
        raise NotMeasuredError(f"{name} has changed its size {len(grown)} times, not once")
    return seconds, first_s[0] - grown[0]


def _step(sweep: stack.Sweep) -> int:
    metrics = read_lines(sweep.trial(0) / "metrics.jsonl")
    return max((int(metric["step"]) for metric in metrics), default=0)


def _seconds(sweep: stack.Sweep) -> float:
    """Wait for the trial's end; return its seconds from the start of its first segment."""

    def ended() -> list[float]:
        segments = read_lines(sweep.trial(0) / "segments.jsonl")
        return [s["end_s"] for s in segments if s.get("outcome") == "finished"]

    await_(lambda: bool(ended()), WAIT_S, f"the end of {sweep.id}", 0.1)
    segments = read_lines(sweep.trial(0) / "segments.jsonl")
    return ended()[0] - min(float(s["start_s"]) for s in segments if "start_s" in s)
