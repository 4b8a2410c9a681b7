"""The hook into Keras 3 on JAX and on PyTorch.

A fit is resumed at the start of an epoch there: while an epoch runs its state is out of the model's
variables (JAX), or its data loader has read ahead (PyTorch).
"""
# ruff: noqa: ANN401 - the objects of Keras have no types here

from __future__ import annotations

from types import ModuleType
from typing import Any

from hermes_ops.trial.data import why_not_repeatable
from hermes_ops.trial.driver import wrap_callbacks
from hermes_ops.trial.keras3 import Keras3, patch_fit, patch_iterator
from hermes_ops.trial.runtime import prepare
from hermes_ops.trial.session import Session
from hermes_ops.trial.unwatched import tell_of_own_loops


def patch(trainer: ModuleType) -> None:
    """Patch the trainer of JAX or of PyTorch, which has just been imported."""
    name, kind = _trainer(trainer)
    backend = Keras3AtEpochs(name)
    patch_fit(kind, backend)
    tell_of_own_loops(kind, "keras")
    patch_iterator(trainer.EpochIterator, backend)
    wrap_callbacks(trainer.callbacks_module.CallbackList)
    prepare()


def _trainer(trainer: ModuleType) -> tuple[str, Any]:
    if hasattr(trainer, "JAXTrainer"):
        return "JAX", trainer.JAXTrainer
    return "PyTorch", trainer.TorchTrainer


class Keras3AtEpochs(Keras3):
    """What is particular to Keras 3 where nothing but the end of an epoch can be gone on from."""

    def __init__(self, name: str) -> None:
        self._name = name

    def build(self, session: Session) -> bool:  # noqa: ARG002
        """Nothing: `fit` has made every variable."""
        return True

    def train_step(self, session: Session) -> Any:  # noqa: ARG002
        """None: it is no function of TensorFlow."""
        return

    def why_boundary_only(self, session: Session) -> str | None:
        """By the backend; what cannot be repeated of the data is added."""
        dataset = self.dataset(session)
        reason = why_not_repeatable(dataset) if dataset is not None else None
        return f"Keras runs on {self._name}" + (f", and {reason}" if reason else "")

    def repeat_epochs(self, session: Session, source: Any) -> None:
        """Begin the iterators of the epochs before: a seeded shuffle of tf.data counts them."""
        dataset = self.dataset(session)
        if dataset is not None and why_not_repeatable(dataset) is None:
            for _ in range(session.first_epoch, session.resume_epoch):
                next(iter(source._get_iterator()), None)
            session.state.pipeline.put_back_start()
