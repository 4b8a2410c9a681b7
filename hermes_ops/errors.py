"""The errors that Hermes Ops raises on purpose; the class tells what the caller can do."""

from __future__ import annotations

from dataclasses import dataclass


class HermesError(Exception):
    """A failure with a message for a person: the fact, then the remedy."""


def error_text(error: Exception) -> str:
    """Return an error's text for people; an error that is not ours is named by its class."""
    return str(error) if isinstance(error, HermesError) else f"{type(error).__name__}: {error}"


def file_error_text(error: Exception) -> str:
    """Return why a file cannot be read, without the error's number and the path of the file."""
    return getattr(error, "strerror", None) or str(error)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with an input: where it stands, what was found, what is allowed, the fix."""

    where: str
    found: str
    allowed: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: found {self.found}; allowed: {self.allowed}. Fix: {self.fix}"


class ConfigError(HermesError):
    """The user's input is wrong: nothing was started; correct it and try again."""

    def __init__(self, source: str, problems: tuple[Problem, ...]) -> None:
        self.source = source
        self.problems = problems
        super().__init__("\n".join([f"{source} is not valid:", *(f"  {p}" for p in problems)]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, tuple[Problem, ...]]]:
        """Return how to build it again: a process of a pool passes it on."""
        return type(self), (self.source, self.problems)


class NotAllowed(ConfigError):
    """The installation forbids what a sweep requests: a retry is useless."""


class PlanError(HermesError):
    """A policy returned an impossible plan: a defect of the policy; nothing was applied."""


class Unavailable(HermesError):
    """A service did not answer (Airflow, MLflow, a database): try again later."""


class NotPermitted(HermesError):
    """A service does not let this user do that: somebody with the right has to."""


class Unsupported(HermesError):
    """The environment is not supported by Hermes Ops (a version, a column, a platform)."""


class StackError(HermesError):
    """`hermes up`, `down` or `status` cannot go on; the message names the remedy."""


class Refused(HermesError):
    """A service understood a request and refused it: a retry is useless; report it."""

    def __init__(self, message: str, code: str = "") -> None:
        self.code = code  # the service's own name of the error, empty when it gave none
        super().__init__(message)
