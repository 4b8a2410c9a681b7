"""Writes which packages of requirements.lock an image needs: `python helm/images/packages.py`.

Names only: versions and hashes stay in the lock. They are the closure of each image's roots, by
the metadata of the packages that are installed where this runs.
"""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
PYPROJECT = HERE.parents[1] / "pyproject.toml"
OURS = "hermes-ops"
ROOTS = {
    "airflow/packages.txt": ("hermes-ops[postgresql]",),
    "airflow/build-packages.txt": ("hatchling",),
    "mlflow/packages.txt": ("mlflow[auth]", "psycopg2-binary"),
    "trial/scikit-learn.txt": ("scikit-learn",),
    "trial/tensorflow.txt": ("tensorflow-cpu", "scikit-learn"),
    "trial/s3.txt": ("s3fs",),
}
# An image holds Python 3.11 on Linux, for which the lock is made too.
PLATFORM = {**default_environment(), "python_version": "3.11", "sys_platform": "linux"}


def closure(roots: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the roots and of everything they need, without Hermes Ops itself."""
    seen: set[tuple[str, str]] = set()
    ahead = [Requirement(root) for root in roots]
    while ahead:
        wanted = ahead.pop()
        name = canonicalize_name(wanted.name)
        for extra in ("", *wanted.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                ahead += _requirements(name, extra)
    return tuple(sorted({name for name, _ in seen} - {OURS}))


def _requirements(name: str, extra: str) -> list[Requirement]:
    environment = {key: str(value) for key, value in PLATFORM.items()}
    texts = _own(extra) if name == OURS else importlib.metadata.requires(name) or []
    found = [Requirement(text) for text in texts]
    return [
        r for r in found if r.marker is None or r.marker.evaluate({**environment, "extra": extra})
    ]


def _own(extra: str) -> list[str]:
    """Return what pyproject.toml says now: an editable installation may be older."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    return list(project["optional-dependencies"][extra] if extra else project["dependencies"])


def main() -> None:
    """Write the lists beside the Dockerfiles."""
    for file, roots in ROOTS.items():
        (HERE / file).write_text("\n".join(closure(roots)) + "\n")


if __name__ == "__main__":
    main()
