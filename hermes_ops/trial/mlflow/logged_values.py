"""The values that a script has logged to MLflow, as metrics of its trial.

The hook in its interpreter notes them; for a script without the hook the MLflow server is asked.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from hermes_ops.trial.files import Follower, append_lines, decode_value
from hermes_ops.trial.metrics import Metric


class LoggedValues:
    """Follow the file in which the hook in the script's interpreter notes what is logged.

    The file is the memory of all segments: it is read again from its beginning in each one, so
    that a step keeps its number. `earlier` has the metrics of the segments before.
    """

    def __init__(self, path: Path, objective: str | None, first_step: int) -> None:
        self._path = path
        self._objective = objective
        self._follower = Follower(path)
        self._curve = _LoggedCurve(objective)
        self._is_ignored = False
        metrics = self._read()
        self._has_begun = bool(metrics)
        self.earlier = [] if self._is_ignored else metrics
        self._curve.begin_segment(first_step)
        if first_step or self._follower.offset:
            self._note({"kind": "segment", "first_step": first_step})

    def new(self, printed_step: int = 0) -> list[Metric]:
        """Return the metrics that have come.

        `printed_step` is the highest step at which the output has held the objective. Where that
        is further than the first logged value, the output is the curve: its steps are others.
        """
        metrics = self._read()
        if metrics and not self._has_begun:
            self._has_begun = True
            first = next((m.step for m in metrics if m.name == self._objective), printed_step)
            if printed_step > first:
                self._is_ignored = True
                self._note({"kind": "ignored"})
        return [] if self._is_ignored else metrics

    def close(self) -> list[Metric]:
        """Return what has waited for a further value; the script has ended."""
        return [] if self._is_ignored else self._curve.close()

    def _read(self) -> list[Metric]:
        metrics: list[Metric] = []
        for entry in self._follower.new():
            if entry.get("kind") == "segment":
                self._curve.begin_segment(int(entry["first_step"]))
            elif entry.get("kind") == "ignored":
                self._is_ignored = True
            elif (value := _logged_value(entry)) is not None:
                metrics += self._curve.add(value)
        return metrics

    def _note(self, entry: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the watch
            append_lines(self._path, [entry])


class _LoggedCurve:
    """Put the objective's values on steps, and those of other metrics with them.

    What begins with step 0 waits for the next value, which tells what the 0 means: epoch 0, or
    that the script says no steps.
    """

    def __init__(self, objective: str | None) -> None:
        self._objective = objective
        self._counter = StepCounter()
        self._waiting: list[LoggedValue] = []
        self._waits_since_before = False  # since an earlier segment
        self._held: dict[str, float] = {}
        self._stored: set[str] = set()  # at the step of the newest value of the objective
        self._newest: LoggedValue | None = None
        self._step = 0

    def begin_segment(self, first_step: int) -> None:
        self._counter.begin_segment(first_step)
        self._waits_since_before = bool(self._waiting)
        self._held.clear()
        self._newest = None

    def add(self, logged: LoggedValue) -> list[Metric]:
        if not self._waiting and not self._is_first_zero(logged):
            return self._take(logged)
        if logged.name != self._objective or not self._waiting:
            self._waiting.append(logged)
            return []
        if self._waits_since_before and logged.step == 0:  # the epoch is trained once more
            self._waiting, self._waits_since_before = [logged], False
            return []
        return self._resolve(logged.step == 0, logged)

    def close(self) -> list[Metric]:
        """Return what still waits: a single value at step 0 is one without a step."""
        metrics = self._resolve(True) if self._waiting else []
        step = max(1, self._counter.highest or 0)
        metrics += [Metric(name, value, step) for name, value in self._held.items()]
        self._held.clear()
        return metrics

    def _is_first_zero(self, logged: LoggedValue) -> bool:
        is_first = self._counter.highest is None and not self._counter.zero_is_none
        return is_first and logged.name == self._objective and logged.step == 0

    def _resolve(self, zero_is_none: bool, *further: LoggedValue) -> list[Metric]:
        self._counter.zero_is_none = zero_is_none
        waiting, self._waiting = self._waiting, []
        return [m for logged in (*waiting, *further) for m in self._take(logged)]

    def _take(self, logged: LoggedValue) -> list[Metric]:
        if logged.name == self._objective:
            return self._take_objective(logged)
        newest = self._newest
        if newest is not None and newest.step == logged.step and logged.name not in self._stored:
            self._stored.add(logged.name)
            return [Metric(logged.name, logged.value, self._step)]
        self._held[logged.name] = logged.value
        return []

    def _take_objective(self, logged: LoggedValue) -> list[Metric]:
        number = self._counter.number(logged)
        if number is None:
            return []
        self._newest, self._step = logged, number
        self._stored = set(self._held)
        others = [Metric(name, value, number) for name, value in self._held.items()]
        self._held.clear()
        return [Metric(logged.name, logged.value, number), *others]


class FirstValues:
    """Hold back the first printed value of a metric until it is clear whether it is logged too.

    A script that prints its metrics and logs them as well says each value twice: those that it
    logs itself are in MLflow already. Nothing is held in a script that does not import MLflow, nor
    any metric in `kept`.
    """

    def __init__(self, kept: Collection[str | None]) -> None:
        self._kept = kept
        self._held: dict[str, Metric] = {}
        self._passed: set[str] = set()
        self._logged: set[str] = set()
        self._is_holding = False

    def log(self, names: Collection[str]) -> None:
        """Note that the script has imported MLflow, and which metrics it logs to it."""
        self._is_holding = True
        self._logged.update(names)
        for name in names:
            self._held.pop(name, None)

    def release(self, metrics: list[Metric]) -> list[Metric]:
        """Return what may be stored now of the metrics that were printed."""
        return [m for metric in metrics for m in self._take(metric)]

    def close(self) -> list[Metric]:
        """Return what is still held."""
        held, self._held = list(self._held.values()), {}
        return held

    def _take(self, metric: Metric) -> list[Metric]:
        name = metric.name
        if name in self._kept:
            return [metric]
        if name in self._logged:
            return []
        if not self._is_holding or name in self._passed:
            self._passed.add(name)
            return [metric]
        before = self._held.pop(name, None)
        if before is None:
            self._held[name] = metric
            return []
        self._passed.add(name)
        return [before, metric]


def _logged_value(entry: dict[str, Any]) -> LoggedValue | None:
    try:
        step = entry["step"]
        value = decode_value(entry["value"])
        return LoggedValue(
            str(entry["name"]), value, None if step is None else int(step), int(entry["run"])
        )
    except (KeyError, TypeError, ValueError):
        return None


MOST_STEPS = 1_000_000


class LoggedValue(NamedTuple):
    """A value that a script has logged; `run` is 0 for the trial's own run, other runs follow."""

    name: str
    value: float
    step: int | None  # as the script says it, None if it does not
    run: int


class StepCounter:
    """Turn the script's steps (epochs, batches, none at all) into 1, 2, 3 and so on.

    Only a first step 0 stays 0, unless `zero_is_none`: then step 0 stands for no step. A step that
    a resumed segment logs again keeps its number. Steps that begin again from a lower one, or in
    another run, are further training: their values are counted on. The same step twice in a row
    counts once. A value without a step is not counted in a run that has said steps. Once the
    trial's own run has a value, those of other runs are not counted.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}  # by (phase, the script's step)
        self._phases: dict[int, int] = {}  # by number; a phase is a stretch of rising steps
        self.zero_is_none = False
        self.highest: int | None = None
        self.begin_segment(0)

    def begin_segment(self, first_step: int) -> None:
        """Begin a segment; its checkpoint holds the first `first_step` steps."""
        self._first_step = first_step
        self._last: tuple[int, int, float] | None = None  # run, step and value
        self._phase = 0
        self._stepped: set[int] = set()  # runs in which the script has said steps
        self._unstepped = 0
        self._own = False

    def number(self, logged: LoggedValue) -> int | None:
        """Return the step of a value, None if it does not count."""
        if logged.run and self._own:
            return None
        self._own = self._own or logged.run == 0
        step = logged.step
        if step is None or (step == 0 and self.zero_is_none):
            return self._without_step(logged)
        if self._is_repeated(logged.run, step, logged.value):
            return None
        self._phase = self._phase_of(logged.run, step)
        self._last = (logged.run, step, logged.value)
        self._stepped.add(logged.run)
        return self._known_or_next(self._phase, step)

    def _without_step(self, logged: LoggedValue) -> int | None:
        if logged.run in self._stepped:
            return None
        self._unstepped += 1
        number = self._first_step + self._unstepped
        if self._stepped:  # other runs have said steps: this is the sum of them
            number = (self.highest or 0) + 1
        self.highest = max(self.highest or 0, number)
        return number

    def _is_repeated(self, run: int, step: int, value: float) -> bool:
        if self._last is None:
            return False
        last_run, last_step, last_value = self._last
        return step == last_step and (run == last_run or value == last_value)

    def _phase_of(self, run: int, step: int) -> int:
        if self._last is None:
            return self._phase_at_checkpoint(step)
        last_run, last_step, _ = self._last
        begins_again = step < last_step or (run != last_run and step == last_step)
        return self._phase + 1 if begins_again else self._phase

    def _phase_at_checkpoint(self, step: int) -> int:
        """Return the phase in which a segment goes on: the checkpoint's, or the next one."""
        phase = self._phases.get(self._first_step, 0)
        number = self._numbers.get((phase, step))
        begins_next = number is not None and number < self._first_step
        return phase + 1 if begins_next else phase

    def _known_or_next(self, phase: int, step: int) -> int:
        is_zero = self.highest is None and step == 0
        following = 0 if is_zero else (self.highest or 0) + 1
        number = self._numbers.get((phase, step), following)
        self.highest = max(self.highest or 0, number)
        if len(self._numbers) < MOST_STEPS:
            self._numbers[phase, step] = number
            self._phases.setdefault(number, phase)
        return number


_TIMEOUT_S = 10.0
_MOST_POINTS = 25_000  # in one answer


def last_step(metric: str, environment: Mapping[str, str]) -> int | None:
    """Return the highest step of a metric in the trial's run; None without a value of it.

    The server, the run and the log-in are those of MLflow's own variables. A server that does not
    answer knows of no value.
    """
    import urllib.request

    uri, run_id = environment.get("MLFLOW_TRACKING_URI", ""), environment.get("MLFLOW_RUN_ID")
    if not run_id or urlsplit(uri).scheme not in ("http", "https"):
        return None
    query = urlencode({"run_id": run_id, "metric_key": metric, "max_results": _MOST_POINTS})
    address, log_in = _without_log_in(uri.rstrip("/"))
    request = urllib.request.Request(  # noqa: S310 - http or https, as seen above
        f"{address}/api/2.0/mlflow/metrics/get-history?{query}",
        headers=_headers(environment, log_in),
    )
    try:
        with urllib.request.urlopen(  # noqa: S310 - the same
            request, timeout=_TIMEOUT_S, context=_context(address, environment)
        ) as answer:
            metrics = json.load(answer).get("metrics", [])
        return max((int(point.get("step", 0)) for point in metrics), default=None)
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def _without_log_in(uri: str) -> tuple[str, str]:
    """Split a server's address and the `user:password` in it."""
    parts = urlsplit(uri)
    log_in, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=host).geturl(), log_in


def _headers(environment: Mapping[str, str], log_in: str) -> dict[str, str]:
    token = environment.get("MLFLOW_TRACKING_TOKEN")
    user = environment.get("MLFLOW_TRACKING_USERNAME")
    if token:
        return {"Authorization": f"Bearer {token}"}
    if user:
        log_in = f"{user}:{environment.get('MLFLOW_TRACKING_PASSWORD', '')}"
    if not log_in:
        return {}
    return {"Authorization": f"Basic {base64.b64encode(log_in.encode()).decode()}"}


def _context(address: str, environment: Mapping[str, str]) -> Any:  # noqa: ANN401 - SSLContext
    if not address.startswith("https"):
        return None
    import ssl

    bundle = environment.get("MLFLOW_TRACKING_SERVER_CERT_PATH")
    context = ssl.create_default_context(cafile=bundle or None)
    if environment.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("true", "1"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
