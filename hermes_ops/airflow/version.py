"""The versions of Airflow that are supported."""

from __future__ import annotations

from hermes_ops.errors import Unsupported

SUPPORTED = ((3, 3, 2), (3, 4, 0))
"""Airflow versions: at least the first, below the second."""


def check_version() -> None:
    """Refuse an Airflow of another version (Unsupported)."""
    from airflow import __version__

    version = tuple(int(p) for p in __version__.split(".")[:3] if p.isdigit())
    if not SUPPORTED[0] <= version < SUPPORTED[1]:
        raise Unsupported(
            f"Airflow {__version__} is not supported: Hermes Ops needs >=3.3.2,<3.4. "
            "Install one of those, or a release of hermes-ops made for yours."
        )
