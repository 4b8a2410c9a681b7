"""The leases of trials that are to start; new ones get a configuration, and a run in MLflow.

That run's params follow once the trial has its lease: nothing that decides reads them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, as_completed, wait
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from hermes_ops.airflow.control.faults import (
    DRAW,
    OPEN,
    RENDER,
    THE_POOL,
    FaultBarrier,
    RequestPool,
    Subject,
    resolved,
)
from hermes_ops.airflow.control.search_process import SlowSearches, is_slow
from hermes_ops.airflow.control.sweep_state import SweepState, find
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.airflow.hosts import Host, leased_nodes, node_of_each
from hermes_ops.airflow.machines import MachineSlots
from hermes_ops.airflow.records import Lease, SegmentRecord
from hermes_ops.airflow.trial.metrics import TrialOutcome, finish_run
from hermes_ops.config import leased_pod
from hermes_ops.config.render import why_not_started, with_batch
from hermes_ops.core.model import JobId, Snapshot
from hermes_ops.core.plan import Start
from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.tracking import Tracker

log = logging.getLogger(__name__)

PARAMS = "write params of new runs to MLflow"


@dataclass(slots=True)
class Granting:
    """Makes leases, and writes none of them to Airflow. `tags` are those of a trial's run."""

    tracker: Tracker
    requests: RequestPool
    tags: Callable[[SweepState, TrialRecords], dict[str, str]]
    faults: FaultBarrier = field(default_factory=FaultBarrier)
    background: RequestPool = field(default_factory=RequestPool)  # for what no round waits for
    searches: SlowSearches = field(default_factory=SlowSearches)
    host: Host = field(default_factory=Host.here)
    machines: MachineSlots = field(default_factory=MachineSlots)
    _configs: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    _bare: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # run -> its configuration
    _writing: dict[str, Future[None]] = field(default_factory=dict)

    def ask(
        self, sweeps: Mapping[str, SweepState], starts: Iterable[Start], snapshot: Snapshot
    ) -> dict[JobId, Future[Lease]]:
        """Return the lease of each start, once its run is open; none of one that must wait."""
        asked: dict[JobId, Future[Lease]] = {}
        for action in starts:
            sweep, trial = find(sweeps, action.job)
            nodes = leased_nodes(snapshot, action.gpus)
            granted: dict[str, Any] = {
                "gpus": action.gpus, "granted_s": snapshot.time_s, "nodes": nodes,
                "gpu_nodes": node_of_each(snapshot, action.gpus),
                "host": self.host.id, "host_name": self.host.name,
            }  # fmt: skip
            if self.machines.of_slot:
                granted |= self.machines.granted(action.gpus)
            if trial.lease is not None:
                again = replace(trial.lease, epoch=trial.lease.epoch + 1, revoked=False, **granted)
                subject = Subject(sweep.id, trial.number)
                sized = self.faults.isolate(subject, RENDER, _sized, sweep, again, action.batch)
                if sized is not None:
                    asked[action.job] = resolved(sized.value)
            elif (opening := self._first(sweep, trial, granted, action.batch)) is not None:
                asked[action.job] = opening
        return asked

    def forget(self, sweep: str) -> None:
        """Drop the cached state of an ended sweep: it may be resumed."""
        self._configs.pop(sweep, None)
        self.searches.forget(sweep)

    def close(self) -> None:
        """End the searches that have a process."""
        self.searches.close()

    def draw_ahead(self, sweep: SweepState) -> frozenset[int]:
        """Ask a slow search for the next configuration; return the trials that wait for one."""
        if not sweep.spec.learns or sweep.close is not None:
            return frozenset()
        configs = self._configs.get(sweep.id, {})
        pending = [t.number for t in sweep.trials if t.lease is None and not t.has_ended]
        slow = [n for n in pending if n not in configs and self._is_slow(sweep, n)]
        # An answer is for a trial that has ended since, or whose configuration MLflow has already.
        self.searches.keep_only(sweep.id, slow)
        if not slow:
            return frozenset()
        if sweep.can_draw:
            config = sweep.spec.record.config
            self.searches.ask(sweep.id, config, slow[0], sweep.history)
        return frozenset(slow) - self.searches.answered(sweep.id)

    def _is_slow(self, sweep: SweepState, number: int) -> bool:
        plan, observed = sweep.spec, sum(t.lease is not None for t in sweep.trials)
        return is_slow(plan.config, plan.axes, number, observed)

    def complete(self, *, whole: bool = False) -> None:
        """Write the params of runs that were opened without; those that MLflow does not take now
        at the next call. Returns at once where that is done in the background, unless `whole`.
        """
        for run_id in self._bare.keys() - self._writing.keys():
            self._writing[run_id] = self.background.submit(
                self.tracker.add_params, run_id, self._bare[run_id]
            )
        if whole:
            wait(self._writing.values())
        for run_id in [r for r, writing in self._writing.items() if writing.done()]:
            error = self._writing.pop(run_id).exception()
            if isinstance(error, Unavailable):
                self.faults.note(Subject(THE_POOL), PARAMS, error)
                continue
            del self._bare[run_id]
            if error is None:
                self.faults.clear(Subject(THE_POOL), PARAMS)
            else:
                log.warning("The params of the run %s are not written: %s", run_id, error)

    def give_up(
        self, sweep: SweepState, trial: TrialRecords, record: SegmentRecord, reason: str
    ) -> None:
        """End in MLflow a trial that cannot be started, as far as its configuration is known."""
        config = self._configs.get(sweep.id, {}).get(trial.number)
        try:
            if trial.lease is not None:
                run_id = trial.lease.run_id
            elif config is not None:
                tags = self.tags(sweep, trial)
                run_id = self.tracker.open_trial(sweep.spec.ref, trial.number, config, tags)
            else:
                return
            finish_run(self.tracker, run_id, TrialOutcome("failed", reason), record)
        except Exception as error:  # whatever it is, the trial ends
            log.warning("MLflow has no word of trial %s of %s: %s", trial.number, sweep.id, error)

    def _first(
        self,
        sweep: SweepState,
        trial: TrialRecords,
        granted: Mapping[str, Any],
        batch: int | None,
    ) -> Future[Lease] | None:
        subject = Subject(sweep.id, trial.number)
        drawn = self.faults.isolate(subject, DRAW, self._drawn, sweep, trial)
        if drawn is None or drawn.value is None:
            return None
        config, unseen = drawn.value
        rendered = self.faults.isolate(subject, RENDER, _of, sweep, config, granted, batch)
        if rendered is None:
            return None
        sweep.opened_now[trial.number] = config
        return self.requests.submit(self._opened, sweep, trial, rendered.value, unseen)

    def _drawn(self, sweep: SweepState, trial: TrialRecords) -> tuple[dict[str, Any], bool] | None:
        """Return the configuration of a trial, and whether MLflow has not seen it.

        None while a slow search has not answered.
        """
        configs = self._drawn_configs(sweep)
        unseen = trial.number not in configs
        if unseen:  # kept: MLflow holds on to the first one that it is told
            config = self._requested_config(sweep, trial.number)
            if config is None:
                return None
            configs[trial.number] = config
        return configs[trial.number], unseen

    def _requested_config(self, sweep: SweepState, number: int) -> dict[str, Any] | None:
        if not self._is_slow(sweep, number):
            return sweep.draw(number)
        return self.searches.pop_answer(sweep.id, number)

    def _drawn_configs(self, sweep: SweepState) -> dict[int, dict[str, Any]]:
        """Return configurations by trial: MLflow's, of a killed controller too, and ours."""
        if sweep.id not in self._configs:
            runs = self.tracker.trials(sweep.spec.ref)
            self._configs[sweep.id] = {r.number: dict(r.config) for r in runs}
            self._bare.update({r.run_id: r.unwritten for r in runs if r.unwritten})
        return self._configs[sweep.id]

    def _opened(self, sweep: SweepState, trial: TrialRecords, lease: Lease, unseen: bool) -> Lease:
        run_id = self.tracker.open_trial(
            sweep.spec.ref,
            trial.number,
            lease.config,
            self.tags(sweep, trial),
            unseen=unseen,
            params=not unseen,
        )
        if unseen:
            self._bare[run_id] = lease.config
        return replace(lease, run_id=run_id)


def opened(
    asked: Mapping[JobId, Future[Lease]], faults: FaultBarrier
) -> Iterator[tuple[JobId, Lease]]:
    """Return the leases as they come; none of a trial whose run MLflow does not open now."""
    jobs = {answer: job for job, answer in asked.items()}
    there = [answer for answer in jobs if answer.done()]
    for answer in chain(there, as_completed(jobs.keys() - there)):
        job = jobs[answer]
        sweep, _, number = job.rpartition("/")
        subject = Subject(sweep, int(number))
        try:
            lease = answer.result()
        except Exception as error:  # whatever it is: the others are opened
            faults.note(subject, OPEN, error)
            continue
        faults.clear(subject, OPEN)
        yield job, lease


def _of(
    sweep: SweepState, config: dict[str, Any], granted: Mapping[str, Any], batch: int | None
) -> Lease:
    """Return the first lease of a trial with that configuration, as yet without a run."""
    plan = sweep.spec
    spec, budget = plan.config.trial, plan.config.budget
    command, environment = sweep.command(config), sweep.environment(config)
    if (why := why_not_started(command, environment)) is not None:
        raise HermesError(why)
    lease = Lease(
        epoch=1,
        gpus=(),
        granted_s=0.0,
        run_id="",
        config=config,
        command=command,
        directory=str(spec.directory),
        workspace=spec.workspace.value,
        environment=environment,
        python=spec.python,
        objective=plan.config.objective.metric,
        direction=plan.config.objective.direction.value,
        metric_pattern=spec.metric_pattern,
        time_limit_s=spec.time_limit_seconds,
        max_epochs=budget.max_epochs,
        finish_s=spec.finish_seconds,
        max_failures=spec.max_failures,
        experiment=plan.record.experiment,
        experiment_id=plan.record.experiment_id,
        pod=leased_pod(spec.run_in, spec.pod),
        pool=plan.config.pool,
        templated=plan.record.templated,
        workers=spec.workers.value,
        tf_config=spec.tf_config,
        most_gpus=spec.gpu_range.most,
    )
    return _sized(sweep, replace(lease, **granted), batch)


def _sized(sweep: SweepState, lease: Lease, batch: int | None) -> Lease:
    """Return the lease with the command for its GPUs and the batch that the policy has chosen.

    Without one the parameter's own value holds. The trial's configuration stays as it was drawn.
    """
    config = sweep.spec.config
    if config.trial.batch is None:
        return lease
    params, samples = with_batch(config, lease.config, batch, len(lease.gpus))
    command, environment = sweep.command(params), sweep.environment(params)
    return replace(lease, command=command, environment=environment, batch=batch, samples=samples)
