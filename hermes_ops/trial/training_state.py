"""Everything that a running `fit` can change, read and put back as one."""
# ruff: noqa: ANN401 - the objects of TensorFlow and Keras have no types here

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hermes_ops.trial import state
from hermes_ops.trial.captures import captured_by, concrete_functions, pipeline_functions
from hermes_ops.trial.data import PipelineState, is_pipeline
from hermes_ops.trial.python_state import Reachable, reachable


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
        self._found = Reachable({}, {})
        self.look()

    def look(self) -> None:
        """Look for objects again: more may have come."""
        self._found = reachable(self._roots, lambda thing: state.as_variable(thing) is not None)

    def variables(self, step: Any) -> dict[str, Any]:
        """Every variable by its key, but those of the pipeline, which runs ahead.

        `step` is the traced training step, None if there is none.
        """
        found = state.variables(self._model)
        seen = {state.identity(variable) for variable in found.values()}
        captured = captured_by(concrete_functions(step))
        groups = {
            "g": {str(number): variable for number, variable in enumerate(captured)},
            "p": {k: state.as_variable(v) for k, v in self._found.variables.items()},
        }
        for group, members in groups.items():
            for name, variable in members.items():
                if state.identity(variable) not in seen:
                    seen.add(state.identity(variable))
                    found[f"{group}/{name}"] = variable
        pipeline = {state.identity(variable) for variable in self.pipeline.variables}
        return {k: v for k, v in found.items() if state.identity(v) not in pipeline}

    def shares_with_pipeline(self) -> bool:
        """Whether the model uses variables that the pipeline of its data changes too."""
        pipeline = {state.identity(variable) for variable in self.pipeline.variables}
        if not pipeline:
            return False
        used = {k: v for k, v in state.variables(self._model).items() if "/global/" not in k}
        return any(state.identity(variable) in pipeline for variable in used.values())

    def read_objects(self) -> dict[str, Any]:
        """The state of objects that are no variables."""
        return {"random": state.read_random(), "python": self._found.read()}

    def failures(self) -> list[str]:
        """Return what of the user's own objects could not be kept, each with the reason."""
        failed, ways = self._found.failed, sorted(self._found.failed)
        return [f"{way}: {failed[way]}" for way in ways]

    def write_objects(self, objects: Mapping[str, Any]) -> None:
        """Put the state of objects back."""
        self._found.write(objects.get("python") or {})
        state.write_random(objects["random"])


def _inputs(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The data of `fit` as far as they can hold state: pipelines and the user's own objects."""
    for name in ("x", "validation_data"):
        value = arguments.get(name)
        if is_pipeline(value):
            for number, wrapper in enumerate(pipeline_functions(value)):
                yield f"{name}/{number}", getattr(wrapper, "_func", None)
        elif not hasattr(value, "shape"):
            yield name, value
