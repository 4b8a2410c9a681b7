"""Resizes of a trial during which its supervisor, the controller and everything are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.integration.samplers import Sampler, WorkerSampler, sampling

pytestmark = [pytest.mark.integration, pytest.mark.heavy, pytest.mark.timeout(1500)]

SLOTS = 4
UP = ("--slots", str(SLOTS), "--policy", "doubling", "--policy-option", "guard_k=0")


def _resizes(sweep: Any) -> int:
    return sum(decision["action"] == "resize" for decision in sweep.decisions())


class Kills:
    """One trial that lasts, others that come and go, and what is killed while it is resized."""

    def __init__(self, stack: Any, harness: Any, folder: Path) -> None:
        self.stack, self.harness, self.folder = stack, harness, folder
        self.log = folder / "workers"
        self.log.mkdir()
        self.lab = harness.Lab(stack, folder)
        self.sweeps: list[Any] = []
        self.lasts: list[Path] = []

    def start(self, name: str) -> Any:
        """Start a sweep of one trial that lasts until `release`."""
        lasts = self.harness.slow_file(self.folder)
        sweep = self.lab.start(self.harness.workers(name, self.harness.alike(1), self.log, lasts))
        self.sweeps.append(sweep)
        self.lasts.append(lasts)
        return sweep

    def kill_in_resize(self, change: Callable[[], object], kill: Callable[[], object]) -> None:
        """Make a change that has the first trial resized, and kill as soon as that is decided."""
        first = self.sweeps[0]
        before = _resizes(first)
        change()
        self.harness.await_(lambda: _resizes(first) > before, period_s=0.05)
        kill()

    def trains(self, sweep: Any, size: int) -> None:
        """Wait until the trial of a sweep trains on that many GPUs."""
        self.harness.await_(lambda: sweep.sizes()[-1:] == [size])
        seen = sweep.lines(0)
        self.harness.await_(lambda: sweep.lines(0) >= seen + 3)

    def kill_supervisor(self) -> None:
        """Kill hermes-trial of the first trial."""
        self.harness.kill_supervisor(self.stack.home, self.sweeps[0].id)

    def close(self) -> None:
        """Close the connections to the stack that runs now."""
        self.lab.close()

    def release(self, sweep: Any) -> None:
        """Let the trial of a sweep end."""
        self.lasts[self.sweeps.index(sweep)].unlink()


def _survive(kills: Kills, harness: Any) -> Any:
    """Run the sweeps through the kills; return them with what was seen of workers and GPUs."""
    looking, holding = WorkerSampler(kills.log), Sampler(kills.stack.home)
    with sampling(looking), sampling(holding):
        first = kills.start("lasts")
        kills.trains(first, 4)
        kills.kill_in_resize(lambda: kills.start("joins"), kills.kill_supervisor)
        _, second = kills.sweeps
        kills.trains(second, 2)
        kills.trains(first, 2)
        controller = harness.program(kills.stack, "controller")
        kills.kill_in_resize(
            lambda: kills.release(second), lambda: os.kill(controller, signal.SIGKILL)
        )
        kills.trains(first, 4)
        kills.kill_in_resize(lambda: kills.start("late"), lambda: kills.lab.restart_stack(*UP))
        third = kills.sweeps[-1]
        kills.trains(first, 2)
        kills.trains(third, 2)
        for sweep in (third, first):
            kills.release(sweep)
        for sweep in kills.sweeps:
            sweep.await_end()
    return kills, looking, holding


@pytest.fixture(scope="module")
def survived(
    tmp_path_factory: pytest.TempPathFactory, stack_at: Callable[[Path], Any], harness: Any
) -> Iterator[Any]:
    """Three sweeps that have lived through the kills and have ended."""
    stack = stack_at(tmp_path_factory.mktemp("crash"))
    with (
        stack.running(*UP),
        closing(Kills(stack, harness, tmp_path_factory.mktemp("resizes"))) as kills,
    ):
        yield _survive(kills, harness)


def test_every_trial_finishes_and_has_had_the_sizes_that_the_policy_says(survived: Any) -> None:
    kills, *_ = survived
    assert [sweep.states() for sweep in kills.sweeps] == [{0: "finished"}] * 3
    assert {2, 4} <= set(kills.sweeps[0].sizes())


def test_no_step_is_lost_or_stored_twice(survived: Any, harness: Any) -> None:
    kills, *_ = survived
    for sweep in kills.sweeps:
        assert set(sweep.runs()) == {0}
        sweep.assert_whole(0, harness.alike(1)[0])


def test_never_more_workers_live_than_there_are_slots_though_all_were_killed(
    survived: Any,
) -> None:
    _, looking, holding = survived
    assert 0 < looking.most <= SLOTS
    assert holding.most <= SLOTS
    assert holding.doubly_held == []
    assert looking.alive() == []
