"""Collective operations of the processes of one fit, by the Horovod that the script has started."""
# ruff: noqa: ANN401 - the objects of Horovod and TensorFlow have no types here

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple, Protocol

from hermes_ops.trial.group import (
    RESIZE_VARIABLE,
    GroupError,
    StopAgreement,
    TrainingMark,
    TrialRank,
    average_logs,
    stop_margin,
)

_IN_FLIGHT = 8  # steps that Horovod lets a process begin ahead (HOROVOD_ENABLE_ASYNC_COMPLETION)
_MOST_PART_BYTES = 64 << 20
_KERAS_3 = (
    "Horovod does not average the gradients of Keras 3, so {size} copies would train apart: set "
    "TF_USE_LEGACY_KERAS=1 and install tf_keras, or set trial.workers: one_process and use "
    "tf.distribute.MirroredStrategy"
)
_NO_HOROVOD = (
    "the script does not use Horovod: {size} copies would train apart: call hvd.init() and use "
    "hvd.DistributedOptimizer, or set trial.workers: one_process"
)


class EpochVote(NamedTuple):
    """The vote of a process at the end of an epoch.

    `good`: the objective is a number; `ended`: `fit` ends here; `stop`: it was told to stop.
    """

    good: bool
    ended: bool
    stop: bool


class FitRanks(Protocol):
    """The processes of a fit, from the view of one of them."""

    def check(self, model: Any) -> None:
        """Raise GroupError unless these processes train one model together."""

    def average(self, logs: MutableMapping[str, Any]) -> None:
        """Replace an epoch's values by their means over the ranks."""

    def agree(self, vote: EpochVote) -> EpochVote:
        """Return the vote of all: good if all are, ended if one is, stop if the leader says so."""

    def is_stop_due(self, asked: bool) -> bool:
        """Tell, before a step, whether all leave before it."""

    def gather(self, value: Any) -> list[Any]:
        """Return each rank's value, by rank."""

    def mark_step(self) -> None:
        """Note that a step is made."""

    def mark_end(self) -> None:
        """Note that this fit is over."""

    def leave(self) -> None:
        """Leave the group in order, so that the other ranks see no error."""


class SingleProcess:
    """A fit of one process: it agrees with itself."""

    def check(self, model: Any) -> None:
        """Do nothing."""

    def average(self, logs: MutableMapping[str, Any]) -> None:
        """Do nothing."""

    def agree(self, vote: EpochVote) -> EpochVote:
        """Return the vote."""
        return vote

    def is_stop_due(self, asked: bool) -> bool:
        """Stop at the next batch, unless sizes change at the end of an epoch only."""
        return asked and not _waits_for_epoch()

    def gather(self, value: Any) -> list[Any]:
        """Return the value alone."""
        return [value]

    def mark_step(self) -> None:
        """Do nothing."""

    def mark_end(self) -> None:
        """Do nothing."""

    def leave(self) -> None:
        """Do nothing."""


class HorovodRanks:
    """The ranks of a fit under Horovod; what they exchange is exchanged at the ends of epochs."""

    def __init__(self, group: TrialRank) -> None:
        self._group = group
        self._agreement = StopAgreement(group)
        self._mark = TrainingMark(group)
        self._margin = stop_margin(1)

    def check(self, model: Any) -> None:
        """Raise GroupError unless Horovod has the size of the trial and averages the gradients."""
        size = self._group.size
        horovod = started_horovod()
        if horovod is None or horovod.size() != size or not _exchanges_gradients(model):
            raise GroupError(_NO_HOROVOD.format(size=size))
        self._margin = stop_margin(_backward_steps(model), _steps_in_flight())

    def average(self, logs: MutableMapping[str, Any]) -> None:
        """Replace the values in place; what is no number stays as it is."""
        numbers = {name: _number(value) for name, value in logs.items()}
        finite = {name: number for name, number in numbers.items() if number is not None}
        means = average_logs(self.gather(finite))
        logs.update({name: means[name] for name in finite})

    def agree(self, vote: EpochVote) -> EpochVote:
        """Exchange the votes."""
        votes: list[EpochVote] = [EpochVote(*one) for one in self.gather(tuple(vote))]
        return EpochVote(
            all(one.good for one in votes), any(one.ended for one in votes), votes[0].stop
        )

    def is_stop_due(self, asked: bool) -> bool:
        """Look at what the leader has written; it writes nothing where an epoch's end is meant."""
        return self._agreement.agree_to_leave(asked and not _waits_for_epoch(), self._margin)

    def gather(self, value: Any) -> list[Any]:
        """Exchange pickled values by two collectives; all ranks call it in the same order."""
        import numpy as np
        import tensorflow as tf

        horovod = sys.modules["horovod.tensorflow"]
        data = np.frombuffer(pickle.dumps(value, protocol=4), np.uint8)
        with tf.device("/CPU:0"):
            count = tf.constant([data.size], tf.int64)
            sizes = horovod.allgather(count, name="hermes.sizes").numpy()
            joined = horovod.allgather(tf.constant(data), name="hermes.data").numpy().tobytes()
        values, start = [], 0
        for size in sizes:
            values.append(pickle.loads(joined[start : start + int(size)]))  # noqa: S301 - ours
            start += int(size)
        return values

    def mark_step(self) -> None:
        """Let hermes-trial see that steps are made."""
        self._mark.touch()

    def mark_end(self) -> None:
        """Let hermes-trial expect no step."""
        self._mark.remove()

    def leave(self) -> None:
        """Shut Horovod down: a rank that only vanishes is an error to the others."""
        self.mark_end()
        with contextlib.suppress(Exception):
            sys.modules["horovod.tensorflow"].shutdown()


def fit_ranks(group: TrialRank) -> FitRanks:
    """Return how a process of this group trains with the others."""
    return HorovodRanks(group) if group.is_distributed else SingleProcess()


def refuse_keras_3(group: TrialRank) -> None:
    """Raise GroupError for a trial of several processes with Keras 3: they would train apart."""
    if group.is_distributed:
        has_horovod = any(name.split(".")[0] == "horovod" for name in list(sys.modules))
        raise GroupError((_KERAS_3 if has_horovod else _NO_HOROVOD).format(size=group.size))


def may_be_resized(group: TrialRank) -> bool:
    """Tell whether the script may go on at another size: it is written for Horovod."""
    return group.is_distributed or "horovod.tensorflow" in sys.modules


def rank_parts(
    ranks: FitRanks, rank: int, arrays: Mapping[str, Any], objects: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], bool]:
    """Return what each follower has that differs from the leader's; and whether that is all.

    `arrays`: the variables that may differ by rank, by key. More than 64 MiB of one are left out.
    """
    mine = {key: _array_digest(array) for key, array in arrays.items()}
    leaders: Mapping[str, str] = ranks.gather(mine if rank == 0 else None)[0]
    different = {key: array for key, array in arrays.items() if leaders.get(key) != mine[key]}
    fits = sum(array.nbytes for array in different.values()) <= _MOST_PART_BYTES
    part = {**objects, "arrays": different if fits else {}, "is_complete": fits}
    parts = ranks.gather(part if rank else {})
    return parts, all(one.get("is_complete", True) for one in parts)


def _array_digest(array: Any) -> str:
    return hashlib.blake2b(array.tobytes(), digest_size=8).hexdigest()


def _waits_for_epoch() -> bool:
    return os.environ.get(RESIZE_VARIABLE) == "epoch"


def started_horovod() -> Any:
    """Return Horovod's module for TensorFlow; None if the script has not called `hvd.init`.

    While it is being imported, as a signal may find it, it lacks its functions.
    """
    module: Any = sys.modules.get("horovod.tensorflow")
    is_initialized = getattr(module, "is_initialized", None)
    return module if is_initialized is not None and is_initialized() else None


def _exchanges_gradients(model: Any) -> bool:
    """Tell whether the optimizer is Horovod's; a training step of the script's own is believed."""
    step = getattr(type(model), "train_step", None)
    is_own = getattr(step, "__module__", "").split(".")[0] not in ("keras", "tf_keras")
    return is_own or hasattr(plain_optimizer(model), "_allreduce_grads")


def plain_optimizer(model: Any) -> Any:
    """Return the optimizer below a wrapper that scales the loss."""
    optimizer = getattr(model, "optimizer", None)
    return getattr(optimizer, "inner_optimizer", optimizer)


def _backward_steps(model: Any) -> int:
    helper = getattr(plain_optimizer(model), "_agg_helper", None)
    return int(getattr(helper, "backward_passes_per_step", 1) or 1)


def _steps_in_flight() -> int:
    return _IN_FLIGHT if os.environ.get("HOROVOD_ENABLE_ASYNC_COMPLETION", "0") != "0" else 0


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
