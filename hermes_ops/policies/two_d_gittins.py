"""2D-Gittins: the job that most likely ends soon, for its cost, goes first (Tiresias)."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

from hermes_ops.core.checks import ascending, one_of, positive
from hermes_ops.core.ended import newly_ended
from hermes_ops.core.gittins import Sizes, learnt, sizes
from hermes_ops.core.levels import Levels, Queues
from hermes_ops.core.model import JobId, Plan, Snapshot
from hermes_ops.core.order import submission
from hermes_ops.policies.two_d_las import TwoDLas, served

INDICES = ("published", "textbook")


@dataclass(frozen=True, slots=True)
class History:
    """The queues, the sizes of jobs that have ended, and which of these are still to be seen."""

    levels: Levels = field(default_factory=Levels)
    sizes_gpu_s: tuple[float, ...] = ()
    counted: tuple[JobId, ...] = ()


@dataclass(frozen=True, slots=True)
class TwoDGittins:
    """Serve queues of attained service in order; within one, the highest Gittins index first.

    The queues, placement and promotion are those of `2d-las`. The index of queue i looks
    `limits_gpu_s[i]` ahead (the last one to the end), or `delta_gpu_s` everywhere if it is given.
    It needs the sizes of past jobs in GPU-seconds: `sizes_gpu_s`, else those of the jobs that
    ended before, learnt on the way. Ties, and jobs of which nothing is known: by submission.

    Source: Gu et al., "Tiresias", NSDI 2019, section 3.2. `index="published"` is normalised as in
    the paper's example and its public simulator, "textbook" as Gittins' own (`core.gittins`). In
    the example the published index falls from 0.25 to 0.20 where the textbook's rises from 0.125
    to 0.167. The simulator's figures come with its own table of past sizes, `delta_gpu_s=3250`
    and `demotion="late"`.
    """

    limits_gpu_s: tuple[float, ...] = (3_250.0, 7_200.0)
    sizes_gpu_s: tuple[float, ...] = ()
    delta_gpu_s: float | None = None
    index: str = "published"
    promote_knob: float | None = None
    placement: str = "profile"
    pack_limit: float = 0.3
    demotion: str = "exact"
    known: Sizes = field(init=False, repr=False, compare=False)
    name: ClassVar[str] = "2d-gittins"
    preempts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "limits_gpu_s", ascending("limits_gpu_s", self.limits_gpu_s))
        object.__setattr__(self, "known", Sizes(tuple(map(float, self.sizes_gpu_s))))
        one_of("index", self.index, INDICES)
        positive("delta_gpu_s", self.delta_gpu_s)
        self._queued()

    def initial(self) -> History:
        """Empty queues, nothing learnt."""
        return History()

    def decide(self, snapshot: Snapshot, memory: History) -> tuple[Plan, History]:
        """Bring the queues up to date, order each by the index, and serve them."""
        ended, counted = newly_ended(snapshot, memory.counted)
        past = memory.sizes_gpu_s
        if ended and not self.sizes_gpu_s:
            past = learnt(past, (job.attained_gpu_s(snapshot.time_s) for job in ended))
        queues = Queues(
            snapshot,
            memory.levels,
            self.limits_gpu_s,
            keep_place=True,
            promote_knob=self.promote_knob,
        )
        self._arrange(queues, self.known if self.sizes_gpu_s else sizes(past))
        plan, levels = served(queues, self._queued())
        return plan, History(levels, past, counted)

    def _queued(self) -> TwoDLas:
        """What this policy has in common with 2D-LAS."""
        return TwoDLas(
            self.limits_gpu_s,
            "entry",
            self.promote_knob,
            self.placement,
            self.pack_limit,
            demotion=self.demotion,
        )

    def _arrange(self, queues: Queues, past: Sizes) -> None:
        index = queues.snapshot.index
        measure = past.textbook_index if self.index == "textbook" else past.index
        for level, limit_gpu_s in enumerate((*self.limits_gpu_s, inf)):
            ahead_gpu_s = self.delta_gpu_s or limit_gpu_s
            jobs = [index[job] for job in queues.waits[level] if job in index]
            values = {job.id: measure(queues.attained_gpu_s(job), ahead_gpu_s) for job in jobs}
            jobs.sort(key=lambda job: (-values[job.id], submission(job)))
            queues.waits[level] = tuple(job.id for job in jobs)
