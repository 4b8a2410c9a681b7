"""Turns decisions into leases, ranks and stop flags, and settles what needs no policy.

The order of one application, as measured on Airflow 3.3.2: the victim's stop flag, because
leaving its slot takes it longest; the lease of the trial that is to run; then the ranks, in one
transaction under the scheduler's lock. A controller that is killed in between costs the time until
the next one grants the free slot, never a slot too many. A trial that waits without a lease asks
for more slots than any pool has, so Airflow passes it over; a trial that comes in without one all
the same is sent away by its operator.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

from hermes_ops.airflow.client import AirflowClient, TaskKey, run_page
from hermes_ops.airflow.control.books import Book, find
from hermes_ops.airflow.control.clearing import Clearing, Wish, is_cleared, wish_of
from hermes_ops.airflow.control.closing import due_end
from hermes_ops.airflow.control.decisions import DecisionLog, action_name, decision
from hermes_ops.airflow.control.deferred import settled
from hermes_ops.airflow.control.granting import Granting, opened
from hermes_ops.airflow.control.hands import Hands, answers
from hermes_ops.airflow.control.monitoring import Monitor
from hermes_ops.airflow.control.pool import FINAL_STATES, Trial, job_id
from hermes_ops.airflow.control.ranks import WAITING_WEIGHT, rank_of
from hermes_ops.airflow.metadata import OCCUPYING, Metadata, Rank
from hermes_ops.airflow.records import (
    AIRFLOW_TAG,
    CLOSE_KEY,
    HELD_POOL_SLOTS,
    LEASE_KEY,
    OUTCOMES,
    SEGMENT_KEY,
    STOP_KEY,
    SWEEP_KEY,
    CloseRecord,
    Lease,
    Segment,
    StopFlag,
    encode,
)
from hermes_ops.airflow.trial.beside import offer, tell
from hermes_ops.airflow.trial.metrics import Ending, finish_run
from hermes_ops.core.model import Action, JobId, Phase, Snapshot, Start, Stop
from hermes_ops.core.model import Plan as Allocation
from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.tracking import Tracker

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Applier:
    """Writes to Airflow and MLflow what was decided; every step may be repeated."""

    client: AirflowClient
    metadata: Metadata
    tracker: Tracker
    decisions: DecisionLog
    policy_name: str
    options: Mapping[str, Any]
    monitor: Monitor = field(default_factory=Monitor)
    hands: Hands = field(default_factory=Hands)
    _tagged: dict[tuple[str, str], str] = field(default_factory=dict)
    _granting: Granting = field(init=False)

    def __post_init__(self) -> None:
        self._granting = Granting(self.tracker, self.hands, self._tags)

    def apply(
        self,
        books: Mapping[str, Book],
        snapshot: Snapshot,
        plan: Allocation,
        actions: Sequence[Action],
        ages_s: Mapping[str, float | None],
    ) -> None:
        """Carry out the actions of one plan, then correct every rank that differs from it."""
        for book in books.values():
            self._tag(book, "hermes.pool_slots", str(len(snapshot.gpus)))
            self._tag(book, "hermes.policy", self.policy_name)
            run = book.plan.run
            page = run_page(run.dag_id, run.run_id)
            self._tag(book, AIRFLOW_TAG, f"{self.client.credentials.url}/{page}")
        taken = [a for a in actions if not isinstance(a, Start)]
        self._record(snapshot, taken, ages_s)
        taking = [
            self.hands.begin(self._take_back, *find(books, a.job), a, snapshot.time_s)
            for a in taken
        ]
        starts = {a.job: a for a in actions if isinstance(a, Start)}
        asked: Mapping[JobId, Future[Lease]] = {}
        leases: dict[JobId, Lease] = {}
        told: list[Future[None]] = []
        try:
            asked = self._granting.ask(books, starts.values(), snapshot)
            revoked = {job for job in answers(taking) if job is not None}
            for job, lease in opened(asked):  # each as soon as its run is there
                leases[job] = lease
                self._record(snapshot, [starts[job]], ages_s)
                told.append(self.hands.begin(self._grant, *find(books, job), lease))
            ranks = self._ranks(books, plan, leases, revoked)
        finally:
            begun: tuple[Future[Any], ...] = (*taking, *asked.values(), *told)
            wait(begun)
        answers(told)
        self.metadata.rerank(ranks)

    def _take_back(self, book: Book, trial: Trial, action: Action, now_s: float) -> JobId | None:
        """Tell a trial to leave its GPUs; its id if its lease had not begun and so is revoked."""
        if isinstance(action, Stop) and action.final:
            end = CloseRecord(action.reason.text, "stopped_early", now_s)
            self._end(book, (trial,), end, now_s)
        elif trial.phase is Phase.STARTING:
            self._revoke(book, trial)
        else:
            self._stop(book, trial, action.reason.text, now_s, None)
        return action.job if trial.phase is Phase.STARTING else None

    def complete(self, *, whole: bool = False) -> None:
        """Do what nobody waits for of the leases that were granted; `whole`: all of it."""
        self._granting.complete(whole=whole)

    def settle(self, book: Book, now_s: float) -> None:
        """Close a sweep whose budget is spent, end its trials, mend what was left."""
        self._mend(book, now_s)
        settled = (self._settled(book, t) for t in book.trials)
        book.trials = tuple(self._attended(book, t, now_s) for t in settled)
        if book.close is None and (spent := due_end(book, now_s)) is not None:
            self._put(book, None, CLOSE_KEY, encode(spent))
            log.info("Sweep %s ends: %s", book.sweep, spent.reason)
            book.close = spent
        if book.close is not None:
            self._tag(book, book.close.tag, book.close.reason)
            self._end(book, book.trials, book.close, now_s)

    def forget(self, sweep: str) -> None:
        """Take nothing as known of a sweep that has ended: it may go on."""
        for tagged in [key for key in self._tagged if key[0] == sweep]:
            del self._tagged[tagged]
        self._granting.forget(sweep)

    def stop_all(self, books: Iterable[Book], now_s: float) -> None:
        """Stop every segment with its checkpoint and take back what has not begun."""
        for book in books:
            for trial in book.trials:
                if trial.phase is Phase.STARTING:
                    self._revoke(book, trial)
                elif trial.phase is Phase.RUNNING:
                    self._stop(book, trial, "Hermes Ops is being shut down", now_s, None)

    def _end(self, book: Book, trials: Sequence[Trial], close: CloseRecord, now_s: float) -> None:
        """End trials for good: live ones by their flag, the others here."""
        idle = [t for t in trials if self._put_to_rest(book, t, close, now_s)]
        for trial in idle:  # first its record, so that whoever comes next knows what it became
            self._finish(book, trial, close.state, close.reason, now_s)
        if idle:
            self.client.skip(self._task(book, t) for t in idle)

    def _put_to_rest(self, book: Book, trial: Trial, close: CloseRecord, now_s: float) -> bool:
        """True when no task of the trial is alive, so that its state may be written here."""
        if trial.ended:
            return False
        if trial.under_way:
            self._stop(book, trial, close.reason, now_s, close.state)
            return False
        if trial.active:
            if not trial.left:  # else its task has still to say how it ended
                self._revoke(book, trial)
            return False
        return trial.row.state not in OCCUPYING

    def _mend(self, book: Book, now_s: float) -> None:
        """Settle what went its own way.

        A task that ended without saying so (marked, retries out) gives its trial a final state; a
        trial that was ended here gets its task skipped, should that not have come about; a segment
        that began while its lease was being taken back is stopped.
        """
        touched = book.plan.record.touched
        waiting = (t for t in book.trials if t.awaits_skip and t.number not in touched)
        if unskipped := [t for t in waiting if not is_cleared(t)]:
            self.client.skip(self._task(book, t) for t in unskipped)
        if touched and book.whole:
            self._give_back(book, touched)
        for trial in book.trials:
            if trial.under_way and not trial.active and not trial.told:
                self._stop(book, trial, "its lease was taken back", now_s, None)
            if book.plan.run.paused and trial.phase is Phase.STARTING:
                self._revoke(book, trial)  # its GPUs would wait for Airflow with it
            said = trial.segment is not None and trial.segment.final is not None
            if trial.row.state in FINAL_STATES and trial.lease is not None and not said:
                state = OUTCOMES.get(trial.row.state or "", "failed")
                self._finish(book, trial, state, f"its task is {trial.row.state}", now_s)

    def _give_back(self, book: Book, touched: Sequence[int]) -> None:
        """The sweep has its new trials: those cleared for that are what they were before."""
        for trial in (t for t in book.trials if t.number in touched and t.idle):
            self.client.mark([self._task(book, trial)], trial.task_state)
        record = replace(book.plan.record, touched=())
        self._put(book, None, SWEEP_KEY, encode(record))

    def _settled(self, book: Book, trial: Trial) -> Trial:
        """The trial once its segment is closed, if it was preempted and its task waits."""
        if not trial.left or (segment := settled(trial, book.folder(trial))) is None:
            return trial
        self._put(book, trial, SEGMENT_KEY, encode(segment))
        return replace(trial, segment=segment, left="")

    def _attended(self, book: Book, trial: Trial, now_s: float) -> Trial:
        """Do what a person asks of a trial by clearing its task or by its note; the trial then."""
        if trial.number in book.plan.record.touched:
            return trial
        wish = wish_of(trial, closing=book.close is not None)
        if wish is Wish.STOP:
            self._stop(book, trial, "it is to begin from scratch", now_s, None)
        elif wish is Wish.STAY_ENDED:
            self.client.mark([self._task(book, trial)], trial.task_state)
        elif wish is not Wish.NOTHING:
            outside = Clearing(self.client, self.tracker, self._task(book, trial), book.plan.ref)
            try:
                if wish is Wish.GO_ON:
                    return outside.go_on(trial)
                self.metadata.rerank([Rank(trial.row.id, WAITING_WEIGHT, HELD_POOL_SLOTS)])
                return outside.begin_anew(trial, self._tags(book, trial), now_s)
            except HermesError as error:
                log.warning("Trial %s of %s is cleared later: %s", trial.number, book.sweep, error)
        return trial

    def _finish(self, book: Book, trial: Trial, state: str, reason: str, now_s: float) -> None:
        lease = trial.lease
        if lease is None:
            return
        record = trial.segment or Segment(epoch=lease.epoch, running=False, started_s=now_s)
        record = replace(record, running=False, final=state, task=trial.row.id, reason=reason,
                         ended_s=record.ended_s or now_s)  # fmt: skip
        self._put(book, trial, SEGMENT_KEY, encode(record))
        try:
            finish_run(self.tracker, lease.run_id, Ending(state, reason), record)
        except HermesError as error:
            log.warning("The report task will close the run %s: %s", lease.run_id, error)

    def _tag(self, book: Book, name: str, value: str) -> None:
        """Set a tag of the sweep's run, once for each value."""
        if self._tagged.get((book.sweep, name)) == value:
            return
        try:
            self.tracker.set_tags(book.plan.record.parent_run_id, {name: value})
            self._tagged[book.sweep, name] = value
        except Unavailable as error:
            log.warning("MLflow is away; the tag %s is set later: %s", name, error)
        except HermesError as error:  # its run was deleted, for instance: no reason to stop others
            log.warning("MLflow refuses the tag %s of %s: %s", name, book.sweep, error)
            self._tagged[book.sweep, name] = value

    def _tags(self, book: Book, trial: Trial) -> dict[str, str]:
        run = book.plan.run
        page = f"{run_page(run.dag_id, run.run_id)}/tasks/{book.plan.record.trial_task}"
        return {
            "hermes.sampler": book.plan.config.search.algorithm.value,
            "hermes.policy": self.policy_name,
            AIRFLOW_TAG: f"{self.client.credentials.url}/{page}/mapped/{trial.number}",
        }

    def _stop(self, book: Book, trial: Trial, reason: str, now_s: float, final: str | None) -> None:
        lease, flag = trial.lease, trial.stop
        if lease is None or not trial.under_way:
            return
        if flag is not None and flag.epoch == lease.epoch and flag.final == final:
            return
        flag, folder = StopFlag(lease.epoch, reason, now_s, final), book.folder(trial)
        told = tell(folder, flag, needed=trial.row.state == "deferred")
        if told:  # on this machine the trial need not wait for Airflow's record
            folder.nudge().give()
        self._put(book, trial, STOP_KEY, encode(flag))
        if not told:
            folder.nudge().give()

    def _grant(self, book: Book, trial: Trial, lease: Lease) -> None:
        self._put(book, trial, LEASE_KEY, encode(lease))
        if lease.pod is None:
            offer(book.folder(trial), lease)

    def _revoke(self, book: Book, trial: Trial) -> None:
        """Take back a lease that has not begun: first out of the scheduler's reach."""
        if trial.lease is None:
            return
        self.metadata.rerank([Rank(trial.row.id, WAITING_WEIGHT, HELD_POOL_SLOTS)])
        self._put(book, trial, LEASE_KEY, encode(replace(trial.lease, revoked=True)))

    def _ranks(
        self,
        books: Mapping[str, Book],
        plan: Allocation,
        leases: Mapping[JobId, Lease],
        revoked: set[JobId],
    ) -> list[Rank]:
        """What is to be changed of the ranks once the leases stand."""
        order = {job: i for i, job in enumerate(plan.ranking)}
        changes: list[Rank] = []
        for book in books.values():
            for trial in book.trials:
                if trial.phase is Phase.ENDED:
                    continue
                job = job_id(book.sweep, trial.number)
                lease = leases.get(job) or (
                    trial.lease if trial.active and job not in revoked else None
                )
                if (rank := rank_of(trial, lease, order.get(job))) is not None:
                    changes.append(rank)
        return changes

    def _record(
        self, snapshot: Snapshot, actions: Sequence[Action], ages_s: Mapping[str, float | None]
    ) -> None:
        self.monitor.decided(snapshot, actions)
        self.decisions.append(
            decision(
                a.job,
                action_name(a),
                () if isinstance(a, Stop) else a.gpus,
                a.reason,
                time_s=snapshot.time_s,
                policy=self.policy_name,
                options=self.options,
                curve_age_s=ages_s.get(a.job.rpartition("/")[0]),
            )
            for a in actions
        )

    def _task(self, book: Book, trial: Trial | None) -> TaskKey:
        run = book.plan.run
        if trial is None:
            return TaskKey(run.dag_id, run.run_id, run.plan_task)
        return TaskKey(run.dag_id, run.run_id, book.plan.record.trial_task, trial.number)

    def _put(self, book: Book, trial: Trial | None, key: str, value: object) -> None:
        self.client.put_state(self._task(book, trial), key, value)
