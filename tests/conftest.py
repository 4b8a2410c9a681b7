"""Hypothesis for all tests: no example has a deadline, as time is no property of the program."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
