"""A shell in a terminal of its own, as its user sees it: lines are typed, Tab is pressed."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hermes_ops.trial.checkpoint_store.store import safe_name

SWEEPS = ("my_dag:search:run-1", "my_dag:refine:run-1", "nights:scheduled__2026-01-02T03:00:00")
PATIENCE_S = 60.0


def with_sweeps(home: Path) -> Path:
    """Make it a state folder with sweeps of groups and of a nightly DAG, and return it."""
    for sweep in SWEEPS:
        own = home / "sweeps" / safe_name(sweep)
        (own / "trials" / "4").mkdir(parents=True)
        (own / "decisions.jsonl").write_text(json.dumps({"sweep": sweep, "trial": 4}) + "\n")
    return home


class Shell:
    """An interactive shell that finds `hermes`, with the keys of Emacs."""

    def __init__(self, command: Sequence[str], home: Path, **environment: str) -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {**os.environ, "PATH": path, "HERMES_HOME": str(home), "TERM": "dumb", "PS1": "$ "}
        self.terminal, inside = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=inside,
            stdout=inside,
            stderr=inside,
            env={**own, **environment},
            start_new_session=True,
        )
        os.close(inside)

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
