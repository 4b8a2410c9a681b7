"""QSSF: quasi-shortest service first, by a predicted GPU time (Helios)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache
from math import exp, log
from typing import Any, ClassVar

from hermes_ops.core.model import Job, JobId, Plan, Reason, Snapshot, Term
from hermes_ops.core.nodes import NodeCapacity
from hermes_ops.policies.priority import PriorityPolicy, ServiceOrder
from hermes_ops.policies.toolbox.ended_jobs import newly_ended
from hermes_ops.policies.toolbox.fill import Chooser, consolidated, ever_fits, lowest
from hermes_ops.policies.toolbox.parameter_checks import one_of, whole

PLACEMENTS = ("consolidated", "count")
DAY_S = 86_400.0
FEWEST = 20  # ended jobs below which means alone are used
MATCH_CUTOFF, MATCHES = 0.6, 2  # as Helios' estimator matches names


@dataclass(frozen=True, slots=True)
class PastJob:
    """An ended job: its user, name and GPUs, when it was submitted and how long it ran."""

    user: str
    group: str
    name: str
    gpus: int
    submitted_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """The ended jobs on which a model is fitted; `number` distinguishes the sets of one run."""

    number: int = 0
    jobs: tuple[PastJob, ...] = ()

    def __hash__(self) -> int:
        """Hash a part only, for the cache of fitted models; equality compares everything."""
        return hash((self.number, len(self.jobs), self.jobs[-1:]))


@dataclass(frozen=True, slots=True)
class Experience:
    """The jobs that have ended, what the model was fitted on, and the predictions in use."""

    ended: tuple[PastJob, ...] = ()
    training: TrainingSet = field(default_factory=TrainingSet)
    predicted: tuple[tuple[JobId, float], ...] = ()  # GPU-seconds, by submission
    counted: tuple[JobId, ...] = ()
    seen: int = 0  # ended jobs so far, forgotten ones included


@dataclass(frozen=True, slots=True)
class Qssf:
    """Serve the job with the least predicted GPU time; the first that does not fit blocks the rest.

    Nothing is stopped. A prediction is GPUs x (`history_weight` x the mean of the user's similar
    jobs + the rest x a model's run time), made once, when the job is first seen; before anything
    has ended, jobs are in the order of their GPUs. Each virtual cluster has its own line.

    Source: Hu et al., Helios (SC 2021), section 4.2, and its artefact: 0.1 and 0.9, similar by
    name and GPUs. Our choices: the model is scikit-learn's histogram gradient boosting in the
    place of LightGBM (the same kind of trees); it learns from jobs that have ended before, never
    from the trace's future, and is fitted again when the ended jobs have grown by a quarter, or by
    `remembered` / 4; the newest `remembered` are kept.
    """

    history_weight: float = 0.1
    remembered: int = 4_000
    placement: str = "consolidated"
    name: ClassVar[str] = "qssf"
    preempts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.history_weight <= 1:
            raise ValueError("history_weight is between 0 and 1")
        whole("remembered", self.remembered, 1)
        one_of("placement", self.placement, PLACEMENTS)

    def initial(self) -> Experience:
        """Return an empty experience."""
        return Experience()

    def decide(self, snapshot: Snapshot, memory: Experience) -> tuple[Plan, Experience]:
        """Learn from ended jobs, predict new ones, and start the shortest."""
        memory = self._learn(snapshot, memory)
        earlier = dict(memory.predicted)
        new = {j.id: self._predict(memory, j) for j in snapshot.queue if j.id not in earlier}
        now = {j.id: earlier[j.id] if j.id in earlier else new[j.id] for j in snapshot.queue}
        plan, _ = _ShortestPredicted(now, self.placement).decide(snapshot, None)
        predicted = tuple(now.items()) if memory.ended else ()
        return plan, replace(memory, predicted=predicted)

    def _learn(self, snapshot: Snapshot, memory: Experience) -> Experience:
        ended, counted = newly_ended(snapshot, memory.counted)
        now_s = snapshot.time_s
        served = ((job, job.attained_gpu_s(now_s)) for job in ended)
        new = (past(job, gpu_s / job.min_gpus) for job, gpu_s in served if gpu_s > 0)
        ended_jobs = (*memory.ended, *new)[-self.remembered :]
        seen, training = memory.seen + len(ended), memory.training
        if seen - training.number >= max(1, len(training.jobs) // 4):
            training = TrainingSet(seen, ended_jobs)
        return Experience(ended_jobs, training, memory.predicted, counted, seen)

    def _predict(self, memory: Experience, job: Job) -> float:
        """Return GPU-seconds; without ended jobs the number of GPUs, as if all ran equally long."""
        facts = past(job, 0.0)
        history_s = historical_s(memory.ended, facts)
        if history_s is None:
            return float(job.min_gpus)
        model_s = learnt_s(memory.training, facts)
        if model_s is None:
            model_s = history_s
        blend_s = self.history_weight * history_s + (1 - self.history_weight) * model_s
        return blend_s * job.min_gpus


@dataclass(frozen=True, slots=True)
class _ShortestPredicted(PriorityPolicy):
    """Serve the job with the least predicted GPU time; each virtual cluster has its own line."""

    predicted_gpu_s: Mapping[JobId, float]
    placement: str
    name: ClassVar[str] = "qssf"
    measure: ClassVar[str] = "predicted GPU time"
    term: ClassVar[str] = "predicted_gpu_s"

    def key(self, job: Job, now_s: float) -> float:  # noqa: ARG002 - interface
        return self.predicted_gpu_s[job.id]

    def chooser(self, snapshot: Snapshot) -> Chooser:
        return lowest if self.placement == "count" else consolidated(snapshot.gpus)

    def admitted(self, snapshot: Snapshot, jobs: Sequence[Job]) -> Iterable[Job]:
        return _heads(snapshot, jobs, self.chooser(snapshot))

    def reason(self, job: Job, is_granted: bool, service: ServiceOrder) -> Reason:
        if job.holds_gpus:
            return PriorityPolicy.reason(self, job, is_granted, service)
        terms = (Term(self.term, self.predicted_gpu_s[job.id]),)
        if is_granted:
            text = "starts: the shortest of its line, by prediction"
            return Reason(text, terms, None, "a shorter prediction for another job")
        return Reason("waits for shorter jobs", terms, None, "a running job ending")


def _heads(snapshot: Snapshot, order: Iterable[Job], choose: Chooser) -> Iterable[Job]:
    """Yield the order, each virtual cluster's line cut at its first job that does not fit.

    A job for which `choose` finds no GPUs does not fit; one that can never fit is passed over.
    """
    free, capacity = set(snapshot.free), NodeCapacity(snapshot, snapshot.retained.values())
    blocked: set[str] = set()
    for job in order:
        if job.virtual_cluster in blocked or not ever_fits(snapshot, job):
            continue
        fits = job.min_gpus <= len(free) and capacity.promise(job)
        gpus = choose(job, capacity.usable_for(job, free)) if fits else None
        if not fits or (gpus is None and not job.nodes):
            blocked.add(job.virtual_cluster)
            continue
        # One that is bound to a node is placed before others, which make room for it there.
        free.difference_update(gpus or sorted(free)[: job.min_gpus])
        yield job


def past(job: Job, seconds: float) -> PastJob:
    """Return the record of a job that has run for that long."""
    name = job.model_name or job.sweep
    return PastJob(job.user, job.virtual_cluster, name, job.min_gpus, job.submitted_s, seconds)


def historical_s(jobs: Sequence[PastJob], job: PastJob) -> float | None:
    """Return the mean run time of the user's similar jobs, else of the user's, else of all.

    Jobs are similar by name; of these, those with as many GPUs come first. None without ended jobs.
    Source: Helios (SC 2021), its artefact's estimator: difflib, cutoff 0.6, the top 2 names.
    """
    of_user = [p for p in jobs if p.user == job.user]
    names = sorted({p.name for p in of_user})
    close = set(get_close_matches(job.name, names, MATCHES, MATCH_CUTOFF))
    named = [p for p in of_user if p.name in close]
    for among in ([p for p in named if p.gpus == job.gpus], named, of_user, jobs):
        if among:
            return sum(p.seconds for p in among) / len(among)
    return None


def learnt_s(training: TrainingSet, job: PastJob) -> float | None:
    """Return the run time that the model predicts; None while too few jobs have ended."""
    if len(training.jobs) < FEWEST:
        return None
    model, codes = _fitted(training)
    return exp(float(model.predict([_features(job, codes)])[0]))


@lru_cache(maxsize=8)  # fitting 4,000 takes 0.4 s; the same jobs give the same model
def _fitted(training: TrainingSet) -> tuple[Any, dict[str, float]]:
    """Fit gradient-boosted trees to the logarithm of the run time; return the codes too.

    One thread does it: the cores are the trials', and two threads of scikit-learn restore each
    other's warning filters, after which the process has none.
    """
    from sklearn.ensemble import HistGradientBoostingRegressor
    from threadpoolctl import threadpool_limits

    jobs = training.jobs
    codes = _codes(jobs)
    model = HistGradientBoostingRegressor(
        max_iter=100, learning_rate=0.1, min_samples_leaf=10, early_stopping=False, random_state=0
    )
    with threadpool_limits(limits=1):
        model.fit([_features(p, codes) for p in jobs], [log(max(p.seconds, 1.0)) for p in jobs])
    return model, codes


def _codes(jobs: Sequence[PastJob]) -> dict[str, float]:
    """Return the target encoding of each user, group and name: its mean logarithm of run times."""
    sums: dict[str, tuple[float, int]] = {}
    for job in jobs:
        for key in _keys(job):
            total, number = sums.get(key, (0.0, 0))
            sums[key] = (total + log(max(job.seconds, 1.0)), number + 1)
    return {key: total / number for key, (total, number) in sums.items()}


def _keys(job: PastJob) -> tuple[str, str, str]:
    return (f"user {job.user}", f"group {job.group}", f"name {job.user} {job.name}")


def _features(job: PastJob, codes: dict[str, float]) -> list[float]:
    """Return the GPUs, hour and weekday of the submission, and codes; NaN for an unknown name."""
    day, second = divmod(job.submitted_s, DAY_S)
    coded = [codes.get(key, float("nan")) for key in _keys(job)]
    return [float(job.gpus), second / 3_600, day % 7, *coded]
