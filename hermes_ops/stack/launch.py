"""Start one program of a stack: `python -m hermes_ops.stack.launch --home HOME NAME`.

The supervisor runs this in place of the program. A component that was SIGKILLed leaves children
(LocalExecutor's workers, an HTTP server's worker) that nobody else would ever end; they are ended
here before the new instance replaces this process.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from hermes_ops.stack import processes
from hermes_ops.stack.layout import Layout

# Its interpreters run the scripts of live trials; each ends by itself with its own trial.
NEVER_REAPED = frozenset({"standby"})


def main(arguments: list[str] | None = None) -> None:
    """End what is left of the previous instance of the program, then become the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("name")
    options = parser.parse_args(arguments)
    home = options.home.resolve()  # relative to the supervisor's own folder
    reap(home, options.name)
    program = json.loads(Layout(home).programs.read_text())[options.name]
    os.nice(program.get("nice", 0))  # not in the table of an earlier version
    os.execve(program["command"][0], program["command"], program["environment"])  # noqa: S606


def reap(home: Path, name: str) -> int:
    """End what is left of an earlier instance of program `name`; return how many processes."""
    if name in NEVER_REAPED:
        return 0
    ended = processes.end(home, lambda member: _belongs(member, name))
    if ended:
        print(f"ended {ended} processes of an earlier {name}", flush=True)  # noqa: T201
    return ended


def _belongs(member: processes.HomeProcess, name: str) -> bool:
    orphan = name == "scheduler" and not member.program and bool(member.trial)
    return member.program == name or orphan


if __name__ == "__main__":
    main()
