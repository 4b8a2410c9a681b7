"""What a pool's view says of trouble, in words: rounds that fail, and what fails of one sweep."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

MOST_LINES = 10

SILENT_S = 120.0
"""A controller that has written no view for so long makes no rounds."""


def trouble_line(view: Mapping[str, Any] | None) -> str:
    """Return since when and why the controller's rounds fail; empty while they do not."""
    trouble = (view or {}).get("trouble")
    if not trouble:
        return ""
    return (
        f"The controller's rounds have failed since {_clock(trouble['since_s'])} "
        f"({trouble['rounds']} in a row), so no trial is started or stopped: {trouble['reason']}"
    )


def silence_line(view: Mapping[str, Any] | None, now_s: float) -> str:
    """Return since when the controller has made no round; empty while it makes some."""
    if view is None or now_s - view["time_s"] <= SILENT_S or trouble_line(view):
        return ""
    since = _clock(view["time_s"])
    return f"The controller has made no round since {since}: see its log."


def problem_lines(
    view: Mapping[str, Any] | None, sweep: str | None = None, trial: int | None = None
) -> list[str]:
    """Return a line for each step that fails of a sweep, or of one trial of it.

    Without a sweep: of all of them. At most ten, then one that counts the others.
    """
    found = [
        p
        for p in (view or {}).get("problems", ())
        if (sweep is None or p["sweep"] in (sweep, "")) and trial in (None, p["trial"])
    ]
    lines = [_line(p) for p in found[:MOST_LINES]]
    rest = len(found) - MOST_LINES
    return [*lines, f"{rest} more steps fail"] if rest > 0 else lines


def _line(problem: Mapping[str, Any]) -> str:
    whose = problem["sweep"] or "the pool"
    if problem["trial"] is not None:
        whose = f"trial {problem['trial']} of {whose}"
    times = "once" if problem["tries"] == 1 else f"{problem['tries']} times"
    return (
        f"Problem of {whose}: {problem['step']} failed {times} since "
        f"{_clock(problem['since_s'])}: {problem['reason']}"
    )


def _clock(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s))
