"""Which program and which data gave figures: kept ones hold as long as neither has changed."""

from __future__ import annotations

import ast
from functools import cache
from hashlib import sha256
from pathlib import Path

from hermes_ops.policies import POLICIES
from hermes_ops.simulator.compare import compare

ROOT = Path(__file__).resolve().parents[1]
TABLE = "hermes_ops.policies"  # names every policy: what one imports says more


@cache
def version(policy: str, data: Path) -> str:
    """A digest of the data and of all modules on which a policy's figures depend.

    Comments and layout do not count; a policy that POLICIES has not (a bound) is the simulator's.
    """
    digest = sha256(data.read_bytes())
    start = [compare.__module__]
    if policy in POLICIES:
        start.append(POLICIES[policy].__module__)
    for name, code in sorted(_modules(start).items()):
        digest.update(f"{name}\n{code}\n".encode())
    return digest.hexdigest()[:16]


def _modules(names: list[str]) -> dict[str, str]:
    """The code of these modules of ours and of all that they import."""
    found: dict[str, str] = {}
    names = list(names)
    while names:
        name = names.pop()
        path = _path(name)
        if path is None or name in found or name == TABLE:
            continue
        found[name], imported = _code(path)
        names += imported
    return found


@cache
def _code(path: Path) -> tuple[str, tuple[str, ...]]:
    """A module's code without its layout, and what it imports; a name in a module counts too."""
    tree = ast.parse(path.read_text())
    imported: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            imported += [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
        elif isinstance(node, ast.Import):
            imported += [name.name for name in node.names]
    return ast.dump(tree), tuple(imported)


def _path(name: str) -> Path | None:
    """The file of a module of ours; None for anything else."""
    if name.partition(".")[0] != "hermes_ops":
        return None
    place = ROOT / name.replace(".", "/")
    paths = (place.with_name(f"{place.name}.py"), place / "__init__.py")
    return next((path for path in paths if path.is_file()), None)
