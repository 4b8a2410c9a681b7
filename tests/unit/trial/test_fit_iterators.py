"""Iterators of the datasets of a fit that is not run again, with stand-ins for those of Keras."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.trial.keras.keras2 import Keras2
from hermes_ops.trial.keras.keras3 import Keras3, Keras3AtEpochs, _repeat_epochs
from hermes_ops.trial.keras.pipeline import PipelineState


class Dataset:
    """As a tf.data pipeline whose shuffle counts its iterators."""

    def __init__(self) -> None:
        self.iterators = 0
        self._dataset = self

    def __iter__(self) -> Iterator[int]:
        self.iterators += 1
        return iter(())

    def options(self) -> Any:
        return SimpleNamespace(deterministic=None)

    def _inputs(self) -> list[Any]:
        return []

    def _functions(self) -> list[Any]:
        return []


class TFDatasetAdapter:
    """As the one of Keras 3, which goes by its name."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.num_batches: int | None = 2


class Source:
    """As the iterator of Keras 3: with each epoch it makes one for the next epoch too."""

    def __init__(self, x: Any, steps_per_epoch: int | None = None, **_: Any) -> None:
        self.data_adapter, self._dataset = TFDatasetAdapter(x), x
        self.steps_per_epoch, self.steps_per_execution, self._num_batches = steps_per_epoch, 1, 2

    def _enumerate_iterator(self) -> Iterator[Any]:
        iterator = iter(self._dataset)
        for step in range(2):
            yield step, step, iterator
        iter(self._dataset)

    def reset(self) -> None:
        pass


class DatasetAdapter:
    """As the one of Keras 2."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def should_recreate_iterator(self) -> bool:
        return True


class Handler:
    """As the one of Keras 2: beside each epoch's iterator it makes one at its beginning."""

    def __init__(self, x: Any, **_: Any) -> None:
        self._adapter, self._dataset = DatasetAdapter(x), x
        self._inferred_steps = 2

    def enumerate_epochs(self) -> Iterator[Any]:
        iter(self._dataset)
        yield 0, iter(self._dataset)


def session(source: Any, validation: Dataset) -> Any:
    """A fit of three epochs that is not run again, with a validation after each."""
    pipeline = SimpleNamespace(has_random_cache=False, put_back_first=lambda: None)
    model = SimpleNamespace(distribute_strategy=None, steps_per_execution=1, _steps_per_execution=1)
    return SimpleNamespace(
        source=source, model=model, state=SimpleNamespace(pipeline=pipeline),
        first_epoch=2, resume_epoch=5, resume_batches=2,
        validation_data=validation, validation_steps=None, evaluations_before=lambda: 3,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(data=SimpleNamespace(Dataset=Dataset))
    monkeypatch.setitem(sys.modules, "tensorflow", module)


def test_the_datasets_of_a_fit_that_is_not_run_again_have_had_as_many_iterators() -> None:
    train, validation = Dataset(), Dataset()
    Keras3().repeat_fit(session(Source(train), validation))
    assert (train.iterators, validation.iterators) == (6, 6)


def test_an_epoch_whose_end_keras_finds_by_itself_has_had_one_iterator() -> None:
    train, validation = Dataset(), Dataset()
    source = Source(train)
    source.data_adapter.num_batches = None  # TensorFlow does not know it
    Keras3().repeat_fit(session(source, validation))
    assert train.iterators == 3


def test_so_it_is_under_keras_2_whose_fit_has_made_the_first_one_already() -> None:
    train, validation = Dataset(), Dataset()
    adapters: Any = SimpleNamespace(TensorLikeDataAdapter=Source)
    backend = Keras2(SimpleNamespace(data_adapter=adapters))  # type: ignore[arg-type]
    backend.repeat_fit(session(Handler(train), validation))
    assert (train.iterators, validation.iterators) == (3, 6)


class Variable:
    """As a variable that a pipeline captures."""

    def __init__(self) -> None:
        self.value = 0.0

    def numpy(self) -> float:
        return self.value

    def assign(self, value: float) -> None:
        self.value = value


@pytest.mark.parametrize(("batch", "begins_with"), [(0, 0.3), (2, 0.2)])
def test_what_a_callback_sets_for_an_epoch_stays_when_that_epoch_is_resumed_at_its_start(
    batch: int, begins_with: float
) -> None:
    source, strength = Source(Dataset()), Variable()
    pipeline = PipelineState(None, {"first": [0.0], "start": [0.2], "end": [0.5]})
    pipeline.variables = [strength]  # type: ignore[list-item]
    resumed = session(source, Dataset())
    resumed.state.pipeline = pipeline
    resumed.resume_batch, resumed.boundary_reason = batch, None
    pipeline.put_back_start()
    strength.assign(0.3)  # by `on_epoch_begin`
    _repeat_epochs(resumed, source, Source._enumerate_iterator)
    assert strength.value == begins_with


class ShuffleDataset(Dataset):
    """As one that counts its iterators, of two batches each; it goes by its name."""

    _seed, _seed2 = 1, 2

    def __init__(self) -> None:
        super().__init__()
        self.drawn = 0

    def __iter__(self) -> Iterator[int]:
        self.iterators += 1
        for batch in range(2):
            self.drawn += 1
            yield batch


class RepeatDataset(Dataset):
    """As two rounds of a shuffle, or as one without end."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count, self.shuffle = count, ShuffleDataset()

    def __iter__(self) -> Iterator[int]:
        rounds = itertools.count() if self._count == -1 else range(self._count)
        return (batch for _ in rounds for batch in self.shuffle)

    def _inputs(self) -> list[Any]:
        return [self.shuffle]


class Epochs(Source):
    """As the iterator of Keras 3: with `steps_per_epoch` one iterator serves all epochs."""

    iterator: Iterator[int] | None = None

    def _enumerate_iterator(self) -> Iterator[Any]:
        if self.iterator is None or self.steps_per_epoch is None:
            self.iterator = iter(self._dataset)
        for step in range(self.steps_per_epoch or 4):
            yield step, step, self.iterator


@pytest.mark.parametrize(("count", "steps_per_epoch", "drawn"), [(-1, 3, 9), (2, None, 12)])
def test_on_jax_and_pytorch_a_shuffle_before_a_repetition_has_counted_the_epochs_before_a_stop(
    count: int, steps_per_epoch: int | None, drawn: int
) -> None:
    dataset = RepeatDataset(count)
    source = Epochs(dataset, steps_per_epoch)
    resumed = session(source, Dataset())
    resumed.state.pipeline, resumed.resume_batch = PipelineState(None, None), 0
    Keras3AtEpochs("JAX").repeat_epochs(resumed, source, Epochs._enumerate_iterator)
    assert dataset.shuffle.drawn == drawn
    assert dataset.shuffle.iterators == -(-drawn // 2)
