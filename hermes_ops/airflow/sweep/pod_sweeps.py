"""What a sweep whose trials are pods needs of its plan and of its report."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from airflow.sdk.exceptions import AirflowFailException

from hermes_ops.airflow.control.janitor import RESUMABLE
from hermes_ops.airflow.control.nodes import VARIABLE, node_names
from hermes_ops.airflow.folders import pod_file
from hermes_ops.config import PodSpec, RunIn, SweepConfig, complete, pod_defaults
from hermes_ops.errors import ConfigError, HermesError, Problem

log = logging.getLogger(__name__)


def checked_pods(config: SweepConfig) -> SweepConfig:
    """The sweep with its claims for checkpoints; fails its plan if its pods could never be made.

    Claims that come from the installation's defaults are the sweep's own from now on: where its
    checkpoints lie does not change while it runs.
    """
    own = config.trial.pod or PodSpec()
    try:
        whole = complete(own.over(pod_defaults(pod_file())), config.name)
        if not whole.checkpoint_claims:
            return config
        _check_nodes(config, whole.checkpoint_claims)
    except HermesError as error:
        raise AirflowFailException(str(error)) from None
    pod = own.model_copy(update={"checkpoint_claims": whole.checkpoint_claims})
    trial = config.trial.model_copy(update={"pod": pod})
    return config.model_copy(update={"trial": trial})


def _check_nodes(config: SweepConfig, claims: Mapping[str, str]) -> None:
    """Raise ConfigError unless some node with a claim has GPUs enough for a trial."""
    gpus = Counter(node_names())
    if max((gpus[node] for node in claims), default=0) >= config.trial.gpus:
        return
    known = ", ".join(f"{node}={n}" for node, n in gpus.items())
    problem = Problem(
        "trial.pod.checkpoint_claims",
        f"claims for {', '.join(sorted(claims))}, and "
        + (f"a pool on {known}" if known else "a pool whose nodes are not known"),
        f"a claim for a node of the pool with at least {config.trial.gpus} GPUs",
        f"set {VARIABLE}, as in node-a=2,node-b=2, for the controller and the Airflow workers "
        "(pool.nodes of the chart), or correct the names",
    )
    raise ConfigError(config.name, (problem,))


def end_left_pods(config: SweepConfig, sweep: str) -> None:
    """After the last trial: delete pods whose tasks were killed and never came again."""
    if config.trial.run_in is not RunIn.POD:
        return
    from hermes_ops.airflow.trial.pods import end_pods

    try:
        ended = end_pods(sweep, config.trial.pod)
    except HermesError as error:
        log.warning("Pods of %s may be left: %s", sweep, error)
        return
    if ended:
        log.info("%s pods of %s were left and are deleted", ended, sweep)


def clear_left_disks(config: SweepConfig, sweep: str, document: Mapping[str, Any]) -> None:
    """After a sweep's end: delete the checkpoints on nodes' own claims of trials that are over.

    Those of trials that can be resumed stay, if the sweep keeps any.
    """
    pod = config.trial.pod if config.trial.run_in is RunIn.POD else None
    if pod is None or not pod.checkpoint_claims:
        return
    from hermes_ops.airflow.trial.disks import clear_disks

    stays = RESUMABLE if config.checkpoints.keep_seconds > 0 else ()
    over = [int(t["number"]) for t in document["trials"] if t["state"] not in stays]
    clear_disks(sweep, pod, over)
