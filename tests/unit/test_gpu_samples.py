"""What the samplers of the integration tests take for the holder of a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.integration.samplers import Sample, Sampler, held_gpus

ROOT = Path(__file__).parents[2]


@contextmanager
def trial(home: Path, sweep: str, locks: Path) -> Iterator[None]:
    """Run hermes-trial with a script that lasts on GPU 0."""
    own = {"HERMES_HOME": str(home), "HERMES_SWEEP": sweep, "HERMES_TRIAL": "0", "HERMES_GPUS": "0"}
    command = [sys.executable, "-m", "hermes_ops.trial", "--dir", str(home / sweep), "--epoch", "1"]
    command += ["--gpus", "0", "--gpu-locks", str(locks), "--lock-wait", "60", "--", "sleep", "600"]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, **own}) as process:
        try:
            yield
        finally:
            process.terminate()


def settled(home: Path, trials: int) -> Sample:
    """Return who holds GPUs once so many scripts run, and for a while after."""
    deadline_s = time.monotonic() + 60
    while len(held_gpus(home)) < trials and time.monotonic() < deadline_s:
        time.sleep(0.05)
    time.sleep(1.0)
    return Sample(0.0, held_gpus(home))


@pytest.mark.parametrize(("same_lock", "holders"), [(True, 1), (False, 2)])
def test_a_trial_that_waits_for_a_gpu_holds_none_and_two_scripts_on_one_are_seen(
    same_lock: bool, holders: int, tmp_path: Path
) -> None:
    folders = [tmp_path / ("one" if same_lock else f"own-{n}") / "gpus" / "pool" for n in range(2)]
    with ExitStack() as running:
        for number, folder in enumerate(folders):
            running.enter_context(trial(tmp_path, f"sweep-{number}", folder))
        sampler = Sampler(tmp_path, samples=[settled(tmp_path, holders)])
    assert sampler.most == holders
    assert bool(sampler.doubly_held) is (holders == 2)
