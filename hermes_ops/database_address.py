"""Addresses of databases, with the driver that is installed."""

from __future__ import annotations

from importlib.util import find_spec

_OPEN = "postgresql://"
_DRIVERS = ("psycopg2", "psycopg")  # the first is that of the extra `postgresql`


def with_driver(url: str) -> str:
    """Name the driver in a PostgreSQL address that leaves it open.

    SQLAlchemy 2.1 would take psycopg, version 2.0 psycopg2, whether it is installed or not.
    """
    if not url.startswith(_OPEN):
        return url
    driver = next((name for name in _DRIVERS if find_spec(name) is not None), _DRIVERS[0])
    return f"postgresql+{driver}://{url[len(_OPEN) :]}"
