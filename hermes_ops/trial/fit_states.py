"""The states after completed calls of `fit`: code between the calls sees the model as it was.

One is kept for each call, so that a resumed script can be replayed exactly. They may take a stated
room; a trial that needs more cannot be resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BUDGET_VARIABLE = "HERMES_FIT_STATES_BYTES"
BUDGET_BYTES = 4 << 30
ALWAYS_KEPT = 16
"""So many states are kept however large they are: a large model that is fit a few times."""

Headers = Mapping[int, Mapping[str, Any]]


def retained(headers: Headers, newest: int) -> set[int]:
    """Return the serials to keep: the newest ones, the best of the running fit, the ends of fits.

    A call of `fit` has one end, the newest: one before it comes from a process that was killed.
    """
    newest_first = sorted(headers, reverse=True)
    best = [serial for serial in newest_first if headers[serial].get("best")]
    return {*newest_first[:newest], *best[:1], *final_states(headers).values()}


def final_states(headers: Headers) -> dict[int, int]:
    """Return the serial of the state after each completed fit, by the number of the fit."""
    return {
        int(headers[serial]["fit"]): serial
        for serial in sorted(headers)
        if headers[serial].get("final")
    }


def is_complete(headers: Headers, completed: int) -> bool:
    """Return whether the states after the first `completed` fits are all there."""
    return set(range(completed)) <= set(final_states(headers))


def exceeds(sizes_bytes: Mapping[int, int], budget_bytes: int) -> bool:
    """Return whether states of these sizes are more than may be kept."""
    return len(sizes_bytes) > ALWAYS_KEPT and sum(sizes_bytes.values()) > budget_bytes


def why_not_resumable(fits: int, budget_bytes: int) -> str:
    """Return what is said of a trial whose states need more room than there is."""
    return (
        f"the states after its {fits} fit calls need more than {budget_bytes / (1 << 30):.3g} GiB: "
        "if it is stopped it starts from the beginning"
    )
