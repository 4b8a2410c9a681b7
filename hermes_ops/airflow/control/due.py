"""When work of the controller is due again, by a clock that may be set back."""

from __future__ import annotations


def is_due(now_s: float, due_s: float, most_s: float) -> bool:
    """Return whether work is due that was put off, for at most `most_s`, until `due_s`.

    So it is where the clock was set back since: else it would wait as long as that was.
    """
    return not due_s - most_s <= now_s < due_s
