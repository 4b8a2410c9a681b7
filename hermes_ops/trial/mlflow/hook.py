"""Redirect the script's own MLflow calls to the trial's run, and its objective to the curve.

Loaded when the script imports MLflow (1.x to 3.x, skinny too). All that is logged goes through
`TrackingServiceClient`: the fluent functions, `MlflowClient`, autologging, loggers of other
libraries. What is not about the trial's run or its curve is passed on untouched.
"""
# ruff: noqa: ANN401 - the objects of MLflow have no types here

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from hermes_ops.trial import event_channel
from hermes_ops.trial.files import Folder, append_lines, encode_value, now_ms
from hermes_ops.trial.group import is_follower

_EXPERIMENT, _RUN_ID = "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID"
_RUN_NAME_TAG = "hermes.script_run_name"
_lock = threading.RLock()  # for the process's environment and MLflow's globals


@functools.lru_cache(maxsize=1)
def trial_run() -> ScriptRun:
    """Return this process's view of the trial's run."""
    return ScriptRun(Folder(Path(os.environ["HERMES_TRIAL_DIR"])))


# -- the client through which everything is logged -------------------------------------------------


def patch_client(module: ModuleType) -> None:
    """Patch `mlflow.tracking._tracking_service.client`, which has just been imported."""
    kind = module.TrackingServiceClient
    run = trial_run()
    event_channel.send({"kind": "mlflow", "names": []})
    kind.log_metric = _log_metric(run, kind.log_metric)
    kind.log_batch = _log_batch(run, kind.log_batch)
    if run.run_id:
        kind.log_param = _log_param(run, kind.log_param)
        kind.set_terminated = _set_terminated(run, kind.set_terminated)


def _log_metric(run: ScriptRun, original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def log_metric(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs).arguments
        run_id, name, value = (arguments[key] for key in ("run_id", "key", "value"))
        is_own = run.is_own(self, run_id)
        if run.record_value(is_own, run_id, name, value, arguments.get("step")):
            return _done(arguments)
        return original(self, *args, **kwargs)

    return log_metric


def _log_batch(run: ScriptRun, original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def log_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        is_own, params = run.is_own(self, arguments["run_id"]), arguments.get("params") or ()
        if arguments.get("metrics"):
            run_id, metrics = arguments["run_id"], arguments["metrics"]
            arguments["metrics"] = _not_taken(run, is_own, run_id, metrics)
        if not is_own or not params:
            return _call_batch(original, arguments)
        try:
            arguments["params"] = run.new_params(params, lambda: _params_of(self, run))
            return _call_batch(original, arguments)
        except Exception as error:
            if not _is_refused(error):
                raise
            run.forget_params()  # Hermes has written its own meanwhile
            arguments["params"] = run.new_params(params, lambda: _params_of(self, run))
            return _call_batch(original, arguments)

    return log_batch


def _call_batch(original: Any, arguments: dict[str, Any]) -> Any:
    if not any(arguments.get(kind) for kind in ("metrics", "params", "tags")):
        return _done(arguments)
    return original(arguments["self"], **{k: v for k, v in arguments.items() if k != "self"})


def _is_refused(error: Exception) -> bool:
    return getattr(error, "error_code", None) == "INVALID_PARAMETER_VALUE"


def _not_taken(run: ScriptRun, is_own: bool, run_id: str, metrics: Any) -> list[Any]:
    """Return what the script's client is to write; a metric of several models counts once."""
    decided: dict[tuple[str, Any], bool] = {}
    for metric in metrics:
        point = (metric.key, metric.step)
        if point not in decided:
            decided[point] = run.record_value(is_own, run_id, metric.key, metric.value, metric.step)
    return [metric for metric in metrics if not decided[metric.key, metric.step]]


def _log_param(run: ScriptRun, original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def log_param(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs).arguments
        if not run.is_own(self, arguments["run_id"]):
            return original(self, *args, **kwargs)
        param = SimpleNamespace(key=arguments["key"], value=str(arguments["value"]))
        for is_last in (False, True):
            if not run.new_params([param], lambda: _params_of(self, run)):
                return _done(arguments, arguments["value"])
            try:
                return original(self, *args, **kwargs)
            except Exception as error:
                if is_last or not _is_refused(error):
                    raise
                run.forget_params()
        raise AssertionError("unreachable")

    return log_param


def _params_of(client: Any, run: ScriptRun) -> dict[str, str]:
    return dict(client.get_run(run.run_id).data.params)


def _done(arguments: dict[str, Any], result: Any = None) -> Any:
    """Return what MLflow returns for something logged; asynchronously, what can be waited for."""
    if arguments.get("synchronous", True):
        return result
    module: Any = sys.modules["mlflow.utils.async_logging.run_operations"]
    return module.RunOperations([])


def _set_terminated(run: ScriptRun, original: Any) -> Any:
    """Leave the end of the trial's run to Hermes: the trial may go on, or be preempted."""

    @functools.wraps(original)
    def set_terminated(self: Any, run_id: str, *args: Any, **kwargs: Any) -> Any:
        try:
            if not run.is_own(self, run_id):
                return original(self, run_id, *args, **kwargs)
            run.is_active = False
            store = getattr(self, "store", None)
            for name in ("shut_down_async_logging", "flush_async_logging"):
                if hasattr(store, name):
                    return getattr(store, name)()
        finally:
            os.environ[_RUN_ID] = run.run_id  # `end_run` has removed it: processes inherit it
        return None

    return set_terminated


# -- the fluent functions --------------------------------------------------------------------------


def patch_fluent(fluent: ModuleType) -> None:
    """Patch `mlflow.tracking.fluent`, which has just been imported."""
    run = trial_run()
    for name in ("log_metric", "log_metrics"):
        _replace(fluent, name, _with_step_known(run, getattr(fluent, name)))
    if run.run_id:
        _replace(fluent, "start_run", _start_run(run, fluent, fluent.start_run))
        _replace(fluent, "set_experiment", _set_experiment(fluent.set_experiment))


def _replace(fluent: ModuleType, name: str, function: Any) -> None:
    package = sys.modules.get("mlflow")
    if getattr(package, name, None) is getattr(fluent, name):
        setattr(package, name, function)
    setattr(fluent, name, function)


def _with_step_known(run: ScriptRun, original: Any) -> Any:
    """Let the client know a call without a step: to MLflow that is step 0."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def log(*args: Any, **kwargs: Any) -> Any:
        run.call.has_no_step = signature.bind(*args, **kwargs).arguments.get("step") is None
        try:
            return original(*args, **kwargs)
        finally:
            run.call.has_no_step = False

    return log


def _set_experiment(original: Any) -> Any:
    """Let the script's experiment hold for its processes too: MLflow refuses two that differ."""
    inherited = os.environ.get(_EXPERIMENT)

    @functools.wraps(original)
    def set_experiment(*args: Any, **kwargs: Any) -> Any:
        experiment = original(*args, **kwargs)
        if os.environ.get(_EXPERIMENT) == inherited:
            os.environ.pop(_EXPERIMENT, None)
        return experiment

    return set_experiment


def _start_run(run: ScriptRun, fluent: ModuleType, original: Any) -> Any:
    """Start the trial's run, or what the script wants within it or at another server."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def start_run(*args: Any, **kwargs: Any) -> Any:
        tracking: Any = sys.modules["mlflow.tracking"]
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        if not run.is_at(tracking.get_tracking_uri()):
            with _hidden_run_id(run):
                return original(**arguments)
        wanted = arguments.get("run_id") or run.run_id
        parent = _parent(run, fluent, arguments)
        if wanted == run.run_id and not parent:
            _resume_own(run, arguments)
        elif parent and not arguments.get("run_id"):
            _place_beneath(fluent, arguments, parent)
        with _hidden_run_id(run), _without_experiment(fluent, arguments):
            started = original(**arguments)
        run.is_active = run.is_active or started.info.run_id == run.run_id
        return started

    return start_run


def _parent(run: ScriptRun, fluent: ModuleType, arguments: dict[str, Any]) -> str | None:
    """Return the run beneath which a new one is wanted."""
    outer = fluent.active_run()  # of this thread
    if outer is not None:
        return str(outer.info.run_id)
    if arguments.get("parent_run_id"):
        return str(arguments["parent_run_id"])
    return run.run_id if arguments.get("nested") and run.is_active else None


def _resume_own(run: ScriptRun, arguments: dict[str, Any]) -> None:
    arguments["run_id"] = run.run_id
    name = arguments.pop("run_name", None)
    if name:  # the trial keeps its own
        arguments["tags"] = {**(arguments.get("tags") or {}), _RUN_NAME_TAG: name}


def _place_beneath(fluent: ModuleType, arguments: dict[str, Any], parent: str) -> None:
    """Nest a run in its parent's experiment: MLflow shows nested runs within one experiment."""
    arguments["tags"] = {**(arguments.get("tags") or {}), "mlflow.parentRunId": parent}
    if arguments.get("experiment_id") is None:
        with contextlib.suppress(Exception):  # MLflow says it, if it is wrong
            arguments["experiment_id"] = fluent.get_run(parent).info.experiment_id


@contextlib.contextmanager
def _without_experiment(fluent: ModuleType, arguments: dict[str, Any]) -> Iterator[None]:
    """Hide the experiment that the script has set from a run that is in another one."""
    active = getattr(fluent, "_active_experiment_id", None)
    if not arguments.get("run_id") or active is None:
        yield
        return
    fluent._active_experiment_id = None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        fluent._active_experiment_id = active  # type: ignore[attr-defined]


@contextlib.contextmanager
def _hidden_run_id(run: ScriptRun) -> Iterator[None]:
    """Hide the trial's run from a call that would take any new run for it."""
    with _lock:
        shown = os.environ.get(_RUN_ID) == run.run_id
        if shown:
            del os.environ[_RUN_ID]
        try:
            yield
        finally:
            if shown:
                os.environ[_RUN_ID] = run.run_id


_MOST_NAMES = 1000
_LOCALHOST = re.compile(r"^(https?://)(?:localhost|\[::1\])(?=[:/]|$)")


class ScriptRun:
    """Decide what becomes of each value that this process logs; one object a process."""

    def __init__(self, folder: Folder) -> None:
        self.run_id = os.environ.get(event_channel.RUN_VARIABLE, "")
        self._uri = _same_spelling(os.environ.get(event_channel.URI_VARIABLE, ""))
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

    def record_value(
        self, is_own_run: bool, run_id: object, name: str, value: Any, step: Any
    ) -> bool:
        """Note a value that is for the trial's curve; return True if Hermes writes it to the run.

        Hermes also writes what `report()` and the Keras hook report. Of a trial in several
        processes rank 0 alone logs to its run: the values of others are dropped.
        """
        announced = event_channel.announced
        if is_follower():
            return is_own_run
        is_noted = name not in self._curve_names or name in announced
        if not is_noted and not self._note(is_own_run, run_id, name, value, step):
            return False  # MLflow says what is wrong with it
        if is_own_run and (name in announced or name in self._curve_names):
            return True
        if is_own_run and name not in self._logged and len(self._logged) < _MOST_NAMES:
            self._logged.add(name)
            event_channel.send({"kind": "mlflow", "names": [name]})
        return False

    def _note(self, is_own_run: bool, run_id: object, name: str, value: Any, step: Any) -> bool:
        """Note a value; return False if it, or its step, is no number."""
        try:
            number, whole = float(value), int(step or 0)
        except (TypeError, ValueError, OverflowError):
            return False
        with self._lock:
            run = 0 if is_own_run else self._runs.setdefault(str(run_id), len(self._runs) + 1)
        has_step = step is not None and not getattr(self.call, "has_no_step", False)
        entry = {
            "name": name,
            "value": encode_value(number),
            "step": whole if has_step else None,
            "run": run,
            "time_ms": now_ms(),
        }
        append_lines(self._file, [entry])
        return True

    def new_params(self, params: Sequence[Any], fetch: Callable[[], dict[str, str]]) -> list[Any]:
        """Return the params that the trial's run does not have yet; MLflow refuses other values."""
        with self._lock:
            if self._params is None:
                self._params = dict(fetch())
            new, unchanged = [], []
            for param in params:
                before = self._params.setdefault(param.key, str(param.value))
                if before == str(param.value):
                    new.append(param)
                elif param.key not in self._kept and not same_meaning(before, str(param.value)):
                    unchanged.append(str(param.key))
            self._kept.update(unchanged)
        if unchanged:
            names = ", ".join(sorted(unchanged))
            print(f"hermes: MLflow keeps the values that were logged first: {names}", flush=True)
        return new

    def forget_params(self) -> None:
        """Drop the cached params: another writer has changed the run."""
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
