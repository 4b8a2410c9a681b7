"""For all tests: hypothesis without deadlines, and no file or service before it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.bucket import Bucket

# Time is no property of the program.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


# Each is written as mark.NAME in its files.
MARKS_OF_FEW = ("heavy", "horovod", "installation", "k8s", "tensorflow")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A run of one of these marks imports no file without it: all files take half a minute.

    A mark may also be that of a parameter of a fixture, in the conftest.py beside the file.
    """
    mark = config.option.markexpr.partition(" and ")[0]
    if mark in MARKS_OF_FEW and collection_path.match("test_*.py"):
        for file in (collection_path, collection_path.with_name("conftest.py")):
            if file.exists() and f"mark.{mark}" in file.read_text():
                return None
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the shared stack come last: once started it runs until the session's end."""
    items.sort(key=lambda item: "stack" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def s3() -> Iterator[Bucket]:
    """A bucket on loopback, for all tests that ask for one."""
    from tests.bucket import bucket

    with bucket() as made:
        yield made
