"""What connects several keys of a sweep: each check sees only the parts that are sound so far.

Thus one wrong key does not hide what is wrong elsewhere: all problems are found at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hermes_ops.config.fields import PARAMETER_PATTERN
from hermes_ops.config.files import KeyPath, dotted, printable
from hermes_ops.config.model import MOST_TRIALS
from hermes_ops.config.problems import count, listed, show
from hermes_ops.config.remedies import nearest
from hermes_ops.config.render import left_out, pieces, variable
from hermes_ops.config.sound import SPACE, Sound
from hermes_ops.errors import Problem
from hermes_ops.search.constraint import UnknownNameError
from hermes_ops.search.expression import ConstraintError
from hermes_ops.search.feasible import Feasible, countable, positions, witnesses
from hermes_ops.search.space import Parameter, Space
from hermes_ops.search.tree import brought, canonical, grid_size

Found = Iterator[tuple[KeyPath, Problem]]
CONSTRAINTS: KeyPath = ("search", "constraints")


def connections(sound: Sound) -> Found:
    """Every problem between keys."""
    yield from _metrics(sound)
    yield from _startup(sound)
    yield from _names(sound)
    yield from _constraints(sound)
    yield from _grid(sound)
    yield from _points(sound)
    yield from _variables(sound)
    yield from _command(sound)
    yield from _pod(sound)


def _problem(path: KeyPath, found: str, allowed: str, fix: str) -> tuple[KeyPath, Problem]:
    return path, Problem(dotted(path), found, allowed, fix)


def _metrics(sound: Sound) -> Found:
    objective = sound.get("objective", "metric")
    taken = {objective: "the objective"} if isinstance(objective, str) else {}
    for index, metric in _listed_metrics(sound):
        name = metric.get("name")
        if isinstance(name, str) and name in taken:
            found = f"'{printable(name)}' again, which is {taken[name]}"
            path = ("metrics", index, "name")
            yield _problem(path, found, "each metric once", "remove it, or rename it")
        elif isinstance(name, str):
            taken[name] = f"metrics[{index}]"


def _listed_metrics(sound: Sound) -> Iterator[tuple[int, Mapping[str, Any]]]:
    given = sound.raw("metrics")
    for index, metric in enumerate(given if isinstance(given, list | tuple) else ()):
        if isinstance(metric, Mapping):
            yield index, metric


def _startup(sound: Sound) -> Found:
    startup, most = sound.get("search", "startup_trials"), sound.get("search", "max_trials")
    if startup is not None and most is not None and startup > most:
        path = ("search", "startup_trials")
        yield _problem(path, f"{startup}", f"at most max_trials ({most})", f"write {most} or less")


def _names(sound: Sound) -> Found:
    first: dict[str, KeyPath] = {}
    for parameter in sound.declared:
        other = first.setdefault(parameter.name, parameter.path)
        if other != parameter.path:
            found = f"the name again that {dotted((*SPACE, *other))} has"
            fix = "rename one of them; the command may pass both under one option"
            allowed = "names that stand once in the whole space"
            yield _problem((*SPACE, *parameter.path), found, allowed, fix)


def _constraints(sound: Sound) -> Found:
    for index, constraint in sound.constraints:
        for mistake in constraint.mistakes(sound.parameters):
            yield (*CONSTRAINTS, index), _mistake((*CONSTRAINTS, index), mistake, sound.names)
    feasible = sound.feasible
    if feasible is None or not feasible.constraints or _too_large(sound, feasible):
        return
    if not witnesses(feasible):
        yield _unsatisfied(feasible)


def _mistake(path: KeyPath, mistake: ConstraintError, names: Sequence[str]) -> Problem:
    allowed, fix = mistake.allowed, mistake.fix
    if isinstance(mistake, UnknownNameError):
        meant = nearest(mistake.name, names)
        allowed, fix = listed(names), f"did you mean {meant}?" if meant else fix
    return Problem(dotted(path), printable(mistake.found), allowed, fix)


def _unsatisfied(feasible: Feasible) -> tuple[KeyPath, Problem]:
    """Name the first constraint that nothing satisfies even alone, or all of them together."""
    allowed = "constraints that leave something to try"
    fix = "loosen it, or widen the space"
    for index, constraint in enumerate(feasible.constraints):
        if not witnesses(Feasible(feasible.space, (constraint,))):
            found = "a constraint that no configuration was found to satisfy"
            return _problem((*CONSTRAINTS, index), found, allowed, fix)
    found = "constraints that no configuration was found to satisfy together"
    return _problem(CONSTRAINTS, found, allowed, "loosen one of them, or widen the space")


def _too_large(sound: Sound, feasible: Feasible) -> bool:
    """True for a grid that is not looked through."""
    size = grid_size(feasible.space)
    if sound.get("search", "algorithm") != "grid" or size is None:
        return False
    return size > countable(feasible)


def _grid(sound: Sound) -> Found:
    if sound.get("search", "algorithm") != "grid":
        return
    for parameter in sound.declared:
        axis = sound.parameters[parameter.name]
        if axis is not None and axis.cardinality is None:
            found = f"a continuous range ({axis.describe()}) in a grid"
            fix = "use quantised with a step, or a choice, or another algorithm"
            allowed = "parameters whose values can be counted"
            yield _problem((*SPACE, *parameter.path), found, allowed, fix)
    feasible, most = sound.feasible, sound.get("search", "max_trials")
    if feasible is None or grid_size(feasible.space) is None:
        return
    if feasible.constraints and _too_large(sound, feasible):
        found = f"a grid of {count(grid_size(feasible.space) or 0)} combinations"
        allowed = f"at most {countable(feasible):,} for these constraints to choose from"
        yield _problem(SPACE, found, allowed, "use a coarser grid, or another algorithm")
        return
    size = len(positions(feasible)) if feasible.constraints else grid_size(feasible.space)
    if most is not None and size is not None and size > most:
        found = f"max_trials {most} for a grid of {count(size)} combinations"
        larger = f"write max_trials: {size}, " if size <= MOST_TRIALS else "use "
        fix = f"{larger}a coarser grid, or another algorithm"
        yield _problem(("search", "max_trials"), found, "the whole grid", fix)


def _points(sound: Sound) -> Found:
    points = sound.raw("search", "points_to_evaluate")
    if not isinstance(points, list | tuple):
        return
    most = sound.get("search", "max_trials")
    path: KeyPath = ("search", "points_to_evaluate")
    if most is not None and len(points) > most:
        yield _problem(path, f"{len(points)} points", f"at most max_trials ({most})", "remove some")
    seen: dict[str, int] = {}
    for index, point in enumerate(points):
        here = (*path, index)
        if any(d[: len(here)] == here or here[: len(d)] == d for d in sound.defects):
            continue
        problems = list(_point(here, point, sound))
        yield from problems
        first = seen.setdefault(repr(sorted(point.items())), index)
        if first != index:
            yield _problem(here, f"point {first} again", "each point once", "remove one of them")
        elif not problems and sound.feasible is not None:
            yield from _violations(here, point, sound.feasible)


def _point(here: KeyPath, point: Mapping[str, Any], sound: Sound) -> Found:
    expected, certain = _expected(sound.space, point)
    always = {parameter.name for parameter in sound.declared if not parameter.conditional}
    for name in point:
        if name not in sound.names:
            meant = nearest(name, sound.names)
            fix = f"did you mean {meant}?" if meant else "remove it, or add it to search.space"
            found = "a parameter that is not in the space"
            yield _problem((*here, name), found, listed(sound.names), fix)
        elif certain and name not in {**expected, **dict.fromkeys(always)}:
            found = "a parameter that this configuration does not have"
            fix = "remove it, or change the choice that brings it with it"
            yield _problem((*here, name), found, listed([*expected]), fix)
    for name in dict.fromkeys([*expected, *(n for n in sound.names if n in always)]):
        if name not in point:
            fix = f"add {printable(name)} with the value to try"
            yield _problem((*here, name), "nothing", "a value for every parameter", fix)
        elif name in expected:
            yield from _value((*here, name), expected[name], point[name])


def _value(here: KeyPath, parameter: Parameter, value: object) -> Found:
    try:
        parameter.canonical(value)
    except ValueError as error:
        found = f"{show(value)}, {error}"
        yield _problem(here, found, parameter.describe(), "change the point or widen the space")


def _expected(space: Space, point: Mapping[str, Any]) -> tuple[dict[str, Parameter], bool]:
    """The parameters that a point must name, as far as its choices tell; whether they tell all."""
    expected: dict[str, Parameter] = {}
    certain = True
    for name, parameter in space:
        expected[name] = parameter
        try:
            below = brought(parameter, parameter.canonical(point[name]))
        except (KeyError, ValueError):
            certain = False
            continue
        more, told = _expected(below, point)
        expected |= more
        certain = certain and told
    return expected, certain


def _violations(here: KeyPath, point: Mapping[str, Any], feasible: Feasible) -> Found:
    config = canonical(feasible.space, point)
    for constraint in feasible.constraints:
        if not constraint.holds(config):
            found = "a configuration that the constraints exclude"
            fix = "change the point or the constraint"
            yield _problem(here, found, printable(constraint.source), fix)


def _variables(sound: Sound) -> Found:
    taken: dict[str, str] = {}
    for parameter in sound.declared:
        name = parameter.name
        other = taken.setdefault(variable(name), name)
        if other != name:
            both = f"{printable(name)} and {printable(other)}"
            found = f"{both}, both the environment variable {variable(name)}"
            allowed = "names that differ in more than case and punctuation"
            yield _problem((*SPACE, *parameter.path), found, allowed, "rename one of them")


def _command(sound: Sound) -> Found:
    command = sound.get("trial", "command") or ()
    conditional = {p.name for p in sound.declared if p.conditional}
    for index, argument in enumerate(command):
        path = ("trial", "command", index)
        for piece in pieces(argument):
            if piece.stray:
                fix = "double it ({{ or }}) to mean the brace itself"
                yield _problem(path, f"a single {piece.text} in {show(argument)}", "{name}", fix)
            elif piece.name is not None and sound.names and piece.name not in sound.names:
                fix = _placeholder(piece.name, sound.names)
                allowed = listed(f"{{{name}}}" for name in sound.names)
                yield _problem(path, f"the unknown {{{printable(piece.name)}}}", allowed, fix)
            elif piece.name in conditional and not left_out(command, index):
                found = f"{{{piece.name}}}, which not every configuration has, in {show(argument)}"
                allowed = "--option={name}, --option {name} or key={name}, which can be left out"
                fix = f"write one of them, or read {variable(piece.name)} in the script"
                yield _problem(path, found, allowed, fix)


def _placeholder(name: str, names: Sequence[str]) -> str:
    if meant := nearest(name, names):
        return f"did you mean {{{meant}}}?"
    literal = f"write `{{{{{printable(name)}}}}}` to mean the braces themselves"
    if re.fullmatch(PARAMETER_PATTERN, name):
        return f"add {name} to search.space, or {literal}"
    return literal


def _pod(sound: Sound) -> Found:
    run_in = sound.raw("trial", "run_in") or "process"
    if sound.raw("trial", "pod") is not None and run_in == "process":
        fix = "write trial.run_in: pod, or remove trial.pod"
        yield _problem(("trial", "pod"), "a pod for trials that are processes", "run_in: pod", fix)
