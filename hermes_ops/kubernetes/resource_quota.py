"""Refusals of pods by a namespace's ResourceQuota: for now, or for ever."""

from __future__ import annotations

import re

_EXCEEDED = re.compile(r"exceeded quota: .*, requested: (.*), used: .*, limited: (.*)")


def is_used_up(message: str) -> bool:
    """Return whether a refusal is that of a quota which may admit the pod later."""
    return "exceeded quota" in message and not _never_fits(message)


def _never_fits(message: str) -> bool:
    """Return whether the pod alone asks for more than the quota has, of anything but GPUs.

    A trial with a range of GPUs may get fewer the next time.
    """
    match = _EXCEEDED.search(message)
    if match is None:
        return False
    from kubernetes.utils.quantity import parse_quantity

    requested, limited = _amounts(match[1]), _amounts(match[2])
    try:
        return any(
            parse_quantity(amount) > parse_quantity(limited[name])
            for name, amount in requested.items()
            if name in limited and "/" not in name
        )
    except ValueError:
        return False


def _amounts(text: str) -> dict[str, str]:
    parts = (part.partition("=") for part in text.split(","))
    return {name.strip(): amount.strip() for name, _, amount in parts}
