"""MLflow and storage out of Airflow's connections, for the task's process and its script alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from hermes_ops.errors import HermesError

URI, USER, PASSWORD, TOKEN = (
    "MLFLOW_TRACKING_URI",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
)


class Stored(Protocol):
    """What is read of a connection of Airflow."""

    conn_id: str
    conn_type: str | None
    host: str | None
    schema: str | None
    login: str | None
    password: str | None
    port: int | None

    @property
    def extra_dejson(self) -> dict[str, Any]:
        """The extra fields."""


@dataclass(frozen=True, slots=True)
class Connections:
    """The ids of the connections that a sweep's tasks use, where it names any.

    They are read when a task begins and become environment variables of its process, which the
    user's script inherits. No lease, XCom, rendered template or line of a log holds them.
    """

    mlflow: str | None = None
    storage: str | None = None

    def enter(self) -> None:
        """Set this process's environment; HermesError for a connection of no use."""
        if self.mlflow is not None:
            found = mlflow_variables(self.mlflow)
            for name in (USER, PASSWORD, TOKEN):
                os.environ.pop(name, None)
            os.environ.update(found)
        if self.storage is not None:
            os.environ.update(storage_environment(_get(self.storage)))


def mlflow_variables(conn_id: str | None) -> dict[str, str]:
    """The variables of a connection that leads to MLflow; none where there is no connection."""
    return {} if conn_id is None else mlflow_environment(_get(conn_id))


def _get(conn_id: str) -> Stored:
    from airflow.sdk import BaseHook
    from airflow.sdk.exceptions import AirflowNotFoundException

    try:
        found: Stored = BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        raise HermesError(
            f"Airflow has no connection {conn_id!r}: create it with `airflow connections add`, "
            "or correct its name in the DAG."
        ) from None
    return found


def mlflow_environment(found: Stored) -> dict[str, str]:
    """The variables by which MLflow's clients find its server and log in.

    The address is the host, with the scheme in `schema` (http where there is none) and the port; a
    host that begins with http:// or https:// is the address. A password without a login is a token.
    """
    host = (found.host or "").rstrip("/")
    if not host:
        raise HermesError(f"the connection {found.conn_id!r} has no host: give MLflow's address.")
    if "://" not in host:
        host = f"{found.schema or 'http'}://{host}"
    if found.port is not None and urlsplit(host).port is None:
        parts = urlsplit(host)
        host = parts._replace(netloc=f"{parts.netloc}:{found.port}").geturl()
    values = {URI: host}
    if found.login:
        values |= {USER: found.login, PASSWORD: found.password or ""}
    elif found.password:
        values[TOKEN] = found.password
    return values


def storage_environment(found: Stored) -> dict[str, str]:
    """The variables by which S3, Google and Azure clients reach their storage."""
    extra = found.extra_dejson
    match found.conn_type:
        case "aws" | "s3":
            endpoint = extra.get("endpoint_url")
            values = {
                "AWS_ACCESS_KEY_ID": found.login,
                "AWS_SECRET_ACCESS_KEY": found.password,
                "AWS_SESSION_TOKEN": extra.get("aws_session_token"),
                "AWS_DEFAULT_REGION": extra.get("region_name"),
                "AWS_ENDPOINT_URL": endpoint,
                "MLFLOW_S3_ENDPOINT_URL": endpoint,
            }
        case "google_cloud_platform":
            values = {
                "GOOGLE_APPLICATION_CREDENTIALS": extra.get("key_path"),
                "GOOGLE_CLOUD_PROJECT": extra.get("project"),
            }
        case "wasb":
            values = {"AZURE_STORAGE_CONNECTION_STRING": extra.get("connection_string")}
        case other:
            raise HermesError(
                f"the connection {found.conn_id!r} is of the type {other!r}: storage takes aws, "
                "google_cloud_platform or wasb."
            )
    return _given(values)


def _given(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items() if value}
