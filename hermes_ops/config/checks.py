"""What connects several keys of a sweep: each check sees only the parts that are sound so far.

Thus one wrong key does not hide what is wrong elsewhere: all problems are found at once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hermes_ops.config.files import KeyPath, dotted, printable
from hermes_ops.config.parameters import ParameterSpec
from hermes_ops.config.problems import listed, nearest, show
from hermes_ops.config.render import pieces, variable
from hermes_ops.errors import Problem
from hermes_ops.search.space import Parameter

_SPEC: TypeAdapter[Any] = TypeAdapter(ParameterSpec)
Found = Iterator[tuple[KeyPath, Problem]]


@dataclass(frozen=True, slots=True)
class Sound:
    """The user's data, seen only where nothing is wrong with it."""

    data: object
    defects: Collection[KeyPath]

    def get(self, *path: str | int) -> Any:  # noqa: ANN401 - data of any shape
        """The value there, None when it is absent or it, a part or its holder is defective."""
        if any(path[: len(d)] == d or d[: len(path)] == path for d in self.defects):
            return None
        return self.raw(*path)

    def raw(self, *path: str | int) -> Any:  # noqa: ANN401 - data of any shape
        """The value there, sound or not; None when absent."""
        value: Any = self.data
        for part in path:
            if not isinstance(value, dict) or part not in value:
                return None
            value = value[part]
        return value

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, those with defects included."""
        space = self.raw("search", "space")
        return tuple(n for n in space if isinstance(n, str)) if isinstance(space, dict) else ()

    @property
    def parameters(self) -> dict[str, Parameter]:
        """The sound parameters by name."""
        found = ((name, self._axis(name)) for name in self.names)
        return {name: axis for name, axis in found if axis is not None}

    def _axis(self, name: str) -> Parameter | None:
        try:
            axis: Parameter = _SPEC.validate_python(self.get("search", "space", name)).to_axis()
        except ValidationError:
            return None
        return axis


def connections(sound: Sound) -> Found:
    """Every problem between keys."""
    yield from _startup(sound)
    yield from _grid(sound)
    yield from _points(sound)
    yield from _variables(sound)
    yield from _command(sound)


def _problem(path: KeyPath, found: str, allowed: str, fix: str) -> tuple[KeyPath, Problem]:
    return path, Problem(dotted(path), found, allowed, fix)


def _startup(sound: Sound) -> Found:
    startup, most = sound.get("search", "startup_trials"), sound.get("search", "max_trials")
    if startup is not None and most is not None and startup > most:
        path = ("search", "startup_trials")
        yield _problem(path, f"{startup}", f"at most max_trials ({most})", f"write {most} or less")


def _grid(sound: Sound) -> Found:
    if sound.get("search", "algorithm") != "grid":
        return
    parameters = sound.parameters
    sizes = [p.cardinality for p in parameters.values()]
    for name, parameter in parameters.items():
        if parameter.cardinality is None:
            path = ("search", "space", name)
            found = f"a continuous range ({parameter.describe()}) in a grid"
            fix = "use quantised with a step, or a choice, or another algorithm"
            yield _problem(path, found, "parameters whose values can be counted", fix)
    most = sound.get("search", "max_trials")
    if most is None or None in sizes or len(sizes) < len(sound.names):
        return
    size = math.prod(s for s in sizes if s is not None)
    if size > most:
        found = f"max_trials {most} for a grid of {show(size)} combinations"
        fix = f"write max_trials: {show(size)}, a coarser grid, or another algorithm"
        yield _problem(("search", "max_trials"), found, "the whole grid", fix)


def _points(sound: Sound) -> Found:
    points = sound.raw("search", "points_to_evaluate")
    if not isinstance(points, list | tuple):
        return
    most = sound.get("search", "max_trials")
    path: KeyPath = ("search", "points_to_evaluate")
    if most is not None and len(points) > most:
        yield _problem(path, f"{len(points)} points", f"at most max_trials ({most})", "remove some")
    parameters = sound.parameters
    seen: dict[str, int] = {}
    for index, point in enumerate(points):
        here = (*path, index)
        if any(d[: len(here)] == here or here[: len(d)] == d for d in sound.defects):
            continue
        yield from _point(here, point, sound.names, parameters)
        first = seen.setdefault(repr(sorted(point.items())), index)
        if first != index:
            yield _problem(here, f"point {first} again", "each point once", "remove one of them")


def _point(
    here: KeyPath, point: dict[str, Any], names: tuple[str, ...], parameters: dict[str, Parameter]
) -> Found:
    for name in point:
        if name not in names:
            meant = nearest(name, names)
            fix = f"did you mean {meant}?" if meant else "remove it, or add it to search.space"
            yield _problem(
                (*here, name), "a parameter that is not in the space", listed(names), fix
            )
    for name in names:
        if name not in point:
            fix = f"add {printable(name)} with the value to try"
            yield _problem((*here, name), "nothing", "a value for every parameter", fix)
        elif name in parameters:
            try:
                parameters[name].canonical(point[name])
            except ValueError as error:
                found = f"{show(point[name])}, {error}"
                fix = "change the point or widen the space"
                yield _problem((*here, name), found, parameters[name].describe(), fix)


def _variables(sound: Sound) -> Found:
    taken: dict[str, str] = {}
    for name in sound.names:
        other = taken.setdefault(variable(name), name)
        if other != name:
            both = f"{printable(name)} and {printable(other)}"
            found = f"{both}, both the environment variable {variable(name)}"
            allowed = "names that differ in more than case and punctuation"
            yield _problem(("search", "space", name), found, allowed, "rename one of them")


def _command(sound: Sound) -> Found:
    command = sound.get("trial", "command")
    names = sound.names
    for index, argument in enumerate(command or ()):
        path = ("trial", "command", index)
        for piece in pieces(argument):
            if piece.stray:
                fix = "double it ({{ or }}) to mean the brace itself"
                yield _problem(path, f"a single {piece.text} in {show(argument)}", "{name}", fix)
            elif piece.name is not None and piece.name not in names:
                meant = nearest(piece.name, names)
                fix = f"did you mean {{{meant}}}?" if meant else "double the braces to mean them"
                allowed = listed(f"{{{name}}}" for name in names)
                yield _problem(path, f"the unknown {{{printable(piece.name)}}}", allowed, fix)
