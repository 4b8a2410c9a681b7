"""Deletion of checkpoints on the nodes' own claims, by a pod on each node.

A pod whose trial finishes deletes its own. No other program sees the checkpoints of trials that
ended early, were cancelled or failed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hermes_ops.airflow.folders import TrialFolder, sweep_folder
from hermes_ops.airflow.trial.pods import cluster_pods, template
from hermes_ops.config import PodSpec
from hermes_ops.confined_folder import ConfinedFolder, NotConfinedError
from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.kubernetes import PodRequest, Pods
from hermes_ops.kubernetes.template import CHECKPOINTS_MOUNT, DEFAULT_USER, cleanup_manifest
from hermes_ops.trial.node_checkpoints import EMPTY_OPTION, MARK

log = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""Seconds that a node may take to delete checkpoints."""

LAST_PATIENCE_S = 30.0
"""Further seconds in which the deletion of pods that have not ended by then is retried."""

LOOK_S = 1.0
_NAME_BYTES = 1_000


def by_node(sweep: str, numbers: Collection[int]) -> dict[str, list[int]]:
    """Return the trials that have left checkpoints on a node, by node."""
    numbers_of: dict[str, list[int]] = {}
    for number in sorted(numbers):
        try:
            folder = ConfinedFolder(TrialFolder.from_sweep(sweep, number).path)
            node = folder.read(MARK, _NAME_BYTES).decode().strip()
        except (OSError, NotConfinedError, UnicodeError):
            continue
        numbers_of.setdefault(node, []).append(number)
    return numbers_of


def clear_disks(sweep: str, requested: PodSpec, numbers: Collection[int]) -> None:
    """Delete the checkpoints of these trials of an ended sweep on the nodes' claims.

    Checkpoints that cannot be deleted stay, and the log names their nodes.
    """
    left = by_node(sweep, numbers)
    if not left:
        return
    try:
        spec, pods = cluster_pods(requested)
        done = run_cleanup_pods(pods, {n: request(sweep, spec, n, t) for n, t in left.items()})
    except HermesError as error:
        log.warning("Checkpoints of %s stay on %s: %s", sweep, ", ".join(left), error)
        return
    for node, trials in left.items():
        if node not in done:
            log.warning("Checkpoints of the trials %s of %s stay on %s", trials, sweep, node)
            continue
        for number in trials:
            (TrialFolder.from_sweep(sweep, number).path / MARK).unlink(missing_ok=True)


def request(sweep: str, spec: PodSpec, node: str, numbers: Collection[int]) -> dict[str, Any]:
    """Return the pod that deletes these trials' checkpoints; HermesError without a claim."""
    claim = (spec.checkpoint_claims or {}).get(node)
    if claim is None:
        raise HermesError(f"trial.pod.checkpoint_claims names no claim of {node}.")
    facts = PodRequest(
        sweep=sweep,
        number=0,
        epoch=0,
        attempt=0,
        identity=f"{sweep} on {node}: {sorted(numbers)}",  # no earlier pod answers for others
        folder="",
        arguments=(EMPTY_OPTION, *(f"{CHECKPOINTS_MOUNT}/{number}" for number in numbers)),
        environment={},
        gpus=0,
        grace_s=0.0,
        user=spec.user or os.getuid() or DEFAULT_USER,
        nodes=(node,),
        inside=f"{sweep_folder(sweep).name}/trials",
        checkpoint_claim=claim,
    )
    return cleanup_manifest(spec, facts, template(spec.template_file))


def run_cleanup_pods(pods: Pods, requests: Mapping[str, dict[str, Any]]) -> set[str]:
    """Run one pod per node, concurrently; return the nodes whose pod has succeeded.

    The pods are deleted afterwards; while the cluster does not answer, that is retried.
    """
    every: list[_CleanupPod] = [_CleanupPod(pods, node, pod) for node, pod in requests.items()]
    waiting = [one for one in every if one.create()]
    until_s = time.monotonic() + PATIENCE_S
    while waiting and time.monotonic() < until_s + LAST_PATIENCE_S:
        is_late = time.monotonic() >= until_s
        waiting = [one for one in waiting if not one.delete_ended(is_late)]
        if waiting:
            time.sleep(LOOK_S)
    for one in waiting:
        log.warning("The pod %s may be left: the cluster does not answer", one.name)
    return {one.node for one in every if one.code == 0}


@dataclass(slots=True)
class _CleanupPod:
    """The pod that deletes checkpoints on a node; `code` is its exit code once it has ended."""

    pods: Pods
    node: str
    request: Mapping[str, Any]
    code: int | None = None

    @property
    def name(self) -> str:
        return str(self.request["metadata"]["name"])

    def create(self) -> bool:
        """Create the pod; return False if the cluster refuses it."""
        return self._without_refusal(lambda: self.pods.create(self.request) is None) is not None

    def delete_ended(self, is_late: bool) -> bool:
        """Delete the pod if it has ended or is late; return False if it has to be checked again."""
        return self._without_refusal(lambda: self._look(is_late)) is not False

    def _look(self, is_late: bool) -> bool:
        view = self.pods.fetch(self.name)
        if view is None:
            return True
        if view.ended:
            self.code = view.code
        return (view.ended or is_late) and self.pods.delete(view, 0)

    def _without_refusal(self, call: Callable[[], bool]) -> bool | None:
        """Return the call's result; False if the cluster does not answer, None if it refuses."""
        try:
            return call()
        except Unavailable:
            return False
        except HermesError as error:
            log.warning("No checkpoint on %s is deleted: %s", self.node, error)
            return None
