"""Messages between the nodes of a trial: reports to the first one, and its orders.

Both are values in the store on the first node, each replaced as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from hermes_ops.trial.files import parse_object

SCOPE, ORDERS = "hermes", "orders"
MOST_TAIL_LINES, MOST_LINE_CHARACTERS = 20, 1_000
LOST_S = 20.0
"""Seconds without a word after which the other side counts as lost."""


def report_key(node: int) -> str:
    """Return the key of a node's report."""
    return f"node-{node}"


class RankEnd(NamedTuple):
    """How a worker ended, and how many seconds before the report."""

    code: int
    ago_s: float


class NodeReport(NamedTuple):
    """How it stands on a node; `beat` counts its reports, so that no two are the same.

    `is_told_to_stop`: the node has to be left. `has_left`: this is its last report. `tails`: the
    last lines of the workers that have ended.
    """

    beat: int
    ends: Mapping[int, RankEnd] = {}
    tails: Mapping[int, tuple[str, ...]] = {}
    is_told_to_stop: bool = False
    has_left: bool = False

    def encode(self) -> bytes:
        """Return it as JSON."""
        return json.dumps(
            {
                "beat": self.beat,
                "ends": {str(rank): list(end) for rank, end in self.ends.items()},
                "tails": {str(rank): list(lines) for rank, lines in self.tails.items()},
                "is_told_to_stop": self.is_told_to_stop,
                "has_left": self.has_left,
            }
        ).encode()

    @classmethod
    def decode(cls, data: bytes | None) -> NodeReport | None:
        """Return the report in a value of the store; None without one, or of another form."""
        document = _document(data)
        try:
            return cls(
                int(document["beat"]),
                {int(r): RankEnd(int(e[0]), float(e[1])) for r, e in document["ends"].items()},
                {int(r): tuple(map(str, lines)) for r, lines in document["tails"].items()},
                bool(document["is_told_to_stop"]),
                bool(document["has_left"]),
            )
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            return None


class Orders(NamedTuple):
    """The orders to the nodes: start their workers, send them SIGTERM, kill them, leave.

    `stopping`: the workers are about to leave after a step that they agree on.
    """

    go: bool = False
    stop: bool = False
    kill: bool = False
    over: bool = False
    stopping: bool = False

    def encode(self) -> bytes:
        """Return them as JSON."""
        return json.dumps(self._asdict()).encode()

    @classmethod
    def decode(cls, data: bytes | None) -> Orders:
        """Return the orders in a value of the store; none in a value of another form."""
        document = _document(data)
        return cls(
            document.get("go") is True,
            document.get("stop") is True,
            document.get("kill") is True,
            document.get("over") is True,
            document.get("stopping") is True,
        )


def _document(data: bytes | None) -> dict[str, Any]:
    return parse_object(data or b"{}") or {}
