"""The message of a server's error response, without the request, which may hold secrets."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping

STARS = "***"
MOST_CHARACTERS = 500

_LEAST_CHARACTERS = 5  # a shorter text is a part of ordinary words
_MOST_ERRORS = 5
_PLAIN_CHARACTERS = 200
_NAMES = frozenset(("name", "key", "dag_id", "dag_run_id", "task_id", "task_ids", "pool", "note"))
_TALKATIVE = ("httpx", "httpcore", "urllib3", "kubernetes.client.rest")


def response_message(response: bytes | str, request: bytes | str | None = None) -> str:
    """Return the message of an error response: of each error only its place, message and type.

    Texts of the request that the response repeats are replaced by stars. Empty if the response has
    nothing that can be shown.
    """
    try:
        document = json.loads(response)
    except ValueError:
        text = response.decode(errors="replace") if isinstance(response, bytes) else response
        message = "" if text.lstrip().startswith("<") else text[:_PLAIN_CHARACTERS].strip()
    else:
        message = detail_message(
            document.get("detail", document) if isinstance(document, dict) else document
        )
    return mask_texts(message, request_texts(request))[:MOST_CHARACTERS]


def detail_message(detail: object) -> str:
    """Return the message of a `detail`: a text, an object with a message, or a list of errors."""
    if isinstance(detail, str):
        return detail
    if isinstance(detail, Mapping):
        if "loc" in detail or "msg" in detail:
            place = detail.get("loc")
            where = ".".join(map(str, place)) if isinstance(place, list | tuple) else ""
            kind = f"({detail['type']})" if isinstance(detail.get("type"), str) else ""
            message = " ".join(filter(None, (_text(detail.get("msg")), kind)))
            return f"{where}: {message}" if where else message
        if "detail" in detail:
            return detail_message(detail["detail"])
        return ": ".join(filter(None, (_text(detail.get("reason")), _text(detail.get("message")))))
    if isinstance(detail, list):
        shown = "; ".join(filter(None, map(detail_message, detail[:_MOST_ERRORS])))
        more = len(detail) - _MOST_ERRORS
        return f"{shown}; and {more} more" if more > 0 else shown
    return ""


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def request_texts(request: bytes | str | None) -> list[str]:
    """Return the texts in a request's JSON, except the values of naming keys."""
    try:
        document = json.loads(request or b"")
    except ValueError:
        return []
    return list(document_texts(document))


def document_texts(document: object, key: str = "") -> Iterator[str]:
    """Yield the texts in a document that are long enough to differ from ordinary words.

    Of a text of several lines, such as a sweep file, each line and the value on it count too.
    """
    if isinstance(document, Mapping):
        for name, value in document.items():
            yield from document_texts(value, str(name))
    elif isinstance(document, list | tuple):
        for value in document:
            yield from document_texts(value, key)
    elif isinstance(document, str) and key not in _NAMES:
        lines = document.splitlines()
        values = [line.partition(": ")[2] for line in lines]
        parts = (part.strip(" \t\"',{}[]") for part in (*lines, *values))
        yield from (t for t in {document, *parts} if len(t) >= _LEAST_CHARACTERS)


def mask_texts(text: str, hidden: Iterable[str]) -> str:
    """Return the text with each hidden text, plain or as JSON has it, replaced by stars."""
    for value in sorted(set(hidden), key=len, reverse=True):
        for shown in (value, json.dumps(value)[1:-1], repr(value)[1:-1]):
            text = text.replace(shown, STARS)
    return text


def keep_bodies_out_of_logs() -> None:
    """Keep client libraries from logging requests and responses at any log level of Airflow."""
    for name in _TALKATIVE:
        logger = logging.getLogger(name)
        logger.setLevel(max(logger.level, logging.WARNING))
