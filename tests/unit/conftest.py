"""Tests over many drawn worlds, or a large one, come last and are not counted for coverage.

They take more than twice as long where their lines are counted.
"""

from __future__ import annotations

import coverage
import pytest


def _is_drawn(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(mark) for mark in ("hypothesis", "law"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_is_drawn)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Stop counting at the first test that is not counted, where `coverage run` counts."""
    counting = coverage.Coverage.current()
    if counting is not None and _is_drawn(item):
        counting.stop()
