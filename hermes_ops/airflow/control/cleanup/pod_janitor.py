"""Pods without a lease: the controller deletes them, whatever became of their tasks.

A pod's task deletes it in all ordinary cases, and a trial's next lease does. This is for the rest:
the task was killed and never comes again, its trial was ended from outside, its sweep is over.
The pods are watched: how many they are plays no part in what is asked of the cluster.
Nothing is imported or asked of Kubernetes before the pool has had a sweep whose trials are pods.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from hermes_ops.airflow.clock_steps import is_due
from hermes_ops.airflow.control.sweep_state import SweepState
from hermes_ops.airflow.folders import pod_file
from hermes_ops.airflow.hosts import Host
from hermes_ops.airflow.trial.local import GRACE_S
from hermes_ops.config import RunIn, pod_defaults
from hermes_ops.errors import HermesError, error_text
from hermes_ops.kubernetes import (
    ClusterPods,
    LeasesInForce,
    OrphanFindings,
    PodView,
    Rejected,
    WatchedPods,
    connect,
    find_orphans,
    labels_of_sweep,
    own_namespace,
)
from hermes_ops.kubernetes.orphan_pods import PodDeletion
from hermes_ops.kubernetes.template import GRACE_MARGIN_S, MANAGED, SWEEP

log = logging.getLogger(__name__)

PERIOD_S = 10.0

Opened = Callable[[str], WatchedPods]


@dataclass(frozen=True, slots=True)
class Followed:
    """Sweeps whose trials are, or were, pods: the namespace that each names, by its label.

    `running` are the labels of those that have not ended; `leased` knows no lease of those that
    could not be read now.
    """

    namespaces: Mapping[str, str | None]
    running: frozenset[str]
    leased: LeasesInForce


def epochs_of(label: str, sweep: SweepState) -> dict[tuple[str, int], int]:
    """Return the lease in force of each trial of a sweep."""
    leased = ((t.number, t.lease) for t in sweep.trials if t.has_lease_in_force and not t.has_ended)
    return {(label, number): lease.epoch for number, lease in leased if lease is not None}


def cluster_pods() -> Opened:
    """Return the function that opens a namespace; raises HermesError where no cluster is known."""
    api = connect()
    return lambda namespace: WatchedPods(ClusterPods(api, namespace), MANAGED)


@dataclass(slots=True)
class PodJanitor:
    """Looks after pods in the background, so that no decision waits for the cluster."""

    access: Callable[[], Opened] = cluster_pods
    _due_s: float = 0.0
    _namespaces: dict[str, str | None] = field(default_factory=dict)  # by label; ended ones too
    _findings: dict[str, OrphanFindings] = field(default_factory=dict)  # by namespace
    _opened: Opened | None = None
    _watched: dict[str, WatchedPods] = field(default_factory=dict)  # by namespace
    _thread: threading.Thread | None = None
    _complaints: set[str] = field(default_factory=set)  # by namespace or file

    def run_if_due(
        self, sweeps: Iterable[SweepState], now_s: float, unread: Iterable[str] = ()
    ) -> None:
        """Compare pods with leases in the background, if it is time and the last time is over.

        `unread` are sweeps that run, whose leases could not be read: their pods are left alone.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        pods = [b for b in sweeps if b.spec.config.trial.run_in is RunIn.POD]
        if not is_due(now_s, self._due_s, PERIOD_S) or not (pods or self._namespaces):
            return
        followed = self._follow(pods, frozenset(labels_of_sweep(s)[SWEEP] for s in unread))
        self._due_s = now_s + PERIOD_S
        self._thread = threading.Thread(target=self.clean, args=(followed, now_s), daemon=True)
        self._thread.start()

    def _follow(self, sweeps: Iterable[SweepState], unread: frozenset[str]) -> Followed:
        epochs: dict[tuple[str, int], int] = {}
        running = set()
        for sweep in sweeps:
            label = labels_of_sweep(sweep.id)[SWEEP]
            spec = sweep.spec.config.trial.pod
            running.add(label)
            self._namespaces[label] = spec.namespace if spec is not None else None
            epochs |= epochs_of(label, sweep)
        read = frozenset(self._namespaces) - unread
        leased = LeasesInForce(read, epochs, Host.here().home_id)
        return Followed(dict(self._namespaces), unread.union(running), leased)

    def clean(self, followed: Followed, now_s: float) -> None:
        """Check every namespace; trouble is logged once, and the next check tries again."""
        spaces = self._by_namespace(followed)
        for namespace, labels in spaces.items():
            try:
                seen = self._clean(namespace, followed.leased, now_s)
            except Exception as error:  # the controller must outlive whatever a client raises
                self._complain(namespace, error)
                continue
            self._complaints.discard(namespace)
            for over in labels - followed.running - seen:
                self._namespaces.pop(over, None)
        still = {n for n, labels in spaces.items() if labels & self._namespaces.keys()}
        for gone in self._watched.keys() - still:
            self._watched.pop(gone).stop()

    def _by_namespace(self, followed: Followed) -> dict[str, set[str]]:
        try:
            default = pod_defaults(pod_file()).namespace
        except HermesError as error:
            self._complain(str(pod_file()), error)
            return {}
        self._complaints.discard(str(pod_file()))
        labels: dict[str, set[str]] = {}
        for label, namespace in followed.namespaces.items():
            name = namespace or default or own_namespace() or "default"
            labels.setdefault(name, set()).add(label)
        return labels

    def _clean(self, namespace: str, leased: LeasesInForce, now_s: float) -> set[str]:
        """End the orphans of a namespace; return the labels of the sweeps that have pods there.

        Any sweep may have those that delete checkpoints.
        """
        cluster = self._watch(namespace)
        pods = cluster.current()
        before = self._findings.get(namespace, OrphanFindings())
        orphans = find_orphans(pods, leased, before, now_s, round(GRACE_S) + GRACE_MARGIN_S)
        self._findings[namespace] = orphans
        self._due_s = min(self._due_s, orphans.next_s)
        _delete_all(cluster, orphans.deletions)
        if any(pod.deletes_checkpoints for pod in pods):
            return set(self._namespaces)
        return {pod.sweep for pod in pods if pod.is_from(leased.installation)}

    def _watch(self, namespace: str) -> WatchedPods:
        if namespace not in self._watched:
            self._opened = self._opened or self.access()
            self._watched[namespace] = self._opened(namespace)
        return self._watched[namespace]

    def _complain(self, where: str, error: Exception) -> None:
        if where not in self._complaints:
            reason = error_text(error)
            log.warning("Pods without a lease cannot be looked for (%s): %s", where, reason)
        self._complaints.add(where)


def _described(pod: PodView) -> str:
    if pod.deletes_checkpoints:
        return f"Pod {pod.name} deletes checkpoints and has been left by its task or command"
    return f"Pod {pod.name} of trial {pod.trial} of {pod.sweep} has no lease"


def _delete_all(cluster: WatchedPods, deletions: Iterable[PodDeletion]) -> None:
    """Delete these pods; raise the first refusal once all others are deleted."""
    refused: Rejected | None = None
    for pod, grace_s in ((one.pod, one.grace_s) for one in deletions):
        try:
            if cluster.delete(pod, grace_s):
                log.warning("%s: it is deleted", _described(pod))
        except Rejected as error:
            refused = refused or error
    if refused is not None:
        raise refused
