"""Jobs of one to four workers that arrive at random, live under several policies and simulated."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, pairwise
from random import Random
from statistics import mean, median
from typing import Any

from bench import stack
from bench.measure import QUICK, SCRIPTS, Figures, NotMeasuredError, read_lines
from bench.resize import stamps
from hermes_ops.airflow.control.policy_settings import PolicySettings
from hermes_ops.airflow.identity import MAIN_DAG
from hermes_ops.cli.connection import Connection
from hermes_ops.core.model import Gpu, JobId, Point, SweepId
from hermes_ops.core.sizes import BatchRange, StepTime
from hermes_ops.simulator.engine import simulate
from hermes_ops.simulator.workload import Costs, Pace, Placement, SegmentStart, Work, Workload

SLOTS, SIZES = 4, (1, 2, 3, 4)
JOBS = 3 if QUICK else 6
EPOCHS = (4, 8) if QUICK else (20, 60)
EPOCH_S, BATCHES = 1.0, 10  # of one worker
POWER = 0.85
"""An epoch of n workers is n**POWER times as fast as one of a single worker."""
MEAN_GAP_S = 4.0 if QUICK else 12.0
SEED = 3
JOB_TIMEOUT_S = 600.0
TARGET = 0.05
OBSERVATION_DELAY_S = 0.4
SPEED_REPORTS = 2
OPTIONS = {"guard_k": 0, "guard_default_switch_s": 0}
"""The guard against thrashing is off. Without the second option it would still keep a script that
has no hook on its GPUs for five seconds after each start, which no simulated job says of itself."""


@dataclass(frozen=True, slots=True)
class Contest:
    """A policy, and the GPUs of each job: a range, or a number for all."""

    policy: str
    gpus: int | None = None

    @property
    def name(self) -> str:
        """The policy, or the fixed size."""
        return self.policy if self.gpus is None else f"fixed_{self.gpus}"

    @property
    def settings(self) -> PolicySettings:
        """Return the policy with its options, those of the guards included."""
        return PolicySettings(self.policy, OPTIONS)


ALL = (
    Contest("doubling"),
    Contest("elastic-frontrunner"),
    *(Contest("fifo", gpus) for gpus in (1, 2, 4)),
)
NAMES = tuple(filter(None, os.environ.get("BENCH_POLICIES", "").split(",")))
CONTESTS = tuple(c for c in ALL if c.name in NAMES or not NAMES)[: 2 if QUICK else None]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A job of so many epochs, and its seconds after the first one."""

    at_s: float
    epochs: int


@dataclass(frozen=True, slots=True)
class LiveJob:
    """What was seen of a job; times are Unix seconds.

    `known_s`: the first round of the controller that knew it. `starts`: of each segment the
    decision or the end of the one before, the start of hermes-trial, that of the script, and the
    workers. `stops_s`: from each decision to resize until all workers had left.
    """

    epochs: int
    known_s: float
    ended_s: float
    starts: tuple[tuple[float, float, float, int], ...]
    stops_s: tuple[float, ...]
    epochs_s: tuple[tuple[int, float], ...]


def arrivals() -> tuple[Arrival, ...]:
    """Return the jobs, always the same: Poisson arrivals, epochs drawn evenly."""
    chance, at_s, found = Random(SEED), 0.0, []
    for _ in range(JOBS):
        found.append(Arrival(at_s, chance.randint(*EPOCHS)))
        at_s += chance.expovariate(1.0 / MEAN_GAP_S)
    return tuple(found)


def run() -> Figures:
    """Compare measured and simulated completion of the same jobs under each policy."""

    live: dict[Contest, tuple[LiveJob, ...]] = {}
    with stack.running(SLOTS) as own:
        connection = Connection.from_home(own.home)
        for contest in CONTESTS:
            pairs = (("--option", f"{name}={value}") for name, value in OPTIONS.items())
            own.hermes("policy", contest.policy, *chain.from_iterable(pairs))
            live[contest] = _measured(own, connection, contest)
        every = [job for jobs in live.values() for job in jobs]
    speeds = epoch_seconds(every)
    costs = {c: costs_of(jobs, every) for c, jobs in live.items()}
    found = {c.name: compared(c, jobs, speeds, costs[c]) for c, jobs in live.items()}
    return {
        "policies": found,
        "jobs": JOBS,
        "slots": SLOTS,
        "epoch_s": {str(size): round(seconds, 3) for size, seconds in speeds.items()},
        "target_relative": TARGET,
        "within_target": all(abs(f["relative"]) <= TARGET for f in found.values()),
    }


# -- live ------------------------------------------------------------------------------------------


def _measured(own: stack.Stack, connection: Connection, contest: Contest) -> tuple[LiveJob, ...]:
    """Run the jobs, and return what was seen of each."""
    begun_s = time.monotonic()
    sweeps: list[stack.Sweep] = []
    known_s: dict[str, float] = {}
    waiting = list(arrivals())
    while waiting or not all(_ended_s(sweep) for sweep in sweeps):
        passed_s = time.monotonic() - begun_s
        if passed_s > JOB_TIMEOUT_S:
            raise NotMeasuredError(f"{contest.name}: not all ended within {JOB_TIMEOUT_S:g} s")
        if waiting and passed_s >= waiting[0].at_s:
            sweeps.append(_start(own, connection, contest, len(sweeps), waiting.pop(0)))
        _note_known(own, known_s)
        time.sleep(0.05)
    epochs = [arrival.epochs for arrival in arrivals()]
    return tuple(
        _job(sweep, of_job, known_s[sweep.id]) for sweep, of_job in zip(sweeps, epochs, strict=True)
    )


def _start(
    own: stack.Stack, connection: Connection, contest: Contest, number: int, arrival: Arrival
) -> stack.Sweep:
    from hermes_ops.config import parse

    config = stack.stub_sweep(f"{contest.name}-{number}", 1, pause_s=EPOCH_S / BATCHES)
    command = config["trial"]["command"]
    command[1] = "ranks.py"
    command += ["--power", str(POWER), "--batches", str(BATCHES), "--epochs", str(arrival.epochs)]
    gpus: Any = contest.gpus or {"min": SIZES[0], "max": SIZES[-1]}
    config["trial"].update(gpus=gpus, workers="one_per_gpu", directory=str(SCRIPTS))
    config["budget"] = {"max_epochs": arrival.epochs}
    sweep = f"{config['name']}-{os.getpid()}"
    conf = json.loads(parse(config, "the benchmark", base=None).to_json())
    connection.airflow.trigger(MAIN_DAG, sweep, conf)
    return stack.Sweep(own.home, sweep)


def _note_known(own: stack.Stack, known_s: dict[str, float]) -> None:
    """Note when the controller first knew a job: by the pool's view, which each round writes."""
    from hermes_ops.airflow.control.pool_file import read_view

    view = read_view("gpus", own.home) or {}
    for job in view.get("jobs", ()):
        known_s.setdefault(str(job["id"]).partition("/")[0], float(view["time_s"]))


def _segments(sweep: stack.Sweep) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for line in read_lines(sweep.trial(0) / "segments.jsonl"):
        found.setdefault(line["epoch"], {}).update(line)
    return [found[epoch] for epoch in sorted(found)]


def _ended_s(sweep: stack.Sweep) -> float | None:
    ends = [s["end_s"] for s in _segments(sweep) if s.get("outcome") == "finished"]
    return float(ends[0]) if ends else None


def _job(sweep: stack.Sweep, epochs: int, known_s: float) -> LiveJob:
    segments, ended_s = _segments(sweep), _ended_s(sweep)
    assert ended_s is not None
    resized_s = [d["time_s"] for d in sweep.decisions() if d["action"] == "resize"]
    ends_s = [float(segment["end_s"]) for segment in segments]
    stops = [(told, min(e for e in ends_s if e > told)) for told in resized_s if told < ends_s[-1]]
    return LiveJob(
        epochs,
        known_s,
        ended_s,
        tuple(_starts(sweep, segments, {end for _, end in stops})),
        tuple(end - told for told, end in stops),
        tuple(_epochs_s(sweep, segments)),
    )


def _starts(
    sweep: stack.Sweep, segments: list[dict[str, Any]], resized_s: Set[float]
) -> Iterator[tuple[float, float, float, int]]:
    """Yield the start of each segment: of the first one, and of those after a resize."""
    granted_s = [d["time_s"] for d in sweep.decisions() if d["action"] == "start"]
    before_s = [granted_s[0], *(float(segment["end_s"]) for segment in segments[:-1])]
    for since_s, segment in zip(before_s, segments, strict=True):
        lines = (
            stamp
            for stamp in stamps(sweep)
            if segment["start_s"] <= stamp["line_s"] <= segment["end_s"]
        )
        stamp = next(lines, None)
        if stamp is not None and (since_s == granted_s[0] or since_s in resized_s):
            yield since_s, segment["start_s"], stamp["line_s"], int(stamp["size"])


def _epochs_s(sweep: stack.Sweep, segments: list[dict[str, Any]]) -> Iterator[tuple[int, float]]:
    """Yield the workers and the seconds of each epoch that began and ended in one segment."""
    points = [m["time_ms"] / 1e3 for m in read_lines(sweep.trial(0) / "metrics.jsonl")
              if m["name"] == "loss"]  # fmt: skip
    for segment in segments:
        within = [at for at in points if segment["start_s"] <= at <= segment["end_s"]]
        yield from ((len(segment["gpus"]), later - at) for at, later in pairwise(within))


# -- simulated -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeasuredTraining:
    """A job as fast as epochs were measured; its unit of work is a second of one worker."""

    rates: Mapping[int, float]
    epoch_s: float
    sizes: tuple[int, ...] = SIZES
    batch_range: BatchRange | None = None

    def pace(self, placement: Placement, epoch: int, batch: int | None) -> Pace:  # noqa: ARG002 - interface
        """Return the measured pace on so many GPUs."""
        rate = self.rates[sum(placement)]
        return Pace(rate, StepTime(sum(placement), self.epoch_s / rate, len(placement)))

    def noise_scale(self, epoch: int) -> float | None:  # noqa: ARG002 - interface
        """Return None: the batch never changes."""
        return None


def epoch_seconds(jobs: Iterable[LiveJob]) -> dict[int, float]:
    """Return the median seconds of an epoch by workers; of sizes not seen, those of the script."""
    seen = [pair for job in jobs for pair in job.epochs_s]
    by_size = {size: [s for workers, s in seen if workers == size] for size in SIZES}
    return {s: median(took) if took else EPOCH_S / s**POWER for s, took in by_size.items()}


SegmentCosts = tuple[Costs, float]
"""The costs of a segment after a resize, and by how much later a first one begins to train."""


def costs_of(jobs: Sequence[LiveJob], every: Sequence[LiveJob]) -> SegmentCosts:
    """Return the usual costs of these jobs.

    They are medians over the policy's own jobs; where none was resized, over `every` job.
    """
    again = [s for j in jobs for s in j.starts[1:]] or [s for j in every for s in j.starts[1:]]
    stops = [s for j in jobs for s in j.stops_s] or [s for j in every for s in j.stops_s]
    handover_s = median(start - since for since, start, _, _ in again) if again else 0.0
    startup_s = median(line - start for _, start, line, _ in again) if again else 0.0
    leave_s = median(stops) if stops else 0.0
    firsts = median(j.starts[0][2] - j.starts[0][0] for j in jobs)
    costs = Costs(startup_s=startup_s, checkpoint_s=leave_s, handover_s=handover_s)
    return costs, max(0.0, firsts - handover_s)


def compared(
    contest: Contest, jobs: Sequence[LiveJob], speeds: Mapping[int, float], cost: SegmentCosts
) -> Figures:
    """Return the measured and simulated completion of the jobs, and how far they are apart."""
    workload = _workload(contest, jobs, speeds, cost)
    gpus = tuple(Gpu(index) for index in range(SLOTS))
    outcome = simulate(workload, gpus, contest.settings.build())
    simulated = {o.work.id: o.completion_s for o in outcome.outcomes}
    if None in simulated.values():
        raise NotMeasuredError(f"{contest.name}: not all jobs end in the simulation")
    ours_s = mean(job.ended_s - job.known_s for job in jobs)
    theirs_s = mean(seconds for seconds in simulated.values() if seconds is not None)
    first_s = min(job.known_s for job in jobs)
    costs, first_lead_s = cost
    return {
        "measured_mean_completion_s": round(ours_s, 2),
        "simulated_mean_completion_s": round(theirs_s, 2),
        "relative": round(theirs_s / ours_s - 1.0, 4),
        "measured_makespan_s": round(max(job.ended_s for job in jobs) - first_s, 2),
        "simulated_makespan_s": round(max(s.end_s for s in outcome.segments), 2),
        "measured_resizes": sum(len(job.stops_s) for job in jobs),
        "simulated_resizes": sum(o.resizes + o.preemptions for o in outcome.outcomes),
        "first_lead_s": round(costs.handover_s + first_lead_s, 3),
        "resize_s": round(costs.checkpoint_s + costs.handover_s + costs.startup_s, 3),
    }


def _workload(
    contest: Contest, jobs: Sequence[LiveJob], speeds: Mapping[int, float], cost: SegmentCosts
) -> Workload:
    costs, first_lead_s = cost
    first_s = min(job.known_s for job in jobs)
    rates = {size: speeds[1] / seconds for size, seconds in speeds.items()}
    works = []
    for number, job in enumerate(jobs):
        epoch_s = speeds[1] if contest.gpus is None else speeds[contest.gpus]
        sweep = f"{contest.name}-{number}"
        works.append(
            Work(
                id=JobId(f"{sweep}/0"),
                submitted_s=job.known_s - first_s,
                seconds=job.epochs * epoch_s,
                gpus=contest.gpus or SIZES[0],
                sweep=SweepId(sweep),
                total_steps=job.epochs,
                curve=tuple(Point(n, 1000.0 - n, n * epoch_s) for n in range(1, job.epochs + 1)),
                configuration=(("rate", 1.0),),
                costs=costs,
                starts=(SegmentStart(first_lead_s, first_lead_s),),
                training=MeasuredTraining(rates, epoch_s) if contest.gpus is None else None,
            )
        )
    return Workload(
        contest.name,
        tuple(works),
        observation_delay_s=OBSERVATION_DELAY_S,
        speed_reports=SPEED_REPORTS,
    )
