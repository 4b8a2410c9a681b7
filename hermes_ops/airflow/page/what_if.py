"""What another policy would decide on the pool as it is now: asked, never applied."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hermes_ops.airflow.control.controller import Choice
from hermes_ops.airflow.control.running import pool_snapshot
from hermes_ops.airflow.explaining import UNDECIDED
from hermes_ops.airflow.page.access import UNSEEN, Reader
from hermes_ops.airflow.page.contents import score
from hermes_ops.airflow.page.sight import Sight
from hermes_ops.config.limits import within_sweeps
from hermes_ops.core.history import PastTrial
from hermes_ops.core.model import Action, Job, Phase, Plan, Reason, Resize, Snapshot, Start
from hermes_ops.core.plan import check, diff
from hermes_ops.errors import HermesError
from hermes_ops.policies import takes_prior

if TYPE_CHECKING:
    from hermes_ops.airflow.control.books import Book

ROWS = 100

_ONE = threading.Lock()


@dataclass(frozen=True, slots=True)
class Change:
    """What would become of one trial; `trial` is "" for one that the reader may not see."""

    trial: str
    what: str
    now: str
    then: str
    rank: int | None
    reason: str
    score: str


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The next decision under a policy: what changes first, then who goes on, then the queue."""

    choice: Choice
    in_force: bool
    time_s: float
    changes: tuple[Change, ...]
    unchanged: int  # trials that wait now and then, beyond those shown
    prior_missing: bool


def current_choice() -> Choice:
    """The pool's policy as it was chosen; HermesError when the choice cannot be read."""
    return Choice.read(Choice.file())


def what_if(sight: Sight, pool: str, policy: str, reader: Reader) -> WhatIf:
    """The next decision of that policy, with its own options if it is the one in force.

    It begins without a memory, as a policy does that has just been chosen. One at a time in a
    process, as some policies compute for seconds: HermesError when another one is under way.
    """
    if not _ONE.acquire(blocking=False):
        raise HermesError("another what-if is being computed: ask again in a few seconds.")
    try:
        return _what_if(sight, pool, policy, reader)
    finally:
        _ONE.release()


def _what_if(sight: Sight, pool: str, name: str, reader: Reader) -> WhatIf:
    current = current_choice()
    choice = current if current.name == name else Choice(name)
    choice.build()  # a name that is none is refused before anything is read
    look = sight.look(pool)
    books = {s: replace(b, curves=_curves(sight, b)) for s, b in look.books.items()}
    prior = _prior(sight, books) if takes_prior(name) else ()
    snapshot = pool_snapshot(pool, sight.metadata, books, sight.clock())
    plan = decide(choice, books, snapshot, prior or ())
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
    choice: Choice, books: Mapping[str, Book], snapshot: Snapshot, prior: tuple[PastTrial, ...]
) -> Plan:
    """The plan that the controller would make; PlanError for an impossible one."""
    configs = {sweep: book.plan.config for sweep, book in books.items()}
    policy = within_sweeps(choice.build(prior), configs, choice.guards.open)
    plan, _ = policy.decide(snapshot, policy.initial())
    check(snapshot, plan)
    return plan


def _curves(sight: Sight, book: Book) -> Mapping[int, Any]:
    from hermes_ops.tracking import CurveReader

    plan = book.plan
    return CurveReader(sight.tracker, plan.config.objective.metric).read(plan.ref).points


def _prior(sight: Sight, books: Mapping[str, Book]) -> tuple[PastTrial, ...] | None:
    """What earlier sweeps have shown; None when MLflow does not tell."""
    from hermes_ops.airflow.control.priors import PriorFeed

    feed = PriorFeed(sight.tracker)
    feed.follow({s: b.plan for s, b in books.items()})
    feed.read_once()
    return None if feed.behind else feed.prior()


def _changes(snapshot: Snapshot, plan: Plan, reader: Reader) -> list[Change]:
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
) -> Change:
    what, gpus = _what(job, action)
    now, then = _gpus(job.gpus_held), _gpus(gpus)
    if not reader.reads_sweep(job.sweep):
        return Change("", what, now, then, rank, UNSEEN, "")
    text = reader.veiled(reason.text) if reason is not None else UNDECIDED
    terms = {t.name: t.value for t in reason.terms} if reason is not None else {}
    return Change(job.id, what, now, then, rank, text, score(terms))


def _what(job: Job, action: Action | None) -> tuple[str, tuple[int, ...]]:
    """What becomes of the job, and the GPUs that it would hold."""
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
