"""The parser of constraints: a closed language of comparisons and arithmetic.

A tokenizer accepts only words, numbers, quoted texts and the operators of the language, in ASCII
outside the quotes. Python's parser (`ast.parse`, which evaluates and imports nothing) then builds
the tree of a text in which quoted texts and names in braces are blanked out, and only the kinds of
nodes named here are converted. Everything else is refused with its position.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hermes_ops.search.space import Value

MOST_CHARACTERS = 1_000
MOST_WORDS = 300
MOST_PARENTHESES = 20  # inside one another
DEEPEST_TREE = 50
LARGEST = 1e300  # numbers, and results on the way
FUNCTIONS = {"min": 2, "max": 2, "abs": 1, "log": 1}  # with the fewest arguments
MOST_ARGUMENTS = {"min": 20, "max": 20, "abs": 1, "log": 1}
WORDS: dict[str, Value] = {"true": True, "false": False, "null": None}
LANGUAGE = (
    "parameters, numbers, 'texts', true, false and null with + - * / // % **, "
    "== != < <= > >=, and, or, not, min, max, abs, log and parentheses"
)
_SIGNS: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.UAdd: "+",
    ast.USub: "-",
    ast.Not: "not",
    ast.And: "and",
    ast.Or: "or",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+)
    |(?P<text>"[^"\\\r\n]*"|'[^'\\\r\n]*')(?![\w"'{.])
    |(?P<name>\{[A-Za-z_][A-Za-z0-9_.\-]*\})(?![\w"'{.])
    |(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)(?![\w"'{.])
    |(?P<word>[A-Za-z_][A-Za-z0-9_]*)(?![\w"'{.])
    |(?P<sign>\*\*|//|[<>=!]=|[-+*/%<>(),])""",
    re.VERBOSE,
)


class ConstraintError(ValueError):
    """A constraint that is not of the language, or not meaningful for its space."""

    def __init__(self, found: str, fix: str, allowed: str = LANGUAGE) -> None:
        self.found, self.allowed, self.fix = found, allowed, fix
        super().__init__(f"{found}; allowed: {allowed}. {fix}")


@dataclass(frozen=True, slots=True)
class Literal:
    """A number, a text, true, false or null; `at` is the position of its character, from 1."""

    value: Value
    at: int


@dataclass(frozen=True, slots=True)
class ParameterReference:
    """A reference to the value of a parameter."""

    name: str
    at: int


@dataclass(frozen=True, slots=True)
class Operation:
    """An operator or a function with its operands; - and + may have one."""

    sign: str
    operands: tuple[Node, ...]
    at: int


Node = Literal | ParameterReference | Operation


def parse(source: str) -> Node:
    """Parse a constraint into its tree; ConstraintError when it is not of the language."""
    if len(source) > MOST_CHARACTERS:
        found = f"{len(source)} characters"
        raise ConstraintError(found, "make several constraints of it", f"{MOST_CHARACTERS} at most")
    blanked, words = _scan(source)
    shift = len(blanked) - len(blanked.lstrip())
    try:
        tree = ast.parse(blanked.strip(), mode="eval")
    except SyntaxError as error:
        place = f" at character {error.offset + shift}" if error.offset else ""
        fix = "correct it there; a parameter named by a keyword of Python stands in braces, {name}"
        raise ConstraintError(f"no expression{place}", fix) from None
    except (RecursionError, MemoryError, ValueError):
        raise ConstraintError("an expression too complicated to read", "make it shorter") from None
    return _TreeBuilder(words, shift).convert(tree.body)


def walk(node: Node) -> Iterator[Node]:
    """Yield the node and every one below it."""
    yield node
    if isinstance(node, Operation):
        for operand in node.operands:
            yield from walk(operand)


_OTHERWISE = {"&&": "and", "||": "or", "!": "not", "=": "==", "&": "and", "|": "or"}
"""Operators of other languages, the longer ones first, and their equivalents here."""


def _remedy(rest: str) -> str:
    """Say how to correct the beginning of the rest of an expression."""
    for theirs, ours in _OTHERWISE.items():
        if rest.startswith(theirs):
            return f"write {ours} instead of {theirs}"
    return "write what is allowed; a name with . or - in it stands in braces, {name}"


def _scan(source: str) -> tuple[str, dict[int, Value | ParameterReference]]:
    """Return the source with texts and names blanked out, and these by character from 0."""
    words: dict[int, Value | ParameterReference] = {}
    blanked: list[str] = []
    open_now = count = at = 0
    while at < len(source):
        token = _TOKEN.match(source, at)
        if token is None:
            found = f"{source[at : at + 10]!r} at character {at + 1}"
            fix = _remedy(source[at:])
            raise ConstraintError(found, fix)
        kind, word = str(token.lastgroup), token.group()
        count += kind != "space"
        open_now += {"(": 1, ")": -1}.get(word, 0)
        _limit(open_now, count, at)
        if kind in ("text", "name"):
            words[at] = word[1:-1] if kind == "text" else ParameterReference(word[1:-1], at + 1)
        elif kind == "word":
            words[at] = WORDS[word] if word in WORDS else ParameterReference(word, at + 1)
        blanked.append(_blank(kind, word))
        at = token.end()
    return "".join(blanked), words


def _blank(kind: str, word: str) -> str:
    if kind == "space":
        return " " * len(word)
    return "_" * len(word) if kind in ("text", "name") else word


def _limit(open_now: int, count: int, at: int) -> None:
    if open_now > MOST_PARENTHESES or count > MOST_WORDS:
        found = f"more than {MOST_PARENTHESES} parentheses inside one another"
        if count > MOST_WORDS:
            found = f"more than {MOST_WORDS} words and signs"
        raise ConstraintError(f"{found} at character {at + 1}", "make several constraints of it")


@dataclass(frozen=True, slots=True)
class _TreeBuilder:
    """Convert Python's tree; its columns are `shift` lower than those of the source."""

    words: dict[int, Value | ParameterReference]
    shift: int

    def convert(self, node: ast.expr, depth: int = 1) -> Node:
        """Return the node of our language; ConstraintError for any other."""
        if depth > DEEPEST_TREE:
            raise self._refused(node, f"more than {DEEPEST_TREE} operations inside one another")
        match node:
            case ast.Name():
                return self._word(node)
            case ast.Constant(value=bool() | int() | float() | None as value):
                return Literal(self._number(node, value), self._at(node))
            case ast.Compare():
                return self._comparison(node, depth)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                self._function(node, name, len(args))
                return self._operation(node, name, args, depth)
        sign, operands = _parts(node)
        if sign is None:
            raise self._refused(node, "something that is not of the language")
        return self._operation(node, sign, operands, depth)

    def _word(self, node: ast.Name) -> Node:
        word = self.words[node.col_offset + self.shift]
        return word if isinstance(word, ParameterReference) else Literal(word, self._at(node))

    def _number(self, node: ast.expr, value: Value) -> Value:
        if isinstance(value, int | float) and not abs(value) <= LARGEST:
            raise self._refused(node, "a number beyond 1e300")
        return value

    def _comparison(self, node: ast.Compare, depth: int) -> Node:
        """Convert `a < b < c` to `a < b and b < c`."""
        sides = [self.convert(side, depth + 1) for side in (node.left, *node.comparators)]
        signs = [_SIGNS.get(type(sign)) for sign in node.ops]
        at = self._at(node)
        parts: list[Node] = []
        for sign, left, right in zip(signs, sides[:-1], sides[1:], strict=True):
            if sign is None:
                raise self._refused(node, "a comparison that is not of the language")
            parts.append(Operation(sign, (left, right), at))
        return parts[0] if len(parts) == 1 else Operation("and", tuple(parts), at)

    def _function(self, node: ast.Call, name: str, count: int) -> None:
        word = self.words.get(node.func.col_offset + self.shift)
        if name not in FUNCTIONS or not isinstance(word, ParameterReference):
            raise self._refused(node, "a function that is not of the language")
        if not FUNCTIONS[name] <= count <= MOST_ARGUMENTS[name]:
            raise self._refused(node, f"{name} of {count} values")

    def _operation(
        self, node: ast.expr, sign: str, operands: Sequence[ast.expr], depth: int
    ) -> Node:
        taken = tuple(self.convert(operand, depth + 1) for operand in operands)
        return Operation(sign, taken, self._at(node))

    def _at(self, node: ast.expr) -> int:
        return node.col_offset + self.shift + 1

    def _refused(self, node: ast.expr, found: str) -> ConstraintError:
        fix = "write it with what is allowed"
        return ConstraintError(f"{found} at character {self._at(node)}", fix)


def _parts(node: ast.expr) -> tuple[str | None, list[ast.expr]]:
    """Return the operator and its operands; None when it is not of the language."""
    match node:
        case ast.BoolOp(op=sign, values=operands):
            return _SIGNS.get(type(sign)), operands
        case ast.BinOp(left=left, op=sign, right=right):
            return _SIGNS.get(type(sign)), [left, right]
        case ast.UnaryOp(op=sign, operand=operand):
            return _SIGNS.get(type(sign)), [operand]
    return None, []
