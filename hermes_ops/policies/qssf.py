"""QSSF: quasi-shortest service first, by a predicted GPU time (Helios)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from hermes_ops.core.answer import answer
from hermes_ops.core.checks import one_of, positive
from hermes_ops.core.ended import newly_ended
from hermes_ops.core.fill import Chooser, consolidated, fill, lowest
from hermes_ops.core.model import Job, JobId, Plan, Reason, Snapshot, Term
from hermes_ops.core.order import submission
from hermes_ops.policies.durations import Past, Training, historical_s, learnt_s, past

PLACEMENTS = ("consolidated", "count")


@dataclass(frozen=True, slots=True)
class Experience:
    """The jobs that have ended, what the model was fitted on, and the predictions in use."""

    ended: tuple[Past, ...] = ()
    training: Training = field(default_factory=Training)
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
    from the trace's future, and is fitted anew when the ended jobs have grown by a quarter, or by
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
        positive("remembered", self.remembered)
        one_of("placement", self.placement, PLACEMENTS)

    def initial(self) -> Experience:
        """No past."""
        return Experience()

    def decide(self, snapshot: Snapshot, memory: Experience) -> tuple[Plan, Experience]:
        """Learn from what has ended, predict what is new, and start the shortest."""
        memory = self._learn(snapshot, memory)
        known = dict(memory.predicted)
        new = {j.id: self._predict(memory, j) for j in snapshot.queue if j.id not in known}
        now = {j.id: known[j.id] if j.id in known else new[j.id] for j in snapshot.queue}
        order = sorted(snapshot.queue, key=lambda job: (now[job.id], submission(job)))
        choose: Chooser = lowest if self.placement == "count" else consolidated(snapshot.gpus)
        grants = fill(snapshot, _heads(snapshot, order), preempt=False, choose=choose)

        def explain(job: Job, runs: bool) -> Reason:
            if job.holds_gpus:
                return Reason("runs until it ends: qssf never stops a job", would_change="its end")
            terms = (Term("predicted_gpu_s", now[job.id]),)
            if runs:
                text = "starts: the shortest of its line, by prediction"
                return Reason(text, terms, None, "a shorter prediction for another job")
            return Reason("waits for shorter jobs", terms, None, "a running job ending")

        predicted = tuple(now.items()) if memory.ended else ()
        return answer(snapshot, grants, order, explain), replace(memory, predicted=predicted)

    def _learn(self, snapshot: Snapshot, memory: Experience) -> Experience:
        ended, counted = newly_ended(snapshot, memory.counted)
        now_s = snapshot.time_s
        new = (past(j, j.attained_gpu_s(now_s) / j.min_gpus) for j in ended if _served(j, now_s))
        known = (*memory.ended, *new)[-self.remembered :]
        seen, training = memory.seen + len(ended), memory.training
        if seen - training.number >= max(1, len(training.jobs) // 4):
            training = Training(seen, known)
        return Experience(known, training, memory.predicted, counted, seen)

    def _predict(self, memory: Experience, job: Job) -> float:
        """GPU-seconds; without any past the number of GPUs, as if all ran equally long."""
        facts = past(job, 0.0)
        history_s = historical_s(memory.ended, facts)
        if history_s is None:
            return float(job.min_gpus)
        model_s = learnt_s(memory.training, facts)
        if model_s is None:
            model_s = history_s
        blend_s = self.history_weight * history_s + (1 - self.history_weight) * model_s
        return blend_s * job.min_gpus


def _served(job: Job, now_s: float) -> bool:
    return job.attained_gpu_s(now_s) > 0


def _heads(snapshot: Snapshot, order: Iterable[Job]) -> Iterable[Job]:
    """The order, each virtual cluster's line cut at its first job that does not fit any more."""
    left = len(snapshot.gpus) - sum(len(stay.gpus) for stay in snapshot.stays.values())
    blocked: set[str] = set()
    for job in order:
        if job.min_gpus > len(snapshot.gpus) or job.virtual_cluster in blocked:
            continue
        if job.min_gpus > left:
            blocked.add(job.virtual_cluster)
            continue
        left -= job.min_gpus
        yield job
