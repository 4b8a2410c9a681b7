"""How much sooner `frontrunner` finishes the best trial of recorded sweeps: tasks x seeds.

`python -m bench.frontrunner` prints, for each variant, how many times sooner than FIFO and than
pausing ASHA: the geometric mean, its interval by bootstrap over tasks and seeds, and each task.
64 trials, 4 GPUs. With several `--switch-cost` or `--epoch-seconds` it prints a table, a row for
each pair. Figures are stored in bench/results/frontrunner by program, data and setting.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from hashlib import sha256
from itertools import product
from math import exp
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.comparison_case import data, version
from bench.curve_tasks import KNOWN, folder, split, tasks
from hermes_ops.core.model import Phase, Policy, Snapshot
from hermes_ops.loop import run
from hermes_ops.policies import make_policy
from hermes_ops.policies.frontrunner.configuration_prior import prior_scores, read_prior
from hermes_ops.policies.frontrunner.configurations import features, similarities
from hermes_ops.policies.frontrunner.correction import read_correction
from hermes_ops.policies.frontrunner.forecast import estimate_sweep, forecast_sweep
from hermes_ops.policies.frontrunner.relevance import relevances
from hermes_ops.simulator.cluster import VirtualCluster
from hermes_ops.simulator.curves import CurveDataset, read_curves, sample
from hermes_ops.simulator.engine import layout
from hermes_ops.simulator.metrics import best_work
from hermes_ops.simulator.oracle import OracleBest, oracle
from hermes_ops.simulator.workload import Costs, Workload

Floats = NDArray[np.float64]
RESULTS = Path(__file__).parent / "results" / "frontrunner"
GPUS, TRIALS = "4", 64
RESAMPLES = 4_000
BASES = ("fifo", "asha")
PACKAGE = "hermes_ops.policies.frontrunner"


@dataclass(frozen=True, slots=True)
class Setting:
    """The conditions of a simulation: `epoch_s` rescales the time to that median epoch."""

    switch_s: float = 0.0
    epoch_s: float | None = None
    prior_sweeps: int = 0

    @property
    def epoch_text(self) -> str:
        """The length of an epoch, for people."""
        return "recorded" if self.epoch_s is None else f"{self.epoch_s:g} s"

    def __str__(self) -> str:
        return (
            f"switch {self.switch_s:g} s, epochs {self.epoch_text}, "
            f"earlier sweeps {self.prior_sweeps}"
        )


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy with other values of its package's module constants, `module.NAME`."""

    policy: str
    changes: tuple[tuple[str, object], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Parse `policy` or `policy:module.NAME=VALUE:...`; values are JSON, lists are tuples."""
        policy, *changes = text.split(":")
        pairs = (change.partition("=") for change in changes)
        return cls(policy, tuple((name, _tuples(json.loads(value))) for name, _, value in pairs))

    @property
    def files(self) -> tuple[str, ...]:
        """Digests of the files that the changes name."""
        texts = (value for _, value in self.changes if isinstance(value, str))
        paths = (Path(text) for text in texts)
        return tuple(sha256(p.read_bytes()).hexdigest()[:16] for p in paths if p.is_file())

    def __str__(self) -> str:
        return ":".join([self.policy, *(f"{n}={json.dumps(v)}" for n, v in self.changes)])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set the constants within the context."""
        before = []
        try:
            for name, value in self.changes:
                module, _, constant = f"{PACKAGE}.{name}".rpartition(".")
                place = importlib.import_module(module)
                before.append((place, constant, getattr(place, constant)))
                setattr(place, constant, value)
            self._forget()
            yield
        finally:
            for place, constant, value in before:
                setattr(place, constant, value)
            self._forget()

    def _forget(self) -> None:
        """Empty the caches whose content depends on the constants."""
        forecast_sweep.cache_clear()
        estimate_sweep.cache_clear()
        read_correction.cache_clear()
        read_prior.cache_clear()
        prior_scores.cache_clear()
        if any(name.startswith(("configurations.", "relevance.")) for name, _ in self.changes):
            features.cache_clear()
            similarities.cache_clear()
            relevances.cache_clear()


def _tuples(value: object) -> object:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def path_of(task: str) -> Path:
    """Return the file of a task."""
    return data() / "curves" / f"{task}.npz" if task in KNOWN else folder() / f"{task}.npz"


@lru_cache(maxsize=32)
def dataset(task: str) -> CurveDataset:
    """Return the curves of a task."""
    return read_curves(path_of(task))


def time_to_best_s(variant: Variant, task: str, seed: int, setting: Setting) -> float:
    """Simulate until the trial with the lowest loss of the sweep has ended; return the time."""
    curves = dataset(task)
    if setting.epoch_s is not None:
        usual_s = float(np.median(curves.elapsed_s[:, -1])) / curves.epochs
        curves = replace(curves, elapsed_s=curves.elapsed_s * (setting.epoch_s / usual_s))
    workload, prior = sample(
        curves,
        TRIALS,
        seed,
        prior_sweeps=setting.prior_sweeps,
        costs=Costs(startup_s=setting.switch_s),
    )
    if variant.policy == OracleBest.name:
        return until_best_s(workload, OracleBest(oracle(workload)))
    policy = make_policy(variant.policy, {}, {"prior": prior})
    with variant.applied():
        return until_best_s(workload, policy)


def until_best_s(workload: Workload, policy: Policy[Any]) -> float:
    """Simulate until the trial with the lowest loss has ended; return the time."""
    best = best_work(workload)
    if best is None:
        raise ValueError(f"{workload.name}: no trial has a finite loss")
    cluster, best_id = VirtualCluster(workload, layout(GPUS)), best.id

    def is_done(snapshot: Snapshot) -> bool:
        return snapshot.index[best_id].phase is Phase.ENDED

    run(policy, cluster, policy.initial(), is_done)
    return cluster.now_s


class Store:
    """The times of simulations: a file for each variant, task and setting, written seed by seed.

    A file holds for the program and the data that it was computed with.
    """

    def times_s(self, variant: Variant, task: str, seeds: int, setting: Setting) -> Floats:
        """Return the times of the seeds from 0 on, computed where they are not stored."""
        program, label = version(variant.policy, path_of(task)), f"{variant}, {setting}"
        program += "".join(f" {digest}" for digest in variant.files)
        path = RESULTS / task / f"{sha256(label.encode()).hexdigest()[:16]}.json"
        stored = json.loads(path.read_text()) if path.exists() else {}
        times_s: list[float] = stored.get("times_s", []) if stored.get("program") == program else []
        for seed in range(len(times_s), seeds):
            times_s.append(time_to_best_s(variant, task, seed, setting))
            _write(path, {"label": label, "program": program, "times_s": times_s})
        return np.array(times_s[:seeds])


def _write(path: Path, facts: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(facts))
    part.replace(path)


def table_s(
    variants: Sequence[Variant], names: Sequence[str], seeds: int, setting: Setting
) -> dict[Variant, Floats]:
    """Return tasks x seeds times of each variant."""
    store, found = Store(), dict[Variant, list[Floats]]()
    for task in names:
        for variant in variants:
            began_s = process_time()
            times = store.times_s(variant, task, seeds, setting)
            found.setdefault(variant, []).append(times)
            took_s = process_time() - began_s
            if took_s > 1:
                print(f"{took_s:7.1f} s  {task}  {variant}", file=sys.stderr, flush=True)
    return {variant: np.stack(rows) for variant, rows in found.items()}


@cache
def _resamples(count: int, seeds: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    chance = np.random.default_rng(0)
    rows = chance.integers(count, size=(RESAMPLES, count))
    return rows, chance.integers(seeds, size=(RESAMPLES, count, seeds))


def interval_of_mean(values: Floats) -> tuple[float, float, float]:
    """Return the mean of tasks x seeds, with its 95 % interval: tasks are drawn, then seeds."""
    rows, columns = _resamples(*values.shape)
    means = values[rows[:, :, None], columns].mean(axis=(1, 2))
    low, high = np.percentile(means, (2.5, 97.5))
    return float(values.mean()), float(low), float(high)


def ratio(base_s: Floats, times_s: Floats) -> tuple[float, float, float]:
    """Return the geometric mean of base / time, with its interval."""
    mean, low, high = interval_of_mean(np.log(base_s / times_s))
    return exp(mean), exp(low), exp(high)


def report(times_s: Mapping[Variant, Floats], names: Sequence[str], base: Variant) -> Iterator[str]:
    """Yield the lines of a table: each variant against FIFO, ASHA and the base variant."""
    fifo, asha = (times_s[Variant(name)] for name in BASES)
    for variant, times in times_s.items():
        if variant.policy in BASES:
            continue
        against = ((fifo, "FIFO"), (asha, "ASHA"), (times_s[base], "base"))
        cells = []
        for of, name in against:
            mean, low, high = ratio(of, times)
            cells.append(f"{mean:.2f} ({low:.2f}-{high:.2f}) {name}")
        yield f"{variant}: " + ", ".join(cells)
        by_task = [
            (
                exp(float(np.log(asha[k] / times[k]).mean())),
                exp(float(np.log(fifo[k] / times[k]).mean())),
                name,
            )
            for k, name in enumerate(names)
        ]
        worst = ", ".join(f"{name} {to:.2f}/{first:.2f}" for to, first, name in sorted(by_task))
        yield f"    ASHA/FIFO by task: {worst}"


def grid(
    variant: Variant, names: Sequence[str], seeds: int, settings: Sequence[Setting]
) -> Iterator[str]:
    """Yield the lines of a table of settings: a variant against FIFO and ASHA in each."""
    yield f"| switch | epoch | {variant} over FIFO | over ASHA | tasks below ASHA |"
    yield "|---|---|---|---|---|"
    bases = [Variant(name) for name in BASES]
    for setting in settings:
        times_s = table_s([*bases, variant], names, seeds, setting)
        fifo, asha, own = (times_s[each] for each in (*bases, variant))
        cells = [f"{setting.switch_s:g} s", setting.epoch_text]
        for base in (fifo, asha):
            mean, low, high = ratio(base, own)
            cells.append(f"{mean:.2f} ({low:.2f} to {high:.2f})")
        by_task = np.exp(np.log(asha / own).mean(axis=1))
        lost = [f"{names[k]} {by_task[k]:.2f}" for k in np.argsort(by_task) if by_task[k] < 1]
        yield f"| {' | '.join([*cells, ', '.join(lost) or 'none'])} |"


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def main(arguments: Sequence[str]) -> int:
    """Compute what is not stored, and print the table."""
    parser = argparse.ArgumentParser(prog="bench.frontrunner", description=__doc__)
    parser.add_argument("variants", nargs="*", default=["frontrunner"])
    parser.add_argument("--side", choices=("training", "validation", "known"), default="training")
    parser.add_argument("--tasks", help="names, separated by commas, in place of a side")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--switch-cost", type=_numbers, default=(0.0,), metavar="SECONDS[,...]")
    parser.add_argument("--epoch-seconds", type=_numbers, default=(None,), metavar="SECONDS[,...]")
    parser.add_argument("--prior-sweeps", type=int, default=0)
    parser.add_argument("--base", default="frontrunner")
    asked = parser.parse_args(arguments)
    training, validation = split(tasks())
    sides = {"training": training, "validation": validation, "known": KNOWN}
    names = tuple(asked.tasks.split(",")) if asked.tasks else sides[asked.side]
    base = Variant.parse(asked.base)
    setting, *others = settings = [
        Setting(switch_s, epoch_s, asked.prior_sweeps)
        for switch_s, epoch_s in product(asked.switch_cost, asked.epoch_seconds)
    ]
    if others:
        for variant in map(Variant.parse, asked.variants):
            print("\n".join(grid(variant, names, asked.seeds, settings)))
        return 0
    variants = [Variant(name) for name in BASES]
    variants += [v for v in (base, *map(Variant.parse, asked.variants)) if v not in variants]
    times_s = table_s(list(dict.fromkeys(variants)), names, asked.seeds, setting)
    print(f"{len(names)} tasks x {asked.seeds} seeds, {setting}")
    for line in report(times_s, names, base):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
