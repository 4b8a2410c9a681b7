"""Contract tests for policies of any package, bare and under each guard."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, ClassVar

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hermes_ops.core.curves import LearningCurve
from hermes_ops.core.guards import Aging, AntiThrash
from hermes_ops.core.model import Gpu, Job, JobId, Phase, Plan, Point, Policy, Snapshot
from hermes_ops.core.plan import Action, Resize, Start, Stop, check, diff, explained
from hermes_ops.policies import needs_shares, sizes_jobs
from hermes_ops.simulator.engine import layout, simulate
from hermes_ops.simulator.oracle import oracle
from hermes_ops.simulator.workload import SimulationRun, Work, Workload
from hermes_ops.testing.worlds import (
    SWEEPS,
    WRAPPERS,
    as_simulated,
    built,
    elastic_workloads,
    histories,
    snapshots,
    workloads,
)

EXPONENT = r"\de\+(?:0\d|1[0-4])\b"
"""A power of ten where a plain number can stand: below 1e15, as in `hermes_ops.core.amounts`."""

INSTANTS = ("submitted_s", "deadline_s", "service_at_s", "started_s", "waiting_since_s")
"""The fields of a job that are an instant."""


class PolicyContract:
    """Tests over the policies named in `policies`; a subclass named `Test…` runs them.

    The names are those under which POLICIES has them. Each test takes a name; hypothesis draws
    snapshots with drift, memories of other worlds, and workloads with gangs and late arrivals.
    """

    policies: ClassVar[Sequence[str]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test once a policy; that of policies which never preempt over these alone."""
        if "name" in metafunc.fixturenames:
            names = self.policies
            if "does_not_preempt" in metafunc.function.__name__:
                names = [name for name in names if not built(name, "bare").preempts]
            metafunc.parametrize("name", names)

    @staticmethod  # hypothesis wants no instance of the class
    @given(data=st.data())
    @settings(max_examples=30, deadline=None)
    def test_a_plan_is_possible_explained_and_independent_of_the_order_of_jobs(
        name: str, data: st.DataObject
    ) -> None:
        policy = built(name, data.draw(st.sampled_from(sorted(WRAPPERS))))
        assert_sound(name, policy, data)

    @staticmethod  # hypothesis wants no instance of the class
    @given(data=st.data())
    @settings(max_examples=20, deadline=None)
    def test_a_plan_is_the_same_of_curves_in_arrays(name: str, data: st.DataObject) -> None:
        policy = built(name, data.draw(st.sampled_from(sorted(WRAPPERS))))
        snapshot, memory = data.draw(histories(name, policy))
        packed = replace(snapshot, jobs=tuple(map(_with_packed_curve, snapshot.jobs)))
        plans = [explained(each, policy.decide(each, memory)[0]) for each in (snapshot, packed)]
        plain, plan = (replace(each, reasons=dict(each.reasons)) for each in plans)
        assert repr(plan) == repr(plain)

    @staticmethod  # hypothesis wants no instance of the class
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
            text = f"{reason.text} {reason.would_change}"
            assert not re.search(EXPONENT, text), reason
            rivals = set(plan.ranking) if job_id in granted else granted
            if rivals - {job_id} and job_id not in plan.ends and not job.holds_gpus:
                assert reason.runner_up is not None, (name, job_id, reason)

    @staticmethod  # hypothesis wants no instance of the class
    @given(data=st.data())
    @settings(max_examples=30, deadline=None)
    def test_a_policy_that_does_not_preempt_stops_nothing_that_can_stay(
        name: str, data: st.DataObject
    ) -> None:
        policy = built(name, "guarded")
        snapshot, memory = data.draw(histories(name, policy))
        plan, _ = policy.decide(snapshot, memory)
        assert all(plan.gpus_of(job) == gpus for job, gpus in snapshot.held.items())

    @staticmethod  # hypothesis wants no instance of the class
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

    @staticmethod  # hypothesis wants no instance of the class
    @given(data=st.data())
    @settings(max_examples=20, deadline=None)
    def test_a_plan_is_the_same_from_any_origin_of_time(name: str, data: st.DataObject) -> None:
        """The origins are weeks apart: a policy may have rounds, and know hour and weekday."""
        policy = built(name, data.draw(st.sampled_from(["bare", "guarded"])))
        earlier, now = (on_ticks(data.draw(snapshots(name))) for _ in range(2))
        plans = []
        for origin_s in (0.0, 1_500 * 7 * 86_400.0):
            _, memory = policy.decide(later(earlier, origin_s), policy.initial())
            snapshot = later(now, origin_s)
            plan = explained(snapshot, policy.decide(snapshot, memory)[0])
            review_s = None if plan.review_at_s is None else plan.review_at_s - origin_s
            texts = {job: reason.text for job, reason in plan.reasons.items()}
            grants = sorted(plan.grants, key=lambda grant: grant.job)
            plans.append((review_s, grants, plan.ends, plan.ranking, texts))
        (review_s, *plain), (review_then_s, *then) = plans
        assert then == plain
        assert review_then_s == pytest.approx(review_s, abs=1e-3)

    @staticmethod  # hypothesis wants no instance of the class
    @given(data=st.data())
    @settings(max_examples=20, deadline=None)
    def test_what_a_plan_has_changed_is_not_changed_again_at_once(
        name: str, data: st.DataObject
    ) -> None:
        """Nothing is stopped or resized; another job may start on GPUs that became free."""
        policy = built(name, "bare")
        snapshot, memory = data.draw(snapshots(name)), policy.initial()
        jobs = tuple(job for job in snapshot.jobs if job.phase is not Phase.STOPPING)
        snapshot = replace(snapshot, jobs=jobs)
        assume(len(snapshot.retained) == len(snapshot.holding))
        changes: list[tuple[Action, ...]] = []
        for _ in range(3):
            plan, memory = policy.decide(snapshot, memory)
            changes.append(diff(snapshot, plan))
            snapshot = applied(snapshot, changes[-1])
        assert all(isinstance(action, Start) for action in chain(*changes[1:]))
        assert not changes[2]

    @pytest.mark.parametrize("wrapper", ["bare", "guarded"])
    def test_a_job_of_one_node_starts_there_once_a_gpu_is_free_there(
        self, name: str, wrapper: str
    ) -> None:
        """Jobs run and wait on both nodes; each waiting one is served on its node in the end."""
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

    @staticmethod  # hypothesis wants no instance of the class
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

    @staticmethod  # hypothesis wants no instance of the class
    @given(workload=elastic_workloads(), wrapper=st.sampled_from(["bare", "guarded"]))
    @settings(max_examples=20, deadline=None)
    def test_jobs_that_change_their_size_all_end_within_their_sizes(
        name: str, workload: Workload, wrapper: str
    ) -> None:
        """No GPU has two jobs either, service is training plus losses, and runs are repeatable."""
        policy = as_simulated(name, built(name, wrapper, oracle(workload)))
        run = simulate(workload, layout("2x2"), policy)
        sizes = {work.id: sizes_under(name, work) for work in workload.jobs}
        for outcome in run.outcomes:
            assert outcome.state == "finished"
            assert outcome.trained_s == pytest.approx(outcome.work.seconds)
            assert outcome.lost_gpu_s >= -1e-6
            assert policy.preempts or outcome.preemptions + outcome.resizes == 0
        assert all(len(segment.gpus) in sizes[segment.job] for segment in run.segments)
        if not needs_shares(name):
            assert_alone(run)
        assert simulate(workload, layout("2x2"), policy).segments == run.segments

    @staticmethod  # hypothesis wants no instance of the class
    @given(workload=elastic_workloads(), k=st.sampled_from([1.0, 3.0]))
    @settings(max_examples=20, deadline=None)
    def test_within_the_guard_at_most_a_share_of_the_time_is_lost_to_changes(
        name: str, workload: Workload, k: float
    ) -> None:
        """The share is 1 / (k + 1) of each segment, but for the checkpoint that is a job's first.

        Until then the guard cannot know its cost.
        """
        policy = as_simulated(name, AntiThrash(built(name, "bare", oracle(workload)), k))
        if needs_shares(name) or not policy.preempts:
            return
        costs, begun = workload.jobs[0].costs, set[JobId]()
        for segment in simulate(workload, layout("2x2"), policy).segments:
            if segment.outcome in {"preempted", "resized"}:
                known_s = segment.lost_s - (0 if segment.job in begun else costs.checkpoint_s)
                assert known_s <= (segment.end_s - segment.begin_s) / (k + 1) + 1e-6
            begun.add(segment.job)

    @staticmethod  # hypothesis wants no instance of the class
    @given(workload=elastic_workloads())
    @settings(max_examples=20, deadline=None)
    def test_no_job_that_has_begun_waits_longer_than_the_guard_promises(
        name: str, workload: Workload
    ) -> None:
        """The bound of Aging: quanta x max(R, L) + W x R, with the largest R, L and W possible."""
        guarded = Aging(built(name, "anti-thrash", oracle(workload)), quanta=2)
        policy = as_simulated(name, guarded)
        if needs_shares(name) or not policy.preempts:
            return
        run = simulate(workload, layout("2x2"), policy)
        longest_s = max(longest_slice_s(work, sizes_under(name, work)) for work in workload.jobs)
        round_s = max(4 * 5.0, 5.0 + longest_s) + (workload.round_s or 0.0)
        jobs = len(workload.jobs)
        bound_s = 2 * max(round_s, jobs * round_s) + jobs * round_s
        for work in workload.jobs:
            of_job = [s for s in run.segments if s.job == work.id]
            assert all(b.begin_s - a.end_s <= bound_s for a, b in pairwise(of_job))


def later(snapshot: Snapshot, seconds: float) -> Snapshot:
    """Return the same snapshot that many seconds later, each instant in it included."""
    jobs = []
    for job in snapshot.jobs:
        instants = {name: getattr(job, name) for name in INSTANTS}
        moved = {name: at + seconds for name, at in instants.items() if at is not None}
        jobs.append(replace(job, **moved))
    return Snapshot(snapshot.time_s + seconds, snapshot.gpus, tuple(jobs))


def on_ticks(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with instants that are exact however far from the origin they are."""
    jobs = []
    for job in snapshot.jobs:
        times = {name: getattr(job, name) for name in (*INSTANTS, "service_gpu_s")}
        exact = {name: round(at * 64) / 64 for name, at in times.items() if at is not None}
        jobs.append(replace(job, **exact))
    return replace(snapshot, jobs=tuple(jobs))


def applied(snapshot: Snapshot, actions: Sequence[Action]) -> Snapshot:
    """Return the snapshot once these actions are made, at the same instant."""
    changed = {action.job: action for action in actions}
    jobs = (_after(job, changed.get(job.id), snapshot.time_s) for job in snapshot.jobs)
    return replace(snapshot, jobs=tuple(jobs))


def _after(job: Job, action: Action | None, now_s: float) -> Job:
    if action is None:
        return job
    charged = replace(job, service_gpu_s=job.attained_gpu_s(now_s), service_at_s=None)
    if isinstance(action, Stop):
        return _stopped(charged, action, now_s)
    return _started(charged, action, now_s)


def _stopped(job: Job, action: Stop, now_s: float) -> Job:
    phase = Phase.ENDED if action.final else Phase.WAITING
    return replace(
        job, phase=phase, gpus_held=(), share_held=1.0, batch_held=None, started_s=None,
        waiting_since_s=now_s, preemptions=job.preemptions + 1,
    )  # fmt: skip


def _started(job: Job, action: Start | Resize, now_s: float) -> Job:
    return replace(
        job, phase=Phase.STARTING, gpus_held=action.gpus, share_held=action.share,
        batch_held=action.batch, started_s=now_s, service_at_s=now_s, waiting_since_s=None,
        steps_at_start=job.last_step, segments=job.segments + 1,
        configuration=job.configuration or (("rate", 0.5),),
    )  # fmt: skip


def _with_packed_curve(job: Job) -> Job:
    return replace(job, curve=LearningCurve.from_rows(job.curve))


def assert_sound(name: str, policy: Policy[Any], data: st.DataObject) -> None:
    """Check that a plan is possible, explained and the same in any order of jobs and GPUs.

    `policy` is the one of that name, perhaps within others.
    """
    snapshot, memory = data.draw(histories(name, policy))
    plan, after = policy.decide(snapshot, memory)
    check(snapshot, plan)
    assert_at_home(snapshot, plan)
    actions = diff(snapshot, plan)

    spoken_of = {j.id for j in snapshot.jobs if j.phase in (Phase.PENDING, Phase.WAITING)}
    spoken_of |= {grant.job for grant in plan.grants} | set(plan.ends)
    spoken_of |= {a.job for a in actions if isinstance(a, Stop)}
    assert spoken_of <= plan.reasons.keys()

    shuffled = replace(
        snapshot,
        jobs=tuple(data.draw(st.permutations(snapshot.jobs))),
        gpus=tuple(data.draw(st.permutations(snapshot.gpus))),
    )
    again = policy.decide(shuffled, memory)
    assert comparable(again) == comparable((plan, after))
    assert diff(shuffled, again[0]) == actions


def sizes_under(name: str, work: Work) -> tuple[int, ...]:
    """Return the numbers of GPUs that the policy may give to a job."""
    if work.training is None or not sizes_jobs(name):
        return (work.gpus,)
    return work.training.sizes


def longest_slice_s(work: Work, sizes: Sequence[int]) -> float:
    """Return the most seconds from one report of the job to the next, on the slowest size."""
    reached = [0.0, *(point.seconds for point in work.curve), work.seconds]
    units = max(b - a for a, b in pairwise(reached))
    model = work.training
    if model is None:
        return units
    return units / min(model.pace((size,), 0, work.batch).rate for size in sizes)


def assert_at_home(snapshot: Snapshot, plan: Plan) -> None:
    """Check that a job restricted to some nodes gets GPUs of an allowed node only."""
    node = {gpu.index: gpu.node for gpu in snapshot.gpus}
    for grant in plan.grants:
        nodes = {node[gpu] for gpu in grant.gpus}
        job = snapshot.index[grant.job]
        if job.nodes and snapshot.held.get(job.id) != grant.gpus:
            assert len(nodes) == 1
            assert nodes <= set(job.nodes)


def bound_job(number: int, nodes: tuple[str, ...]) -> Job:
    """Return a trial that waits for a GPU of these nodes, after two steps."""
    curve = (Point(1, 1.0 + number, 10.0), Point(2, 0.5 + number, 20.0))
    return Job(
        JobId(f"a/{number}"), SWEEPS[0], 0.0, Phase.WAITING, nodes=nodes, curve=curve,
        total_steps=9, waiting_since_s=0.0, service_gpu_s=20.0,
    )  # fmt: skip


def moved_on(job: Job, gpus: tuple[int, ...], now_s: float) -> Job:
    """Return the job 100 s later on these GPUs: a step further, ended after its ninth."""
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


def assert_alone(run: SimulationRun) -> None:
    """Each GPU has one job at a time."""
    for gpu in run.gpus:
        used = sorted((s.begin_s, s.end_s) for s in run.segments if gpu.index in s.gpus)
        assert all(ended <= begun + 1e-9 for (_, ended), (begun, _) in pairwise(used))


def comparable(decision: tuple[Plan, Any]) -> tuple[object, ...]:
    """Return a decision in a form in which two are equal if they say the same."""
    plan, memory = decision
    return (
        sorted(plan.grants, key=lambda g: g.job),
        plan.ends,
        plan.ranking,
        plan.review_at_s,
        {job: repr(reason) for job, reason in plan.reasons.items()},
        memory,
    )
