"""The operator whose trials are pods, and what a trial's pod is like.

The pod runs the same `hermes-trial` as a local process, in the trial's folder on a volume that this
worker sees as HERMES_HOME/sweeps. So metrics, status, result and checkpoints arrive as they do on
one machine, whatever becomes of the pod. The pod needs no access to Airflow, to MLflow or to
Kubernetes' API.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from airflow.providers.cncf.kubernetes.hooks.kubernetes import (
    KubernetesHook,
    PodOperatorHookProtocol,
)
from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.providers.cncf.kubernetes.pod_generator import PodGenerator
from airflow.sdk import BaseOperatorLink
from kubernetes.client import ApiClient

from hermes_ops.airflow.folders import TrialFolder, home, pod_file
from hermes_ops.airflow.hosts import Host
from hermes_ops.airflow.records import ONE_PER_GPU, Lease
from hermes_ops.airflow.trial.links import MlflowRunLink
from hermes_ops.airflow.trial.local import GRACE_S, trial_options, trial_variables
from hermes_ops.airflow.trial.pod_trigger import (
    POD_GRACE_S,
    HeldPod,
    PodTrigger,
    translate_hook_errors,
)
from hermes_ops.airflow.trial.running_segment import RunningSegment
from hermes_ops.airflow.trial.segment_run import SegmentRun
from hermes_ops.airflow.trial.trial_task import TrialTask, trial_defaults
from hermes_ops.config import (
    PodSpec,
    check_pod,
    pod_defaults,
    pod_rules,
    pod_spec,
    require_image_and_claim,
)
from hermes_ops.errors import HermesError
from hermes_ops.kubernetes import (
    ClusterPods,
    PodGang,
    PodLimits,
    PodRequest,
    check_manifest,
    labels_of_sweep,
    manifest,
    own_namespace,
)
from hermes_ops.kubernetes.template import DEFAULT_USER, TRIAL_MOUNT
from hermes_ops.trial.disk_space import DISK_ERRNOS
from hermes_ops.trial.environment import guard_supervisor

START_TIMEOUT_S = 600.0
MOST_LISTINGS = 10
"""The most listings of the pods of an ended sweep: a pod may change before its deletion."""
PASSING_ERRNOS = frozenset({*DISK_ERRNOS, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT})
"""Errors of a volume that is full or away: the trial and its settings are not at fault."""

POD_FOLDER = TrialFolder(Path(TRIAL_MOUNT))
GPU_LOCKS = Path("/tmp/gpus")  # noqa: S108 - in the pod: whose GPUs these are Kubernetes decides


class HermesPodTrialOperator(KubernetesPodOperator):
    """Run a trial's segments as pods.

    The pod is described by the sweep, the installation's defaults, the arguments of
    `KubernetesPodOperator` and the pod mutation hook; later ones win.

    :param number: the trial's number in its sweep, from 0
    :param pool: the Airflow pool whose slots are the GPUs
    :param mlflow_conn_id: the connection that leads to MLflow, instead of its variables
    :param connection_templates: the templates in variables of the script, from the DAG's file, that
        name connections; no others are rendered
    """

    operator_extra_links: Collection[BaseOperatorLink] = (MlflowRunLink(),)
    run_link: str = ""
    storage_conn_id: str | None = None

    def __init__(
        self,
        *,
        number: int,
        mlflow_conn_id: str | None = None,
        connection_templates: Collection[str] = (),
        **kwargs: Any,  # noqa: ANN401 - Airflow's own
    ) -> None:
        ours = {"on_kill_action": "keep_pod", "deferrable": False, "random_name_suffix": False}
        super().__init__(**{**trial_defaults(), **ours, **kwargs})
        self.number = number
        self.mlflow_conn_id = mlflow_conn_id
        self.connection_templates = connection_templates

    @cached_property
    def trial_task(self) -> TrialTask:
        """Return the runner of this task, made once in each process."""
        return TrialTask(self)

    def execute(self, context: Mapping[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        """Run one segment, or reschedule; return the trial's summary when it has finished."""
        return self.trial_task.run(context)

    def resume(self, context: Mapping[str, Any], event: Mapping[str, Any]) -> dict[str, Any]:
        """Go on after the triggerer held the pod."""
        return self.trial_task.resume(context, event)

    def on_kill(self) -> None:
        """Have the trial write a checkpoint: Airflow ends the task, the pod ends by itself."""
        self.trial_task.stop()

    def segment(
        self, segment_run: SegmentRun, sweep: str, context: Mapping[str, Any]
    ) -> RunningSegment:
        """Return the segment as a pod, or as a pod on each of its nodes, to be started."""
        spec = spec_of(segment_run.lease, self.hook)
        with translate_hook_errors():  # the first question of the hook reads its configuration
            self.log.debug("In the cluster: %s", self.hook.is_in_cluster)
        attempt = int(context["ti"].try_number)
        facts = facts_of(segment_run, spec, sweep, self.number, attempt)
        prepare(segment_run.folder.path, facts.user)
        if facts.checkpoint_claim is not None:
            prepare(segment_run.folder.checkpoints, facts.user)  # where the node's claim is mounted
        start_s = spec.start_timeout_seconds or START_TIMEOUT_S
        pods = [
            self._pod(spec, member, context)
            for member in gang_facts(facts, segment_run.lease, spec, start_s)
        ]
        held = self._held(segment_run, pods, facts, start_s)
        return held.segment(
            ClusterPods(self.client, held.namespace),
            self.log.info,
            PodLimits(POD_GRACE_S, held.start_s),
            pods,
            holder=PodTrigger(**asdict(held)) if spec.deferrable or self.deferrable else None,
        )

    def _pod(self, spec: PodSpec, facts: PodRequest, context: Mapping[str, Any]) -> Any:  # noqa: ANN401 - the client's own model
        """Return the pod with everything that the operator's arguments add, if that is allowed."""
        planned = manifest(spec, facts, template(spec.template_file))
        self.full_pod_spec = PodGenerator.deserialize_model_dict(planned)
        pod = self.build_pod_request_obj(context)  # type: ignore[arg-type]
        check_manifest(ApiClient().sanitize_for_serialization(pod), planned, pod_rules())
        return pod

    def _held(
        self,
        segment_run: SegmentRun,
        pods: Sequence[Any],  # the client's own model
        facts: PodRequest,
        start_s: float,
    ) -> HeldPod:
        first, *others = (pod.metadata for pod in pods)
        return HeldPod(
            sweep=facts.sweep,
            number=facts.number,
            epoch=facts.epoch,
            run_id=segment_run.lease.run_id,
            name=first.name,
            namespace=first.namespace,
            owner=str(facts.attempt),
            start_s=start_s,
            cluster={
                # The triggerer stands still while it starts what answers for connections.
                "conn_id": self.kubernetes_conn_id if _has_fields(self.hook) else None,
                "kubernetes_conn_id": None,
                "cluster_context": self.cluster_context,
                "config_file": self.config_file,
                "in_cluster": self.in_cluster,
            },
            mlflow_conn_id=self.mlflow_conn_id,
            host=segment_run.lease.host,
            host_name=segment_run.lease.host_name,
            others=tuple(pod.name for pod in others),
        )


def _has_fields(hook: PodOperatorHookProtocol) -> bool:
    """Return whether Airflow's connection to the cluster has any field: by default it has none."""
    return bool(getattr(hook, "conn_extras", True))


def spec_of(lease: Lease, hook: PodOperatorHookProtocol) -> PodSpec:
    """Return the specification of the trial's pod, with its namespace."""
    if lease.pod is None:
        raise HermesError("the sweep's trials are processes: write trial.run_in: pod in its file.")
    spec = allowed_spec(pod_spec(lease.pod, "the sweep"))
    return with_namespace(require_image_and_claim(spec, "the sweep"), hook)


def allowed_spec(requested: PodSpec) -> PodSpec:
    """Return a sweep's specification of pods over the installation's defaults.

    NotAllowed for what the installation's rules forbid.
    """
    defaults = pod_defaults(pod_file())
    check_pod(requested, defaults, pod_rules(), "the sweep")
    return requested.with_defaults(defaults)


def with_namespace(spec: PodSpec, hook: PodOperatorHookProtocol) -> PodSpec:
    """Return the specification with its namespace: by default the connection's, or this pod's."""
    with translate_hook_errors():
        name = spec.namespace or hook.get_namespace() or own_namespace() or "default"
    return spec.model_copy(update={"namespace": name})


def facts_of(
    segment_run: SegmentRun, spec: PodSpec, sweep: str, number: int, attempt: int
) -> PodRequest:
    """Return the facts of this run for its pod's manifest."""
    lease = segment_run.lease
    inside = segment_run.folder.path.relative_to(home() / "sweeps")
    directory = [] if lease.directory == "." else [f"--directory={lease.directory}"]
    claim = checkpoint_claim(spec, lease)
    apart = [] if claim is None else [f"--checkpoints-on={lease.nodes[0]}"]
    options = [*trial_options(lease, POD_FOLDER, GPU_LOCKS), *directory, *apart]
    visible = ",".join(str(n) for n in range(len(lease.gpus)))  # the container has only its own
    variables = trial_variables(replace(lease, environment={}), POD_FOLDER, sweep, number)
    return PodRequest(
        sweep=sweep,
        number=number,
        epoch=lease.epoch,
        attempt=attempt,
        identity=lease.run_id,
        folder=str(Path(spec.claim_folder or "") / inside),
        arguments=(*options, "--", *lease.command),
        environment={
            **variables,
            "CUDA_VISIBLE_DEVICES": visible,
            **guard_supervisor(lease.environment),
        },
        gpus=len(lease.gpus),
        grace_s=GRACE_S,
        user=spec.user or os.getuid() or DEFAULT_USER,
        nodes=lease.nodes,
        inside=str(inside),
        checkpoint_claim=claim,
        most_gpus=lease.most_gpus,
        installation=Host.here().home_id,
    )


def gang_facts(
    facts: PodRequest, lease: Lease, spec: PodSpec, start_s: float
) -> tuple[PodRequest, ...]:
    """Return the facts of each pod of a trial that has a worker on each GPU of several nodes.

    One pod is enough for any other trial: its facts are `facts`.
    """
    by_node, service = lease.gpus_by_node, spec.gang_service
    is_spread = lease.workers == ONE_PER_GPU and len(by_node) > 1
    if not is_spread or service is None or facts.checkpoint_claim is not None:
        return (facts,)
    gang = PodGang(service, min(lease.gpus))
    members = [
        replace(facts, gang=gang, member=number, gpus=len(gpus), nodes=(node,))
        for number, (node, gpus) in enumerate(by_node.items())
    ]
    hosts = ",".join(f"{member.name}.{service}={member.gpus}" for member in members)
    end = list(facts.arguments).index("--")
    options, command = facts.arguments[:end], facts.arguments[end:]
    return tuple(
        replace(
            member,
            arguments=(
                *options,
                f"--gang={hosts}",
                f"--gang-node={member.member}",
                f"--gang-timeout={start_s:g}",
                *command,
            ),
            environment={
                **facts.environment,
                "CUDA_VISIBLE_DEVICES": ",".join(str(n) for n in range(member.gpus)),
                **guard_supervisor(lease.environment),
            },
        )
        for member in members
    )


def checkpoint_claim(spec: PodSpec, lease: Lease) -> str | None:
    """Return the checkpoint claim of the lease's node; None without such claims.

    HermesError for a lease that names no node, several, or one without a claim.
    """
    claims = spec.checkpoint_claims
    if not claims:
        return None
    node_claims = [claims[node] for node in lease.nodes if node in claims]
    if len(lease.nodes) != 1 or not node_claims:
        raise HermesError(
            f"the trial's GPUs are on {' and '.join(lease.nodes) or 'no known node'}, and "
            f"trial.pod.checkpoint_claims names {', '.join(sorted(claims))}: give the controller "
            "HERMES_NODES with the names of the cluster's nodes."
        )
    return node_claims[0]


def prepare(folder: Path, user: int) -> None:
    """Make the trial's folder writable for the pod's user; HermesError if that fails.

    OSError where its volume is full or away, which may pass.
    """
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
        if error.errno in PASSING_ERRNOS:
            raise
        raise HermesError(
            f"{folder} cannot be made writable for the pod's user {user} ({error.strerror}): "
            "give trial.pod.user the user of the Airflow worker."
        ) from error


def template(file: str | None) -> dict[str, Any] | None:
    """Return the platform's pod template; HermesError when the file is no pod."""
    if file is None:
        return None
    try:
        pod = yaml.safe_load(Path(file).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise HermesError(
            f"the pod template {file} cannot be read ({error}): correct trial.pod.template_file."
        ) from error
    if not isinstance(pod, dict) or not isinstance(pod.get("spec"), dict):
        raise HermesError(
            f"the pod template {file}: found no spec; allowed: a pod. Correct "
            "trial.pod.template_file, or the file."
        )
    containers = pod["spec"].get("containers") or []
    if not isinstance(containers, list) or not all(isinstance(c, dict) for c in containers):
        raise HermesError(
            f"the pod template {file}: found containers that are not a list of mappings; allowed: "
            "a pod. Correct trial.pod.template_file, or the file."
        )
    return pod


def cluster_pods(requested: PodSpec) -> tuple[PodSpec, ClusterPods]:
    """Return a sweep's whole specification of pods, and the pods of its namespace."""
    hook = KubernetesHook()
    spec = with_namespace(allowed_spec(requested), hook)
    with translate_hook_errors():
        return spec, ClusterPods(hook.core_v1_client, str(spec.namespace))


def end_pods(sweep: str, requested: PodSpec | None) -> int:
    """Delete the pods that an ended sweep has left; return how many."""
    _, pods = cluster_pods(requested or PodSpec())
    deleted: set[str] = set()
    installation = Host.here().home_id
    for _ in range(MOST_LISTINGS):
        ours = (pod for pod in pods.find(labels_of_sweep(sweep)) if pod.is_from(installation))
        left = [pod for pod in ours if not pod.is_being_deleted]
        deleted.update(pod.uid for pod in left if pods.delete(pod, round(POD_GRACE_S)))
        if all(pod.uid in deleted for pod in left):
            break  # else one has changed since it was read
    return len(deleted)
