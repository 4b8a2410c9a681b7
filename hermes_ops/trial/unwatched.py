"""Training that Hermes does not watch: said when it starts, not when it has been in vain."""
# ruff: noqa: ANN401 - the objects of Keras have no types here

from __future__ import annotations

import functools
import importlib
from typing import Any

from hermes_ops.trial.driver import running
from hermes_ops.trial.runtime import runtime

_OPTIMIZERS = (
    ("keras.src.optimizers.base_optimizer", "BaseOptimizer", "apply"),
    ("keras.src.optimizers.optimizer", "_BaseOptimizer", "apply_gradients"),
    ("keras.src.optimizers.optimizer_experimental.optimizer", "_BaseOptimizer", "apply_gradients"),
    ("tf_keras.src.optimizers.optimizer", "_BaseOptimizer", "apply_gradients"),
    ("keras.optimizer_v2.optimizer_v2", "OptimizerV2", "apply_gradients"),
)


def tell_of_own_loops(model: Any, package: str) -> None:
    """Let the first training step outside `fit` be told of; `package` is Keras' own.

    The patch goes at that first step, so that later ones cost nothing.
    """
    _tell_at_first_call(model, "train_on_batch")
    for module, kind, method in _OPTIMIZERS:
        if module.split(".")[0] == package:
            try:
                found = getattr(importlib.import_module(module), kind)
            except (ImportError, AttributeError):
                continue
            _tell_at_first_call(found, method)
            return


def _tell_at_first_call(kind: Any, name: str) -> None:
    original = getattr(kind, name)

    @functools.wraps(original)
    def first(self: Any, *args: Any, **kwargs: Any) -> Any:
        if running() is None:
            setattr(kind, name, original)
            runtime().tell_own_loop()
        return original(self, *args, **kwargs)

    setattr(kind, name, first)
