"""The learning rate of a fit whose trial changes its number of processes."""
# ruff: noqa: ANN401 - the objects of Keras have no types here

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import Any

from hermes_ops.trial.group import RATE_VARIABLE
from hermes_ops.trial.keras.ranks import plain_optimizer
from hermes_ops.trial.keras.resize import (
    HERMES,
    OFF,
    SCRIPT,
    SizeChange,
    rate_scaling,
)
from hermes_ops.trial.keras.runtime import KerasRuntime


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
