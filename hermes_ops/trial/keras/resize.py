"""Go on with another number of processes: the batch, the learning rate, and whose state is whose.

All follows from what the checkpoint holds and from what the script has set up at its new size.
"""
# ruff: noqa: ANN401 - the objects of Keras, the state of callbacks have any type

from __future__ import annotations

import math
import os
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from hermes_ops.trial.group import RATE_VARIABLE
from hermes_ops.trial.keras.callback_files import match_callbacks
from hermes_ops.trial.keras.python_state import digest
from hermes_ops.trial.keras.ranks import plain_optimizer
from hermes_ops.trial.keras.runtime import KerasRuntime

SCRIPT, HERMES, OFF = "script", "hermes", "off"
_RANDOM_KEYS = ("k/random/", "k/global/")
_CALLBACK = re.compile(r"callback/\d+")
_SAME_RATE = 1e-4  # relative: the precision of a float32, and more


class SizeChange(NamedTuple):
    """The number of processes that wrote the checkpoint, and the number now."""

    before: int
    now: int

    @property
    def is_same(self) -> bool:
        """Tell whether nothing changes."""
        return self.before == self.now


class EpochShape(NamedTuple):
    """The batches of an epoch and the samples in each, of one process; None where not known."""

    batches: int | None = None
    batch_size: int | None = None


def resumed_batch(batch: int, change: SizeChange, before: EpochShape, now: EpochShape) -> int:
    """Return the batch of the epoch to go on with; a batch is one of each process.

    The epoch continues at the same share of the data: with more processes, or more samples in a
    batch, at a batch with a smaller number. If an epoch has as many batches as before, the script
    does not divide its data, and the batch stays. At least one batch is left to train; if their
    number is not known, no batch is skipped that was not trained before.
    """
    samples = _step_samples(change, before, now)
    undivided = now.batches is not None and now.batches == before.batches
    is_alike = undivided or samples[0] == samples[1]
    place = batch if is_alike else batch * samples[0] // samples[1]
    return min(place, batch if now.batches is None else max(0, now.batches - 1))


def _step_samples(change: SizeChange, before: EpochShape, now: EpochShape) -> tuple[int, int]:
    """Return two numbers in the ratio of the samples of a step before and now.

    If the samples of a batch are not known, the batches of an epoch give the ratio, provided that
    the number of processes is the same.
    """
    if before.batch_size and now.batch_size:
        return change.before * before.batch_size, change.now * now.batch_size
    if change.is_same and before.batches and now.batches:
        return now.batches, before.batches
    return change.before, change.now


# -- the learning rate -----------------------------------------------------------------------------


class RateScaling(NamedTuple):
    """The factor on the saved learning rate, and what to tell the user about it, if anything."""

    factor: float
    notice: str = ""


def rate_scaling(
    mode: str, change: SizeChange, rate_before: float | None, rate_now: float | None
) -> RateScaling:
    """Return how the learning rate changes at another size.

    `rate_before` and `rate_now`: what the script itself set at the old and at the new size, None if
    not known. The linear rule (new size / old size) is right for a script that scales by the size,
    and for one that does not: what it has set is replaced. A script with a rule of its own, such as
    the square root, is followed. Source: Goyal et al., "Accurate, Large Minibatch SGD", 2017.
    """
    linear = change.now / change.before
    if mode == OFF or change.is_same:
        return RateScaling(1.0)
    if not rate_before or rate_now is None:
        return RateScaling(linear)
    ratio = rate_now / rate_before
    scales = math.isclose(ratio, linear, rel_tol=_SAME_RATE)
    if mode == HERMES:
        twice = "the script multiplies its learning rate by the number of workers itself, and "
        twice += "trial.scale_learning_rate: hermes does it too: set it to script"
        return RateScaling(linear, twice if scales else "")
    if scales:
        return RateScaling(linear)
    if math.isclose(ratio, 1.0, rel_tol=_SAME_RATE):
        return RateScaling(
            linear,
            "the script does not multiply its learning rate by the number of workers: Hermes "
            "scales it when that number changes; trial.scale_learning_rate: off leaves it",
        )
    return RateScaling(ratio)


# -- callbacks and objects -------------------------------------------------------------------------


def is_horovods(callback: Any) -> bool:
    """Tell whether a callback is one of Horovod's own, whose state belongs to a size."""
    return any(kind.__module__.split(".")[0] == "horovod" for kind in type(callback).__mro__)


def fingerprints(
    callbacks: Iterable[Mapping[str, Any]], python: Mapping[str, Any]
) -> dict[str, str]:
    """Return digests of what callbacks and the user's objects hold, before anything is restored.

    `callbacks`: entries with `type` and `state`. What differs here between two sizes depends on
    the size: it is not restored at another one.
    """
    digests: dict[str, str] = {}
    counts: dict[str, int] = {}
    for entry in callbacks:
        number = counts.setdefault(entry["type"], 0)
        counts[entry["type"]] += 1
        for name, value in entry["state"].items():
            digests[attribute_key(entry["type"], number, name)] = digest(value)
    for key, value in python.items():
        digests[key] = digest(value)
    return digests


def attribute_key(kind: str, number: int, name: str) -> str:
    """Return the key of an attribute of the n-th callback of a type, among the fingerprints."""
    return f"{kind}#{number}.{name}"


def size_dependent(before: Mapping[str, str], now: Mapping[str, str]) -> frozenset[str]:
    """Return the keys whose value, as the script sets it, depends on the size."""
    return frozenset(key for key, digest in now.items() if before.get(key, digest) != digest)


def resized_callbacks(
    callbacks: Iterable[Any], saved: Iterable[Mapping[str, Any]], dependent: frozenset[str]
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield each callback with the attributes that go on at another size; Horovod's have none."""
    counts: dict[str, int] = {}
    for callback, entry in match_callbacks(callbacks, saved):
        kind = entry["type"]
        number = counts.setdefault(kind, 0)
        counts[kind] += 1
        if not is_horovods(callback):
            yield (
                callback,
                {
                    name: value
                    for name, value in entry["state"].items()
                    if attribute_key(kind, number, name) not in dependent
                },
            )


def resized_python(
    python: Mapping[str, Any], dependent: frozenset[str], same_callbacks: bool
) -> dict[str, Any]:
    """Return what of the user's own objects goes on at another size.

    What the data hold is left out, as the shards are others; and what callbacks hold if this rank
    has not the same ones, as objects are known by their place among them.
    """
    kept = {}
    for key, value in python.items():
        is_callbacks = _CALLBACK.match(key) is not None
        if key in dependent or not (key.startswith("model") or (is_callbacks and same_callbacks)):
            continue
        kept[key] = value
    return kept


# -- what each rank has of its own -----------------------------------------------------------------


def objects_of_rank(objects: Mapping[str, Any], rank: int, is_same: bool) -> dict[str, Any]:
    """Return the saved objects as this rank restores them.

    At the same size each rank goes on with its own. At another one those that were there go on with
    their random numbers; a new rank begins its own, as all others would have the same.
    """
    parts: list[Mapping[str, Any]] = objects.get("ranks") or []
    part = parts[rank] if 0 < rank < len(parts) else {}
    mine = dict(objects)
    if rank == 0:
        return mine
    if is_same:
        mine.update({name: value for name, value in part.items() if name != "arrays"})
        return mine
    for name in ("random", "pipeline"):
        mine[name] = part.get(name)
    return mine


def arrays_of_rank(
    arrays: Mapping[str, Any], objects: Mapping[str, Any], rank: int, is_same: bool
) -> dict[str, Any]:
    """Return the saved variables as this rank restores them; `objects` as in `objects_of_rank`."""
    parts: list[Mapping[str, Any]] = objects.get("ranks") or []
    if rank == 0:
        return dict(arrays)
    of_rank: Mapping[str, Any] = parts[rank].get("arrays", {}) if rank < len(parts) else {}
    if is_same:
        return {**arrays, **of_rank}
    mine = {key: value for key, value in arrays.items() if not key.startswith(_RANDOM_KEYS)}
    mine.update({key: value for key, value in of_rank.items() if key.startswith(_RANDOM_KEYS)})
    return mine


class FitRate:
    """The learning rate as the script has set it, as it was saved, and as it goes on."""

    def __init__(
        self, model: Any, runtime: KerasRuntime, change: SizeChange, header: Mapping[str, Any]
    ) -> None:
        self._optimizer = plain_optimizer(model)
        self._runtime = runtime
        self._change = change
        self._header = header
        self._mode = os.environ.get(RATE_VARIABLE) or SCRIPT
        self._by_script = read_rate(self._optimizer)

    def begin(self) -> None:
        """Multiply the script's rate by the number of processes if Hermes is to do that.

        An optimizer that has been scaled, or restored, is not scaled again by a later fit.
        """
        scaled = self._runtime.scaled_optimizers
        is_scaled = any(one() is self._optimizer for one in scaled)
        if self._mode != HERMES or is_scaled or self._by_script is None or self._change.now == 1:
            return
        self._note_scaled()
        if not self._header:
            self._optimizer.learning_rate = self._by_script * self._change.now

    def _note_scaled(self) -> None:
        """Remember the optimizer, without keeping it and its variables in memory."""
        if self._mode != HERMES or self._optimizer is None:
            return
        scaled, mine = self._runtime.scaled_optimizers, self._optimizer
        kept = [one for one in scaled if one() is not None and one() is not mine]
        scaled[:] = [*kept, weakref.ref(mine)]

    def restore(self) -> None:
        """Set the saved rate, scaled to the present number; called again it sets the same."""
        self._note_scaled()
        if self._change.is_same or self._optimizer is None:
            return
        if follows_schedule(self._optimizer):
            if self._mode != OFF:
                self._runtime.say_once(
                    "the learning rate follows a schedule that counts steps, and is not scaled "
                    "when the number of workers changes: a step has another number of samples then"
                )
            return
        saved = self._header.get("rate")
        if saved is None:
            return
        before = self._header.get("rate_by_script")
        scaling = rate_scaling(self._mode, self._change, before, self._by_script)
        self._optimizer.learning_rate = saved * scaling.factor
        if scaling.notice:
            self._runtime.say_once(scaling.notice)

    def header(self) -> dict[str, float | None]:
        """Return what a checkpoint says of the rate: now, and as the script set it."""
        return {"rate": read_rate(self._optimizer), "rate_by_script": self._by_script}


def follows_schedule(optimizer: Any) -> bool:
    """Tell whether the rate is computed at each step, so that setting it changes nothing."""
    hyper = getattr(optimizer, "_hyper", {})
    for rate in (getattr(optimizer, "_learning_rate", None), hyper.get("learning_rate")):
        if any(kind.__name__ == "LearningRateSchedule" for kind in type(rate).__mro__):
            return True
    return False


def read_rate(optimizer: Any) -> float | None:
    """Return the learning rate; None if there is none, or it follows a schedule."""
    try:
        if optimizer is None or follows_schedule(optimizer):
            return None
        rate: Any = optimizer.learning_rate
        return float(rate.numpy() if hasattr(rate, "numpy") else rate)
    except Exception:  # Keras 2 raises ValueError where there is none; others raise anything
        return None
