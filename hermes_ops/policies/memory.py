"""The memories of all policies as JSON text, and back: the one place that knows their form."""

from __future__ import annotations

import json
from typing import TypeVar, cast

from hermes_ops.core.model import JobId
from hermes_ops.core.placement import Queues

M = TypeVar("M", None, Queues)


def encode(memory: Queues | None) -> str:
    """One line of JSON; equal memories give equal text."""
    if memory is None:
        return json.dumps(None)
    return json.dumps({"queues": [[job, list(gpus)] for job, gpus in memory.places]})


def decode(text: str, initial: M) -> M:
    """The memory that `encode` wrote, of the same kind as `initial`.

    `initial` itself when the text is anything else (another policy's memory, a torn write):
    losing a memory costs quality only, so no error is raised for it.
    """
    try:
        data = json.loads(text)
        return initial if initial is None else _queues(data)
    except (ValueError, TypeError, KeyError):
        return initial


def _queues(data: object) -> Queues:
    rows = cast("dict[str, list[tuple[str, list[int]]]]", data)["queues"]
    return Queues(tuple((JobId(str(job)), tuple(int(gpu) for gpu in gpus)) for job, gpus in rows))
