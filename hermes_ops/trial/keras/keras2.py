"""The hook into Keras 2 (TensorFlow 2.6 to 2.15, and tf_keras)."""
# ruff: noqa: ANN401 - the objects of Keras have no types here

from __future__ import annotations

import collections
import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
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
from hermes_ops.trial.keras.runtime import install_handlers, shuffle_seed
from hermes_ops.trial.keras.session import FitSession


def patch(training: ModuleType) -> None:
    """Patch Keras' training module, which has just been imported.

    Dropout's random numbers are kept in variables, as Keras 3 does: the kernels' own state, which
    is the default of Keras 2, cannot be saved.
    """
    backend = Keras2(training)
    keras_backend = importlib.import_module(f"{training.__name__.rsplit('.engine', 1)[0]}.backend")
    if hasattr(keras_backend, "enable_tf_random_generator"):
        keras_backend.enable_tf_random_generator()
    _patch_fit(training.Model, backend)
    report_own_loops(training.Model, training.__name__.split(".")[0])
    _patch_handler(training.data_adapter)
    _patch_arrays(training.data_adapter)
    wrap_callbacks(training.callbacks_module.CallbackList)
    install_handlers()


def _patch_fit(model: Any, backend: Keras2) -> None:
    original = model.fit

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run_fit(backend, original, self, args, kwargs)

    model.fit = fit


def _patch_handler(adapters: Any) -> None:
    kind, arrays = adapters.DataHandler, adapters.TensorLikeDataAdapter
    make, epochs, steps = kind.__init__, kind.enumerate_epochs, kind.steps

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        session = running()
        if session is None or session.source is not None:
            make(self, *args, **kwargs)
        else:
            _make_source(session, self, functools.partial(make, self, *args), kwargs)

    def enumerate_epochs(self: Any) -> Iterator[Any]:
        session = running()
        if session is not None and self is getattr(session.model, "_eval_data_handler", None):
            _repeat_evaluations(session, self, epochs)
        if session is None or not session.has_begun or self is not session.source:
            return epochs(self)  # type: ignore[no-any-return]
        return _epochs(session, self, epochs, arrays)

    def enumerate_steps(self: Any) -> Iterator[int]:
        session = running(self)
        if session is not None:
            return _steps(session, self, steps)
        session = running()
        return steps(self) if session is None else _evaluation_steps(session, self, steps)

    kind.__init__ = init
    kind.enumerate_epochs = enumerate_epochs
    kind.steps = enumerate_steps


def _make_source(
    session: FitSession, source: Any, make: Callable[..., None], options: dict[str, Any]
) -> None:
    """Make the handler of the training data, also for 0 epochs, which tf_keras itself refuses."""
    session.source, epochs = source, options["epochs"]
    least = 1 if session.is_trained else epochs
    make(**{**options, "epochs": max(least, epochs)})
    source._epochs = epochs


def _epochs(session: FitSession, source: Any, epochs: Any, arrays: Any) -> Iterator[Any]:
    """Yield the epochs that are left, after repeating what the data's order needs of the others.

    Arrays have been brought to their place already, by their indices.
    """
    draw = not isinstance(source._adapter, arrays) and session.boundary_reason is None
    if session.resume_batches is not None and source._inferred_steps is None:
        source._inferred_steps = session.resume_batches
    again = source._adapter.should_recreate_iterator()
    _begin_pipeline(session, draw, again)
    steps = epochs(source)
    for coming in itertools.count(session.first_epoch):
        if again and coming >= session.resume_epoch:
            session.state.pipeline.mark_iterator()
        epoch, iterator = next(steps, (None, None))
        if epoch is None:
            return
        if epoch < session.resume_epoch:
            _repeat_epoch(session, source, iterator, epoch, draw)
            continue
        if epoch == session.resume_epoch and session.resume_batch:
            size = session.backend.batch_size(session)
            batch = session.resumed_batch(source._inferred_steps, size)
            _draw(iterator, batch if draw else 0)
            source._initial_step = batch
        yield epoch, iterator


def _repeat_evaluations(session: FitSession, source: Any, epochs: Any) -> None:
    """Make the iterators of the validations before the stop: shuffles count them."""
    done = session.evaluations_before()
    if type(source._adapter).__name__ == "DatasetAdapter":
        _repeat_validations(source, epochs, done)


def _repeat_validations(source: Any, epochs: Any, count: int) -> None:
    for _ in range(count):
        for _, iterator in epochs(source):
            _draw(iterator, min(_draws_to_count(source), source._inferred_steps or 1))


def _draws_to_count(source: Any) -> int:
    return draws_to_count(getattr(source._adapter, "_dataset", None))


def _begin_pipeline(session: FitSession, draw: bool, again: bool) -> None:
    pipeline = session.state.pipeline
    pipeline.one_iterator = draw and not again
    if draw and session.resume_epoch > session.first_epoch:
        pipeline.put_back_first()
    if not again:
        pipeline.mark_iterator()


def _repeat_epoch(session: FitSession, source: Any, iterator: Any, epoch: int, draw: bool) -> None:
    """Draw an epoch's batches where later ones hang on it; before its end, put back the state."""
    again, pipeline = source._adapter.should_recreate_iterator(), session.state.pipeline
    if draw and (not again or (pipeline.has_random_cache and epoch == session.first_epoch)):
        _draw(iterator, source._inferred_steps or 0)
    elif draw:
        _draw(iterator, min(_draws_to_count(source), source._inferred_steps or 1))
    if epoch + 1 == session.resume_epoch:
        if again:
            pipeline.put_back_start()
        session.put_back_objects()


def _steps(session: FitSession, source: Any, steps: Any) -> Iterator[int]:
    is_new = session.is_first_epoch
    for number, step in enumerate(steps(source)):
        if is_new and number == 1:
            session.on_first_batch()
        if session.is_stop_due():
            session.stop_here(step)
        yield step
        session.ranks.mark_step()


def _evaluation_steps(session: FitSession, source: Any, steps: Any) -> Iterator[int]:
    """Yield the steps of a validation, which are progress too."""
    for step in steps(source):
        yield step
        session.ranks.mark_step()


def _draw(iterator: Any, count: int) -> None:
    for _ in range(count):
        next(iterator, None)


def _patch_arrays(adapters: Any) -> None:
    kind = adapters.TensorLikeDataAdapter
    make = kind.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        session = running()
        shuffle = kwargs.get("shuffle", False)
        if not _claims(session, self) or not shuffle or shuffle == "batch" or seeded():
            make(self, *args, **kwargs)
            return
        assert session is not None
        session.permutations = Permutations(shuffle_seed(session.number), 0)
        with session.permutations.in_place(adapters.tf):
            make(self, *args, **kwargs)

    kind.__init__ = init
    for adapter in (kind, adapters.GenericArrayLikeDataAdapter):
        _patch_slices(adapter)


def _claims(session: FitSession | None, adapter: Any) -> bool:
    """Tell whether an array adapter belongs to the training data: the first that is made."""
    if session is None or session.has_begun or session.source is None:
        return False
    if session.adapter is None:
        session.adapter = adapter
    return session.adapter is adapter


def _patch_slices(kind: Any) -> None:
    slice_inputs = kind.slice_inputs

    def slice_at_place(self: Any, indices_dataset: Any, inputs: Any) -> Any:
        session = running()
        if session is not None and session.adapter is self and session.checkpoint is not None:
            indices_dataset = indices_dataset.skip(_place(session, self))
        return slice_inputs(self, indices_dataset, inputs)

    kind.slice_inputs = slice_at_place


def _place(session: FitSession, adapter: Any) -> int:
    """Return the batches to skip; of our own permutations, whole ones are skipped by number."""
    done = session.resume_epoch - session.first_epoch
    in_epoch = session.steps_per_epoch or adapter._size
    batches: int = done * in_epoch + session.resumed_batch(in_epoch, adapter._batch_size)
    if session.permutations is None:
        return batches
    session.permutations.begin_after(batches // adapter._size)
    return batches % int(adapter._size)


class Keras2:
    """The backend for Keras 2."""

    def __init__(self, training: ModuleType) -> None:
        self._training = training

    def begin_at(self, arguments: dict[str, Any], epoch: int) -> None:
        """Do nothing: the earlier epochs are skipped where they are counted."""

    def repeat_fit(self, session: FitSession) -> None:
        """Create as many iterators as a complete fit has: shuffles of its datasets count them."""
        self._repeat_training(session)
        if is_repeatable(session.validation_data):
            model = session.model
            source = type(session.source)(
                session.validation_data,
                steps_per_epoch=session.validation_steps,
                model=model,
                steps_per_execution=model._steps_per_execution,
            )
            epochs = type(source).enumerate_epochs
            _repeat_validations(source, epochs, session.evaluations_before())

    def _repeat_training(self, session: FitSession) -> None:
        """Create the iterators of the epochs; the first one exists already."""
        source, pipeline = session.source, session.state.pipeline
        dataset = self.dataset(session)
        if not is_repeatable(dataset) or not source._adapter.should_recreate_iterator():
            return
        pipeline.put_back_first()
        for epoch in range(session.first_epoch, session.resume_epoch):
            iterator = iter(source._dataset)
            is_first = pipeline.has_random_cache and epoch == session.first_epoch
            left = ALL if is_first else draws_to_count(dataset)
            collections.deque(itertools.islice(iterator, left), maxlen=0)

    def build(self, session: FitSession) -> bool:
        """Trace the training step, which makes every variable that it uses."""
        import tensorflow as tf

        model = session.model
        step = self.train_step(session)
        if step is not None:
            step.get_concrete_function(tf.data.IteratorSpec(session.source._dataset.element_spec))
            return True
        build = getattr(model.optimizer, "build", None)
        if model.built and build is not None:
            build(model.trainable_variables)
        return False

    def train_step(self, session: FitSession) -> Any:
        """Return the traced training step; None if it is not traced."""
        step = session.model.train_function
        return step if hasattr(step, "get_concrete_function") else None

    def why_boundary_only(self, session: FitSession) -> str | None:
        """Decide by the kind of the training data."""
        adapter = session.source._adapter
        kind = type(adapter).__name__
        if isinstance(adapter, self._training.data_adapter.TensorLikeDataAdapter):
            return "shuffle='batch' keeps no position" if adapter._shuffle == "batch" else None
        if kind == "DatasetAdapter":
            return why_not_repeatable(adapter._dataset)
        return f"its input ({kind.replace('DataAdapter', '')}) keeps no position"

    def dataset(self, session: FitSession) -> Any:
        """Return the script's tf.data pipeline; None if the data are anything else."""
        adapter = session.source._adapter
        return adapter._dataset if type(adapter).__name__ == "DatasetAdapter" else None

    def samples(self, session: FitSession, first: int, last: int) -> int | None:
        """Return the samples in the batches [first, last) of an epoch; None if not known."""
        adapter, size = session.source._adapter, self.batch_size(session)
        if size is None:
            return None
        partial = 0 if session.steps_per_epoch else adapter.partial_batch_size() or 0
        short = size - int(partial) if partial and last == adapter._size else 0
        return (last - first) * size - short

    def batch_size(self, session: FitSession) -> int | None:
        """Return the samples in a batch; None if not known."""
        adapter = session.source._adapter
        try:
            size = adapter.batch_size()
        except NotImplementedError:
            return None
        return int(size) if size else batch_size_of(self.dataset(session))

    def batches(self, session: FitSession) -> int | None:
        """Return the batches in an epoch, None if not known yet."""
        count = session.source.inferred_steps
        return int(count) if count is not None else None
