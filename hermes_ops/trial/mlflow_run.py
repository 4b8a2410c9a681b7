"""The trial's run in MLflow, as the script's process knows it."""
# ruff: noqa: ANN401 - the objects of MLflow have no types here

from __future__ import annotations

import ast
import json
import os
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

from hermes_ops.trial import channel
from hermes_ops.trial.files import Folder, append_lines, encode_value, now_ms

_MOST_NAMES = 1000
_LOCALHOST = re.compile(r"^(https?://)(?:localhost|\[::1\])(?=[:/]|$)")


class TrialRun:
    """Decide what becomes of each value that this process logs; one object a process."""

    def __init__(self, folder: Folder) -> None:
        self.run_id = os.environ.get(channel.RUN_VARIABLE, "")
        self._uri = _same_spelling(os.environ.get(channel.URI_VARIABLE, ""))
        others = json.loads(os.environ.get("HERMES_OTHER_METRICS") or "{}")
        names = (os.environ.get("HERMES_OBJECTIVE"), *others)
        self._curve_names = frozenset(name for name in names if name)
        self.call = threading.local()  # `has_no_step` within a fluent call that names no step
        self._file = folder.logged_values
        self._lock = threading.Lock()
        self._runs: dict[str, int] = {}
        self._logged: set[str] = set()
        self._params: dict[str, str] | None = None
        self._kept: set[str] = set()  # params of which that has been said
        self.is_active = False  # started in this process, and not ended

    def is_at(self, uri: object) -> bool:
        """Return whether an address is that of the trial's server."""
        return bool(self.run_id) and _same_spelling(uri) == self._uri

    def is_own(self, client: Any, run_id: object) -> bool:
        """Return whether a client and an id mean the trial's run."""
        return run_id == self.run_id and self.is_at(getattr(client, "tracking_uri", None))

    def take(self, own: bool, run_id: object, name: str, value: Any, step: Any) -> bool:
        """Note a value that is for the trial's curve; return True if Hermes writes it to the run.

        Hermes also writes what `report()` and the Keras hook report.
        """
        announced = channel.announced
        if name in self._curve_names and name not in announced:
            self._note(own, run_id, name, value, step)
        if own and (name in announced or name in self._curve_names):
            return True
        if own and name not in self._logged and len(self._logged) < _MOST_NAMES:
            self._logged.add(name)
            channel.send({"kind": "mlflow", "names": [name]})
        return False

    def _note(self, own: bool, run_id: object, name: str, value: Any, step: Any) -> None:
        try:
            number, whole = float(value), int(step or 0)
        except (TypeError, ValueError, OverflowError):
            return  # MLflow says what is wrong with it
        with self._lock:
            run = 0 if own else self._runs.setdefault(str(run_id), len(self._runs) + 1)
        has_step = step is not None and not getattr(self.call, "has_no_step", False)
        entry = {
            "name": name,
            "value": encode_value(number),
            "step": whole if has_step else None,
            "run": run,
            "time_ms": now_ms(),
        }
        append_lines(self._file, [entry])

    def new_params(self, params: Sequence[Any], fetch: Callable[[], dict[str, str]]) -> list[Any]:
        """Return the params that the trial's run does not have yet; MLflow refuses other values."""
        with self._lock:
            if self._params is None:
                self._params = dict(fetch())
            new, kept = [], []
            for param in params:
                before = self._params.setdefault(param.key, str(param.value))
                if before == str(param.value):
                    new.append(param)
                elif param.key not in self._kept and not same_meaning(before, str(param.value)):
                    kept.append(str(param.key))
            self._kept.update(kept)
        if kept:
            names = ", ".join(sorted(kept))
            print(f"hermes: MLflow keeps the values that were logged first: {names}", flush=True)
        return new

    def forget_params(self) -> None:
        """Fetch the run's params anew: another writer has been there."""
        self._params = None


def _same_spelling(uri: object) -> str:
    """Return an address with this machine's name as a number, and without its last slash."""
    return _LOCALHOST.sub(r"\g<1>127.0.0.1", str(uri)).rstrip("/")


def same_meaning(one: str, other: str) -> bool:
    """Return whether two spellings of a param are of the same value: `48` and `48.0`."""
    return bool(_meaning(one) == _meaning(other))


def _meaning(text: str) -> Any:
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return text
