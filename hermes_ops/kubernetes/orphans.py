"""Which pods have no lease behind them and are to go: decided on plain facts, without a clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from hermes_ops.kubernetes.api import PodView
from hermes_ops.kubernetes.life import FORCE_AFTER_S

ORPHAN_GRACE_S = 30.0
"""How long a pod must have had no lease before it is deleted; our choice.

Its task ends it within that time in all ordinary cases, and a lease may be younger than the facts.
"""


@dataclass(frozen=True, slots=True)
class Leased:
    """What the pool's controller knows.

    :param sweeps: values of the sweeps' label: those that run, and those that it saw end
    :param epochs: the lease in force of each trial (label of its sweep, number); none, no entry
    """

    sweeps: frozenset[str]
    epochs: Mapping[tuple[str, int], int]


@dataclass(frozen=True, slots=True)
class Ending:
    """A pod to be deleted, with the seconds that its script has to checkpoint."""

    pod: PodView
    grace_s: int


@dataclass(frozen=True, slots=True)
class Findings:
    """What one look has shown: since when which pod (by uid) is an orphan, and which are to go."""

    since_s: Mapping[str, float] = field(default_factory=dict)
    endings: tuple[Ending, ...] = ()

    @property
    def next_s(self) -> float:
        """When the grace of the next orphan is over; infinity without orphans."""
        return min(self.since_s.values(), default=inf) + ORPHAN_GRACE_S


def is_orphan(pod: PodView, leased: Leased) -> bool:
    """True for a pod of our sweeps whose trial has no lease in force, or another one.

    A pod of a sweep that is not known is somebody else's: of another pool, another installation.
    """
    if pod.sweep not in leased.sweeps:
        return False
    return leased.epochs.get((pod.sweep, pod.trial)) != pod.epoch


def judge(
    pods: Sequence[PodView],
    leased: Leased,
    since_s: Mapping[str, float],
    now_s: float,
    script_grace_s: int,
) -> Findings:
    """Which pods are orphans at `now_s`, and which of them have been so for long enough.

    One that is being deleted is left to its node; its object goes by force where the node does not
    answer. `since_s` is what the last look found.
    """
    found = {p.uid: since_s.get(p.uid, now_s) for p in pods if is_orphan(p, leased)}
    due = (p for p in pods if p.uid in found and now_s - found[p.uid] >= ORPHAN_GRACE_S)
    endings = []
    for pod in due:
        if pod.gone_by_s is None:
            endings.append(Ending(pod, script_grace_s))
        elif now_s > pod.gone_by_s + FORCE_AFTER_S:
            endings.append(Ending(pod, 0))
    return Findings(found, tuple(endings))
