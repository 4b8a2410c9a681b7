"""The Tab key in a real zsh, by its own completion system."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cli.shells import SWEEPS, Shell, with_sweeps


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder with sweeps, beside it the folder of a user."""
    if shutil.which("zsh") is None:
        if os.environ.get("CI"):
            pytest.fail("there is no zsh (.ci/run installs it)")
        pytest.skip("there is no zsh: install the package zsh")
    folder = tmp_path_factory.mktemp("home")
    (folder / "user").mkdir()
    return with_sweeps(folder)


def started(home: Path, *options: str) -> Shell:
    """An interactive zsh of that user."""
    user = str(home / "user")
    shell = Shell(["zsh", *options, "-i"], home, HOME=user, ZDOTDIR=user)
    shell.until_end("bindkey -e; unsetopt zle_bracketed_paste prompt_sp")
    return shell


@pytest.fixture(scope="module")
def zsh(home: Path) -> Iterator[Shell]:
    shell = started(home, "-f")
    shell.until_end('autoload -Uz compinit; compinit -u -D; eval "$(hermes --show-completion)"')
    yield shell
    shell.close()


@pytest.mark.parametrize(
    ("typed", "word"),
    [
        ("sweep exte", "extend"),
        ("sweep extend my_dag:search:run-1 --tri", "--trials"),
        ("policy front", "frontrunner"),
        ("sweep report my_d", "my_dag:"),
        ("sweep report my_dag:s", "my_dag:search:run-1"),
        ("sweep report my_dag:search:", "my_dag:search:run-1"),
        ("sweep watch nights:scheduled__2026-01-02T03:0", SWEEPS[2]),
        ("explain nig", f"{SWEEPS[2]}/"),
        ("explain my_dag:refine:run-1/", "my_dag:refine:run-1/4"),
    ],
)
def test_what_was_begun_is_completed(zsh: Shell, typed: str, word: str) -> None:
    assert zsh.words(f"hermes {typed}") == ["hermes", *typed.split()[:-1], word]


def test_the_number_of_a_trial_is_typed_right_behind_the_slash(zsh: Shell) -> None:
    said = zsh.until_end("hermes explain nig\t4", before="printf '<%s>\\n' ")
    assert f"<{SWEEPS[2]}/4>" in said


def test_candidates_are_listed_with_their_help(zsh: Shell) -> None:
    said = zsh.until_end("hermes sweep re\t", before=": ")
    shown = [line.split() for line in said.splitlines()]
    for command in ("report", "resume"):
        assert any(line[:2] == [command, "--"] for line in shown), said


def test_the_hermes_that_was_typed_is_asked(zsh: Shell) -> None:
    own = Path(sys.executable).parent / "hermes"
    zsh.until_end("hidden=$PATH; path=(/usr/bin /bin)")
    try:
        assert zsh.words(f"{own} sweep exte") == [str(own), "sweep", "extend"]
    finally:
        zsh.until_end("PATH=$hidden")


def test_where_nothing_is_offered_files_are(zsh: Shell, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").touch()
    zsh.until_end(f"cd {tmp_path}")
    assert zsh.words("hermes sweep run sw")[-1] == "sweep.yaml"


def test_once_installed_the_first_tab_of_a_new_shell_completes(home: Path) -> None:
    first = started(home, "-f")
    said = first.until_end("hermes --install-completion")
    first.close()
    assert "zsh completion installed" in said
    shell = started(home)
    try:
        assert shell.words("hermes sweep exte") == ["hermes", "sweep", "extend"]
        assert shell.words("hermes sweep report my_dag:r")[-1] == "my_dag:refine:run-1"
    finally:
        shell.close()
