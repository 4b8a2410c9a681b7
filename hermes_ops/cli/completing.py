"""What the shell offers behind a command: ids of sweeps and trials, names of policies.

All of it is read from the state folder; no service is asked, as a key press must not wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from hermes_ops.trial.copies import safe_name

MOST = 50


def sweeps(incomplete: str) -> list[str]:
    """The newest sweeps of the state folder whose ids begin so."""
    folders = sorted(_children(_home() / "sweeps"), key=lambda p: (-_changed_s(p), p.name))
    return [name for name in map(_sweep_of, folders) if name.startswith(incomplete)][:MOST]


def trials(incomplete: str) -> list[str]:
    """SWEEP/NUMBER; of several sweeps that begin so, the sweeps with a slash."""
    sweep, slash, number = incomplete.partition("/")
    if not slash:
        return [f"{name}/" for name in sweeps(sweep)]
    folder = _home() / "sweeps" / safe_name(sweep) / "trials"
    found = sorted(int(p.name) for p in _children(folder) if p.name.isdigit())
    return [f"{sweep}/{n}" for n in found if str(n).startswith(number)][:MOST]


def policies(incomplete: str) -> list[str]:
    """The policies of a live pool that begin so."""
    from hermes_ops.policies import live_policies

    return [name for name in live_policies() if name.startswith(incomplete)]


def _sweep_of(folder: Path) -> str:
    """The id of the sweep of that folder; a name that ends in a digest stands for another id."""
    if re.search(r"-[0-9a-f]{8}$", folder.name):
        log = folder / "decisions.jsonl"
        with contextlib.suppress(OSError, ValueError, KeyError), log.open() as decisions:
            return str(json.loads(decisions.readline())["sweep"])
    return folder.name


def _home() -> Path:
    return Path(os.environ.get("HERMES_HOME") or Path.home() / ".hermes")


def _children(folder: Path) -> Iterator[Path]:
    try:
        yield from folder.iterdir()
    except OSError:
        return


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
