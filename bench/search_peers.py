"""The searches of other packages: Optuna's TPE with its pruners, Syne Tune's ASHA and DyHPO.

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
    """A search and its scheduler, asked by one GPU after the other; `resumes`: paused trials."""

    resumes: bool

    def next_trial(self) -> tuple[int, Config]:
        """Return a new or a paused trial for a free GPU, with its configuration."""
        ...

    def begin(self, trial: int) -> None:
        """Tell that a new trial begins."""
        ...

    def trains_on(self, trial: int, epoch: int, loss: float, *, is_last: bool) -> bool:
        """Tell the loss of an epoch; return whether the trial trains on."""
        ...


class OptunaPeer:
    """A study of Optuna with its TPE, told which trials run (`constant_liar`), and a pruner."""

    resumes = False

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

    def begin(self, trial: int) -> None:
        """Do nothing: the study knows its trials."""

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
    """A scheduler of Syne Tune with its searcher.

    ASHA is the variant that stops trials; DyHPO pauses them, and may resume them.
    """

    def __init__(self, scheduler: str, first: Sequence[Config], epochs: int, seed: int) -> None:
        from syne_tune.config_space import uniform
        from syne_tune.optimizer import legacy_baselines

        options = {"grace_period": 1, "reduction_factor": REDUCTION} if scheduler == "ASHA" else {}
        self._scheduler = getattr(legacy_baselines, scheduler)(
            {**{name: uniform(0.0, 1.0) for name in first[0]}, "epochs": epochs},
            metric="loss",
            mode="min",
            resource_attr="epoch",
            max_resource_attr="epochs",
            random_seed=seed,
            points_to_evaluate=[dict(config) for config in first],
            search_options={"debug_log": False},
            **options,
        )
        self.resumes = scheduler == "DyHPO"
        self._trials: list[Any] = []
        self._offered: int | None = None  # a new trial that has not begun

    def next_trial(self) -> tuple[int, Config]:
        """Ask for a trial; one that was suggested last and has not begun has failed."""
        from syne_tune.backend.trial_status import Trial

        if self._offered is not None:
            self._scheduler.on_trial_error(self._trials[self._offered])
            self._offered = None
        number = len(self._trials)
        suggestion = self._scheduler.suggest(number)
        if not suggestion.spawn_new_trial_id:
            number = suggestion.checkpoint_trial_id
            return number, self._trials[number].config
        self._trials.append(Trial(number, suggestion.config, datetime(2000, 1, 1, tzinfo=UTC)))
        self._offered = number
        return number, suggestion.config

    def begin(self, trial: int) -> None:
        """Register the trial."""
        self._offered = None
        self._scheduler.on_trial_add(self._trials[trial])

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
    "Syne Tune ASHA + random": ("syne-tune", partial(SyneTunePeer, "ASHA")),
    "Syne Tune DyHPO": ("syne-tune", partial(SyneTunePeer, "DyHPO")),
}

SLOW = ("Syne Tune DyHPO",)  # minutes of a processor for a run: raced by name alone


def release(entrant: str) -> str:
    """Return the version of an entrant's package; empty for ours, and where it is not installed."""
    try:
        return release_of(PEERS[entrant][0]) if entrant in PEERS else ""
    except PackageNotFoundError:
        return ""


def installed() -> tuple[str, ...]:
    """Return the entrants whose packages are installed, but for slow ones."""
    return tuple(entrant for entrant in PEERS if entrant not in SLOW and release(entrant))


def make(entrant: str, first: Sequence[Config], epochs: int, seed: int) -> Peer:
    """Return an entrant that begins with these configurations, each value in [0, 1]."""
    logging.getLogger("syne_tune").setLevel(logging.ERROR)
    return PEERS[entrant][1](first, epochs, seed)
