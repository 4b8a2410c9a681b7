"""How fast a job processes samples by GPUs and batch, from its measured step times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite

import numpy as np

from hermes_ops.core.model import Job
from hermes_ops.core.sizes import BatchRange, StepTime
from hermes_ops.core.speed_model import Floats

MOST_BATCHES = 32
LEAST_COST = 0.01
Sample = tuple[int, float, float]
"""A measured step: GPUs, samples on each of them in one pass, seconds."""


@dataclass(frozen=True, slots=True)
class LinearStepTime:
    """Seconds of a step: fixed + a_sample x samples a GPU + a_reduction x 2 (g - 1) / g.

    The last term is the share of the model that a ring all-reduce sends. Source: Saxena et al.,
    arXiv 2006.13878: computing linear in the samples of a GPU, communicating by the number of
    GPUs; the constant term is ours.
    """

    fixed_s: float
    a_sample_s: float
    a_reduction_s: float

    def seconds(self, gpus: Floats, local: Floats) -> Floats:
        """Return the seconds of a step with `local` samples on each of `gpus` GPUs."""
        return self.fixed_s + self.a_sample_s * local + self.a_reduction_s * 2.0 * (gpus - 1) / gpus


IDEAL = LinearStepTime(0.0, 1.0, 0.0)
"""A job that has measured nothing: its speed is taken to grow with its GPUs."""


@lru_cache(maxsize=1 << 14)
def fit_step_time(samples: tuple[Sample, ...]) -> LinearStepTime:
    """Fit the model to measured steps: least squares of the relative errors, no term below 0.

    The terms are added as the measured pairs of GPUs and samples allow: with one pair the time is
    taken to be all computing (ideal scaling), with two on one GPU there is a constant term, with
    two others an all-reduce. Without a usable measurement: IDEAL. A sample costs at least
    LEAST_COST times the fastest measured one: the speed of more samples would have no bound
    otherwise.
    """
    usable = [s for s in samples if s[0] > 0 and s[1] > 0 and isfinite(s[2]) and s[2] > 0]
    if not usable:
        return IDEAL
    gpus, local, seconds = np.asarray(sorted(usable), dtype=np.float64).T
    columns = np.stack([local, 2.0 * (gpus - 1) / gpus, np.ones_like(local)], axis=1)
    shapes = len({(g, b) for g, b, _ in usable})
    terms = ([0, 1, 2] if (gpus > 1).any() else [0, 2])[:shapes]  # one GPU has no all-reduce
    rows = columns[:, terms] / seconds[:, None]
    fitted = np.zeros(3)
    fitted[terms] = _not_negative(rows, np.ones(len(rows)))
    if not fitted[0] > 0:
        fitted[0] = LEAST_COST * float((seconds / local).min())
        fitted[terms[1:]] = _not_negative(rows[:, 1:], 1.0 - fitted[0] * rows[:, 0])
    return LinearStepTime(float(fitted[2]), float(fitted[0]), float(fitted[1]))


def _not_negative(rows: Floats, values: Floats) -> Floats:
    """Return the terms of the non-negative least squares fit of rows @ terms to the values."""
    from scipy.optimize import nnls

    scale = np.maximum(np.abs(rows).max(axis=0), np.finfo(np.float64).tiny)
    return np.asarray(nnls(rows / scale, values)[0] / scale)


def samples_of(job: Job) -> tuple[Sample, ...]:
    """Return the job's measured steps; a job without a range of batches has one sample a step."""
    return tuple((t.gpus, _local(job, t), t.seconds) for t in job.step_times)


def _local(job: Job, time: StepTime) -> float:
    if job.batch_range is None:
        return 1.0 / time.gpus
    if time.local_batch is not None:
        return float(time.local_batch)
    return (job.batch_held or job.requested_batch or job.batch_range.initial) / time.gpus


def batches_of(batches: BatchRange) -> tuple[int, ...]:
    """Return the batches to choose from: multiples of the initial one, at most MOST_BATCHES.

    The largest is always among them; more multiples than that are thinned out evenly.
    """
    most = batches.most // batches.initial
    steps = np.unique(np.linspace(1, most, min(most, MOST_BATCHES)).round().astype(int))
    multiples = (int(step) * batches.initial for step in steps)
    return tuple(dict.fromkeys((*multiples, batches.most)))


class KnownSteps:
    """The measured steps by kind of job: a job that has measured nothing is taken for its kind.

    A kind is a sweep and a model name.
    """

    def __init__(self, jobs: Iterable[Job]) -> None:
        kinds: dict[tuple[str, str | None], set[Sample]] = {}
        for job in jobs:
            if job.step_times:
                kinds.setdefault((job.sweep, job.model_name), set()).update(samples_of(job))
        self._kinds = {kind: fit_step_time(tuple(sorted(s))) for kind, s in kinds.items()}

    def model(self, job: Job) -> LinearStepTime:
        """Return the job's own model, else that of its kind, else IDEAL."""
        if job.step_times:
            return fit_step_time(samples_of(job))
        return self._kinds.get((job.sweep, job.model_name), IDEAL)


def throughputs(
    model: LinearStepTime, batches: Sequence[float], gpus: Sequence[int], *, whole: bool
) -> Floats:
    """Return samples a second, by batch (rows) and GPUs (columns).

    `whole`: the busiest GPU has the batch divided by the GPUs, rounded up.
    """
    sizes = np.asarray(gpus, dtype=np.float64)
    totals = np.asarray(batches, dtype=np.float64)[:, None]
    local = totals / sizes
    seconds = model.seconds(sizes, np.ceil(local) if whole else local)
    speeds: Floats = totals / seconds
    return speeds
