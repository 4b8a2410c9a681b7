"""Everything that a running `fit` can change, read and put back as one."""
# ruff: noqa: ANN401 - the objects of TensorFlow and Keras have no types here

from __future__ import annotations

import collections
import contextlib
import copy
import enum
import math
import pickle
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hermes_ops.trial.keras.callback_files import counters
from hermes_ops.trial.keras.pipeline import (
    PipelineState,
    captured_by,
    concrete_functions,
    is_pipeline,
    pipeline_functions,
)
from hermes_ops.trial.keras.python_state import (
    ReachableState,
    digest,
    is_plain,
    is_small,
    reachable,
    refill,
)


class TrainingState:
    """The state of a model, of what its training reaches, and of the pipeline of its data.

    What Keras lists comes first; then what the traced step captures; then what the user's own
    objects hold.
    """

    def __init__(
        self,
        model: Any,
        callbacks: list[Any],
        inputs: Mapping[str, Any],
        dataset: Any,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        self._model = model
        self._roots = [("model", model)]
        self._roots += [(f"callback/{number}", one) for number, one in enumerate(callbacks)]
        self._roots += list(_inputs(inputs))
        self.pipeline = PipelineState(dataset, saved)
        self._found = ReachableState({}, {})
        self.find_objects()

    def find_objects(self) -> None:
        """Find the objects that can be reached now: there may be more than before."""
        self._found = reachable(self._roots, lambda thing: as_variable(thing) is not None)

    def variables(self, step: Any) -> dict[str, Any]:
        """Return every variable by its key, but those of the pipeline, which runs ahead.

        `step` is the traced training step, None if there is none.
        """
        by_key = model_variables(self._model)
        seen = {identity(variable) for variable in by_key.values()}
        captured = captured_by(concrete_functions(step))
        groups = {
            "g": {str(number): variable for number, variable in enumerate(captured)},
            "p": {k: as_variable(v) for k, v in self._found.variables.items()},
        }
        for group, members in groups.items():
            for name, variable in members.items():
                if identity(variable) not in seen:
                    seen.add(identity(variable))
                    by_key[f"{group}/{name}"] = variable
        pipeline = {identity(variable) for variable in self.pipeline.variables}
        return {k: v for k, v in by_key.items() if identity(v) not in pipeline}

    def shares_with_pipeline(self) -> bool:
        """Tell whether the model uses variables that the pipeline of its data changes too."""
        pipeline = {identity(variable) for variable in self.pipeline.variables}
        if not pipeline:
            return False
        used = {k: v for k, v in model_variables(self._model).items() if "/global/" not in k}
        return any(identity(variable) in pipeline for variable in used.values())

    def read_objects(self) -> dict[str, Any]:
        """Return the state of objects that are no variables."""
        return {"random": read_random(), "python": self._found.read()}

    def failures(self) -> list[str]:
        """Return what of the user's own objects could not be kept, each with the reason."""
        failed, ways = self._found.failed, sorted(self._found.failed)
        return [f"{way}: {failed[way]}" for way in ways]

    def write_objects(self, objects: Mapping[str, Any]) -> None:
        """Put the state of objects back."""
        self._found.write(objects.get("python") or {})
        if objects.get("random") is not None:  # else this process goes on with its own
            write_random(objects["random"])


def _inputs(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the data of `fit` that can hold state: pipelines and the user's own objects."""
    for name in ("x", "validation_data"):
        value = arguments.get(name)
        if is_pipeline(value):
            for number, wrapper in enumerate(pipeline_functions(value)):
                yield f"{name}/{number}", getattr(wrapper, "_func", None)
        elif not hasattr(value, "shape"):
            yield name, value


# -- variables, random numbers and callbacks, by name ---------------------------------------------

_NOT_STATE = {"model", "_model", "params", "validation_data", "_chief_worker_only"}
_STATELESS_CALLBACKS = {"ProgbarLogger", "BackupAndRestore"}
_OF_THE_PROCESS = {"CSVLogger": {"append", "append_header"}}


class MismatchError(RuntimeError):
    """The checkpoint does not fit the model that the script has built."""


def model_variables(model: Any) -> dict[str, Any]:
    """Return every variable of the model's training, by a key that is the same in each run.

    The lists that Keras itself keeps come first ("k/..."); then whatever else can be reached from
    the model and its optimizer ("t/..."), such as variables of custom layers and training steps.
    """
    by_key: dict[str, Any] = {}
    seen: set[int] = set()
    for group, members in _listed(model):
        for number, member in enumerate(members):
            _add(by_key, seen, f"k/{group}/{number}", member)
    for path, thing in _reachable(model):
        _add(by_key, seen, f"t/{path}", thing)
    return by_key


def _add(by_key: dict[str, Any], seen: set[int], key: str, thing: Any) -> None:
    variable = as_variable(thing)
    if variable is not None and identity(variable) not in seen:
        seen.add(identity(variable))
        by_key[key] = variable


def identity(variable: Any) -> int:
    """Return what tells variables apart: the same for a variable and what captures its handle."""
    try:
        return id(getattr(variable, "handle", variable))
    except ValueError:  # a variable of several replicas
        return id(variable)


def as_variable(thing: Any) -> Any:
    """Return what reads and assigns a variable of TensorFlow or Keras; None for anything else."""
    tf = sys.modules.get("tensorflow")
    if tf is not None:
        for candidate in (getattr(thing, "_value", None), thing):
            if isinstance(candidate, tf.Variable):
                return candidate
    module = sys.modules.get("keras.src.backend.common.variables")
    kind = getattr(module, "KerasVariable", None) or getattr(module, "Variable", None)
    return thing if kind is not None and isinstance(thing, kind) else None


def _listed(model: Any) -> Iterator[tuple[str, list[Any]]]:
    with contextlib.suppress(ValueError):  # Keras 2: it is not built yet
        yield "model", list(getattr(model, "variables", ()) or ())
    optimizer = getattr(model, "optimizer", None)
    for name in ("variables", "weights"):
        yield f"optimizer.{name}", _as_list(getattr(optimizer, name, None))
    yield "metrics", [v for m in getattr(model, "metrics", ()) for v in _as_list(m.variables)]
    layers = list(model._flatten_layers()) if hasattr(model, "_flatten_layers") else []
    generators = [getattr(layer, "_random_generator", None) for layer in layers]
    inner: list[Any] = [getattr(g, "_generator", None) for g in generators]
    yield "random", [g._state_var for g in inner if hasattr(g, "_state_var")]
    counters = [getattr(model, f"_{name}_counter", None) for name in ("train", "test", "predict")]
    yield "counter", [counter for counter in counters if counter is not None]
    yield "global", list(_global_generators())


def _as_list(value: Any) -> list[Any]:
    if callable(value) and not isinstance(value, (list, tuple)):
        value = value()
    return list(value) if value is not None else []


def _global_generators() -> Iterator[Any]:
    keras_state = sys.modules.get("keras.src.backend.common.global_state")
    if keras_state is not None:
        generator = keras_state.get_global_attribute("global_seed_generator")
        if generator is not None:
            yield generator.state
    ops = sys.modules.get("tensorflow.python.ops.stateful_random_ops")
    generator = getattr(ops, "global_generator", None)
    if generator is not None:
        yield generator._state_var


def _reachable(model: Any) -> Iterator[tuple[str, Any]]:
    """Walk the trackable objects, breadth first."""
    queue = collections.deque([("model", model), ("optimizer", getattr(model, "optimizer", None))])
    seen: set[int] = set()
    while queue:
        path, thing = queue.popleft()
        if thing is None or id(thing) in seen:
            continue
        seen.add(id(thing))
        yield path, thing
        children = getattr(thing, "_trackable_children", None)
        if children is not None:
            queue.extend((f"{path}/{name}", child) for name, child in children().items())


def tensor_skew(model: Any) -> float | None:
    """Return the largest tensor's share of all trainable weights, from 0 to 1; None without any.

    Source: Tiresias (NSDI 2019), section 3.3: the skew by which it places jobs of several GPUs.
    """
    try:
        weights = list(model.trainable_weights)
    except ValueError:  # Keras 2: it is not built yet
        return None
    sizes = [math.prod(int(n) for n in weight.shape) for weight in weights]
    return max(sizes) / sum(sizes) if sum(sizes) else None


def read_variables(by_key: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the variables' values, as arrays that later training does not change."""
    import numpy as np

    values = []
    for key, variable in by_key.items():
        value = variable.numpy()
        if isinstance(value, np.ndarray) or np.isscalar(value) or hasattr(value, "dtype"):
            array = np.ascontiguousarray(value)
            if array.dtype != object:
                values.append((key, array.reshape(np.shape(value))))
    return values


def assign_variables(by_key: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Put values back. MismatchError if what Keras lists is not what was saved."""
    for key, value in values.items():
        variable: Any = by_key.get(key)
        fits = variable is not None and tuple(variable.shape) == tuple(value.shape)
        if fits:
            variable.assign(value)
        elif key.startswith(("k/model/", "k/optimizer")):
            was = "absent" if variable is None else f"of shape {tuple(variable.shape)}"
            raise MismatchError(
                f"the checkpoint holds {key} with shape {tuple(value.shape)}, in the script's "
                f"model it is {was}: has the script changed since the trial began?"
            )


def may_differ_by_rank(key: str, variable: Any) -> bool:
    """Tell whether ranks that train one model may have different values of a variable.

    Weights and the optimizer's variables follow from gradients that all have in common.
    """
    return not key.startswith("k/optimizer") and not getattr(variable, "trainable", False)


def make_array(data: bytes, dtype: str, shape: Any) -> Any:
    """Make an array of its bytes, also of the types that TensorFlow and JAX add (bfloat16)."""
    import numpy as np

    try:
        kind = np.dtype(dtype)
    except TypeError:
        if "tensorflow" in sys.modules:
            kind = sys.modules["tensorflow"].as_dtype(dtype).as_numpy_dtype
        else:
            import ml_dtypes

            kind = np.dtype(getattr(ml_dtypes, dtype))
    return np.frombuffer(data, dtype=kind).reshape(shape)


def read_random() -> dict[str, Any]:
    """Return the state of the global random numbers of Python, NumPy, TensorFlow and PyTorch."""
    import numpy as np

    state = {"python": random.getstate(), "numpy": np.random.get_state()}
    for name, generator in _python_generators():
        state[name] = generator.getstate()
    torch = sys.modules.get("torch")
    if torch is not None:
        state["torch"] = torch.get_rng_state().numpy()
        if torch.cuda.is_initialized():
            state["torch.cuda"] = [one.numpy() for one in torch.cuda.get_rng_state_all()]
    return state


def write_random(state: Mapping[str, Any]) -> None:
    """Put the random numbers back."""
    import numpy as np

    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    for name, generator in _python_generators():
        if name in state:
            generator.setstate(state[name])
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in state:
        torch.set_rng_state(torch.from_numpy(state["torch"]))
        if "torch.cuda" in state:
            torch.cuda.set_rng_state_all([torch.from_numpy(one) for one in state["torch.cuda"]])


def _python_generators() -> Iterator[tuple[str, random.Random]]:
    if "tensorflow" in sys.modules:
        from tensorflow.python.eager import context

        generator = getattr(context.context(), "_rng", None)
        if isinstance(generator, random.Random):
            yield "tensorflow", generator
    for module in ("keras.src.backend", "tf_keras.src.backend"):
        holder = getattr(sys.modules.get(module), "_SEED_GENERATOR", None)
        generator = getattr(holder, "generator", None)
        if isinstance(generator, random.Random):
            yield module, generator


@dataclass(frozen=True)
class FunctionName:
    """The module and name of a function or of a member of an enumeration, as a pickle of its own.

    A resumed script may define it only after the checkpoint is read.
    """

    data: bytes

    def resolve(self) -> Any:
        """Return the object of that name; None if there is none."""
        try:
            return pickle.loads(self.data)  # noqa: S301 - ours
        except Exception:  # whatever a foreign module may raise
            return None


def given_data(callback: Any) -> dict[str, str]:
    """Return digests of the attributes that a script gives to a callback at each start.

    These are large data, such as validation data, and texts, which may be paths that contain the
    time.
    """
    return {
        name: digest(value)
        for name, value in vars(callback).items()
        if name not in _NOT_STATE
        and (isinstance(value, str) or (is_plain(value) and not is_small(value)))
    }


def read_callback(callback: Any, given: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a callback's state: its attributes that are plain data.

    Attributes that have not changed since `given`, a result of `given_data`, are left out.
    """
    if type(callback).__name__ in _STATELESS_CALLBACKS:
        return {}
    if type(callback).__name__ == "TensorBoard":
        return counters(callback)
    without = _NOT_STATE | _OF_THE_PROCESS.get(type(callback).__name__, set())
    state = {}
    for name, value in vars(callback).items():
        is_given = given is not None and name in given and given[name] == digest(value)
        if name not in without and not is_given:
            kept = value if is_plain(value) else known_by_name(value)
            if kept is not None or value is None:
                state[name] = kept
    if type(callback).__name__ == "History":
        state["history"] = plain_history(callback.history)
    return state


def plain_history(history: Mapping[str, Any]) -> dict[str, Any]:
    """Return the series of a fit's history as plain data: callbacks may have added tensors.

    A value that cannot be converted, such as an object of the user's, becomes None.
    """
    return {
        name: [_plain(value) for value in series] if isinstance(series, list) else _plain(series)
        for name, series in history.items()
    }


def _plain(value: Any) -> Any:
    if is_plain(value):
        return value
    try:
        array = value.numpy() if hasattr(value, "numpy") else value.__array__()
        return array if is_plain(array) else None
    except Exception:  # whatever a foreign object may raise
        return None


def write_callback(callback: Any, state: Mapping[str, Any]) -> None:
    """Put a callback's attributes back; lists and the like in place, as others may hold them."""
    for name, value in state.items():
        fresh = copy.deepcopy(value) if is_small(value) else value  # it may be put back again
        if isinstance(value, FunctionName):
            fresh = value.resolve() or vars(callback).get(name)
        if not refill(vars(callback).get(name), fresh):
            setattr(callback, name, fresh)


def known_by_name(value: Any) -> FunctionName | None:
    """Return the name of a function (a monitor's np.less) or enumeration member; else None."""
    is_function = type(value).__name__ in ("function", "builtin_function_or_method", "ufunc")
    if not is_function and not isinstance(value, enum.Enum):
        return None
    try:
        named = FunctionName(pickle.dumps(value))
    except Exception:  # whatever a foreign object may raise
        return None
    return named if named.resolve() is value else None
