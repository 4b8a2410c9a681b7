"""For all tests: hypothesis without deadlines, and no service that runs before it is needed."""

from __future__ import annotations

import pytest
from hypothesis import settings

# Time is no property of the program.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the shared stack come last: once started it runs until the session's end."""
    items.sort(key=lambda item: "stack" in getattr(item, "fixturenames", ()))
