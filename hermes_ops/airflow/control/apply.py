"""Turns decisions into leases, ranks and stop flags, and settles what needs no policy.

The order of one application, as measured on Airflow 3.3.2: the victim's stop flag, because leaving
its slot takes it longest; the slots of a task that keeps them for another size; the lease of the
trial that is to run; then the ranks, in one transaction under the scheduler's lock. A controller
that is killed in between costs the time until the next one grants the free slot, never a slot too
many. A trial that waits without a lease asks for more slots than any pool has, so Airflow passes it
over; a trial that comes in without one all the same is sent away by its operator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec

from hermes_ops.airflow.client import AirflowClient, TaskKey, run_page, task_page
from hermes_ops.airflow.clock_steps import ClockSteps
from hermes_ops.airflow.control.cleanup.sweep_end import FIRST_FAILURES, due_end, ends_by
from hermes_ops.airflow.control.decisions import Decision, DecisionLog, action_name, decision
from hermes_ops.airflow.control.executor import Executor
from hermes_ops.airflow.control.faults import (
    GRANT,
    Done,
    FaultBarrier,
    RequestPool,
    Subject,
    results_of,
)
from hermes_ops.airflow.control.granting import Granting, opened
from hermes_ops.airflow.control.interruptions import delayed_trials
from hermes_ops.airflow.control.jobs import job_id
from hermes_ops.airflow.control.monitoring import Monitor
from hermes_ops.airflow.control.reconcile import (
    TAKE_BACK,
    GrantLease,
    SweepFindings,
    end_trials,
    preempt,
    ranks_of,
    reconcile,
    slots_for,
    stop_all,
    withdraw_resizes,
)
from hermes_ops.airflow.control.sweep_state import SweepState, find, find_sweep
from hermes_ops.airflow.control.trial_state import TrialRecords, TrialState
from hermes_ops.airflow.folders import write_notice
from hermes_ops.airflow.hosts import Host
from hermes_ops.airflow.machines import MachineSlots, queue_of
from hermes_ops.airflow.metadata import Metadata
from hermes_ops.airflow.metadata_rows import TaskRank
from hermes_ops.airflow.records import AIRFLOW_TAG, HELD_POOL_SLOTS, CloseRecord, Lease, Notice
from hermes_ops.core.model import JobId, Phase, Plan, Reason, Snapshot, Term
from hermes_ops.core.plan import Action, Resize, Start, Stop
from hermes_ops.core.within_quota import EARLY
from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.tracking import Tracker

P = ParamSpec("P")

log = logging.getLogger(__name__)

SET_TAG = "set the tag {} in MLflow"
RANK = "rank its trials"
CHANGE_SLOTS = "change its slots"


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
    requests: RequestPool = field(default_factory=RequestPool)
    faults: FaultBarrier = field(default_factory=FaultBarrier)
    background: RequestPool = field(default_factory=RequestPool)  # for what no round waits for
    host: Host = field(default_factory=Host.here)
    waits_for_slots: bool = False  # the last round's: nobody tells when they are open
    machines: MachineSlots = field(default_factory=MachineSlots)
    clock_steps: ClockSteps = field(default_factory=ClockSteps)
    _tagged: dict[tuple[str, str], str] = field(default_factory=dict)
    _describing: dict[str, Future[None]] = field(default_factory=dict)
    _notices: dict[JobId, float] = field(default_factory=dict)
    _granting: Granting = field(init=False)
    _executor: Executor = field(init=False)

    def __post_init__(self) -> None:
        self._granting = Granting(
            self.tracker, self.requests, self._tags, self.faults, self.background,
            host=self.host, machines=self.machines,
        )  # fmt: skip
        self._executor = Executor(
            self.client,
            self.metadata,
            self.tracker,
            self.faults,
            self._tags,
            self._granting.give_up,
        )

    def apply(
        self,
        sweeps: Mapping[str, SweepState],
        snapshot: Snapshot,
        plan: Plan,
        actions: Sequence[Action],
        ages_s: Mapping[str, float | None],
    ) -> None:
        """Carry out the actions of one plan, then correct every rank that differs from it."""
        for sweep in sweeps.values():
            self._later(sweep, self._describe, sweep, snapshot)
        ends = [a for a in actions if not isinstance(a, Start)]
        taking = {
            a.job: self.requests.submit(self._preempt, *find(sweeps, a.job), a, snapshot.time_s)
            for a in self._recorded(snapshot, ends, ages_s)
        }
        starts = {action.job: action for action in self._grantable(sweeps, actions)}
        slotless: frozenset[JobId] = frozenset()
        asked: Mapping[JobId, Future[Lease]] = {}
        leases: dict[JobId, Lease] = {}
        granting: dict[JobId, Future[Done[TrialRecords] | None]] = {}
        try:
            asked = self._granting.ask(sweeps, starts.values(), snapshot)
            left = dict(zip(taking, results_of(list(taking.values())), strict=True))
            held = _gpus_of(sweeps, (a.job for a in ends if left.get(a.job) is None))
            slotless = self._change_slots(sweeps, starts.values(), held)
            for job, lease in opened(asked, self.faults):  # each as soon as its run is there
                if job in slotless or not held.isdisjoint(lease.gpus):
                    continue
                if self._recorded(snapshot, [starts[job]], ages_s):
                    leases[job] = lease
                    sweep, trial = find(sweeps, job)
                    command = GrantLease(trial, lease, GRANT)
                    granting[job] = self.requests.submit(
                        self._executor.attempt, sweep, command, snapshot.time_s
                    )
        finally:
            begun: tuple[Future[Any], ...] = (*taking.values(), *asked.values(), *granting.values())
            wait(begun)
        self.waits_for_slots = bool(slotless)
        granted = dict(zip(granting, results_of(list(granting.values())), strict=True))
        leases = {job: lease for job, lease in leases.items() if granted[job] is not None}
        revoked = {job for job, done in left.items() if done is not None and done.value}
        kept = {*leases, *slotless, *left, *_early(sweeps, plan)}
        for sweep in sweeps.values():
            self._executor.run(sweep, withdraw_resizes(sweep, kept), snapshot.time_s)
        self._rerank(sweeps, plan, leases, revoked)
        self._give_notice(sweeps, snapshot, plan)
        self.faults.end_round()

    def _give_notice(
        self, sweeps: Mapping[str, SweepState], snapshot: Snapshot, plan: Plan
    ) -> None:
        """Tell trials that they lose borrowed GPUs soon, and when, or that they keep them."""
        due = dict(plan.notices)
        for job in [job for job in self._notices if job not in due]:
            del self._notices[job]
            if job in snapshot.index and plan.gpus_of(job):
                sweep, trial = find(sweeps, job)
                write_notice(sweep.folder(trial), None)
        for job, end_s in due.items():
            sweep, trial = find(sweeps, job)
            if self._notices.get(job) == end_s or trial.lease is None:
                continue
            self._notices[job] = end_s
            reason = plan.reasons[job]
            write_notice(sweep.folder(trial), Notice(trial.lease.epoch, reason.text, end_s))
            entry = decision(
                job, "notice", trial.lease.gpus, reason, time_s=snapshot.time_s,
                policy=self.policy_name, options=self.options, curve_age_s=None,
            )  # fmt: skip
            subject = Subject(sweep.id)
            self.faults.attempt(subject, "record decisions", self.decisions.append, [entry])

    def _change_slots(
        self, sweeps: Mapping[str, SweepState], starts: Iterable[Start], held: Set[int]
    ) -> frozenset[JobId]:
        """See to it that no task has fewer slots than its next lease needs, before that is written.

        A task that waits in its slots gets the number of its next lease; those that shrink come
        first. A task that waits for slots and still requests those of an earlier lease is made to
        request more than the pool has until it has its rank. Return the jobs that get no lease now:
        the pool has too few open slots, Airflow has just started the task, or a task that holds its
        slots would have to wait for a GPU that another trial has not left yet.
        """
        slotless: set[JobId] = set()
        in_use = _gpus_in_use(sweeps)
        due = [(a, *find(sweeps, a.job)) for a in starts if held.isdisjoint(a.gpus)]
        for action, sweep, trial in sorted(due, key=_growth):
            slots = slots_for(action.gpus)
            if trial.is_resizing and not in_use.isdisjoint(action.gpus):
                slotless.add(action.job)
            elif trial.is_resizing or self._may_start_wrongly(trial, action.gpus):
                subject, change = Subject(sweep.id, trial.number), self._executor.change_slots
                done = self.faults.attempt(subject, CHANGE_SLOTS, change, trial, slots)
                if done is None or not done.value:
                    slotless.add(action.job)
        return frozenset(slotless)

    def _may_start_wrongly(self, trial: TrialRecords, gpus: tuple[int, ...]) -> bool:
        """Return whether a task that waits still asks for the slots or the queue of another lease.

        Then the new lease must not be on record before it has its new rank.
        """
        if trial.row.pool_slots == HELD_POOL_SLOTS:
            return False
        of_slot = self.machines.of_slot
        queue = queue_of(of_slot[gpus[0]]) if of_slot else trial.row.queue
        return (trial.row.pool_slots, trial.row.queue) != (slots_for(gpus), queue)

    def _grantable(
        self, sweeps: Mapping[str, SweepState], actions: Iterable[Action]
    ) -> Iterator[Start]:
        """Yield the starts, without those of tasks that have to leave their slots first.

        These are doubtful, or their next GPUs are on another machine.
        """
        doubtful = frozenset(self._doubtful(sweeps))
        for action in actions:
            if not isinstance(action, Start) or action.job in doubtful:
                continue
            _, trial = find(sweeps, action.job)
            if not (trial.is_resizing and self._is_elsewhere(trial, action.gpus)):
                yield action

    def _is_elsewhere(self, trial: TrialRecords, gpus: tuple[int, ...]) -> bool:
        """Return whether these GPUs are on another machine than that of the trial's lease."""
        of_slot, lease = self.machines.of_slot, trial.lease
        return bool(of_slot) and lease is not None and of_slot[gpus[0]] != lease.machine

    def _doubtful(self, sweeps: Mapping[str, SweepState]) -> Iterator[JobId]:
        """Yield the trials whose tasks wait in their slots after a grant that has failed.

        That lease may be recorded late, and the task start with it: it gets no other one before it
        has left.
        """
        for sweep in sweeps.values():
            failing = self.faults.starting(sweep.id)
            trials = (t for t in sweep.trials if t.number in failing and t.is_resizing)
            yield from (job_id(sweep.id, t.number) for t in trials)

    def _later(
        self, sweep: SweepState, call: Callable[P, None], *args: P.args, **named: P.kwargs
    ) -> None:
        """Set tags of a sweep's run while the round goes on, unless others are being set."""
        before = self._describing.get(sweep.id)
        if before is None or before.done():
            self._describing[sweep.id] = self.background.submit(call, *args, **named)

    def _describe(self, sweep: SweepState, snapshot: Snapshot) -> None:
        """Set the tags of a sweep's run that say where it runs."""
        run = sweep.spec.run
        self._tag(sweep, "hermes.pool_slots", str(len(snapshot.gpus)))
        self._tag(sweep, "hermes.policy", self.policy_name)
        page = run_page(run.dag_id, run.run_id)
        self._tag(sweep, AIRFLOW_TAG, f"{self.client.credentials.url}/{page}")

    def _preempt(
        self, sweep: SweepState, trial: TrialRecords, action: Action, now_s: float
    ) -> Done[bool] | None:
        """Have a trial leave its GPUs; return whether that has revoked a lease not yet begun.

        Returns None where it failed: the trial keeps its GPUs.
        """
        done: Done[Any] | None
        if isinstance(action, Stop) and action.final:
            close = CloseRecord(action.reason.text, "stopped_early", now_s)
            commands = end_trials((trial,), close)
            subject = Subject(sweep.id, trial.number)
            done = self.faults.attempt(
                subject, TAKE_BACK, self._executor.run, sweep, commands, now_s
            )
        else:
            resize = isinstance(action, Resize) and not self._is_elsewhere(trial, action.gpus)
            command = preempt(trial, action.reason.text, resize=resize)
            done = self._executor.attempt(sweep, command, now_s)
        return None if done is None else Done(trial.phase is Phase.STARTING)

    def complete(self, *, whole: bool = False) -> None:
        """Do what no round waits for of the leases that were granted; `whole`: all of it."""
        self._granting.complete(whole=whole)

    def settle(self, sweep: SweepState, now_s: float) -> None:
        """Reconcile the records of a sweep; close it if its budget is spent, and end its trials."""
        changed = self._executor.run(sweep, reconcile(self._findings(sweep)), now_s)
        if changed:
            sweep.trials = tuple(changed.get(t.number, t) for t in sweep.trials)
        step, draw = "draw ahead", self._granting.draw_ahead
        drawing = self.faults.attempt(Subject(sweep.id), step, draw, sweep)
        sweep.withheld = self._withheld(sweep) | (
            drawing.value if drawing is not None else frozenset()
        )
        may_close = sweep.close is None and self.clock_steps.is_settled()
        if may_close and (spent := due_end(sweep, now_s)) is not None:
            self.close(sweep, spent)
        if sweep.close is not None:
            if ends_by(sweep, sweep.close):
                self._tag_end(sweep, sweep.close)
            self._executor.run(sweep, end_trials(sweep.trials, sweep.close), now_s)

    def _findings(self, sweep: SweepState) -> SweepFindings:
        """Return what the trials' states are reconciled with."""
        failing = self.faults.starting(sweep.id)
        settled = self.clock_steps.is_settled()  # else a recent fault may look old
        hopeless = {n: f for n, f in failing.items() if settled and self.faults.is_hopeless(f)}
        return SweepFindings(
            trials=sweep.trials,
            host=self.host.id,
            is_closing=sweep.close is not None,
            is_paused=sweep.spec.run.paused,
            is_complete=sweep.is_complete,
            touched=sweep.spec.record.touched,
            failing=frozenset(failing),
            unstartable={
                n: f"it could not be started ({fault.step}, {fault.tries} tries): {fault.reason}"
                for n, fault in hopeless.items()
            },
        )

    def close(self, sweep: SweepState, close: CloseRecord) -> None:
        """Record that a sweep ends; its trials are told when it is settled."""
        if self._executor.close(sweep, close):
            log.info("Sweep %s ends: %s", sweep.id, close.reason)
            sweep.close = close

    def _withheld(self, sweep: SweepState) -> frozenset[int]:
        """Return the trials that get no GPU offered now: those that back off after a failed start
        or after interruptions.

        As long as no trial of a sweep has begun and some fail to start, the others wait: they would
        probably fail as well.
        """
        failing, now_s = self.faults.starting(sweep.id), self.faults.clock()
        early = {n for n, fault in failing.items() if not fault.is_due(now_s)}
        early |= delayed_trials(sweep.trials, now_s)
        if sweep.has_begun or len(failing) < FIRST_FAILURES:
            return frozenset(early)
        others = {t.number for t in sweep.trials} - failing.keys()
        return frozenset(early | others)

    def forget(self, sweep_id: str) -> None:
        """Drop the cached state of an ended sweep: it may be resumed."""
        self._describing.pop(sweep_id, None)
        for tagged in [key for key in self._tagged if key[0] == sweep_id]:
            del self._tagged[tagged]
        self._granting.forget(sweep_id)

    def release(self) -> None:
        """End the work in the background."""
        self._granting.close()

    def stop_all(self, sweeps: Iterable[SweepState], now_s: float) -> None:
        """Stop every segment with its checkpoint and revoke the leases that have not begun."""
        self.waits_for_slots = False
        for sweep in sweeps:
            self._executor.run(sweep, stop_all(sweep.trials), now_s)
        self.faults.end_round()

    def _tag_end(self, sweep: SweepState, close: CloseRecord) -> None:
        """Set the tag of the sweep's end before its trials end.

        Once MLflow has not answered the rounds no longer wait for it.
        """
        step = SET_TAG.format(close.tag)
        if any(f.subject == Subject(sweep.id) and f.step == step for f in self.faults.faults):
            self._later(sweep, self._tag, sweep, close.tag, close.reason)
        else:
            self._tag(sweep, close.tag, close.reason)

    def _tag(self, sweep: SweepState, name: str, value: str) -> None:
        """Set a tag of the sweep's run, once for each value."""
        if self._tagged.get((sweep.id, name)) == value:
            return
        subject, step = Subject(sweep.id), SET_TAG.format(name)
        try:
            self.tracker.set_tags(sweep.spec.record.parent_run_id, {name: value})
        except HermesError as error:
            self.faults.note(subject, step, error)
            if isinstance(error, Unavailable):  # it is set later; one that was refused never is
                return
        else:
            self.faults.clear(subject, step)
        self._tagged[sweep.id, name] = value

    def _tags(self, sweep: SweepState, trial: TrialRecords) -> dict[str, str]:
        run = sweep.spec.run
        task = TaskKey(run.dag_id, run.run_id, sweep.spec.record.trial_task, trial.number)
        return {
            "hermes.sampler": sweep.spec.config.search.algorithm.value,
            "hermes.policy": self.policy_name,
            AIRFLOW_TAG: f"{self.client.credentials.url}/{task_page(task)}",
        }

    def _rerank(
        self,
        sweeps: Mapping[str, SweepState],
        plan: Plan,
        leases: Mapping[JobId, Lease],
        revoked: set[JobId],
    ) -> None:
        """Write the ranks that differ: of all sweeps at once, or of each where that fails."""
        order = {job: i for i, job in enumerate(plan.ranking)}
        changes: dict[str, list[TaskRank]] = {}
        for sweep in sweeps.values():
            subject = Subject(sweep.id)
            ranked = self.faults.attempt(subject, RANK, ranks_of, sweep, order, leases, revoked)
            if ranked is not None and ranked.value:
                changes[sweep.id] = ranked.value
        try:
            self.metadata.rerank([rank for ranks in changes.values() for rank in ranks])
        except Exception as error:  # a row of one sweep must not leave the others without a slot
            log.warning("The ranks are written sweep by sweep: %s", error)
            for sweep_id, ranks in changes.items():
                self.faults.attempt(Subject(sweep_id), RANK, self.metadata.rerank, ranks)

    def _recorded(
        self, snapshot: Snapshot, actions: Sequence[Action], ages_s: Mapping[str, float | None]
    ) -> list[Action]:
        """Write the decisions to disk; return those that are there: they may be carried out."""
        written: list[Action] = []
        for sweep_id in dict.fromkeys(find_sweep(a.job) for a in actions):
            mine = [a for a in actions if find_sweep(a.job) == sweep_id]
            entries = [self._decision(a, snapshot.time_s, ages_s.get(sweep_id)) for a in mine]
            subject = Subject(sweep_id)
            if self.faults.attempt(subject, "record decisions", self.decisions.append, entries):
                self.monitor.decided(snapshot, mine)
                written += mine
        return written

    def _decision(self, action: Action, time_s: float, curve_age_s: float | None) -> Decision:
        return decision(
            action.job,
            action_name(action),
            () if isinstance(action, Stop) else action.gpus,
            _with_batch(action),
            time_s=time_s,
            policy=self.policy_name,
            options=self.options,
            curve_age_s=curve_age_s,
        )


def _with_batch(action: Action) -> Reason:
    """Return the reason of an action, with the batch among its terms where the policy chose one."""
    if isinstance(action, Stop) or action.batch is None:
        return action.reason
    return replace(action.reason, terms=(*action.reason.terms, Term("batch", action.batch)))


def _growth(start: tuple[Start, SweepState, TrialRecords]) -> tuple[int, JobId]:
    """Return by how many slots the task of a trial grows."""
    action, _, trial = start
    return slots_for(action.gpus) - trial.row.pool_slots, action.job


def _early(sweeps: Mapping[str, SweepState], plan: Plan) -> Iterator[JobId]:
    """Yield the resized trials that start once others have left their GPUs, by the quota."""
    for sweep in sweeps.values():
        waiting = (t for t in sweep.trials if t.state is TrialState.RESIZING)
        jobs = (job_id(sweep.id, t.number) for t in waiting)
        yield from (job for job in jobs if plan.reasons.get(job) == EARLY)


def _gpus_in_use(sweeps: Mapping[str, SweepState]) -> set[int]:
    """Return the GPUs of the segments under way, also of those that are stopping."""
    trials = (t for sweep in sweeps.values() for t in sweep.trials if t.is_under_way)
    return {gpu for t in trials if t.lease is not None for gpu in t.lease.gpus}


def _gpus_of(sweeps: Mapping[str, SweepState], jobs: Iterable[JobId]) -> set[int]:
    """Return the GPUs that these trials hold."""
    leases = (find(sweeps, job)[1].lease for job in jobs)
    return {gpu for lease in leases if lease is not None for gpu in lease.gpus}
