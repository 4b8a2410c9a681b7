"""The section `trial.pod` of a sweep file, and of an installation's own defaults for it."""

from __future__ import annotations

import os
import posixpath
import re
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator, model_validator

from hermes_ops.config.fields import Model, PodValue, PodVariable, Seconds, Text, refusal

KUBERNETES_NAME = r"^[a-z0-9]([a-z0-9.\-]{0,251}[a-z0-9])?$"
QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?$"
MOUNT_PATH = r"^/[^:]*$"
LABEL_KEY = r"^[A-Za-z0-9]([A-Za-z0-9._\-/]{0,315}[A-Za-z0-9])?$"
LABEL_VALUE = r"^([A-Za-z0-9]([A-Za-z0-9._\-]*[A-Za-z0-9])?)?$"
SERVICE_NAME = r"^[a-z]([a-z0-9\-]{0,61}[a-z0-9])?$"

KubernetesName = Annotated[str, Field(pattern=KUBERNETES_NAME)]
Quantity = Annotated[str, Field(pattern=QUANTITY)]
GPU_RESOURCE = re.compile(
    r"^gpu\.intel\.com/|/(v|p)?gpu|/(mig-|tpu|gaudi|neuron|ascend|mlu)", re.IGNORECASE
)
"""Matches the names of resources that count accelerators or parts of them."""

TRIAL_FOLDER = "/hermes/trial"
"""Where a pod has its trial's folder."""

CHECKPOINTS_FOLDER = f"{TRIAL_FOLDER}/checkpoints"


def _refuse_hiding_trial(path: str) -> str:
    normal = posixpath.normpath(path)
    if f"{TRIAL_FOLDER}/".startswith(f"{normal.rstrip('/')}/"):
        raise refusal(
            f"a path that does not hide {TRIAL_FOLDER}, the trial's folder", "mount it elsewhere"
        )
    return path


MountPath = Annotated[
    str, Field(pattern=MOUNT_PATH, max_length=1_000), AfterValidator(_refuse_hiding_trial)
]
LabelKey = Annotated[str, Field(pattern=LABEL_KEY)]
LabelValue = Annotated[str, Field(max_length=63, pattern=LABEL_VALUE)]
ServiceName = Annotated[str, Field(pattern=SERVICE_NAME)]


RUN_IN_VARIABLE = "HERMES_RUN_IN"
"""Names the only place where an installation has trials run."""


class RunIn(StrEnum):
    """Where a trial trains: in a process or in a pod."""

    PROCESS = "process"
    POD = "pod"


def default_run_in() -> RunIn:
    """Return where trials run by default."""
    required = os.environ.get(RUN_IN_VARIABLE)
    return RunIn.POD if required == RunIn.POD.value else RunIn.PROCESS


class PullPolicy(StrEnum):
    """When a node fetches the image."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class Effect(StrEnum):
    """What a taint does to pods that do not tolerate it."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(Model):
    """A taint of nodes that the pods tolerate."""

    key: Annotated[LabelKey, Field(examples=["gpu"])]
    """Key of the taint."""
    value: Annotated[LabelValue | None, Field(examples=["reserved"])] = None
    """Value of the taint; null: any."""
    effect: Annotated[Effect | None, Field(strict=False)] = None
    """NoSchedule, PreferNoSchedule or NoExecute; null: any."""


class Volume(Model):
    """A volume in addition to the trial's own: exactly one source."""

    mount: Annotated[MountPath, Field(examples=["/data"])]
    """Where the script finds it."""
    claim: KubernetesName | None = None
    """A PersistentVolumeClaim."""
    config_map: KubernetesName | None = None
    """A ConfigMap."""
    secret: KubernetesName | None = None
    """A Secret."""
    memory: Quantity | None = None
    """Memory as a disk, of that size."""
    read_only: bool = True
    """Whether the script may only read a claim."""

    @model_validator(mode="after")
    def _one_source(self) -> Volume:
        sources = ("claim", "config_map", "secret", "memory")
        named = [name for name in sources if getattr(self, name) is not None]
        if len(named) != 1:
            allowed = f"exactly one of {', '.join(sources)}"
            raise refusal(allowed, "name one source", " and ".join(named) or "no source")
        if posixpath.normpath(self.mount) == CHECKPOINTS_FOLDER and self.memory is None:
            allowed = "memory, or another path, as each trial's own checkpoints are there"
            fix = "mount it elsewhere, or write trial.pod.checkpoint_claims"
            raise refusal(allowed, fix, self.mount)
        return self


class PodSpec(Model):
    """A trial's pod; null: the installation's default, else that of Kubernetes."""

    image: Annotated[Text | None, Field(min_length=1, examples=["registry/trial:1"])] = None
    """Container image with hermes-trial and the script's packages."""
    pull_policy: Annotated[PullPolicy | None, Field(strict=False)] = None
    """Always, IfNotPresent or Never; null: IfNotPresent."""
    pull_secrets: Annotated[tuple[KubernetesName, ...] | None, Field(strict=False)] = None
    """Secrets with which nodes fetch the image."""
    namespace: Annotated[KubernetesName | None, Field(examples=["trials"])] = None
    """Namespace of the pods."""
    template_file: Annotated[Text | None, Field(examples=["/opt/airflow/pod.yaml"])] = None
    """Pod template on the Airflow workers; its first container is the trial's."""
    claim: Annotated[KubernetesName | None, Field(examples=["hermes-trials"])] = None
    """PersistentVolumeClaim with the trials' folders, which the Airflow workers see as
    HERMES_HOME/sweeps."""
    claim_folder: Annotated[Text | None, Field(examples=["hermes/sweeps"])] = None
    """Folder of the claim's volume that is HERMES_HOME/sweeps; null: the whole volume."""
    checkpoint_claims: Annotated[
        dict[KubernetesName, KubernetesName] | None,
        Field(examples=[{"node-a": "checkpoints-a", "node-b": "checkpoints-b"}]),
    ] = None
    """PersistentVolumeClaim of each node on which the checkpoints of the trials that run there lie;
    a trial then stays on its node, and other nodes are not used. Null or empty: they lie on
    `claim`."""
    gang_service: Annotated[ServiceName | None, Field(examples=["hermes-gangs"])] = None
    """Headless Service by which the pods of a trial on several nodes find each other, for
    `workers: one_per_gpu`; null: the GPUs of a trial are all of one node."""
    requests: Annotated[
        dict[LabelKey, Quantity] | None, Field(examples=[{"cpu": "2", "memory": "4Gi"}])
    ] = None
    """Resources that a node must have free, in addition to the GPUs."""
    limits: Annotated[dict[LabelKey, Quantity] | None, Field(examples=[{"memory": "8Gi"}])] = None
    """Resources that the pod may not exceed."""
    gpu_resource: Annotated[LabelKey | None, Field(examples=["nvidia.com/gpu"])] = None
    """Resource that counts GPUs; null: nvidia.com/gpu."""
    node_selector: Annotated[
        dict[LabelKey, LabelValue] | None, Field(examples=[{"gpu": "a100"}])
    ] = None
    """Labels that a node must have."""
    tolerations: Annotated[tuple[Toleration, ...] | None, Field(strict=False)] = None
    """Taints of nodes that the pods tolerate."""
    priority_class: KubernetesName | None = None
    """PriorityClass of the pods."""
    service_account: KubernetesName | None = None
    """ServiceAccount of the pods; its token is not mounted."""
    secrets: Annotated[tuple[KubernetesName, ...] | None, Field(strict=False)] = None
    """Secrets whose keys become environment variables of the script."""
    environment: Annotated[
        dict[PodVariable, PodValue] | None, Field(examples=[{"MLFLOW_TRACKING_URI": "http://m"}])
    ] = None
    """Environment variables of the pod; trial.environment goes before them."""
    volumes: Annotated[tuple[Volume, ...] | None, Field(strict=False)] = None
    """Volumes in addition to the trial's own."""
    user: Annotated[int | None, Field(ge=1, lt=2**31, examples=[1000])] = None
    """User id of the pod, which must be able to write the claim; null: that of the Airflow worker,
    or 1000 where it is root."""
    read_only_root: bool | None = None
    """Whether the image's files cannot be changed (/tmp always can); null: true."""
    start_timeout_seconds: Annotated[Seconds | None, Field(examples=[600])] = None
    """How long a pod may take to start before its trial waits for another turn; null: 600."""
    deferrable: bool | None = None
    """Whether Airflow's triggerer holds the pods, instead of a worker process each; null: false."""

    @field_validator("requests", "limits")
    @classmethod
    def _no_gpus(cls, amounts: dict[str, str] | None) -> dict[str, str] | None:
        gpus = [name for name in amounts or () if GPU_RESOURCE.search(name)]
        if gpus:
            fix = "remove it: trial.gpus says how many, trial.pod.gpu_resource of what"
            raise refusal("resources other than GPUs, which the pool grants", fix, gpus[0])
        return amounts

    @field_validator("volumes")
    @classmethod
    def _each_path_once(cls, volumes: tuple[Volume, ...] | None) -> tuple[Volume, ...] | None:
        paths = [posixpath.normpath(volume.mount) for volume in volumes or ()]
        if twice := sorted({path for path in paths if paths.count(path) > 1}):
            raise refusal("one volume for each path", "correct mount", f"{twice[0]} twice")
        return volumes

    def with_defaults(self, defaults: PodSpec) -> PodSpec:
        """Return this section with the fields that it leaves open taken from `defaults`."""
        fields = type(self).model_fields
        given = {name: value for name in fields if (value := getattr(self, name)) is not None}
        return defaults.model_copy(update=given)


def leased_pod(run_in: RunIn, spec: PodSpec | None) -> dict[str, Any] | None:
    """Return the pod's fields for a lease: those that the sweep sets; None for a process."""
    if run_in is RunIn.PROCESS:
        return None
    return {} if spec is None else spec.model_dump(mode="json", exclude_none=True)
