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

from hermes_ops.airflow.control.books import Book, find
from hermes_ops.airflow.control.faults import (
    DRAW,
    OPEN,
    RENDER,
    THE_POOL,
    FaultBarrier,
    Subject,
)
from hermes_ops.airflow.control.hands import Hands, known
from hermes_ops.airflow.control.nodes import leased_nodes
from hermes_ops.airflow.control.pool import Trial
from hermes_ops.airflow.control.search_process import SlowSearches, is_slow
from hermes_ops.airflow.records import Lease, Segment
from hermes_ops.airflow.trial.metrics import Ending, finish_run
from hermes_ops.config import leased_pod
from hermes_ops.config.render import why_not_started
from hermes_ops.core.model import JobId, Snapshot, Start
from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.tracking import Tracker

log = logging.getLogger(__name__)

PARAMS = "write params of new runs to MLflow"


@dataclass(slots=True)
class Granting:
    """Makes leases, and writes none of them to Airflow. `tags` are those of a trial's run."""

    tracker: Tracker
    hands: Hands
    tags: Callable[[Book, Trial], dict[str, str]]
    faults: FaultBarrier = field(default_factory=FaultBarrier)
    idle_hands: Hands = field(default_factory=Hands)  # for what no round waits for
    searches: SlowSearches = field(default_factory=SlowSearches)
    _configs: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    _bare: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # run -> its configuration
    _writing: dict[str, Future[None]] = field(default_factory=dict)

    def ask(
        self, books: Mapping[str, Book], starts: Iterable[Start], snapshot: Snapshot
    ) -> dict[JobId, Future[Lease]]:
        """The lease of each start, once the trial's run is open; none of one that has to wait."""
        asked: dict[JobId, Future[Lease]] = {}
        for action in starts:
            book, trial = find(books, action.job)
            nodes = leased_nodes(snapshot, action.gpus)
            granted = {"gpus": action.gpus, "granted_s": snapshot.time_s, "nodes": nodes}
            if trial.lease is not None:
                asked[action.job] = known(_next(trial.lease, granted))
            elif (opening := self._first(book, trial, granted)) is not None:
                asked[action.job] = opening
        return asked

    def forget(self, sweep: str) -> None:
        """Take nothing as known of a sweep that has ended: it may go on."""
        self._configs.pop(sweep, None)
        self.searches.forget(sweep)

    def close(self) -> None:
        """End the searches that have a process."""
        self.searches.close()

    def draw_ahead(self, book: Book) -> frozenset[int]:
        """Ask a slow search for the next trial's configuration; the trials that wait for one."""
        if not book.plan.learns or book.close is not None:
            return frozenset()
        known = self._configs.get(book.sweep, {})
        pending = [t.number for t in book.trials if t.lease is None and not t.ended]
        slow = [n for n in pending if n not in known and self._is_slow(book, n)]
        if not slow:
            return frozenset()
        if book.can_ask:
            config = book.plan.record.config
            self.searches.ask(book.sweep, config, slow[0], book.history)
        return frozenset(slow) - self.searches.answered(book.sweep)

    def _is_slow(self, book: Book, number: int) -> bool:
        plan, observed = book.plan, sum(t.lease is not None for t in book.trials)
        return is_slow(plan.config, plan.axes, number, observed)

    def complete(self, *, whole: bool = False) -> None:
        """Write the params of runs that were opened without; those that MLflow does not take now
        at the next call. Returns at once where that is done in the background, unless `whole`.
        """
        for run_id in self._bare.keys() - self._writing.keys():
            self._writing[run_id] = self.idle_hands.begin(
                self.tracker.add_params, run_id, self._bare[run_id]
            )
        if whole:
            wait(self._writing.values())
        for run_id in [r for r, begun in self._writing.items() if begun.done()]:
            error = self._writing.pop(run_id).exception()
            if isinstance(error, Unavailable):
                self.faults.note(Subject(THE_POOL), PARAMS, error)
                continue
            del self._bare[run_id]
            if error is None:
                self.faults.clear(Subject(THE_POOL), PARAMS)
            else:
                log.warning("The params of the run %s are not written: %s", run_id, error)

    def give_up(self, book: Book, trial: Trial, record: Segment, reason: str) -> None:
        """End in MLflow a trial that cannot be started, as far as its configuration is known."""
        config = self._configs.get(book.sweep, {}).get(trial.number)
        try:
            if trial.lease is not None:
                run_id = trial.lease.run_id
            elif config is not None:
                tags = self.tags(book, trial)
                run_id = self.tracker.open_trial(book.plan.ref, trial.number, config, tags)
            else:
                return
            finish_run(self.tracker, run_id, Ending("failed", reason), record)
        except Exception as error:  # whatever it is, the trial ends
            log.warning("MLflow has no word of trial %s of %s: %s", trial.number, book.sweep, error)

    def _first(self, book: Book, trial: Trial, granted: Mapping[str, Any]) -> Future[Lease] | None:
        subject = Subject(book.sweep, trial.number)
        drawn = self.faults.isolate(subject, DRAW, self._drawn, book, trial)
        if drawn is None or drawn.value is None:
            return None
        config, unseen = drawn.value
        made = self.faults.isolate(subject, RENDER, _of, book, config)
        if made is None:
            return None
        book.opened_now[trial.number] = config
        lease = replace(made.value, **granted)
        return self.hands.begin(self._opened, book, trial, lease, unseen)

    def _drawn(self, book: Book, trial: Trial) -> tuple[dict[str, Any], bool] | None:
        """The configuration of a trial, and whether MLflow has not seen it.

        None while a slow search has not answered.
        """
        configs = self._known(book)
        unseen = trial.number not in configs
        if unseen:  # kept: MLflow holds on to the first one that it is told
            config = self._asked(book, trial.number)
            if config is None:
                return None
            configs[trial.number] = config
        return configs[trial.number], unseen

    def _asked(self, book: Book, number: int) -> dict[str, Any] | None:
        if not self._is_slow(book, number):
            return book.ask(number)
        return self.searches.take(book.sweep, number)

    def _known(self, book: Book) -> dict[int, dict[str, Any]]:
        """Configurations by trial: those in MLflow (a controller that died opened them), ours."""
        if book.sweep not in self._configs:
            runs = self.tracker.trials(book.plan.ref)
            self._configs[book.sweep] = {r.number: dict(r.config) for r in runs}
            self._bare.update({r.run_id: r.unwritten for r in runs if r.unwritten})
        return self._configs[book.sweep]

    def _opened(self, book: Book, trial: Trial, lease: Lease, unseen: bool) -> Lease:
        run_id = self.tracker.open_trial(
            book.plan.ref,
            trial.number,
            lease.config,
            self.tags(book, trial),
            unseen=unseen,
            params=not unseen,
        )
        if unseen:
            self._bare[run_id] = lease.config
        return replace(lease, run_id=run_id)


def opened(
    asked: Mapping[JobId, Future[Lease]], faults: FaultBarrier
) -> Iterator[tuple[JobId, Lease]]:
    """The leases as they come; none of a trial whose run MLflow does not open now."""
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


def _next(lease: Lease, granted: Mapping[str, Any]) -> Lease:
    return replace(lease, epoch=lease.epoch + 1, revoked=False, **granted)


def _of(book: Book, config: dict[str, Any]) -> Lease:
    """What the sweep says of a trial with that configuration; no GPUs and no run as yet."""
    plan = book.plan
    spec, budget = plan.config.trial, plan.config.budget
    command, environment = book.command(config), book.environment(config)
    if (why := why_not_started(command, environment)) is not None:
        raise HermesError(why)
    return Lease(
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
    )
