"""What the sweeps themselves ask for, around the pool's policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hermes_ops.airflow.control.books import Book
from hermes_ops.core.early_stop import EarlyStop
from hermes_ops.core.learning import OpenForLearning
from hermes_ops.core.model import Policy, SweepId
from hermes_ops.core.parallel import MaxParallel


def within_sweeps(policy: Policy[Any], books: Mapping[str, Book], open_per_gpu: int) -> Policy[Any]:
    """The policy by each sweep's early stopping, its limit of parallel trials and its search.

    `open_per_gpu`: trials for each GPU that a sweep whose search learns may have open.
    """
    plans = {SweepId(s): book.plan for s, book in sorted(books.items())}
    learning = frozenset(s for s, plan in plans.items() if plan.learns)
    limits = ((s, plan.config.budget.max_parallel) for s, plan in plans.items())
    rules = tuple((s, plan.config.early_stop.value) for s, plan in plans.items())
    taught = OpenForLearning(policy, learning, open_per_gpu)
    limited = MaxParallel(taught, tuple((s, most) for s, most in limits if most is not None))
    return EarlyStop(limited, rules)
