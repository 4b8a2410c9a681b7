"""What befalls the nodes of a simulated cluster, from a file."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from math import isfinite
from pathlib import Path

from hermes_ops.errors import ConfigError, Problem
from hermes_ops.simulator.workload import Interference, NodeFailure

COLUMNS = ("node", "at_s", "until_s", "speed")


def read_disturbances(path: Path) -> tuple[NodeFailure | Interference, ...]:
    """Read a CSV file: from `at_s` to `until_s` a node's jobs train at `speed` of their pace.

    Speed 0 is a failure: the node is away, and its jobs go on from their last checkpoints.
    Nodes are node-0, node-1, ..., as `--nodes` makes them. Raises ConfigError, with line numbers,
    for a file that cannot be read, other columns, and values that cannot be.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(enumerate(csv.reader(file, strict=True), start=1))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        problem = Problem(str(path), str(error), "a readable CSV file", "correct the path or file")
        raise ConfigError("the disturbances", (problem,)) from error
    header = tuple(cell.strip() for cell in rows[0][1]) if rows else ()
    if header != COLUMNS:
        found, allowed = ",".join(header) or "nothing", ",".join(COLUMNS)
        raise ConfigError(str(path), (Problem("line 1", found, allowed, "correct the header"),))
    problems: list[Problem] = []
    made = [_disturbance(line, row, problems) for line, row in rows[1:] if row]
    if problems:
        raise ConfigError(str(path), tuple(problems))
    return tuple(found for found in made if found is not None)


def _disturbance(
    line: int, row: list[str], problems: list[Problem]
) -> NodeFailure | Interference | None:
    found = list(_wrong(row))
    if found:
        problems += [Problem(f"line {line}", *wrong, "correct the line") for wrong in found]
        return None
    node, (at_s, until_s, speed) = row[0].strip(), map(float, row[1:])
    if speed == 0.0:
        return NodeFailure(at_s, node, until_s)
    return Interference(at_s, node, until_s, speed)


def _wrong(row: list[str]) -> Iterator[tuple[str, str]]:
    """(found, allowed) of what is wrong with a row."""
    if len(row) != len(COLUMNS) or not row[0].strip():
        yield repr(",".join(row)), f"{len(COLUMNS)} cells, the first a node"
        return
    try:
        at_s, until_s, speed = map(float, row[1:])
    except ValueError:
        yield repr(",".join(row[1:])), "three numbers"
        return
    if not 0.0 <= at_s < until_s or not isfinite(until_s):
        yield f"from {row[1]} to {row[2]}", "seconds from 0, the end after the begin"
    if not 0.0 <= speed <= 1.0:
        yield f"speed {row[3]}", "0 (the node is away) to 1"
