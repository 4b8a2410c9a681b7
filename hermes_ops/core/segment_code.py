"""The code of a segment that ended with no process that could have an exit code."""

INCOMPLETE = 256
"""Stands for an exit code where not all nodes of a trial were there; no process ends with it."""
