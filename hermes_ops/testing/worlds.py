"""Worlds for the contract tests: any snapshot, any history, workloads of all kinds of jobs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Any

from hypothesis import strategies as st

from hermes_ops.core.early_stop import EarlyStop
from hermes_ops.core.guards import Aging, AntiThrash, guarded
from hermes_ops.core.model import Gpu, Job, JobId, Phase, Point, Policy, Snapshot, SweepId
from hermes_ops.core.oracle import Oracle
from hermes_ops.core.quota import Quota, TeamQuota
from hermes_ops.core.sizes import BatchRange, StepTime
from hermes_ops.core.sweep_limits import MaxParallel, MaxUnreported
from hermes_ops.core.wrapper import OneSize
from hermes_ops.policies import make_policy, needs_shares, sizes_jobs
from hermes_ops.simulator.workload import Costs, Pace, Placement, Work, Workload

NOW_S = 1_000.0
LOSSES = st.one_of(
    st.floats(0, 10), st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e300])
)
SWEEPS = (SweepId("a"), SweepId("b"))
QUOTA = Quota(
    (TeamQuota("vision", 2), TeamQuota("speech", 1, borrow=1, weight=2.0)),
    user_limits=(("bob", 3),),
)
WRAPPERS: dict[str, Any] = {
    "bare": lambda policy: policy,
    "anti-thrash": AntiThrash,
    "aging": lambda policy: Aging(policy, quanta=1),
    "guarded": guarded,
    "max-parallel": lambda policy: MaxParallel(guarded(policy), ((SWEEPS[0], 1),)),
    "learning": lambda policy: MaxUnreported(guarded(policy), frozenset(SWEEPS[:1]), 1),
    "early-stop": lambda policy: EarlyStop(guarded(policy), tuple((s, "median") for s in SWEEPS)),
}


@dataclass(frozen=True, slots=True)
class Fortune:
    """An oracle that derives the future of each job from its facts."""

    def remaining_s(self, job: Job, now_s: float) -> float:  # noqa: ARG002 - interface
        """Return a number of seconds that follows from the job's facts."""
        return float(len(job.id) * 7 + len(job.curve)) % 5 + job.min_gpus

    def remaining_work(self, job: Job, now_s: float) -> float:
        """Return the same number as units of work."""
        return self.remaining_s(job, now_s)

    def rate(self, job: Job, placement: tuple[int, ...], batch: int | None = None) -> float:  # noqa: ARG002 - interface
        """Return a pace that grows more slowly than the GPUs; 0 for a size it does not take."""
        gpus = sum(placement)
        return gpus / (gpus + len(job.id) % 3) if job.takes(gpus) else 0.0

    def expected_rate(self, job: Job, placement: tuple[int, ...]) -> float:
        """Return the same pace."""
        return self.rate(job, placement)

    def remaining_steps(self, job: Job, now_s: float) -> float:
        """Return the same number as steps."""
        return self.remaining_s(job, now_s)

    def step_s(self, job: Job, placement: tuple[int, ...]) -> float:
        """Return the seconds of a unit of work."""
        rate = self.rate(job, placement)
        return 1.0 / rate if rate > 0 else inf

    def final_loss(self, job: Job) -> float:
        """Return the least loss of the curve so far."""
        return min((p.loss for p in job.curve if p.loss > -inf), default=inf)


def built(name: str, wrapper: str, future: Oracle = Fortune()) -> Policy[Any]:
    """Return the policy of that name within a wrapper of WRAPPERS."""
    policy: Policy[Any] = WRAPPERS[wrapper](make_policy(name, {}, {"oracle": future}))
    return policy


def as_simulated(name: str, policy: Policy[Any]) -> Policy[Any]:
    """Return the policy of that name, and its guards, for jobs of one size unless it sizes jobs."""
    return policy if sizes_jobs(name) else OneSize(policy)


@st.composite
def curves(draw: st.DrawFn) -> tuple[Point, ...]:
    """Draw a learning curve of at most six points, with losses of every kind."""
    losses = draw(st.lists(LOSSES, max_size=6))
    gap_s = draw(st.sampled_from([0.0, 0.5, 10.0]))
    return tuple(Point(n, loss, n * gap_s) for n, loss in enumerate(losses, start=1))


NODES: list[tuple[str, ...]] = [
    (), ("node-0",), ("node-1",), ("node-0", "node-1"), ("node-1", "node-2"), ("node-2",),
]  # fmt: skip
SOME_S = st.none() | st.floats(0, 20)


RANGES: list[tuple[int, int, tuple[int, ...]]] = [
    *[(1, 1, ())] * 3, (2, 2, ()), (3, 3, ()), (1, 2, ()), (2, 3, ()), (3, 4, ()),
    (1, 4, ()), (2, 6, ()), (1, 4, (1, 2, 4)), (1, 5, (1, 5)), (2, 6, (2, 3, 6)),
]  # fmt: skip
"""The least and the largest number of GPUs, and the list of sizes (none: the whole range)."""
BATCHES = [
    BatchRange(32, 320, most_local=32),
    BatchRange(16, 64, least_local=8),
    BatchRange(4, 4),
    BatchRange(100, 1000, most_local=10),
]


@st.composite
def step_times(draw: st.DrawFn) -> tuple[StepTime, ...]:
    """Draw measured steps of some sizes: not in order, slower on more GPUs, extreme, none."""
    seconds = st.sampled_from([0.1, 1.0, 3.0, 1e-9, 1e9])
    measured = draw(st.lists(st.sampled_from([1, 2, 3, 6]), unique=True, max_size=3))
    local = st.none() | st.sampled_from([1, 16, 32])
    return tuple(StepTime(g, draw(seconds), draw(st.integers(1, 2)), draw(local)) for g in measured)


@st.composite
def sizings(draw: st.DrawFn, job: Job) -> Job:
    """Return the job with a range of GPUs, and perhaps batches, step times and a noise scale."""
    least, most, sizes = draw(st.sampled_from(RANGES))
    batches = draw(st.none() | st.sampled_from(BATCHES))
    requested = None if batches is None else draw(st.sampled_from([None, batches.initial]))
    return replace(
        job,
        min_gpus=least,
        max_gpus=most,
        sizes=sizes,
        requested_gpus=draw(st.sampled_from([None, least, most])),
        batch_range=batches,
        requested_batch=requested,
        batch_held=requested if job.holds_gpus else None,
        noise_scale=draw(st.sampled_from([None, 0.0, 900.0, 1e9])),
        step_times=() if job.phase is Phase.PENDING else draw(step_times()),
        segments=job.preemptions + (job.phase is not Phase.PENDING),
    )


@st.composite
def jobs(draw: st.DrawFn, number: int, shares: tuple[float, ...]) -> Job:
    """Draw a job in any phase."""
    sweep, phase = draw(st.sampled_from(SWEEPS)), draw(st.sampled_from(list(Phase)))
    holds = phase in (Phase.RUNNING, Phase.STARTING)
    curve = () if phase is Phase.PENDING else draw(curves())
    job = Job(
        id=JobId(f"{sweep}/{number}"),
        sweep=sweep,
        submitted_s=draw(st.sampled_from([0.0, 1.0, 2.0])),
        phase=phase,
        gpus_held=tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)) if holds else ()),
        share_held=draw(st.sampled_from(shares)) if holds else 1.0,
        weight=draw(st.sampled_from([0.5, 1.0, 3.0])),
        user=draw(st.sampled_from(["", "ann", "bob"])),
        virtual_cluster=draw(st.sampled_from(["", "vision", "speech"])),
        priority_class=draw(st.sampled_from(["", "", "interactive", "nightly"])),
        model_name=draw(st.sampled_from([None, "vgg16", "resnet50"])),
        tensor_skew=draw(st.sampled_from([None, 0.1, 9.0])),
        total_steps=draw(st.sampled_from([None, 6, 9])),
        deadline_s=draw(st.sampled_from([None, 900.0, 1_005.0])),
        preemptible=draw(st.booleans()),
        service_gpu_s=0.0 if phase is Phase.PENDING else draw(st.floats(0, 9_000)),
        service_at_s=draw(st.none() | st.floats(900, 1_000)) if holds else None,
        configuration=(("rate", draw(st.floats(0, 1))), ("kind", "adam")) if curve else (),
        curve=curve,
        preemptions=draw(st.integers(0, 3)),
        started_s=draw(st.none() | st.floats(900, 1_000)) if holds else None,
        waiting_since_s=None if holds else draw(st.none() | st.floats(0, 1_000)),
        steps_at_start=draw(st.integers(0, 6)),
        checkpoint_s=draw(SOME_S),
        restore_s=draw(SOME_S),
        startup_s=draw(SOME_S),
        repeat_s=draw(SOME_S),
    )
    return draw(sizings(job))


@st.composite
def snapshots(draw: st.DrawFn, name: str, *, bound: bool = True) -> Snapshot:
    """Draw any world, drift included: GPUs held twice, or by jobs of a pool that has shrunk.

    `bound`: some jobs may run on some nodes only, perhaps on one that the pool does not have.
    """
    gpus = draw(st.lists(st.integers(0, 5), unique=True, max_size=5))
    shares = (1.0, 0.5, 0.25) if needs_shares(name) else (1.0,)
    drawn_jobs = [draw(jobs(number=n, shares=shares)) for n in range(draw(st.integers(0, 9)))]
    if bound and draw(st.booleans()):
        drawn_jobs = [replace(job, nodes=draw(st.sampled_from(NODES))) for job in drawn_jobs]
    return Snapshot(NOW_S, tuple(Gpu(g, f"node-{g // 3}") for g in gpus), tuple(drawn_jobs))


@st.composite
def histories(draw: st.DrawFn, name: str, policy: Policy[Any]) -> tuple[Snapshot, Any]:
    """Draw a snapshot, and a memory that comes from another world or from none."""
    other = draw(st.none() | snapshots(name))
    memory = policy.initial()
    if other is not None:
        _, memory = policy.decide(other, memory)
    return draw(snapshots(name)), memory


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Draw up to eight trials and jobs of traces, some of them gangs, two sweeps, late arrivals."""
    works = []
    for number in range(draw(st.integers(1, 8))):
        sweep, steps = draw(st.sampled_from(SWEEPS)), draw(st.integers(1, 12))
        step_s, fall = draw(st.sampled_from([1.0, 5.0])), draw(st.sampled_from([0.0, 0.1, 1.0]))
        curve = tuple(Point(n, 1 / (1 + fall * n), n * step_s) for n in range(1, steps + 1))
        works.append(
            Work(
                JobId(f"{sweep}/{number}"),
                draw(st.sampled_from([0.0, 0.0, 7.5])),
                steps * step_s,
                gpus=draw(st.sampled_from([1, 1, 1, 2, 3])),
                sweep=sweep,
                user=draw(st.sampled_from(["ann", "bob"])),
                virtual_cluster=draw(st.sampled_from(["", "vision"])),
                preemptible=draw(st.sampled_from([True, True, False])),
                total_steps=steps,
                curve=curve if draw(st.booleans()) else (),
                configuration=(("rate", fall),),
                costs=draw(st.sampled_from([Costs(), Costs(2.0, 1.0, 0.5)])),
            )
        )
    return Workload("made", tuple(works))


@dataclass(frozen=True, slots=True)
class PowerOfGpus:
    """Trains at GPUs ** `exponent` units a second, at most twice that with larger batches."""

    sizes: tuple[int, ...]
    exponent: float
    batch_range: BatchRange | None = None
    noise: float | None = None

    def pace(self, placement: Placement, epoch: int, batch: int | None) -> Pace:  # noqa: ARG002
        """Return the pace, with the step that is measured of it."""
        gpus, initial = sum(placement), self.batch_range.initial if self.batch_range else 1
        total = batch or initial
        rate = gpus**self.exponent * (2.0 - min(1.0, initial / total))
        seconds = total / initial / rate
        return Pace(rate, StepTime(gpus, seconds, len(placement), max(1, total // gpus)), batch)

    def noise_scale(self, epoch: int) -> float | None:
        """Return the noise scale, growing with the epoch."""
        return None if self.noise is None else self.noise * (epoch + 1)


@st.composite
def elastic_workloads(draw: st.DrawFn) -> Workload:
    """Draw up to eight jobs of 1 to 4 GPUs that change their size, and some of one size alone.

    A start and a stop cost at most 5 s, the same for all. Each job can be preempted.
    """
    works, costs = [], draw(st.sampled_from([Costs(), Costs(2.0, 1.0, 0.5)]))
    for number in range(draw(st.integers(1, 8))):
        sizes = draw(st.sampled_from([(1,), (2,), (1, 2), (1, 2, 3, 4), (1, 4), (2, 3)]))
        exponent = draw(st.sampled_from([1.0, 0.7, 0.0, -0.3]))
        model = PowerOfGpus(
            sizes,
            exponent,
            draw(st.none() | st.sampled_from(BATCHES[:3])),
            draw(st.sampled_from([None, 50.0])),
        )
        sweep, steps = draw(st.sampled_from(SWEEPS)), draw(st.integers(1, 12))
        step = draw(st.sampled_from([1.0, 5.0]))
        curve = tuple(Point(n, 1 / (1 + 0.1 * n), n * step) for n in range(1, steps + 1))
        works.append(
            Work(
                JobId(f"{sweep}/{number}"),
                draw(st.sampled_from([0.0, 0.0, 7.5])),
                steps * step,
                gpus=draw(st.sampled_from(sizes)),
                sweep=sweep,
                total_steps=steps,
                curve=curve if draw(st.booleans()) else (),
                costs=costs,
                training=model,
                batch=model.batch_range.initial if model.batch_range else None,
            )
        )
    return Workload("elastic", tuple(works), round_s=draw(st.sampled_from([None, None, 10.0])))
