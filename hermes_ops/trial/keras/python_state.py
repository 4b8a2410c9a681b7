"""State in plain Python objects that a training can reach and change while it runs.

Random generators, lookup tables and variables that a callback, a loss or a function of the data
pipeline holds; lists and numbers in their closures and globals; attributes of the user's own
objects. The way to each is its key, so that another run of the same script finds the same one.
"""
# ruff: noqa: ANN401 - any object may be met

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import hashlib
import io
import os
import pickle
import random
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hermes_ops.trial.keras.callback_files import put_back, read_entry

_MOST_OBJECTS = 50_000
_MOST_MEMBERS = 256
_LIBRARY = tuple(
    os.path.join(sysconfig.get_paths()[name], "")
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_OURS = os.path.join(os.path.abspath(os.path.join(__file__, *[os.pardir] * 3)), "")  # hermes_ops
_KERAS = ("keras", "tf_keras")
_FRAMEWORKS = (*_KERAS, "tensorflow")
_GENERATORS = "tensorflow.python.ops.stateful_random_ops"
_NOT_ENTERED = {
    "_tracker", "_inbound_nodes", "_outbound_nodes", "_operations", "_operations_by_depth",
    "_operations_by_name", "_nodes", "_nodes_by_depth", "_auto_config", "_lock", "_jax_state",
    "_self_unconditional_checkpoint_dependencies", "_obj_reference_counts_dict",
    "train_function", "test_function", "predict_function", "history", "params",
}  # fmt: skip
_STREAMS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.FileIO)
_TABLES = ("MutableHashTable", "DenseHashTable")
_NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")
_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)


@dataclass(frozen=True)
class StateHandler:
    """How the state of one kind of object is read and put back."""

    read: Callable[[], Any]
    write: Callable[[Any], None]


@dataclass(frozen=True)
class ReachableState:
    """The reachable state: variables by key, and other data with a way to read and write it."""

    variables: Mapping[str, Any]
    others: Mapping[str, StateHandler]
    failed: dict[str, str] = field(default_factory=dict)  # what could not be kept, and why

    def read(self) -> dict[str, Any]:
        """Return the state of everything but the variables; what cannot be read is left out."""
        state = {}
        for key, handler in self.others.items():
            try:
                value = handler.read()
            except Exception as error:  # an object of the user's may raise anything
                self.failed[key] = repr(error)
                continue
            if value is not None:
                state[key] = value
        return state

    def write(self, state: Mapping[str, Any]) -> None:
        """Put the state back where the same key leads to an object."""
        for key, value in state.items():
            if key in self.others:
                try:
                    self.others[key].write(copy.deepcopy(value))  # it may be put back again
                except Exception as error:  # an object of the user's may raise anything
                    self.failed[key] = repr(error)


def reachable(
    roots: Iterable[tuple[str, Any]], is_variable: Callable[[Any], bool]
) -> ReachableState:
    """Walk from the roots, breadth first; each object is found once, by the shortest way."""
    variables: dict[str, Any] = {}
    others: dict[str, StateHandler] = {}
    assigned: set[str] = set()  # the attributes that the user's functions set
    queue = collections.deque(roots)
    seen: dict[int, Any] = {}  # the objects too: an id means nothing once its object is gone
    while queue and len(seen) < _MOST_OBJECTS:
        key, thing = queue.popleft()
        if id(thing) in seen or thing is None or isinstance(thing, (bool, int, float, str, bytes)):
            continue
        seen[id(thing)] = thing
        if is_variable(thing):
            variables[key] = thing
            continue
        handler = _handler(thing)
        if handler is not None:
            others[key] = handler
            continue
        others.update(_own_state(key, thing, assigned))
        queue.extend((f"{key}/{name}", child) for name, child in _children(thing))
    return ReachableState(variables, others)


def _handler(thing: Any) -> StateHandler | None:
    """Return how to keep an object whose state is hidden in it, such as a random generator."""
    kind = type(thing)
    if isinstance(thing, _STREAMS):
        return _file_handler(thing)
    if isinstance(thing, random.Random):
        return StateHandler(thing.getstate, thing.setstate)
    make = _HANDLERS.get(f"{kind.__module__}.{kind.__name__}")
    if make is None and kind.__name__ in _TABLES and hasattr(thing, "export"):
        make = _table_handler
    return make(thing) if make is not None else None


def _table_handler(table: Any) -> StateHandler:
    return StateHandler(
        lambda: [t.numpy() for t in table.export()], functools.partial(_fill, table)
    )


def _numpy_handler(generator: Any) -> StateHandler:
    bits = generator.bit_generator
    return StateHandler(lambda: bits.state, lambda state: setattr(bits, "state", state))


def _torch_handler(generator: Any) -> StateHandler:
    return StateHandler(
        lambda: generator.get_state().numpy(), functools.partial(_set_torch, generator)
    )


_HANDLERS: Mapping[str, Callable[[Any], StateHandler]] = {
    "numpy.random.mtrand.RandomState": lambda state: StateHandler(state.get_state, state.set_state),
    "numpy.random._generator.Generator": _numpy_handler,
    "torch._C.Generator": _torch_handler,
}


def _file_handler(stream: Any) -> StateHandler | None:
    """Return how to keep a file that is open for writing, such as a log."""
    path = getattr(stream, "name", None)
    if (
        not isinstance(path, str)
        or not os.path.isfile(path)
        or getattr(stream, "mode", "") in ("r", "rb")
    ):
        return None

    def read() -> Any:
        with contextlib.suppress(ValueError):  # it is closed
            stream.flush()
        return read_entry(path)

    def write(entry: Any) -> None:
        with contextlib.suppress(ValueError):
            stream.flush()
        put_back(path, entry)
        with contextlib.suppress(ValueError):
            stream.seek(0, os.SEEK_END)

    return StateHandler(read, write)


def _set_torch(generator: Any, state: Any) -> None:
    import torch  # only where the script has it

    generator.set_state(torch.from_numpy(state))


def _fill(table: Any, state: Any) -> None:
    import tensorflow as tf

    keys, values = (
        tf.constant(array, dtype)
        for array, dtype in zip(state, (table.key_dtype, table.value_dtype))  # noqa: B905 - 3.9
    )
    table.remove(table.export()[0])
    table.insert(keys, values)


# -- plain data that the user's code can change --------------------------------------------------


def _own_state(key: str, thing: Any, assigned: set[str]) -> Iterator[tuple[str, StateHandler]]:
    """Yield the plain data that belongs to an object: a function's, or an object's attributes.

    `assigned` gets the names of attributes that a function sets, unless it is `__init__`.
    """
    if isinstance(thing, types.FunctionType) and is_users(thing):
        code = thing.__code__
        if code.co_name != "__init__":
            assigned.update(_attributes(code))
        for name, cell in zip(code.co_freevars, thing.__closure__ or ()):  # noqa: B905 - 3.9
            yield (
                f"{key}<{name}>",
                StateHandler(
                    functools.partial(_read_cell, cell, name in _nonlocals(code)),
                    functools.partial(_write_cell, cell),
                ),
            )
        values = thing.__globals__
        for name in sorted(_names(code)):
            if name in values and not name.startswith("__"):
                yield (
                    f"{key}:{name}",
                    StateHandler(
                        functools.partial(_read_global, values, name, name in _stored(code)),
                        functools.partial(_write_global, values, name),
                    ),
                )
    elif (_is_users_instance(thing) and not _kept_by_session(key)) or _is_namespace(thing):
        yield (
            f"{key}.",
            StateHandler(
                functools.partial(_read_plain, thing, assigned),
                functools.partial(_write_plain, thing),
            ),
        )


def _is_namespace(thing: Any) -> bool:
    """Tell whether an object is one in whose attributes scripts keep data: `args.best = loss`."""
    if isinstance(thing, type):
        return _is_users_class(thing)
    if isinstance(thing, types.ModuleType):
        return _is_users_path(getattr(thing, "__file__", None) or "<frozen")
    return f"{type(thing).__module__}.{type(thing).__name__}" in _NAMESPACES


def _kept_by_session(key: str) -> bool:
    """Tell whether the attributes are those of a callback of `fit`, which are kept with it."""
    return key.startswith("callback/") and key.count("/") == 1


def _read_cell(cell: Any, stored: bool) -> Any:
    try:
        value = cell.cell_contents
    except ValueError:  # it is empty yet
        return None
    return _kept(value) if stored or isinstance(value, _CONTAINERS) else None


def _write_cell(cell: Any, value: Any) -> None:
    try:
        present = cell.cell_contents
    except ValueError:
        present = None
    if not refill(present, value):
        cell.cell_contents = value


def _read_global(values: Mapping[str, Any], name: str, stored: bool) -> Any:
    value = values.get(name)
    return _kept(value) if stored or isinstance(value, _CONTAINERS) else None


def _write_global(values: dict[str, Any], name: str, value: Any) -> None:
    if not refill(values.get(name), value):
        values[name] = value


def _read_plain(thing: Any, assigned: Iterable[str]) -> Any:
    """Return the attributes that the user's own classes, or functions, have given an object."""
    names = set() if _is_of_framework(type(thing)) else set(assigned)
    if _is_namespace(thing):
        names.update(name for name, value in vars(thing).items() if isinstance(value, _CONTAINERS))
    for _, method in _methods(type(thing)):
        names.update(_attributes(method.__code__))
    items = ((k, _untracked(v)) for k, v in vars(thing).items() if k in names and k[:2] != "__")
    return {k: v for k, v in items if is_plain(v) and is_small(v)}


def _is_of_framework(kind: type) -> bool:
    """Tell whether a framework manages the attributes of a class's objects."""
    return any(base.__module__.split(".")[0] in _FRAMEWORKS for base in kind.__mro__)


def _untracked(value: Any, depth: int = 6) -> Any:
    """Return a plain copy of a list, dictionary or set that Keras has wrapped to track it."""
    base = next((kind for kind in (list, dict, set) if isinstance(value, kind)), None)
    is_tracked = type(value).__module__.split(".")[0] in _FRAMEWORKS
    if base is None or not is_tracked or depth == 0 or len(value) > _MOST_ITEMS:
        return value
    if base is dict:
        return {k: _untracked(v, depth - 1) for k, v in value.items()}
    return base(_untracked(member, depth - 1) for member in value)


def _write_plain(thing: Any, state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        if not refill(vars(thing).get(name), value):
            setattr(thing, name, value)


def _kept(value: Any) -> Any:
    return value if is_plain(value) and is_small(value) else None


def refill(present: Any, value: Any) -> bool:
    """Change a container in place, as other objects may refer to it; False if it is not one."""
    if not isinstance(present, type(value)) or not isinstance(value, _CONTAINERS):
        return False
    if present is not value:
        present.clear()
        present.extend(value) if hasattr(present, "extend") else present.update(value)
    return True


# -- the ways from one object to the next --------------------------------------------------------


def _children(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, types.FunctionType):
        yield from _of_function(thing)
    elif isinstance(thing, types.MethodType):
        yield from (("self", thing.__self__), (thing.__func__.__name__, thing.__func__))
    elif isinstance(thing, functools.partial):
        yield from (("func", thing.func), ("args", thing.args), ("keywords", thing.keywords))
    elif isinstance(thing, (list, tuple, collections.deque)):
        members = thing if len(thing) <= _MOST_MEMBERS else ()
        yield from ((str(number), member) for number, member in enumerate(members))
    elif isinstance(thing, dict):
        items = thing.items() if len(thing) <= _MOST_MEMBERS else ()
        yield from ((str(name), member) for name, member in items)
    elif isinstance(thing, type):
        yield from _methods(thing)
    elif not isinstance(thing, types.ModuleType):
        yield from _of_instance(thing)


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    if hasattr(function, "__wrapped__"):
        yield "wrapped", function.__wrapped__
    for number, cell in enumerate(function.__closure__ or ()):
        try:
            yield function.__code__.co_freevars[number], cell.cell_contents
        except ValueError:
            continue
    if not is_users(function):
        return
    yield "defaults", function.__defaults__
    values = function.__globals__
    yield from ((n, values[n]) for n in sorted(_names(function.__code__)) if n in values)


def _of_instance(thing: Any) -> Iterator[tuple[str, Any]]:
    kind = type(thing)
    if hasattr(kind, "python_function"):  # a tf.function
        yield "python_function", thing.python_function
        return
    users = _is_users_instance(thing)
    entered = kind.__module__.split(".")[0] in _KERAS or kind.__module__ == _GENERATORS
    if not users and not entered:  # TensorFlow's graphs are endless
        return
    attributes = list(getattr(thing, "__dict__", {}).items())
    yield from ((name, value) for name, value in attributes if name not in _NOT_ENTERED)
    if users:
        yield from (("class", kind), *_methods(kind))


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    for base in filter(_is_users_class, kind.__mro__):
        for name, value in sorted(vars(base).items()):
            function = getattr(value, "__func__", value)  # of a class or static method
            if isinstance(function, types.FunctionType):
                yield name, function


def _is_users_instance(thing: Any) -> bool:
    return hasattr(thing, "__dict__") and _is_users_class(type(thing))


def _is_users_class(kind: type) -> bool:
    if kind.__module__.split(".")[0] in (*_FRAMEWORKS, "builtins"):
        return False
    module = sys.modules.get(kind.__module__)
    path = getattr(module, "__file__", None)
    return module is not None and path is not None and _is_users_path(path)


def _is_users_path(path: str) -> bool:
    installed = path.startswith((*_LIBRARY, _OURS, "<frozen")) or "-packages/" in path
    return not installed


def is_users(function: types.FunctionType) -> bool:
    """Return whether a function comes from the user's files, not from an installed package."""
    return _is_users_path(function.__code__.co_filename)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    return frozenset(name for part in _codes(code) for name in part.co_names)


@functools.lru_cache(maxsize=4096)
def _stored(code: types.CodeType) -> frozenset[str]:
    """Return the globals that a function assigns to (`global count; count += 1`)."""
    return _arguments_of(code, "STORE_GLOBAL")


@functools.lru_cache(maxsize=4096)
def _nonlocals(code: types.CodeType) -> frozenset[str]:
    """Return the variables of enclosing functions that a function assigns to."""
    return _arguments_of(code, "STORE_DEREF")


@functools.lru_cache(maxsize=4096)
def _attributes(code: types.CodeType) -> frozenset[str]:
    """Return the attributes that a function assigns to."""
    return _arguments_of(code, "STORE_ATTR")


def _arguments_of(code: types.CodeType, operation: str) -> frozenset[str]:
    import dis

    return frozenset(
        str(step.argval)
        for part in _codes(code)
        for step in dis.get_instructions(part)
        if step.opname == operation
    )


# -- plain data: what can be written down and put back without knowing any class ------------------

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_MOST_ITEMS = 100_000
_MOST_BYTES = 2 << 20  # a larger array is data; an order of samples may be longer
_MOST_INDEX_BYTES = 16 << 20


def is_plain(value: Any, depth: int = 6) -> bool:
    """Tell whether a value is plain data: numbers, text, arrays and containers of them."""
    if isinstance(value, _PLAIN):
        return True
    if depth == 0:
        return False
    kind = type(value)
    if kind.__module__ == "numpy":
        return not getattr(value, "dtype", None) == object  # noqa: SIM201, E721
    if kind in (list, tuple, set, frozenset, collections.deque):
        return all(is_plain(item, depth - 1) for item in value)
    if kind in (dict, collections.OrderedDict, collections.defaultdict, collections.Counter):
        return all(is_plain(k) and is_plain(v, depth - 1) for k, v in value.items())
    return False


def is_small(value: Any) -> bool:
    """Tell whether plain data are little enough to be kept with every checkpoint."""
    left = _MOST_ITEMS
    queue = [value]
    while queue:
        item = queue.pop()
        left -= 1
        size = getattr(item, "nbytes", None)
        if size is not None:
            is_index = getattr(item.dtype, "kind", "") in "iu"
            if size > (_MOST_INDEX_BYTES if is_index else _MOST_BYTES):
                return False
        elif isinstance(item, dict):
            queue.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset, collections.deque)):
            if len(item) > left:
                return False
            queue.extend(item)
        if left < 0:
            return False
    return True


def digest(value: Any) -> str:
    """Return a short hash of a value of any size; an object that cannot be pickled: of its type."""
    try:
        data = pickle.dumps(value, protocol=4)
    except Exception:  # whatever a foreign object may raise
        data = repr(type(value)).encode()
    return hashlib.blake2b(data, digest_size=8).hexdigest()
