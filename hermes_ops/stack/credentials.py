"""Keys and passwords of one stack: made once, kept in 0600 files, never printed in logs."""

from __future__ import annotations

import base64
import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hermes_ops.stack.layout import Layout, write_private

ADMIN_USER = "admin"
CONTROLLER_USER = "hermes-controller"
OWN_USERS = (ADMIN_USER, CONTROLLER_USER)
"""Users of Airflow that every stack has."""


@dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """Every secret of the stack; `repr` shows none."""

    admin_password: str
    controller_password: str
    mlflow_password: str
    api_secret: str
    jwt_secret: str
    fernet_key: str
    mlflow_session_key: str


def ensure(layout: Layout, people: Iterable[str] = ()) -> Credentials:
    """Return the stack's secrets, making those that are not there yet.

    `people` are further users of Airflow; without a password of theirs Airflow would make one and
    print it into its log.
    """
    fernet_file = layout.secrets / "airflow-fernet.key"
    if not fernet_file.exists():
        write_private(fernet_file, base64.urlsafe_b64encode(os.urandom(32)).decode())
    credentials = Credentials(
        admin_password=_secret(layout.admin_password, 12),
        controller_password=_secret(layout.controller_password, 24),
        mlflow_password=_secret(layout.mlflow_password, 12),
        api_secret=_secret(layout.secrets / "airflow-api.key", 32),
        jwt_secret=_secret(layout.secrets / "airflow-jwt.key", 48),
        fernet_key=fernet_file.read_text().strip(),
        mlflow_session_key=_secret(layout.secrets / "mlflow-session.key", 32),
    )
    users = {
        **{name: _secret(layout.person_password(name), 12) for name in people},
        ADMIN_USER: credentials.admin_password,
        CONTROLLER_USER: credentials.controller_password,
    }
    write_private(layout.airflow_passwords, json.dumps(users))
    return credentials


def _secret(file: Path, size_bytes: int) -> str:
    if not file.exists() or not file.read_text().strip():
        write_private(file, secrets.token_urlsafe(size_bytes))
    return file.read_text().strip()
