"""State that TensorFlow graphs capture: variables that neither Keras nor the model lists.

A function that is traced, for a training step or for a tf.data pipeline, holds every variable that
it uses as a resource handle, whoever made the variable: a seed generator of a layer in `map`, a
counter in a closure. The handle is enough to read and to assign it.
"""
# ruff: noqa: ANN401 - the objects of TensorFlow have no types here

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


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
    found: dict[int, CapturedVariable] = {}
    for function in functions:
        for tensor in getattr(function, "captured_inputs", ()):
            variable = _variable(tensor)
            if variable is not None:
                found.setdefault(id(tensor), variable)
    return list(found.values())


def _variable(tensor: Any) -> CapturedVariable | None:
    import tensorflow as tf

    if getattr(tensor, "dtype", None) != tf.resource or not hasattr(tensor, "numpy"):
        return None
    data = getattr(tensor, "_handle_data", None)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None  # a table, an iterator
    known = data.shape_and_type[0]
    shape = tf.TensorShape(known.shape)
    if not shape.is_fully_defined():
        return None
    return CapturedVariable(tensor, tf.as_dtype(known.dtype), shape)


def concrete_functions(function: Any) -> list[Any]:
    """Return the traces of a tf.function; none of what is not traced."""
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
