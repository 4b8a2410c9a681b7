"""What the shell offers behind a command: ids of sweeps and trials, names of policies.

All of it is read from the state folder; no service is asked, as a key press must not wait.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

MOST = 50


def sweeps(incomplete: str) -> list[str]:
    """The newest sweeps of the state folder whose ids begin so."""
    return [p.name for p in _newest(incomplete)][:MOST]


def trials(incomplete: str) -> list[str]:
    """SWEEP/NUMBER; of several sweeps that begin so, the sweeps with a slash."""
    sweep, slash, number = incomplete.partition("/")
    if not slash:
        return [f"{name}/" for name in sweeps(sweep)]
    folder = _home() / "sweeps" / sweep / "trials"
    found = sorted(int(p.name) for p in _children(folder) if p.name.isdigit())
    return [f"{sweep}/{n}" for n in found if str(n).startswith(number)][:MOST]


def policies(incomplete: str) -> list[str]:
    """The policies of a live pool that begin so."""
    from hermes_ops.policies import live_policies

    return [name for name in live_policies() if name.startswith(incomplete)]


def _newest(prefix: str) -> list[Path]:
    found = [p for p in _children(_home() / "sweeps") if p.name.startswith(prefix)]
    return sorted(found, key=lambda p: (-_changed_s(p), p.name))


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
