"""The language of constraints: what it means, and that it is nothing more than it says."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.search.constraint import Constraint
from hermes_ops.search.expression import ConstraintError
from hermes_ops.search.space import ChoiceParameter, Config, Integer, SearchParameter, Uniform

CONFIG: Config = {
    "lr": 0.1,
    "batch": 64,
    "optimizer": "sgd",
    "flag": True,
    "mode": None,
    "l2.rate": 0.5,
    "weight-decay": 2,
    "lambda": 3,
    "min": 7,
}
PARAMETERS: dict[str, SearchParameter | None] = {
    "lr": Uniform(0.0, 1.0),
    "batch": Integer(1, 128),
    "optimizer": ChoiceParameter(("sgd", "adam")),
    "flag": ChoiceParameter((True, False)),
    "mode": ChoiceParameter((None, "fast", 3)),
    "unsound": None,
}


def mistakes(source: str) -> list[ConstraintError]:
    return list(Constraint.parse(source).mistakes(PARAMETERS))


@pytest.mark.parametrize(
    ("source", "holds"),
    [
        ("batch * 2 <= 128", True),
        ("batch * 2 < 128", False),
        ("lr < 0.05 or batch > 32", True),
        ("lr < 0.05 and batch > 32", False),
        ("not lr < 0.05", True),
        ("optimizer == 'sgd'", True),
        ('optimizer != "sgd"', False),
        ("flag", True),
        ("not flag or batch == 64", True),
        ("flag == true", True),
        ("mode == null", True),
        ("mode != null", False),
        ("1 < batch / 8 <= 8", True),
        ("1 < 8 <= batch / 16", False),
        ("-2 ** 2 == -4", True),
        ("2 ** 3 ** 2 == 512", True),
        ("10 - 3 - 4 == 3", True),
        ("batch // 10 == 6 and batch % 10 == 4", True),
        ("-7 // 2 == -4 and -7 % 2 == 1", True),
        ("min(batch, 3, lr) == lr", True),
        ("max(1, batch) == 64 and abs(-batch) == 64", True),
        ("0.6 < log(2) < 0.7", True),
        ("{l2.rate} * {weight-decay} == 1", True),
        ("{lambda} == 3 and {lr} < 1", True),
        ("min == 7 and min(min, 9) == 7", True),
        ("+batch == - - batch", True),
        ("batch\n  > 1", True),
        ("'ä # ( {lr}' != optimizer", True),
        ("batch == 64.0", True),
        ("1 == true", False),
        ("1 != true", True),
        ("optimizer != null", True),
    ],
)
def test_an_expression_means_what_it_says(source: str, holds: bool) -> None:
    assert Constraint.parse(source).holds(CONFIG) is holds


@pytest.mark.parametrize(
    "source",
    [
        "1 / (batch - 64) < 5",
        "not 1 / (batch - 64) < 5",
        "1 % 0 == 0 or 1 == 1",
        "0 ** -1 > 0",
        "(0 - 8) ** (1 / 3) < 99",
        "log(0) < 1",
        "log(-1) < 1",
        "9 ** 9 ** 9 ** 9 > 1",
        "not 9 ** 9 ** 9 ** 9 > 1",
        "1e300 * 10 > 1",
        "batch ** 200 > 1",
        "optimizer * 2 > 1",
        "lr < optimizer",
        "flag + 1 > 0",
        "mode < 3",
        "lr and flag",
        "not optimizer",
        "lr",
    ],
)
def test_what_has_no_value_is_not_satisfied(source: str) -> None:
    assert Constraint.parse(source).holds(CONFIG) is False


def test_and_and_or_stop_at_the_side_that_decides() -> None:
    assert Constraint.parse("batch == 64 or 1 / 0 > 1").holds(CONFIG)
    assert not Constraint.parse("1 / 0 > 1 or batch == 64").holds(CONFIG)
    assert Constraint.parse("not (batch != 64 and 1 / 0 > 1)").holds(CONFIG)


def test_a_parameter_that_is_not_there_satisfies_the_whole_constraint() -> None:
    assert Constraint.parse("batch < 0 and momentum < 0.5").holds(CONFIG)
    assert Constraint.parse("1 / 0 < momentum").holds(CONFIG)


HOSTILE = {
    "an attribute": "lr.__class__",
    "an attribute of a text": "'x'.__class__",
    "an attribute after a space": "lr .__class__ == 1",
    "an attribute of a number": "1.0.real < 2",
    "a dunder name that is called": "__import__('os')",
    "a call of anything": "exec('1')",
    "a call of a method": "lr.hex() == 'x'",
    "a call of a text": "'min'(1, 2) == 1",
    "a call of a name in braces": "{min}(1, 2) == 1",
    "a call of a call": "min(1, 2)(3) == 1",
    "named arguments": "min(1, key=2) == 1",
    "starred arguments": "min(*batch) == 1",
    "double starred arguments": "min(**batch) == 1",
    "double starred arguments after others": "min(1, 2, **batch) == 1",
    "too many arguments": "log(8, 2) == 3",
    "too few arguments": "min(1) == 1",
    "a subscript": "lr[0] == 1",
    "a slice": "optimizer[1:] == 'gd'",
    "a lambda": "(lambda: 1)() == 1",
    "a condition": "1 if flag else 2",
    "a comprehension": "[x for x in lr] == 1",
    "a generator": "max(x for x in lr) == 1",
    "a list": "batch == [1]",
    "a tuple": "(1, 2) == 1",
    "an empty tuple": "() == 1",
    "a set": "{1, 2} == 1",
    "a dictionary": "{1: 2} == 1",
    "an assignment": "lr = 1",
    "a walrus": "(lr := 1) < 2",
    "membership": "batch in lr",
    "identity": "batch is 64",
    "a bit operation": "batch & 1 == 0",
    "a shift": "batch << 1 == 0",
    "an inversion": "~batch == 0",
    "a matrix product": "lr @ lr < 1",
    "a formatted text": "f'{lr}' == 'x'",
    "bytes": "b'x' == 'x'",
    "two texts side by side": "optimizer == 'a' 'b'",
    "an escape": r"optimizer == '\x41'",
    "a text without an end": "optimizer == 'sgd",
    "a comment": "lr < 1 # or anything",
    "two statements": "lr < 1; lr > 0",
    "two lines": "lr < 1\nlr > 0",
    "an ellipsis": "... == 1",
    "a complex number": "1j < 2",
    "a hexadecimal number": "0x10 < 20",
    "a number with underscores": "1_000 < batch",
    "a number glued to a word": "1or flag",
    "a number without an end": "lr < " + "9" * 400,
    "infinity": "lr < 1e999",
    "an await": "await lr",
    "a yield": "(yield lr) < 1",
    "nothing": "",
    "blanks": " \t\n ",
    "half of it": "lr <",
    "parentheses that do not close": "((lr < 1)",
    "parentheses too deep": "(" * 21 + "lr < 1" + ")" * 21,
    "parentheses too deep and wrong": "(" * 200 + "lr lr",
    "parentheses deep and wrong": "(" * 20 + "lr lr" + ")" * 20,
    "calls too deep": "abs(" * 60 + "lr" + ")" * 60 + " < 1",
    "a tower of minus": "-" * 200 + "lr < 1",
    "a tower of not": "not " * 200 + "flag",
    "a tower of powers": "lr" + " ** lr" * 100 + " < 1",
    "a sum too long": "lr" + " + lr" * 99 + " < 1",
    "a million characters": "lr < 1 or " * 100_000 + "lr < 1",
    "more words than allowed": "1 < 2 < " * 80 + "3",
    "a look-alike name": "ｌｒ < 1",
    "a Cyrillic letter": "l\u0433 < 1",
    "a look-alike sign": "lr ＜ 1",
    "a look-alike digit": "lr < １",
    "a space that cannot be seen": "lr\u200b < 1",
    "a space without a break": "lr\u00a0< 1",
    "right to left": "\u202elr < 1",
    "a NUL character": "lr\0 < 1",
    "a lone surrogate": "lr\ud800 < 1",
    "an accent": "lr\u0301 < 1",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_anything_else_is_refused_in_one_short_message(source: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        Constraint.parse(source)
    assert len(caught.value.found) < 100
    assert caught.value.allowed
    assert caught.value.fix


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("lr < 1 $ 2", 8),
        ("  lr <", None),
        ("  lr in batch", 3),
        ("lr + 'ä' < f(2)", 12),
        ("(lr < 1) + [2]", 12),
        ("lr < 1 lr", 8),
    ],
)
def test_a_refusal_names_the_place(source: str, place: int | None) -> None:
    with pytest.raises(ConstraintError) as caught:
        Constraint.parse(source)
    assert ("at character" in caught.value.found) is (place is not None)
    assert place is None or caught.value.found.endswith(f"at character {place}")


@pytest.mark.parametrize(
    ("source", "found", "allowed"),
    [
        ("rate < 1", "'rate' at character 1", "names"),
        ("lr < 1 or rate < 1", "'rate' at character 11", "names"),
        ("{l2.rate} < 1", "'l2.rate' at character 1", "names"),
        ("__builtins__ == 1", "'__builtins__'", "names"),
        ("nil == 1", "'nil'", "names"),
        ("optimizer == 'smd'", "'smd' at character 14", "one of 'sgd', 'adam'"),
        ("'smd' != optimizer", "'smd' at character 1", "one of 'sgd', 'adam'"),
        ("mode == 4", "4 at character 9", "one of"),
        ("optimizer < 3", "a text at character 1", "a number beside <"),
        ("lr + optimizer < 3", "a text at character 6", "a number beside +"),
        ("log(flag) < 3", "a truth value at character 5", "a number in log()"),
        ("optimizer == 3", "a text beside a number", "one kind"),
        ("lr == null", "null", "one kind"),
        ("lr and flag", "a number at character 1", "a truth value beside and"),
        ("not optimizer", "a text at character 5", "a truth value beside not"),
        ("lr + 1", "a number as the whole", "true or false"),
        ("'sgd'", "a text as the whole", "true or false"),
    ],
)
def test_what_makes_no_sense_for_the_space_is_told(source: str, found: str, allowed: str) -> None:
    (mistake,) = mistakes(source)
    assert found in mistake.found
    assert allowed in mistake.allowed


@pytest.mark.parametrize(
    "source",
    ["lr < 1", "flag", "mode == 3", "mode == 'fast'", "mode * 2 < 7", "unsound + 1 < 2", "unsound"],
)
def test_what_may_make_sense_is_no_mistake(source: str) -> None:
    assert mistakes(source) == []


def test_all_mistakes_of_a_constraint_are_told() -> None:
    assert len(mistakes("rate < 1 and optimizer < 2 and optimizer == 'x'")) == 3


# -- an independent reckoning --------------------------------------------------------------------

Tree = tuple[Any, ...]
RANK = {"or": 1, "and": 2, "not": 3, "<": 4, "<=": 4, ">": 4, ">=": 4, "==": 4, "!=": 4}
RANK |= {"+": 5, "-": 5, "*": 6, "/": 6, "//": 6, "%": 6, "negate": 7, "**": 8}
PYTHON: dict[str, Callable[..., Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "negate": operator.neg,
    "**": lambda a, b: float(a) ** float(b),
    "min": min,
    "max": max,
    "abs": abs,
    "log": math.log,
}
NAMES = ("a", "b", "c")
LEAVES = st.one_of(
    st.integers(0, 12).map(lambda n: ("number", n)),
    st.sampled_from([0.5, 0.1, 2.5, 1e-05, 3e20]).map(lambda n: ("number", n)),
    st.sampled_from(NAMES).map(lambda n: ("name", n)),
)
ARITHMETIC = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["+", "-", "*", "/", "//", "%", "**"]), inner, inner),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner),
        st.tuples(st.sampled_from(["abs", "log", "negate"]), inner),
    ),
    max_leaves=8,
)
ORDERS = st.tuples(st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), ARITHMETIC, ARITHMETIC)
TRUTHS = st.recursive(
    ORDERS,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["and", "or"]), inner, inner),
        st.tuples(st.just("not"), inner),
    ),
    max_leaves=6,
)
CONFIGS = st.dictionaries(st.sampled_from(NAMES), st.integers(-9, 9) | st.floats(-9, 9), min_size=1)


def written(tree: Tree, least: int = 0) -> str:
    """The text of a tree, with no more parentheses than precedence asks for."""
    sign, *parts = tree
    if sign in ("number", "name"):
        return repr(parts[0]) if sign == "number" else str(parts[0])
    if sign in ("min", "max", "abs", "log"):
        return f"{sign}({', '.join(written(part) for part in parts)})"
    rank = RANK[sign]
    if sign in ("not", "negate"):
        word = "not " if sign == "not" else "-"
        text = word + written(parts[0], rank)
    elif sign == "**":
        text = f"{written(parts[0], 9)} ** {written(parts[1], 7)}"
    else:
        left = rank + 1 if rank == 4 else rank
        text = f"{written(parts[0], left)} {sign} {written(parts[1], rank + 1)}"
    return text if rank >= least else f"({text})"


def reckoned(tree: Tree, config: Config) -> Any:
    """The value of a tree; ArithmeticError or ValueError where it has none."""
    sign, *parts = tree
    if sign == "number":
        return parts[0]
    if sign == "name":
        return config[parts[0]]
    if sign == "and":
        return reckoned(parts[0], config) and reckoned(parts[1], config)
    if sign == "or":
        return reckoned(parts[0], config) or reckoned(parts[1], config)
    if sign == "not":
        return not reckoned(parts[0], config)
    value = PYTHON[sign](*(reckoned(part, config) for part in parts))
    if isinstance(value, complex) or not (isinstance(value, bool) or abs(value) <= 1e300):
        raise ArithmeticError
    return value


def named(tree: Tree) -> set[str]:
    if tree[0] == "name":
        return {tree[1]}
    inner = [named(part) for part in tree[1:] if isinstance(part, tuple)]
    return set[str]().union(*inner)


@settings(max_examples=400, deadline=None)
@given(TRUTHS, CONFIGS)
def test_a_constraint_holds_exactly_when_an_independent_reckoning_says_so(
    tree: Tree, config: Config
) -> None:
    try:
        expected = not named(tree) <= config.keys() or reckoned(tree, config)
    except (ArithmeticError, ValueError):
        expected = False
    assert Constraint.parse(written(tree)).holds(config) is expected


WORDS = [
    "lr",
    "batch",
    "(",
    ")",
    "+",
    "-",
    "**",
    "<",
    "==",
    "and",
    "or",
    "not",
    "min",
    "log",
    "'x'",
    "{lr}",
    "1",
    ".5",
    "1e9",
    ",",
    "__class__",
    ".",
    "[",
    "optimizer",
]


@settings(max_examples=400, deadline=None)
@given(
    st.text(max_size=40)
    | st.lists(
        st.sampled_from(WORDS),
        max_size=30,
    ).map(" ".join)
)
def test_any_text_is_a_constraint_that_can_be_tried_or_refused(source: str) -> None:
    try:
        constraint = Constraint.parse(source)
    except ConstraintError:
        return
    assert constraint.holds(CONFIG) in (True, False)
    list(constraint.mistakes(PARAMETERS))
