"""hermes-trial as a process in a temporary folder: the base of what the tests start it with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, AnyStr

ROOT = Path(__file__).parents[3]


def output_of(process: subprocess.Popen[AnyStr]) -> IO[AnyStr]:
    """The output of a process that was started with a pipe for it."""
    assert process.stdout is not None
    return process.stdout


class SupervisedTrial:
    """A trial's folder beside its script, and the hermes-trial processes that were started."""

    def __init__(self, base: Path) -> None:
        self.base, self.folder, self.script = base, base / "trial", base / "train.py"
        self.epoch = 0
        self.started: list[subprocess.Popen[bytes]] = []

    def supervise(
        self,
        options: Sequence[str],
        command: Sequence[str],
        output: int = subprocess.PIPE,
        errors: int | None = None,
    ) -> subprocess.Popen[bytes]:
        own = ["--dir", str(self.folder), "--epoch", str(self.epoch), *options]
        process = subprocess.Popen(
            [sys.executable, "-m", "hermes_ops.trial", *own, "--", *command],
            stdout=output,
            stderr=errors,
            cwd=self.base,
        )
        self.started.append(process)
        return process

    def close(self) -> None:
        """Kill what still runs."""
        for process in self.started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return found

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "status.json").read_text())
        return found

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]
