"""What a sweep's report tells beside its trials: its limits, how trials ended, its replays."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from hermes_ops.config import SweepConfig
from hermes_ops.core.model import JobId
from hermes_ops.errors import HermesError
from hermes_ops.report.background import Alternative, Background, Course, Ending, Held
from hermes_ops.simulator.event_log import EventLog
from hermes_ops.simulator.recorded import Recorded, record_of, recorded, stops_of
from hermes_ops.simulator.replay import Choice, Replay
from hermes_ops.simulator.replay import replay as replayed_under
from hermes_ops.simulator.workload import Run
from hermes_ops.tracking import Tracker, TrialRun
from hermes_ops.tracking.nights import earlier_nights
from hermes_ops.tracking.runs import RUN_STATUS
from hermes_ops.tracking.summary import Collected

log = logging.getLogger(__name__)

POLICIES = ("fifo", "asha")
PATIENCE_S = 30.0
"""How long a sweep's report waits for each replay; of thousands of values one takes minutes."""


def background(
    tracker: Tracker,
    config: SweepConfig,
    found: Collected,
    *,
    patience_s: float = PATIENCE_S,
    clock: Callable[[], float] = time.monotonic,
) -> Background:
    """Return what MLflow and the replays tell of a sweep; never a reason to have no report.

    What cannot be read, or not be replayed within `patience_s` seconds of the `clock`, is left out,
    with the reason.
    """
    told = Background(
        config=config,
        policy=found.run.tags.get("hermes.policy", ""),
        closed=found.run.tags.get("hermes.closed") or found.run.tags.get("hermes.failed", ""),
        started_s=found.run.started_ms / 1_000,
        checkpoint_s=dict(_checkpoints_s(found.trials)),
        endings={t.number: _ending(t) for t in found.trials if t.state in RUN_STATUS},
        nights=earlier_nights(tracker, found.run, config.nightly.compare),
    )
    if found.run.state not in RUN_STATUS:
        return replace(told, no_alternatives="the sweep has not ended yet.")
    try:
        told = replace(told, stops=stops_of(tracker, found.run.ref))
        record = recorded(record_of(config, found, told.stops))
    except Exception as error:  # even a defect here must not take the report along
        log.warning("The sweep's record could not be read for its report.", exc_info=True)
        return replace(told, no_alternatives=_one_line(error))
    best, best_s = record.measured.best, record.measured.time_to_best_s
    told = replace(told, best_finished=best, time_to_best_s=best_s)
    without = {t.number for t in found.summary.trials if not t.can_be_best}
    return _with_replays(told, record, without, patience_s, clock)


def _with_replays(
    told: Background,
    record: Recorded,
    without: Collection[int],
    patience_s: float,
    clock: Callable[[], float],
) -> Background:
    found, missing = [], []
    for policy in POLICIES:
        try:
            found.append(alternative(record, policy, without, _deadline(clock, patience_s)))
        except Exception as error:  # as above
            log.warning("The sweep could not be replayed under %s.", policy, exc_info=True)
            missing.append(f"under {policy}: {_one_line(error)}")
    return replace(told, alternatives=tuple(found), no_alternatives=" ".join(missing))


def _deadline(clock: Callable[[], float], patience_s: float) -> Callable[[], bool]:
    until_s = clock() + patience_s
    return lambda: clock() > until_s


def alternative(
    found: Recorded,
    policy: str,
    without: Collection[int] = (),
    is_late: Callable[[], bool] = lambda: False,
) -> Alternative:
    """Return the sweep's replay under a policy, within the guards of a live pool.

    The values of the trials `without`, which cannot be the best, are no part of the courses.
    Figures and courses are of the same simulations. Raises HermesError as soon as it `is_late`, and
    what `replay` raises.
    """
    name = found.workload.name

    def check(_: str) -> None:
        if is_late():
            raise HermesError(
                "the replay takes longer than a report waits; "
                f"`hermes replay {name} --policy {policy}` waits."
            )

    choice = Choice(policy, {})
    replayed = replayed_under(found, choice, log_of=lambda _: EventLog(check), shifts_s=(0.0,))
    return _alternative(found, replayed, {JobId(f"{name}/{number}") for number in without})


def _alternative(found: Recorded, replayed: Replay, without: Collection[JobId]) -> Alternative:
    return Alternative(
        policy=replayed.choice.policy,
        time_to_best_s=replayed.time_to_best_s.range,
        gpu_s=replayed.gpu_hours.times(3_600.0).range,
        preemptions=replayed.preemptions.range,
        makespan_s=replayed.makespan_s.range,
        courses=tuple(
            _course(run, found.config.objective.sign, replayed.costs.handover_s, without)
            for _, run in replayed.runs
        ),
        cut_short=replayed.cut_short,
        needed=replayed.needed,
    )


def _course(run: Run, sign: float, handover_s: float, without: Collection[JobId]) -> Course:
    """The simulation's values and GPUs, as the sweep's own are counted."""
    seen = [(s.at_s, sign * s.loss) for s in run.sights if s.job not in without]
    held: list[Held] = [
        (min(s.begin_s + handover_s, s.end_s), s.end_s, len(s.gpus)) for s in run.segments
    ]
    return Course.of(seen, held, maximize=sign < 0)


def _checkpoints_s(trials: Sequence[TrialRun]) -> Iterator[tuple[int, float]]:
    for trial in trials:
        if (seconds := trial.timing_s("checkpoint_s")) is not None:
            yield trial.number, seconds


def _ending(trial: TrialRun) -> Ending:
    tail, first = (trial.tags.get(f"hermes.{n}", "") for n in ("output_tail", "first_failure"))
    if first:
        tail = f"{tail}\n\nThe first failure of this trial was: {first}".lstrip()
    return Ending(trial.tags.get("hermes.reason", ""), tail)


def _one_line(error: Exception) -> str:
    said = " ".join(str(error).split())
    return said if isinstance(error, HermesError) else f"{type(error).__name__}: {said[:200]}"
