"""The installation's part in `trial.pod`: its defaults, and its rules for what sweeps may name.

The rules say where trials run, and which objects a pod may name. Both come from the environment of
Hermes Ops' own programs and from a file that it names. A sweep file, a trigger form and a DAG run's
configuration cannot change either.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from hermes_ops.config.fields import Model
from hermes_ops.config.files import read_document
from hermes_ops.config.model import SweepConfig
from hermes_ops.config.pod import RUN_IN_VARIABLE, KubernetesName, PodSpec, RunIn, Volume
from hermes_ops.config.problems import translate_errors
from hermes_ops.errors import ConfigError, NotAllowed, Problem

RULES_VARIABLE = "HERMES_POD_RULES"

Names = Annotated[tuple[KubernetesName, ...] | None, Field(strict=False)]


class PodRules(Model):
    """What sweeps may name of the cluster beyond the installation's defaults; null: anything."""

    namespaces: Names = ()
    """Namespaces of the pods."""
    service_accounts: Names = ()
    """ServiceAccounts of the pods."""
    secrets: Names = ()
    """Secrets that become variables or volumes."""
    pull_secrets: Names = ()
    """Secrets with which nodes fetch images."""
    claims: Names = ()
    """PersistentVolumeClaims of `volumes` and `checkpoint_claims`."""
    config_maps: Names = None
    """ConfigMaps of `volumes`."""
    reserved_config_maps: Annotated[tuple[KubernetesName, ...], Field(strict=False)] = ()
    """ConfigMaps that may not be named."""
    priority_classes: Names = ()
    """PriorityClasses of the pods."""

    def allows(self, field: str, name: str) -> bool:
        """Return whether a sweep may name this object; `field` is the rule for its kind."""
        if field == "config_maps" and name in self.reserved_config_maps:
            return False
        allowed: Collection[str] | None = getattr(self, field)
        return allowed is None or name in allowed

    def describe_allowed(self, field: str, defaults: Collection[str] = ()) -> str:
        """Return the names that are allowed, in words; `defaults` are those of the installation."""
        named: Collection[str] | None = getattr(self, field)
        names = sorted({*(named or ()), *defaults})
        kind = field.replace("_", " ")
        if named is None:
            return f"{kind} other than {', '.join(sorted(self.reserved_config_maps))}"
        return " or ".join(names) or f"no {kind}"


def required_run_in(environ: Mapping[str, str] = os.environ) -> RunIn | None:
    """Return the only place where trials may run; None where sweeps may choose."""
    value = environ.get(RUN_IN_VARIABLE, "")
    try:
        return RunIn(value) if value else None
    except ValueError:
        allowed = " or ".join(RunIn)
        problem = Problem(RUN_IN_VARIABLE, repr(value), allowed, "correct the variable")
        raise ConfigError("the environment", (problem,)) from None


def check_run_in(run_in: RunIn, source: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise NotAllowed where the installation has trials run elsewhere."""
    required = required_run_in(environ)
    if required is None or run_in is required:
        return
    problem = Problem(
        "trial.run_in",
        run_in.value,
        f"{required.value}, by {RUN_IN_VARIABLE} of this installation",
        f"write trial.run_in: {required.value}"
        + (" (what the pods need is in docs/kubernetes.md)" if required is RunIn.POD else ""),
    )
    raise NotAllowed(source, (problem,))


def check_installation(config: SweepConfig, defaults: Path) -> None:
    """Raise NotAllowed for a sweep that this installation forbids.

    Raise ConfigError for one whose sampler, of another package, does not take its search.

    :param defaults: the file of the installation's defaults for pods
    """
    check_run_in(config.trial.run_in, config.name)
    if not config.search.algorithm.is_builtin:
        config.search.to_sampler()
    rules = pod_rules() if config.trial.run_in is RunIn.POD else None
    if rules is not None:
        check_pod(config.trial.pod or PodSpec(), pod_defaults(defaults), rules, config.name)


def pod_rules(environ: Mapping[str, str] = os.environ) -> PodRules | None:
    """Return the rules of the file that HERMES_POD_RULES names; None where it names none."""
    named = environ.get(RULES_VARIABLE)
    if not named:
        return None
    data = _read(Path(named))
    try:
        return PodRules.model_validate(data or {})
    except ValidationError as error:
        problems = translate_errors(error.errors(include_url=False), data)
        raise ConfigError(named, tuple(problem for _, problem in problems)) from None


def check_pod(spec: PodSpec, defaults: PodSpec, rules: PodRules | None, source: str) -> None:
    """Raise NotAllowed for what a sweep's pods may not name.

    What the installation's defaults name is allowed, for the same purpose.
    """
    if rules is None:
        return
    problems = (
        *_installation_only(spec, defaults),
        *_names(spec, defaults, rules),
        *_volumes(spec, defaults, rules),
    )
    if problems:
        raise NotAllowed(source, problems)


def check_gang_service(
    spec: PodSpec, defaults: PodSpec, rules: PodRules | None, source: str
) -> None:
    """Raise NotAllowed for another Service of trials on several nodes than the installation's.

    For the plan of a sweep alone: the installation may change while the sweep goes on.
    """
    if rules is None or spec.gang_service in (None, defaults.gang_service):
        return
    named = defaults.gang_service
    problem = Problem(
        "trial.pod.gang_service",
        str(spec.gang_service),
        f"{named}, as the installation says" if named else "nothing: no trial on several nodes",
        "remove trial.pod.gang_service; only the installation sets it (trials.severalNodes of the "
        "chart)",
    )
    raise NotAllowed(source, (problem,))


def _installation_only(spec: PodSpec, defaults: PodSpec) -> Iterator[Problem]:
    """Yield the fields that only the installation sets: trials' folders and workers' files."""
    for field in ("claim", "claim_folder", "template_file"):
        value, default = getattr(spec, field), getattr(defaults, field)
        if value is not None and value != default:
            allowed = f"{default}, as the installation says" if default else "nothing"
            yield Problem(
                f"trial.pod.{field}",
                value,
                allowed,
                f"remove trial.pod.{field}; only the installation sets it",
            )


def _names(spec: PodSpec, defaults: PodSpec, rules: PodRules) -> Iterator[Problem]:
    claims = (spec.checkpoint_claims or {}).items()
    default_claims = (defaults.checkpoint_claims or {}).values()
    named: list[tuple[str, str, str | None, Collection[str | None]]] = [
        ("namespace", "namespaces", spec.namespace, (defaults.namespace,)),
        ("service_account", "service_accounts", spec.service_account, (defaults.service_account,)),
        ("priority_class", "priority_classes", spec.priority_class, (defaults.priority_class,)),
        *(("secrets", "secrets", n, defaults.secrets or ()) for n in spec.secrets or ()),
        *(
            ("pull_secrets", "pull_secrets", n, defaults.pull_secrets or ())
            for n in spec.pull_secrets or ()
        ),
        *((f"checkpoint_claims.{node}", "claims", claim, default_claims) for node, claim in claims),
    ]
    for key, field, name, default_names in named:
        if name is not None and name not in default_names and not rules.allows(field, name):
            yield forbidden_object(
                f"trial.pod.{key}", field, name, rules, [k for k in default_names if k]
            )


def _volumes(spec: PodSpec, defaults: PodSpec, rules: PodRules) -> Iterator[Problem]:
    default_volumes = defaults.volumes or ()
    for number, volume in enumerate(spec.volumes or ()):
        for key, field in (("secret", "secrets"), ("claim", "claims"),
                           ("config_map", "config_maps")):  # fmt: skip
            name: str | None = getattr(volume, key)
            if name is None or rules.allows(field, name):
                continue
            if not any(_covers(default, volume, key) for default in default_volumes):
                names = [n for v in default_volumes if (n := getattr(v, key)) is not None]
                yield forbidden_object(
                    f"trial.pod.volumes.{number}.{key}", field, name, rules, names
                )


def _covers(default: Volume, volume: Volume, key: str) -> bool:
    """Return whether the installation's volume has the same source, and no fewer rights."""
    same = getattr(default, key) == getattr(volume, key)
    return same and (volume.read_only or not default.read_only)


def forbidden_object(
    where: str, field: str, name: str, rules: PodRules, defaults: Collection[str] = ()
) -> Problem:
    """Return the problem of an object that may not be named."""
    return Problem(
        where,
        name,
        rules.describe_allowed(field, defaults),
        f"name one of those, or have the installation allow it ({field} of {RULES_VARIABLE}; "
        f"trials.allowed of the chart)",
    )


def pod_spec(data: Any, source: str) -> PodSpec:  # noqa: ANN401 - plain data
    """Return the section of plain data; ConfigError if it is not valid."""
    try:
        return PodSpec.model_validate(data)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        for one in errors:
            one["loc"] = ("trial", "pod", *one["loc"])
        problems = translate_errors(errors, {"trial": {"pod": data}})
        raise ConfigError(source, tuple(problem for _, problem in problems)) from None


def pod_defaults(path: Path) -> PodSpec:
    """Return the installation's defaults, from a YAML or JSON file of `trial.pod` if it exists."""
    if not path.exists():
        return PodSpec()
    return pod_spec(_read(path) or {}, str(path))


def _read(path: Path) -> object:
    """Return a file's plain data; raise ConfigError with its problems."""
    document = read_document(path)
    if document.problems:
        raise ConfigError(str(path), tuple(problem for _, problem in document.problems))
    return document.data


def require_image_and_claim(spec: PodSpec, source: str) -> PodSpec:
    """Return the section if its image and claim are known; else raise ConfigError."""
    wanted = {
        "image": "the image that the trials run in",
        "claim": "the claim whose volume the Airflow workers see as HERMES_HOME/sweeps",
    }
    problems = tuple(
        Problem(
            f"trial.pod.{name}",
            "nothing, and no default of the installation",
            meaning,
            f"write trial.pod.{name}, or {name} in HERMES_HOME/pod.yaml",
        )
        for name, meaning in wanted.items()
        if getattr(spec, name) is None
    )
    if problems:
        raise ConfigError(source, problems)
    return spec
