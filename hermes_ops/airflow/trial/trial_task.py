"""A trial's task: admission, one segment, and how it ended.

A trial is one mapped task instance for its whole life. Each time Airflow gives it a slot it checks
that it holds a lease, runs one segment, and leaves: finished, failed, ended early, or rescheduled
(same try, same identity) to wait for its next lease. A segment that was stopped for another size is
followed by the next one in the same run of the task, if its lease comes soon. The task decides
nothing; the controller does, through the records of `records.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn, Protocol

from airflow.sdk import BaseOperatorLink
from airflow.sdk.exceptions import (
    AirflowFailException,
    AirflowRescheduleException,
    AirflowSkipException,
    TaskDeferred,
)

from hermes_ops.airflow.folders import TrialFolder, controller_wake_file
from hermes_ops.airflow.hosts import WRONG_HOST, Host
from hermes_ops.airflow.identity import sweep_of
from hermes_ops.airflow.machines import mismatch, note_sweep
from hermes_ops.airflow.records import (
    HELD_POOL_SLOTS,
    LEASE_KEY,
    SEGMENT_KEY,
    Lease,
    SegmentRecord,
    StopFlag,
    decode,
    encode,
    is_active,
)
from hermes_ops.airflow.state_store import LastingStore, TaskStore, read_record
from hermes_ops.airflow.trial.connections import EXPRESSION, Connections, rendered_variables
from hermes_ops.airflow.trial.links import RUN_XCOM, run_address
from hermes_ops.airflow.trial.metrics import TrialOutcome, tracking_uri
from hermes_ops.airflow.trial.running_segment import (
    FLAG_PERIOD_S,
    REMOTE_FLAG_PERIOD_S,
    RunningSegment,
    await_lease,
    delete_log_copies,
    if_airflow_answers,
    pop_log_copies,
    watch_segment,
)
from hermes_ops.airflow.trial.segment_run import SegmentFailure, SegmentRun
from hermes_ops.airflow.trial_log import log_segment_start
from hermes_ops.core.summary import INCOMPLETE
from hermes_ops.errors import HermesError, NotAllowed, Problem
from hermes_ops.trial.disk_space import write_remedy
from hermes_ops.trial.failure import Cause
from hermes_ops.trial.outcome import FINISHED, INFRASTRUCTURE, PREEMPTED


def reschedule_delay_s(min_heartbeat_interval_s: float) -> float:
    """Return the seconds that a preempted task waits before Airflow may schedule it again.

    Never zero: the executor's "success" event of the old run may arrive late, and if the task is
    SCHEDULED again by then, Airflow takes it as a mismatch and fails the task, which costs a try.
    Measured with LocalExecutor: no failure at 5 s with a heartbeat of 1 s, none at 12 s with one of
    5 s, some at 5 s with one of 5 s. On two cores with three stacks at once a process took 4.4 s to
    end after its report, and one of 47 tasks was taken so at 5 s.
    """
    return max(8.0, 2.0 * min_heartbeat_interval_s + 2.0)


def configured_reschedule_delay_s() -> float:
    """Return `reschedule_delay_s` for this Airflow's settings."""
    from airflow.sdk.configuration import conf

    return reschedule_delay_s(conf.getfloat("workers", "min_heartbeat_interval", fallback=5.0))


INFRASTRUCTURE_RETRIES = 100
"""Tries that Airflow may spend on lost races and killed workers; failures are counted apart."""


def trial_defaults() -> dict[str, Any]:
    """Return the arguments that every trial's task needs; a mapped task gets them by `partial`.

    The task's weight excludes its descendants. The task asks for more slots than there are until
    the controller grants it some. A failed trial is a result: those of the next run do not wait.
    """
    return {
        "retries": INFRASTRUCTURE_RETRIES,
        "retry_delay": timedelta(seconds=1),
        "retry_exponential_backoff": 0,
        "max_retry_delay": None,
        "retry_policy": None,
        "depends_on_past": False,
        "wait_for_downstream": False,
        "max_active_tis_per_dag": None,
        "max_active_tis_per_dagrun": None,
        "weight_rule": "absolute",
        "priority_weight": 1,
        "pool_slots": HELD_POOL_SLOTS,
    }


class TrialOperator(Protocol):
    """The operator that Airflow runs for a trial; it decides where a segment runs.

    `connection_templates` are the templates of connections in the DAG's file. Only the file may
    name them, as users who may edit the task can write its lease. `run_link` is the address of the
    trial's run in MLflow, once this process has pushed it. `resume` is the method that Airflow
    calls when a deferred task goes on.
    """

    number: int
    mlflow_conn_id: str | None
    storage_conn_id: str | None
    connection_templates: Collection[str]
    operator_extra_links: Collection[BaseOperatorLink]
    run_link: str

    @property
    def log(self) -> Any:  # noqa: ANN401 - Airflow's own
        """The task's log."""

    def segment(
        self, segment_run: SegmentRun, sweep: str, context: Mapping[str, Any]
    ) -> RunningSegment:
        """Return the segment to be started; HermesError when there can be none."""

    def render_template(self, content: Any, context: Any) -> Any:  # noqa: ANN401 - Airflow's own
        """Render an Airflow template."""

    def resume(self, context: Mapping[str, Any], event: Mapping[str, Any]) -> dict[str, Any]:
        """Go on after the deferral."""


@dataclass(slots=True)
class TrialTask:
    """One run of a trial's task, wherever its operator runs the segment."""

    operator: TrialOperator
    _segment: RunningSegment | None = None
    _is_told_to_end: bool = False

    @property
    def number(self) -> int:
        """The trial's number in its sweep."""
        return self.operator.number

    def run(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """Run one segment, with resizes several; reschedule, or return the summary at the end."""
        store = LastingStore(context["task_state_store"])
        sweep = sweep_of(self.operator, context)
        folder = TrialFolder.from_sweep(sweep, self.number)
        last = decode(SegmentRecord, read_record(store.get, SEGMENT_KEY))
        if last is not None and last.final is not None:
            return self.exit_task(TrialOutcome(last.final, "it had ended before"))
        lease = self.admit(store, last)
        self.check_host(store, lease, last)
        if lease.machine:
            note_sweep(sweep)
        self._enter_connections()
        self.restart_from_scratch(folder, lease, last)
        segment_run = SegmentRun.from_lease(store, lease, folder, last)
        try:
            if lease.pod is None and segment_run.result().get("outcome") == "finished":
                return self.end(segment_run, TrialOutcome("finished"))  # an unseen result
            while (summary := self._run_segment(segment_run, sweep, context)) is None:
                segment_run = self._resized(segment_run)
            return summary
        finally:
            if self._segment is not None:
                self._segment.release()
            segment_run.feed.close()

    def resume(self, context: Mapping[str, Any], event: Mapping[str, Any]) -> dict[str, Any]:
        """Go on after the triggerer held the pod: finish the segment if nobody has done so."""
        store = LastingStore(context["task_state_store"])
        lease = decode(Lease, read_record(store.get, LEASE_KEY))
        last = decode(SegmentRecord, read_record(store.get, SEGMENT_KEY))
        if lease is None or last is None or not last.running or last.epoch != event["epoch"]:
            return self.run(context)
        if event.get("host"):
            self.leave_host(store, last, event["trouble"], event["host"])
        self._enter_connections()
        folder = TrialFolder.from_sweep(sweep_of(self.operator, context), self.number)
        segment_run = SegmentRun.from_ended(store, lease, folder, last)
        return self.finish_segment(
            segment_run, segment_run.stop_flag(), event["code"], event["trouble"]
        )

    def stop(self) -> None:
        """Have the trial write a checkpoint and exit; `run` then leaves in order."""
        self._is_told_to_end = True
        if self._segment is not None:
            self._segment.stop()

    def admit(self, store: TaskStore, segment: SegmentRecord | None) -> Lease:
        """Return the lease that this run may use; reschedule when there is none."""
        lease = decode(Lease, read_record(store.get, LEASE_KEY))
        if lease is None or not is_active(lease, segment):
            self.reschedule("no lease: the GPUs belong to other trials")
        return lease

    def restart_from_scratch(
        self, folder: TrialFolder, lease: Lease, last: SegmentRecord | None
    ) -> None:
        """Empty the folder of a trial that begins from scratch; reschedule while it is in use."""
        is_first = last is None or last.epoch < lease.anew
        # It may have begun from scratch elsewhere, and left an old folder here; or the lease with
        # which it was to begin was for another host, so that no process has seen it.
        if lease.machine or (last is not None and last.outcome == WRONG_HOST):
            epochs = [s["epoch"] for s in folder.segments() if isinstance(s.get("epoch"), int)]
            is_first = is_first or max(epochs, default=0) < lease.anew
        if lease.anew and is_first and not folder.empty():
            self.reschedule("it begins from scratch once its last segment has left its folder")

    def check_host(self, store: TaskStore, lease: Lease, last: SegmentRecord | None) -> None:
        """Reschedule where the lease is not for this machine and its state folder.

        The controller may have moved since the grant; it decides on the trial.
        """
        here = Host.here()
        if lease.machine:
            reason = mismatch(lease, os.environ)
        else:
            reason = here.mismatch(lease.host, lease.host_name, is_pod=lease.pod is not None)
        if reason:
            before = last or SegmentRecord(0, running=False, started_s=time.time(), segments=0)
            self.leave_host(store, replace(before, epoch=lease.epoch), reason, here.id)

    def leave_host(
        self, store: TaskStore, before: SegmentRecord, reason: str, host: str
    ) -> NoReturn:
        """Record for the controller that the lease is not for that host, and reschedule."""
        record = replace(before, running=False, ended_s=time.time(),
                         outcome=WRONG_HOST, reason=reason, host=host)  # fmt: skip
        store.set(SEGMENT_KEY, encode(record))
        controller_wake_file().wake()
        self.operator.log.error("Trial %s is not started: %s.", self.number, reason)
        self.reschedule("the controller decides on the trial")

    def exit_task(self, outcome: TrialOutcome) -> dict[str, Any]:
        """End the task as the trial's final state demands."""
        if outcome.state == "finished":
            return {"trial": self.number, "state": outcome.state}
        if outcome.state == "failed":
            raise AirflowFailException(f"trial {self.number} failed: {outcome.reason}")
        raise AirflowSkipException(f"trial {self.number} {outcome.state}: {outcome.reason}")

    def reschedule(self, reason: str) -> NoReturn:
        """Give the slot back and wait, on the same try, for the next lease."""
        self.operator.log.info("Trial %s waits: %s", self.number, reason)
        self.operator.operator_extra_links = ()  # Airflow has them, and would write them again now
        delay = timedelta(seconds=configured_reschedule_delay_s())
        raise AirflowRescheduleException(datetime.now(UTC) + delay)

    def finish_segment(
        self, segment_run: SegmentRun, flag: StopFlag | None, code: int, trouble: str = ""
    ) -> dict[str, Any]:
        """Leave as the segment's exit code, its result and the stop flag demand."""
        result = segment_run.result()
        if code == FINISHED and result.get("outcome") == "finished":
            return self.end(segment_run, TrialOutcome("finished"))
        if flag is not None and flag.final is not None:
            return self.end(segment_run, TrialOutcome(flag.final, flag.reason))
        if code == PREEMPTED:
            segment_run.pause(str(result.get("outcome") or "preempted"))
            reason = flag.reason if flag else trouble or "its task was told to end"
            self.reschedule(f"stopped ({reason})")
        if code in (INFRASTRUCTURE, INCOMPLETE):
            why = str(result.get("reason") or trouble or "its folder or GPU was still in use")
            segment_run.interrupt(why, incomplete=code == INCOMPLETE)
            self.reschedule(why)
        reported = [str(part) for part in (result.get("reason"), trouble) if part]
        reason = "; ".join(reported) or f"its process ended with {code} and left no result"
        failure = SegmentFailure(
            reason,
            tuple(result.get("tail") or ()),
            str(result.get("cause") or ""),
            bool(result.get("retryable", True)),
        )
        if failure.cause == Cause.NO_SPACE.value and segment_run.may_wait_for_space():
            segment_run.interrupt(reason, without_space=True)
            self.reschedule(f"its disk is full, which does not count as a failure: {reason}")
        return self.fail(segment_run, failure)

    def fail(self, segment_run: SegmentRun, failure: SegmentFailure) -> dict[str, Any]:
        """Count a failure of the script: try again from its checkpoint, or end the trial."""
        failures, allowed = segment_run.record.failures + 1, segment_run.lease.max_failures
        counted = f"failure {failures}, {allowed} are allowed"
        self.operator.log.error(
            "Trial %s failed (%s): %s\n%s",
            self.number,
            counted if failure.retryable else f"{counted}; it would fail again in the same way",
            failure.reason,
            "\n".join(failure.tail),
        )
        if failure.retryable and failures <= allowed:
            segment_run.pause("failed", failed=True, failure=failure)
            self.reschedule(f"it is tried again from its last checkpoint ({failure.reason})")
        first = segment_run.record.first_failure
        is_reported = failures == 1 or first in (failure.kept, failure.kept[:1])
        first_failure = "" if is_reported else "\n".join(first)
        outcome = TrialOutcome("failed", failure.reason, failure.tail, first_failure)
        return self.end(segment_run, outcome, failure)

    def end(
        self, segment_run: SegmentRun, outcome: TrialOutcome, failure: SegmentFailure | None = None
    ) -> dict[str, Any]:
        """Write the final state, then leave."""
        segment_run.end(outcome, failure)
        delete_log_copies(segment_run.folder)
        return self.exit_task(outcome)

    def _enter_connections(self) -> None:
        Connections(self.operator.mlflow_conn_id, self.operator.storage_conn_id).enter()

    def _resized(self, ended: SegmentRun) -> SegmentRun:
        """Keep the slots until the next lease, and return its run; reschedule if none comes."""
        say = self.operator.log.info
        say("Trial %s keeps its slots until it has its next GPUs", self.number)
        answer = await_lease(ended, say, lambda: self._is_told_to_end)
        if isinstance(answer, StopFlag) and answer.final is not None:
            self.end(ended, TrialOutcome(answer.final, answer.reason))
        if not isinstance(answer, Lease):
            ended.give_up_resize()
        if answer is None and not self._is_told_to_end:
            answer = ended.next_lease()  # a grant that came with the last moment
        if not isinstance(answer, Lease):
            self.reschedule("its next GPUs are not free yet" if answer is None else answer.reason)
        self.check_host(ended.store, answer, ended.record)
        return SegmentRun.from_lease(
            ended.store, answer, ended.folder, ended.record, feed=ended.feed
        )

    def _run_segment(
        self, segment_run: SegmentRun, sweep: str, context: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Run one segment; return None if the task keeps its slots for the next one."""
        ti = context["ti"]
        try:
            rendered = self._render_variables(segment_run, context)
            segment_run.record_batch()
            segment = self.operator.segment(rendered, sweep, context)
            self._log_start(segment_run)
            segment.start()
        except NotAllowed as error:
            return self.fail(segment_run, SegmentFailure(str(error), retryable=False))
        except HermesError as error:
            return self.fail(segment_run, SegmentFailure(str(error)))
        except OSError as error:  # of the trial's folder: the script is not at fault
            why = f"its folder cannot be written ({error}): {write_remedy(error)}"
            segment_run.interrupt(why)
            self.reschedule(why)
        self._segment = segment
        if self._is_told_to_end:  # before there was a segment to stop
            segment.stop()
        say = self.operator.log.info
        if_airflow_answers(segment_run.opened, say)  # else written with the trial's next status
        lease = segment_run.lease
        link = run_address(tracking_uri(), lease.experiment_id, lease.run_id)
        self.operator.run_link = link
        if_airflow_answers(lambda: ti.xcom_push(RUN_XCOM, link), say)
        period_s = REMOTE_FLAG_PERIOD_S if lease.machine else FLAG_PERIOD_S
        flag, code = watch_segment(segment, segment_run, say, flag_period_s=period_s)
        if code is None:
            self._defer(segment, segment_run)
        segment.finish()
        segment_run.ran_s = segment.ran_s
        if code == PREEMPTED and not segment.trouble and self._may_keep_slots(segment_run, flag):
            outcome = segment_run.result().get("outcome") or "preempted"
            segment_run.pause(str(outcome), resizing=True)
            return None
        return self.finish_segment(segment_run, flag, code, segment.trouble)

    def _log_start(self, segment_run: SegmentRun) -> None:
        """Log the copied lines of earlier segments, then that this segment begins."""
        for line in pop_log_copies(segment_run.folder):
            self.operator.log.info(line)
        lease = segment_run.lease
        number = segment_run.record.segments
        log_segment_start(self.operator.log, number, lease.epoch, lease.gpus)

    def _may_keep_slots(self, segment_run: SegmentRun, flag: StopFlag | None) -> bool:
        """Return whether the segment was stopped for another size, and for nothing else."""
        if flag is None or flag.final is not None or self._is_told_to_end:
            return False
        return flag.resize and segment_run.lease.pod is None

    def _defer(self, segment: RunningSegment, segment_run: SegmentRun) -> NoReturn:
        """Leave the segment to its trigger, and this process."""
        self._segment = None
        segment_run.record_start()
        raise TaskDeferred(trigger=segment.holder, method_name="resume")

    def _render_variables(self, segment_run: SegmentRun, context: Mapping[str, Any]) -> SegmentRun:
        """Return the run with the variables that come from connections, for this process alone."""
        lease = segment_run.lease
        if not lease.templated:
            return segment_run
        values = (lease.environment.get(name, "") for name in lease.templated)
        named = {text for value in values for text in EXPRESSION.findall(value)}
        if not named <= set(self.operator.connection_templates):
            problem = Problem(
                "trial.environment",
                f"{', '.join(lease.templated)} from connections",
                "connections that the DAG's own file names",
                "write the template into the sweep in the DAG's file",
            )
            raise NotAllowed("the trial's lease", (problem,))

        def render(text: str) -> str:
            return str(self.operator.render_template(text, context))

        variables = rendered_variables(lease.environment, lease.templated, render)
        return replace(segment_run, lease=replace(lease, environment=variables))
