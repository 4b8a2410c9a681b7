from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.airflow.control.jobs import (
    SizedSpan,
    SweepFacts,
    curve,
    job,
    on_one_node,
    sized_spans,
    step_times,
    training_seconds,
)
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.airflow.metadata_rows import ENDED_TASK_STATES
from hermes_ops.airflow.records import Lease, SegmentRecord, StopFlag
from hermes_ops.core.model import Phase, Point, SweepId
from hermes_ops.core.sizes import BatchRange, StepTime
from tests.unit.airflow.builders import flag, lease, row, running, segment, starting, waiting

FACTS = SweepFacts(SweepId("digits-1"), 50.0, 2.0, 1, -1.0, 20, True)
FRESH, USED = segment(2), segment(2, running=False, ended_s=110.0)
OLDER, OVER = segment(1, running=False), segment(2, running=False, final="finished")


@pytest.mark.parametrize(
    ("state", "own", "stop", "last", "phase"),
    [
        ("scheduled", None, None, None, Phase.PENDING),
        (None, None, None, None, Phase.PENDING),
        ("running", None, None, None, Phase.PENDING),  # about to be sent away
        ("scheduled", lease(2), None, None, Phase.STARTING),
        ("scheduled", lease(2), None, OLDER, Phase.STARTING),
        ("queued", lease(2), None, OLDER, Phase.STARTING),
        ("running", lease(2), None, OLDER, Phase.STARTING),  # entered, has not begun
        ("running", lease(2), flag(1), FRESH, Phase.RUNNING),  # the flag of an older segment
        ("running", lease(2), None, FRESH, Phase.RUNNING),
        ("running", lease(2), flag(2), FRESH, Phase.STOPPING),
        ("up_for_retry", lease(2), None, FRESH, Phase.STARTING),  # its worker was killed
        ("scheduled", lease(2), flag(2), FRESH, Phase.STARTING),
        ("running", lease(2), flag(2), USED, Phase.STOPPING),  # has not left its slot
        ("up_for_reschedule", lease(2), flag(2), USED, Phase.STOPPING),
        ("scheduled", lease(2), flag(2), USED, Phase.WAITING),
        ("scheduled", lease(2, revoked=True), None, OLDER, Phase.WAITING),
        ("queued", lease(2, revoked=True), None, OLDER, Phase.STOPPING),
        ("running", lease(2, revoked=True), None, FRESH, Phase.STOPPING),  # began all the same
        ("running", lease(2), None, OVER, Phase.ENDED),
        *((state, lease(2), None, FRESH, Phase.ENDED) for state in ENDED_TASK_STATES),
    ],
)
def test_the_phase_follows_from_row_lease_flag_and_segment(
    state: str | None,
    own: Lease | None,
    stop: StopFlag | None,
    last: SegmentRecord | None,
    phase: Phase,
) -> None:
    assert TrialRecords(row(0, state), own, stop, last).phase is phase


@given(
    state=st.sampled_from(["scheduled", "queued", "running", "up_for_reschedule", None]),
    own=st.none() | st.builds(lease, st.integers(1, 3), revoked=st.booleans()),
    stop=st.none() | st.builds(flag, st.integers(1, 3)),
    last=st.none() | st.builds(segment, st.integers(1, 3), st.booleans()),
)
def test_only_a_trial_whose_lease_is_in_force_holds_gpus(
    state: str | None, own: Lease | None, stop: StopFlag | None, last: SegmentRecord | None
) -> None:
    trial = TrialRecords(row(0, state), own, stop, last)
    found = job(trial, FACTS, (), 130.0)
    assert bool(found.gpus_held) == (found.phase in (Phase.STARTING, Phase.RUNNING))
    assert not found.gpus_held or trial.has_lease_in_force
    assert not (found.gpus_held and found.gpus_to_leave)
    assert bool(found.gpus_to_leave) == (found.phase is Phase.STOPPING)
    assert (found.waiting_since_s is None) <= (trial.has_lease_in_force or last is not None)


def test_training_seconds_leave_out_the_time_between_segments() -> None:
    spans = ((100.0, 110.0), (150.0, 155.0))
    assert training_seconds(105.0, spans, 200.0) == 5.0
    assert training_seconds(130.0, spans, 200.0) == 10.0
    assert training_seconds(152.0, spans, 200.0) == 12.0
    assert training_seconds(203.0, spans, 200.0) == 18.0
    assert training_seconds(203.0, (), None) == 0.0


@given(
    cuts=st.lists(st.floats(0, 1_000), min_size=2, max_size=8, unique=True),
    moments=st.lists(st.floats(0, 2_000), min_size=2, max_size=2),
)
def test_training_seconds_grow_with_time_and_never_faster(
    cuts: list[float], moments: list[float]
) -> None:
    cuts, (early, late) = sorted(cuts), sorted(moments)
    spans = tuple(zip(cuts[::2], cuts[1::2], strict=False))
    before, after = (training_seconds(m, spans, 1_000.0) for m in (early, late))
    assert before <= after + 1e-6
    assert after - before <= late - early + 1e-6


def test_a_maximised_objective_enters_with_its_sign_turned() -> None:
    points = ((1, 0.5, 101_000), (2, 0.7, 102_000))
    assert curve(points, -1.0, (), 100.0) == (Point(1, -0.5, 1.0), Point(2, -0.7, 2.0))
    assert curve(points, 1.0, (), 100.0)[1].loss == 0.7
    assert curve([(0, 2.3, 100_500), *points], -1.0, (), 100.0) == curve(points, -1.0, (), 100.0)


def test_a_running_trial_is_charged_for_all_its_gpus_up_to_now() -> None:
    found = job(running(0, 0, 1), FACTS, (), 103.0)
    assert found.service_gpu_s == 6.0
    assert (found.started_s, found.waiting_since_s) == (100.0, None)


def test_a_pod_that_waits_is_charged_for_nothing_and_has_started_with_its_task() -> None:
    def shown(waited_s: float | None, now_s: float) -> tuple[float, float | None]:
        own = segment(gpus=(0, 1), service_gpu_s=10.0, waited_s=waited_s)
        found = job(replace(running(0, 0, 1), segment=own), FACTS, (), now_s)
        assert (len(found.gpus_held), found.gpus_used) == (2, 0 if waited_s is None else 2)
        return found.service_gpu_s, found.started_s

    assert shown(None, 103.0) == (10.0, 100.0)
    assert shown(2.0, 103.0) == (12.0, 102.0)
    assert shown(2.0, 101.0) == (10.0, 102.0)  # the clock was set back


def test_a_waiting_trial_keeps_its_service_and_waits_since_its_last_stop() -> None:
    last = segment(running=False, ended_s=110.0, service_gpu_s=10.0, preemptions=1)
    found = job(TrialRecords(row(), lease(), None, last), FACTS, (), 500.0)
    assert (found.service_gpu_s, found.preemptions, found.waiting_since_s) == (10.0, 1, 110.0)
    assert (found.gpus_held, found.started_s) == ((), None)


def test_a_trial_that_has_a_lease_and_no_segment_starts_from_its_grant() -> None:
    found = job(starting(0, 1), FACTS, (), 95.0)
    assert (found.phase, found.gpus_held, found.started_s) == (Phase.STARTING, (1,), 90.0)


def test_a_script_that_cannot_checkpoint_is_not_preemptible() -> None:
    last = segment(preemptible=False)
    assert not job(TrialRecords(row(0, "running"), lease(), None, last), FACTS, (), 1.0).preemptible
    assert job(waiting(0), FACTS, (), 1.0).preemptible


def test_step_times_are_those_between_the_reports_of_each_size() -> None:
    points = [(1, 0.0, 12_000), (2, 0.0, 14_000), (3, 0.0, 16_000), (5, 0.0, 25_000),
              (7, 0.0, 27_000)]  # fmt: skip
    measured = step_times(points, [SizedSpan(10.0, 17.0, 1), SizedSpan(20.0, inf, 2)])
    assert measured == (StepTime(1, 2.0), StepTime(2, 1.0))


def test_segments_of_the_same_size_are_measured_together() -> None:
    points = [(1, 0.0, 1_000), (2, 0.0, 2_000), (3, 0.0, 11_000), (4, 0.0, 14_000)]
    spans = [SizedSpan(0.0, 5.0, 1), SizedSpan(10.0, 20.0, 1)]
    assert step_times(points, spans) == (StepTime(1, 2.0),)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.just(0.0), st.integers(0, 60_000)), max_size=12),
    st.lists(st.integers(1, 4), max_size=4),
)
def test_step_times_are_above_0_and_of_sizes_that_the_trial_held(
    points: list[tuple[int, float, int]], sizes: list[int]
) -> None:
    spans = [(10.0 * n, 10.0 * n + 9.0) for n in range(len(sizes))]
    sized = [SizedSpan(*span, size) for span, size in zip(spans, sizes, strict=True)]
    for time in step_times(points, sized):
        assert time.seconds > 0
        assert time.gpus in sizes


def test_a_policy_sees_the_range_of_a_trial_and_its_step_times() -> None:
    facts = replace(FACTS, most_gpus=4, sizes=(1, 2, 4))
    shown = job(running(0), facts, (), 130.0, measured=(StepTime(1, 2.0),))
    assert (shown.min_gpus, shown.max_gpus, shown.sizes) == (1, 4, (1, 2, 4))
    assert shown.step_times == (StepTime(1, 2.0),)


@pytest.mark.parametrize(("final", "resumes"), [(None, True), ("cancelled", False)])
def test_a_trial_that_stops_resumes_unless_it_ends(final: str | None, resumes: bool) -> None:
    stopping = TrialRecords(row(0, "running"), lease(2), flag(2, final=final), FRESH)
    assert job(stopping, FACTS, (), 130.0).resumes is resumes


def test_step_times_are_told_apart_by_the_batch_of_each_segment() -> None:
    points = [(1, 0.0, 11_000), (2, 0.0, 15_000), (3, 0.0, 21_000), (4, 0.0, 23_000)]
    last = segment(
        running=False, spans=((10.0, 17.0), (20.0, 24.0)), sizes=(2, 2), batches=(64, 250)
    )
    spans = sized_spans(last)
    assert [(span.gpus, span.batch) for span in spans] == [(2, 64), (2, 250)]
    assert step_times(points, spans, 32) == (
        StepTime(2, 4.0 * 64 / 32, local_batch=32),
        StepTime(2, 2.0 * 250 / 32, local_batch=125),
    )
    assert step_times(points, spans) == (StepTime(2, 3.0),)  # the policy chooses no batch


def test_the_segment_under_way_is_measured_with_its_gpus_and_its_batch() -> None:
    spans = sized_spans(segment(gpus=(0, 1), batch=64, spans=((1.0, 2.0),), sizes=(1,)))
    assert spans == (SizedSpan(1.0, 2.0, 1), SizedSpan(100.0, inf, 2, 64))


def test_a_policy_sees_the_batches_of_a_trial_and_the_one_that_it_holds() -> None:
    batches = BatchRange(32, 256, most_local=64)
    facts = replace(FACTS, batch_range=batches, batch_parameter="size", least_processes=2)
    held = lease(config={"size": 40}, batch=96, samples=96)
    shown = job(TrialRecords(row(0, "running"), held, None, segment()), facts, (), 130.0)
    assert (shown.batch_range, shown.requested_batch, shown.batch_held) == (batches, 80, 96)
    waits = job(TrialRecords(row(0), held, None, segment(running=False)), facts, (), 130.0)
    assert (waits.requested_batch, waits.batch_held) == (80, None)
    fresh = job(TrialRecords(row(0), None, None, None), facts, (), 130.0, {"size": 16})
    assert (fresh.requested_batch, fresh.batch_held) == (32, None)
    plain = job(TrialRecords(row(0, "running"), held, None, segment()), FACTS, (), 130.0)
    assert (plain.batch_range, plain.requested_batch) == (None, None)


PODS = replace(FACTS, most_gpus=4, is_on_one_node=True)
NODES = ("node-a", "node-a", "node-b")


def test_a_pod_gets_the_gpus_of_one_node_and_no_more_than_a_node_has() -> None:
    shown = job(running(0), on_one_node(PODS, NODES), (), 130.0)
    assert (shown.nodes, shown.min_gpus, shown.max_gpus) == (("node-a", "node-b"), 1, 2)
    listed = on_one_node(replace(PODS, gpus=2, sizes=(2, 4)), NODES)
    assert (listed.nodes, listed.most_gpus, listed.sizes) == (("node-a",), None, ())


def test_with_claims_only_their_nodes_count_and_a_trial_stays_on_its_own() -> None:
    facts = on_one_node(replace(PODS, nodes=("node-b",), stays_on_node=True), NODES)
    assert (facts.nodes, facts.most_gpus) == (("node-b",), None)
    begun = TrialRecords(row(0), lease(nodes=("node-b",)), None, segment(running=False))
    two = replace(facts, nodes=("node-a", "node-b"))
    assert job(begun, two, (), 130.0).nodes == ("node-b",)
    assert job(begun, replace(two, stays_on_node=False), (), 130.0).nodes == ("node-a", "node-b")


@pytest.mark.parametrize(
    ("gpus", "most", "able"),
    [(1, 2, ("node-a", "node-b")), (2, None, ("node-a",))],
)
def test_a_trial_that_may_span_nodes_stays_on_one_where_its_largest_number_fits(
    gpus: int, most: int | None, able: tuple[str, ...]
) -> None:
    facts = replace(PODS, may_span_nodes=True, gpus=gpus, most_gpus=most)
    shown = job(running(0), on_one_node(facts, NODES), (), 130.0)
    assert (shown.nodes, shown.min_gpus, shown.max_gpus) == (able, gpus, 2)


@pytest.mark.parametrize(
    ("facts", "nodes"),
    [
        (replace(PODS, is_on_one_node=False), NODES),
        (replace(PODS, most_gpus=None), NODES),
        (PODS, ()),
        (replace(PODS, may_span_nodes=True), NODES),  # no node has 4
        (replace(PODS, may_span_nodes=True, gpus=3, most_gpus=None), NODES),
        (replace(PODS, may_span_nodes=True, most_gpus=2), ()),
        (replace(PODS, gpus=3), NODES),  # the pod is pending, as Kubernetes says
    ],
)
def test_other_trials_and_unknown_nodes_are_not_limited(
    facts: SweepFacts, nodes: tuple[str, ...]
) -> None:
    assert on_one_node(facts, nodes) == facts


@pytest.mark.parametrize(
    ("least", "most", "sizes", "failed", "found"),
    [
        (1, 4, (), 4, (3, ())),
        (1, 4, (), None, (4, ())),
        (2, 4, (), 2, (4, ())),  # it takes no fewer
        (1, 4, (1, 2, 4), 4, (2, (1, 2))),
        (1, 4, (1, 2, 4), 2, (1, (1,))),
        (1, None, (), 2, (1, ())),
    ],
)
def test_a_number_of_workers_that_has_failed_is_not_offered_again(
    least: int,
    most: int | None,
    sizes: tuple[int, ...],
    failed: int | None,
    found: tuple[int, tuple[int, ...]],
) -> None:
    facts = replace(FACTS, gpus=least, most_gpus=most, sizes=sizes)
    last = segment(running=False, failed_size=failed)
    shown = job(TrialRecords(row(0), lease(), None, last), facts, (), 130.0)
    assert (shown.max_gpus, shown.sizes) == found


def test_a_policy_sees_how_often_a_trial_has_begun() -> None:
    last = segment(running=False, segments=3)
    begun = [running(0), starting(0), TrialRecords(row(0), lease(), None, last)]
    assert [job(trial, FACTS, (), 130.0).segments for trial in begun] == [1, 0, 3]
