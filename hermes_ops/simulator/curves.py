"""Recorded learning curves of many configurations, and the sweeps that are drawn from them."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hermes_ops.core.model import JobId, PastTrial, Point, SweepId, Value
from hermes_ops.errors import ConfigError, Problem
from hermes_ops.simulator.workload import Costs, Work, Workload

Floats = NDArray[np.float64]
SHAPES = {
    "hyperparameter_names": "[H], text",
    "configs": "[N, H]",
    "val_loss": "[N, E], lower is better",
    "val_accuracy": "[N, E]",
    "elapsed_s": "[N, E], cumulative seconds of training",
}
WITHIN = 0.01  # a configuration is good when its lowest loss is within this of the best one's
BEST_PART = 0.05  # sets of a given number of good ones are led by one of the best 5 % that can


@dataclass(frozen=True, slots=True, eq=False)
class CurveDataset:
    """N configurations of H hyper-parameters, each trained for E epochs."""

    name: str
    hyperparameter_names: tuple[str, ...]
    configs: Floats
    val_loss: Floats
    val_accuracy: Floats
    elapsed_s: Floats

    def __len__(self) -> int:
        return len(self.configs)

    @property
    def epochs(self) -> int:
        """The length E of every curve."""
        return int(self.val_loss.shape[1])

    @property
    def lowest(self) -> Floats:
        """The lowest loss of each configuration; inf for one that never had a finite loss."""
        lowest: Floats = np.where(np.isfinite(self.val_loss), self.val_loss, np.inf).min(axis=1)
        return lowest

    def configuration(self, row: int) -> tuple[tuple[str, Value], ...]:
        """Return the hyper-parameters of a row; an int where the whole column is integral."""
        integral = np.all(
            np.isfinite(self.configs) & (self.configs == np.floor(self.configs)), axis=0
        )
        pairs = zip(self.hyperparameter_names, self.configs[row], integral, strict=True)
        return tuple((name, int(value) if whole else float(value)) for name, value, whole in pairs)

    def curve(self, row: int) -> tuple[Point, ...]:
        """Return the whole learning curve of a row; steps are epochs, from 1."""
        pairs = zip(self.val_loss[row], self.elapsed_s[row], strict=True)
        return tuple(Point(e, float(loss), float(s)) for e, (loss, s) in enumerate(pairs, start=1))


def read_curves(path: Path) -> CurveDataset:
    """Read an `.npz` of learning curves (its keys and shapes: `SHAPES`).

    Raise ConfigError for a file that cannot be read, pickled arrays (they could run code), a
    missing key, a wrong shape, and seconds that are not finite, not positive or fall.
    """
    arrays = _arrays(path)
    missing = [key for key in SHAPES if key not in arrays]
    if missing:
        problems = (Problem(key, "nothing", SHAPES[key], "add the array") for key in missing)
        raise ConfigError(str(path), tuple(problems))
    names = tuple(str(name) for name in arrays["hyperparameter_names"].ravel())
    numbers = {
        key: _numbers(path, key, arrays[key]) for key in SHAPES if key != "hyperparameter_names"
    }
    _check_shapes(path, len(names), numbers)
    _check_seconds(path, numbers["elapsed_s"])
    return CurveDataset(path.stem, names, **numbers)


_UNREADABLE = (
    OSError,
    ValueError,
    EOFError,
    AttributeError,
    TypeError,
    zipfile.BadZipFile,
    zlib.error,
)


def _arrays(path: Path) -> dict[str, NDArray[np.generic]]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return {key: stored[key] for key in SHAPES if key in stored}
    except _UNREADABLE as error:
        found = str(error).partition("\n")[0]
        fix = "save it with numpy.savez" if path.exists() else "correct the path"
        problem = Problem("the file", found, "an .npz of plain arrays", fix)
        raise ConfigError(str(path), (problem,)) from error


def _numbers(path: Path, key: str, array: NDArray[np.generic]) -> Floats:
    try:
        return array.astype(np.float64)
    except (TypeError, ValueError) as error:
        problem = Problem(key, f"type {array.dtype}", "numbers", "encode what is not a number")
        raise ConfigError(str(path), (problem,)) from error


def _check_shapes(path: Path, names: int, arrays: Mapping[str, Floats]) -> None:
    loss = arrays["val_loss"]
    rows, epochs = loss.shape if loss.ndim == 2 else (0, 0)
    expected = dict.fromkeys(("val_loss", "val_accuracy", "elapsed_s"), (rows, epochs))
    expected["configs"] = (rows, names)
    problems = [
        Problem(key, f"shape {list(arrays[key].shape)}", f"{list(shape)}", "correct the shape")
        for key, shape in expected.items()
        if arrays[key].shape != shape
    ]
    if not problems and rows * epochs == 0:
        problems = [Problem("val_loss", "no curve", "at least one", "add curves")]
    if problems:
        raise ConfigError(str(path), tuple(problems))


def _check_seconds(path: Path, elapsed_s: Floats) -> None:
    """Raise ConfigError for falling seconds; equal ones are below the clock's resolution."""
    steps_s = np.diff(elapsed_s, axis=1, prepend=0.0)
    bad = ~np.isfinite(elapsed_s) | (elapsed_s <= 0) | (steps_s < 0)
    if bad.any():
        row, epoch = (int(i) for i in np.argwhere(bad)[0])
        before = f" after {elapsed_s[row, epoch - 1]}" if epoch else ""
        problem = Problem(
            f"elapsed_s[{row}, {epoch}]",
            f"{elapsed_s[row, epoch]}{before}",
            "finite, above 0, never less than the epoch before",
            "store cumulative seconds",
        )
        raise ConfigError(str(path), (problem,))


def sample(
    curves: CurveDataset,
    trials: int,
    seed: int,
    *,
    prior_sweeps: int = 0,
    costs: Costs | None = None,
    good: int | None = None,
) -> tuple[Workload, tuple[PastTrial, ...]]:
    """Draw a sweep of `trials` configurations, and earlier sweeps of as many others.

    The same seed draws the same sweep, whatever the number of earlier ones. All trials are
    submitted at 0. With `good`, exactly that many trials have a lowest loss within 1 % of the set's
    best; the best one is then drawn from the best 5 % of all configurations that have enough others
    near and enough worse ones.

    Raise ConfigError when there are not enough configurations.
    """
    needed = trials * (1 + prior_sweeps)
    _within(curves, "trials", trials, 1, len(curves))
    if needed > len(curves):
        fact = f"{trials} trials and {prior_sweeps} earlier sweeps of as many"
        allowed = f"{len(curves)} configurations in all"
        problem = Problem("trials", fact, allowed, "ask for fewer")
        raise ConfigError(curves.name, (problem,))
    shuffled = np.random.default_rng(seed).permutation(len(curves))
    if good is not None:
        _within(curves, "good", good, 1, trials)
        shuffled = _with_good(curves, trials, good, shuffled, seed)
    sweep = SweepId(f"{curves.name}-{seed}")
    rows = shuffled[:needed].tolist()
    jobs = (
        _work(curves, row, JobId(f"{sweep}/{number}"), sweep, costs or Costs())
        for number, row in enumerate(rows[:trials])
    )
    past = (
        PastTrial(curves.configuration(row), curves.curve(row), curves.epochs)
        for row in rows[trials:]
    )
    return Workload(str(sweep), tuple(jobs)), tuple(past)


def _work(curves: CurveDataset, row: int, job: JobId, sweep: SweepId, costs: Costs) -> Work:
    return Work(
        id=job,
        submitted_s=0.0,
        seconds=float(curves.elapsed_s[row, -1]),
        sweep=sweep,
        total_steps=curves.epochs,
        curve=curves.curve(row),
        configuration=curves.configuration(row),
        costs=costs,
    )


def _with_good(
    curves: CurveDataset, trials: int, good: int, shuffled: NDArray[np.int64], seed: int
) -> NDArray[np.int64]:
    """Return all rows in a seeded order; the first `trials` have exactly `good` good ones."""
    lowest = curves.lowest
    limit = lowest + WITHIN * np.abs(lowest)
    ranked = np.sort(lowest)
    near = np.searchsorted(ranked, limit, "right") - np.searchsorted(ranked, lowest, "left")
    worse = len(curves) - np.searchsorted(ranked, limit, "right")
    able = np.flatnonzero(np.isfinite(lowest) & (near >= good) & (worse >= trials - good))
    if not len(able):
        allowed = f"a set of {trials} that {curves.name} has"
        problem = Problem("good", f"{good} of {trials}", allowed, "ask for another number")
        raise ConfigError(curves.name, (problem,))
    able = able[np.argsort(lowest[able], kind="stable")]
    first = max(1, int(len(able) * BEST_PART))
    leader = able[np.random.default_rng((seed, good)).integers(first)]
    others = shuffled[shuffled != leader]
    loss = lowest[others]
    close = others[(loss >= lowest[leader]) & (loss <= limit[leader])][: good - 1]
    far = others[loss > limit[leader]][: trials - good]
    places = np.random.default_rng((seed, good, int(leader)))  # files differ in its position
    chosen = places.permutation(np.concatenate(([leader], close, far)))
    return np.concatenate((chosen, shuffled[~np.isin(shuffled, chosen)]))


def _within(curves: CurveDataset, name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        problem = Problem(name, str(value), f"{low} to {high}", "ask for another number")
        raise ConfigError(curves.name, (problem,))
