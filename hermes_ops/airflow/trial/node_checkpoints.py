"""Deletion of checkpoints on the nodes' own claims, by a pod on each node.

A pod whose trial finishes deletes its own. No other program sees the checkpoints of trials that
ended early, were cancelled or failed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Mapping
from typing import Any

from airflow.providers.cncf.kubernetes.hooks.kubernetes import KubernetesHook

from hermes_ops.airflow.folders import TrialFolder, sweep_folder
from hermes_ops.airflow.trial.pods import allowed_spec, template, with_namespace
from hermes_ops.config import PodSpec
from hermes_ops.confined_folder import ConfinedFolder, NotConfinedError
from hermes_ops.errors import HermesError
from hermes_ops.kubernetes import ClusterPods, PodRequest, Pods
from hermes_ops.kubernetes.template import CHECKPOINTS_MOUNT, DEFAULT_USER, cleanup_manifest
from hermes_ops.trial.node_checkpoints import EMPTY_OPTION, MARK

log = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""Seconds that a node may take to delete."""

LOOK_S = 1.0
_NAME_BYTES = 1_000


def by_node(sweep: str, numbers: Collection[int]) -> dict[str, list[int]]:
    """Return the trials that have left checkpoints on a node, by node."""
    found: dict[str, list[int]] = {}
    for number in sorted(numbers):
        try:
            folder = ConfinedFolder(TrialFolder.from_sweep(sweep, number).path)
            node = folder.read(MARK, _NAME_BYTES).decode().strip()
        except (OSError, NotConfinedError, UnicodeError):
            continue
        found.setdefault(node, []).append(number)
    return found


def clear_disks(sweep: str, own: PodSpec, numbers: Collection[int]) -> None:
    """Delete the checkpoints of these trials of an ended sweep on the nodes' claims.

    Checkpoints that cannot be deleted stay, and the log names their nodes.
    """
    left = by_node(sweep, numbers)
    if not left:
        return
    try:
        hook = KubernetesHook()
        spec = with_namespace(allowed_spec(own), hook)
        pods = ClusterPods(hook.core_v1_client, str(spec.namespace))
        done = cleared(pods, {n: request(sweep, spec, n, t) for n, t in left.items()})
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
        identity=f"{sweep} on {node}",
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


def cleared(pods: Pods, requests: Mapping[str, dict[str, Any]]) -> set[str]:
    """Run one pod per node, concurrently; return the nodes whose pod has succeeded."""
    names = {node: str(pod["metadata"]["name"]) for node, pod in requests.items()}
    for pod in requests.values():
        pods.create(pod)
    done: set[str] = set()
    until_s = time.monotonic() + PATIENCE_S
    while names:
        late = time.monotonic() >= until_s
        for node, name in list(names.items()):
            view = pods.fetch(name)
            if view is not None and not (view.ended or late):
                continue
            del names[node]
            if view is not None:
                done |= {node} if view.code == 0 else set()
                pods.delete(view, 0)
        if names:
            time.sleep(LOOK_S)
    return done
