"""Find names with values, and steps, in one line of a script's output."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hermes_ops.trial.output.numerals import numeral, whole_numeral

TEXT_LIMIT_CHARACTERS = 8192  # of a longer line only the beginning is searched; of JSON, all
_LONGEST_NAME = 250
_MOST_OBJECTS = 16  # beginnings of JSON objects that are tried in a line
_LEAD_CHARACTERS = 40

_GAP = r"\s{0,40}"  # beside the sign of a pair: some align names and values as columns
_PAIR = re.compile(rf"(?<![\w./@%$-])([A-Za-z_][\w./-]{{0,249}}){_GAP}([=:])(?!=){_GAP}")
_ITEM = re.compile(rf"(['\"])([^'\"]{{1,250}})\1{_GAP}:{_GAP}")
_LEAD = re.compile(r"(?:^|[^\w'.-])([^\W\d_][\w']*) $")
_STEP = re.compile(r"[\[(#]{0,2}\s{0,4}([0-9][0-9,_]{0,18})(\.[0-9]+)?(?![\w])")
_STEP_WORD = re.compile(
    r"(?<![\w./-])(epoch|global[ _]step|step|iteration)\s{0,4}[#\[(]{0,2}\s{0,4}(?=[0-9])",
    re.IGNORECASE,
)
_ROUND = re.compile(r"\s{0,4}\[?([0-9]{1,9})(?:\]\t|:\tlearn: )")  # XGBoost, LightGBM; CatBoost

_STEP_NAME = re.compile(r"epoch|step|iteration", re.IGNORECASE)
_STEP_NAMES = ("epoch", "global_step", "step", "iteration")
_LEVELS = frozenset((
    "DEBUG", "INFO", "NOTICE", "WARN", "WARNING", "ERROR", "CRITICAL", "TRACE", "SUCCESS",
    "FATAL",
))  # fmt: skip
# Words that, before a name, make another name of it; the latter before a plain word alone.
_OTHER_KINDS = frozenset((
    "best", "previous", "prev", "old", "lowest", "highest", "min", "max", "minimum", "maximum",
    "mean", "avg", "average", "running", "smoothed", "total", "target",
))  # fmt: skip
_PARTS = frozenset((
    "train", "training", "val", "valid", "validation", "test", "testing", "eval", "evaluation",
    "dev",
))  # fmt: skip
_OTHER_STEPS = frozenset((
    "best", "previous", "prev", "old", "last", "total", "max", "maximum", "target", "of",
    "at",
))  # fmt: skip


class NamedValue(NamedTuple):
    """A name and its value; `value` is None where `refusal` says why it is not read.

    `with_colon`: written as `name: value` outside of an object.
    """

    name: str
    value: float | None
    refusal: str = ""
    with_colon: bool = False


class StatedStep(NamedTuple):
    """The step that a line states: its value under a name; it may be a fraction."""

    name: str
    value: float


class SourceLine(NamedTuple):
    """The line of a value: its beginning, the names on it, and whether it holds the objective."""

    text: str
    names: frozenset[str]
    has_objective: bool


class FoundValue(NamedTuple):
    """A value in the output; `step` as the script says it, None if it does not."""

    name: str
    value: float
    step: StatedStep | None
    source: SourceLine


class LineReading(NamedTuple):
    """A line's pairs, and its step: None if it says none, `unclear` if it says two."""

    pairs: list[NamedValue]
    step: StatedStep | None
    is_step_unclear: bool = False


class _ValueSpans:
    """The values of a text in which other pairs may stand: `tensor(0.4, device='cuda:0')`."""

    def __init__(self, text: str, starts: Sequence[int]) -> None:
        self._text = text
        self._ends = [(at, self._end(at)) for at in starts]
        self._place = 0
        self._last_end = 0

    def holds(self, at: int) -> bool:
        """Tell whether a place, behind those that were asked for before, is inside of a value."""
        while self._place < len(self._ends) and self._ends[self._place][0] <= at:
            self._last_end = max(self._last_end, self._ends[self._place][1])
            self._place += 1
        return at < self._last_end

    def add(self, at: int) -> None:
        """Note the value that begins at a place, behind those of before."""
        self._last_end = max(self._last_end, self._end(at))

    def _end(self, at: int) -> int:
        first = self._text[at : at + 1]
        return numeral(self._text, at).end if first == "<" or first.isalpha() else 0


class PairFinder:
    """Find pairs, those of the names that are `asked` for wherever they stand, as they stand."""

    def __init__(self, asked: Sequence[str]) -> None:
        self._asked = [
            (n, re.compile(rf"(?<![\w./@%$-]){re.escape(n)}['\"]?{_GAP}([=:])(?!=){_GAP}"))
            for n in asked
        ]
        self._names = frozenset(asked)

    def may_count(self, line: str) -> bool:
        """Tell whether a line names anything that is asked for, or a step; most lines do not."""
        if any(name in line for name in self._names) or _STEP_NAME.search(line):
            return True
        return "\\u" in line or _ROUND.match(line) is not None

    def read(self, line: str) -> LineReading:
        """Return what a line holds."""
        pairs: list[NamedValue] = []
        steps: list[tuple[int, StatedStep]] = []  # the nearer to the top of an object, the lower
        for document in _objects(line) if "{" in line else [line]:
            if isinstance(document, _Object):
                items = self._object_items(document, "")
            elif "=" in document or ":" in document:
                items = self._text_items(document[:TEXT_LIMIT_CHARACTERS])
            else:
                items = iter(())
            for pair in items:
                step = _as_step(pair)
                if step is None:
                    pairs.append(pair)
                elif step.value == step.value:  # NaN: it is no number
                    steps.append((pair.name.count("/"), step))
        return _reading(line, pairs, steps)

    def _text_items(self, text: str) -> Iterator[NamedValue]:
        starts: dict[
            int, NamedValue
        ] = {}  # by the place of the value, so that no value has two names
        for name, pattern in self._asked:
            if name in text:
                for match in pattern.finditer(text):
                    starts[match.end()] = self._asked_pair(name, text, match)
        if _is_part_of_object(text):
            starts = {at: _lone(pair) for at, pair in starts.items()}
        else:
            for match in _ITEM.finditer(text):
                starts.setdefault(match.end(), _value(match.group(2), text, match.end()))
            inside = _ValueSpans(text, sorted(starts))
            for match in _PAIR.finditer(text):
                at = match.end()
                if at in starts or inside.holds(match.start()) or _is_of_another(text, match):
                    continue
                starts[at] = _value(match.group(1), text, at, colon=match.group(2) == ":")
                inside.add(at)
        yield from (starts[at] for at in sorted(starts))

    def _asked_pair(self, name: str, text: str, match: re.Match[str]) -> NamedValue:
        lead, colon = _lead(text, match.start()), match.group(1) == ":"
        kinds = _OTHER_KINDS | _PARTS if name.isalnum() else _OTHER_KINDS
        is_other = lead.lower() in kinds or (colon and lead and name.isalnum())
        if is_other and text[match.start() - 1] == " ":
            return _value(f"{lead} {name}", text, match.end(), colon=colon)
        pair = _value(name, text, match.end(), colon=colon)
        if pair.value is None and not pair.refusal and _is_odd(text, match.end()):
            return pair._replace(refusal="it is not a number that is read")
        return pair

    def _object_items(self, document: _Object, prefix: str) -> Iterator[NamedValue]:
        """Yield the numbers in an object; those of an object inside it are named `outer/inner`."""
        for key, value in document:
            name = f"{prefix}{key}"
            if len(name) > _LONGEST_NAME or not name.isprintable() or not name.strip():
                continue
            if isinstance(value, _Object):
                yield from self._object_items(value, f"{name}/")
            elif isinstance(value, list) and name in self._names:
                yield NamedValue(name, None, "it is a list")
            else:
                pair = _of_json(name, value)
                if pair.value is not None or pair.refusal:
                    yield pair


def _reading(
    line: str, pairs: list[NamedValue], steps: list[tuple[int, StatedStep]]
) -> LineReading:
    for name in _STEP_NAMES:
        mine = [(depth, step.value) for depth, step in steps if step.name == name]
        if name == "epoch" and not mine:
            mine = [(0, step.value) for step in _steps_in_words(line) if step.name == name]
        if mine:
            nearest = min(depth for depth, _ in mine)
            values = {value for depth, value in mine if depth == nearest}
            return LineReading(pairs, StatedStep(name, min(values)), len(values) > 1)
    words = [step for step in _steps_in_words(line) if step.name != "epoch"]
    if words:
        return LineReading(pairs, words[0])
    match = _ROUND.match(line)
    return LineReading(pairs, StatedStep("round", float(match.group(1))) if match else None)


def _steps_in_words(line: str) -> list[StatedStep]:
    """Return the steps written as `Epoch 3/10`; the first of each name."""
    steps: dict[str, StatedStep] = {}
    text = line[:TEXT_LIMIT_CHARACTERS]
    for match in _STEP_WORD.finditer(text):
        name = match.group(1).lower().replace(" ", "_")
        number = _STEP.match(text, match.end())
        is_other = _lead(text, match.start()).lower() in _OTHER_STEPS
        if name not in steps and number is not None and not is_other:
            steps[name] = StatedStep(name, _step_value(number))
    return list(steps.values())


def _as_step(pair: NamedValue) -> StatedStep | None:
    """Return the step that a pair states, NaN for a value that is no number; None for others."""
    outer, _, name = pair.name.rpartition("/")
    name = name.lower()
    if name not in _STEP_NAMES or outer.lower() in _OTHER_KINDS or "/best" in outer.lower():
        return None
    return StatedStep(name, math.nan if pair.value is None else pair.value)


def _value(name: str, text: str, at: int, *, colon: bool = False) -> NamedValue:
    """Return the pair of a name and the value at an index of the text."""
    if name.rpartition("/")[2].lower() in _STEP_NAMES:
        return NamedValue(name, _step_at(text, at), with_colon=colon)
    number = numeral(text, at)
    return NamedValue(name, number.value, number.refusal, colon)


def _step_at(text: str, at: int) -> float | None:
    """Parse a step, which may have a total (`3/10`, `[3/10]`) and grouping commas."""
    number = numeral(text, at)
    if number.value is not None:
        return number.value
    match = _STEP.match(text, at)
    return None if match is None else _step_value(match)


def _step_value(match: re.Match[str]) -> float:
    digits = match.group(1).replace(",", "").replace("_", "")
    return float(digits + (match.group(2) or ""))


def _of_json(name: str, value: object) -> NamedValue:
    """Return the pair of a name and a value of JSON, which may be a number in quotes."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return NamedValue(name, None)
    if isinstance(value, str):
        number = whole_numeral(value[:_LONGEST_NAME])
        return NamedValue(name, number.value, number.refusal)
    try:
        return NamedValue(name, float(value))
    except OverflowError:
        return NamedValue(name, math.inf if value > 0 else -math.inf)


def _lead(text: str, at: int) -> str:
    """Return the word that one blank separates from a name; empty without one."""
    match = _LEAD.search(text, max(0, at - _LEAD_CHARACTERS), at)
    word = match.group(1) if match else ""
    return "" if word in _LEVELS else word


def _is_of_another(text: str, match: re.Match[str]) -> bool:
    """Tell whether a word before the name says that the pair is not of that name."""
    lead = _lead(text, match.start()).lower()
    if match.group(1).lower() in _STEP_NAMES:
        return lead in _OTHER_STEPS
    if match.group(1).endswith(".py"):
        return True  # a line of a source file, as loggers say it
    is_in_value = text[match.start() - 1 : match.start()] in ("'", '"', "=")  # device=cuda:0
    return match.group(2) == ":" and (bool(lead) or is_in_value)


def _is_odd(text: str, at: int) -> bool:
    """Tell whether something with a digit stands there that is neither a text nor a name."""
    token = text[at : at + _LEAD_CHARACTERS].split(" ", 1)[0].rstrip(",;.)]}")
    has_digit = any(c.isdigit() for c in token)
    return has_digit and token[:1] not in "'\"" and not token.isidentifier()


def _is_part_of_object(text: str) -> bool:
    """Tell whether the line is one of several over which an object is printed."""
    inside = text.strip().lstrip("{ ")
    if inside[:1] not in ("'", '"') or not _ITEM.match(inside):
        return False
    return "{" not in text or text.count("{") != text.count("}")


def _lone(pair: NamedValue) -> NamedValue:
    why = "an object is read if it stands on one line"
    return pair._replace(value=None, refusal=why)


class _Object(tuple[tuple[str, object], ...]):
    """An object of JSON as its pairs: a key may be there twice."""

    __slots__ = ()


def _objects(line: str) -> Iterator[_Object | str]:
    """Yield the JSON objects in a line and the text around them, in their order."""
    decoder, rest, at = json.JSONDecoder(object_pairs_hook=_Object), 0, line.find("{")
    for _ in range(_MOST_OBJECTS):
        if at < 0:
            break
        try:
            document, end = decoder.raw_decode(line, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            yield line[rest:at]
            yield document
            rest = end
        at = line.find("{", end)
    yield line[rest:]
