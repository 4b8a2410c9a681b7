"""What a sweep did, for people: a page, pictures and tables, out of plain facts."""

from __future__ import annotations

from hermes_ops.report.background import Alternative, Background, Course, Ending
from hermes_ops.report.bundle import PAGE, write

__all__ = ["PAGE", "Alternative", "Background", "Course", "Ending", "write"]
