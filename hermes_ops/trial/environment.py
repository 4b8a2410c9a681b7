"""The environment of a trial: the variables that it inherits, and references in it replaced.

Of a service's environment a trial inherits the variables that are listed here. Everything else is
left behind, so that no password in the shell of `hermes up` reaches a script by accident. The
setting `trial_environment` (HERMES_TRIAL_ENVIRONMENT) names further ones. hermes-trial replaces the
references in its own environment before anything else.
"""

from __future__ import annotations

import json
import re

from hermes_ops.references import (
    RESOLVED_VARIABLE,
    VARIABLE,
    MissingVariableError,
    is_reserved,
    names_in,
    resolved,
)
from hermes_ops.trial.redaction import looks_secret

TYPE_CHECKING = False  # checkers of types know this name
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, MutableMapping

SETTING = "HERMES_TRIAL_ENVIRONMENT"
"""Variable of the services: names, or beginnings of names with a `*`, separated by commas."""

PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*\*?$"
"""An entry of the setting: a name, or the beginning of names and a `*`."""

LISTED = frozenset(
    (
        # the user and the machine
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "COLORTERM", "NO_COLOR", "HOSTNAME",
        "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP", "DISPLAY", "CC", "CXX",
        # proxies and certificates
        "http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy",
        "HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY",
        "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE",
        "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
        # what scripts and their libraries read
        "VIRTUAL_ENV", "MPLBACKEND", "MPLCONFIGDIR", "NLTK_DATA", "SCIKIT_LEARN_DATA",
        "MUJOCO_GL", "SPT_NOENV", "DO_NOT_TRACK",
        # the MLflow server that has the trial's run
        "HERMES_HOME", "MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME",
        "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "MLFLOW_REGISTRY_URI",
        "MLFLOW_DISABLE_TELEMETRY", "MLFLOW_S3_ENDPOINT_URL",
    )
)  # fmt: skip
"""Variables that every trial inherits."""

LISTED_PREFIXES = (
    "LC_", "LD_", "XDG_", "PYTHON", "CONDA_", "MAMBA_", "PYENV_",
    "CUDA", "CUDNN", "CUBLAS", "NVIDIA", "NCCL", "HIP_", "HSA_", "ROCM", "ROCR_", "MIOPEN_",
    "GPU_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "VECLIB_", "NUMBA_",
    "TF_", "TFDS_", "TFHUB_", "KERAS_", "XLA_", "JAX_", "TPU_", "TORCH", "PYTORCH_", "TRITON_",
    "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "DATASETS_", "WANDB_",
    "HOROVOD_", "OMPI_", "UCX_", "GLOO_", "PYOPENGL_",
    "MLFLOW_TRACKING_", "MLFLOW_HTTP_", "MLFLOW_ENABLE_", "MLFLOW_SYSTEM_METRICS_",
)  # fmt: skip
"""Beginnings of names that every trial inherits, unless the name looks like that of a secret."""

_SERVICE_PREFIXES = ("PG", "KRB5", "KUBE")
"""Prefixes of further variables for the services: settings of libpq, Kerberos and Kubernetes."""

_OFTEN_NEEDED_PREFIXES = (
    "AWS_", "AZURE_", "GOOGLE_", "GCP_", "GCLOUD_", "MINIO_", "S3_", "HF_", "HUGGING", "WANDB_",
    "COMET_", "NEPTUNE_", "CLEARML_", "KAGGLE_", "DATABRICKS_", "OPENAI_", "ANTHROPIC_", "NGC_",
    "MLFLOW_S3_",
)  # fmt: skip
_OFTEN_NEEDED_WORDS = frozenset({"DATA", "DATADIR", "DATASET", "DATASETS", "MODELS"})


SCRIPT_VARIABLE = "HERMES_SCRIPT_ENVIRONMENT"
"""Variable of hermes-trial: the sweep's variables for the script alone, as a JSON object."""

_SCRIPT_ALONE_PREFIXES = ("PYTHON", "LD_")
"""Prefixes of variables that change how a program starts or finds modules and libraries."""


class InheritanceRule:
    """The variables that trials inherit: a list, and the names in the installation's setting."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names = tuple(dict.fromkeys(name for name in names if name))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> InheritanceRule:
        """Read HERMES_TRIAL_ENVIRONMENT; words that are not names of variables are ignored."""
        names = split_names(environment.get(SETTING, ""))
        return cls(name for name in names if re.fullmatch(PATTERN, name))

    def covers(self, name: str) -> bool:
        """Tell whether the setting names that variable."""
        return any(
            name.startswith(entry[:-1]) if entry.endswith("*") else name == entry
            for entry in self.names
        )

    def reaches_trials(self, name: str) -> bool:
        """Tell whether a trial inherits a variable of that name."""
        if name in LISTED:
            return True
        if is_reserved(name):
            return False
        return self.covers(name) or (name.startswith(LISTED_PREFIXES) and not looks_secret(name))

    def reaches_services(self, name: str) -> bool:
        """Tell whether Airflow and the controller inherit a variable of that name from a shell."""
        return self.reaches_trials(name) or name.startswith(_SERVICE_PREFIXES)

    def inherited(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return what a trial inherits of a worker's environment."""
        return {k: v for k, v in environment.items() if self.reaches_trials(k)}

    def missed(self, environment: Mapping[str, str]) -> tuple[str, ...]:
        """Return the names that scripts often need, are set, and do not reach trials; sorted."""
        return tuple(
            sorted(
                name
                for name, value in environment.items()
                if value and _is_often_needed(name) and not self.reaches_trials(name)
            )
        )


def split_names(text: str) -> tuple[str, ...]:
    """Return the names in a text that separates them by commas or blanks."""
    return tuple(name for name in re.split(r"[\s,]+", text) if name)


def add_names(environment: MutableMapping[str, str], names: Iterable[str]) -> None:
    """Have the trials of a process whose environment this is inherit these variables as well."""
    rule = InheritanceRule.from_environment(environment)
    environment[SETTING] = ",".join(InheritanceRule([*rule.names, *names]).names)


def _is_often_needed(name: str) -> bool:
    words = name.upper().split("_")
    return name.startswith(_OFTEN_NEEDED_PREFIXES) or not _OFTEN_NEEDED_WORDS.isdisjoint(words)


def guard_supervisor(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the sweep's variables as hermes-trial is started with them.

    Variables that could break its own interpreter (PYTHONHOME, a module in PYTHONPATH with the name
    of one that it imports, another libc in LD_LIBRARY_PATH) are moved into
    HERMES_SCRIPT_ENVIRONMENT.
    """
    alone = {k: v for k, v in variables.items() if k.startswith(_SCRIPT_ALONE_PREFIXES)}
    shared = {k: v for k, v in variables.items() if k not in alone}
    return {**shared, SCRIPT_VARIABLE: json.dumps(alone)} if alone else shared


def restore_script_variables(environment: MutableMapping[str, str]) -> None:
    """Put the variables for the script into the environment, now that hermes-trial has started."""
    environment.update(json.loads(environment.pop(SCRIPT_VARIABLE, "{}")))


def resolve_references(environment: MutableMapping[str, str]) -> str | None:
    """Replace the references of the sweep's variables in place; return why it cannot be done.

    Their names, and those that they refer to, are listed in HERMES_RESOLVED: the values are
    secrets. Nothing is changed where a variable is missing.
    """
    references: dict[str, str] = json.loads(environment.get(VARIABLE) or "{}")
    values: dict[str, str] = {}
    for key, value in references.items():
        try:
            values[key] = resolved(value, environment)
        except MissingVariableError as missing:
            return why_missing(key, missing.name, in_pod="HERMES_HOME" not in environment)
    environment.pop(VARIABLE, None)
    if values:
        named = (name for value in references.values() for name in names_in(value))
        environment[RESOLVED_VARIABLE] = ",".join(dict.fromkeys([*values, *named]))
        environment.update(values)
    return None


def why_missing(key: str, name: str, *, in_pod: bool) -> str:
    """Say which variable is missing, where it is referred to, and how trials get it."""
    remedy = (
        f"add a Secret with the key {name} to trial.pod.secrets"
        if in_pod
        else f"set it and name it: `hermes up --trial-environment {name}`, or {name} in "
        "HERMES_TRIAL_ENVIRONMENT of an Airflow that is already there"
    )
    return f"trial.environment.{key}: trials have no variable {name} ({{env:{name}}}): {remedy}"
