"""Constraints between parameters: their validation against a space, and their evaluation."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hermes_ops.search.expression import (
    FUNCTIONS,
    LARGEST,
    ConstraintError,
    Literal,
    Node,
    Operation,
    ParameterReference,
    parse,
    walk,
)
from hermes_ops.search.space import ChoiceParameter, SearchParameter, Value

Kinds = frozenset[str]
NUMBER, TRUTH, TEXT, NULL = (frozenset([k]) for k in ("number", "truth value", "text", "null"))
ANY = NUMBER | TRUTH | TEXT | NULL
LOGIC = ("and", "or", "not")
EQUALITY = ("==", "!=")
ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": math.pow,  # of floats: no number of a million digits on the way
    "min": min,
    "max": max,
    "abs": abs,
    "log": math.log,
    "+": lambda left, right=None: left if right is None else left + right,
    "-": lambda left, right=None: -left if right is None else left - right,
}


class _UndefinedError(Exception):
    """An expression is undefined: 1 / 0, a text in arithmetic, a result beyond 1e300."""


class UnknownNameError(ConstraintError):
    """A constraint names a parameter that does not exist."""

    def __init__(self, node: ParameterReference) -> None:
        self.name = node.name
        found = f"the unknown {node.name!r} at character {node.at}"
        super().__init__(found, "name a parameter; texts stand in quotes", "parameters' names")


@dataclass(frozen=True, slots=True)
class Constraint:
    """A condition that a configuration must satisfy.

    `names`: the parameters in it. `size`: the number of its words and operations.
    """

    source: str
    tree: Node = field(repr=False, compare=False)
    names: frozenset[str] = field(repr=False, compare=False)
    size: int = field(repr=False, compare=False)

    @classmethod
    def parse(cls, source: str) -> Constraint:
        """Parse the text of a constraint; ConstraintError when it is not of the language."""
        nodes = list(walk(tree := parse(source)))
        names = frozenset(node.name for node in nodes if isinstance(node, ParameterReference))
        return cls(source, tree, names, len(nodes))

    def holds(self, config: Mapping[str, Value]) -> bool:
        """Return True if it is satisfied, or if a parameter in it is not active.

        An undefined expression (a division by zero, the logarithm of a negative number, a text in
        arithmetic, a result beyond 1e300) is not satisfied. `and` and `or` stop at the side that
        decides, so `n == 0 or 8 / n > 2` is safe.
        """
        if not self.names <= config.keys():
            return True
        try:
            return _value(self.tree, config) is True
        except (_UndefinedError, ArithmeticError, ValueError):
            return False

    def mistakes(
        self, parameters: Mapping[str, SearchParameter | None]
    ) -> Iterator[ConstraintError]:
        """Yield the errors of this constraint for these parameters (None: an unknown parameter)."""
        checker = _Checker(parameters)
        kinds = checker.kinds(self.tree)
        yield from checker.errors
        if not checker.errors and not kinds & TRUTH:
            found, fix = f"a {_listed(kinds)} as the whole", "compare it with something"
            yield ConstraintError(found, fix, "something that is true or false")


def _kind(value: Value) -> Kinds:
    if value is None:
        return NULL
    if isinstance(value, bool):
        return TRUTH
    return TEXT if isinstance(value, str) else NUMBER


def _value(node: Node, config: Mapping[str, Value]) -> Value:
    if isinstance(node, Literal):
        return node.value
    if isinstance(node, ParameterReference):
        return config[node.name]
    if node.sign in LOGIC:
        return _logic(node, config)
    values = [_value(operand, config) for operand in node.operands]
    if node.sign in EQUALITY:
        left, right = values
        return (_kind(left) == _kind(right) and left == right) is (node.sign == "==")
    if any(_kind(value) != NUMBER for value in values):
        raise _UndefinedError
    if node.sign in ORDER:
        return ORDER[node.sign](*values)
    result: float = ARITHMETIC[node.sign](*values)
    if not abs(result) <= LARGEST:
        raise _UndefinedError
    return result


def _logic(node: Operation, config: Mapping[str, Value]) -> bool:
    last = node.sign == "or"  # the value at which the rest no longer matters
    for operand in node.operands:
        value = _value(operand, config)
        if not isinstance(value, bool):
            raise _UndefinedError
        if node.sign == "not":
            return not value
        if value is last:
            return last
    return not last


class _Checker:
    """Type-check a tree: unknown names, and operands that can never be of the right kind."""

    def __init__(self, parameters: Mapping[str, SearchParameter | None]) -> None:
        self._parameters = parameters
        self.errors: list[ConstraintError] = []

    def kinds(self, node: Node) -> Kinds:
        """Return the kinds of value that a node may have; ANY after an error."""
        if isinstance(node, Literal):
            return _kind(node.value)
        if isinstance(node, ParameterReference):
            return self._name(node)
        kinds = [self.kinds(operand) for operand in node.operands]
        if node.sign in EQUALITY:
            self._equality(node, *kinds)
            return TRUTH
        wanted = TRUTH if node.sign in LOGIC else NUMBER
        for operand, possible in zip(node.operands, kinds, strict=True):
            if not possible & wanted:
                found = f"a {_listed(possible)} at character {operand.at}"
                allowed = f"a {_listed(wanted)} beside {node.sign}"
                if node.sign in FUNCTIONS:
                    allowed = f"a {_listed(wanted)} in {node.sign}()"
                self._note(found, "correct that side", allowed)
        return NUMBER if node.sign in ARITHMETIC else TRUTH

    def _note(self, found: str, fix: str, allowed: str) -> None:
        self.errors.append(ConstraintError(found, fix, allowed))

    def _name(self, node: ParameterReference) -> Kinds:
        if node.name not in self._parameters:
            self.errors.append(UnknownNameError(node))
        parameter = self._parameters.get(node.name)
        if parameter is None:
            return ANY
        if not isinstance(parameter, ChoiceParameter):
            return NUMBER
        return frozenset[str]().union(*map(_kind, parameter.values))

    def _equality(self, node: Operation, left: Kinds, right: Kinds) -> None:
        if not left & right:
            found = f"a {_listed(left)} beside a {_listed(right)} at character {node.at}"
            self._note(found, "compare what can be equal", "two values of one kind")
            return
        for one, other in (node.operands, node.operands[::-1]):
            parameter = (
                self._parameters.get(one.name) if isinstance(one, ParameterReference) else None
            )
            if isinstance(parameter, ChoiceParameter) and isinstance(other, Literal):
                self._listed_value(parameter, other)

    def _listed_value(self, choice: ChoiceParameter, literal: Literal) -> None:
        listed = any(_kind(v) == _kind(literal.value) and v == literal.value for v in choice.values)
        if not listed:
            found = f"{literal.value!r} at character {literal.at}"
            few = choice.cardinality <= 20
            allowed = choice.describe() if few else "one of the values of the choice"
            self._note(found, "write one of them", allowed)


def _listed(kinds: Kinds) -> str:
    return " or ".join(sorted(kinds))
