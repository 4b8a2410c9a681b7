"""What scripts wrote, by `hermes logs`, of a sweep whose file the command line has changed."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

EPOCHS = 1000
HEAD = re.compile(r"==> segment (\d+) on GPU [01], [\d-]+ [\d:]+ UTC <==")


@contextlib.contextmanager
def _followed(lab: Any, trial: str, file: Path) -> Iterator[None]:
    """Write into the file what `hermes logs --follow` prints, until the trial has ended."""
    hermes = Path(sys.executable).parent / "hermes"
    command = [str(hermes), "logs", trial, "--follow", "--home", str(lab.home)]
    with file.open("wb") as out, subprocess.Popen(command, stdout=out) as follower:
        try:
            yield
            assert follower.wait(timeout=120) == 0
        finally:
            follower.kill()


@pytest.fixture(scope="module")
def logged(
    lab: Any, harness: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, int, list[Path]]:
    """A sweep of two trials, the number of the one that was preempted, and what was followed."""
    folder = tmp_path_factory.mktemp("logs")
    slow = harness.slow_file(folder)
    file = lab.file(harness.stub("logged", harness.alike(3), EPOCHS, 0.5, slow_while=slow))
    overrides = ("--set", "search.max_trials=2", "--set", "search.space.rate.values=[1.0, 1.1]")
    started = lab.hermes("sweep", "run", str(file), *overrides)
    assert started.returncode == 0, started.stderr
    sweep = harness.Sweep(lab, started.stdout.split()[1])
    sweep.await_preemptible(2, 0.2)
    files = [folder / "0.log", folder / "1.log"]
    with (
        _followed(lab, f"{sweep.id}/0", files[0]),
        _followed(lab, f"{sweep.id}/1", files[1]),
    ):
        with lab.pool(1):
            harness.await_(lambda: len(sweep.on_gpus()) == 1)
        harness.await_(lambda: len(sweep.on_gpus()) == 2)
        slow.unlink()
        sweep.await_end()
    (number,) = (n for n in (0, 1) if len(sweep.segments(n)) == 2)
    return sweep, number, files


def test_keys_that_the_command_line_sets_are_those_of_the_sweep(logged: Any) -> None:
    sweep, _, _ = logged
    assert set(sweep.states()) == {0, 1}
    configs = [trial["config"] for trial in sweep.document()["trials"]]
    assert sorted(config["rate"] for config in configs) == [1.0, 1.1]


def test_the_log_of_a_preempted_trial_has_a_head_and_the_lines_of_each_segment(
    logged: Any, lab: Any
) -> None:
    sweep, number, _ = logged
    lines = lab.hermes("logs", f"{sweep.id}/{number}").stdout.splitlines()
    assert [m[1] for line in lines if (m := HEAD.fullmatch(line))] == ["1", "2"]
    epochs = [int(m[1]) for line in lines if (m := re.match(r"epoch=(\d+) loss=", line))]
    assert epochs == list(range(1, EPOCHS + 1))
    tail = lab.hermes("logs", f"{sweep.id}/{number}", "--last", "1", "--tail", "2").stdout
    assert HEAD.fullmatch(tail.splitlines()[0])
    assert tail.splitlines()[1:] == lines[-2:]


def test_a_log_that_was_followed_through_a_preemption_is_the_whole_one(
    logged: Any, lab: Any
) -> None:
    sweep, _, files = logged
    for number, file in enumerate(files):
        assert file.read_text() == lab.hermes("logs", f"{sweep.id}/{number}").stdout


def test_a_trial_that_the_sweep_does_not_have_has_no_log(logged: Any, lab: Any) -> None:
    refused = lab.hermes("logs", f"{logged[0].id}/2")
    assert refused.returncode == 1
    assert "has no trial 2: its 2 trials have the numbers 0 to 1" in refused.stderr
