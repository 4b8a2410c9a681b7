"""The searches of other packages: Optuna's TPE with its pruners, Syne Tune's ASHA.

They are not in the project's own environment: `requirements-bench.lock` has them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as release_of
from typing import Any, Protocol

Config = Mapping[str, Any]
REDUCTION = 3


class Peer(Protocol):
    """A search and its scheduler, asked by one GPU after the other; a stopped trial is over."""

    def next_trial(self) -> tuple[int, Config]:
        """Return a new trial for a free GPU, with its configuration."""
        ...

    def trains_on(self, trial: int, epoch: int, loss: float, *, is_last: bool) -> bool:
        """Tell the loss of an epoch; return whether the trial trains on."""
        ...


class OptunaPeer:
    """A study of Optuna with its TPE, told which trials run (`constant_liar`), and a pruner."""

    def __init__(self, first: Sequence[Config], seed: int, pruner: Any) -> None:  # noqa: ANN401
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        self._study = optuna.create_study(sampler=sampler, pruner=pruner, study_name=f"race-{seed}")
        for config in first:
            self._study.enqueue_trial(dict(config))
        self._names, self._trials = tuple(first[0]), list[Any]()

    def next_trial(self) -> tuple[int, Config]:
        """Ask for a new trial."""
        trial = self._study.ask()
        self._trials.append(trial)
        return trial.number, {name: trial.suggest_float(name, 0.0, 1.0) for name in self._names}

    def trains_on(self, trial: int, epoch: int, loss: float, *, is_last: bool) -> bool:
        """Report, and ask whether to prune."""
        from optuna.trial import TrialState

        handle = self._trials[trial]
        handle.report(loss, epoch)
        if is_last:
            self._study.tell(handle, loss)
        elif handle.should_prune():
            self._study.tell(handle, state=TrialState.PRUNED)
        else:
            return True
        return False


class SyneTunePeer:
    """Syne Tune's ASHA, its variant that stops trials, with one of its searchers."""

    def __init__(self, searcher: str, first: Sequence[Config], epochs: int, seed: int) -> None:
        from syne_tune.config_space import uniform
        from syne_tune.optimizer.schedulers.asha import AsynchronousSuccessiveHalving

        self._scheduler = AsynchronousSuccessiveHalving(
            {name: uniform(0.0, 1.0) for name in first[0]},
            "loss",
            searcher=searcher,
            time_attr="epoch",
            max_t=epochs,
            reduction_factor=REDUCTION,
            random_seed=seed,
            searcher_kwargs={"points_to_evaluate": [dict(config) for config in first]},
        )
        self._trials: list[Any] = []

    def next_trial(self) -> tuple[int, Config]:
        """Ask for a new trial."""
        from syne_tune.backend.trial_status import Trial

        suggestion = self._scheduler.suggest()
        trial = Trial(len(self._trials), suggestion.config, datetime(2000, 1, 1, tzinfo=UTC))
        self._trials.append(trial)
        self._scheduler.on_trial_add(trial)
        return trial.trial_id, suggestion.config

    def trains_on(self, trial: int, epoch: int, loss: float, *, is_last: bool) -> bool:
        """Report, and return the scheduler's decision."""
        result = {"loss": loss, "epoch": epoch}
        if is_last:
            self._scheduler.on_trial_complete(self._trials[trial], result)
            return False
        decision: str = self._scheduler.on_trial_result(self._trials[trial], result)
        return decision == "CONTINUE"


def _optuna(pruner: str, first: Sequence[Config], epochs: int, seed: int) -> Peer:
    import optuna

    if pruner == "hyperband":
        chosen: Any = optuna.pruners.HyperbandPruner(1, epochs, REDUCTION)
    elif pruner == "median":
        chosen = optuna.pruners.MedianPruner()
    else:
        chosen = optuna.pruners.NopPruner()
    return OptunaPeer(first, seed, chosen)


PEERS: dict[str, tuple[str, Callable[[Sequence[Config], int, int], Peer]]] = {
    "Optuna TPE": ("optuna", partial(_optuna, "none")),
    "Optuna TPE + Hyperband": ("optuna", partial(_optuna, "hyperband")),
    "Optuna TPE + median": ("optuna", partial(_optuna, "median")),
    "Syne Tune ASHA + random": ("syne-tune", partial(SyneTunePeer, "random_search")),
}


def release(entrant: str) -> str:
    """Return the version of an entrant's package; empty for ours, and where it is not installed."""
    try:
        return release_of(PEERS[entrant][0]) if entrant in PEERS else ""
    except PackageNotFoundError:
        return ""


def installed() -> tuple[str, ...]:
    """Return the entrants whose packages are installed."""
    return tuple(entrant for entrant in PEERS if release(entrant))


def make(entrant: str, first: Sequence[Config], epochs: int, seed: int) -> Peer:
    """Return an entrant that begins with these configurations, each value in [0, 1]."""
    logging.getLogger("syne_tune").setLevel(logging.ERROR)
    return PEERS[entrant][1](first, epochs, seed)
