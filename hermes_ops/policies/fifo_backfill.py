"""First in, first out, with back-fill: a job that does not fit is passed over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hermes_ops.policies.fifo import Fifo


@dataclass(frozen=True, slots=True)
class FifoBackfill(Fifo):
    """Serve jobs by submission time, then number; each that fits on what is left runs.

    A job gets `min_gpus`. Nothing is reserved: a job of many GPUs may wait for ever behind a
    stream of small ones, so no bound on waiting is promised.
    """

    name: ClassVar[str] = "fifo-backfill"
    backfill: ClassVar[bool] = True
