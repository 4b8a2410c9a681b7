"""How a client logs in to Airflow, whatever its auth manager: a user and password, or a token."""

from __future__ import annotations

import base64
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hermes_ops.core.amounts import utc_text
from hermes_ops.errors import HermesError, Unavailable


class LogInRefused(Unavailable):
    """Airflow refuses the user or the token: correct it and repeat, nothing is lost."""


@dataclass(frozen=True, slots=True)
class AirflowCredentials:
    """How to log in: the address, and a user with a file of passwords, or a token.

    `password_file` holds the password alone, or a JSON object (user -> password). A token comes
    from `token_file`, which is read again when it changes, or is `token`; it goes before a user.
    """

    url: str
    user: str = ""
    password_file: Path | None = None
    token: str = field(default="", repr=False)
    token_file: Path | None = None

    @classmethod
    def from_environment(cls) -> AirflowCredentials:
        """Return the credentials of HERMES_AIRFLOW_URL; HermesError where one is missing.

        They are HERMES_AIRFLOW_TOKEN_FILE, HERMES_AIRFLOW_TOKEN, or HERMES_AIRFLOW_USER with
        HERMES_AIRFLOW_PASSWORD_FILE.
        """
        given = {name: value for name, value in os.environ.items() if value}
        url, user = given.get("HERMES_AIRFLOW_URL"), given.get("HERMES_AIRFLOW_USER", "")
        if url is None:
            raise HermesError(_unset("HERMES_AIRFLOW_URL"))
        if (file := given.get("HERMES_AIRFLOW_TOKEN_FILE")) is not None:
            return cls(url, user, token_file=Path(file))
        if (token := given.get("HERMES_AIRFLOW_TOKEN")) is not None:
            return cls(url, user, token=_clean(token, "HERMES_AIRFLOW_TOKEN"))
        for name in ("HERMES_AIRFLOW_USER", "HERMES_AIRFLOW_PASSWORD_FILE"):
            if name not in given:
                raise HermesError(_unset(name))
        return cls(url, user, Path(given["HERMES_AIRFLOW_PASSWORD_FILE"]))

    @property
    def has_token(self) -> bool:
        """Whether a token is configured, so that no password is needed."""
        return bool(self.token) or self.token_file is not None

    def password(self) -> str:
        """Return the password of its file: text, or a JSON object of users; else HermesError."""
        if self.password_file is None:
            raise HermesError(_unset("HERMES_AIRFLOW_PASSWORD_FILE"))
        try:
            text = self.password_file.read_text().strip()
            return str(json.loads(text)[self.user]) if text.startswith("{") else text
        except OSError as error:
            fact, remedy = f"cannot be read ({error.strerror})", "HERMES_AIRFLOW_PASSWORD_FILE"
        except ValueError as error:
            fact, remedy = f"is not JSON ({error})", "HERMES_AIRFLOW_PASSWORD_FILE"
        except KeyError:
            fact, remedy = f"has no password of the user {self.user!r}", "HERMES_AIRFLOW_USER"
        raise HermesError(f"{self.password_file} {fact}: correct it or {remedy}.")

    def current_token(self) -> str:
        """Return the token as it is now; LogInRefused where its file has none."""
        if self.token_file is None:
            return self.token
        try:
            return _clean(self.token_file.read_text(), str(self.token_file))
        except UnicodeDecodeError:
            raise _no_token(str(self.token_file)) from None
        except OSError as error:
            raise LogInRefused(
                f"{self.token_file} cannot be read ({error.strerror}): correct it or "
                "HERMES_AIRFLOW_TOKEN_FILE."
            ) from None

    def refused_token(self, token: str, now_s: float) -> LogInRefused:
        """Return why Airflow refuses this token, and what to do."""
        source = "HERMES_AIRFLOW_TOKEN" if self.token_file is None else str(self.token_file)
        expires_s = expiry_s(token)
        fact = "Airflow does not take it"
        if expires_s is not None and expires_s <= now_s:
            stamp = utc_text(expires_s)
            fact = f"it expired at {stamp}"
        how = (
            "set a new one"
            if self.token_file is None
            else "write a new one into that file: it is read again at once"
        )
        return LogInRefused(f"the token of {source} is refused: {fact}. To go on, {how}.")


def claims(token: str) -> dict[str, Any]:
    """Return what a JSON web token says, unchecked; empty where it is none."""
    try:
        body = token.split(".")[1]
        payload = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    except (IndexError, ValueError):
        return {}
    return payload if isinstance(payload, dict) else {}


def expiry_s(token: str) -> float | None:
    """Return when a token expires, Unix time; None where it does not say so."""
    expires_s = claims(token).get("exp")
    return float(expires_s) if isinstance(expires_s, int | float) else None


def _clean(text: str, source: str) -> str:
    """Return the token without the blanks around it; LogInRefused if it cannot be one."""
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise _no_token(source)
    return token


def _no_token(source: str) -> LogInRefused:
    return LogInRefused(f"{source} holds no token: put one there, alone and on one line.")


def _unset(name: str) -> str:
    return (
        f"{name} is not set: set it to reach Airflow (or HERMES_AIRFLOW_TOKEN_FILE instead of a "
        "user and password), or use `hermes up`."
    )
