"""A search and a scheduler raced on recorded curves: the table, the clock, all entrants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
import pytest

from bench import search_race as bench
from bench.frontrunner import GPUS
from bench.search_peers import Peer
from bench.search_race import PeerRace, SurrogateTable, ours_s
from hermes_ops.simulator.curves import CurveDataset

EPOCHS = 4


def table(rows: int = 64) -> SurrogateTable:
    """Configurations x = 1 ... `rows`: the larger x, the lower all losses; epochs take a second."""
    x = np.arange(1.0, rows + 1)[:, None]
    losses = 1.0 / x / np.arange(1, EPOCHS + 1)
    seconds = np.tile(np.arange(1.0, EPOCHS + 1), (rows, 1))
    return SurrogateTable(CurveDataset("line", ("x",), x, losses, 1 - losses, seconds))


@dataclass
class Listed:
    """A search with a list of configurations, which stops trials above a loss."""

    units: list[float]
    worst: float = inf
    asked: int = 0
    resumes: bool = False

    def next_trial(self) -> tuple[int, Mapping[str, Any]]:
        """Return the next of the list; after its end its first."""
        self.asked += 1
        return self.asked - 1, {"x": self.units[(self.asked - 1) % len(self.units)]}

    def begin(self, trial: int) -> None:
        """Know all trials already."""

    def trains_on(self, trial: int, epoch: int, loss: float, *, is_last: bool) -> bool:
        """Stop what is worse than the limit."""
        return not is_last and loss <= self.worst


@dataclass
class Pausing(Listed):
    """The same, which pauses each trial after an epoch and resumes the first that is not over."""

    resumes: bool = True
    paused: list[int] = field(default_factory=list)

    def next_trial(self) -> tuple[int, Mapping[str, Any]]:
        """Return the first paused trial, once half of the list has been asked for."""
        if self.asked < len(self.units) // 2 or not self.paused:
            return Listed.next_trial(self)
        return self.paused.pop(0), {}

    def trains_on(self, trial: int, epoch: int, loss: float, *, is_last: bool) -> bool:
        """Pause the trial."""
        if not is_last:
            self.paused.append(trial)
        return False


def peer_s(peer: Peer, on: SurrogateTable) -> float:
    """Return the seconds of a race."""
    return PeerRace(peer, on).run_s()


def test_a_suggestion_trains_as_the_nearest_recorded_configuration_that_is_unused() -> None:
    rows = [table().nearest({"x": 0.5}, used) for used in ((), (31,), (31, 32))]
    assert rows[0] in (31, 32)
    assert len(set(rows)) == len(rows)


def test_the_target_is_the_lowest_loss_of_one_in_so_many_configurations() -> None:
    assert table(rows=bench.BEST_OF).target == pytest.approx(1 / bench.BEST_OF / EPOCHS)


def test_a_peer_that_suggests_the_best_first_needs_the_time_of_its_curve() -> None:
    assert peer_s(Listed([1.0, 0.0, 0.1, 0.2]), table()) == EPOCHS


def test_a_stopped_trial_frees_its_gpu_for_the_next_suggestion() -> None:
    slow, soon = ([0.0] * 4 + [1.0], inf), ([0.0] * 4 + [1.0], 0.05)
    times_s = [peer_s(Listed(*kind), table()) for kind in (slow, soon)]
    assert times_s == [2 * EPOCHS, 1 + EPOCHS]


def test_a_paused_trial_resumes_after_its_last_epoch() -> None:
    race = PeerRace(Pausing([0.0, 0.1, 0.2, 1.0] * 2), table())
    assert race.run_s() == EPOCHS
    assert race.epochs[3] == EPOCHS - 1


def test_a_search_that_resumes_is_asked_again_when_no_new_trial_may_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "TRIALS", int(GPUS))
    race = PeerRace(Pausing([1.0, 0.0, 0.1, 0.2] * 3), table())
    assert race.run_s() == EPOCHS
    assert set(race.rows) == set(range(int(GPUS)))


def test_a_peer_that_stops_every_good_trial_is_never_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "TRIALS", 8)
    assert peer_s(Listed([1.0], worst=0.0), table()) == inf


@pytest.mark.parametrize("entrant", ["fifo + tpe", "asha + random", "frontrunner + random"])
def test_a_sweep_of_ours_ends_once_it_shows_the_target(
    entrant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "TRIALS", 12)
    small = table(rows=12)
    monkeypatch.setattr(bench, "BEST_OF", 12)
    took_s = ours_s(entrant, small, 0)
    assert EPOCHS <= took_s <= small.limit_s
