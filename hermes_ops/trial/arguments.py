"""Tells the arguments that a script prints at its start from its metrics."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hermes_ops.trial.output import Found

_MOST_HELD = 1000
_OBJECTS = re.compile(
    r"Namespace\(|(?:Args|Arguments|Config|Configuration|Params|Parameters|Options|Settings)\("
)
ARGUMENT_NAMES = frozenset((
    "epochs", "num_epochs", "n_epochs", "nb_epochs", "max_epochs", "num_train_epochs",
    "total_epochs", "max_steps", "batch_size", "train_batch_size", "eval_batch_size",
    "batchsize", "per_device_train_batch_size", "seed", "random_seed", "random_state",
    "num_workers", "workers", "n_workers", "weight_decay", "momentum",
))  # fmt: skip
_SHOWN_WITH_METRICS = frozenset({"lr", "learning_rate"})


class Arguments:
    """Holds back what may be an argument until the script's lines tell.

    Arguments are printed once, metrics again and again. So before the first value of the objective
    a line without it counts once another one with the same names has said another step. And a line
    with the objective that looks like arguments (`Namespace(…)`, `epochs`, `seed`, parameters of
    the sweep) counts once another one with the same names has come; a line of another kind that
    holds the objective shows that it was none. `dropped` are such lines that were not counted.
    """

    def __init__(self, parameters: Collection[str], asked: Collection[str] = ()) -> None:
        names = {name.lower() for name in parameters}
        self._names = ARGUMENT_NAMES | (names - _SHOWN_WITH_METRICS)
        self._asked = asked  # metrics that the sweep file names, beside the objective
        self._held: dict[frozenset[str], list[Found]] = {}
        self._suspect: list[Found] = []
        self._begun = False
        self.dropped: list[str] = []

    def pass_on(self, found: Sequence[Found]) -> list[Found]:
        """Return the values of a line that count now, and those held back that it confirms."""
        if self._begun or not found:
            return list(found)
        if any(f.source.has_objective for f in found):
            return self._with_objective(found)
        asked = [f for f in found if f.name in self._asked and self._is_sure(f)]
        return asked + self._without_objective([f for f in found if f not in asked])

    def _with_objective(self, found: Sequence[Found]) -> list[Found]:
        source = found[0].source
        before = self._suspect
        if self._looks_like_arguments(found):
            self._suspect = list(found)
            if not before or before[0].source.names != source.names:
                self.dropped += [f.source.text for f in before[:1]]
                return []
        else:
            self.dropped += [f.source.text for f in before[:1]]
            before = []
        self._begun = True
        return [*before, *found]

    def _looks_like_arguments(self, found: Sequence[Found]) -> bool:
        source = found[0].source
        names = {name.rpartition("/")[2].lower() for name in source.names}
        return bool(_OBJECTS.search(source.text)) or not names.isdisjoint(self._names)

    def _is_sure(self, found: Found) -> bool:
        """Whether a metric that the sweep file names is no argument, as its line tells."""
        return not found.source.names or not self._looks_like_arguments([found])

    def _without_objective(self, found: Sequence[Found]) -> list[Found]:
        if not found:
            return []
        names, step = found[0].source.names, found[0].step
        before = self._held.get(names)
        if before is None:
            if sum(map(len, self._held.values())) < _MOST_HELD:
                self._held[names] = list(found)
            return []
        if before and before[0].step == step:
            return []
        self._held[names] = []
        return [*before, *found]

    def close(self) -> None:
        """Take what is still held back for arguments: nothing has confirmed it."""
        self.dropped += [f.source.text for f in self._suspect[:1] if not self._begun]
        self._suspect = []
