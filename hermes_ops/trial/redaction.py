"""Keep the values of secret environment variables out of logs, results and MLflow."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from hermes_ops.references import RESOLVED_VARIABLE, VARIABLE, without_references

SECRETS_VARIABLE = "HERMES_SECRETS"  # names of further variables, separated by commas
STARS = "***"
LEAST_CHARACTERS = 5  # shorter values are masked nowhere: they are part of ordinary words
_WORDS = re.compile(
    r"TOKENS?|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|PASS|PWD|KEYS?|CREDENTIALS?|PAT"
    r"|\w*(?:TOKEN|SECRET|PASSWORD|APIKEY)"
)
_NO_SECRET = frozenset({"false", "true", "none", "null", "default", "disabled", "enabled"})
_LOGIN = re.compile(r"://[^/?#\s:]*:([^/?#\s]+)@")


def looks_secret(name: str) -> bool:
    """Tell whether a variable of that name holds a secret, to judge by its words."""
    words = [w.upper() for w in re.split(r"[^A-Za-z0-9]+|(?<=[a-z])(?=[A-Z])", name) if w]
    if name == "PWD" or words[:1] == ["HERMES"] or words[-1:] in (["FILE"], ["PATH"], ["DIR"]):
        return False
    return any(_WORDS.fullmatch(word) for word in words)


def secret_names(environment: Mapping[str, str]) -> frozenset[str]:
    """Return the names of the variables whose values are secrets, to judge by the names."""
    lists = (environment.get(name, "") for name in (SECRETS_VARIABLE, RESOLVED_VARIABLE))
    listed = {name for text in lists for name in text.split(",")}
    return frozenset(name for name in environment if name in listed or looks_secret(name))


def secret_values(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the texts to mask: values of variables that look secret or HERMES_SECRETS lists.

    So are those that references were replaced by (HERMES_RESOLVED).

    So are the passwords in addresses (`https://user:password@host`) of any variable. Of a value
    of several lines each line is masked. Paths of files that exist are no secrets, nor are values
    under 5 characters unless they are listed (then: any that is not empty).
    """
    listed = set(environment.get(SECRETS_VARIABLE, "").split(","))
    resolved = set(environment.get(RESOLVED_VARIABLE, "").split(","))
    secrets: set[str] = set()
    for name, value in environment.items():
        if name == VARIABLE:
            continue  # references, no values
        secrets.update(login for login in _LOGIN.findall(value) if len(login) >= LEAST_CHARACTERS)
        lines = [line.strip() for line in value.splitlines()]
        if name in listed:
            secrets.update(line for line in lines if line)
        elif (looks_secret(name) or name in resolved) and not _is_path(value):
            secrets.update(line for line in lines if _is_telling(line))
    return tuple(sorted(secrets, key=lambda text: (-len(text), text)))


def open_secrets(environment: Mapping[str, str], listed: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the names of the variables whose values hold a secret, and not a reference to it.

    By the rules of `secret_values`, with `listed` instead of HERMES_SECRETS.
    """
    secrets = ",".join(listed)
    names = []
    for name, value in environment.items():
        rest = without_references(value)
        key = name if rest == value else "REST"  # "Bearer {env:TOKEN}" holds none
        if secret_values({key: rest, SECRETS_VARIABLE: secrets}):
            names.append(name)
    return tuple(names)


def _is_path(value: str) -> bool:
    return value.startswith("/") and os.path.exists(value)


def _is_telling(line: str) -> bool:
    return (
        len(line) >= LEAST_CHARACTERS
        and line.lower() not in _NO_SECRET
        and not line.startswith("-----")
    )


class Mask:
    """Replace secrets by stars; of secrets that begin at the same place, the longest."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        self._values = sorted((v for v in values if v), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._values)))
        self.longest = len(self._values[0]) if self._values else 0

    def text(self, text: str) -> str:
        """Return the text with its secrets replaced."""
        return self._pattern.sub(STARS, text) if self._values else text

    def stream(self) -> MaskedStream:
        """Return a mask for bytes that come in pieces."""
        return MaskedStream([value.encode("utf-8", "surrogateescape") for value in self._values])


class MaskedStream:
    """Mask a byte stream; a secret that is cut between two pieces is found.

    Only what may be the beginning of a secret waits for the next piece, so a piece that ends with
    a line feed is passed on whole.
    """

    def __init__(self, values: list[bytes]) -> None:
        self._values = sorted(values, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, self._values)))
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return what can be passed on now."""
        if not self._values:
            return data
        data = self._held + data
        wait_from = self._beginning(data)
        result, position = [], 0
        for match in self._pattern.finditer(data):
            if match.start() >= wait_from:
                break
            result += [data[position : match.start()], STARS.encode()]
            position = match.end()
        wait_from = max(wait_from, position)
        result.append(data[position:wait_from])
        self._held = data[wait_from:]
        return b"".join(result)

    def close(self) -> bytes:
        """Return what has waited, at the end of the stream."""
        rest, self._held = self._held, b""
        return self._pattern.sub(STARS.encode(), rest) if self._values else rest

    def _beginning(self, data: bytes) -> int:
        """Return the first index from which the rest of `data` is the beginning of a secret."""
        first = len(data)
        for value in self._values:
            at = data.find(value[:1], max(0, len(data) - len(value) + 1))
            while 0 <= at < first:
                if value.startswith(data[at:]):
                    first = at
                at = data.find(value[:1], at + 1)
        return first
