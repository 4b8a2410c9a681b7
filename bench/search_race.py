"""A search and a scheduler together: how soon a sweep shows a loss as good as the best of 64.

`python -m bench.search_race` prints a table; `make compare-search` writes it to docs/comparison.md.
Configurations are suggested while trials run, by nearest neighbour on recorded curves
(`SurrogateTable`): the configuration that a search suggests trains along the curve of the nearest
recorded one that no trial of the sweep has had. All entrants have the same tables, seeds, GPUs,
number of configurations, and virtual clock; suggesting and deciding take no time on it.
`bench.search_peers` has the entrants of other packages; those that are not installed are left out.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from bench import search_peers
from bench.comparison_case import ROOT, FiguresMissing, Reuse, data, version
from bench.frontrunner import GPUS, interval_of_mean
from bench.search_peers import Peer
from hermes_ops.core.model import JobId, Phase, Plan, Policy, Snapshot, SweepId
from hermes_ops.core.plan import Action, Start
from hermes_ops.loop import run
from hermes_ops.policies import make_policy
from hermes_ops.search.feasible import Feasible
from hermes_ops.search.interface import Observation, Sampler
from hermes_ops.search.samplers import RandomSampler
from hermes_ops.search.space import Uniform
from hermes_ops.search.tpe import TpeSampler
from hermes_ops.simulator.cluster import VirtualCluster
from hermes_ops.simulator.curves import CurveDataset, read_curves
from hermes_ops.simulator.engine import layout
from hermes_ops.simulator.tables import markdown
from hermes_ops.simulator.workload import Work, Workload

Floats = NDArray[np.float64]
RESULTS = ROOT / "bench" / "results" / "search_race"
TASKS = ("lcbench_fashion_mnist", "lcbench_adult", "lcbench_sylvine", "mlp_digits",
         "mlp_synthetic", "mlp_noisy", "mlp_friedman")  # fmt: skip
TRIALS = 128
BEST_OF = 64
STARTUP_TRIALS = 10
ATTEMPTS = 20
OURS = tuple(f"{policy} + {search}" for search in ("tpe", "random")
             for policy in ("fifo", "asha", "frontrunner"))  # fmt: skip
BASE, BEST = "fifo + tpe", "frontrunner + tpe"
SEEDS = 20
COMMAND = "make compare-search"


class SurrogateTable:
    """Recorded curves as a function of any configuration.

    A configuration has a coordinate in [0, 1] for each hyper-parameter: the rank of its value among
    the recorded ones.
    """

    def __init__(self, curves: CurveDataset) -> None:
        self.curves = curves
        ranks = np.stack([rankdata(column) for column in curves.configs.T], axis=1)
        self.units: Floats = (ranks - 0.5) / len(curves)
        self.names = curves.hyperparameter_names

    def nearest(self, config: Mapping[str, Any], used: Sequence[int]) -> int:
        """Return the row of the nearest recorded configuration that is not one of `used`."""
        point = np.array([float(config[name]) for name in self.names])
        distance = ((self.units - point) ** 2).sum(axis=1)
        distance[list(used)] = inf
        return int(np.argmin(distance))

    @property
    def target(self) -> float:
        """The loss that one in BEST_OF recorded configurations reaches."""
        return float(np.sort(self.curves.lowest)[len(self.curves) // BEST_OF - 1])

    @property
    def limit_s(self) -> float:
        """The seconds in which the GPUs train TRIALS usual configurations to the end."""
        return float(self.curves.elapsed_s[:, -1].mean()) * TRIALS / int(GPUS)


class SearchCluster(VirtualCluster):
    """A cluster on which a trial's configuration is drawn when it first gets a GPU."""

    def __init__(self, table: SurrogateTable, sampler: Sampler) -> None:
        sweep, epochs = SweepId("race"), table.curves.epochs
        works = tuple(
            Work(JobId(f"race/{n}"), 0.0, inf, sweep=sweep, total_steps=epochs)
            for n in range(TRIALS)
        )
        super().__init__(Workload("race", works), layout(GPUS))
        self._table, self._sampler = table, sampler
        self._rows: dict[int, int] = {}
        self._configs: dict[int, Mapping[str, Any]] = {}
        self._counted = 0

    def apply(self, snapshot: Snapshot, plan: Plan, actions: Sequence[Action]) -> None:
        """Draw the configurations of new trials, then start the actions."""
        for action in actions:
            if isinstance(action, Start) and snapshot.index[action.job].phase is Phase.PENDING:
                self._draw(snapshot, action.job)
        super().apply(snapshot, plan, actions)

    def shows(self, target: float) -> bool:
        """Return whether any trial has shown such a loss."""
        new = self.journal.observations[self._counted :]
        self._counted += len(new)
        return any(observation.loss <= target for observation in new)

    def _draw(self, snapshot: Snapshot, job: JobId) -> None:
        rank = self._by_id[job].rank
        if rank in self._rows:
            return
        config = self._sampler.ask(rank, tuple(self._history(snapshot)))
        row = self._table.nearest(config, tuple(self._rows.values()))
        self._rows[rank], self._configs[rank] = row, config
        curves, place = self._table.curves, self._by_id[job]
        place.work = replace(
            place.work,
            seconds=float(curves.elapsed_s[row, -1]),
            curve=curves.curve(row),
            configuration=curves.configuration(row),
        )

    def _history(self, snapshot: Snapshot) -> Iterator[Observation]:
        for rank, config in self._configs.items():
            job = snapshot.index[JobId(f"race/{rank}")]
            losses = [point.loss for point in job.curve if np.isfinite(point.loss)]
            has_ended = job.phase is Phase.ENDED
            loss = min(losses, default=inf if has_ended else None)
            yield Observation(rank, config, loss, "finished" if has_ended else "running")


def ours_s(entrant: str, table: SurrogateTable, seed: int) -> float:
    """Return the seconds until a policy and a sampler of ours have shown the target."""
    policy_name, _, search = entrant.partition(" + ")
    sampler: Sampler = RandomSampler(_space(table), seed)
    if search == "tpe":
        sampler = TpeSampler(_space(table), seed, STARTUP_TRIALS)
    cluster = SearchCluster(table, sampler)
    policy: Policy[Any] = make_policy(policy_name, {})
    run(
        policy,
        cluster,
        policy.initial(),
        lambda _: cluster.shows(table.target) or cluster.is_over or cluster.now_s > table.limit_s,
    )
    return cluster.now_s


@dataclass(slots=True)
class PeerRace:
    """Another package's search on a table.

    Each GPU asks for a trial, trains it epoch by epoch, and asks again once it has ended or was
    stopped or paused. One that is offered a trial more than there may be asks again at the next
    epoch of another.
    """

    peer: Peer
    table: SurrogateTable
    rows: dict[int, int] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    idle: list[int] = field(default_factory=lambda: list(range(int(GPUS))))
    ends: list[tuple[float, int, int]] = field(default_factory=list)
    """The ends of epochs: time, GPU and trial."""

    def run_s(self) -> float:
        """Return the seconds until the target is shown; infinite if it never is."""
        curves = self.table.curves
        self._ask(0.0)
        while self.ends:
            now_s, gpu, trial = heapq.heappop(self.ends)
            loss = float(curves.val_loss[self.rows[trial], self.epochs[trial]])
            if loss <= self.table.target or now_s > self.table.limit_s:
                return now_s
            self.epochs[trial] += 1
            is_last = self.epochs[trial] == curves.epochs
            if self.peer.trains_on(trial, self.epochs[trial], loss, is_last=is_last):
                self._train(now_s, gpu, trial)
            else:
                self.idle.append(gpu)
            self._ask(now_s)
        return inf

    def _ask(self, now_s: float) -> None:
        while self.idle and (trial := self._next_trial()) is not None:
            self._train(now_s, self.idle.pop(0), trial)

    def _next_trial(self) -> int | None:
        """Return the trial that the search offers; None for one more than there may be.

        A search that resumes trials is asked again, as it draws which it does.
        """
        for _ in range(ATTEMPTS if self.peer.resumes else 1):
            trial, config = self.peer.next_trial()
            if trial in self.rows:
                return trial
            if len(self.rows) < TRIALS:
                self.peer.begin(trial)
                self.rows[trial] = self.table.nearest(config, tuple(self.rows.values()))
                self.epochs[trial] = 0
                return trial
        return None

    def _train(self, now_s: float, gpu: int, trial: int) -> None:
        epoch_s = _epoch_s(self.table.curves, self.rows[trial], self.epochs[trial])
        heapq.heappush(self.ends, (now_s + epoch_s, gpu, trial))


def _epoch_s(curves: CurveDataset, row: int, epoch: int) -> float:
    before_s = curves.elapsed_s[row, epoch - 1] if epoch else 0.0
    return float(curves.elapsed_s[row, epoch] - before_s)


@dataclass(frozen=True, slots=True)
class Race:
    """The times of one entrant: tasks x seeds, as parts of each task's limit; 1: not in time."""

    entrant: str
    parts: Floats


def race(entrant: str, names: Sequence[str], seeds: int, reuse: Reuse) -> Race:
    """Return the stored times, those that are missing simulated unless `reuse` says not to."""
    rows = []
    for name in names:
        path = data() / "curves" / f"{name}.npz"
        policy = entrant.partition(" + ")[0]
        program = f"{version(policy, path)} {search_peers.release(entrant)}"
        stored = RESULTS / name / f"{entrant.replace(' ', '_')}.json"
        facts = json.loads(stored.read_text()) if stored.exists() else {}
        is_same = reuse is not Reuse.SAME or facts.get("program") == program
        parts: list[float] = facts.get("parts", []) if is_same else []
        if len(parts) < seeds and reuse is Reuse.KEPT:
            raise FiguresMissing(COMMAND)
        table = SurrogateTable(read_curves(path))
        for seed in range(len(parts), seeds):
            parts.append(min(1.0, _time_s(entrant, table, seed) / table.limit_s))
            stored.parent.mkdir(parents=True, exist_ok=True)
            stored.write_text(json.dumps({"program": program, "parts": parts}))
        print(f"{entrant}: {name}", file=sys.stderr, flush=True)
        rows.append(parts[:seeds])
    return Race(entrant, np.array(rows))


def _time_s(entrant: str, table: SurrogateTable, seed: int) -> float:
    if entrant in OURS:
        return ours_s(entrant, table, seed)
    draw = RandomSampler(_space(table), seed)
    first = [draw.ask(number, ()) for number in range(STARTUP_TRIALS)]
    peer = search_peers.make(entrant, first, table.curves.epochs, seed)
    return PeerRace(peer, table).run_s()


def _space(table: SurrogateTable) -> Feasible:
    return Feasible(tuple((name, Uniform(0.0, 1.0)) for name in table.names))


def report(races: Sequence[Race], names: Sequence[str]) -> str:
    """Return the table: how many times sooner than BASE each is, and frontrunner than each."""
    parts = {each.entrant: each.parts for each in races}
    header = ("search and scheduler", f"times sooner than {BASE}", f"{BEST} over it", "in time",
              *names)  # fmt: skip
    rows = []
    for entrant, own in parts.items():
        gain = np.log(parts[BASE] / own)
        cells = [entrant, _interval(gain), _interval(np.log(own / parts[BEST]))]
        cells.append(f"{100 * (own < 1).mean():.0f} %")
        rows.append((*cells, *(f"{exp(float(g)):.2f}" for g in gain.mean(axis=1))))
    return markdown(header, rows)


def _interval(logarithms: Floats) -> str:
    if not logarithms.any():
        return "1.00"
    mean, low, high = map(exp, interval_of_mean(logarithms))
    return f"{mean:.2f} ({low:.2f}–{high:.2f})"


def search(reuse: Reuse) -> str:
    """Return the section of docs/comparison.md; FiguresMissing without the other packages."""
    peers = search_peers.installed()
    if set(peers) != set(search_peers.PEERS) - set(search_peers.SLOW):
        raise FiguresMissing(f"{COMMAND}, in an environment with Optuna and Syne Tune")
    races = [race(entrant, TASKS, SEEDS, reuse) for entrant in (*OURS, *peers)]
    packages = {search_peers.PEERS[peer][0]: search_peers.release(peer) for peer in peers}
    releases = " and ".join(f"{name} {number}" for name, number in packages.items())
    return f"""## A search and a scheduler together

Configurations are suggested while trials run, as in a sweep with `search: tpe`. Time until any
trial has shown a loss that one in {BEST_OF} recorded configurations reaches; {releases}.

The same for all: the recorded curves, {GPUS} GPUs, {TRIALS} configurations at most, {SEEDS} seeds,
one virtual clock on which suggesting, deciding and pausing take no time, and the space: each
hyper-parameter is a number from 0 to 1, the rank of its value among the recorded ones. The first
{STARTUP_TRIALS} configurations of a seed are the same, drawn at random. A suggestion
trains along the curve of the nearest recorded configuration that the sweep has not had yet. A run
is given up once the GPUs could have trained {TRIALS} usual configurations to the end; it counts
with that time (`in time`: the share of the others).

Different: ours pause trials and may resume them; Optuna's pruners and Syne Tune's ASHA (its variant
without pauses) end them and suggest others. Optuna and Syne Tune have their defaults, Optuna's TPE
with `constant_liar`, Hyperband and ASHA with rungs of 1, 3, 9, ... epochs. This is the last version
of Syne Tune that has DyHPO, which pauses trials too; one run of it takes minutes of a processor, so
it is raced by name alone (`python -m bench.search_race "Syne Tune DyHPO" --seeds 1`). Before a
trial begins, `frontrunner` does not know its configuration here, afterwards the recorded one; it
has learnt from other sweeps of the first three files.

```sh
{COMMAND}
```

{report(races, TASKS)}"""


def main(arguments: Sequence[str]) -> int:
    """Simulate what is not stored, and print the table."""
    parser = argparse.ArgumentParser(prog="bench.search_race", description=__doc__)
    parser.add_argument("entrants", nargs="*", default=[*OURS, *search_peers.installed()])
    parser.add_argument("--tasks", default=",".join(TASKS), help="names, separated by commas")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    asked = parser.parse_args(arguments)
    names = tuple(asked.tasks.split(","))
    entrants = dict.fromkeys([BASE, BEST, *asked.entrants])
    races = [race(entrant, names, asked.seeds, Reuse.SAME) for entrant in entrants]
    print(f"{len(names)} tasks x {asked.seeds} seeds, {GPUS} GPUs, {TRIALS} configurations")
    print(report(races, names))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
