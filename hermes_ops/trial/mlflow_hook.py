"""Makes the script's own MLflow calls land in the trial's run, and its objective in the curve.

Loaded when the script imports MLflow (1.x to 3.x, skinny too). All that is logged goes through
`TrackingServiceClient`: the fluent functions, `MlflowClient`, autologging, loggers of other
libraries. What is not about the trial's run or its curve is passed on untouched.
"""
# ruff: noqa: ANN401 - the objects of MLflow have no types here

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from hermes_ops.trial import channel
from hermes_ops.trial.files import Folder
from hermes_ops.trial.mlflow_run import TrialRun

_EXPERIMENT, _RUN_ID = "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID"
_RUN_NAME_TAG = "hermes.script_run_name"
_lock = threading.RLock()  # for the process's environment and MLflow's globals


@functools.lru_cache(maxsize=1)
def trial_run() -> TrialRun:
    """Return this process's view of the trial's run."""
    return TrialRun(Folder(Path(os.environ["HERMES_TRIAL_DIR"])))


# -- the client through which everything is logged -------------------------------------------------


def patch_client(module: ModuleType) -> None:
    """Patch `mlflow.tracking._tracking_service.client`, which has just been imported."""
    kind = module.TrackingServiceClient
    run = trial_run()
    channel.send({"kind": "mlflow", "names": []})
    kind.log_metric = _log_metric(run, kind.log_metric)
    kind.log_batch = _log_batch(run, kind.log_batch)
    if run.run_id:
        kind.log_param = _log_param(run, kind.log_param)
        kind.set_terminated = _set_terminated(run, kind.set_terminated)


def _log_metric(run: TrialRun, original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def log_metric(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        own = run.is_own(self, given["run_id"])
        if run.take(own, given["run_id"], given["key"], given["value"], given.get("step")):
            return _done(given)
        return original(self, *args, **kwargs)

    return log_metric


def _log_batch(run: TrialRun, original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def log_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        own, params = run.is_own(self, given["run_id"]), given.get("params") or ()
        if given.get("metrics"):
            given["metrics"] = _not_taken(run, own, given["run_id"], given["metrics"])
        if not own or not params:
            return _call_batch(original, given)
        try:
            given["params"] = run.new_params(params, lambda: _params_of(self, run))
            return _call_batch(original, given)
        except Exception as error:
            if not _is_refused(error):
                raise
            run.forget_params()  # Hermes has written its own meanwhile
            given["params"] = run.new_params(params, lambda: _params_of(self, run))
            return _call_batch(original, given)

    return log_batch


def _call_batch(original: Any, given: dict[str, Any]) -> Any:
    if not any(given.get(kind) for kind in ("metrics", "params", "tags")):
        return _done(given)
    return original(given["self"], **{k: v for k, v in given.items() if k != "self"})


def _is_refused(error: Exception) -> bool:
    return getattr(error, "error_code", None) == "INVALID_PARAMETER_VALUE"


def _not_taken(run: TrialRun, own: bool, run_id: str, metrics: Any) -> list[Any]:
    """Return what the script's client is to write; a metric of several models counts once."""
    decided: dict[tuple[str, Any], bool] = {}
    for metric in metrics:
        point = (metric.key, metric.step)
        if point not in decided:
            decided[point] = run.take(own, run_id, metric.key, metric.value, metric.step)
    return [metric for metric in metrics if not decided[metric.key, metric.step]]


def _log_param(run: TrialRun, original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def log_param(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        if not run.is_own(self, given["run_id"]):
            return original(self, *args, **kwargs)
        param = SimpleNamespace(key=given["key"], value=str(given["value"]))
        for is_last in (False, True):
            if not run.new_params([param], lambda: _params_of(self, run)):
                return _done(given, given["value"])
            try:
                return original(self, *args, **kwargs)
            except Exception as error:
                if is_last or not _is_refused(error):
                    raise
                run.forget_params()
        raise AssertionError("unreachable")

    return log_param


def _params_of(client: Any, run: TrialRun) -> dict[str, str]:
    return dict(client.get_run(run.run_id).data.params)


def _done(given: dict[str, Any], result: Any = None) -> Any:
    """Return what MLflow returns for something logged; asynchronously, what can be waited for."""
    if given.get("synchronous", True):
        return result
    module: Any = sys.modules["mlflow.utils.async_logging.run_operations"]
    return module.RunOperations([])


def _set_terminated(run: TrialRun, original: Any) -> Any:
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


def _with_step_known(run: TrialRun, original: Any) -> Any:
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
        found = original(*args, **kwargs)
        if os.environ.get(_EXPERIMENT) == inherited:
            os.environ.pop(_EXPERIMENT, None)
        return found

    return set_experiment


def _start_run(run: TrialRun, fluent: ModuleType, original: Any) -> Any:
    """Start the trial's run, or what the script wants within it or at another server."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def start_run(*args: Any, **kwargs: Any) -> Any:
        tracking: Any = sys.modules["mlflow.tracking"]
        given = dict(signature.bind(*args, **kwargs).arguments)
        if not run.is_at(tracking.get_tracking_uri()):
            with _hidden_run_id(run):
                return original(**given)
        wanted = given.get("run_id") or run.run_id
        parent = _parent(run, fluent, given)
        if wanted == run.run_id and not parent:
            _resume_own(run, given)
        elif parent and not given.get("run_id"):
            _place_beneath(fluent, given, parent)
        with _hidden_run_id(run), _without_experiment(fluent, given):
            started = original(**given)
        run.is_active = run.is_active or started.info.run_id == run.run_id
        return started

    return start_run


def _parent(run: TrialRun, fluent: ModuleType, given: dict[str, Any]) -> str | None:
    """Return the run beneath which a new one is wanted."""
    outer = fluent.active_run()  # of this thread
    if outer is not None:
        return str(outer.info.run_id)
    if given.get("parent_run_id"):
        return str(given["parent_run_id"])
    return run.run_id if given.get("nested") and run.is_active else None


def _resume_own(run: TrialRun, given: dict[str, Any]) -> None:
    given["run_id"] = run.run_id
    name = given.pop("run_name", None)
    if name:  # the trial keeps its own
        given["tags"] = {**(given.get("tags") or {}), _RUN_NAME_TAG: name}


def _place_beneath(fluent: ModuleType, given: dict[str, Any], parent: str) -> None:
    """MLflow shows a run beneath another one only within one experiment."""
    given["tags"] = {**(given.get("tags") or {}), "mlflow.parentRunId": parent}
    if given.get("experiment_id") is None:
        with contextlib.suppress(Exception):  # MLflow says it, if it is wrong
            given["experiment_id"] = fluent.get_run(parent).info.experiment_id


@contextlib.contextmanager
def _without_experiment(fluent: ModuleType, given: dict[str, Any]) -> Iterator[None]:
    """Hide the experiment that the script has set from a run that is in another one."""
    active = getattr(fluent, "_active_experiment_id", None)
    if not given.get("run_id") or active is None:
        yield
        return
    fluent._active_experiment_id = None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        fluent._active_experiment_id = active  # type: ignore[attr-defined]


@contextlib.contextmanager
def _hidden_run_id(run: TrialRun) -> Iterator[None]:
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
