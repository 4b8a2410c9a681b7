"""Airflow's connection to the cluster, where it leads to none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import yaml
from airflow.sdk.exceptions import AirflowException
from kubernetes.config import ConfigException

from hermes_ops.errors import HermesError


@contextlib.contextmanager
def known_cluster() -> Iterator[None]:
    """Raise HermesError where no cluster is known: for use around calls of Airflow's hook."""
    try:
        yield
    except (ConfigException, AirflowException, yaml.YAMLError, OSError, ValueError) as error:
        raise HermesError(
            f"no Kubernetes cluster is known ({' '.join(str(error).split())}): run Airflow's "
            "workers and triggerer in pods with a service account, set KUBECONFIG for them, or "
            "correct the connection of kubernetes_conn_id."
        ) from error
