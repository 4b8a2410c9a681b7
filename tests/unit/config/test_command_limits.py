"""What Linux takes as arguments and variables, asked of Linux itself."""

from __future__ import annotations

import subprocess

import pytest

from hermes_ops.config.render import MOST_ARGUMENT_BYTES, why_not_started

TEXT = 10_000  # characters: the longest of a sweep file
BASE = {"PATH": "/usr/bin:/bin"}


def starts(command: list[str], environment: dict[str, str]) -> bool:
    try:
        subprocess.run(["true", *command], env={**BASE, **environment}, check=True)
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("command", "environment", "why"),
    [
        (["語" * TEXT] * 20, {"HERMES_PARAM_P": "😀" * TEXT}, None),
        (["a" * MOST_ARGUMENT_BYTES], {}, None),
        (["--all=" + "語" * 43_690], {}, "argument 0 of its command has 131,076 bytes"),
        ([], {"LONG": "é" * 70_000}, "the environment variable LONG has 140,005 bytes"),
        ([], {f"P{n}": "😀" * TEXT for n in range(60)}, "2,400,"),
        (["語" * TEXT] * 80, {}, "bytes together"),
        ([], {f"P{n}": "x" for n in range(1_000)}, None),
    ],
)
def test_linux_starts_what_is_said_to_start_and_nothing_else(
    command: list[str], environment: dict[str, str], why: str | None
) -> None:
    said = why_not_started(command, environment)
    assert starts(command, environment) is (said is None)
    if why is not None:
        assert said is not None
        assert why in said
