"""Which tf.data pipelines can be resumed in mid-epoch, with stand-ins for TensorFlow's objects."""

from __future__ import annotations

import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.trial.keras.pipeline import ALL, draws_to_count, why_not_repeatable


class Dataset:
    """As a part of a pipeline; `nodes` are those of the function that it calls."""

    def __init__(self, *nodes: Any, deterministic: str = "default") -> None:
        self._deterministic = deterministic
        inner = SimpleNamespace(node_def=nodes)
        graph = SimpleNamespace(node=[], library=SimpleNamespace(function=[inner]))
        self._called = SimpleNamespace(graph=SimpleNamespace(as_graph_def=lambda: graph))

    def options(self) -> Any:
        return SimpleNamespace(deterministic=None)

    def _inputs(self) -> list[Any]:
        return []

    def _functions(self) -> list[Any]:
        return [SimpleNamespace(function=self._called)]


def node(name: str, op: str, *inputs: str, value: int | None = None) -> Any:
    attributes: dict[str, Any] = defaultdict(lambda: SimpleNamespace(i=0))
    if value is not None:
        attributes["value"] = SimpleNamespace(tensor=SimpleNamespace(int64_val=[value]))
    return SimpleNamespace(name=name, op=op, input=inputs, attr=attributes)


def shuffled(seed: int, seed2: Any) -> Dataset:
    """As `files.interleave(lambda path: TFRecordDataset(path).shuffle(100, seed))`."""
    inputs = ("records", "size", "seed:output:0", "seed2:output:0", "generator")
    constant = node("seed", "Const", value=seed)
    return Dataset(constant, seed2, node("shuffle", "ShuffleDatasetV3", *inputs))


@pytest.fixture(autouse=True)
def _tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(data=SimpleNamespace(Dataset=Dataset))
    monkeypatch.setitem(sys.modules, "tensorflow", module)


def test_an_unseeded_shuffle_within_an_interleave_keeps_no_order() -> None:
    reason = why_not_repeatable(shuffled(0, node("seed2", "Const", value=0)))
    assert reason == (
        "a shuffle within its tf.data pipeline has no seed (set one, or tf.random.set_seed)"
    )


def test_a_seeded_shuffle_within_an_interleave_keeps_its_order() -> None:
    assert why_not_repeatable(shuffled(0, node("seed2", "SelectV2"))) is None
    assert why_not_repeatable(shuffled(7, node("seed2", "Const", value=0))) is None


def test_a_map_that_may_change_the_order_keeps_none() -> None:
    reason = why_not_repeatable(Dataset(deterministic="false"))
    assert reason == "its tf.data pipeline is not deterministic (deterministic=False)"
    assert why_not_repeatable(Dataset(deterministic="true")) is None


def test_a_random_operation_without_a_seed_keeps_no_order() -> None:
    random = node("uniform", "RandomUniform")
    reason = why_not_repeatable(Dataset(random))
    assert reason == "a random operation in its tf.data pipeline has no seed"
    random.attr["seed"] = SimpleNamespace(i=3)
    assert why_not_repeatable(Dataset(random)) is None


class Stage(Dataset):
    """A part of a pipeline with what it is made of."""

    def __init__(self, *inputs: Dataset, count: int = 1) -> None:
        super().__init__()
        self._below, self._count = list(inputs), count

    def _inputs(self) -> list[Any]:
        return self._below


class BatchDataset(Stage):
    pass


class RepeatDataset(Stage):
    pass


class ConcatenateDataset(Stage):
    pass


class ShuffleDataset(Stage):
    def __init__(self, *inputs: Dataset, reshuffles: bool = True) -> None:
        super().__init__(*inputs)
        self._seed, self._seed2, self._reshuffle_each_iteration = 1, 2, reshuffles


def test_as_many_batches_are_drawn_as_it_takes_until_all_shuffles_count_an_epoch() -> None:
    files = ShuffleDataset(Stage())
    once = ShuffleDataset(Stage(), reshuffles=False)
    assert draws_to_count(BatchDataset(BatchDataset(files))) == 0
    assert draws_to_count(BatchDataset(ShuffleDataset(BatchDataset(files)))) == 1
    assert draws_to_count(ShuffleDataset(once)) == 0
    assert draws_to_count(RepeatDataset(files, count=2)) == ALL
    assert draws_to_count(RepeatDataset(files)) == 0
    assert draws_to_count(ShuffleDataset(RepeatDataset(Stage(), count=2))) == 0
    assert draws_to_count(BatchDataset(ConcatenateDataset(Stage(), files))) == ALL
    assert draws_to_count([1, 2]) == 0
