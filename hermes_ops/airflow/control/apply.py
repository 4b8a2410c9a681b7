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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

from hermes_ops.airflow.client import AirflowClient, TaskKey, run_page
from hermes_ops.airflow.control.books import Book, find, find_sweep
from hermes_ops.airflow.control.clearing import Clearing, Wish, is_cleared, wish_of
from hermes_ops.airflow.control.closing import FIRST_FAILURES, due_end
from hermes_ops.airflow.control.decisions import Decision, DecisionLog, action_name, decision
from hermes_ops.airflow.control.deferred import settled
from hermes_ops.airflow.control.faults import GRANT, Done, Fault, FaultBarrier, Subject
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

P = ParamSpec("P")
T = TypeVar("T")

TAKE_BACK, END, RANK = "take its GPUs back", "end it", "rank its trials"


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
    faults: FaultBarrier = field(default_factory=FaultBarrier)
    idle_hands: Hands = field(default_factory=Hands)  # for what no round waits for
    _tagged: dict[tuple[str, str], str] = field(default_factory=dict)
    _describing: dict[str, Future[None]] = field(default_factory=dict)
    _granting: Granting = field(init=False)

    def __post_init__(self) -> None:
        self._granting = Granting(
            self.tracker, self.hands, self._tags, self.faults, self.idle_hands
        )

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
            self._describe_later(book, snapshot)
        ends = [a for a in actions if not isinstance(a, Start)]
        taking = {
            a.job: self.hands.begin(self._try_to_take_back, *find(books, a.job), a, snapshot.time_s)
            for a in self._recorded(snapshot, ends, ages_s)
        }
        starts = {a.job: a for a in actions if isinstance(a, Start)}
        asked: Mapping[JobId, Future[Lease]] = {}
        leases: dict[JobId, Lease] = {}
        told: dict[JobId, Future[Done[None] | None]] = {}
        try:
            asked = self._granting.ask(books, starts.values(), snapshot)
            left = dict(zip(taking, answers(list(taking.values())), strict=True))
            held = _gpus_of(books, (a.job for a in ends if left.get(a.job) is None))
            for job, lease in opened(asked, self.faults):  # each as soon as its run is there
                if held.isdisjoint(lease.gpus) and self._recorded(snapshot, [starts[job]], ages_s):
                    leases[job] = lease
                    told[job] = self.hands.begin(self._try_to_grant, *find(books, job), lease)
        finally:
            begun: tuple[Future[Any], ...] = (*taking.values(), *asked.values(), *told.values())
            wait(begun)
        given = dict(zip(told, answers(list(told.values())), strict=True))
        leases = {job: lease for job, lease in leases.items() if given[job] is not None}
        revoked = {done.value for done in left.values() if done is not None and done.value}
        self._rerank(books, plan, leases, revoked)
        self.faults.end_round()

    def _describe_later(self, book: Book, snapshot: Snapshot) -> None:
        """Set the tags of a sweep's run while the round goes on."""
        before = self._describing.get(book.sweep)
        if before is None or before.done():
            self._describing[book.sweep] = self.idle_hands.begin(self._describe, book, snapshot)

    def _describe(self, book: Book, snapshot: Snapshot) -> None:
        """Set the tags of a sweep's run that say where it runs."""
        run = book.plan.run
        self._tag(book, "hermes.pool_slots", str(len(snapshot.gpus)))
        self._tag(book, "hermes.policy", self.policy_name)
        page = run_page(run.dag_id, run.run_id)
        self._tag(book, AIRFLOW_TAG, f"{self.client.credentials.url}/{page}")

    def _try_to_take_back(
        self, book: Book, trial: Trial, action: Action, now_s: float
    ) -> Done[JobId | None] | None:
        subject = Subject(book.sweep, trial.number)
        return self.faults.attempt(subject, TAKE_BACK, self._take_back, book, trial, action, now_s)

    def _try_to_grant(self, book: Book, trial: Trial, lease: Lease) -> Done[None] | None:
        subject = Subject(book.sweep, trial.number)
        return self.faults.attempt(subject, GRANT, self._grant, book, trial, lease)

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
        failing = self.faults.starting(book.sweep)
        book.trials = tuple(
            self._looked_after(book, t, failing.get(t.number), now_s) for t in book.trials
        )
        drawing = self._try(book, None, "draw ahead", self._granting.draw_ahead, book)
        book.held = self._held(book) | (drawing.value if drawing is not None else frozenset())
        if book.close is None and (spent := due_end(book, now_s)) is not None:
            self.close(book, spent)
        if book.close is not None:
            self._tag(book, book.close.tag, book.close.reason)
            self._end(book, book.trials, book.close, now_s)

    def close(self, book: Book, close: CloseRecord) -> None:
        """Write down that a sweep ends; its trials are told when it is settled."""
        if self._try(book, None, "write that it ends", self._put_close, book, close) is not None:
            log.info("Sweep %s ends: %s", book.sweep, close.reason)
            book.close = close

    def _put_close(self, book: Book, close: CloseRecord) -> None:
        self._put(book, None, CLOSE_KEY, encode(close))

    def _try(
        self,
        book: Book,
        trial: Trial | None,
        step: str,
        call: Callable[P, T],
        *args: P.args,
        **named: P.kwargs,
    ) -> Done[T] | None:
        """Make a call for a sweep or a trial of it; None if it failed or is not due."""
        number = None if trial is None else trial.number
        return self.faults.attempt(Subject(book.sweep, number), step, call, *args, **named)

    def _looked_after(self, book: Book, trial: Trial, fault: Fault | None, now_s: float) -> Trial:
        """The trial once its own matters are settled; as it is where that fails.

        `fault` is the step of its start that fails.
        """
        if trial.left:
            closed = self._try(book, trial, "close its segment", self._settled, book, trial)
            trial = trial if closed is None else closed.value
        if wish_of(trial, closing=book.close is not None) is not Wish.NOTHING:
            step = "do what its task asks for"
            obeyed = self._try(book, trial, step, self._attended, book, trial, now_s)
            trial = trial if obeyed is None else obeyed.value
        if fault is None or trial.active:
            return trial
        if trial.ended:
            self.faults.forget(fault.subject)
        if not trial.idle or trial.ended or not self.faults.is_hopeless(fault):
            return trial
        ended = self._try(book, trial, END, self._give_up, book, trial, fault, now_s)
        return trial if ended is None else ended.value

    def _give_up(self, book: Book, trial: Trial, fault: Fault, now_s: float) -> Trial:
        """End a trial that cannot be started: `failed`, with the reason of its last try.

        Its task is marked in the next round: a sweep that ends with it says so first.
        """
        reason = f"it could not be started ({fault.step}, {fault.tries} tries): {fault.reason}"
        log.error("Trial %s of %s fails: %s", trial.number, book.sweep, reason)
        record = trial.segment or Segment(epoch=0, running=False, started_s=now_s, segments=0)
        record = replace(record, running=False, final="failed", task=trial.row.id, reason=reason,
                         ended_s=record.ended_s or now_s)  # fmt: skip
        self._put(book, trial, SEGMENT_KEY, encode(record))
        self._granting.give_up(book, trial, record, reason)
        self.faults.forget(Subject(book.sweep, trial.number))
        return replace(trial, segment=record)

    def _held(self, book: Book) -> frozenset[int]:
        """The trials that are offered no GPU now, as their start has failed.

        Where no trial of a sweep has begun and some cannot, the others wait for what becomes of
        those: they would fail as well.
        """
        failing, now_s = self.faults.starting(book.sweep), self.faults.clock()
        early = {n for n, fault in failing.items() if now_s < fault.again_s}
        if book.has_begun or len(failing) < FIRST_FAILURES:
            return frozenset(early)
        others = {t.number for t in book.trials} - failing.keys()
        return frozenset(early | others)

    def forget(self, sweep: str) -> None:
        """Take nothing as known of a sweep that has ended: it may go on."""
        self._describing.pop(sweep, None)
        for tagged in [key for key in self._tagged if key[0] == sweep]:
            del self._tagged[tagged]
        self._granting.forget(sweep)

    def release(self) -> None:
        """End what works in the background."""
        self._granting.close()

    def stop_all(self, books: Iterable[Book], now_s: float) -> None:
        """Stop every segment with its checkpoint and take back what has not begun."""
        why = "Hermes Ops is being shut down"
        for book in books:
            for trial in book.trials:
                if trial.phase is Phase.STARTING:
                    self._try(book, trial, TAKE_BACK, self._revoke, book, trial)
                elif trial.phase is Phase.RUNNING:
                    self._try(book, trial, TAKE_BACK, self._stop, book, trial, why, now_s, None)
        self.faults.end_round()

    def _end(self, book: Book, trials: Sequence[Trial], close: CloseRecord, now_s: float) -> None:
        """End trials for good: live ones by their flag, the others here."""
        idle = [
            trial
            for trial in trials
            if not trial.ended
            and (rest := self._try(book, trial, END, self._put_to_rest, book, trial, close, now_s))
            and rest.value
        ]
        ended = [  # first its record, so that whoever comes next knows what it became
            trial
            for trial in idle
            if self._try(
                book, trial, END, self._finish, book, trial, close.state, close.reason, now_s
            )
        ]
        if ended:
            tasks = [self._task(book, t) for t in ended]
            self._try(book, None, "skip its tasks", self.client.skip, tasks)

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
        mine = (t for t in book.trials if t.number not in touched and not is_cleared(t))
        for state, trials in unmarked(mine).items():
            tasks = [self._task(book, t) for t in trials]
            self._try(book, None, f"mark its tasks {state}", self._mark, tasks, state)
        if touched and book.whole:
            self._try(book, None, "take up its new trials", self._give_back, book, touched)
        for trial in book.trials:
            if _is_astray(book, trial):
                self._try(book, trial, "mend it", self._mend_trial, book, trial, now_s)

    def _mark(self, tasks: Sequence[TaskKey], state: str) -> None:
        if state == "skipped":
            self.client.skip(tasks)
        else:
            self.client.mark(tasks, state)

    def _mend_trial(self, book: Book, trial: Trial, now_s: float) -> None:
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
        subject, step = Subject(book.sweep), f"set the tag {name} in MLflow"
        try:
            self.tracker.set_tags(book.plan.record.parent_run_id, {name: value})
        except Unavailable as error:  # it is set later
            self.faults.note(subject, step, error)
            return
        except HermesError as error:  # its run was deleted, for instance: no reason to stop others
            self.faults.note(subject, step, error)
        else:
            self.faults.clear(subject, step)
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

    def _rerank(
        self,
        books: Mapping[str, Book],
        plan: Allocation,
        leases: Mapping[JobId, Lease],
        revoked: set[JobId],
    ) -> None:
        """Write the ranks that differ: of all sweeps at once, or of each where that fails."""
        order = {job: i for i, job in enumerate(plan.ranking)}
        changes: dict[str, list[Rank]] = {}
        for book in books.values():
            found = self._try(book, None, RANK, self._ranks, book, order, leases, revoked)
            if found is not None and found.value:
                changes[book.sweep] = found.value
        try:
            self.metadata.rerank([rank for ranks in changes.values() for rank in ranks])
        except Exception as error:  # a row of one sweep must not leave the others without a slot
            log.warning("The ranks are written sweep by sweep: %s", error)
            for sweep, ranks in changes.items():
                self.faults.attempt(Subject(sweep), RANK, self.metadata.rerank, ranks)

    def _ranks(
        self,
        book: Book,
        order: Mapping[JobId, int],
        leases: Mapping[JobId, Lease],
        revoked: set[JobId],
    ) -> list[Rank]:
        """What is to be changed of a sweep's ranks once the leases stand."""
        changes: list[Rank] = []
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

    def _recorded(
        self, snapshot: Snapshot, actions: Sequence[Action], ages_s: Mapping[str, float | None]
    ) -> list[Action]:
        """Write the decisions to disk; those that lie there may be carried out."""
        written: list[Action] = []
        for sweep in dict.fromkeys(find_sweep(a.job) for a in actions):
            mine = [a for a in actions if find_sweep(a.job) == sweep]
            entries = [self._decision(a, snapshot.time_s, ages_s.get(sweep)) for a in mine]
            subject = Subject(sweep)
            if self.faults.attempt(subject, "record decisions", self.decisions.append, entries):
                self.monitor.decided(snapshot, mine)
                written += mine
        return written

    def _decision(self, action: Action, time_s: float, curve_age_s: float | None) -> Decision:
        return decision(
            action.job,
            action_name(action),
            () if isinstance(action, Stop) else action.gpus,
            action.reason,
            time_s=time_s,
            policy=self.policy_name,
            options=self.options,
            curve_age_s=curve_age_s,
        )

    def _task(self, book: Book, trial: Trial | None) -> TaskKey:
        run = book.plan.run
        if trial is None:
            return TaskKey(run.dag_id, run.run_id, run.plan_task)
        return TaskKey(run.dag_id, run.run_id, book.plan.record.trial_task, trial.number)

    def _put(self, book: Book, trial: Trial | None, key: str, value: object) -> None:
        self.client.put_state(self._task(book, trial), key, value)
        self.faults.answered()


def _is_astray(book: Book, trial: Trial) -> bool:
    """True of a trial that `Applier._mend_trial` has something to do for."""
    if trial.lease is None:
        return False
    started = trial.under_way and not trial.active and not trial.told
    held_up = book.plan.run.paused and trial.phase is Phase.STARTING
    said = trial.segment is not None and trial.segment.final is not None
    return started or held_up or (trial.row.state in FINAL_STATES and not said)


def unmarked(trials: Iterable[Trial]) -> dict[str, list[Trial]]:
    """Trials that the controller has ended and whose tasks wait still, by what those become."""
    found: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.awaits_mark:
            found.setdefault(trial.task_state, []).append(trial)
    return found


def _gpus_of(books: Mapping[str, Book], jobs: Iterable[JobId]) -> set[int]:
    """The GPUs that these trials hold."""
    leases = (find(books, job)[1].lease for job in jobs)
    return {gpu for lease in leases if lease is not None for gpu in lease.gpus}
