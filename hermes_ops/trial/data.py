"""Whether the order of a script's data can be repeated, and how shuffling is made repeatable."""
# ruff: noqa: ANN401 - the objects of TensorFlow have no types here

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_PYTHON_OPS = {"PyFunc", "EagerPyFunc", "PyFuncStateless"}
_RANDOM_OPS = {
    "RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "RandomShuffle",
    "Multinomial", "RandomGamma", "RandomPoissonV2", "ParameterizedTruncatedNormal",
    "SampleDistortedBoundingBoxV2", "RandomCrop",
}  # fmt: skip


def seeded() -> bool:
    """Whether the script has set TensorFlow's global seed."""
    from tensorflow.python.eager import context

    return context.global_seed() is not None


def why_not_repeatable(dataset: Any) -> str | None:
    """Why a tf.data pipeline cannot be brought back to a place in mid-epoch; None if it can."""
    import tensorflow as tf

    if not isinstance(dataset, tf.data.Dataset):
        return "its distributed dataset keeps no position"
    if dataset.options().deterministic is False:
        return "its tf.data pipeline is not deterministic (options.deterministic is False)"
    queue, seen = [dataset], set()
    while queue:
        part = queue.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        reason = _why_not(part)
        if reason is not None:
            return reason
        queue.extend(part._inputs())
    return None


def _why_not(part: Any) -> str | None:
    if type(part).__name__.startswith("_ShuffleDataset") and _zero(part._seed, part._seed2):
        return "its tf.data shuffle has no seed (set one, or tf.random.set_seed)"
    for wrapper in part._functions():
        for op, seeds in _operations(wrapper.function):
            if op in _PYTHON_OPS:
                return "Python code in its tf.data pipeline keeps no position"
            if op in _RANDOM_OPS and not any(seeds):
                return "a random operation in its tf.data pipeline has no seed"
    return None


def keeps_hidden_random_state(function: Any) -> bool:
    """Whether a traced function draws random numbers whose state only its kernels hold."""
    traces: list[Any] = getattr(function, "_list_all_concrete_functions", list)()
    return any(op in _RANDOM_OPS for trace in traces for op, _ in _operations(trace))


def _zero(*seeds: Any) -> bool:
    return all(int(seed) == 0 for seed in seeds)


def _operations(function: Any) -> Iterator[tuple[str, tuple[int, int]]]:
    definition = function.graph.as_graph_def()
    nodes = list(definition.node)
    for inner in definition.library.function:
        nodes.extend(inner.node_def)
    for node in nodes:
        yield node.op, (node.attr["seed"].i, node.attr["seed2"].i)


class Permutations:
    """Takes the place of tf.random.shuffle where a script has set no seed.

    The n-th permutation of a fit follows from the trial's own seed and n, so a resumed fit can go
    on with the n-th. Statistically nothing changes.
    """

    def __init__(self, seed: int, first: int) -> None:
        import tensorflow as tf

        self._seed = seed
        self._drawn = tf.Variable(first, dtype=tf.int64, trainable=False)

    def begin_after(self, number: int) -> None:
        """Go on as if so many permutations had been drawn."""
        self._drawn.assign(number)

    def shuffle(self, value: Any, seed: Any = None, name: Any = None) -> Any:  # noqa: ARG002
        """Return the next permutation of `value`."""
        import tensorflow as tf

        number = tf.identity(self._drawn.assign_add(1))
        seeds = tf.stack([tf.constant(self._seed, tf.int64), number])
        return tf.random.experimental.stateless_shuffle(value, seed=seeds)

    @contextlib.contextmanager
    def in_place(self, tf: Any) -> Iterator[None]:
        """While a dataset is built by a module's `tf`, let that shuffle by these permutations."""
        original = tf.random.shuffle
        tf.random.shuffle = self.shuffle
        try:
            yield
        finally:
            tf.random.shuffle = original
