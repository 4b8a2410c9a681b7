"""Symptoms of a pool in trouble, although its rounds succeed: pure functions of one observation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.core.model import Job, Phase, Snapshot, SweepId

SILENT_S = 1_200.0
"""A trial may always be silent for so long: validation and saving take their time."""

FIRST_VALUE_S = 7_200.0
"""A trial that has never reported a value is given so long."""

USUAL_GAPS = 3
"""A trial is silent once it has reported nothing for this many times its usual interval."""

RECENT_GAPS = 20
"""The usual interval is the longest of this many last ones."""


def idle_gpus(snapshot: Snapshot, max_parallel: Mapping[SweepId, int]) -> int:
    """Return the free GPUs if a waiting trial could start on them, else 0.

    A trial whose sweep trains as many as `budget.max_parallel` allows could not, nor could one
    that needs more GPUs than are free on the nodes where it may run.
    """
    free = snapshot.free
    if not free:
        return 0
    occupied: dict[SweepId, int] = {}
    for job in (*snapshot.holding, *snapshot.others):
        if job.phase is not Phase.ENDED:
            occupied[job.sweep] = occupied.get(job.sweep, 0) + 1
    node_of = {gpu.index: gpu.node for gpu in snapshot.gpus}
    for job in snapshot.queue:
        limit = max_parallel.get(job.sweep)
        if limit is not None and occupied.get(job.sweep, 0) >= limit:
            continue
        if not job.nodes:
            room = len(free)
        else:
            free_by_node = (sum(node_of[gpu] == node for gpu in free) for node in job.nodes)
            room = max(free_by_node, default=0)
        if room >= job.min_gpus:
            return len(free)
    return 0


def longest_start_s(snapshot: Snapshot) -> float:
    """Return the seconds since the oldest grant whose trial does not run yet; 0 without any."""
    since_s = [
        job.started_s
        for job in snapshot.holding
        if job.phase is Phase.STARTING and job.started_s is not None
    ]
    return max(0.0, snapshot.time_s - min(since_s)) if since_s else 0.0


def silent_trials(snapshot: Snapshot) -> int:
    """Return the number of running trials that have reported no value for far too long."""
    return sum(
        job.phase is Phase.RUNNING and is_silent(job, snapshot.time_s) for job in snapshot.holding
    )


def is_silent(job: Job, now_s: float) -> bool:
    """Tell whether a running trial has reported no value for far longer than it usually takes.

    The steps that a resumed trial repeats after its checkpoint bring no new values.
    """
    if job.started_s is None:
        return False
    trained_s = job.attained_gpu_s(now_s) / max(1, len(job.gpus_held))
    began_s = trained_s - (now_s - job.started_s)  # seconds of training before this segment
    times_s = [0.0, *(point.seconds for point in job.curve[-RECENT_GAPS - 1 :])]
    silence_s = trained_s - max(times_s[-1], began_s)
    if not job.curve:
        return silence_s > FIRST_VALUE_S
    usual_s = max(after - before for before, after in pairwise(times_s[-RECENT_GAPS - 1 :]))
    repeated = 0
    if times_s[-1] <= began_s:
        repeated = sum(point.step > job.steps_at_start for point in job.curve)
    return silence_s > max(SILENT_S, (USUAL_GAPS + repeated) * usual_s)


def oldest_checkpoint_s(trials: Iterable[TrialRecords], now_s: float) -> float:
    """Return the seconds since the oldest newest checkpoint of a running trial; 0 without any.

    Counted from the start of the segment where the checkpoint is older. A trial that has never
    written one does not count: its script keeps none.
    """
    ages_s = (
        now_s - max(trial.segment.checkpointed_s, trial.segment.trains_since_s)
        for trial in trials
        if trial.phase is Phase.RUNNING
        and trial.segment is not None
        and trial.segment.checkpointed_s is not None
    )
    return max(0.0, max(ages_s, default=0.0))


@dataclass(slots=True)
class FailureCounter:
    """Finds the failures of trials that are new since the last look.

    What a sweep had when it was first seen is not new: a controller that starts counts nothing
    twice.
    """

    _failures_of: dict[str, dict[int, int]] = field(default_factory=dict)

    def new_failures(
        self, trials: Mapping[str, Iterable[TrialRecords]]
    ) -> Iterator[tuple[str, int]]:
        """Yield (cause, number) for each trial that has failed since the last call.

        `trials` are those of every sweep that runs, by the sweep's id.
        """
        for gone in self._failures_of.keys() - trials.keys():
            del self._failures_of[gone]
        for sweep, of_sweep in trials.items():
            before = self._failures_of.get(sweep)
            now = {t.number: t.segment for t in of_sweep if t.segment and t.segment.failures}
            self._failures_of[sweep] = {number: segment.failures for number, segment in now.items()}
            for number, segment in now.items() if before is not None else ():
                more = segment.failures - (before or {}).get(number, 0)
                if more > 0:
                    yield segment.cause or "other", more
