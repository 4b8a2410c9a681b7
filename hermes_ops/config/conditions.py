"""Conditions between several keys of a sweep file, checked on the model that pydantic has accepted.

Each condition yields all its violations, so that one does not hide another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hermes_ops.config.fields import PARAMETER_PATTERN
from hermes_ops.config.files import KeyPath, dotted, printable
from hermes_ops.config.model import MOST_TRIALS, Algorithm, SweepConfig
from hermes_ops.config.parameters import PlacedParameter, placed_parameters
from hermes_ops.config.pod import RunIn
from hermes_ops.config.problems import (
    SPACE,
    Violation,
    comma_separated,
    count,
    nearest,
    show,
    violation,
)
from hermes_ops.config.render import left_out, pieces, variable
from hermes_ops.config.worker_conditions import batch_violations, worker_violations
from hermes_ops.core.deadline import Deadline
from hermes_ops.errors import ConfigError, Problem
from hermes_ops.search.constraint import Constraint, UnknownNameError
from hermes_ops.search.expression import ConstraintError
from hermes_ops.search.feasible import Feasible, feasible_positions, most_combinations, witnesses
from hermes_ops.search.space import SearchParameter, Space, Value
from hermes_ops.search.tree import active_space, axes, canonical, grid_size

Violations = Iterator[Violation]
CONSTRAINTS: KeyPath = ("search", "constraints")


@dataclass(frozen=True)
class ValidatedView:
    """A valid sweep with the values that the conditions share, each computed once."""

    config: SweepConfig

    @cached_property
    def placed(self) -> tuple[PlacedParameter, ...]:
        """All parameters with their places in the file."""
        return tuple(placed_parameters(self.config.search.space))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters, each once."""
        return tuple(dict.fromkeys(parameter.name for parameter in self.placed))

    @cached_property
    def space(self) -> Space:
        """The search space, without its constraints."""
        return self.config.search.to_space()

    @cached_property
    def parameters(self) -> dict[str, SearchParameter]:
        """The search parameters by name."""
        return dict(axes(self.space))

    @cached_property
    def constraints(self) -> tuple[Constraint, ...]:
        """The constraints in the order of the file."""
        return self.config.search.to_feasible().constraints

    @cached_property
    def feasible(self) -> Feasible | None:
        """The space with its constraints; None if a name stands twice or a constraint is wrong."""
        if len(self.placed) != len(self.names):
            return None
        if any(next(c.mistakes(self.parameters), None) for c in self.constraints):
            return None
        return Feasible(self.space, self.constraints)

    @property
    def is_grid(self) -> bool:
        """Return True if the search goes through the whole space."""
        return self.config.search.algorithm is Algorithm.GRID


def violations(config: SweepConfig) -> Violations:
    """Yield every violated condition between keys, with the path at which it is reported."""
    view = ValidatedView(config)
    yield from _metrics(config)
    yield from _startup(config)
    yield from _deadline(config)
    yield from _names(view)
    yield from _constraints(view)
    yield from _grid(view)
    yield from _points(view)
    yield from _variables(view)
    yield from _command(view)
    yield from _pod(config)
    yield from worker_violations(config.trial)
    yield from batch_violations(config, view.placed, view.parameters)


def _metrics(config: SweepConfig) -> Violations:
    taken = {config.objective.metric: "the objective"}
    for index, metric in enumerate(config.metrics):
        if metric.name in taken:
            found = f"'{printable(metric.name)}' again, which is {taken[metric.name]}"
            path = ("metrics", index, "name")
            yield violation(path, found, "each metric once", "remove it, or rename it")
        else:
            taken[metric.name] = f"metrics[{index}]"


def _startup(config: SweepConfig) -> Violations:
    startup, most = config.search.startup_trials, config.search.max_trials
    if startup > most:
        path = ("search", "startup_trials")
        yield violation(path, f"{startup}", f"at most max_trials ({most})", f"write {most} or less")


def _deadline(config: SweepConfig) -> Violations:
    if config.deadline is None or config.schedule is None:
        return
    if Deadline.from_text(config.deadline).time_s is not None:
        allowed = "a duration, as a sweep with a schedule is run many times"
        yield violation(("deadline",), show(config.deadline), allowed, "write for example 8h")


def refuse_passed_deadline(config: SweepConfig, now_s: float, source: str) -> None:
    """Raise ConfigError for a sweep that is to begin after its deadline."""
    at_s = config.deadline_at_s(now_s)
    if at_s is not None and at_s <= now_s:
        found = f"{config.deadline}, which has passed"
        fix = "write a later time, or a duration such as 8h"
        raise ConfigError(source, (Problem("deadline", found, "a time to come", fix),))


def _names(view: ValidatedView) -> Violations:
    first: dict[str, KeyPath] = {}
    for parameter in view.placed:
        other = first.setdefault(parameter.name, parameter.path)
        if other != parameter.path:
            found = f"the name again that {dotted((*SPACE, *other))} has"
            fix = "rename one of them; the command may pass both under one option"
            allowed = "names that stand once in the whole space"
            yield violation((*SPACE, *parameter.path), found, allowed, fix)


def _constraints(view: ValidatedView) -> Violations:
    for index, constraint in enumerate(view.constraints):
        for mistake in constraint.mistakes(view.parameters):
            yield (*CONSTRAINTS, index), _mistake((*CONSTRAINTS, index), mistake, view.names)
    feasible = view.feasible
    if feasible is None or not feasible.constraints or _too_large(view, feasible):
        return
    if not witnesses(feasible):
        yield _unsatisfied_problem(feasible)


def _mistake(path: KeyPath, mistake: ConstraintError, names: Sequence[str]) -> Problem:
    allowed, fix = mistake.allowed, mistake.fix
    if isinstance(mistake, UnknownNameError):
        meant = nearest(mistake.name, names)
        allowed, fix = comma_separated(names), f"did you mean {meant}?" if meant else fix
    return Problem(dotted(path), printable(mistake.found), allowed, fix)


def _unsatisfied_problem(feasible: Feasible) -> tuple[KeyPath, Problem]:
    """Name the first constraint that nothing satisfies even alone, or all of them together."""
    allowed = "constraints that leave something to try"
    fix = "loosen it, or widen the space"
    for index, constraint in enumerate(feasible.constraints):
        if not witnesses(Feasible(feasible.space, (constraint,))):
            found = "a constraint that no configuration was found to satisfy"
            return violation((*CONSTRAINTS, index), found, allowed, fix)
    found = "constraints that no configuration was found to satisfy together"
    return violation(CONSTRAINTS, found, allowed, "loosen one of them, or widen the space")


def _too_large(view: ValidatedView, feasible: Feasible) -> bool:
    """Return True for a grid with more combinations than are enumerated."""
    size = grid_size(feasible.space)
    return view.is_grid and size is not None and size > most_combinations(feasible)


def _grid(view: ValidatedView) -> Violations:
    if not view.is_grid:
        return
    for parameter in view.placed:
        axis = view.parameters[parameter.name]
        if axis.cardinality is None:
            found = f"a continuous range ({axis.describe()}) in a grid"
            fix = "use quantised with a step, or a choice, or another algorithm"
            allowed = "parameters whose values can be counted"
            yield violation((*SPACE, *parameter.path), found, allowed, fix)
    feasible, most = view.feasible, view.config.search.max_trials
    size = None if feasible is None else grid_size(feasible.space)
    if feasible is None or size is None:
        return
    if feasible.constraints and _too_large(view, feasible):
        found = f"a grid of {count(size)} combinations"
        allowed = f"at most {most_combinations(feasible):,} for these constraints to choose from"
        yield violation(SPACE, found, allowed, "use a coarser grid, or another algorithm")
        return
    if feasible.constraints:
        size = len(feasible_positions(feasible))
    if size > most:
        found = f"max_trials {most} for a grid of {count(size)} combinations"
        larger = f"write max_trials: {size}, " if size <= MOST_TRIALS else "use "
        fix = f"{larger}a coarser grid, or another algorithm"
        yield violation(("search", "max_trials"), found, "the whole grid", fix)


def _points(view: ValidatedView) -> Violations:
    points, most = view.config.search.points_to_evaluate, view.config.search.max_trials
    path: KeyPath = ("search", "points_to_evaluate")
    if len(points) > most:
        yield violation(
            path, f"{len(points)} points", f"at most max_trials ({most})", "remove some"
        )
    seen: dict[str, int] = {}
    for index, point in enumerate(points):
        here = (*path, index)
        problems = list(_point(here, point, view))
        yield from problems
        # 2 and 2.0 may be one value of a parameter: a grid would count both, and try one less.
        resolved = point if problems else canonical(view.space, point)
        first = seen.setdefault(repr(sorted(resolved.items())), index)
        if first != index:
            yield violation(here, f"point {first} again", "each point once", "remove one of them")
        elif not problems and view.feasible is not None:
            yield from _constraint_violations(here, point, view.feasible)


def _point(here: KeyPath, point: Mapping[str, Value], view: ValidatedView) -> Violations:
    expected, is_certain = _expected_parameters(view.space, point)
    always = [parameter.name for parameter in view.placed if not parameter.is_conditional]
    for name in point:
        if name not in view.names:
            meant = nearest(name, view.names)
            fix = f"did you mean {meant}?" if meant else "remove it, or add it to search.space"
            found = "a parameter that is not in the space"
            yield violation((*here, name), found, comma_separated(view.names), fix)
        elif is_certain and name not in {*expected, *always}:
            found = "a parameter that this configuration does not have"
            fix = "remove it, or change the choice that brings it with it"
            yield violation((*here, name), found, comma_separated([*expected]), fix)
    for name in dict.fromkeys([*expected, *always]):
        if name not in point:
            fix = f"add {printable(name)} with the value to try"
            yield violation((*here, name), "nothing", "a value for every parameter", fix)
        elif name in expected:
            yield from _value((*here, name), expected[name], point[name])


def _value(here: KeyPath, parameter: SearchParameter, value: object) -> Violations:
    try:
        parameter.canonical(value)
    except ValueError as error:
        found = f"{show(value)}, {error}"
        yield violation(here, found, parameter.describe(), "change the point or widen the space")


def _expected_parameters(
    space: Space, point: Mapping[str, Value]
) -> tuple[dict[str, SearchParameter], bool]:
    """Return the parameters that a point must name, as far as its choices tell; whether all do."""
    expected: dict[str, SearchParameter] = {}
    is_certain = True
    for name, parameter in space:
        expected[name] = parameter
        try:
            below = active_space(parameter, parameter.canonical(point[name]))
        except (KeyError, ValueError):
            is_certain = False
            continue
        conditional, is_below_certain = _expected_parameters(below, point)
        expected |= conditional
        is_certain = is_certain and is_below_certain
    return expected, is_certain


def _constraint_violations(
    here: KeyPath, point: Mapping[str, Value], feasible: Feasible
) -> Violations:
    config = canonical(feasible.space, point)
    for constraint in feasible.constraints:
        if not constraint.holds(config):
            found = "a configuration that the constraints exclude"
            fix = "change the point or the constraint"
            yield violation(here, found, printable(constraint.source), fix)


def _variables(view: ValidatedView) -> Violations:
    taken: dict[str, str] = {}
    for parameter in view.placed:
        name = parameter.name
        other = taken.setdefault(variable(name), name)
        if other != name:
            both = f"{printable(name)} and {printable(other)}"
            found = f"{both}, both the environment variable {variable(name)}"
            allowed = "names that differ in more than case and punctuation"
            yield violation((*SPACE, *parameter.path), found, allowed, "rename one of them")


def _command(view: ValidatedView) -> Violations:
    command = view.config.trial.command
    conditional = {p.name for p in view.placed if p.is_conditional}
    for index, argument in enumerate(command):
        path = ("trial", "command", index)
        for piece in pieces(argument):
            if piece.stray:
                fix = "double it ({{ or }}) to mean the brace itself"
                yield violation(path, f"a single {piece.text} in {show(argument)}", "{name}", fix)
            elif piece.name is not None and piece.name not in view.names:
                fix = _placeholder(piece.name, view.names)
                allowed = comma_separated(f"{{{name}}}" for name in view.names)
                yield violation(path, f"the unknown {{{printable(piece.name)}}}", allowed, fix)
            elif piece.name in conditional and not left_out(command, index):
                found = f"{{{piece.name}}}, which not every configuration has, in {show(argument)}"
                allowed = "--option={name}, --option {name} or key={name}, which can be left out"
                fix = f"write one of them, or read {variable(piece.name)} in the script"
                yield violation(path, found, allowed, fix)


def _placeholder(name: str, names: Sequence[str]) -> str:
    if meant := nearest(name, names):
        return f"did you mean {{{meant}}}?"
    if name.startswith("env:"):  # everybody on the machine can read a command line
        return f"put {{{printable(name)}}} into trial.environment, and read it in the script"
    literal = f"write `{{{{{printable(name)}}}}}` to mean the braces themselves"
    if re.fullmatch(PARAMETER_PATTERN, name):
        return f"add {name} to search.space, or {literal}"
    return literal


def _pod(config: SweepConfig) -> Violations:
    if config.trial.pod is not None and config.trial.run_in is RunIn.PROCESS:
        fix = "write trial.run_in: pod, or remove trial.pod"
        yield violation(("trial", "pod"), "a pod for trials that are processes", "run_in: pod", fix)
