"""What is likely a mistake is said before it costs, and to those who follow a sweep that waits."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@contextlib.contextmanager
def watching(lab: Any, sweep: Any, folder: Path) -> Iterator[Path]:
    """`hermes sweep watch` as a process; the file of what it says on the standard error."""
    said = folder / "said"
    with said.open("w") as errors:
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / "hermes"), "sweep", "watch", sweep.id],
            env={**os.environ, "HERMES_HOME": str(lab.home)},
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        try:
            yield said
        finally:
            lab.hermes("sweep", "stop", sweep.id)
            process.wait(60)


def test_a_sweep_that_can_never_start_is_refused_or_says_why(
    lab: Any, harness: Any, tmp_path: Path
) -> None:
    content = harness.config("huge", {"n": [1, 2]}, "gone.py", "{n}", trial={"gpus": 5})
    refused = lab.hermes("sweep", "run", str(lab.file(content)), "--strict")
    assert refused.returncode == 2
    assert "1. trial.gpus: 5 GPUs a trial, and the pool gpus has 2" in refused.stderr
    assert "2. trial.command[1]: gone.py, which is not in" in refused.stderr
    assert "has started" not in refused.stdout
    sweep = lab.start(content)
    with watching(lab, sweep, tmp_path) as said:
        never = "a trial needs 5 GPUs and the pool gpus has 2 slots: no trial can ever start"
        harness.await_(lambda: never in " ".join(said.read_text().split()))
    assert "gone.py, which is not in" in " ".join(said.read_text().split())
    assert "trial.command[1]: gone.py, which is not in" in sweep.log("plan")
    (seen,) = json.loads(sweep.parent["tags"]["hermes.warnings"])
    assert seen["where"] == "trial.command[1]"


def test_why_a_trial_cannot_be_preempted_is_said_to_those_who_follow(
    lab: Any, harness: Any, tmp_path: Path
) -> None:
    content = harness.config("fixed", {"order": ["never"]}, "settling.py", "{order}")
    sweep = lab.start(content)
    with watching(lab, sweep, tmp_path) as said:
        reason = "cannot be preempted while they train: it has not written a checkpoint"
        harness.await_(lambda: reason in " ".join(said.read_text().split()))
