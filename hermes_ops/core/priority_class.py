"""Priority classes of sweeps: which jobs of a team go first, and who may use a class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from hermes_ops.core.model import Job, JobId, Reason, Snapshot

DEFAULT_CLASS, NIGHTLY_CLASS = "normal", "nightly"
_CLASS = attrgetter("priority_class")


@dataclass(frozen=True, slots=True)
class PriorityClass:
    """A class: jobs of a higher `priority` go before those of a lower one of the same team.

    `teams` and `users` may use it; all may where both are None.
    """

    name: str
    priority: int = 0
    teams: frozenset[str] | None = None
    users: frozenset[str] | None = None

    def allows(self, user: str, team: str) -> bool:
        """Return whether that user of that team may use it."""
        if self.teams is None and self.users is None:
            return True
        return user in (self.users or ()) or (bool(team) and team in (self.teams or ()))


BUILT_IN_CLASSES = (
    PriorityClass("interactive", 100),
    PriorityClass(DEFAULT_CLASS, 0),
    PriorityClass(NIGHTLY_CLASS, -100),
)
"""The classes that each quota has unless it says otherwise."""


@dataclass(frozen=True, slots=True)
class ClassRefusal:
    """Why a sweep may not use its class: `found`, what is `allowed`, and the remedy."""

    found: str
    allowed: str
    remedy: str


def class_refusal(
    classes: Mapping[str, PriorityClass], name: str, user: str, team: str
) -> ClassRefusal | None:
    """Return why that user of that team may not use the class of that name; None if it may."""
    allowed_names = [each for each in classes if classes[each].allows(user, team)]
    allowed = (
        f"one of {', '.join(allowed_names)}"
        if allowed_names
        else "none of the classes of the quota"
    )
    if (priority_class := classes.get(name)) is None:
        return ClassRefusal(
            f"the pool's quota has no class {name!r}", allowed, _remedy(allowed_names)
        )
    if priority_class.allows(user, team):
        return None
    who = f"user {user}" if user else "a job without a user"
    whose = f"{who} of team {team}" if team else who
    return ClassRefusal(f"{whose} may not use the class {name!r}", allowed, _remedy(allowed_names))


def _remedy(allowed_names: list[str]) -> str:
    if allowed_names:
        return "name one of those, or ask an administrator of the quota"
    return "ask an administrator of the quota for a class"


def named_classes(snapshot: Snapshot) -> set[str]:
    """Return the names of the classes of the jobs that hold GPUs or wait; empty: the default."""
    return set(map(_CLASS, chain(snapshot.holding, snapshot.queue)))


def refused_jobs(
    snapshot: Snapshot, classes: Mapping[str, PriorityClass], named: Set[str]
) -> Iterator[tuple[JobId, Reason]]:
    """Yield the jobs whose user may not use their class, each with the reason.

    `named` are the classes of all jobs.
    """
    is_open = all(each.teams is None and each.users is None for each in classes.values())
    if is_open and classes.keys() >= named - {""}:
        return
    refusals: dict[tuple[str, str, str], ClassRefusal | None] = {}
    for job in chain(snapshot.holding, snapshot.queue):
        key = job.priority_class or DEFAULT_CLASS, job.user, job.virtual_cluster
        if key not in refusals:
            refusals[key] = class_refusal(classes, *key)
        if (refusal := refusals[key]) is not None:
            yield job.id, _refused(job, refusal)


def _refused(job: Job, refusal: ClassRefusal) -> Reason:
    verb = "stops" if job.holds_gpus else "waits"
    text = f"{verb}: {refusal.found}; allowed is {refusal.allowed}"
    return Reason(text, would_change="a sweep of another class, or another quota")
