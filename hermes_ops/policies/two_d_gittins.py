"""2D-Gittins: the job that most likely ends soon, for its cost, goes first (Tiresias)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from math import inf
from typing import ClassVar

from hermes_ops.core.model import JobId, Plan, Snapshot
from hermes_ops.core.order import submission
from hermes_ops.policies.toolbox.ended_jobs import newly_ended
from hermes_ops.policies.toolbox.multilevel_queues import MultilevelQueues, QueuesMemory
from hermes_ops.policies.toolbox.parameter_checks import ascending, one_of, positive_or_none
from hermes_ops.policies.two_d_las import TwoDLas, served

INDICES = ("published", "textbook")
MOST_LEARNT = 1_000  # sizes of finished jobs that are remembered


@dataclass(frozen=True, slots=True)
class Sizes:
    """An empirical distribution of GPU-seconds, ascending."""

    gpu_s: tuple[float, ...] = ()
    sums: tuple[float, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.gpu_s))
        object.__setattr__(self, "gpu_s", ordered)
        object.__setattr__(self, "sums", (0.0, *accumulate(ordered)))

    def index(self, attained_gpu_s: float, delta_gpu_s: float) -> float:
        """Return the chance that the job ends within `delta_gpu_s` more, per expected cost.

        Of the past sizes S above a: P(S <= a + delta) / E, in 1/GPU-s, where E is the mean of S
        where S <= a + delta, of delta elsewhere; 0 when there are none. It is looked up 1 GPU-s
        below the next past size, so that it changes only where a passes one.

        Source: the public simulator of Tiresias; the figures of the paper's example, 2 / E[S |
        S > a], are these for an infinite delta, times 2.
        """
        above = bisect_right(self.gpu_s, attained_gpu_s)
        if above == len(self.gpu_s):
            return 0.0
        within = max(above, bisect_right(self.gpu_s, self.gpu_s[above] - 1 + delta_gpu_s))
        left, ending = len(self.gpu_s) - above, within - above
        rest_gpu_s = delta_gpu_s * (left - ending) if left > ending else 0.0
        return _ratio(ending, self.sums[within] - self.sums[above] + rest_gpu_s)

    def textbook_index(self, attained_gpu_s: float, delta_gpu_s: float) -> float:
        """Return P(S <= a + delta) / E[min(S - a, delta)] over S > a, in 1/GPU-s: Gittins' own."""
        above = bisect_right(self.gpu_s, attained_gpu_s)
        within = bisect_right(self.gpu_s, attained_gpu_s + delta_gpu_s)
        left, ending = len(self.gpu_s) - above, within - above
        rest_gpu_s = delta_gpu_s * (left - ending) if left > ending else 0.0
        ending_gpu_s = self.sums[within] - self.sums[above] - attained_gpu_s * ending
        return _ratio(ending, ending_gpu_s + rest_gpu_s)


@dataclass(frozen=True, slots=True)
class GittinsMemory:
    """The queues, the sizes of ended jobs, and the ended jobs that snapshots still contain."""

    levels: QueuesMemory = field(default_factory=QueuesMemory)
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
    the paper's example and its public simulator, "textbook" as Gittins' own (`Sizes`). In
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
    given_sizes: Sizes = field(init=False, repr=False, compare=False)
    name: ClassVar[str] = "2d-gittins"
    preempts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "limits_gpu_s", ascending("limits_gpu_s", self.limits_gpu_s))
        object.__setattr__(self, "given_sizes", Sizes(tuple(map(float, self.sizes_gpu_s))))
        one_of("index", self.index, INDICES)
        positive_or_none("delta_gpu_s", self.delta_gpu_s)
        self._queued()

    def initial(self) -> GittinsMemory:
        """Return empty queues and no sizes."""
        return GittinsMemory()

    def decide(self, snapshot: Snapshot, memory: GittinsMemory) -> tuple[Plan, GittinsMemory]:
        """Bring the queues up to date, order each by the index, and serve them."""
        ended, counted = newly_ended(snapshot, memory.counted)
        past = memory.sizes_gpu_s
        if ended and not self.sizes_gpu_s:
            past = learnt(past, (job.attained_gpu_s(snapshot.time_s) for job in ended))
        queues = MultilevelQueues(
            snapshot,
            memory.levels,
            self.limits_gpu_s,
            keep_place=True,
            promote_knob=self.promote_knob,
        )
        self._arrange(queues, self.given_sizes if self.sizes_gpu_s else sizes(past))
        plan, levels = served(queues, self._queued())
        return plan, GittinsMemory(levels, past, counted)

    def _queued(self) -> TwoDLas:
        """Return the 2D-LAS with the same queues, placement and promotion."""
        return TwoDLas(
            self.limits_gpu_s,
            "entry",
            self.promote_knob,
            self.placement,
            self.pack_limit,
            demotion=self.demotion,
        )

    def _arrange(self, queues: MultilevelQueues, past: Sizes) -> None:
        index = queues.snapshot.index
        measure = past.textbook_index if self.index == "textbook" else past.index
        for level, limit_gpu_s in enumerate((*self.limits_gpu_s, inf)):
            ahead_gpu_s = self.delta_gpu_s or limit_gpu_s
            jobs = [index[job] for job in queues.waiting[level] if job in index]
            values = {job.id: measure(queues.attained_gpu_s(job), ahead_gpu_s) for job in jobs}
            jobs.sort(key=lambda job: (-values[job.id], submission(job)))
            queues.waiting[level] = tuple(job.id for job in jobs)


def _ratio(ending: int, cost_gpu_s: float) -> float:
    if not ending:
        return 0.0
    return ending / cost_gpu_s if cost_gpu_s > 0 else inf


@lru_cache(maxsize=16)  # they change with a finished job at most
def sizes(gpu_s: tuple[float, ...]) -> Sizes:
    """Return the distribution of these sizes, from a cache."""
    return Sizes(gpu_s)


def learnt(sizes_gpu_s: tuple[float, ...], more: Iterable[float]) -> tuple[float, ...]:
    """Return the newest `MOST_LEARNT` sizes."""
    return (*sizes_gpu_s, *more)[-MOST_LEARNT:]
