"""What a task still does once its slot is free: nobody should wait for it.

Airflow calls the listener below after it has reported how the task leaves, in the task's process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

PATIENCE_S = 2.0
"""The process must be gone before its task may start again (`timing.reschedule_delay_s`)."""

_pending: list[Callable[[], object]] = []


def do(work: Callable[[], object]) -> None:
    """Have `work` done when the task has left; it may be cut off, so it must be repeatable."""
    _pending.append(work)


def run() -> None:
    """Do what is pending, for at most `PATIENCE_S` seconds."""
    works = _pending[:]
    _pending.clear()
    if works:
        worker = threading.Thread(target=lambda: [work() for work in works], daemon=True)
        worker.start()
        worker.join(PATIENCE_S)
