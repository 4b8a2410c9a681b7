"""A cluster in virtual time, whose jobs switch at a known cost, and which asks as a driver does."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from hermes_ops.core.model import Gpu, Job, Phase, Plan, Point, Policy, Snapshot
from hermes_ops.core.plan import Resize, Start, check, diff

START_S, RESTORE_S, CHECKPOINT_S = 2.0, 1.0, 1.5
SWITCH_S = START_S + RESTORE_S + CHECKPOINT_S
LOOK_EACH_S = 0.5


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait, with the most trials, and the most GPUs wanted, of any moment of it."""

    seconds: float
    trials: int
    gpus: int


@dataclass(slots=True)
class Trial:
    """A job of the virtual cluster; it trains one step each `step_s`."""

    job: Job
    step_s: float
    steps: int
    fall: float
    trained_s: float = 0.0
    released_s: float | None = None  # STOPPING: when its checkpoint is written
    waits: list[Wait] = field(default_factory=list)
    longest_line: int = 0
    widest_line: int = 0


class VirtualCluster:
    """Single steps of virtual time; a started job begins when its GPUs have been released."""

    def __init__(self, trials: list[Trial], gpus: int) -> None:
        self.now_s = 0.0
        self.gpus = gpus
        self.trials = {trial.job.id: trial for trial in trials}
        self.lost_s = 0.0
        self.occupied_s = 0.0

    def observe(self) -> Snapshot:
        come = (t.job for t in self.trials.values() if t.job.submitted_s <= self.now_s)
        jobs = tuple(come)
        return Snapshot(self.now_s, tuple(Gpu(i) for i in range(self.gpus)), jobs)

    def apply(self, snapshot: Snapshot, plan: Plan) -> None:
        for action in diff(snapshot, plan):
            trial = self.trials[action.job]
            if isinstance(action, Start):
                self._start(trial, action.gpus)
                trial.job = replace(trial.job, share_held=action.share)
            elif isinstance(action, Resize) and action.gpus == trial.job.gpus_held:
                trial.job = replace(trial.job, share_held=action.share)  # nothing is stopped
            else:
                self._stop(trial)

    def advance(self) -> None:
        self.now_s += LOOK_EACH_S
        for trial in self.trials.values():
            if trial.job.phase is Phase.STOPPING and trial.released_s == self.now_s:
                waiting = Phase.WAITING
                trial.job = replace(trial.job, phase=waiting, waiting_since_s=self.now_s)
            elif trial.job.phase in (Phase.STARTING, Phase.RUNNING):
                self._train(trial)

    def _start(self, trial: Trial, gpus: tuple[int, ...]) -> None:
        since = trial.job.waiting_since_s
        if trial.job.phase is Phase.WAITING and since is not None:
            trial.waits.append(Wait(self.now_s - since, trial.longest_line, trial.widest_line))
        trial.longest_line = trial.widest_line = 0
        trial.job = replace(
            trial.job,
            phase=Phase.STARTING,
            gpus_held=gpus,
            started_s=self.now_s + CHECKPOINT_S,  # whoever was there may have to write first
            waiting_since_s=None,
            steps_at_start=trial.job.last_step,
            startup_s=START_S,
            restore_s=RESTORE_S,
            checkpoint_s=CHECKPOINT_S,
        )

    def _stop(self, trial: Trial) -> None:
        assert trial.job.started_s is not None
        self.lost_s += SWITCH_S
        self.occupied_s += self.now_s + CHECKPOINT_S - trial.job.started_s
        trial.released_s = self.now_s + CHECKPOINT_S
        count = trial.job.preemptions + 1
        trial.job = replace(trial.job.as_stopping(), started_s=None, preemptions=count)

    def _train(self, trial: Trial) -> None:
        assert trial.job.started_s is not None
        if self.now_s <= trial.job.started_s + START_S + RESTORE_S:
            return
        trial.trained_s += LOOK_EACH_S
        curve = trial.job.curve
        while (len(curve) + 1) * trial.step_s <= trial.trained_s:
            step = len(curve) + 1
            curve = (*curve, Point(step, 1 / (1 + trial.fall * step), step * trial.step_s))
        ended = len(curve) >= trial.steps
        trial.job = replace(
            trial.job,
            phase=Phase.ENDED if ended else Phase.RUNNING,
            gpus_held=() if ended else trial.job.gpus_held,
            curve=curve,
        )


def play(policy: Policy[Any], cluster: VirtualCluster, until_s: float = 300.0) -> None:
    """Ask when something happened, or when the plan said so: guards must ask to be asked."""
    memory, seen, review_s = policy.initial(), None, inf
    while cluster.now_s < until_s:
        snapshot = cluster.observe()
        _count_line(cluster)
        if snapshot.jobs != seen or snapshot.time_s >= review_s:
            plan, memory = policy.decide(snapshot, memory)
            check(snapshot, plan)
            cluster.apply(snapshot, plan)
            seen, review_s = snapshot.jobs, inf if plan.review_at_s is None else plan.review_at_s
        cluster.advance()


def _count_line(cluster: VirtualCluster) -> None:
    """The longest line that each waiting trial has been in; one that is stopping soon joins it."""
    queued = (Phase.WAITING, Phase.STOPPING)
    line = [t for t in cluster.trials.values() if t.job.phase in queued]
    wanted = sum(trial.job.min_gpus for trial in line)
    for trial in line:
        trial.longest_line = max(trial.longest_line, len(line))
        trial.widest_line = max(trial.widest_line, wanted)
