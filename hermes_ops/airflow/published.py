"""A sweep's configuration as other people may see it."""

from __future__ import annotations

from hermes_ops.config import SweepConfig, render_environment
from hermes_ops.trial.masks import Mask, secret_values


def published(config: SweepConfig) -> SweepConfig:
    """The configuration with the secrets in its environment and command replaced by stars."""
    trial = config.trial
    mask = Mask(secret_values(render_environment(config, {})))
    masked = {
        "environment": {name: mask.text(value) for name, value in trial.environment.items()},
        "command": tuple(mask.text(argument) for argument in trial.command),
    }
    return config.model_copy(update={"trial": trial.model_copy(update=masked)})
