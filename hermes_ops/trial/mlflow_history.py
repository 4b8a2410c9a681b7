"""Asks the MLflow server what a script without the hook has logged in the trial's run."""

from __future__ import annotations

import base64
import json
import ssl
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

_TIMEOUT_S = 10.0
_MOST_POINTS = 25_000  # in one answer


def last_step(metric: str, environment: Mapping[str, str]) -> int | None:
    """Return the highest step of a metric in the trial's run; None without a value of it.

    The server, the run and the log-in are those of MLflow's own variables. A server that does not
    answer knows of no value.
    """
    uri, run_id = environment.get("MLFLOW_TRACKING_URI", ""), environment.get("MLFLOW_RUN_ID")
    if not run_id or urlsplit(uri).scheme not in ("http", "https"):
        return None
    query = urlencode({"run_id": run_id, "metric_key": metric, "max_results": _MOST_POINTS})
    address, log_in = _without_log_in(uri.rstrip("/"))
    request = urllib.request.Request(  # noqa: S310 - http or https, as seen above
        f"{address}/api/2.0/mlflow/metrics/get-history?{query}",
        headers=_headers(environment, log_in),
    )
    try:
        with urllib.request.urlopen(  # noqa: S310 - the same
            request, timeout=_TIMEOUT_S, context=_context(address, environment)
        ) as answer:
            metrics = json.load(answer).get("metrics", [])
        return max((int(point.get("step", 0)) for point in metrics), default=None)
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def _without_log_in(uri: str) -> tuple[str, str]:
    """Split a server's address and the `user:password` in it."""
    parts = urlsplit(uri)
    log_in, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=host).geturl(), log_in


def _headers(environment: Mapping[str, str], log_in: str) -> dict[str, str]:
    token = environment.get("MLFLOW_TRACKING_TOKEN")
    user = environment.get("MLFLOW_TRACKING_USERNAME")
    if token:
        return {"Authorization": f"Bearer {token}"}
    if user:
        log_in = f"{user}:{environment.get('MLFLOW_TRACKING_PASSWORD', '')}"
    if not log_in:
        return {}
    return {"Authorization": f"Basic {base64.b64encode(log_in.encode()).decode()}"}


def _context(address: str, environment: Mapping[str, str]) -> Any:  # noqa: ANN401 - SSLContext
    if not address.startswith("https"):
        return None
    bundle = environment.get("MLFLOW_TRACKING_SERVER_CERT_PATH")
    context = ssl.create_default_context(cafile=bundle or None)
    if environment.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("true", "1"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
