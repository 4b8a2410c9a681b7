"""The rules that sweeps set, applied around the pool's policy: live, and in a replay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hermes_ops.config.model import SweepConfig
from hermes_ops.core.early_stop import EarlyStop
from hermes_ops.core.model import Policy, SweepId
from hermes_ops.core.sweep_limits import MaxParallel, MaxUnreported
from hermes_ops.policies import compares_trials


def with_sweep_rules(
    policy: Policy[Any], configs: Mapping[str, SweepConfig], open_per_gpu: int | None
) -> Policy[Any]:
    """Wrap the policy in each sweep's early stopping, its limit of parallel trials and its search.

    `open_per_gpu`: trials for each GPU that a sweep whose search learns may have open without a
    loss; None: all.
    """
    configs_by_id = {SweepId(s): config for s, config in sorted(configs.items())}
    limits = ((s, config.budget.max_parallel) for s, config in configs_by_id.items())
    rules = tuple((s, config.early_stop.value) for s, config in configs_by_id.items())
    if open_per_gpu is not None:
        learning = frozenset(s for s, config in configs_by_id.items() if config.search.learns)
        policy = MaxUnreported(policy, learning, open_per_gpu)
    of_sweeps = tuple((s, most) for s, most in limits if most is not None)
    limited = MaxParallel(policy, of_sweeps, compares=compares_trials(policy.name))
    return EarlyStop(limited, rules)
