"""MLflow and storage from Airflow's connections, for the task's process and its script alone.

A sweep may also take variables of the script from connections. Each trial's task renders them, so
the sweep's record and its leases, which others may read, hold the template alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from hermes_ops.errors import HermesError
from hermes_ops.trial.environment import add_names

URI, USER, PASSWORD, TOKEN = (
    "MLFLOW_TRACKING_URI",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
)

Render = Callable[[str], str]

EXPRESSION = re.compile(r"\{\{-?\s.*?\s-?\}\}", re.DOTALL)
"""A template in a sweep: with a space behind its first braces and before its last ones."""


class ConnectionFields(Protocol):
    """The fields of an Airflow connection that are read."""

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
        """Set this process's environment; HermesError for an unusable connection."""
        if self.mlflow is not None:
            variables = mlflow_variables(self.mlflow)
            for name in (USER, PASSWORD, TOKEN):
                os.environ.pop(name, None)
            os.environ.update(variables)
        if self.storage is not None:
            variables = storage_environment(_get(self.storage))
            add_names(os.environ, variables)
            os.environ.update(variables)


def mlflow_variables(conn_id: str | None) -> dict[str, str]:
    """Return the variables of a connection that leads to MLflow; none without a connection."""
    return {} if conn_id is None else mlflow_environment(_get(conn_id))


def _get(conn_id: str) -> ConnectionFields:
    from airflow.sdk import BaseHook
    from airflow.sdk.exceptions import AirflowNotFoundException

    try:
        connection: ConnectionFields = BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        raise HermesError(
            f"Airflow has no connection {conn_id!r}: create it with `airflow connections add`, "
            "or correct its name in the DAG."
        ) from None
    return connection


def mlflow_environment(connection: ConnectionFields) -> dict[str, str]:
    """Return the variables by which MLflow's clients find its server and log in.

    The address is the host, with the scheme in `schema` (http where there is none) and the port; a
    host that begins with http:// or https:// is the address. A password without a login is a token.
    """
    host = (connection.host or "").rstrip("/")
    if not host:
        raise HermesError(
            f"the connection {connection.conn_id!r} has no host: give MLflow's address."
        )
    if "://" not in host:
        host = f"{connection.schema or 'http'}://{host}"
    try:
        parts, port = urlsplit(host), urlsplit(host).port
    except ValueError:
        raise HermesError(
            f"the connection {connection.conn_id!r}: its host {connection.host!r} is not an "
            "address; write IPv6 in brackets, as in [::1]."
        ) from None
    if connection.port is not None and port is None:
        host = parts._replace(netloc=f"{parts.netloc}:{connection.port}").geturl()
    values = {URI: host}
    if connection.login:
        values |= {USER: connection.login, PASSWORD: connection.password or ""}
    elif connection.password:
        values[TOKEN] = connection.password
    return values


UNREAD = ("keyfile_dict", "role_arn", "sas_token")
"""Extra fields that give access to storage, but not by a variable."""


def storage_environment(connection: ConnectionFields) -> dict[str, str]:
    """Return the variables by which S3, Google and Azure clients reach their storage."""
    extra = connection.extra_dejson
    match connection.conn_type:
        case "aws" | "s3":
            endpoint = extra.get("endpoint_url")
            values = {
                "AWS_ACCESS_KEY_ID": connection.login,
                "AWS_SECRET_ACCESS_KEY": connection.password,
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
                f"the connection {connection.conn_id!r} is of the type {other!r}: storage takes "
                "aws, google_cloud_platform or wasb."
            )
    given = {name: str(value) for name, value in values.items() if value}
    if not given and (connection.login or connection.password or any(map(extra.get, UNREAD))):
        raise HermesError(
            f"the connection {connection.conn_id!r} ({connection.conn_type}) gives scripts no "
            f"access: none of its fields becomes one of {', '.join(values)}; docs/airflow.md lists "
            "those."
        )
    return given


def rendered_variables(
    environment: Mapping[str, str], templated: Collection[str], render: Render
) -> dict[str, str]:
    """Return the variables with the templates in those that are `templated` rendered.

    HermesError for one that cannot be, without what the connection holds.
    """
    return {
        name: _rendered(name, value, render) if name in templated else value
        for name, value in environment.items()
    }


def _rendered(name: str, value: str, render: Render) -> str:
    try:
        return EXPRESSION.sub(lambda match: render(match.group()), value)
    except Exception as error:
        raise HermesError(
            f"trial.environment.{name}: {value} cannot be rendered ({type(error).__name__}): "
            "correct the template, or the connection that it names."
        ) from None
