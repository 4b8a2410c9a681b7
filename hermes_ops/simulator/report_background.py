"""The facts of a sweep's report beyond its trials: limits, ends of trials, replays."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from hermes_ops.config import SweepConfig
from hermes_ops.core.model import JobId
from hermes_ops.errors import HermesError
from hermes_ops.report.background import Alternative, Background, BestSoFar, GpuUse, TrialEnding
from hermes_ops.simulator.event_log import EventLog
from hermes_ops.simulator.replay import Replay, ReplaySettings
from hermes_ops.simulator.replay import replay as replayed_under
from hermes_ops.simulator.sweep_history import RecordedSweep, history_of, reconstruct, stops_of
from hermes_ops.simulator.workload import SimulationRun
from hermes_ops.tracking import Tracker, TrialRun
from hermes_ops.tracking.earlier_sweeps import earlier_nights
from hermes_ops.tracking.runs import RUN_STATUS
from hermes_ops.tracking.summary import CollectedSweep

log = logging.getLogger(__name__)

POLICIES = ("fifo", "asha")
PATIENCE_S = 30.0
"""Seconds that a report waits for each replay; with thousands of values one takes minutes."""


def background(
    tracker: Tracker,
    config: SweepConfig,
    collected: CollectedSweep,
    *,
    patience_s: float = PATIENCE_S,
    clock: Callable[[], float] = time.monotonic,
) -> Background:
    """Return the facts of a sweep from MLflow and from replays, without raising.

    What cannot be read, or not be replayed within `patience_s` seconds of the `clock`, is omitted,
    with the reason.
    """
    facts = Background(
        config=config,
        policy=collected.run.tags.get("hermes.policy", ""),
        closed=collected.run.tags.get("hermes.closed")
        or collected.run.tags.get("hermes.failed", ""),
        started_s=collected.run.started_ms / 1_000,
        checkpoint_s=dict(_checkpoints_s(collected.trials)),
        endings={t.number: _ending(t) for t in collected.trials if t.state in RUN_STATUS},
        nights=earlier_nights(tracker, collected.run, config.nightly.compare),
    )
    if collected.run.state not in RUN_STATUS:
        return replace(facts, no_alternatives="the sweep has not ended yet.")
    try:
        facts = replace(facts, stops=stops_of(tracker, collected.run.ref))
        record = reconstruct(history_of(config, collected, facts.stops))
    except Exception as error:  # even a defect here must not prevent the report
        log.warning("The sweep's record could not be read for its report.", exc_info=True)
        return replace(facts, no_alternatives=_one_line(error))
    best, best_s = record.measured.best, record.measured.time_to_best_s
    facts = replace(facts, best_finished=best, time_to_best_s=best_s)
    without = {t.number for t in collected.summary.trials if not t.can_be_best}
    return _with_replays(facts, record, without, patience_s, clock)


def _with_replays(
    facts: Background,
    record: RecordedSweep,
    without: Collection[int],
    patience_s: float,
    clock: Callable[[], float],
) -> Background:
    replays, missing = [], []
    for policy in POLICIES:
        try:
            replays.append(alternative(record, policy, without, _deadline(clock, patience_s)))
        except Exception as error:  # as above
            log.warning("The sweep could not be replayed under %s.", policy, exc_info=True)
            missing.append(f"under {policy}: {_one_line(error)}")
    return replace(facts, alternatives=tuple(replays), no_alternatives=" ".join(missing))


def _deadline(clock: Callable[[], float], patience_s: float) -> Callable[[], bool]:
    until_s = clock() + patience_s
    return lambda: clock() > until_s


def alternative(
    sweep: RecordedSweep,
    policy: str,
    without: Collection[int] = (),
    is_late: Callable[[], bool] = lambda: False,
) -> Alternative:
    """Return the sweep's replay under a policy, within the guards of a live pool.

    The trials `without` cannot be the best: the courses omit their values. Figures and courses are
    of the same simulations. Raise HermesError as soon as it `is_late`, and the errors of `replay`.
    """
    name = sweep.workload.name

    def check(_: str) -> None:
        if is_late():
            raise HermesError(
                "the replay takes longer than a report waits; "
                f"`hermes replay {name} --policy {policy}` waits."
            )

    settings = ReplaySettings(policy, {})
    replayed = replayed_under(sweep, settings, log_of=lambda _: EventLog(check), shifts_s=(0.0,))
    return _alternative(sweep, replayed, {JobId(f"{name}/{number}") for number in without})


def _alternative(sweep: RecordedSweep, replayed: Replay, without: Collection[JobId]) -> Alternative:
    return Alternative(
        policy=replayed.settings.policy,
        time_to_best_s=replayed.time_to_best_s.range,
        gpu_s=replayed.gpu_hours.times(3_600.0).range,
        preemptions=replayed.preemptions.range,
        makespan_s=replayed.makespan_s.range,
        courses=tuple(
            _course(run, sweep.config.objective.sign, replayed.costs.handover_s, without)
            for _, run in replayed.runs
        ),
        cut_short=replayed.cut_short,
        needed=replayed.needed,
    )


def _course(
    run: SimulationRun, sign: float, handover_s: float, without: Collection[JobId]
) -> BestSoFar:
    """Return the best value so far of a simulation, counted like the sweep's own."""
    seen = [(s.at_s, sign * s.loss) for s in run.observations if s.job not in without]
    held: list[GpuUse] = [
        (min(s.begin_s + handover_s, s.end_s), s.end_s, len(s.gpus)) for s in run.segments
    ]
    return BestSoFar.from_values(seen, held, maximize=sign < 0)


def _checkpoints_s(trials: Sequence[TrialRun]) -> Iterator[tuple[int, float]]:
    for trial in trials:
        if (seconds := trial.timing_s("checkpoint_s")) is not None:
            yield trial.number, seconds


def _ending(trial: TrialRun) -> TrialEnding:
    tail, first = (trial.tags.get(f"hermes.{n}", "") for n in ("output_tail", "first_failure"))
    if first:
        tail = f"{tail}\n\nThe first failure of this trial was: {first}".lstrip()
    return TrialEnding(trial.tags.get("hermes.reason", ""), tail)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, HermesError) else f"{type(error).__name__}: {text[:200]}"
