"""The interface of a version of Keras: what one call of `fit` needs of it."""
# ruff: noqa: ANN401 - the objects of Keras have no types here

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hermes_ops.trial.keras.session import FitSession


class KerasBackend(Protocol):
    """The operations that differ between Keras 2 and Keras 3."""

    def build(self, session: FitSession) -> bool:
        """Make every variable exist; False if that must wait for the first batch."""

    def why_boundary_only(self, session: FitSession) -> str | None:
        """Return why this fit resumes at the start of an epoch only; None if at any batch."""

    def train_step(self, session: FitSession) -> Any:
        """Return the traced training step; None if it is not traced."""

    def dataset(self, session: FitSession) -> Any:
        """Return the script's tf.data pipeline; None if the data are anything else."""

    def batch_size(self, session: FitSession) -> int | None:
        """Return the samples in a batch; None if not known."""

    def samples(self, session: FitSession, first: int, last: int) -> int | None:
        """Return the samples in the batches [first, last) of an epoch; None if not known."""

    def batches(self, session: FitSession) -> int | None:
        """Return the batches in an epoch, None if not known yet."""

    def begin_at(self, arguments: dict[str, Any], epoch: int) -> None:
        """Let `fit` begin at an epoch."""

    def repeat_fit(self, session: FitSession) -> None:
        """Create as many iterators of the data as a fit has that is not run again."""
