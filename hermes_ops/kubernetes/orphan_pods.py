"""The pods of a namespace, kept up to date by a watch, and those of them to be deleted.

A pod without a lease in force is deleted: a pure decision without a clock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from hermes_ops.errors import Unavailable, error_text
from hermes_ops.kubernetes.api import PodEvent, PodView
from hermes_ops.kubernetes.deletion import force_at_s

log = logging.getLogger(__name__)

WATCH_S = 60.0
"""Seconds that one watch lasts; a dead connection is noticed by then."""

SHORT_S = 1.0
"""Seconds: a watch that ends sooner has broken off."""


class Watchable(Protocol):
    """The pods of one namespace, and their changes."""

    def list_with_version(self, labels: Mapping[str, str]) -> tuple[list[PodView], str]:
        """Return the pods with these labels, and the version that `watch_events` continues from."""

    def watch_events(
        self, labels: Mapping[str, str], version: str, seconds: float
    ) -> Iterator[PodEvent]:
        """Yield the changes of the pods with these labels after that version, for `seconds`."""

    def delete(self, pod: PodView, grace_s: int) -> bool:
        """Delete the pod unless it has changed since it was read; return whether it was deleted."""


@dataclass(slots=True)
class WatchedPods:
    """The pods with some labels, kept up to date in the background.

    When a watch has broken off (the API was away, or has forgotten the version) the next call of
    `current` lists them again.
    """

    pods: Watchable
    labels: Mapping[str, str]
    clock: Callable[[], float] = time.monotonic
    _pods: dict[str, PodView] = field(default_factory=dict)  # by uid
    _version: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _stopped: bool = False
    _warned: bool = False

    def current(self) -> list[PodView]:
        """Return the pods as they are now; raise HermesError when they cannot be listed."""
        if self._thread is None or not self._thread.is_alive():
            pods, self._version = self.pods.list_with_version(self.labels)
            self._pods = {pod.uid: pod for pod in pods}
            self._thread = threading.Thread(target=self.follow, daemon=True)
            self._thread.start()
        with self._lock:
            return list(self._pods.values())

    def delete(self, pod: PodView, grace_s: int) -> bool:
        """Delete the pod unless it has changed since it was read; return whether it was deleted."""
        return self.pods.delete(pod, grace_s)

    def stop(self) -> None:
        """Stop watching at the end of the current watch."""
        self._stopped = True

    def follow(self) -> None:
        """Apply the events of one watch after the other, until one breaks off."""
        lasts = True
        while lasts and not self._stopped:
            started_s = self.clock()
            try:
                self._apply_events()
            except Unavailable:  # the next listing raises it if that lasts
                return
            except Exception as error:  # the controller must outlive whatever a client raises
                self._warn_once(error)
                return
            lasts = self.clock() - started_s >= SHORT_S

    def _apply_events(self) -> None:
        for change in self.pods.watch_events(self.labels, self._version, WATCH_S):
            self._version = change.version
            if change.pod is not None:
                with self._lock:
                    if change.gone:
                        self._pods.pop(change.pod.uid, None)
                    else:
                        self._pods[change.pod.uid] = change.pod

    def _warn_once(self, error: Exception) -> None:
        if not self._warned:
            text = error_text(error)
            log.warning("Pods are listed each time, as they cannot be watched: %s", text)
        self._warned = True


ORPHAN_GRACE_S = 30.0
"""Seconds that a pod must have had no lease before it is deleted; our choice.

In all ordinary cases its task ends it within that time, and a lease may be newer than the list.
"""

CLEARING_S = 180.0
"""Seconds after which a pod that deletes checkpoints is deleted as an orphan; our choice.

That is twice the time within which the task or command that created it deletes it.
"""


@dataclass(frozen=True, slots=True)
class LeasesInForce:
    """The leases that the pool's controller knows.

    :param sweeps: values of the sweeps' label: those that run, and those that it saw end
    :param epochs: the lease in force of each trial (label of its sweep, number); none, no entry
    :param installation: the id of its state folder
    """

    sweeps: frozenset[str]
    epochs: Mapping[tuple[str, int], int]
    installation: str = ""


@dataclass(frozen=True, slots=True)
class PodDeletion:
    """A pod to be deleted, with the seconds that it has to end."""

    pod: PodView
    grace_s: int


@dataclass(frozen=True, slots=True)
class OrphanFindings:
    """The orphans of one check, by uid of the pod, and the pods to delete.

    `since_s` is when each became an orphan, `force_at_s` when those that are being deleted may be
    removed by force. `next_s` is when the next orphan's grace ends; infinity if none does.
    """

    since_s: Mapping[str, float] = field(default_factory=dict)
    force_at_s: Mapping[str, float] = field(default_factory=dict)
    deletions: tuple[PodDeletion, ...] = ()
    next_s: float = inf


def is_orphan(pod: PodView, leased: LeasesInForce) -> bool:
    """Return whether a pod of our sweeps belongs to no lease in force, or to an older one.

    A pod of an unknown sweep belongs to another pool or installation, and is not ours. A pod that
    deletes checkpoints never has a lease, so it always counts.
    """
    if pod.deletes_checkpoints:
        return True
    if pod.sweep not in leased.sweeps or not pod.is_from(leased.installation):
        return False
    return leased.epochs.get((pod.sweep, pod.trial)) != pod.epoch


def _patience_s(pod: PodView) -> float:
    return CLEARING_S if pod.deletes_checkpoints else ORPHAN_GRACE_S


def find_orphans(
    pods: Sequence[PodView],
    leased: LeasesInForce,
    last: OrphanFindings,
    now_s: float,
    pod_grace_s: int,
) -> OrphanFindings:
    """Return the orphans at `now_s`, and those that have been orphans for ORPHAN_GRACE_S.

    Pods that delete checkpoints have CLEARING_S instead. A pod that is being deleted is left to its
    node, and removed by force if the node does not answer. `last` is the result of the last check,
    `pod_grace_s` the grace period of a deletion.
    """
    orphans = [pod for pod in pods if is_orphan(pod, leased)]
    since_s = {p.uid: min(now_s, last.since_s.get(p.uid, now_s)) for p in orphans}
    moments = ((pod.uid, force_at_s(pod, last.force_at_s, now_s)) for pod in orphans)
    forced_s = {uid: at_s for uid, at_s in moments if at_s is not None}
    ends_s = {pod.uid: since_s[pod.uid] + _patience_s(pod) for pod in orphans}
    deletions = []
    for pod in orphans:
        if now_s < ends_s[pod.uid]:
            continue
        if not pod.is_being_deleted:
            deletions.append(PodDeletion(pod, pod_grace_s))
        elif now_s > forced_s[pod.uid]:
            deletions.append(PodDeletion(pod, 0))
    next_s = min((end_s for end_s in ends_s.values() if end_s > now_s), default=inf)
    return OrphanFindings(since_s, forced_s, tuple(deletions), next_s)
