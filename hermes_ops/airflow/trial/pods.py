"""The operator whose trials are pods: the same admission and life, another place to run.

The pod runs the same `hermes-trial` as a local process does, in the trial's own folder on a volume
that this worker sees as HERMES_HOME/sweeps. So metrics, status, result and checkpoints arrive as
they do on one machine, whatever becomes of the pod, and the pod needs no access to Airflow, to
MLflow or to Kubernetes' API.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from airflow.providers.cncf.kubernetes.hooks.kubernetes import (
    KubernetesHook,
    PodOperatorHookProtocol,
)
from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.providers.cncf.kubernetes.pod_generator import PodGenerator

from hermes_ops.airflow.folders import TrialFolder, home, pod_file
from hermes_ops.airflow.records import Lease
from hermes_ops.airflow.trial.local import GRACE_S, trial_options, trial_variables
from hermes_ops.airflow.trial.operator import HermesTrialMixin, trial_defaults
from hermes_ops.airflow.trial.pod_trigger import HeldPod, PodTrigger
from hermes_ops.airflow.trial.visit import Visit
from hermes_ops.config import PodSpec, complete, pod_defaults, pod_spec
from hermes_ops.errors import HermesError
from hermes_ops.kubernetes import (
    ClusterPods,
    Facts,
    Limits,
    PodSegment,
    labels_of_sweep,
    manifest,
    own_namespace,
)
from hermes_ops.kubernetes.template import DEFAULT_USER, TRIAL_MOUNT

START_TIMEOUT_S = 600.0
POD_FOLDER = TrialFolder(Path(TRIAL_MOUNT))
GPU_LOCKS = Path("/tmp/gpus")  # noqa: S108 - in the pod: whose GPUs these are Kubernetes decides


class HermesPodTrialOperator(HermesTrialMixin, KubernetesPodOperator):
    """Runs a trial's segments as pods.

    What the pod is like is said by the sweep, the installation's defaults, the arguments of
    `KubernetesPodOperator` and the pod mutation hook, later ones before earlier ones.

    :param number: the trial's number in its sweep, from 0
    :param pool: the Airflow pool whose slots are the GPUs
    :param mlflow_conn_id: the connection that leads to MLflow, in the place of its variables
    """

    def __init__(
        self,
        *,
        number: int,
        mlflow_conn_id: str | None = None,
        **kwargs: Any,  # noqa: ANN401 - Airflow's own
    ) -> None:
        ours = {"on_kill_action": "keep_pod", "deferrable": False, "random_name_suffix": False}
        super().__init__(**{**trial_defaults(), **ours, **kwargs})
        self.number = number
        self.mlflow_conn_id = mlflow_conn_id

    def execute(self, context: Mapping[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        """Run one segment, or step aside; the trial's summary when it has finished."""
        return self.run_trial(context)

    def segment(self, visit: Visit, sweep: str, context: Mapping[str, Any]) -> PodSegment:
        """The segment of this visit as a pod, to be started."""
        spec = spec_of(visit.lease, self.hook)
        attempt = int(context["ti"].try_number)
        facts = facts_of(visit, spec, sweep, self.number, attempt)
        prepare(visit.folder.path, facts.user)
        if facts.checkpoint_claim is not None:
            prepare(visit.folder.checkpoints, facts.user)  # where the node's claim is mounted
        self.full_pod_spec = PodGenerator.deserialize_model_dict(
            manifest(spec, facts, template(spec.template_file))
        )
        pod = self.build_pod_request_obj(context)  # type: ignore[arg-type]
        held = self._held(visit, pod.metadata, facts, spec.start_timeout_seconds or START_TIMEOUT_S)
        return held.segment(
            ClusterPods(self.client, held.namespace),
            self.log.info,
            request=pod,
            limits=Limits(GRACE_S, held.start_s),
            holder=PodTrigger(**asdict(held)) if spec.deferrable or self.deferrable else None,
        )

    def _held(self, visit: Visit, pod: Any, facts: Facts, start_s: float) -> HeldPod:  # noqa: ANN401 - the client's own model
        return HeldPod(
            sweep=facts.sweep,
            number=facts.number,
            epoch=facts.epoch,
            run_id=visit.lease.run_id,
            name=pod.name,
            namespace=pod.namespace,
            owner=str(facts.attempt),
            start_s=start_s,
            cluster={
                # The triggerer stands still while it starts what answers for connections.
                "conn_id": self.kubernetes_conn_id if _says_something(self.hook) else None,
                "kubernetes_conn_id": None,
                "cluster_context": self.cluster_context,
                "config_file": self.config_file,
                "in_cluster": self.in_cluster,
            },
            mlflow_conn_id=self.mlflow_conn_id,
        )


def _says_something(hook: PodOperatorHookProtocol) -> bool:
    """Whether Airflow's connection to the cluster holds anything: by default there is none."""
    return bool(getattr(hook, "conn_extras", True))


def spec_of(lease: Lease, hook: PodOperatorHookProtocol) -> PodSpec:
    """What the trial's pod is like, its namespace included."""
    if lease.pod is None:
        raise HermesError("the sweep's trials are processes: write trial.run_in: pod in its file.")
    spec = pod_spec(lease.pod, "the sweep").over(pod_defaults(pod_file()))
    return with_namespace(complete(spec, "the sweep"), hook)


def with_namespace(spec: PodSpec, hook: PodOperatorHookProtocol) -> PodSpec:
    """The section with its namespace: by default that of Airflow's connection, or of this pod."""
    name = spec.namespace or hook.get_namespace() or own_namespace() or "default"
    return spec.model_copy(update={"namespace": name})


def facts_of(visit: Visit, spec: PodSpec, sweep: str, number: int, attempt: int) -> Facts:
    """What this visit brings into its pod."""
    lease = visit.lease
    inside = visit.folder.path.relative_to(home() / "sweeps")
    directory = [] if lease.directory == "." else [f"--directory={lease.directory}"]
    claim = checkpoint_claim(spec, lease)
    apart = [] if claim is None else [f"--checkpoints-on={lease.nodes[0]}"]
    options = [*trial_options(lease, POD_FOLDER, GPU_LOCKS), *directory, *apart]
    visible = ",".join(str(n) for n in range(len(lease.gpus)))  # the container has only its own
    variables = trial_variables(replace(lease, environment={}), POD_FOLDER, sweep, number)
    return Facts(
        sweep=sweep,
        number=number,
        epoch=lease.epoch,
        attempt=attempt,
        identity=lease.run_id,
        folder=str(Path(spec.claim_folder or "") / inside),
        arguments=(*options, "--", *lease.command),
        environment={**variables, "CUDA_VISIBLE_DEVICES": visible, **lease.environment},
        gpus=len(lease.gpus),
        grace_s=GRACE_S,
        user=spec.user or os.getuid() or DEFAULT_USER,
        nodes=lease.nodes,
        inside=str(inside),
        checkpoint_claim=claim,
    )


def checkpoint_claim(spec: PodSpec, lease: Lease) -> str | None:
    """The claim of the lease's node that has the trial's checkpoints; None without such claims.

    HermesError for a lease that names no node, several, or one without a claim.
    """
    claims = spec.checkpoint_claims
    if not claims:
        return None
    found = [claims[node] for node in lease.nodes if node in claims]
    if len(lease.nodes) != 1 or not found:
        raise HermesError(
            f"the trial's GPUs are on {' and '.join(lease.nodes) or 'no known node'}, and "
            f"trial.pod.checkpoint_claims names {', '.join(sorted(claims))}: give the controller "
            "HERMES_NODES with the names of the cluster's nodes."
        )
    return found[0]


def prepare(folder: Path, user: int) -> None:
    """Make the trial's folder so that the pod's user can write in it; HermesError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.is_symlink():  # its script made it: the link's target is not the pod's
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
        if folder.stat().st_uid == user:
            return
        if os.getuid() == 0:
            os.chown(folder, user, user, follow_symlinks=False)
        else:
            folder.chmod(0o777)
    except OSError as error:
        raise HermesError(
            f"{folder} cannot be made writable for the pod's user {user} ({error.strerror}): "
            "give trial.pod.user the user of the Airflow worker."
        ) from error


def template(file: str | None) -> dict[str, Any] | None:
    """The platform's pod template; HermesError when it is none."""
    if file is None:
        return None
    try:
        found = yaml.safe_load(Path(file).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise HermesError(
            f"the pod template {file} cannot be read ({error}): correct trial.pod.template_file."
        ) from error
    if not isinstance(found, dict) or not isinstance(found.get("spec"), dict):
        raise HermesError(f"{file} is no pod: it has no spec; correct trial.pod.template_file.")
    return found


def end_pods(sweep: str, own: PodSpec | None) -> int:
    """After a sweep's end: delete what pods it may have left; return how many."""
    hook = KubernetesHook()
    spec = with_namespace((own or PodSpec()).over(pod_defaults(pod_file())), hook)
    pods = ClusterPods(hook.core_v1_client, str(spec.namespace))
    left = pods.find(labels_of_sweep(sweep))
    for pod in left:
        pods.delete(pod, round(GRACE_S))
    return len(left)
