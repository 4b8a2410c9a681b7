"""What a job will take, learnt from the jobs that have ended (Helios' estimator)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from math import exp, log
from typing import Any

from hermes_ops.core.model import Job

DAY_S = 86_400.0
FEWEST = 20  # ended jobs below which nothing but means is learnt
MATCH_CUTOFF, MATCHES = 0.6, 2  # as Helios' estimator matches names


@dataclass(frozen=True, slots=True)
class Past:
    """An ended job: who ran what on how many GPUs, when it was submitted, how long it ran."""

    user: str
    group: str
    name: str
    gpus: int
    submitted_s: float
    seconds: float


def past(job: Job, seconds: float) -> Past:
    """What is remembered of a job that has run for so long."""
    name = job.model_name or job.sweep
    return Past(job.user, job.virtual_cluster, name, job.min_gpus, job.submitted_s, seconds)


@dataclass(frozen=True, slots=True)
class Training:
    """The ended jobs on which a model is fitted; `number` tells trainings of a run apart."""

    number: int = 0
    jobs: tuple[Past, ...] = ()

    def __hash__(self) -> int:
        """Cheap, for the cache of fitted models; equality compares all of it."""
        return hash((self.number, len(self.jobs), self.jobs[-1:]))


def historical_s(jobs: Sequence[Past], job: Past) -> float | None:
    """The mean run time of the user's jobs of the closest names, else of the user, else of all.

    Of jobs with matching names those with as many GPUs come first. None without any past.
    Source: Helios (SC 2021), its artefact's estimator: difflib, cutoff 0.6, the top 2 names.
    """
    own = [p for p in jobs if p.user == job.user]
    names = sorted({p.name for p in own})
    close = set(get_close_matches(job.name, names, MATCHES, MATCH_CUTOFF))
    named = [p for p in own if p.name in close]
    for among in ([p for p in named if p.gpus == job.gpus], named, own, jobs):
        if among:
            return sum(p.seconds for p in among) / len(among)
    return None


def learnt_s(training: Training, job: Past) -> float | None:
    """The run time that the model predicts; None while too few jobs have ended to fit one."""
    if len(training.jobs) < FEWEST:
        return None
    model, codes = _fitted(training)
    return exp(float(model.predict([_features(job, codes)])[0]))


@lru_cache(maxsize=8)  # fitting takes seconds; the same jobs give the same model
def _fitted(training: Training) -> tuple[Any, dict[str, float]]:
    """Gradient-boosted trees on the logarithm of the run time, and the codes of names."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    jobs = training.jobs
    codes = _codes(jobs)
    model = HistGradientBoostingRegressor(
        max_iter=100, learning_rate=0.1, min_samples_leaf=10, early_stopping=False, random_state=0
    )
    model.fit([_features(p, codes) for p in jobs], [log(max(p.seconds, 1.0)) for p in jobs])
    return model, codes


def _codes(jobs: Sequence[Past]) -> dict[str, float]:
    """For each user, group and name the mean logarithm of its run times: an ordered code."""
    sums: dict[str, tuple[float, int]] = {}
    for job in jobs:
        for key in _keys(job):
            total, number = sums.get(key, (0.0, 0))
            sums[key] = (total + log(max(job.seconds, 1.0)), number + 1)
    return {key: total / number for key, (total, number) in sums.items()}


def _keys(job: Past) -> tuple[str, str, str]:
    return (f"user {job.user}", f"group {job.group}", f"name {job.user} {job.name}")


def _features(job: Past, codes: dict[str, float]) -> list[float]:
    """Number of GPUs, hour and weekday of the submission, codes; NaN for a name never seen."""
    day, second = divmod(job.submitted_s, DAY_S)
    coded = [codes.get(key, float("nan")) for key in _keys(job)]
    return [float(job.gpus), second / 3_600, day % 7, *coded]
