"""The DAG of a sweep: its plan and its report, for DAGs of its own and inside others.

`from hermes_ops.airflow import sweep` is this package, and it is the decorator `dag.sweep`: the
import machinery sets a package as an attribute of its parent, so the name can be nothing else.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Decorator(ModuleType):
    """A package that is called as the decorator of the same name."""

    def __call__(self, function: Any = None, **arguments: Any) -> Any:  # noqa: ANN401 - see group
        """Make a task group of a function that returns a sweep's content: `dag.sweep`."""
        from hermes_ops.airflow.sweep.dag import sweep

        return sweep(function, **arguments)


sys.modules[__name__].__class__ = _Decorator
