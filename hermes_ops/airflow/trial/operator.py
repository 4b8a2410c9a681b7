"""The operator of a trial: admission, one segment, and how it ended.

A trial is one mapped task instance for its whole life. Each time Airflow gives it a slot it checks
that it holds a lease, runs one segment, and leaves: finished, failed, ended early, or rescheduled
(same try, same identity) to wait for its next lease. The task decides nothing; the controller
does, through the records of `records.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn

from airflow.sdk import BaseOperator, BaseOperatorLink
from airflow.sdk.exceptions import (
    AirflowFailException,
    AirflowRescheduleException,
    AirflowSkipException,
    TaskDeferred,
)

from hermes_ops.airflow.addresses import run_address
from hermes_ops.airflow.folders import TrialFolder
from hermes_ops.airflow.identity import sweep_of
from hermes_ops.airflow.pieces import read_record
from hermes_ops.airflow.records import (
    HELD_POOL_SLOTS,
    LEASE_KEY,
    SEGMENT_KEY,
    Lease,
    Segment,
    StopFlag,
    decode,
    is_active,
)
from hermes_ops.airflow.timing import configured_reschedule_delay_s
from hermes_ops.airflow.trial import ahead, kept_log
from hermes_ops.airflow.trial.connections import Connections
from hermes_ops.airflow.trial.links import RUN_XCOM, MlflowRunLink
from hermes_ops.airflow.trial.local import LocalSegment
from hermes_ops.airflow.trial.metrics import Ending, tracking_uri
from hermes_ops.airflow.trial.visit import Failed, Store, Visit
from hermes_ops.airflow.trial.watching import Running, if_airflow_answers, look_after
from hermes_ops.errors import HermesError
from hermes_ops.trial.outcome import FINISHED, INFRASTRUCTURE, PREEMPTED

INFRASTRUCTURE_RETRIES = 100
"""Tries that Airflow may spend on lost races and killed workers; failures are counted apart."""


def trial_defaults() -> dict[str, Any]:
    """Arguments that every trial's task needs; a mapped task gets them through `partial`.

    Its weight is its own, not its descendants', and it asks for more slots than there are until
    the controller grants it some.
    """
    return {
        "retries": INFRASTRUCTURE_RETRIES,
        "retry_delay": timedelta(seconds=1),
        "weight_rule": "absolute",
        "priority_weight": 1,
        "pool_slots": HELD_POOL_SLOTS,
    }


class HermesTrialMixin(ABC):
    """A trial's task but for the place where its segment runs: that is the subclass's."""

    number: int
    mlflow_conn_id: str | None = None
    storage_conn_id: str | None = None
    operator_extra_links: Collection[BaseOperatorLink] = (MlflowRunLink(),)
    run_link: str = ""  # the address of its run in MLflow, once this process has left it
    _segment: Running | None = None

    def admit(self, store: Store, segment: Segment | None) -> Lease:
        """The lease that this entry may use; leaves the task when there is none."""
        lease = decode(Lease, read_record(store.get, LEASE_KEY))
        if lease is None or not is_active(lease, segment):
            self.step_aside("no lease: the GPUs belong to other trials")
        return lease

    def begin_anew(self, folder: TrialFolder, lease: Lease, last: Segment | None) -> None:
        """Empty the folder of a trial that begins from scratch; aside while it is in use."""
        is_first = last is None or last.epoch < lease.anew
        if lease.anew and is_first and not folder.empty():
            self.step_aside("it begins from scratch once its last segment has left its folder")

    def leave(self, ending: Ending) -> dict[str, Any]:
        """End the task as the trial's final state demands."""
        if ending.state == "finished":
            return {"trial": self.number, "state": ending.state}
        if ending.state == "failed":
            raise AirflowFailException(f"trial {self.number} failed: {ending.reason}")
        raise AirflowSkipException(f"trial {self.number} {ending.state}: {ending.reason}")

    def step_aside(self, reason: str) -> NoReturn:
        """Give the slot back and wait, on the same try, for the next lease."""
        self.log.info("Trial %s waits: %s", self.number, reason)  # type: ignore[attr-defined]
        self.operator_extra_links = ()  # they stand; Airflow would write them once more now
        delay = timedelta(seconds=configured_reschedule_delay_s())
        raise AirflowRescheduleException(datetime.now(UTC) + delay)

    def conclude(
        self, visit: Visit, flag: StopFlag | None, code: int, trouble: str = ""
    ) -> dict[str, Any]:
        """Leave as the segment's exit code, its result and the stop flag demand."""
        result = visit.result()
        if code == FINISHED and result.get("outcome") == "finished":
            return self.end(visit, Ending("finished"))
        if flag is not None and flag.final is not None:
            return self.end(visit, Ending(flag.final, flag.reason))
        if code == PREEMPTED:
            visit.pause(str(result.get("outcome") or "preempted"))
            self.step_aside(f"stopped ({flag.reason if flag else 'its task was told to end'})")
        if code == INFRASTRUCTURE:
            visit.pause("infrastructure")
            why = result.get("reason") or trouble or "its folder or GPU was still in use"
            self.step_aside(str(why))
        known = [str(part) for part in (result.get("reason"), trouble) if part]
        reason = "; ".join(known) or f"its process ended with {code} and left no result"
        return self.fail(
            visit,
            Failed(
                reason,
                tuple(result.get("tail") or ()),
                str(result.get("cause") or ""),
                bool(result.get("retryable", True)),
            ),
        )

    def fail(self, visit: Visit, failure: Failed) -> dict[str, Any]:
        """Count a failure of the script: try again from its checkpoint, or end it."""
        failures, allowed = visit.record.failures + 1, visit.lease.max_failures
        counted = f"failure {failures}, {allowed} are allowed"
        self.log.error(  # type: ignore[attr-defined]
            "Trial %s failed (%s): %s\n%s",
            self.number,
            counted if failure.retryable else f"{counted}; it would fail again in the same way",
            failure.reason,
            "\n".join(failure.tail),
        )
        visit.pause("failed", failed=True, failure=failure)
        if failure.retryable and failures <= allowed:
            self.step_aside(f"it is tried again from its last checkpoint ({failure.reason})")
        first = visit.record.first_failure
        is_told = failures == 1 or first in (failure.kept, failure.kept[:1])
        words = "" if is_told else "\n".join(first)
        return self.end(visit, Ending("failed", failure.reason, failure.tail, words))

    def end(self, visit: Visit, ending: Ending) -> dict[str, Any]:
        """Write the final state down, then leave."""
        visit.end(ending)
        kept_log.forget(visit.folder)
        return self.leave(ending)

    @abstractmethod
    def segment(self, visit: Visit, sweep: str, context: Mapping[str, Any]) -> Running:
        """The segment of this visit, to be started; HermesError when there can be none."""

    def run_trial(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """Run one segment, or step aside; the trial's summary when it has finished."""
        store: Store = context["task_state_store"]
        sweep = sweep_of(self, context)
        folder = TrialFolder.of(sweep, self.number)
        last = decode(Segment, read_record(store.get, SEGMENT_KEY))
        if last is not None and last.final is not None:
            return self.leave(Ending(last.final, "it had ended before"))
        lease = self.admit(store, last)
        Connections(self.mlflow_conn_id, self.storage_conn_id).enter()
        self.begin_anew(folder, lease, last)
        visit = Visit.begin(store, lease, folder, last)
        try:
            if lease.pod is None and visit.result().get("outcome") == "finished":
                return self.end(visit, Ending("finished"))  # it ended while nobody looked
            return self._run(visit, sweep, context)
        finally:
            if self._segment is not None:
                self._segment.release()
            visit.feed.close()

    def on_kill(self) -> None:
        """Airflow ends the task: checkpoint the trial; `run_trial` then leaves in order."""
        if self._segment is not None:
            self._segment.stop()

    def resume(self, context: Mapping[str, Any], event: Mapping[str, Any]) -> dict[str, Any]:
        """Take up the task again whose pod the triggerer held: conclude what has not been."""
        store: Store = context["task_state_store"]
        lease = decode(Lease, read_record(store.get, LEASE_KEY))
        last = decode(Segment, read_record(store.get, SEGMENT_KEY))
        if lease is None or last is None or not last.running or last.epoch != event["epoch"]:
            return self.run_trial(context)
        Connections(self.mlflow_conn_id, self.storage_conn_id).enter()
        folder = TrialFolder.of(sweep_of(self, context), self.number)
        visit = Visit.after(store, lease, folder, last)
        return self.conclude(visit, visit.stop_flag(), event["code"], event["trouble"])

    def _hand_over(self, segment: Running, folder: TrialFolder) -> NoReturn:
        """Leave the segment to its holder, and this process."""
        self._segment = None
        for line in kept_log.taken(folder):
            self.log.info(line)  # type: ignore[attr-defined]
        raise TaskDeferred(trigger=segment.holder, method_name="resume")

    def _run(self, visit: Visit, sweep: str, context: Mapping[str, Any]) -> dict[str, Any]:
        ti = context["ti"]
        try:
            segment = self.segment(visit, sweep, context)
            segment.start()
        except HermesError as error:
            return self.fail(visit, Failed(str(error)))
        self._segment = segment
        say = self.log.info  # type: ignore[attr-defined]
        if_airflow_answers(visit.opened, say)  # else written with the trial's next status
        lease = visit.lease
        self.run_link = run_address(tracking_uri(), lease.experiment_id, lease.run_id)
        if_airflow_answers(lambda: ti.xcom_push(RUN_XCOM, self.run_link), say)
        flag, code = look_after(segment, visit, say)
        if code is None:
            self._hand_over(segment, visit.folder)
        segment.finish()
        return self.conclude(visit, flag, code, segment.trouble)


class HermesTrialOperator(HermesTrialMixin, BaseOperator):
    """Runs a trial's segments as processes of this worker, or as pods where the sweep says so.

    :param number: the trial's number in its sweep, from 0
    :param pool: the Airflow pool whose slots are the GPUs
    :param mlflow_conn_id: the connection that leads to MLflow, in the place of its variables
    :param storage_conn_id: the connection whose access to storage the script gets
    """

    def __init__(
        self,
        *,
        number: int,
        mlflow_conn_id: str | None = None,
        storage_conn_id: str | None = None,
        **kwargs: Any,  # noqa: ANN401 - Airflow's own
    ) -> None:
        super().__init__(**{**trial_defaults(), **kwargs})
        self._ready: LocalSegment | None = None
        self.number = number
        self.mlflow_conn_id = mlflow_conn_id
        self.storage_conn_id = storage_conn_id

    def execute(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """Run one segment, or step aside; the trial's summary when it has finished."""
        self._ready = ahead.taken()  # it ends unless it is what is to run
        try:
            return self.run_trial(context)
        finally:
            if self._ready is not None:
                self._ready.finish()

    def segment(self, visit: Visit, sweep: str, context: Mapping[str, Any]) -> Running:
        """The segment of this visit: a process, or a pod where its lease says so."""
        if visit.lease.pod is not None:
            from hermes_ops.airflow.trial.pods import HermesPodTrialOperator

            pod = HermesPodTrialOperator(
                task_id=self.task_id,
                number=self.number,
                pool=self.pool,
                mlflow_conn_id=self.mlflow_conn_id,
            )
            return pod.segment(visit, sweep, context)
        own = LocalSegment(
            visit.lease, visit.folder, sweep, self.number, str(self.pool), self.log.info
        )
        ready = self._ready
        if ready is None:
            return own
        if ready.stands_for(own) and not (self.mlflow_conn_id or self.storage_conn_id):
            ready.emit = own.emit
            return ready
        ready.finish()  # made for another lease, or without the variables of the connections
        return own
