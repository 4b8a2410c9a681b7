"""Create or upgrade the tables of MLflow's database: `python -m hermes_ops.tracking.database`.

The URL comes from MLFLOW_BACKEND_STORE_URI: `mlflow db upgrade URL` would show its password in the
list of processes.
"""

from __future__ import annotations

import os

from sqlalchemy import create_engine, inspect


def main() -> None:
    """Upgrade the tables, or create them where there are none."""
    url = os.environ["MLFLOW_BACKEND_STORE_URI"]
    engine = create_engine(url)
    try:
        has_tables = inspect(engine).has_table("experiments")
    finally:
        engine.dispose()
    if has_tables:
        from mlflow.db import commands

        commands(["upgrade", url], standalone_mode=True)
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    SqlAlchemyStore(url, "mlflow-artifacts:/")  # type: ignore[no-untyped-call] # MLflow's own


if __name__ == "__main__":
    main()
