"""Advice on lines that look like metrics: the sweep file's keys that have them read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hermes_ops.trial.failure import likeness
from hermes_ops.trial.output.metric_reader import ARGUMENT_NAMES, MetricReader
from hermes_ops.trial.output.pairs import PairFinder

LEAD = "Lines that look like metrics"
_MOST = 3
_LINE_CHARACTERS = 300
_WORD = r"[A-Za-z][\w./@%()'-]{0,40}"
_NAMED = re.compile(
    rf"(?<![\w./])({_WORD}(?: {_WORD}){{0,2}})"  # its name, of three words at most
    r"(\s{0,4}(?:[:=|>-]{1,4}|\b(?:is|was|of)\b)?\s{0,4})(?<!\w)"
    r"([-+]?[0-9]{1,15}[.,][0-9]{1,20}(?:[eE][-+]?[0-9]{1,3})?)"
)
_STEP = re.compile(r"(?i:epoch|step|iteration|iter|round)\W{0,3}([0-9]{1,9})(?![\w.])")
_FILLERS = re.compile(
    r"^(?:(?:DEBUG|INFO|WARNING|ERROR|the|a|and|with|got|current|done|finished)\b[ :,-]*)+"
)
_VERB = re.compile(r" (?:is|was|of)$")
_RULES = "\u2502|,;"  # between the columns of a table; the first as rich draws it
_CELLS = re.compile(rf"[^\s{_RULES}\u2503]+")
_STEP_CELL = re.compile(r"[0-9]{1,9}(?:/[0-9]{1,9})?")
_VALUE_CELL = re.compile(r"[-+]?[0-9]*\.[0-9]+(?:[eE][-+]?[0-9]{1,3})?")
_DIGITS = re.compile(r"[0-9]+")


class _Candidate(NamedTuple):
    name: str
    line: str
    keys: str  # of the sweep file, which have its value read


def advice(lines: Sequence[str], objective: str) -> str:
    """Say which of the last lines look like metrics, and which keys have them read.

    Empty if none does. Every key that is named has been tried on its line.
    """
    candidates = {c.name: c for line in _kinds(lines) for c in _candidates(line, objective)}
    candidates.update((c.name, c) for c in _of_table(lines, objective))
    best = sorted(candidates.values(), key=lambda c: likeness(objective, c.name), reverse=True)
    best = best[:_MOST]
    if not best:
        return ""
    shown = "; ".join(f'"{c.line}" would be read with {c.keys}' for c in best)
    return f"{LEAD}: {shown}"


def _kinds(lines: Sequence[str]) -> list[str]:
    """Return the newest line of each kind; lines that differ in digits alone are of one kind."""
    kinds = {_DIGITS.sub("0", line): line.strip()[:_LINE_CHARACTERS] for line in lines}
    return list(kinds.values())


def _candidates(line: str, objective: str) -> Iterator[_Candidate]:
    """Yield what is read on a line under its own name, then what a regular expression reads."""
    pairs = [p.name for p in PairFinder(()).read(line).pairs if p.value is not None]
    for name in pairs:
        if name != objective and name.lower() not in ARGUMENT_NAMES and _is_read(name, None, line):
            yield _Candidate(name, line, f"objective.metric: {name}")
    for match in _NAMED.finditer(line):
        name, verb = _name(match)
        step = _STEP.search(line, 0, match.start())
        if name == objective and step is not None and _is_read(name, None, line):
            step = None  # it is beyond the last epoch: the values are to be counted
        elif name in pairs:
            continue
        if name:
            pattern = _pattern(line, match, name, verb, step)
            yield from _candidate(line, name, pattern, objective)


def _candidate(line: str, name: str, pattern: str, objective: str) -> Iterator[_Candidate]:
    if name != objective and _is_read(name, None, line):
        yield _Candidate(name, line, f"objective.metric: {name}")
    elif _is_read(name, pattern, line):
        quoted = pattern.replace("'", "''")
        renamed = "" if name == objective else f" and objective.metric: {name}"
        yield _Candidate(name, line, f"trial.metric_pattern: '{quoted}'{renamed}")


def _name(match: re.Match[str]) -> tuple[str, str]:
    """Return the name without filler words, and the verb that follows it."""
    filler = _FILLERS.match(match.group(1))
    name, verb = match.group(1)[filler.end() if filler else 0 :], ""
    if end := _VERB.search(name):
        name, verb = name[: end.start()], end.group()
    return name, verb


def _of_table(lines: Sequence[str], objective: str) -> Iterator[_Candidate]:
    """Yield what reads the newest row below a header that names the objective as a column."""
    column, width, row = 0, 0, ""
    for line in lines:
        cells = _CELLS.findall(line[:_LINE_CHARACTERS])
        if cells.count(objective) == 1:
            column, width, row = cells.index(objective), len(cells), ""
        elif column and len(cells) == width and _STEP_CELL.fullmatch(cells[0]):
            row = line.strip()[:_LINE_CHARACTERS] if _VALUE_CELL.fullmatch(cells[column]) else row
    rule = next((re.escape(sign) for sign in _RULES if sign in row), "")
    cell, between = rf"[^\s{rule}]+" if rule else r"\S+", rf"\s*{rule}\s*" if rule else r"\s+"
    skipped = f"(?:{cell}{between}){{{column - 1}}}" if column > 1 else ""
    pattern = rf"^[\s{rule}]*(?P<step>\d+)(?:/\d+)?{between}{skipped}(?P<value>{cell})"
    if row and _is_read(objective, pattern, row):
        yield _Candidate(objective, row, f"trial.metric_pattern: '{pattern}'")


def _pattern(
    line: str, match: re.Match[str], name: str, verb: str, step: re.Match[str] | None
) -> str:
    """Return a regular expression for a value behind a name, and for the step before it."""
    lead = ""
    if step is not None:
        lead = _escaped(line[step.start() : step.start(1)]) + r"(?P<step>\d+)\b.*?"
    between = _escaped(verb + match.group(2))
    return rf"{lead}\b(?P<name>{_escaped(name)}){between}(?P<value>\S+)"


def _escaped(text: str) -> str:
    """Escape a text for a regular expression; runs of blanks match any run."""
    return re.sub(r"\\\s", " ", re.sub(r"(?:\\\s){2,}|\\?\t", r"\\s+", re.escape(text)))


def _is_read(name: str, pattern: str | None, line: str) -> bool:
    """Tell whether one value of the name is read on the line."""
    values = MetricReader(name, pattern, 0).find(line)
    return len([f for f in values if f.name == name]) == 1
