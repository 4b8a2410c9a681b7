"""A sweep's configuration as other people may see it."""

from __future__ import annotations

from typing import Any

from hermes_ops.config import SweepConfig, render_environment
from hermes_ops.trial.masks import Mask, secret_values


def published(config: SweepConfig) -> SweepConfig:
    """The configuration with the secrets in its environment and command replaced by stars."""
    trial = config.trial
    pod = trial.pod
    own = dict(pod.environment or {}) if pod is not None else {}
    mask = Mask(secret_values({**own, **render_environment(config, {})}))
    masked: dict[str, Any] = {
        "environment": {name: mask.text(value) for name, value in trial.environment.items()},
        "command": tuple(mask.text(argument) for argument in trial.command),
    }
    if pod is not None and own:
        stars = {name: mask.text(value) for name, value in own.items()}
        masked["pod"] = pod.model_copy(update={"environment": stars})
    return config.model_copy(update={"trial": trial.model_copy(update=masked)})
