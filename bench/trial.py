"""One trial through `hermes-trial`, as an operator runs it, and its script plainly."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measure import SCRIPTS, NotMeasuredError, read_lines, timed

PREEMPTED = 75
TIMEOUT_S = 1200.0


@dataclass(frozen=True, slots=True)
class Trial:
    """A folder in which segments of one trial are run."""

    folder: Path
    objective: str = "loss"

    def command(
        self, epoch: int, script: Sequence[object], standby: Path | None = None
    ) -> list[object]:
        """The command line of the segment of that lease epoch; `python` is this interpreter."""
        guard = [sys.executable, "-P", "-m", "hermes_ops.trial", "--dir", self.folder]
        options = ["--epoch", epoch, "--objective", self.objective, "--python", sys.executable]
        keeper = ["--standby", standby] if standby else []
        return [*guard, *options, *keeper, "--", "python", *script]

    @property
    def step(self) -> int:
        """Epochs reported until now."""
        return max((int(m["step"]) for m in read_lines(self.folder / "metrics.jsonl")), default=0)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What the hook inside the script has said, oldest first."""
        return [e for e in read_lines(self.folder / "events.jsonl") if e.get("kind") == kind]

    @property
    def stamps(self) -> list[dict[str, Any]]:
        """What our scripts have written of each start."""
        return read_lines(self.folder / "stamps.jsonl")

    def check_finished(self) -> None:
        """NotMeasuredError unless the trial has finished."""
        result = json.loads((self.folder / "result.json").read_text())
        if result["outcome"] != "finished":
            raise NotMeasuredError(f"the trial ended as {result['outcome']}: {result['reason']}")


def network(name: str, epochs: int, steps: int, batch: int) -> list[object]:
    """The script that trains a network on random images, with its arguments."""
    sizes = ["--epochs", epochs, "--steps", steps, "--batch", batch]
    return [SCRIPTS / "network.py", "--network", name, *sizes]


def plain(script: Sequence[object], env: Mapping[str, str]) -> float:
    """Seconds of the script without Hermes, from start to exit."""
    return timed([sys.executable, *script], env, TIMEOUT_S)


def calibrated(
    name: str, epochs: int, batch: int, target_s: float, env: Mapping[str, str], timings: Path
) -> int:
    """Steps an epoch with which a plain run takes about `target_s` seconds on this machine."""
    pilot_steps, pilot_epochs = 3, 4
    script = network(name, pilot_epochs, pilot_steps, batch)
    whole_s = plain([*script, "--timings", timings], env)
    epochs_s: list[float] = sorted(json.loads(timings.read_text())[1:])
    epoch_s = epochs_s[len(epochs_s) // 2]
    fixed_s = whole_s - pilot_epochs * epoch_s
    return max(1, round((target_s - fixed_s) / epochs / (epoch_s / pilot_steps)))
