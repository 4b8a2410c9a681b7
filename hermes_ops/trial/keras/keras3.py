"""The hook into Keras 3: on TensorFlow, and on JAX and PyTorch."""
# ruff: noqa: ANN401 - the objects of Keras have no types here

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from hermes_ops.trial.keras.fit import report_own_loops, run_fit, running, wrap_callbacks
from hermes_ops.trial.keras.pipeline import (
    ALL,
    Permutations,
    batch_size_of,
    draws_to_count,
    is_repeatable,
    seeded,
    why_not_repeatable,
)
from hermes_ops.trial.keras.ranks import refuse_keras_3
from hermes_ops.trial.keras.runtime import install_handlers, runtime, shuffle_seed
from hermes_ops.trial.keras.session import FitSession


def patch(trainer: ModuleType) -> None:
    """Patch Keras' TensorFlow trainer, which has just been imported."""
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    backend = Keras3()
    patch_fit(trainer.TensorFlowTrainer, backend)
    report_own_loops(trainer.TensorFlowTrainer, "keras")
    patch_iterator(trainer.TFEpochIterator, backend)
    _patch_arrays(ArrayDataAdapter)
    wrap_callbacks(trainer.callbacks_module.CallbackList)
    install_handlers()


def patch_fit(trainer: Any, backend: Keras3) -> None:
    """Let calls of `fit` be run as the trial needs it."""
    original = trainer.fit

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_keras_3(runtime().group)
        return run_fit(backend, original, self, args, kwargs)

    trainer.fit = fit


def patch_iterator(kind: Any, backend: Keras3) -> None:
    """Let the session see the batches of its training data."""
    make, enumerate_iterator = kind.__init__, kind._enumerate_iterator

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        session = running()
        if session is not None and session.source is None:
            session.source = self
        make(self, *args, **kwargs)

    def enumerate_batches(self: Any) -> Iterator[Any]:
        session = running()
        if session is None or not session.has_begun:
            return enumerate_iterator(self)  # type: ignore[no-any-return]
        if self is session.source:
            if session.boundary_reason is not None and session.resuming_at(session.epoch):
                backend.repeat_epochs(session, self, enumerate_iterator)
            return _batches(session, self, enumerate_iterator)
        if self is getattr(session.model, "_eval_epoch_iterator", None):
            _repeat_evaluations(session, self, enumerate_iterator)
        return enumerate_iterator(self)  # type: ignore[no-any-return]

    kind.__init__ = init
    kind._enumerate_iterator = enumerate_batches


def _batches(session: FitSession, source: Any, enumerate_iterator: Any) -> Iterator[Any]:
    """Yield the batches of an epoch; those done before a stop are drawn and dropped."""
    first = session.resuming_at(session.epoch)
    if first:
        _repeat_epochs(session, source, enumerate_iterator)
    pipeline = session.state.pipeline
    pipeline.one_iterator = source.steps_per_epoch is not None and session.boundary_reason is None
    if not pipeline.one_iterator or source._current_iterator is None:
        pipeline.mark_iterator()
    steps = enumerate_iterator(source)
    if first:
        for _ in range(_resumed_batch(session) // source.steps_per_execution):
            _draw(next(steps)[2], source.steps_per_execution)
    is_new = session.is_first_epoch
    for number, step in enumerate(steps):
        if is_new and number == 1:
            session.on_first_batch()
        if session.is_stop_due():
            session.stop_here(step[0])
        yield step


def _resumed_batch(session: FitSession) -> int:
    """Return the batch at which the epoch continues: its number of batches may have changed."""
    backend = session.backend
    return session.resumed_batch(backend.batches(session), backend.batch_size(session))


def _repeat_epochs(session: FitSession, source: Any, enumerate_iterator: Any) -> None:
    """Create as many iterators as the epochs before have: shuffles count them.

    Batches are drawn only where one iterator serves several epochs (steps_per_epoch), and in the
    first epoch if a cache keeps what is drawn in it.
    """
    one_iterator = source.steps_per_epoch is not None
    if type(source.data_adapter).__name__ == "ArrayDataAdapter" and not one_iterator:
        return
    if session.boundary_reason is None:
        _repeat_pipeline(session, source, enumerate_iterator)


def _repeat_pipeline(session: FitSession, source: Any, enumerate_iterator: Any) -> None:
    if session.resume_epoch == session.first_epoch:
        return
    pipeline, one_iterator = session.state.pipeline, source.steps_per_epoch is not None
    as_begun = pipeline.values()
    pipeline.put_back_first()
    if one_iterator:
        pipeline.mark_iterator()
    for epoch in range(session.first_epoch, session.resume_epoch):
        draws = one_iterator or (pipeline.has_random_cache and epoch == session.first_epoch)
        _repeat_epoch(session, source, enumerate_iterator(source), draws)
    if not one_iterator:
        _put_back(session, as_begun)


def _put_back(session: FitSession, as_begun: list[Any]) -> None:
    """Set the variables that the pipeline captures to their values at the start of the epoch.

    If the fit resumes at the start of an epoch these are `as_begun`: a callback may have set them
    for this epoch.
    """
    if session.resume_batch:
        session.state.pipeline.put_back_start()
    else:
        session.state.pipeline.put_back(as_begun)


def _repeat_evaluations(session: FitSession, source: Any, enumerate_iterator: Any) -> None:
    """Make the iterators of the validations before the stop: shuffles count them."""
    done = session.evaluations_before()
    if type(source.data_adapter).__name__ == "TFDatasetAdapter":
        for _ in range(done):
            _repeat_epoch(session, source, enumerate_iterator(source), draws=False)
            source.reset()


def _repeat_epoch(session: FitSession, source: Any, steps: Iterator[Any], draws: bool) -> None:
    left = ALL if draws else draws_to_count(getattr(source.data_adapter, "_dataset", None))
    # Keras makes one iterator more after an epoch, but not where it has found its end by itself.
    if source.steps_per_epoch is None and source.data_adapter.num_batches is None:
        _, _, iterator = next(steps)
        if source is session.source:
            left = min(left, max(1, session.resume_batches or 0))
        collections.deque(itertools.islice(iterator, left), maxlen=0)
        steps.close()  # type: ignore[attr-defined]  # a generator
        if source is session.source:
            source._num_batches, source._current_iterator = session.resume_batches, None
        return
    for _, _, iterator in steps:
        count = min(left, source.steps_per_execution)
        _draw(iterator, count)
        left -= count


def _draw(iterator: Any, count: int) -> None:
    for _ in range(count):
        next(iterator, None)


def _patch_arrays(kind: Any) -> None:
    get_dataset = kind.get_tf_dataset

    def get_tf_dataset(self: Any) -> Any:
        session = running()
        if session is None or session.has_begun or session.permutations is not None:
            return get_dataset(self)
        if not self._shuffle or self._shuffle == "batch" or seeded():
            return get_dataset(self)
        import tensorflow as tf

        done = session.resume_epoch - session.first_epoch
        first = 0 if session.steps_per_epoch else done
        session.permutations = Permutations(shuffle_seed(session.number), first)
        with session.permutations.in_place(tf):
            return get_dataset(self)

    kind.get_tf_dataset = get_tf_dataset


class Keras3:
    """The backend for Keras 3."""

    def begin_at(self, arguments: dict[str, Any], epoch: int) -> None:
        """Let `fit` begin at an epoch."""
        arguments["initial_epoch"] = epoch

    def build(self, session: FitSession) -> bool:
        """Trace the training step, which makes every variable that it uses."""
        import tensorflow as tf

        model = session.model
        if getattr(model, "_distribute_strategy", None) is not None:
            return True  # Keras has built it
        spec = session.source._distributed_dataset.element_spec
        step = self.train_step(session)
        if step is None:
            model._symbolic_build(data_batch=spec)
        else:
            step.get_concrete_function(tf.data.IteratorSpec(spec))
        return True

    def train_step(self, session: FitSession) -> Any:
        """Return the traced training step; None if it is not traced."""
        for cell in getattr(session.model.train_function, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "get_concrete_function"):
                return cell.cell_contents
        return None

    def why_boundary_only(self, session: FitSession) -> str | None:
        """Decide by the kind of the training data."""
        adapter = session.source.data_adapter
        kind = type(adapter).__name__
        if kind == "ArrayDataAdapter":
            return "shuffle='batch' keeps no position" if adapter._shuffle == "batch" else None
        if kind == "TFDatasetAdapter":
            return why_not_repeatable(adapter._dataset)
        return f"its input ({kind.replace('Adapter', '')}) keeps no position"

    def dataset(self, session: FitSession) -> Any:
        """Return the script's tf.data pipeline; None if the data are anything else."""
        adapter = session.source.data_adapter
        return adapter._dataset if type(adapter).__name__ == "TFDatasetAdapter" else None

    def repeat_epochs(self, session: FitSession, source: Any, enumerate_iterator: Any) -> None:
        """Do nothing: data that are resumed at the start of an epoch only cannot be repeated."""

    def repeat_fit(self, session: FitSession) -> None:
        """Create as many iterators as a complete fit has: shuffles of its datasets count them."""
        self._repeat_training(session)
        if is_repeatable(session.validation_data):
            source = self._validation_source(session)
            for _ in range(session.evaluations_before()):
                _repeat_epoch(session, source, source._enumerate_iterator(), draws=False)
                source.reset()

    def _repeat_training(self, session: FitSession) -> None:
        if not is_repeatable(self.dataset(session)):
            return
        pipeline, source = session.state.pipeline, session.source
        pipeline.put_back_first()
        for epoch in range(session.first_epoch, session.resume_epoch):
            draws = pipeline.has_random_cache and epoch == session.first_epoch
            _repeat_epoch(session, source, source._enumerate_iterator(), draws)

    def _source_options(self, session: FitSession) -> dict[str, Any]:
        return {"distribute_strategy": session.model.distribute_strategy}

    def _validation_source(self, session: FitSession) -> Any:
        """Return the iterator of the validation data as `fit` makes it."""
        return type(session.source)(
            x=session.validation_data,
            steps_per_epoch=session.validation_steps,
            steps_per_execution=session.model.steps_per_execution,
            shuffle=False,
            **self._source_options(session),
        )

    def batch_size(self, session: FitSession) -> int | None:
        """Return the samples in a batch; None if not known."""
        dataset = self.dataset(session)
        size = session.source.data_adapter.batch_size if dataset is None else batch_size_of(dataset)
        return int(size) if size else None

    def samples(self, session: FitSession, first: int, last: int) -> int | None:  # noqa: ARG002
        """Return None: they are counted in trials of several processes, which Keras 3 has not."""
        return None

    def batches(self, session: FitSession) -> int | None:
        """Return the batches in an epoch, None if not known yet."""
        count = session.source.num_batches
        return int(count) if count is not None else None


# -- Keras 3 on JAX and PyTorch -------------------------------------------------------------------
# A fit is resumed at the start of an epoch there: while an epoch runs its state is out of the
# model's variables (JAX), or its data loader has read ahead (PyTorch).


def patch_other_backend(trainer: ModuleType) -> None:
    """Patch the trainer of JAX or of PyTorch, which has just been imported."""
    name, kind = _trainer(trainer)
    backend = Keras3AtEpochs(name)
    patch_fit(kind, backend)
    report_own_loops(kind, "keras")
    patch_iterator(trainer.EpochIterator, backend)
    wrap_callbacks(trainer.callbacks_module.CallbackList)
    install_handlers()


def _trainer(trainer: ModuleType) -> tuple[str, Any]:
    if hasattr(trainer, "JAXTrainer"):
        return "JAX", trainer.JAXTrainer
    return "PyTorch", trainer.TorchTrainer


class Keras3AtEpochs(Keras3):
    """The backend for Keras 3 if training can only be resumed at the end of an epoch."""

    def __init__(self, name: str) -> None:
        self._name = name

    def build(self, session: FitSession) -> bool:  # noqa: ARG002
        """Do nothing: `fit` has made every variable."""
        return True

    def train_step(self, session: FitSession) -> Any:  # noqa: ARG002
        """Return None: it is no function of TensorFlow."""
        return

    def why_boundary_only(self, session: FitSession) -> str | None:
        """Name the backend, and what of the data cannot be repeated."""
        dataset = self.dataset(session)
        reason = why_not_repeatable(dataset) if dataset is not None else None
        return f"Keras runs on {self._name}" + (f", and {reason}" if reason else "")

    def repeat_epochs(self, session: FitSession, source: Any, enumerate_iterator: Any) -> None:
        """Repeat the iterators of the epochs before: a seeded shuffle of tf.data counts them."""
        if is_repeatable(self.dataset(session)):
            _repeat_pipeline(session, source, enumerate_iterator)

    def _source_options(self, session: FitSession) -> dict[str, Any]:  # noqa: ARG002
        return {}
