"""What a sweep did, for people: a page, pictures and tables, out of plain facts."""

from __future__ import annotations

from hermes_ops.report.bundle import write

__all__ = ["write"]
