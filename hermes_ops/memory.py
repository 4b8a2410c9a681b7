"""A policy's memory as JSON text, and back, whatever frozen dataclass it is.

It stands above the policies because pydantic does the work, which they may not import; a memory
says what it holds by its type hints alone, so no policy is named here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

M = TypeVar("M")

# Strict: another policy's memory is refused, not bent into this one's. NaN and infinity survive.
_CONFIG = ConfigDict(strict=True, extra="forbid", ser_json_inf_nan="constants")


def encode(memory: object) -> str:
    """One line of JSON: the name of the memory's class and its fields; equal ones, equal text.

    A memory is None or a frozen dataclass of tuples, numbers, text, None and such dataclasses.
    """
    kind: Any = type(memory)
    return _adapter(kind).dump_json((kind.__name__, memory)).decode()


def decode(text: str, initial: M) -> M:
    """The memory that `encode` wrote, of the same class as `initial`.

    `initial` itself when the text is anything else (another policy's memory, a torn write):
    losing a memory costs quality only, so no error is raised for it.
    """
    kind: Any = type(initial)
    try:
        name, memory = _adapter(kind).validate_json(text)
    except ValidationError:
        return initial
    restored: M = memory
    return restored if name == kind.__name__ else initial


@lru_cache(maxsize=64)  # building one takes milliseconds
def _adapter(kind: Any) -> TypeAdapter[tuple[str, Any]]:  # noqa: ANN401 - a class, or NoneType
    pair: Any = tuple[str, kind]  # a dataclass takes no configuration of its own
    return TypeAdapter(pair, config=_CONFIG)
