"""Repeat the order of a script's data: what can be repeated, and seeded shuffling."""
# ruff: noqa: ANN401 - the objects of TensorFlow have no types here

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_PYTHON_OPS = {"PyFunc", "EagerPyFunc", "PyFuncStateless"}
_RANDOM_OPS = {
    "RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "RandomShuffle",
    "Multinomial", "RandomGamma", "RandomPoissonV2", "ParameterizedTruncatedNormal",
    "SampleDistortedBoundingBoxV2", "RandomCrop",
}  # fmt: skip
_SEED_INPUTS = {
    "ShuffleDataset": 2, "ShuffleDatasetV3": 2, "ShuffleAndRepeatDataset": 2,
    "ShuffleAndRepeatDatasetV2": 2, "RandomDataset": 0, "RandomDatasetV2": 0,
}  # fmt: skip
"""Position of the seeds among the inputs of a dataset that a function creates (`interleave`)."""


def seeded() -> bool:
    """Tell whether the script has set TensorFlow's global seed."""
    from tensorflow.python.eager import context

    return context.global_seed() is not None


def why_not_repeatable(dataset: Any) -> str | None:
    """Return why a tf.data pipeline cannot resume in mid-epoch; None if it can."""
    import tensorflow as tf

    if not isinstance(dataset, tf.data.Dataset):
        return "its distributed dataset keeps no position"
    if dataset.options().deterministic is False:
        return "its tf.data pipeline is not deterministic (options.deterministic is False)"
    return next(filter(None, map(_why_not, parts(dataset))), None)


def _why_not(part: Any) -> str | None:
    if _draws_by_seed(part) and _zero(part._seed, part._seed2):
        what = "shuffle" if "Shuffle" in type(part).__name__ else "random source"
        return f"its tf.data {what} has no seed (set one, or tf.random.set_seed)"
    if getattr(part, "_deterministic", "") == "false":
        return "its tf.data pipeline is not deterministic (deterministic=False)"
    functions = [wrapper.function for wrapper in part._functions()]
    operations = [operation for function in functions for operation in _operations(function)]
    if any(op in _PYTHON_OPS for op, _ in operations):
        return "Python code in its tf.data pipeline keeps no position"
    unseeded = {op for op, seeds in operations if not any(seeds)}
    if unseeded & _SEED_INPUTS.keys():
        return "a shuffle within its tf.data pipeline has no seed (set one, or tf.random.set_seed)"
    if unseeded & _RANDOM_OPS:
        return "a random operation in its tf.data pipeline has no seed"
    return None


def _draws_by_seed(part: Any) -> bool:
    return hasattr(part, "_seed") and hasattr(part, "_seed2")


def why_no_two_runs_are_alike(dataset: Any, validation: Any, endless: bool) -> str | None:
    """Return why a pipeline's random numbers depend on timing; None if they do not.

    `endless`: one iterator serves several epochs, so it has run ahead when a validation begins.
    """
    for part in parts(dataset) if is_pipeline(dataset) else ():
        functions = [wrapper.function for wrapper in part._functions()]
        if "ParallelMap" in type(part).__name__ and captured_by(functions):
            return "a parallel map in its tf.data pipeline changes variables in any order"
    if endless and is_pipeline(dataset) and is_pipeline(validation):
        shared = {id(v.handle) for v in pipeline_variables(dataset)} & {
            id(v.handle) for v in pipeline_variables(validation)
        }
        if shared:
            return "its training and its validation data change the same variables"
    return None


def is_pipeline(dataset: Any) -> bool:
    """Tell whether this is a tf.data pipeline that can be looked into."""
    return hasattr(dataset, "_functions") and hasattr(dataset, "_inputs")


def is_repeatable(dataset: Any) -> bool:
    """Tell whether this is a tf.data pipeline whose order another process can repeat."""
    return is_pipeline(dataset) and why_not_repeatable(dataset) is None


def caches_random_data(dataset: Any) -> bool:
    """Tell whether a pipeline keeps in memory what it has shuffled or drawn in its first epoch."""
    return any(
        type(part).__name__ == "CacheDataset"
        and not part._filename.numpy()
        and any(map(_is_random, parts(part)))
        for part in parts(dataset)
    )


def _is_random(part: Any) -> bool:
    functions = [wrapper.function for wrapper in part._functions()]
    return (
        _draws_by_seed(part)
        or bool(captured_by(functions))
        or any(op in _RANDOM_OPS for function in functions for op, _ in _operations(function))
    )


ALL = sys.maxsize
"""More batches than an epoch has."""


def draws_to_count(dataset: Any) -> int:
    """Return how many batches of an epoch have to be drawn for every shuffle to count that epoch.

    A shuffle counts the iterators that are made of it. Most are made with the iterator of the whole
    pipeline: 0. But a shuffle makes that of its input for its first element: 1; a repetition makes
    one for each round, and a concatenation that of its second part after the first: all.
    """
    most = 0
    for part in parts(dataset) if is_pipeline(dataset) else ():
        kind = type(part).__name__
        if any(_counts(below) for one in part._inputs() for below in parts(one)):
            if "Concatenate" in kind or ("Repeat" in kind and int(part._count) != 1):
                return ALL
            most = max(most, int("Shuffle" in kind))
    return most


def _counts(part: Any) -> bool:
    return _draws_by_seed(part) and getattr(part, "_reshuffle_each_iteration", True) is not False


def batch_size_of(dataset: Any) -> int | None:
    """Return the size of the batches that a pipeline makes last; None if it makes none itself."""
    for part in parts(dataset) if is_pipeline(dataset) else ():
        if "Batch" in type(part).__name__ and hasattr(part, "_batch_size"):
            return int(part._batch_size)
    return None


class PipelineState:
    """The variables of a tf.data pipeline: seed generators of layers, counters, tables of numbers.

    A pipeline runs ahead of the training, so in mid-epoch they say nothing of the batch that is
    trained. What counts is what they were when the iterator was made: from there on the batches
    are drawn again.
    """

    def __init__(self, dataset: Any, saved: Mapping[str, Any] | None) -> None:
        is_dataset = is_pipeline(dataset)
        self.variables: list[CapturedVariable] = pipeline_variables(dataset) if is_dataset else []
        self.has_random_cache = is_dataset and caches_random_data(dataset)
        self._first: list[Any] | None = saved["first"] if saved else None
        self._start: list[Any] = saved["start"] if saved else []
        self._end: list[Any] = saved["end"] if saved else []
        self.one_iterator = False  # it serves several epochs

    def mark_iterator(self) -> None:
        """Note the values: an iterator is about to be made."""
        self._start = self.values()
        if self._first is None:
            self._first = self._start

    def saved(self, in_epoch: bool) -> dict[str, Any]:
        """Return the values at the first iterator, at the one to continue with, and now."""
        in_use = in_epoch or self.one_iterator
        now = self.values()
        return {"first": self._first, "start": self._start if in_use else now, "end": now}

    def put_back_first(self) -> None:
        """Set the values that the fit's first iterator began with."""
        self.put_back(self._first or [])

    def put_back_start(self) -> None:
        """Set the values that the iterator of the epoch began with."""
        self.put_back(self._start)

    def put_back_end(self) -> None:
        """Set the values that the fit left, where it is complete and not run again."""
        self.put_back(self._end)

    def values(self) -> list[Any]:
        """Return the present values of the variables."""
        return [variable.numpy() for variable in self.variables]

    def put_back(self, values: list[Any]) -> None:
        """Set the variables to a result of `values`."""
        for variable, value in zip(self.variables, values):  # noqa: B905 - Python 3.9
            variable.assign(value)


def keeps_hidden_random_state(function: Any) -> bool:
    """Tell whether a traced function draws random numbers whose state only its kernels hold."""
    traces: list[Any] = getattr(function, "_list_all_concrete_functions", list)()
    return any(op in _RANDOM_OPS for trace in traces for op, _ in _operations(trace))


def _zero(*seeds: Any) -> bool:
    return all(int(seed) == 0 for seed in seeds)


def _operations(function: Any) -> Iterator[tuple[str, tuple[int, int]]]:
    definition = function.graph.as_graph_def()
    inner = [one.node_def for one in definition.library.function]
    for nodes in (definition.node, *inner):
        by_name = {node.name: node for node in nodes}
        for node in nodes:
            yield node.op, _seeds(node, by_name)


def _seeds(node: Any, by_name: Mapping[str, Any]) -> tuple[int, int]:
    at = _SEED_INPUTS.get(node.op)
    if at is None:
        return node.attr["seed"].i, node.attr["seed2"].i
    first, second = (_constant(by_name.get(name.split(":")[0])) for name in node.input[at : at + 2])
    return first, second


def _constant(node: Any) -> int:
    """Return the value of a constant node of a graph; 1 for a computed one: it counts as a seed."""
    if node is None or node.op != "Const":
        return 1
    return sum(node.attr["value"].tensor.int64_val)


class Permutations:
    """Replace tf.random.shuffle where a script has set no seed.

    The n-th permutation of a fit follows from the trial's own seed and n, so a resumed fit can go
    on with the n-th. Statistically nothing changes.
    """

    def __init__(self, seed: int, first: int) -> None:
        import tensorflow as tf

        self._seed = seed
        self._drawn = tf.Variable(first, dtype=tf.int64, trainable=False)

    def begin_after(self, number: int) -> None:
        """Go on as if `number` permutations had been drawn."""
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


# -- variables that TensorFlow graphs capture -----------------------------------------------------
# A traced function, of a training step or of a tf.data pipeline, holds every variable that it uses
# as a resource handle, also those that neither Keras nor the model lists: a seed generator of a
# layer in `map`, a counter in a closure. The handle is enough to read and to assign it.


class CapturedVariable:
    """A variable that is known by its handle alone."""

    def __init__(self, handle: Any, dtype: Any, shape: Any) -> None:
        self.handle = handle
        self.shape = shape
        self._dtype = dtype

    def numpy(self) -> Any:
        """Return the value as an array."""
        import tensorflow as tf

        return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self._dtype).numpy()

    def assign(self, value: Any) -> None:
        """Set the value."""
        import tensorflow as tf

        tensor = tf.convert_to_tensor(value, dtype=self._dtype)
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=tensor)


def captured_by(functions: Iterable[Any]) -> list[CapturedVariable]:
    """Return the variables that concrete functions capture, in the order of their captures."""
    by_tensor: dict[int, CapturedVariable] = {}
    for function in functions:
        for tensor in getattr(function, "captured_inputs", ()):
            variable = _variable(tensor)
            if variable is not None:
                by_tensor.setdefault(id(tensor), variable)
    return list(by_tensor.values())


def _variable(tensor: Any) -> CapturedVariable | None:
    import tensorflow as tf

    if getattr(tensor, "dtype", None) != tf.resource or not hasattr(tensor, "numpy"):
        return None
    data = getattr(tensor, "_handle_data", None)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None  # a table, an iterator
    described = data.shape_and_type[0]
    shape = tf.TensorShape(described.shape)
    if not shape.is_fully_defined():
        return None
    return CapturedVariable(tensor, tf.as_dtype(described.dtype), shape)


def concrete_functions(function: Any) -> list[Any]:
    """Return the traces of a tf.function; empty for any other function."""
    list_all = getattr(function, "_list_all_concrete_functions", None)
    return list(list_all()) if list_all is not None else []


def parts(dataset: Any) -> Iterator[Any]:
    """Yield a tf.data pipeline's datasets, from its end to its sources, each once."""
    queue, seen = [dataset], set()
    while queue:
        part = queue.pop(0)
        if id(part) not in seen:
            seen.add(id(part))
            yield part
            queue.extend(part._inputs())


def pipeline_functions(dataset: Any) -> list[Any]:
    """Return the wrappers of the functions that a pipeline calls."""
    return [wrapper for part in parts(dataset) for wrapper in part._functions()]


def pipeline_variables(dataset: Any) -> list[CapturedVariable]:
    """Return the variables that a pipeline reads or changes."""
    return captured_by(wrapper.function for wrapper in pipeline_functions(dataset))
