"""Tell which call of `fit` of the trial a script makes: resumed, it may leave out complete ones.

A script that finds its own files (`if not os.path.exists("warmup.keras")`) does not call `fit` for
what it has trained already. Calls are told apart by the lines of the script that make them, and in
a loop by the numbers and names that differ from round to round (`fold`, `path`) and by the data.

Processes of a script that call `fit` one after the other, such as one for each fold, go on counting
the calls: what they have counted is in the file that the one process locks whose calls are watched.
"""
# ruff: noqa: ANN401 - the objects of Keras have no types here

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from hermes_ops.trial.files import parse_object, read_json, write_json
from hermes_ops.trial.processes.tree import SEGMENT_VARIABLE

_BEGUN = "fit.json"
_LIBRARIES = {
    "hermes_ops", "keras", "tf_keras", "tensorflow", "runpy", "importlib", "threading", "contextlib"
}  # fmt: skip
_MOST_FRAMES = 8
_MOST_NAMES = 200
_MOST_CHARACTERS = 200
_SMALL = 1_000_000  # a number of rounds is below it, a time is not
_SAMPLED_ROWS = 64


class FitCall(NamedTuple):
    """What tells a call of `fit` from the script's other calls, the same in each segment."""

    place: str
    sources: Mapping[str, int]
    """By the name of a file in `place`: its checksum."""

    values: Mapping[str, int | str]
    """Small whole numbers as they are, checksums of texts and data, by the names in the script."""

    first_epoch: int = 0
    epochs: int = 1


def fit_number(
    earlier_calls: Sequence[FitCall], number: int, complete: int, call: FitCall
) -> int | None:
    """Return the number of a call that would be `number` if the script left out none before it.

    `earlier_calls` are those of earlier segments, of which the first `complete` have returned. None
    if the script has left out one that has not returned.
    """
    if (
        number >= complete
        or number >= len(earlier_calls)
        or _is_edited(earlier_calls[number], call)
    ):
        return number
    alike = [k for k, one in enumerate(earlier_calls) if one.place == call.place]
    counters = _counters([earlier_calls[k].values for k in alike])
    votes = {
        k: sum(call.values.get(name) == earlier_calls[k].values[name] for name in counters)
        for k in alike
        if k >= number
    }
    if earlier_calls[number].place != call.place:
        if votes:
            return max(votes, key=lambda k: (votes[k], -k))
        return number if _goes_on(earlier_calls[number], call) else complete
    best = max(votes, key=lambda k: (votes[k], k == number, -k))
    if votes[best] or not any(
        isinstance(earlier_calls[best].values[name], int) for name in counters
    ):
        return best
    return complete if len(earlier_calls) == complete else None


def _is_edited(before: FitCall, call: FitCall) -> bool:
    return any(before.sources.get(name, now) != now for name, now in call.sources.items())


def _goes_on(before: FitCall, call: FitCall) -> bool:
    """Tell whether a call looks like the rest of an earlier one, from the script's own file."""
    return call.first_epoch > before.first_epoch and call.epochs <= before.epochs


def _counters(rounds: Sequence[Mapping[str, int | str]]) -> set[str]:
    """Return the names that have another value in each of several calls."""
    if len(rounds) < 2:
        return set()
    names = set(rounds[0]).intersection(*rounds)
    return {name for name in names if len({values[name] for values in rounds}) == len(rounds)}


# -- of a call that is being made -----------------------------------------------------------------


def describe_call(arguments: Mapping[str, Any]) -> FitCall:
    """Return the description of the call of `fit` that is being made with these arguments."""
    frames = list(_script_frames(sys._getframe(1)))
    codes = [frame.f_code for frame in frames]
    names = [os.path.basename(code.co_filename) for code in codes]
    place = [
        f"{name}:{code.co_name}:{frame.f_lineno}"
        for name, code, frame in zip(names, codes, frames)  # noqa: B905 - Python 3.9
    ]
    paths = {name: code.co_filename for name, code in zip(names, codes)}  # noqa: B905
    values: dict[str, int | str] = {}
    for depth, frame in enumerate(frames):
        values.update(_values(depth, frame))
    for name in ("x", "y"):
        data = arguments.get(name)
        if hasattr(data, "shape"):  # an array: other data may be made when they are asked for
            with contextlib.suppress(Exception):  # whatever foreign data may raise
                values[name] = _sample(data)
    return FitCall(
        " < ".join(place),
        {name: _checksum(path) for name, path in paths.items()},
        values,
        int(arguments.get("initial_epoch") or 0),
        int(arguments.get("epochs") or 1),
    )


def _script_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the innermost frames that are neither a library's of ours nor without a file."""
    frame_count = 0
    while frame is not None and frame_count < _MOST_FRAMES:
        package = str(frame.f_globals.get("__name__", "")).split(".")[0]
        if package not in _LIBRARIES and not frame.f_code.co_filename.startswith("<"):
            frame_count += 1
            yield frame
        frame = frame.f_back


def _values(depth: int, frame: FrameType) -> Iterator[tuple[str, int | str]]:
    for name, value in list(frame.f_locals.items())[:_MOST_NAMES]:
        kind, key = type(value), sys.intern(f"{depth}.{name}")
        if kind is bool:  # a flag, which may say that the script has been resumed
            continue
        if issubclass(kind, Integral):
            yield key, int(value) if abs(int(value)) < _SMALL else _hash(str(value))
        elif issubclass(kind, (str, Path)) and not name.startswith("__"):
            yield key, _hash(str(value)[:_MOST_CHARACTERS])


def _hash(text: str) -> str:
    return f"{zlib.crc32(text.encode(errors='replace')):08x}"


def _sample(data: Any) -> str:
    """Return a checksum of the shape of an array and of some of its rows."""
    import numpy as np

    rows = np.ascontiguousarray(np.asarray(data[:: max(1, len(data) // _SAMPLED_ROWS)]))
    if rows.dtype == object:
        raise TypeError
    return f"{zlib.crc32(rows.tobytes(), zlib.crc32(str(data.shape).encode())):08x}"


@functools.cache
def _checksum(path: str) -> int:
    try:
        return zlib.crc32(Path(path).read_bytes())
    except OSError:
        return 0


# -- the call that runs ---------------------------------------------------------------------------


def note_begun(folder: Path, number: int, call: FitCall) -> None:
    """Record a call that begins to train: it may have no checkpoint when the trial is stopped."""
    with contextlib.suppress(OSError):
        write_json(folder / _BEGUN, {"fit": number, "call": list(call)})


def with_begun(folder: Path, calls: Sequence[FitCall]) -> list[FitCall]:
    """Return the calls of a checkpoint and the one that began after it, if any did."""
    begun = read_json(folder / _BEGUN)
    if begun is None or begun.get("fit") != len(calls):
        return list(calls)
    return [*calls, FitCall(*begun["call"])]


_MOST_BYTES = 1 << 16


def calls_before(handle: int, complete: int) -> int | None:
    """Return how many calls earlier processes of this segment have made; None if that is not known.

    `handle`: the locked file. `complete`: the calls whose end is in the checkpoints. A process that
    has ended with an error is followed by one with the same arguments where something starts it
    again: that one makes all calls again.
    """
    state = parse_object(os.pread(handle, _MOST_BYTES, 0)) or {}
    if not state or state.get("segment") != os.environ.get(SEGMENT_VARIABLE):
        return 0
    if not state.get("has_ended"):
        return 0 if state.get("arguments") == _arguments() else None
    calls = int(state.get("calls") or 0)
    return calls if calls <= complete else None


def note_calls(handle: int, calls: int, *, has_ended: bool = False) -> None:
    """Record how many calls this process and those before it have made."""
    state = {
        "segment": os.environ.get(SEGMENT_VARIABLE),
        "arguments": _arguments(),
        "calls": calls,
        "has_ended": has_ended or _is_child(),
    }
    data = json.dumps(state).encode()
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, data, 0)


def has_failed() -> bool:
    """Tell whether an error that nobody has caught ends this process."""
    return hasattr(sys, "last_type")


def _arguments() -> list[str]:
    return [text[:200] for text in sys.argv[:100]]


def _is_child() -> bool:
    """Tell whether multiprocessing started this process: it may leave without Python's own end."""
    processes: Any = sys.modules.get("multiprocessing.process")
    return processes is not None and processes.parent_process() is not None
