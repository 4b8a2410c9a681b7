"""Errors cross the border between processes."""

from __future__ import annotations

import pickle

import pytest

from hermes_ops.errors import ConfigError, NotAllowed, Problem


@pytest.mark.parametrize("kind", [ConfigError, NotAllowed])
def test_a_wrong_input_found_in_another_process_is_told_as_it_is(kind: type[ConfigError]) -> None:
    error = kind("a file", (Problem("line 2", "0", "at least 1", "correct it"),))
    received = pickle.loads(pickle.dumps(error))
    assert type(received) is kind
    assert str(received) == str(error)
    assert received.problems == error.problems
