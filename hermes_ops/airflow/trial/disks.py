"""Checkpoints on the nodes' own claims that nobody needs any more: a pod on the node deletes them.

A pod whose trial finishes deletes its own. What trials leave that were ended early, cancelled or
failed, no other program sees.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Mapping
from typing import Any

from airflow.providers.cncf.kubernetes.hooks.kubernetes import KubernetesHook

from hermes_ops.airflow.folders import TrialFolder, pod_file, sweep_folder
from hermes_ops.airflow.trial.pods import template, with_namespace
from hermes_ops.config import PodSpec, pod_defaults
from hermes_ops.confined_folder import ConfinedFolder, NotConfinedError
from hermes_ops.errors import HermesError
from hermes_ops.kubernetes import ClusterPods, Facts, Pods
from hermes_ops.kubernetes.template import CHECKPOINTS_MOUNT, DEFAULT_USER, clearing
from hermes_ops.trial.apart import EMPTY_OPTION, MARK

log = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""How long a node may take to delete."""

LOOK_S = 1.0
_NAME_BYTES = 1_000


def by_node(sweep: str, numbers: Collection[int]) -> dict[str, list[int]]:
    """Those of the trials that have left checkpoints on a node, by that node."""
    found: dict[str, list[int]] = {}
    for number in sorted(numbers):
        try:
            folder = ConfinedFolder(TrialFolder.of(sweep, number).path)
            node = folder.read(MARK, _NAME_BYTES).decode().strip()
        except (OSError, NotConfinedError, UnicodeError):
            continue
        found.setdefault(node, []).append(number)
    return found


def clear_disks(sweep: str, own: PodSpec, numbers: Collection[int]) -> None:
    """Delete what these trials of a sweep that has ended have left on the nodes' claims.

    What cannot be deleted stays, and the log says where.
    """
    left = by_node(sweep, numbers)
    if not left:
        return
    try:
        hook = KubernetesHook()
        spec = with_namespace(own.over(pod_defaults(pod_file())), hook)
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
            (TrialFolder.of(sweep, number).path / MARK).unlink(missing_ok=True)


def request(sweep: str, spec: PodSpec, node: str, numbers: Collection[int]) -> dict[str, Any]:
    """The pod that deletes these trials' checkpoints; HermesError without a claim of the node."""
    claim = (spec.checkpoint_claims or {}).get(node)
    if claim is None:
        raise HermesError(f"trial.pod.checkpoint_claims names no claim of {node}.")
    facts = Facts(
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
    return clearing(spec, facts, template(spec.template_file))


def cleared(pods: Pods, requests: Mapping[str, dict[str, Any]]) -> set[str]:
    """Run one pod for each node, all at once; the nodes whose pod has done it."""
    names = {node: str(pod["metadata"]["name"]) for node, pod in requests.items()}
    for pod in requests.values():
        pods.create(pod)
    done: set[str] = set()
    until_s = time.monotonic() + PATIENCE_S
    while names:
        late = time.monotonic() >= until_s
        for node, name in list(names.items()):
            view = pods.read(name)
            if view is not None and not (view.ended or late):
                continue
            del names[node]
            if view is not None:
                done |= {node} if view.code == 0 else set()
                pods.delete(view, 0)
        if names:
            time.sleep(LOOK_S)
    return done
