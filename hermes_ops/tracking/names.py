"""What MLflow accepts: names of metrics and params, filter strings, tags of limited length."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hermes_ops.errors import Refused

_ILLEGAL = re.compile(r"[^/\w.\- :]")
_NAME_LENGTH = 250
_BATCH = 100  # params or tags in one request, MLflow's limit
_BATCH_BYTES = 900_000  # of JSON; MLflow's limit is a million
_CHUNK_LENGTH = 7_900  # MLflow's limit for the value of a tag is 8,000 characters


def legal_name(name: str) -> str:
    """Return the name under which MLflow keeps a metric or param called `name`.

    Letters, digits, `_ - . : /` and the space are legal, a path must be normal (`a//b` is not), and
    250 characters at most. A legal name is kept. In any other, each illegal character becomes `_`,
    and six hexadecimal digits of the SHA-1 of the whole name follow, so that two names stay two:
    `top1%` becomes `top1_-84dadc`.
    """
    if not _ILLEGAL.search(name) and len(name) <= _NAME_LENGTH and _is_normal_path(name):
        return name
    digest = hashlib.sha1(name.encode(errors="surrogatepass"), usedforsecurity=False)
    clean = _ILLEGAL.sub("_", name).replace("/", "_").strip(".") or "_"
    return f"{clean[: _NAME_LENGTH - 7]}-{digest.hexdigest()[:6]}"


def _is_normal_path(name: str) -> bool:
    if name in ("", ".") or name.startswith(("..", "/")):
        return False
    return posixpath.normpath(name) == name


def quoted(value: str) -> str:
    """Return `value` as a string literal of MLflow's filter language; Refused when it has none."""
    for quote in ("'", '"'):
        if quote not in value and "\\" not in value:
            return f"{quote}{value}{quote}"
    raise Refused(
        f"{value!r} cannot stand in an MLflow filter: it has both kinds of quotes or a backslash. "
        "Start the sweep under another run id."
    )


def tag_filter(tags: Mapping[str, str]) -> str:
    """Return the filter that finds the runs that carry all these tags."""
    return " and ".join(f"tags.`{key}` = {quoted(value)}" for key, value in tags.items())


def chunked_tag(key: str, value: str) -> dict[str, str]:
    """Split a long JSON text over the tags `key`, `key.1`, ...; `joined_json` undoes it."""
    parts = [value[i : i + _CHUNK_LENGTH] for i in range(0, len(value), _CHUNK_LENGTH)]
    return {f"{key}.{i}" if i else key: part for i, part in enumerate(parts)}


def joined_json(key: str, tags: Mapping[str, str]) -> Any:  # noqa: ANN401 - whatever JSON holds
    """Return the JSON value that `chunked_tag` split; None when there is none."""
    parts = [tags.get(key, "")]
    while part := tags.get(f"{key}.{len(parts)}", ""):
        parts.append(part)
    text = "".join(parts)
    # Parts of an older, longer text may follow: the value ends where its JSON ends.
    return json.JSONDecoder().raw_decode(text)[0] if text else None


def in_batches(entries: Sequence[Mapping[str, str]]) -> Iterator[list[Mapping[str, str]]]:
    """Yield params or tags in groups that MLflow takes in one request."""
    batch: list[Mapping[str, str]] = []
    size_bytes = 0
    for entry in entries:
        entry_bytes = len(json.dumps(entry))
        if batch and (len(batch) == _BATCH or size_bytes + entry_bytes > _BATCH_BYTES):
            yield batch
            batch, size_bytes = [], 0
        batch.append(entry)
        size_bytes += entry_bytes
    if batch:
        yield batch
