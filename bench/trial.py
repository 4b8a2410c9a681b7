"""One trial under `hermes-trial`, as an operator runs it, and its script without Hermes."""

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
class SupervisedTrial:
    """The folder of one trial and its segments."""

    folder: Path
    objective: str = "loss"

    def command(
        self, epoch: int, script: Sequence[object], standby: Path | None = None
    ) -> list[object]:
        """Return the command of the segment of that lease epoch; `python` is this interpreter."""
        guard = [sys.executable, "-P", "-m", "hermes_ops.trial", "--dir", self.folder]
        options = ["--epoch", epoch, "--objective", self.objective, "--python", sys.executable]
        server = ["--standby", standby] if standby else []
        return [*guard, *options, *server, "--", "python", *script]

    @property
    def step(self) -> int:
        """Return the epochs reported until now."""
        return max((int(m["step"]) for m in read_lines(self.folder / "metrics.jsonl")), default=0)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of the hook inside the script, oldest first."""
        return [e for e in read_lines(self.folder / "events.jsonl") if e.get("kind") == kind]

    @property
    def stamps(self) -> list[dict[str, Any]]:
        """Return the stamps that our scripts wrote at each start."""
        return read_lines(self.folder / "stamps.jsonl")

    def check_finished(self) -> None:
        """Raise NotMeasuredError unless the trial has finished."""
        result = json.loads((self.folder / "result.json").read_text())
        if result["outcome"] != "finished":
            raise NotMeasuredError(f"the trial ended as {result['outcome']}: {result['reason']}")


def network(name: str, epochs: int, steps: int, batch: int) -> list[object]:
    """Return the script that trains a network on random images, with its arguments."""
    sizes = ["--epochs", epochs, "--steps", steps, "--batch", batch]
    return [SCRIPTS / "network.py", "--network", name, *sizes]


def plain(script: Sequence[object], env: Mapping[str, str]) -> float:
    """Return the seconds of the script without Hermes, from start to exit."""
    return timed([sys.executable, *script], env, TIMEOUT_S)


def calibrated(
    name: str, epochs: int, batch: int, target_s: float, env: Mapping[str, str], timings: Path
) -> int:
    """Return the steps an epoch for a plain run of about `target_s` seconds on this machine."""
    pilot_steps, pilot_epochs = 3, 4
    script = network(name, pilot_epochs, pilot_steps, batch)
    whole_s = plain([*script, "--timings", timings], env)
    epochs_s: list[float] = sorted(json.loads(timings.read_text())[1:])
    epoch_s = epochs_s[len(epochs_s) // 2]
    fixed_s = whole_s - pilot_epochs * epoch_s
    return max(1, round((target_s - fixed_s) / epochs / (epoch_s / pilot_steps)))
