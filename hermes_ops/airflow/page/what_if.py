"""The decision that another policy would make on the pool now; nothing is applied."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hermes_ops.airflow.control.policy_settings import PolicySettings
from hermes_ops.airflow.control.quota_settings import QuotaInForce
from hermes_ops.airflow.control.sweep_state import pool_snapshot
from hermes_ops.airflow.explanation import UNDECIDED
from hermes_ops.airflow.machines import MachineSlots
from hermes_ops.airflow.page.access import UNSEEN, Reader
from hermes_ops.airflow.page.pool_view import PageSources, score
from hermes_ops.config.sweep_rules import with_sweep_rules
from hermes_ops.core.model import Job, PastTrial, Phase, Plan, Reason, Snapshot
from hermes_ops.core.plan import Action, Resize, Start, check, diff
from hermes_ops.errors import HermesError
from hermes_ops.policies import takes_prior

if TYPE_CHECKING:
    from hermes_ops.airflow.control.sweep_state import SweepState

ROWS = 100

_ONE = threading.Lock()


@dataclass(frozen=True, slots=True)
class TrialChange:
    """The decision on one trial; `trial` is "" for one that the reader may not see."""

    trial: str
    what: str
    now: str
    then: str
    rank: int | None
    reason: str
    score: str


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The next decision under a policy: changes first, then trials that go on, then the queue."""

    choice: PolicySettings
    in_force: bool
    time_s: float
    changes: tuple[TrialChange, ...]
    unchanged: int  # trials that wait now and then, beyond those shown
    prior_missing: bool


def current_choice() -> PolicySettings:
    """Return the pool's policy settings; HermesError when they cannot be read."""
    return PolicySettings.load(PolicySettings.file())


def what_if(sources: PageSources, pool: str, policy: str, reader: Reader) -> WhatIf:
    """Return the next decision of that policy, with its options if it is the one in force.

    It begins without a memory, like a policy that has just been chosen. One request at a time, as
    some policies compute for seconds: HermesError while another one is computed.
    """
    if not _ONE.acquire(blocking=False):
        raise HermesError("another what-if is being computed: ask again in a few seconds.")
    try:
        return _what_if(sources, pool, policy, reader)
    finally:
        _ONE.release()


def _what_if(sources: PageSources, pool: str, name: str, reader: Reader) -> WhatIf:
    current = current_choice()
    choice = current if current.name == name else PolicySettings(name)
    choice.build()  # a name that is none is refused before anything is read
    pool_view = sources.pool_view(pool)
    curves = _curves(sources, pool_view.sweep_states)
    sweep_states = {s: replace(b, curves=curves[s]) for s, b in pool_view.sweep_states.items()}
    prior = _prior(sources, sweep_states) if takes_prior(name) else ()
    view = pool_view.view  # of a pool with machines it alone tells whose GPUs there are
    lendable = view.get("gpus") if view.get("machines") else None
    snapshot = pool_snapshot(
        pool,
        sources.metadata,
        sweep_states,
        sources.clock(),
        nodes=MachineSlots.from_environment().of_slot,
        lendable=lendable,
    )
    plan = decide(choice, sweep_states, snapshot, prior or (), pool_view.quota)
    changes = _changes(snapshot, plan, reader)
    return WhatIf(
        choice,
        choice == current,
        snapshot.time_s,
        tuple(changes[:ROWS]),
        max(0, len(changes) - ROWS),
        prior is None,
    )


def decide(
    choice: PolicySettings,
    sweep_states: Mapping[str, SweepState],
    snapshot: Snapshot,
    prior: tuple[PastTrial, ...],
    quota: QuotaInForce | None = None,
) -> Plan:
    """Return the plan that the controller would make; PlanError for an impossible one."""
    configs = {sweep: sweep_state.spec.config for sweep, sweep_state in sweep_states.items()}
    policy, guards = choice.build(prior), choice.guards
    memory = policy.initial()
    if quota is not None:
        policy, memory = quota.enclose(policy, memory, guards)
    plan, _ = with_sweep_rules(policy, configs, guards.open_per_gpu).decide(snapshot, memory)
    check(snapshot, plan)
    return plan


def _curves(
    sources: PageSources, sweep_states: Mapping[str, SweepState]
) -> dict[str, Mapping[int, Any]]:
    """Return the curves of each sweep; readers of earlier requests fetch only new points.

    The first fetch of a reader is one request to MLflow for each trial. Only one thread at a time
    may use the readers.
    """
    from hermes_ops.tracking.curves import CurveReader

    specs = {sweep: sweep_state.spec for sweep, sweep_state in sweep_states.items()}
    sources.curve_readers = {
        spec.ref: sources.curve_readers.get(spec.ref)
        or CurveReader(sources.tracker, spec.config.objective.metric)
        for spec in specs.values()
    }
    return {s: sources.curve_readers[spec.ref].fetch(spec.ref).points for s, spec in specs.items()}


def _prior(
    sources: PageSources, sweep_states: Mapping[str, SweepState]
) -> tuple[PastTrial, ...] | None:
    """Return the trials of earlier sweeps; None when MLflow does not answer."""
    from hermes_ops.airflow.control.feeds import PriorFeed

    feed = PriorFeed(sources.tracker)
    feed.follow({s: b.spec for s, b in sweep_states.items()})
    feed.read_once()
    return None if feed.behind else feed.prior()


def _changes(snapshot: Snapshot, plan: Plan, reader: Reader) -> list[TrialChange]:
    actions = {action.job: action for action in diff(snapshot, plan)}
    ranks = {job: place for place, job in enumerate(plan.ranking, start=1)}
    last = len(ranks) + 1

    def order(job: Job) -> tuple[Any, ...]:
        return (job.id not in actions, not job.holds_gpus, ranks.get(job.id, last))

    shown = sorted((j for j in snapshot.jobs if j.phase is not Phase.ENDED), key=order)
    return [
        _change(job, actions.get(job.id), ranks.get(job.id), plan.reasons.get(job.id), reader)
        for job in shown
    ]


def _change(
    job: Job, action: Action | None, rank: int | None, reason: Reason | None, reader: Reader
) -> TrialChange:
    what, gpus = _what(job, action)
    now, then = _gpus(job.gpus_held), _gpus(gpus)
    if not reader.reads_sweep(job.sweep):
        return TrialChange("", what, now, then, rank, UNSEEN, "")
    text = reader.redacted(reason.text) if reason is not None else UNDECIDED
    terms = {t.name: t.value for t in reason.terms} if reason is not None else {}
    return TrialChange(job.id, what, now, then, rank, text, score(terms))


def _what(job: Job, action: Action | None) -> tuple[str, tuple[int, ...]]:
    """Return what the plan does with the job, and the GPUs that it would hold."""
    if action is None:
        if job.holds_gpus:
            return "goes on", job.gpus_held
        return ("leaves" if job.phase is Phase.STOPPING else "waits"), ()
    if isinstance(action, Start):
        return ("starts" if job.phase is Phase.PENDING else "resumes"), action.gpus
    if isinstance(action, Resize):
        return "moves", action.gpus
    return ("ends early" if action.final else "stops, to go on later"), ()


def _gpus(gpus: tuple[int, ...]) -> str:
    return ", ".join(map(str, gpus)) or "–"
