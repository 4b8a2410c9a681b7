"""The controller's view of a pool's sweeps: rebuilt from Airflow and MLflow at each observation.

Nothing here must be remembered: a controller that was killed finds the same states again. It is
read, never written.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType
from typing import Any

from hermes_ops.airflow.control.faults import FaultBarrier, Subject
from hermes_ops.airflow.control.jobs import (
    DeferredTrials,
    Points,
    SweepFacts,
    TrialCache,
    on_one_node,
)
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.airflow.dag_teams import dag_teams
from hermes_ops.airflow.folders import TrialFolder
from hermes_ops.airflow.identity import MAIN_DAG
from hermes_ops.airflow.machines import MachineSlots
from hermes_ops.airflow.metadata import Metadata
from hermes_ops.airflow.metadata_rows import PoolRow, RunRow
from hermes_ops.airflow.records import (
    CLOSE_KEY,
    LEASE_KEY,
    SEGMENT_KEY,
    CloseRecord,
    Lease,
    SegmentRecord,
    SweepRecord,
    decode,
    is_active,
)
from hermes_ops.config import (
    RunIn,
    SweepConfig,
    parse,
    render_command,
    render_environment,
)
from hermes_ops.config.pool_quota import WITHOUT_TEAMS, PoolQuota
from hermes_ops.config.workers import Workers
from hermes_ops.core.model import Gpu, Job, JobId, Phase, Snapshot, SweepId
from hermes_ops.core.priority_class import DEFAULT_CLASS, NIGHTLY_CLASS
from hermes_ops.core.sizes import BatchRange
from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.search.interface import Observation, Sampler
from hermes_ops.search.tree import axes
from hermes_ops.tracking.runs import SweepRef

log = logging.getLogger(__name__)

_NONE: Mapping[str, str] = MappingProxyType({})

DRAWN_AHEAD = 256
"""Trials of a sweep, the first ones, whose configurations are looked up before they begin."""

DRAWS_PER_ROUND, PARAMETERS_PER_ROUND = 16, 2_000
"""A draw takes a millisecond or more: a round makes at most this many for each sweep, and draws at
most this many parameters."""


@dataclass(frozen=True, slots=True)
class SweepSpec:
    """The constant facts of a sweep: its config, and values derived from it.

    `cache` and `deferred` keep what the last round built of the rest.
    """

    run: RunRow
    record: SweepRecord
    config: SweepConfig
    sampler: Sampler
    facts: SweepFacts
    axes: int = 1  # of its space, those below choices included
    cache: TrialCache = field(default_factory=TrialCache, compare=False)
    deferred: DeferredTrials = field(default_factory=DeferredTrials, compare=False)
    _drawn: dict[int, Mapping[str, Any]] = field(default_factory=dict, compare=False)

    @classmethod
    def from_run(cls, run: RunRow) -> SweepSpec | None:
        """Return the sweep of a DAG run; None when its record is of another shape."""
        record = decode(SweepRecord, run.sweep)
        if record is None:
            return None
        config = parse(record.config, source=run.sweep_id, base=None)
        config = _within_dag(config, record.trials, run)
        sampler = config.search.to_sampler()
        gpus = config.trial.gpu_range
        facts = SweepFacts(
            sweep=SweepId(run.sweep_id),
            submitted_s=began_s(record, run),
            weight=config.weight,
            gpus=gpus.least,
            most_gpus=gpus.most if gpus.most > gpus.least else None,
            sizes=gpus.numbers if gpus.most > gpus.least else (),
            sign=config.objective.sign,
            total_steps=config.budget.max_epochs,
            preemptible=config.trial.preemptible,
            deadline_s=_deadline_s(config, record, run),
            nodes=_claimed_nodes(config),
            stays_on_node=bool(_claimed_nodes(config)),
            is_on_one_node=config.trial.run_in is RunIn.POD,
            may_span_nodes=_may_span_nodes(config),
            user=owner(run, config.owner),
            priority_class=priority_class(run, record, config),
        )
        facts = _with_batches(facts, config)
        space = tuple(axes(config.search.to_space()))
        return cls(run, record, config, sampler, facts, max(1, len(space)))

    def in_team(self, team: str) -> SweepSpec:
        """Return it as a sweep of that team; its trials are built again if that is another one."""
        if self.facts.virtual_cluster == team:
            return self
        facts = replace(self.facts, virtual_cluster=team)
        return replace(self, facts=facts, cache=TrialCache())

    def on_machines(self, names: tuple[str, ...]) -> SweepSpec:
        """Return it as a sweep whose trials train on one of these machines, each with its own disk.

        A trial stays where it began unless its checkpoints are in an object store as well.
        """
        is_single = (self.facts.most_gpus or self.facts.gpus) < 2
        facts = replace(
            self.facts,
            is_on_one_node=True,
            stays_on_node=self.config.checkpoints.store is None,
            nodes=() if is_single else tuple(sorted(names)),
        )
        return replace(self, facts=facts)

    @property
    def ref(self) -> SweepRef:
        """Return its experiment and run in MLflow."""
        return SweepRef(self.run.sweep_id, self.record.experiment_id, self.record.parent_run_id)

    @property
    def learns(self) -> bool:
        """Return whether a configuration depends on the results so far."""
        return self.config.search.learns

    def draw_ahead(self, numbers: Iterable[int]) -> Mapping[int, Mapping[str, Any]]:
        """Return the configurations of trials not yet opened, by number; each call draws some more.

        Only where no result plays a part in them.
        """
        if not self.learns:
            unknown = (n for n in numbers if n < DRAWN_AHEAD and n not in self._drawn)
            most = max(1, min(DRAWS_PER_ROUND, PARAMETERS_PER_ROUND // self.axes))
            for number in islice(unknown, most):
                self._drawn[number] = self._draw(number)
        return self._drawn

    def _draw(self, number: int) -> Mapping[str, Any]:
        """Draw a configuration; empty where the search fails, which the trial's start reports."""
        try:
            return self.sampler.ask(number, ())
        except Exception as error:  # whatever a sampler raises: the others are drawn
            log.debug("Trial %s of %s is not drawn ahead: %s", number, self.run.sweep_id, error)
            return {}


def _within_dag(config: SweepConfig, trials: int, run: RunRow) -> SweepConfig:
    """Return the config with no more trials at once than Airflow starts tasks of its DAG run.

    Any other one would hold GPUs without starting. A pod may be deferred, and does not count then.
    """
    most = min(config.budget.max_parallel or run.most_tasks, run.most_tasks)
    if not 0 < run.most_tasks < trials or config.trial.run_in is RunIn.POD:
        return config
    budget = config.budget.model_copy(update={"max_parallel": most})
    return config.model_copy(update={"budget": budget})


def owner(run: RunRow, named: object) -> str:
    """Return the user whose sweep a run is: the one who triggered it.

    A scheduled run belongs to the owner `named` in its sweep file, else to the first owner of its
    DAG in alphabetical order: the order in which Airflow writes them changes with every parsing.
    """
    named_owner = named if isinstance(named, str) else ""  # a record may hold anything
    return run.triggered_by or named_owner or min(map(str.strip, run.dag_owners.split(",")))


def priority_class(run: RunRow, record: SweepRecord, config: SweepConfig) -> str:
    """Return the priority class of a sweep: its file's, else nightly for a scheduled night."""
    is_scheduled = record.nightly and not run.triggered_by
    return config.priority_class or (NIGHTLY_CLASS if is_scheduled else DEFAULT_CLASS)


def began_s(record: SweepRecord, run: RunRow) -> float:
    """Return when the sweep was planned; if its run was restarted since, when that was."""
    return max(run.started_s, record.planned_s)


def _claimed_nodes(config: SweepConfig) -> tuple[str, ...]:
    pod = config.trial.pod if config.trial.run_in is RunIn.POD else None
    return tuple(sorted(pod.checkpoint_claims or ())) if pod is not None else ()


def _may_span_nodes(config: SweepConfig) -> bool:
    pod = config.trial.pod if config.trial.run_in is RunIn.POD else None
    if pod is None or pod.gang_service is None or pod.checkpoint_claims:
        return False
    return config.trial.workers is Workers.ONE_PER_GPU


def _with_batches(facts: SweepFacts, config: SweepConfig) -> SweepFacts:
    """Return the facts with the batches that a trial may have, where a policy may choose them."""
    spec, trial = config.trial.batch, config.trial
    if spec is None:
        return facts
    return replace(
        facts,
        batch_range=BatchRange(spec.min, spec.max, most_local=spec.per_gpu_max),
        batch_parameter=spec.parameter,
        least_processes=trial.processes(trial.gpu_range.least),
    )


def _deadline_s(config: SweepConfig, record: SweepRecord, run: RunRow) -> float | None:
    """Return when the sweep ends at the latest: its deadline, or its budget of wall-clock time."""
    start_s, limit_s = began_s(record, run), config.budget.wall_clock_seconds
    ends = [config.deadline_at_s(start_s), None if limit_s is None else start_s + limit_s]
    return min((end_s for end_s in ends if end_s is not None), default=None)


@dataclass(slots=True)
class SweepState:
    """A sweep as it stands: its trials, its curves, whether it is closing."""

    spec: SweepSpec
    trials: tuple[TrialRecords, ...]
    close: CloseRecord | None
    curves: Mapping[int, Points] = field(default_factory=dict)
    constraint_metrics: Mapping[str, Mapping[int, Points]] = field(
        default_factory=dict
    )  # metric -> trial
    opened_now: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # in this round
    withheld: frozenset[int] = frozenset()  # trials that get no GPU offered in this round
    curves_read: bool = (
        True  # whether MLflow has been read, so that a trial without a curve has none
    )

    @classmethod
    def fetch(
        cls,
        spec: SweepSpec,
        metadata: Metadata,
        curves: Mapping[int, Points],
        *,
        constraint_metrics: Mapping[str, Mapping[int, Points]] = MappingProxyType({}),
        curves_read: bool = True,
    ) -> SweepState:
        """Read Airflow's rows and records; take the curves known so far."""
        records = metadata.records(spec.run)
        task = spec.record.trial_task
        sweep_id = spec.run.sweep_id
        decode_trial, with_folder = spec.cache.trial, spec.deferred.with_folder
        trials = tuple(
            with_folder(decode_trial(row, records.get((task, row.number), _NONE)), sweep_id)
            for row in metadata.trials(spec.run, task)
        )
        planned = records.get((spec.run.plan_task, -1), {})
        close = decode(CloseRecord, planned.get(CLOSE_KEY))
        return cls(spec, trials, close, curves, constraint_metrics, curves_read=curves_read)

    @property
    def id(self) -> str:
        """Return the sweep's id."""
        return self.spec.run.sweep_id

    def folder(self, trial: TrialRecords) -> TrialFolder:
        """Return where the files of one of its trials lie."""
        return TrialFolder.from_sweep(self.id, trial.number)

    def jobs(self, now_s: float, nodes: tuple[str, ...] = ()) -> list[Job]:
        """Return every trial as a policy sees it; for a closing sweep only those that leave GPUs.

        `nodes` names the node of each GPU of the pool, as far as it goes.
        """
        if self.close is not None:
            return self._leaving(now_s)
        drawn = self.spec.draw_ahead(t.number for t in self.trials if t.lease is None)
        facts, curves = on_one_node(self.spec.facts, nodes), self.curves
        job = self.spec.cache.job
        jobs = [
            job(t, facts, curves.get(t.number, ()), now_s, drawn.get(t.number)) for t in self.trials
        ]
        return [j for j, t in zip(jobs, self.trials, strict=True) if self._offered(j, t)]

    def _leaving(self, now_s: float) -> list[Job]:
        """Return the trials of a closing sweep that still have GPUs, as stopping for good.

        No policy decides on them, but until they have left, their GPUs are not idle and count for
        their team.
        """
        job, facts, curves = self.spec.cache.job, self.spec.facts, self.curves
        phases = (Phase.STARTING, Phase.RUNNING, Phase.STOPPING)
        held = (t for t in self.trials if t.phase in phases)
        jobs = (job(t, facts, curves.get(t.number, ()), now_s) for t in held)
        return [
            replace(j, resumes=False) if j.phase is Phase.STOPPING else j.as_stopping(resumes=False)
            for j in jobs
        ]

    def _offered(self, candidate: Job, trial: TrialRecords) -> bool:
        """Return whether a trial is offered to the policy: once Airflow would start it.

        Airflow starts no task of a DAG that is paused or deleted: only its trials that train are
        offered.
        """
        if trial.number in self.spec.record.touched:
            return False
        if trial.number in self.withheld and candidate.phase in (Phase.PENDING, Phase.WAITING):
            return False
        if self.spec.run.paused and candidate.phase in (Phase.PENDING, Phase.WAITING):
            return False
        return candidate.phase is not Phase.PENDING or trial.row.state == "scheduled"

    @property
    def gpus_in_use(self) -> frozenset[int]:
        """Return the GPUs that its trials hold or have not left yet."""
        phases = (Phase.STARTING, Phase.RUNNING, Phase.STOPPING)
        leases = (t.lease for t in self.trials if t.phase in phases)
        return frozenset(gpu for lease in leases if lease is not None for gpu in lease.gpus)

    @property
    def is_complete(self) -> bool:
        """Return whether Airflow has a task for every trial of the spec."""
        return len(self.trials) >= self.spec.record.trials

    @property
    def open_trials(self) -> int:
        """Return how many trials have begun and have not ended."""
        return sum(t.lease is not None and not t.has_ended for t in self.trials)

    @property
    def has_begun(self) -> bool:
        """Return whether a trial has begun to train."""
        return any(t.segment is not None and t.segment.segments > 0 for t in self.trials)

    def best_trial(self) -> int | None:
        """Return the number of the trial with the best value, of two the lower; or None."""
        seen = (self._observation(t) for t in self.trials if t.lease is not None)
        able = [(o.loss, o.number) for o in seen if o.loss is not None and o.state != "failed"]
        return min(able)[1] if able else None

    @property
    def failed_trials(self) -> int:
        """Return how many trials failed; those that diverged count if the sweep counts them."""
        counts = self.spec.config.budget.count_diverged
        return sum(t.has_failed and (counts or not t.has_diverged) for t in self.trials)

    def last_constraint_values(self, number: int) -> dict[str, float]:
        """Return the last value that a trial has reported of each metric that has bounds."""
        metrics = ((name, points.get(number)) for name, points in self.constraint_metrics.items())
        return {name: points[-1][1] for name, points in metrics if points}

    def history(self) -> list[Observation]:
        """Return what the sampler has observed: every trial that has a configuration."""
        leased = [self._observation(t) for t in self.trials if t.lease is not None]
        fresh = self.opened_now.items()
        return leased + [Observation(n, dict(c), None, "running") for n, c in fresh]

    def _observation(self, trial: TrialRecords) -> Observation:
        lease = trial.lease
        config = dict(lease.config) if lease is not None else {}
        points = self.curves.get(trial.number, ())
        loss = self.spec.cache.lowest_loss(trial.number, points, self.spec.facts.sign)
        if not trial.has_ended:
            return Observation(trial.number, config, loss, "running")
        failed = trial.has_failed or loss is None
        return Observation(trial.number, config, loss, "failed" if failed else "finished")

    @property
    def can_draw(self) -> bool:
        """Return whether the results that a configuration depends on have been read from MLflow."""
        return not self.spec.learns or self.curves_read or not any(t.has_ended for t in self.trials)

    def draw(self, number: int) -> dict[str, Any]:
        """Return the configuration of a trial that is about to be opened.

        Unavailable while results that it depends on have not been read from MLflow.
        """
        if not self.can_draw:
            raise Unavailable("the results of its sweep have not been read from MLflow yet")
        return dict(self.spec.sampler.ask(number, self.history()))

    def command(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the training command of a configuration."""
        return tuple(render_command(self.spec.config, dict(config)))

    def environment(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Return the environment variables of a configuration."""
        return render_environment(self.spec.config, dict(config))


def find_sweep(job: JobId) -> str:
    """Return the sweep's id in the id that a policy uses for a trial."""
    return job.rpartition("/")[0]


def find(sweeps: Mapping[str, SweepState], job: JobId) -> tuple[SweepState, TrialRecords]:
    """Return the trial with the id that a policy uses, and its sweep."""
    sweep_id, _, number = job.rpartition("/")
    return sweeps[sweep_id], next(t for t in sweeps[sweep_id].trials if t.number == int(number))


READ_RECORD = "read its record"

UNREADABLE_S = 600.0
"""A sweep whose record cannot be read ends after so long: until then an upgrade may help."""


@dataclass(slots=True)
class RunningSweeps:
    """The running sweeps of one pool; the record of each is parsed once.

    `unreadable` are those whose record is there and cannot be made sense of.
    """

    pool: str
    faults: FaultBarrier = field(default_factory=FaultBarrier)
    machines: MachineSlots = field(default_factory=MachineSlots)
    specs: dict[str, SweepSpec] = field(default_factory=dict)
    unreadable: dict[str, RunRow] = field(default_factory=dict)
    _quota: PoolQuota = WITHOUT_TEAMS
    _airflow_team_of: Mapping[str, str] = field(default_factory=dict)  # by DAG
    _not_ours: dict[str, dict[str, Any]] = field(default_factory=dict)

    def assign_teams(self, quota: PoolQuota) -> None:
        """Put each sweep into its team by this quota."""
        self._quota = quota
        self._put_into_teams()

    def _put_into_teams(self) -> None:
        for sweep_id, spec in self.specs.items():
            self.specs[sweep_id] = self._in_team(spec)

    def _in_team(self, spec: SweepSpec) -> SweepSpec:
        airflow_team = self._airflow_team_of.get(spec.run.dag_id, "")
        return spec.in_team(self._quota.team_of(spec.facts.user, airflow_team))

    def _read_airflow_teams(self, metadata: Metadata) -> None:
        """Read which DAG is of which of Airflow's teams, where the quota names some."""
        team_of = dag_teams(metadata, self._quota)
        if team_of != self._airflow_team_of:
            self._airflow_team_of = team_of
            self._put_into_teams()

    def refresh(self, metadata: Metadata) -> Mapping[str, SweepSpec]:
        """Bring `specs` up to date; return the specs of sweeps that have stopped running."""
        # The main DAG's come first: an id that two runs have is that of the other DAG's sweep.
        ordered = sorted(metadata.sweeps(), key=lambda run: run.dag_id != MAIN_DAG)
        runs = {run.sweep_id: run for run in ordered}
        self._read_airflow_teams(metadata)
        unreadable: dict[str, RunRow] = {}
        for sweep_id, run in runs.items():
            spec = self.specs.get(sweep_id)
            if (spec and spec.run == run) or self._not_ours.get(sweep_id) == run.sweep:
                continue  # a sweep that has been extended or resumed is read again
            read = self.faults.isolate(Subject(sweep_id), READ_RECORD, SweepSpec.from_run, run)
            if read is None:
                unreadable[sweep_id] = run
            elif read.value is not None and read.value.config.pool == self.pool:
                names, spec = self.machines.names, read.value
                self.specs[sweep_id] = self._in_team(spec.on_machines(names) if names else spec)
            else:
                self._not_ours[sweep_id] = run.sweep
        for sweep_id in unreadable.keys() - self.unreadable.keys():
            log.error("The sweep %s cannot be scheduled: its record cannot be read", sweep_id)
        self.unreadable = unreadable
        self._not_ours = {s: record for s, record in self._not_ours.items() if s in runs}
        return {gone: self.specs.pop(gone) for gone in set(self.specs) - set(runs)}

    def unread_runs(self) -> Mapping[str, RunRow]:
        """Return the runs of this pool whose sweep record could never be read."""
        runs = self.unreadable.items()
        return {s: run for s, run in runs if s not in self.specs and _pool_of(run) == self.pool}

    def hopeless(self) -> Iterator[tuple[RunRow, str]]:
        """Yield the unreadable sweeps of this pool that are to end, and why."""
        for fault in self.faults.faults:
            run = self.unreadable.get(fault.subject.sweep)
            if run is None or fault.step != READ_RECORD or _pool_of(run) != self.pool:
                continue
            if self.faults.lasted_s(fault) >= UNREADABLE_S:
                yield run, f"its record cannot be read: {fault.reason}"


def _pool_of(run: RunRow) -> str | None:
    """Return the pool that an unreadable record names; None where it names none."""
    config = run.sweep.get("config")
    pool = config.get("pool") if isinstance(config, Mapping) else None
    return pool if isinstance(pool, str) else None


def leased_gpus(metadata: Metadata, run: RunRow) -> frozenset[int]:
    """Return the GPUs of the leases in force of a sweep whose sweep record cannot be read."""
    gpus: set[int] = set()
    for records in metadata.records(run).values():
        lease = decode(Lease, records.get(LEASE_KEY))
        if lease is not None and is_active(lease, decode(SegmentRecord, records.get(SEGMENT_KEY))):
            gpus.update(lease.gpus)
    return frozenset(gpus)


def pool_snapshot(
    pool: str,
    metadata: Metadata,
    sweeps: Mapping[str, SweepState],
    now_s: float,
    *,
    nodes: Sequence[str] = (),
    jobs: tuple[Job, ...] | None = None,
    lendable: Collection[int] | None = None,
    unread: Collection[int] = (),
) -> Snapshot:
    """Return the facts on which a policy decides.

    Raise HermesError when Airflow has no such pool, or one without a number of slots.

    `jobs` are the trials of the sweeps, where they have been built, `lendable` the slots whose
    GPUs may be granted, None for all, `unread` the GPUs of trials that could not be read.
    """
    if jobs is None:
        jobs = tuple(j for b in sweeps.values() for j in b.jobs(now_s))
    runs = ((b.spec.run, b.spec.record) for b in sweeps.values())
    row = metadata.pool(pool, [(r.dag_id, r.run_id, record.trial_task) for r, record in runs])
    if row is None:
        raise HermesError(missing_pool(pool))
    if row.slots < 0:
        raise HermesError(unlimited_pool(pool))
    held = sorted((not j.uses_gpus, g) for j in jobs for g in j.gpus_held)
    pods = frozenset(s for s, b in sweeps.items() if b.spec.config.trial.run_in is RunIn.POD)
    is_numbered = not nodes and lendable is None
    of_pods = {g for j in jobs if is_numbered and j.sweep in pods for g in j.gpus_held}
    gpus = usable_gpus(row, [g for _, g in held], nodes, lendable, unread, of_pods=of_pods)
    return Snapshot(now_s, gpus, jobs)


def missing_pool(pool: str) -> str:
    """Say that Airflow has no such pool, and what to do."""
    return (
        f"Airflow has no pool {pool!r}: create it with as many slots as GPUs (Admin, Pools in "
        f"Airflow's page, or `airflow pools set {pool} SLOTS GPUs`). Then all sweeps continue."
    )


def unlimited_pool(pool: str) -> str:
    """Say that Airflow does not count the slots of a pool, and what to do."""
    return (
        f"Airflow's pool {pool!r} has no limit (-1 slots), so its number of GPUs is not known: "
        f"give it as many slots as GPUs (Admin, Pools in Airflow's page, or `airflow pools set "
        f"{pool} SLOTS GPUs`). Then all sweeps continue."
    )


def usable_gpus(
    pool: PoolRow,
    held: Sequence[int],
    nodes: Sequence[str] = (),
    lendable: Collection[int] | None = None,
    unread: Collection[int] = (),
    *,
    of_pods: Collection[int] = (),
) -> tuple[Gpu, ...]:
    """Return the GPUs that trials may use: those lendable, less as many as other tasks occupy.

    Tasks that are not trials occupy slots without naming GPUs, so GPUs that our trials hold are
    kept before free ones, in the order of `held`. A pod (`of_pods`) has whichever GPU its node
    gives it: its number is kept also if the pool has fewer slots by now. Trials that could not be
    read count as such tasks, but their GPUs are known (`unread`) and come last. `nodes` names the
    nodes of the first slots. Without `lendable` all slots of the pool may be granted.
    """
    able = range(pool.slots) if lendable is None else sorted(lendable)
    capacity = max(0, min(len(able), pool.slots) - pool.foreign_slots)
    mine = [g for g in dict.fromkeys(held) if g in able or g in of_pods]
    free = sorted((g for g in able if g not in mine), key=lambda g: g in unread)
    usable = sorted((mine + free)[:capacity])
    return tuple(Gpu(i, nodes[i]) if i < len(nodes) else Gpu(i) for i in usable)
