"""Secrets in the plain text of a sweep: every user of Airflow could read them.

The configuration of a DAG run is shown to everybody who may see the run. So a sweep that holds a
secret's value is refused by the command line, by the plan task and by Airflow's API server:
`SecretGuard` refuses there, before the database or the audit log has it. The page, the REST
interface and TriggerDagRunOperator all start runs through that server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, MutableMapping
from typing import Any

from hermes_ops.config import SweepConfig, render_environment
from hermes_ops.config.pod import default_run_in
from hermes_ops.errors import ConfigError, Problem
from hermes_ops.trial.redaction import Mask, open_secrets, secret_values

Place = tuple[str, ...]

SECTIONS: tuple[Place, ...] = (("trial", "environment"), ("trial", "pod", "environment"))


def places(sweep: Mapping[str, Any], without: Collection[str] = ()) -> Iterator[Place]:
    """Yield the places of a sweep's variables that hold a secret, of whatever shape the sweep is.

    `without` are variables of `trial.environment` that are known to hold none.
    """
    trial = sweep.get("trial")
    given = trial.get("secrets") if isinstance(trial, Mapping) else None
    names = given if isinstance(given, list | tuple) else ()
    listed = [name for name in names if isinstance(name, str)]
    for section in SECTIONS:
        values = _section(sweep, section)
        texts = {str(k): str(v) for k, v in values.items() if isinstance(v, str | int | float)}
        for name in open_secrets(texts, listed):
            if section != SECTIONS[0] or name not in without:
                yield (*section, name)


def problems(sweep: Mapping[str, Any], without: Collection[str] = ()) -> tuple[Problem, ...]:
    """Return a problem for each variable that holds a secret; none shows its value."""
    return tuple(_problem(place, _run_in(sweep)) for place in places(sweep, without))


def refuse(sweep: Mapping[str, Any], source: str, without: Collection[str] = ()) -> None:
    """Raise ConfigError for a sweep that holds a secret."""
    if secrets := problems(sweep, without):
        raise ConfigError(source, secrets)


def _section(sweep: Mapping[str, Any], section: Place) -> Mapping[str, Any]:
    part: Any = sweep
    for key in section:
        part = part.get(key) if isinstance(part, Mapping) else None
    return part if isinstance(part, Mapping) else {}


def _run_in(sweep: Mapping[str, Any]) -> str:
    trial = sweep.get("trial")
    named = trial.get("run_in") if isinstance(trial, Mapping) else None
    return str(named or default_run_in().value)


def _problem(place: Place, run_in: str) -> Problem:
    name = place[-1]
    if run_in == "pod":
        remedy = f"remove it, and add a Secret with the key {name} to trial.pod.secrets"
    else:
        remedy = (
            f'write "{{env:{name}}}", set {name} where Hermes is started, and pass it on: '
            f"`hermes up --trial-environment {name}` (HERMES_TRIAL_ENVIRONMENT)"
        )
    return Problem(
        ".".join(place),
        "what looks like a secret (not shown)",
        "no secret, which everybody who may see the run in Airflow could read",
        remedy,
    )


def redact(config: SweepConfig) -> SweepConfig:
    """Return the configuration with the secrets in its environment and command as stars."""
    trial = config.trial
    pod = trial.pod
    pod_variables = dict(pod.environment or {}) if pod is not None else {}
    mask = Mask(secret_values({**pod_variables, **render_environment(config, {})}))
    masked: dict[str, Any] = {
        "environment": {name: mask.text(value) for name, value in trial.environment.items()},
        "command": tuple(mask.text(argument) for argument in trial.command),
    }
    if pod is not None and pod_variables:
        stars = {name: mask.text(value) for name, value in pod_variables.items()}
        masked["pod"] = pod.model_copy(update={"environment": stars})
    return config.model_copy(update={"trial": trial.model_copy(update=masked)})


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_MAKES_RUNS = re.compile(
    r"/dagRuns/?$|/dag-runs/[^/]+/[^/]+/?$|/assets/[^/]+/materialize/?$|/backfills(?:/dry_run)?/?$"
)
_OF_A_SWEEP = ("objective", "search", "budget")
BAD_REQUEST = 400


class SecretGuard:
    """The application with this check in front of it."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request that makes a run of a sweep with a secret; pass on any other."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if not _MAKES_RUNS.search(scope["path"]):
            await self._app(scope, receive, send)
            return
        messages = await _whole(receive)
        body = b"".join(message.get("body", b"") for message in messages)
        refusal = why_refused(body)
        if refusal is None:
            await self._app(scope, _again(messages, receive), send)
        else:
            await _answer(send, refusal)


def why_refused(body: bytes) -> str | None:
    """Return what is wrong with the request of a new run; None for one that holds no secret."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None  # Airflow refuses it itself
    if not isinstance(document, Mapping):
        return None
    for key in ("conf", "dag_run_conf"):
        conf = document.get(key)
        if isinstance(conf, Mapping) and _is_sweep(conf) and (secrets := problems(conf)):
            return "\n".join(map(str, secrets))
    return None


def _is_sweep(conf: Mapping[str, Any]) -> bool:
    trial = conf.get("trial")
    return isinstance(trial, Mapping) and (
        "command" in trial or any(k in conf for k in _OF_A_SWEEP)
    )


async def _whole(receive: Receive) -> list[Message]:
    """Return the messages of a request's body, to its end or to the client's."""
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body"):
        messages.append(await receive())
    return messages


def _again(messages: list[Message], receive: Receive) -> Receive:
    waiting = iter(messages)

    async def next_one() -> Message:
        for message in waiting:
            return message
        return await receive()

    return next_one


async def _answer(send: Send, detail: str) -> None:
    body = json.dumps({"detail": detail}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": BAD_REQUEST, "headers": headers})
    await send({"type": "http.response.body", "body": body})
