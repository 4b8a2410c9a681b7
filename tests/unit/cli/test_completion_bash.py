"""The Tab key in a real bash, whose words end at colons."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes_ops.cli.completion import join_words
from tests.unit.cli.shells import SWEEPS, Shell, with_sweeps


def started(home: Path, setup: str = ":") -> Shell:
    """An interactive bash with the completion of `hermes`."""
    shell = Shell(["bash", "--norc", "--noprofile", "-i"], home)
    shell.until_end(f'{setup}; eval "$(_HERMES_COMPLETE=source_bash hermes)"')
    return shell


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_sweeps(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def bash(home: Path) -> Iterator[Shell]:
    shell = started(home)
    yield shell
    shell.close()


@pytest.mark.parametrize(
    ("typed", "word"),
    [
        ("sweep report my_d", "my_dag:"),
        ("sweep report my_dag:s", "my_dag:search:run-1"),
        ("sweep report my_dag:search:", "my_dag:search:run-1"),
        ("sweep watch nights:scheduled__2026-01-02T03:0", SWEEPS[2]),
        ("explain my_dag:refine:run-1/", "my_dag:refine:run-1/4"),
        ("sweep report nig", SWEEPS[2]),
    ],
)
def test_an_id_with_colons_is_completed_as_one_word(bash: Shell, typed: str, word: str) -> None:
    assert bash.words(f"hermes {typed}") == ["hermes", *typed.split()[:-1], word]


def test_what_stands_before_and_behind_an_id_is_completed_as_ever(bash: Shell) -> None:
    assert bash.words("hermes sweep exte") == ["hermes", "sweep", "extend"]
    words = bash.words("hermes sweep extend my_dag:search:run-1 --tri")
    assert words == ["hermes", "sweep", "extend", "my_dag:search:run-1", "--trials"]


def test_where_colons_end_no_words_ids_are_completed_whole(home: Path) -> None:
    shell = started(home, setup="COMP_WORDBREAKS=${COMP_WORDBREAKS//:}")
    try:
        assert shell.words("hermes sweep report my_dag:s")[-1] == "my_dag:search:run-1"
    finally:
        shell.close()


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (["report", "a", ":", "b"], ["report", "a:b"]),
        (["report", "a", ":"], ["report", "a:"]),
        (["report", "a", ":", ""], ["report", "a:", ""]),
        (["report", "a", "::", "b", ":", "c", "--open"], ["report", "a::b:c", "--open"]),
        (["--home", "=", "x", ":", "y", "re"], ["--home", "=", "x:y", "re"]),
        (["'a:b"], ["'a:b"]),
        ([""], [""]),
    ],
)
def test_what_bash_splits_at_colons_is_put_together(words: list[str], typed: list[str]) -> None:
    assert join_words(words) == typed
