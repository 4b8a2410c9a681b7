"""A command whose output nobody reads any more, as in `hermes logs X | head`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hermes_ops import cli


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["sweep", "schema"],
        ["simulate", "--poisson", "3", "--gpus", "8"],  # a table, printed by rich
    ],
)
def test_a_command_whose_reader_has_gone_ends_with_141_and_says_nothing(
    arguments: list[str],
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-c", "from hermes_ops import cli; cli.main()", *arguments],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (cli.PIPE_CLOSED, "")
    assert cli.PIPE_CLOSED == 141
