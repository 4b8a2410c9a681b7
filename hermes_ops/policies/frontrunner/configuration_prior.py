"""The learned prior over configurations: what recorded tasks say of common hyper-parameters.

Many spaces have the same hyper-parameters (learning rate, momentum, dropout, ...), and what was
good on other tasks is a fair guess on a new one. `bench/configuration_prior_learn.py` learns from
recorded tasks how good a configuration is, by its hyper-parameters with known names, and writes
`configuration_prior.json`. `forecast` uses it as the mean of the final losses before any curve is
known; the curves of the sweep then correct it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from hermes_ops.core.speed_model import Floats
from hermes_ops.policies.frontrunner.configurations import (
    Configuration,
    is_number,
    known_trials,
)
from hermes_ops.policies.frontrunner.correction import rounded

FILE = str(Path(__file__).with_name("configuration_prior.json"))
EXTREME = 3.0  # deviations of the recorded configurations; values beyond it are clipped to it

PARAMETERS = {
    "learning_rate": "log",
    "batch_size": "log",
    "momentum": "log of 1 less",
    "weight_decay": "log",
    "num_layers": "linear",
    "max_units": "log",
    "max_dropout": "linear",
    "beta1": "log of 1 less",
    "beta2": "log of 1 less",
    "epsilon": "log",
    "l1": "log",
    "l2": "log",
    "linear_decay": "log",
    "exponential_decay": "log",
}
"""The known hyper-parameters, and the scale on which each counts."""

SYNONYMS = {
    "lr": "learning_rate",
    "base_lr": "learning_rate",
    "init_lr": "learning_rate",
    "learning_rate_init": "learning_rate",
    "initial_learning_rate": "learning_rate",
    "batch": "batch_size",
    "train_batch_size": "batch_size",
    "per_device_train_batch_size": "batch_size",
    "wd": "weight_decay",
    "layers": "num_layers",
    "n_layers": "num_layers",
    "num_hidden_layers": "num_layers",
    "units": "max_units",
    "num_units": "max_units",
    "hidden_dim": "max_units",
    "hidden_size": "max_units",
    "hidden_units": "max_units",
    "dropout": "max_dropout",
    "dropout_rate": "max_dropout",
    "beta_1": "beta1",
    "adam_beta1": "beta1",
    "beta_2": "beta2",
    "adam_beta2": "beta2",
    "eps": "epsilon",
    "adam_epsilon": "epsilon",
}
"""Other names of the known hyper-parameters, as `canonical_name` writes them."""


ARRAYS = ("center", "spread", "hidden", "bias", "output")


@dataclass(frozen=True, slots=True, eq=False)
class ConfigurationPrior:
    """A network of P known hyper-parameters and H hidden units that scores configurations.

    `center[P]` and `spread[P]` standardise the values on their scales. The inputs are the P values,
    0 (the mean) for an unknown one, and P flags that mark the known ones; the weights are
    `hidden[2P, H]`, `bias[H]` and `output[H]`. A score is the expected normal score of the final
    loss among the configurations of a task: lower is better. `spaces` are the sets of
    hyper-parameter names of the recorded spaces.
    """

    center: Floats
    spread: Floats
    hidden: Floats
    bias: Floats
    output: Floats
    spaces: frozenset[frozenset[str]]

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ConfigurationPrior:
        """Return the prior of a file's content; keys on its origin are ignored."""
        arrays = {name: np.array(document[name], dtype=float) for name in ARRAYS}
        return cls(**arrays, spaces=frozenset(map(frozenset, document["spaces"])))

    def to_json(self) -> dict[str, object]:
        """Return the content for a file, with numbers rounded to five digits."""
        arrays = {name: rounded(getattr(self, name), 5).tolist() for name in ARRAYS}
        return {"spaces": sorted(map(sorted, self.spaces)), **arrays}

    def familiarity(self, names: Set[str]) -> float:
        """Return the similarity of a space, 0 to 1, to the recorded one that is most similar.

        It is the square of the Jaccard index of their hyper-parameter names.
        """
        shares = (len(names & space) / len(names | space) for space in self.spaces)
        return max(shares, default=0.0) ** 2

    def inputs(self, values: Floats) -> Floats:
        """Return the inputs, N x 2P, of N configurations: `values[N, P]`, NaN where unknown."""
        is_known = ~np.isnan(values)
        deviations = np.clip((values - self.center) / self.spread, -EXTREME, EXTREME)
        return np.concatenate([np.where(is_known, deviations, 0.0), is_known], axis=1)

    def scores(self, values: Floats) -> Floats:
        """Return N scores of `values[N, P]`, NaN where unknown."""
        scores: Floats = np.tanh(self.inputs(values) @ self.hidden + self.bias) @ self.output
        return scores


@lru_cache(maxsize=4)
def read_prior(path: str) -> ConfigurationPrior:
    """Return the prior in a file."""
    return ConfigurationPrior.from_json(json.loads(Path(path).read_text("utf-8")))


@lru_cache(maxsize=64)
def prior_scores(configurations: tuple[Configuration, ...]) -> Floats:
    """Return N scores with mean 0, lower is better; all 0 where no known value differs.

    Their magnitude shrinks with the `familiarity` of the space: an optimiser or a network with
    other hyper-parameters may need other values of the shared ones.
    """
    distinct = known_trials(configurations)
    return distinct.values(_scores(distinct.configurations))


def _scores(configurations: tuple[Configuration, ...]) -> Floats:
    values = known_values(configurations)
    if not len(values) or np.isnan(values).all():
        return np.zeros(len(configurations))
    prior = read_prior(FILE)
    scores = prior.scores(values)
    centred: Floats = prior.familiarity(names_of(configurations)) * (scores - scores.mean())
    return centred


def names_of(configurations: Sequence[Configuration]) -> frozenset[str]:
    """Return the names of all hyper-parameters, without paths and synonyms."""
    return frozenset(canonical_name(name) for each in configurations for name, _ in each)


def known_values(configurations: Sequence[Configuration]) -> Floats:
    """Return N x P values of the known hyper-parameters on their scales, NaN where unknown."""
    columns = {name: number for number, name in enumerate(PARAMETERS)}
    values = np.full((len(configurations), len(columns)), np.nan)
    for row, configuration in enumerate(configurations):
        for name, value in configuration:
            column = columns.get(canonical_name(name))
            if column is not None and is_number(value):
                values[row, column] = value
    return np.stack(
        [_on_scale(values[:, columns[name]], scale) for name, scale in PARAMETERS.items()], axis=1
    )


@lru_cache(maxsize=512)
def canonical_name(name: str) -> str:
    """Return the name without its path (`optimizer.lr`, `model/lr`), and without a synonym."""
    last = name.lower().replace("-", "_").replace("/", ".").rpartition(".")[2]
    return SYNONYMS.get(last, last)


LEAST = 1e-12  # smaller values are raised to it before the logarithm


def _on_scale(values: Floats, scale: str) -> Floats:
    if scale == "linear":
        return values
    positive: Floats = np.maximum(1 - values if scale == "log of 1 less" else values, LEAST)
    return np.log10(positive)
