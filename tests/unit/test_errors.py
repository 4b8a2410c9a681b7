"""Errors cross the border between processes."""

from __future__ import annotations

import pickle

import pytest

from hermes_ops.errors import ConfigError, NotAllowed, Problem, file_error_text


@pytest.mark.parametrize("kind", [ConfigError, NotAllowed])
def test_a_wrong_input_found_in_another_process_is_told_as_it_is(kind: type[ConfigError]) -> None:
    error = kind("a file", (Problem("line 2", "0", "at least 1", "correct it"),))
    received = pickle.loads(pickle.dumps(error))
    assert type(received) is kind
    assert str(received) == str(error)
    assert received.problems == error.problems


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (FileNotFoundError(2, "No such file or directory", "/x.csv"), "No such file or directory"),
        (OSError("Not a gzipped file (b'wo')"), "Not a gzipped file (b'wo')"),
        (ValueError("line contains NUL"), "line contains NUL"),
    ],
)
def test_the_error_of_a_file_is_told_without_its_number_and_path(
    error: Exception, text: str
) -> None:
    assert file_error_text(error) == text
