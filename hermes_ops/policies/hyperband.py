"""Hyperband: several successive halvings, each betting on another number of first steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from math import ceil
from typing import ClassVar

from hermes_ops.core.model import Job, Plan, Snapshot
from hermes_ops.policies.successive_halving import serve_brackets
from hermes_ops.policies.toolbox.parameter_checks import whole


@dataclass(frozen=True, slots=True)
class Hyperband:
    """Deal a sweep's trials to brackets, each a successive halving, served one after the other.

    With R the steps of a whole trial and s_max = floor(log_eta R), bracket s = s_max ... 0 takes
    ceil((s_max + 1) eta^s / (s + 1)) trials, in order of submission, and brings them to
    R eta^-s, R eta^(1-s), ... R steps, keeping floor(n/eta) at each.

    Source: Li et al., "Hyperband", JMLR 2018. Ours: R is the largest `total_steps` of the sweep,
    `max_steps` where that is not known; rungs are rounded down to whole steps, at least 1; more
    trials than the brackets hold begin another round of brackets; an idle GPU serves the next
    bracket, then trials that were left behind, so that all finish (`kill` ends those instead); what
    `successive-halving` chooses holds here too.
    """

    eta: int = 3
    max_steps: int = 81
    kill: bool = False
    name: ClassVar[str] = "hyperband"
    preempts: ClassVar[bool] = True
    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        whole("eta", self.eta, 2)
        whole("max_steps", self.max_steps, 1)

    def initial(self) -> None:
        """Return None: brackets follow from the order of submission."""
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Serve the brackets one after the other."""
        return serve_brackets(snapshot, self.deal, self.eta, kill=self.kill), memory

    def deal(self, jobs: Sequence[Job]) -> list[tuple[Sequence[Job], tuple[int, ...]]]:
        """Return each bracket's trials with its rungs, without the last rung (R)."""
        steps = max((job.total_steps or self.max_steps for job in jobs), default=self.max_steps)
        dealt: list[tuple[Sequence[Job], tuple[int, ...]]] = []
        begin = 0
        for trials, rungs in cycle(shapes(steps, self.eta)):
            if begin >= len(jobs):
                return dealt
            dealt.append((jobs[begin : begin + trials], rungs))
            begin += trials
        return dealt


def shapes(steps: int, eta: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return trials and rungs below `steps` of each bracket, most trials first."""
    s_max = 0
    while eta ** (s_max + 1) <= steps:
        s_max += 1
    brackets = []
    for s in range(s_max, -1, -1):
        trials = ceil((s_max + 1) * eta**s / (s + 1))
        rungs = tuple(max(1, steps // eta ** (s - i)) for i in range(s))
        brackets.append((trials, rungs))
    return brackets
