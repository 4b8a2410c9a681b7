"""How a process reaches the cluster, and where in it the process is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hermes_ops.errors import HermesError


def connect(context: str | None = None) -> Any:  # noqa: ANN401 - the client has no types
    """The cluster's API: in a pod by its service account, else by KUBECONFIG.

    HermesError where there is neither.
    """
    from kubernetes import client, config

    try:
        config.load_incluster_config()
    except config.ConfigException:
        try:
            named = os.environ.get("KUBECONFIG") or None  # as it is now, not as it was at import
            config.load_kube_config(named, context=context)
        except (config.ConfigException, OSError) as error:
            raise HermesError(
                f"no Kubernetes cluster is known ({error}): set KUBECONFIG, or run this in a pod "
                "with a service account."
            ) from error
    return client.CoreV1Api()


def own_namespace() -> str | None:
    """The namespace of the pod that this process runs in; None outside a cluster."""
    file = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
    return file.read_text().strip() if file.exists() else None
