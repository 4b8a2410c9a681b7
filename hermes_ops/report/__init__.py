"""The report of a sweep: a page, pictures and tables, drawn from plain facts."""

from __future__ import annotations

from hermes_ops.report.background import Alternative, Background, BestSoFar, TrialEnding
from hermes_ops.report.page import PAGE, write

__all__ = ["PAGE", "Alternative", "Background", "BestSoFar", "TrialEnding", "write"]
