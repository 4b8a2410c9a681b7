"""The Tab key in a real bash, whose words end at colons."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes_ops.cli.bash_words import joined
from hermes_ops.trial.copies import safe_name

SWEEPS = ("my_dag:search:run-1", "my_dag:refine:run-1", "nights:scheduled__2026-01-02T03:00:00")
PATIENCE_S = 60.0


class Bash:
    """An interactive bash with the completion of `hermes`."""

    def __init__(self, home: Path, setup: str = "") -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {**os.environ, "PATH": path, "HERMES_HOME": str(home), "TERM": "dumb", "PS1": "$ "}
        self.terminal, inside = pty.openpty()
        command = ["bash", "--norc", "--noprofile", "-i"]
        self.process = subprocess.Popen(
            command, stdin=inside, stdout=inside, stderr=inside, env=own, start_new_session=True
        )
        os.close(inside)
        self.until_end(f'{setup or ":"}; eval "$(_HERMES_COMPLETE=source_bash hermes)"')

    def until_end(self, line: str, before: str = "") -> str:
        """Type a line, then a word at its beginning, and return what came until its end."""
        os.write(self.terminal, f"{line}\x05; echo E''ND\x01{before}\r".encode())
        said, deadline_s = b"", time.monotonic() + PATIENCE_S
        while b"END\r" not in said:
            left_s = deadline_s - time.monotonic()
            assert select.select([self.terminal], [], [], max(0.0, left_s))[0], said
            said += os.read(self.terminal, 4096)
        return said.decode()

    def words(self, typed: str) -> list[str]:
        """The words on the line once the Tab key was pressed behind what was typed."""
        said = self.until_end(f"{typed}\t", before="printf '<%s>\\n' ")
        return [part.strip()[1:-1] for part in said.splitlines() if part.startswith("<")]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder with sweeps of groups and of a nightly DAG."""
    folder = tmp_path_factory.mktemp("home")
    for sweep in SWEEPS:
        own = folder / "sweeps" / safe_name(sweep)
        (own / "trials" / "4").mkdir(parents=True)
        (own / "decisions.jsonl").write_text(json.dumps({"sweep": sweep, "trial": 4}) + "\n")
    return folder


@pytest.fixture(scope="module")
def bash(home: Path) -> Iterator[Bash]:
    shell = Bash(home)
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
def test_an_id_with_colons_is_completed_as_one_word(bash: Bash, typed: str, word: str) -> None:
    assert bash.words(f"hermes {typed}") == ["hermes", *typed.split()[:-1], word]


def test_what_stands_before_and_behind_an_id_is_completed_as_ever(bash: Bash) -> None:
    assert bash.words("hermes sweep exte") == ["hermes", "sweep", "extend"]
    words = bash.words("hermes sweep extend my_dag:search:run-1 --tri")
    assert words == ["hermes", "sweep", "extend", "my_dag:search:run-1", "--trials"]


def test_where_colons_end_no_words_ids_are_completed_whole(home: Path) -> None:
    shell = Bash(home, setup="COMP_WORDBREAKS=${COMP_WORDBREAKS//:}")
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
    assert joined(words) == typed
