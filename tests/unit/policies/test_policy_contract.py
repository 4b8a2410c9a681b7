"""What every policy owes, over every entry of POLICIES, bare and under both guards."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from inspect import signature
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.core.early_stop import EarlyStop
from hermes_ops.core.explanation import explained
from hermes_ops.core.guards import Aging, AntiThrash, guarded
from hermes_ops.core.learning import OpenForLearning
from hermes_ops.core.model import (
    Gpu,
    Job,
    JobId,
    Phase,
    Plan,
    Point,
    Policy,
    Snapshot,
    Stop,
    SweepId,
)
from hermes_ops.core.oracle import Oracle
from hermes_ops.core.parallel import MaxParallel
from hermes_ops.core.plan import check, diff
from hermes_ops.errors import ConfigError
from hermes_ops.memory import decode, encode
from hermes_ops.policies import (
    GIVEN,
    POLICIES,
    live_policies,
    make_policy,
    needs_oracle,
    needs_shares,
)
from hermes_ops.simulator.engine import layout, oracle, simulate
from hermes_ops.simulator.workload import Costs, Run, Work, Workload

NOW_S = 1_000.0
LOSSES = st.one_of(
    st.floats(0, 10), st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e300])
)
SWEEPS = (SweepId("a"), SweepId("b"))
WRAPPERS: dict[str, Any] = {
    "bare": lambda policy: policy,
    "anti-thrash": AntiThrash,
    "aging": lambda policy: Aging(policy, quanta=1),
    "guarded": guarded,
    "max-parallel": lambda policy: MaxParallel(guarded(policy), ((SWEEPS[0], 1),)),
    "learning": lambda policy: OpenForLearning(guarded(policy), frozenset(SWEEPS[:1]), 1),
    "early-stop": lambda policy: EarlyStop(guarded(policy), tuple((s, "median") for s in SWEEPS)),
}
each_name = pytest.mark.parametrize("name", POLICIES)


@dataclass(frozen=True, slots=True)
class Fortune:
    """Tells each job a future of its own, out of what it is."""

    def remaining_s(self, job: Job, now_s: float) -> float:
        return float(len(job.id) * 7 + len(job.curve)) % 5 + job.min_gpus

    def final_loss(self, job: Job) -> float:
        return min((p.loss for p in job.curve if p.loss > -inf), default=inf)


def built(name: str, wrapper: str, future: Oracle = Fortune()) -> Policy[Any]:
    policy: Policy[Any] = WRAPPERS[wrapper](make_policy(name, {}, {"oracle": future}))
    return policy


@st.composite
def curves(draw: st.DrawFn) -> tuple[Point, ...]:
    losses = draw(st.lists(LOSSES, max_size=6))
    gap_s = draw(st.sampled_from([0.0, 0.5, 10.0]))
    return tuple(Point(n, loss, n * gap_s) for n, loss in enumerate(losses, start=1))


NODES: list[tuple[str, ...]] = [
    (), ("node-0",), ("node-1",), ("node-0", "node-1"), ("node-1", "node-2"), ("node-2",),
]  # fmt: skip
SOME_S = st.none() | st.floats(0, 20)


@st.composite
def jobs(draw: st.DrawFn, number: int, shares: tuple[float, ...]) -> Job:
    sweep, phase = draw(st.sampled_from(SWEEPS)), draw(st.sampled_from(list(Phase)))
    smallest = draw(st.sampled_from([1, 1, 1, 2, 3]))
    holds = phase in (Phase.RUNNING, Phase.STARTING)
    curve = () if phase is Phase.PENDING else draw(curves())
    return Job(
        id=JobId(f"{sweep}/{number}"),
        sweep=sweep,
        submitted_s=draw(st.sampled_from([0.0, 1.0, 2.0])),
        phase=phase,
        gpus_held=tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)) if holds else ()),
        share_held=draw(st.sampled_from(shares)) if holds else 1.0,
        min_gpus=smallest,
        max_gpus=smallest + draw(st.sampled_from([0, 0, 1])),
        weight=draw(st.sampled_from([0.5, 1.0, 3.0])),
        user=draw(st.sampled_from(["", "ann", "bob"])),
        virtual_cluster=draw(st.sampled_from(["", "vision", "speech"])),
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
    )


@st.composite
def snapshots(draw: st.DrawFn, name: str, *, bound: bool = True) -> Snapshot:
    """Any world, drift included: GPUs held twice, or by jobs of a pool that has shrunk.

    `bound`: some jobs may run on some nodes only, perhaps on one that the pool does not have.
    """
    gpus = draw(st.lists(st.integers(0, 5), unique=True, max_size=5))
    shares = (1.0, 0.5, 0.25) if needs_shares(name) else (1.0,)
    made = [draw(jobs(number=n, shares=shares)) for n in range(draw(st.integers(0, 9)))]
    if bound and draw(st.booleans()):
        made = [replace(job, nodes=draw(st.sampled_from(NODES))) for job in made]
    return Snapshot(NOW_S, tuple(Gpu(g, f"node-{g // 3}") for g in gpus), tuple(made))


@st.composite
def histories(draw: st.DrawFn, name: str, policy: Policy[Any]) -> tuple[Snapshot, Any]:
    """A snapshot and a memory that comes from another world, or from none."""
    other = draw(st.none() | snapshots(name))
    memory = policy.initial()
    if other is not None:
        _, memory = policy.decide(other, memory)
    return draw(snapshots(name)), memory


@each_name
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_a_plan_is_possible_explained_and_independent_of_the_order_of_jobs(
    name: str, data: st.DataObject
) -> None:
    policy = built(name, data.draw(st.sampled_from(sorted(WRAPPERS))))
    snapshot, memory = data.draw(histories(name, policy))
    plan, after = policy.decide(snapshot, memory)
    check(snapshot, plan)
    assert_at_home(snapshot, plan)
    actions = diff(snapshot, plan)

    spoken_of = {j.id for j in snapshot.jobs if j.phase in (Phase.PENDING, Phase.WAITING)}
    spoken_of |= {grant.job for grant in plan.grants} | set(plan.ends)
    spoken_of |= {a.job for a in actions if isinstance(a, Stop)}
    assert spoken_of <= plan.reasons.keys()
    assert repr(decode(encode(after), policy.initial())) == repr(after)

    shuffled = replace(
        snapshot,
        jobs=tuple(data.draw(st.permutations(snapshot.jobs))),
        gpus=tuple(data.draw(st.permutations(snapshot.gpus))),
    )
    again = policy.decide(shuffled, memory)
    assert comparable(again) == comparable((plan, after))
    assert diff(shuffled, again[0]) == actions


@each_name
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_each_choice_names_a_runner_up_and_what_would_change_it(
    name: str, data: st.DataObject
) -> None:
    policy = built(name, data.draw(st.sampled_from(sorted(WRAPPERS))))
    snapshot, memory = data.draw(histories(name, policy))
    plan = explained(snapshot, policy.decide(snapshot, memory)[0])
    granted = {grant.job for grant in plan.grants}
    for job_id, reason in plan.reasons.items():
        job = snapshot.index[job_id]
        if job.phase in (Phase.ENDED, Phase.STOPPING):
            continue
        assert reason.would_change, (name, job_id, reason)
        assert reason.runner_up != job_id
        assert not re.search(r"\de\+\d", f"{reason.text} {reason.would_change}"), reason
        rivals = set(plan.ranking) if job_id in granted else granted
        if rivals - {job_id} and job_id not in plan.ends and not job.holds_gpus:
            assert reason.runner_up is not None, (name, job_id, reason)


def assert_at_home(snapshot: Snapshot, plan: Plan) -> None:
    """Whoever gets GPUs and may run on some nodes only gets them of one of these."""
    node = {gpu.index: gpu.node for gpu in snapshot.gpus}
    for grant in plan.grants:
        nodes = {node[gpu] for gpu in grant.gpus}
        job = snapshot.index[grant.job]
        if job.nodes and snapshot.held.get(job.id) != grant.gpus:
            assert len(nodes) == 1
            assert nodes <= set(job.nodes)


PATIENT = [name for name in POLICIES if not built(name, "bare").preempts]


@pytest.mark.parametrize("name", PATIENT)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_a_policy_that_does_not_preempt_stops_nothing_that_can_stay(
    name: str, data: st.DataObject
) -> None:
    policy = built(name, "guarded")
    snapshot, memory = data.draw(histories(name, policy))
    plan, _ = policy.decide(snapshot, memory)
    assert all(plan.gpus_of(job) == gpus for job, gpus in snapshot.held.items())


@each_name
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_no_running_job_is_stopped_for_nobody(name: str, data: st.DataObject) -> None:
    """Each GPU that a stopped job leaves behind counts: one of them has a new user."""
    policy = built(name, "bare")
    snapshot, memory = data.draw(histories(name, policy))
    plan, _ = policy.decide(snapshot, memory)
    used = {gpu for grant in plan.grants for gpu in grant.gpus}
    stays = {grant.job for grant in plan.grants}.union(plan.ends)
    for job, gpus in snapshot.held.items():
        assert job in stays or used.intersection(gpus)


@each_name
@pytest.mark.parametrize("wrapper", ["bare", "guarded"])
def test_a_job_of_one_node_starts_there_once_a_gpu_is_free_there(name: str, wrapper: str) -> None:
    """Others run and wait, on either node; whoever waits comes in the end where it must be."""
    policy = built(name, wrapper)
    memory, pool = policy.initial(), tuple(Gpu(g, f"node-{g // 2}") for g in range(4))
    open_jobs = {n: bound_job(n, ("node-1",) if n < 3 else ("node-0",)) for n in range(6)}
    served: set[JobId] = set()
    for now_s in range(0, 4_000, 100):
        snapshot = Snapshot(float(now_s), pool, tuple(open_jobs.values()))
        plan, memory = policy.decide(snapshot, memory)
        check(snapshot, plan)
        assert_at_home(snapshot, plan)
        served |= {grant.job for grant in plan.grants}
        for n, job in open_jobs.items():
            open_jobs[n] = moved_on(job, plan.gpus_of(job.id), now_s)
    assert served == {job.id for job in open_jobs.values()}


def bound_job(number: int, nodes: tuple[str, ...]) -> Job:
    """A trial that waits for a GPU of these nodes, after two steps."""
    curve = (Point(1, 1.0 + number, 10.0), Point(2, 0.5 + number, 20.0))
    return Job(
        JobId(f"a/{number}"), SWEEPS[0], 0.0, Phase.WAITING, nodes=nodes, curve=curve,
        total_steps=9, waiting_since_s=0.0, service_gpu_s=20.0,
    )  # fmt: skip


def moved_on(job: Job, gpus: tuple[int, ...], now_s: float) -> Job:
    """The job 100 s later on these GPUs: a step further, over after its ninth."""
    if job.phase is Phase.ENDED:
        return job
    if not gpus:
        since_s = job.waiting_since_s if job.phase is Phase.WAITING else now_s
        return replace(job, phase=Phase.WAITING, gpus_held=(), started_s=None,
                       waiting_since_s=since_s)  # fmt: skip
    step, started_s = job.last_step + 1, job.started_s if job.gpus_held == gpus else now_s
    point = Point(step, job.curve[-1].loss * 0.9, step * 10.0)
    if step > 9:
        return replace(job, phase=Phase.ENDED, gpus_held=())
    return replace(
        job, phase=Phase.RUNNING, gpus_held=gpus, started_s=started_s, curve=(*job.curve, point),
        service_gpu_s=job.service_gpu_s + 100.0 * len(gpus),
        steps_at_start=job.steps_at_start if job.gpus_held == gpus else step - 1,
    )  # fmt: skip


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Up to eight trials and jobs of traces, some of them gangs, two sweeps, late arrivals."""
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


@each_name
@given(workload=workloads(), wrapper=st.sampled_from(["bare", "guarded"]))
@settings(max_examples=25, deadline=None)
def test_all_jobs_end_whole_gangs_share_no_gpu_and_no_service_is_lost(
    name: str, workload: Workload, wrapper: str
) -> None:
    policy = built(name, wrapper, oracle(workload))
    run = simulate(workload, layout("2x2"), policy)
    for outcome in run.outcomes:
        assert outcome.state == "finished"
        assert outcome.trained_s == pytest.approx(outcome.work.seconds)
        trained_gpu_s = outcome.trained_s * outcome.work.gpus
        assert outcome.service_gpu_s == pytest.approx(trained_gpu_s + outcome.lost_gpu_s)
        assert policy.preempts or outcome.preemptions == 0
    sizes = {work.id: work.gpus for work in workload.jobs}
    assert all(len(segment.gpus) == sizes[segment.job] for segment in run.segments)
    if not needs_shares(name):
        assert_alone(run)


def assert_alone(run: Run) -> None:
    """Each GPU has one job at a time."""
    for gpu in run.gpus:
        used = sorted((s.begin_s, s.end_s) for s in run.segments if gpu.index in s.gpus)
        assert all(ended <= begun + 1e-9 for (_, ended), (begun, _) in pairwise(used))


def test_an_unknown_policy_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match=r"fifo, .*hermes"):
        make_policy("best", {})


@pytest.mark.parametrize("parameters", [{"speed": 3}, {"threshold": 0}, {"threshold": "two"}])
def test_a_wrong_parameter_is_refused(parameters: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        make_policy("hermes", parameters)


def comparable(decision: tuple[Plan, Any]) -> Any:
    plan, memory = decision
    return (
        sorted(plan.grants, key=lambda g: g.job),
        plan.ends,
        plan.ranking,
        plan.review_at_s,
        {job: repr(reason) for job, reason in plan.reasons.items()},
        memory,
    )


def documented() -> dict[str, tuple[str, set[str]]]:
    """Each policy of the table on docs/policies.md: where it runs, and its parameters."""
    text = (Path(__file__).parents[3] / "docs" / "policies.md").read_text(encoding="utf-8")
    table = text.partition("## All of them")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): (row[3], set(re.findall(r"`(\w+)`", row[4]))) for row in rows}


@each_name
def test_the_documentation_says_where_a_policy_runs_and_what_it_takes(name: str) -> None:
    where, parameters = documented()[name]
    needs = {"oracle": needs_oracle(name), "shares": needs_shares(name)}
    assert where == next((f"simulation: {need}" for need in needs if needs[need]), "live")
    assert parameters == set(signature(POLICIES[name]).parameters) - set(GIVEN)
    assert (where == "live") == (name in live_policies())


def test_the_policy_of_the_documentation_works() -> None:
    text = (Path(__file__).parents[3] / "docs" / "policies.md").read_text(encoding="utf-8")
    code = text.split("```python\n", maxsplit=2)[1].split("```", maxsplit=1)[0]
    lines = [line for line in code.splitlines() if line]
    names: dict[str, Any] = {"__name__": "hermes_ops.policies", "Fifo": POLICIES["fifo"]}
    names |= {"dataclass": dataclass, "replace": replace, "ClassVar": ClassVar, "inf": inf}
    names |= {"Snapshot": Snapshot, "Plan": Plan}
    exec(code, names)
    facts: dict[str, Any] = {"submitted_s": 0.0, "phase": Phase.PENDING}
    long = Job(JobId("a/0"), SweepId("a"), total_steps=9, **facts)
    short = Job(JobId("a/1"), SweepId("a"), total_steps=3, **facts)
    snapshot = Snapshot(NOW_S, (Gpu(0),), (long, short))
    plan, _ = names["Shortest"]().decide(snapshot, None)
    check(snapshot, plan)
    assert [grant.job for grant in plan.grants] == ["a/1"]
    assert len(lines) + 1 == 8  # and its line in POLICIES
