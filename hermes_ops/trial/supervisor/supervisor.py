"""One segment of a trial: start the script, watch it, end it, and say how it ended."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hermes_ops.trial import segment_records
from hermes_ops.trial.disk_space import FULL_ERRNOS
from hermes_ops.trial.files import Folder, Follower, write_json
from hermes_ops.trial.group import settings_without_effect
from hermes_ops.trial.metrics import Metric, MetricsFile
from hermes_ops.trial.mlflow.logged_values import FirstValues, LoggedValues, last_step
from hermes_ops.trial.outcome import PREEMPTED, SegmentEnding, SegmentFacts, judge, no_space
from hermes_ops.trial.output.output_reader import MatchedOutput, OutputReader, TimedMetrics
from hermes_ops.trial.output.relay import Relay, say
from hermes_ops.trial.processes.record import own_record
from hermes_ops.trial.processes.tree import Child, sweep_up
from hermes_ops.trial.processes.workers import WorkerProcesses
from hermes_ops.trial.redaction import Mask, secret_values
from hermes_ops.trial.retention import retention_of
from hermes_ops.trial.supervisor.checkpoint_scan import CheckpointScan
from hermes_ops.trial.supervisor.group_supervision import GroupSupervision
from hermes_ops.trial.supervisor.group_watchdog import GroupWatchdog
from hermes_ops.trial.supervisor.options import SegmentOptions
from hermes_ops.trial.supervisor.progress import TrainingProgress
from hermes_ops.trial.supervisor.readers import (
    make_matcher,
    make_metric_reader,
    make_tensorboard_reader,
)
from hermes_ops.trial.supervisor.stop_requests import StopRequests
from hermes_ops.trial.supervisor.switch_cost import SwitchCost

if TYPE_CHECKING:
    from hermes_ops.trial.checkpoint_store.upload import CheckpointUploader

POLL_S = 0.1
_DRAIN_S = 2.0
_ADVISE_AGAIN_S = 10.0  # where no line has looked like a metric so far
_FAILED_GRACE_S = 3.0
_MOST_UNWRITTEN = 400  # values held in memory; a result in its reserved space has room for them
_RESULT_S = 2.0  # of the grace, for what is written after the last copy
_LAST_LINES = "its last epoch is over and it is about to end"


class ScriptSupervisor:
    """Watch the script's process until its end; `run` may be called once."""

    group: GroupSupervision | None = None  # of several workers
    _received_s: float | None = None  # when the output came that is taken in; None: now
    _is_full = False  # the disk, when values could not be written

    def __init__(
        self, options: SegmentOptions, folder: Folder, token: str, parent: int, stops: StopRequests
    ) -> None:
        self.stops = stops
        self._options = options
        self._folder = folder
        self._token = token
        self._parent = parent
        self._metrics = MetricsFile(folder.metrics)
        has_checkpoint = segment_records.newest_checkpoint_s(folder) is not None
        self.status = segment_records.continued_status(folder, options.epoch, has_checkpoint)
        first_step = (self.status.checkpoint_step or 0) if has_checkpoint else 0
        self._first_values = FirstValues({options.objective, *options.secondary})
        self._logged = LoggedValues(folder.logged_values, options.objective, first_step)
        with contextlib.suppress(OSError):  # what the last segment could not take in any more
            last = options.max_epochs
            self._metrics.append(m for m in self._logged.earlier if not last or m.step <= last)
        self._steps_before = self._metrics.progress(options.objective, options.secondary)
        self._objective_seen = options.objective in self._metrics.names()
        self._events = Follower(folder.events)
        self._events.skip()
        self.status.step = self._steps_before
        self._progress = TrainingProgress(
            options.objective,
            options.max_epochs,
            finish_s=options.finish_s,
            step=self._steps_before,
            secondary=options.secondary,
            resumed_at=first_step,
        )
        self.timings: dict[str, float] = {}  # those measured in this segment
        self._mask = Mask(secret_values(os.environ))
        self._reader = make_metric_reader(options, self.status, first_step, self._metrics)
        self.output = OutputReader(self._reader, self._mask)
        self._matcher = make_matcher(options, self._reader)
        self._matched = MatchedOutput(self.output, self._matcher) if self._matcher else None
        self._tensorboard = make_tensorboard_reader(options, folder)
        self._retention = retention_of(folder.root, folder.checkpoints)
        self.copier: CheckpointUploader | None = None
        self.imports: dict[str, bool] = {}  # by name: whether it may be done ahead of the script
        self.on_training: Callable[[], None] | None = None
        self._reported: set[str] = set()  # metrics that do not come from the output
        self._has_hook = False
        self._trained_to_end = self._diverged = False
        self._look_for_last_lines()
        self._verdict: str | None = None
        self._tail_at_stop: list[str] = []
        self.has_trained = bool(self._metrics.names())  # in earlier segments
        self._has_values = False
        self._ended_as_trained = False
        self._notes: dict[str, str] = {}
        self._advise_at_s = options.advise_s  # since the script's start
        self.unwritten: list[Metric] = []  # each look tries it again
        self._relay: Relay | None = None
        self._written: dict[str, Any] = {}
        self._scan = CheckpointScan(folder, self._is_searching)
        self._switch_cost = SwitchCost(
            self.status, self.timings, first_step=first_step, reached=self._steps_before
        )

    def run(self, child: Child) -> tuple[SegmentEnding, int]:
        """Watch the child to its end; return the ending and the script's exit code."""
        started_s = time.monotonic()
        limit_s = self._time_left_s()
        logs = () if self.group is None else self.group.workers.logs
        relay = self._relay = Relay(
            child.output, self._read_output, mask=self._mask, matcher=self._matcher, logs=logs
        )
        code = child.poll()
        while code is None:
            relay.pump(POLL_S)
            self._read_matched()
            self._read_tensorboard(child.pid)
            self._read_logged()
            self._observe()
            running_s = time.monotonic() - started_s
            self._act(child, running_s, limit_s)
            if running_s >= self._advise_at_s:
                self._advise()
            code = child.poll()
        sweep_up(self._token, wait_s=_DRAIN_S)
        own_record(self._folder.root).end(_DRAIN_S)
        relay.drain(_DRAIN_S)
        self._close_output()
        relay.end()
        if self.group is not None:
            code = self.group.workers.code  # the last lines may tell who failed first
        self._read_tensorboard(child.pid, final=True)
        self._read_logged(final=True)
        self._observe(final=True)
        if not self._has_hook:
            self._switch_cost.note_end(time.time())
            self.write_status()
        self.status.step = max([self.status.step, *(m.step for m in self.unwritten)])
        if code == 0 and not self._objective_seen:
            self._find_logged_objective()
        ending = judge(self._facts(code))
        if self.group is not None and self._verdict is None:
            ending = self.group.name_failed(ending)
        return ending, code

    def watch_group(
        self,
        workers: WorkerProcesses,
        folder: Path,
        lost_nodes: Callable[[], Sequence[str]],
    ) -> None:
        """Let the child be that of several workers, which share that folder; before `run`."""
        self.status.workers = workers.size
        has_end = self._options.max_epochs is not None
        watchdog = GroupWatchdog(workers.size, self.status.step, by_steps=has_end)
        timeout_s = self._options.start_timeout_s
        self.group = GroupSupervision(workers, folder, watchdog, timeout_s, lost_nodes)

    @property
    def tail(self) -> list[str]:
        """The last lines of the output; of several workers' that of the one that failed first."""
        script_tail = self.output.tail
        return script_tail if self.group is None else self.group.tail(script_tail)

    def copy_rest(self, copier: CheckpointUploader) -> bool:
        """Upload the newest checkpoint after the script's end; return whether that succeeded.

        It has what is left of the grace, and ends at a further stop request.
        """
        left_s = self.stops.left_s(time.monotonic())
        most = max(1, self.stops.count)
        return copier.finish(max(0.0, left_s - _RESULT_S), lambda: self.stops.count > most)

    def _time_left_s(self) -> float | None:
        limit_s = self._options.time_limit_s
        if limit_s is None:
            return None
        return limit_s - segment_records.trained_s(Follower(self._folder.segments).new())

    # -- observing -----------------------------------------------------------------------------

    def _read_output(self, data: bytes) -> None:
        if self._matched is None:
            self._store_printed(self.output.feed(data))
        else:
            self._matched.feed(data, time.time())

    def _read_matched(self) -> None:
        """Take in the lines in which the sweep's patterns have been searched for."""
        if self._matcher is not None and self._matched is not None:
            self._store_timed(self._matched.timed_metrics())
            for kind, note in self._matcher.notes.items():
                self._say_once(kind, note)

    def _store_timed(self, timed_metrics: Iterable[TimedMetrics]) -> None:
        for metrics, self._received_s in timed_metrics:
            self._store_printed(metrics)
        self._received_s = None

    def _close_output(self) -> None:
        """Take in the rest of the output, as far as the time that a stop leaves allows it."""
        if self._matched is None:
            self._store_printed(self.output.close())
            return
        soonest_s = time.monotonic() + _DRAIN_S
        self._store_timed(self._matched.close(time.time(), lambda: self._is_late(soonest_s)))
        self._read_matched()
        self._store_printed([])

    def _is_late(self, soonest_s: float) -> bool:
        """Tell whether a stop leaves no time for what the script has printed last."""
        now_s = time.monotonic()
        if self.stops.count and not self.stops.has_grace:
            self.stops.begin_grace(now_s)
        is_over = self.stops.is_hurried or self.stops.is_grace_over(now_s)
        return is_over and now_s >= soonest_s

    def _say_once(self, kind: str, text: str) -> None:
        """Say a text, if any, in the output, once in the trial; its failure may repeat it."""
        if not text or kind in self._notes:
            return
        self._notes[kind] = self._mask.text(text)
        if kind not in self.status.said and self._relay is not None:
            self.status.said.append(kind)
            self._relay.say(f"hermes-trial: {self._notes[kind]}")

    def _store_printed(self, metrics: list[Metric]) -> None:
        if metrics:
            self._read_events()  # what is reported or logged otherwise is said before
        passed = self._first_values.release(metrics)
        self._store([m for m in passed if m.name not in self._reported])
        if self._reader.beyond is not None and self._options.objective not in self._reported:
            self._progress.pass_end(self._reader.beyond)
        for kind, note in self._reader.notes.items():
            self._say_once(kind, note)

    def _read_logged(self, final: bool = False) -> None:
        """Store what the script has logged to MLflow; its output is then not read for these."""
        if self._tensorboard is not None:
            return
        logged = self._logged.new(self._metrics.highest(self._options.objective))
        if final:
            self._store_printed(self._first_values.close())
            logged += [] if self.stops.count else self._logged.close()
        self._reported.update(m.name for m in logged)
        self._store(logged)

    def _find_logged_objective(self) -> None:
        """Find the objective of a script that logs to MLflow and has no hook (`python -I`, R)."""
        if self._options.objective is None:
            return
        step = last_step(self._options.objective, os.environ)
        if step is not None:
            self._objective_seen = True
            self.status.step = max(self.status.step, step)

    def _read_tensorboard(self, pid: int, final: bool = False) -> None:
        """Store what the script has written for TensorBoard; its output is not read for it then."""
        if self._tensorboard is not None:
            scalars = self._tensorboard.read_new(pid, final)
            self._reported.update(m.name for m in scalars)
            self._store(scalars)

    def _store(self, metrics: list[Metric]) -> None:
        metrics = self._progress.within(metrics)
        self._look_for_last_lines()
        if metrics:
            self._judge_values(metrics)
            self._append(metrics)
            self._scan.hasten()

    def _append(self, metrics: list[Metric]) -> None:
        others: list[Metric] = []  # the script's own, from report()
        fresh: list[Metric] = []
        try:
            fresh = self._metrics.append([*self.unwritten, *metrics], others)
            self.unwritten = []
        except OSError as error:
            self._keep_unwritten(metrics, error)
        self._judge_values(others)
        self._note_steps(others + fresh)

    def _keep_unwritten(self, metrics: list[Metric], error: OSError) -> None:
        """Hold what a full disk does not take; the script is ended once that is too much."""
        self.unwritten += metrics
        why = f"a metric could not be written: {error.strerror}"
        self._is_full = error.errno in FULL_ERRNOS
        if self._is_full:
            root = self._folder.root
            self._say_once("no space", f"the disk of {root} is full: values wait in memory")
            if len(self.unwritten) <= _MOST_UNWRITTEN:
                return
        self._verdict = self._verdict or f"{why} ({self._folder.metrics})"

    def _note_steps(self, metrics: list[Metric]) -> None:
        self._has_values = self._has_values or bool(metrics)
        for metric in metrics:
            if self._progress.note(metric):
                self.status.step = metric.step
                if not self._has_hook:
                    self._switch_cost.note_report(self._received_s or time.time(), metric.step)
            if metric.name == self._options.objective:
                self._warn_of_foreign_start(metric)
                if self.group is not None and not self._has_hook and metric.step > 1:
                    self._say_once("settings", settings_without_effect(os.environ))
                self._objective_seen, self.status.advice = True, ""
                if self._retention is not None:
                    self._retention.value(metric.value, time.time())
        self._look_for_last_lines()

    def _look_for_last_lines(self) -> None:
        if self._progress.is_in_last_lines:
            self._trained_to_end = True
            self._set_preemptible(True)

    def _warn_of_foreign_start(self, metric: Metric) -> None:
        """Say it once where a new trial begins in the middle: it may have read another's files."""
        fresh = not self._objective_seen and self.status.checkpointed_s is None
        if fresh and metric.step > 1:
            say(
                f"the first value of {metric.name} came at step {metric.step}, and the trial has "
                "no checkpoint: if its script went on from files of another trial, give each its "
                "own folder (trial.directory: copy)"
            )

    def _judge_values(self, metrics: list[Metric]) -> None:
        for metric in metrics:
            if metric.name == self._options.objective and not math.isfinite(metric.value):
                word = "NaN" if math.isnan(metric.value) else "infinite"
                self._diverge(f"{metric.name} is {word} at step {metric.step}")

    def _diverge(self, verdict: str) -> None:
        if self._verdict is None:
            self._verdict, self._diverged = verdict, True

    def _observe(self, final: bool = False) -> None:
        if self.unwritten:
            self._append([])
        fresh = self._metrics.refresh()
        if fresh:
            self._judge_values(fresh)
            self._note_steps(fresh)
        self._read_events()
        if not self._has_hook:
            self._look_for_checkpoint(final)
        self.status.steps_by = self._reader.steps_by
        self.write_status()

    def _look_for_checkpoint(self, final: bool) -> None:
        written_s = self._scan.find(self.status.checkpointed_s, final=final)
        if written_s is None:
            return
        self.status.checkpointed_s = written_s
        if written_s >= self.status.started_s - 1.0:
            self.status.checkpoint_step = self._switch_cost.step_at(written_s)
            self._switch_cost.note_checkpoint(written_s)
        self._set_preemptible(True)
        if self._retention is not None:
            self._retention.checkpointed()
        self._offer()

    def _is_searching(self, received_s: float) -> bool:
        """Tell whether lines that had come by then may still hold values."""
        waits_since_s = self._matcher.waits_since_s if self._matcher is not None else None
        return waits_since_s is not None and waits_since_s <= received_s

    def _advise(self) -> None:
        """Say which lines look like metrics while no value of the objective has been read."""
        name = self._options.objective
        if name is None or self._objective_seen or self._has_hook or self._tensorboard is not None:
            self._advise_at_s = math.inf
            return
        from hermes_ops.trial.output.advice import advice

        self._advise_at_s += _ADVISE_AGAIN_S
        lead = f"no value of {name!r} has been read so far"
        refused = next(iter(self._notes.values()), "no line looks like one")
        suggestion = advice(self.tail, name)
        if suggestion:
            self._say_once("advice", f"{lead}. {suggestion}")
            self.status.advice = self._mask.text(f"{lead}. {suggestion}")
            self._advise_at_s = math.inf
        else:
            self._say_once("no value", lead)
            self.status.advice = self._mask.text(f"{lead}: {refused}")

    def _set_preemptible(self, is_preemptible: bool, reason: str = "") -> None:
        """Say whether the script may be stopped; in its last lines it keeps its GPU."""
        if self._progress.is_in_last_lines:
            is_preemptible, reason = False, _LAST_LINES
        self.status.preemptible, self.status.preemptible_reason = is_preemptible, reason

    def _offer(self) -> None:
        """Offer a new checkpoint for upload."""
        written_s = self.status.checkpointed_s
        if self.copier is not None and written_s is not None:
            self.copier.offer(written_s, self.status.checkpoint_step, self.status.step_offset)

    def _read_events(self) -> None:
        for event in self._events.new():
            self._handle_event(event)

    def _handle_event(self, event: dict[str, Any]) -> None:
        """Take in one message from the code that runs inside the script."""
        handlers: dict[str, Callable[[dict[str, Any]], None]] = {
            "hook": self._on_hook,
            "report": self._on_report,
            "checkpoint": self._on_checkpoint,
            "restored": self._on_restored,
            "trained": self._on_trained,
            "bad_value": self._on_bad_value,
            "beyond": self._on_beyond,
            "import": self._on_import,
            "model": self._on_model,
            "mlflow": self._on_mlflow,
        }
        handler = handlers.get(str(event.get("kind")))
        if handler is not None:
            handler(event)

    def _on_hook(self, event: dict[str, Any]) -> None:
        self._has_hook = self.status.training = True
        self._trained_to_end = False
        self._reader.begin_training(again=bool(event.get("again")))
        reason = str(event.get("reason") or "")
        self._set_preemptible(bool(event.get("preemptible", True)), reason)
        if self.group is not None:
            self.group.watchdog.announce(time.monotonic())
        if self.on_training is not None:
            self.on_training()
        if event.get("startup_s") is not None:
            self._measured("startup_s", event["startup_s"])

    def _on_report(self, event: dict[str, Any]) -> None:
        self._reported.update(str(name) for name in event.get("names", ()))

    def _on_mlflow(self, event: dict[str, Any]) -> None:
        self._first_values.log([str(name) for name in event.get("names", ())])

    def _on_checkpoint(self, event: dict[str, Any]) -> None:
        self.status.checkpoint_step = int(event["step"])
        self.status.fits = int(event.get("fits") or 0)
        self.status.checkpointed_s = time.time()
        self._set_preemptible(True)
        self._measured("checkpoint_s", event["seconds"])
        self._offer()

    def _on_restored(self, event: dict[str, Any]) -> None:
        self._measured("restore_s", event["seconds"])

    def _measured(self, name: str, seconds: Any) -> None:  # noqa: ANN401 - from JSON
        self.status.timings[name] = self.timings[name] = float(seconds)

    def _on_model(self, event: dict[str, Any]) -> None:
        if event.get("tensor_skew") is not None:
            self.status.tensor_skew = float(event["tensor_skew"])

    def _on_trained(self, _: dict[str, Any]) -> None:
        self._trained_to_end = True
        if self.group is not None:
            self.group.watchdog.withdraw()

    def _on_import(self, event: dict[str, Any]) -> None:
        self.imports[str(event.get("name"))] = bool(event.get("ahead"))

    def _on_beyond(self, event: dict[str, Any]) -> None:
        self._progress.pass_end(int(event["step"]))

    def _on_bad_value(self, event: dict[str, Any]) -> None:
        if event.get("name") == self._options.objective:
            self._diverge(f"{event['name']} is {event['word']} at step {event['step']}")

    def write_status(self) -> None:
        """Write status.json if anything in it has changed; a full disk must not end the watch."""
        document = self.status.document()
        if document != self._written:
            with contextlib.suppress(OSError):
                write_json(self._folder.status, document)
                self._written = document

    # -- acting --------------------------------------------------------------------------------

    def _act(self, child: Child, running_s: float, limit_s: float | None) -> None:
        if self._parent and os.getppid() != self._parent:
            self._parent = 0
            self.stops.count += 1
        self._judge_time(running_s, limit_s)
        self._judge_group()
        ended = self._verdict is not None or self._ended_as_trained
        now_s = time.monotonic()
        if not self.stops.has_grace and (ended or self.stops.count):
            self._tail_at_stop = self.output.tail
            if not (ended or self._has_hook):
                saved_s = segment_records.newest_checkpoint_s(self._folder)
                self._switch_cost.note_stop(time.time(), saved_s)
            self._tell_to_stop(child, now_s, is_at_once=ended)
            self.stops.begin_grace(now_s, _FAILED_GRACE_S if ended else math.inf)
            self.stops.obey()
        if not self.stops.has_grace:
            return
        is_hurried = self.stops.is_hurried
        if self.group is not None and self.group.signal_late(now_s, is_hurried) and is_hurried:
            self.stops.obey()
            self.stops.end_grace_soon(now_s, _FAILED_GRACE_S)
            is_hurried = False
        if is_hurried or self.stops.is_grace_over(now_s):
            child.kill()

    def _tell_to_stop(self, child: Child, now_s: float, is_at_once: bool) -> None:
        """Send SIGTERM; where several workers can agree on the step after which all get it, ask."""
        group = self.group
        if group is not None:
            group.note_stop()
            if not is_at_once and group.ask_to_stop(now_s, self._options.grace_s):
                return
        child.stop()

    def _judge_time(self, running_s: float, limit_s: float | None) -> None:
        """End a script that is over its time: as failed, or as finished after its last epoch."""
        why_over = self._progress.why_over(time.monotonic())
        is_over_limit = limit_s is not None and running_s >= limit_s
        limit = f"time limit: {self._options.time_limit_s:g} s are over" if is_over_limit else ""
        if limit and not self._progress.is_complete:
            self._verdict = self._verdict or limit
        why_over = why_over or limit
        if why_over and self._verdict is None and not self.stops.count:
            self._ended_as_trained = True
            self._say_once("ended", f"the script is ended as finished: {why_over}")

    def _judge_group(self) -> None:
        """End workers that wait for each other for ever, as failed."""
        is_ending = self.stops.count or self._verdict is not None or self._ended_as_trained
        if self.group is None or is_ending or self._progress.is_in_last_lines:
            return
        self._verdict = self.group.why_stuck(self.status.step, time.monotonic())

    def _facts(self, code: int) -> SegmentFacts:
        group, at_stop = self.group, self._tail_at_stop
        at_stop = at_stop if group is None else group.tail_at_stop(at_stop)
        return SegmentFacts(
            exit_code=code,
            asked_to_stop=self.stops.count > 0 or code == PREEMPTED,
            ended_at_max_epochs=self._ended_as_trained,
            verdict=self._verdict,
            has_checkpoint=segment_records.newest_checkpoint_s(self._folder) is not None,
            objective=self._options.objective,
            objective_reported=self._objective_seen,
            trained_to_end=self._trained_to_end,
            tail=self.tail,
            unwritten=no_space(str(self._folder.metrics))
            if self.unwritten and self._is_full
            else "",
            diverged=self._diverged,
            direction=self._options.direction or os.environ.get("HERMES_DIRECTION"),
            reported=sorted(self._metrics.names()),
            tail_at_stop=at_stop,
            refused=list(self._notes.values()),
            worked_before=self.has_trained and not self._has_values,
        )
