"""What a round takes over from the one before: never anything else than what it would make anew."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from math import inf, isfinite, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.airflow.control.jobs import (
    DeferredTrials,
    SweepFacts,
    TrialCache,
    curve,
    job,
    step_times,
    training_seconds,
)
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.airflow.folders import StatusFile, TrialFolder
from hermes_ops.airflow.records import encode
from hermes_ops.core.curves import PackedPoints, columns
from hermes_ops.core.guards import guarded
from hermes_ops.core.model import Gpu, Job, JobId, Phase, Point, Snapshot, SweepId
from hermes_ops.core.sizes import StepTime
from hermes_ops.errors import HermesError
from hermes_ops.policies import make_policy
from hermes_ops.tracking.sender import read_lines
from hermes_ops.trial.files import Follower
from tests.unit.airflow.builders import (
    SWEEP,
    flag,
    lease,
    pending,
    row,
    running,
    segment,
    waiting,
)

POINTS = ((1, 0.5, 101_000), (2, 0.4, 102_000))
RECORDS = {
    "hermes_lease": [encode(lease(1)), encode(lease(2)), encode(lease(2, (1, 3)))],
    "hermes_segment": [encode(segment(1)), encode(segment(2, running=False)), {"epoch": 2}],
    "hermes_stop": [encode(flag(1)), encode(flag(2))],
}
rows = st.builds(row, st.integers(0, 1), st.sampled_from(["scheduled", "running", "success"]))
records = st.fixed_dictionaries(
    {}, optional={key: st.sampled_from(list(map(json.dumps, v))) for key, v in RECORDS.items()}
)


@given(st.lists(st.tuples(rows, records), max_size=8))
def test_a_trial_that_is_recalled_is_what_its_rows_and_records_say(rounds: list[Any]) -> None:
    cache = TrialCache()
    for now, said in rounds:
        found, anew = cache.trial(now, said), TrialRecords.from_stored(now, said)
        assert found == anew
        assert found.phase is anew.phase


def test_a_trial_of_which_nothing_has_changed_is_not_made_again() -> None:
    cache, said = TrialCache(), {"hermes_lease": json.dumps(encode(lease()))}
    first = cache.trial(row(0, "running"), said)
    assert cache.trial(row(0, "running"), dict(said)) is first
    assert cache.trial(row(0, "success"), said).lease is first.lease


spans = st.lists(st.tuples(st.floats(90, 100), st.floats(100, 101)), max_size=2).map(tuple)
points = st.lists(st.sampled_from(POINTS), max_size=2, unique=True).map(tuple)
begun = st.none() | st.floats(100, 102)


def trained(
    number: int, spans: tuple[tuple[float, float], ...], since_s: float | None
) -> TrialRecords:
    """A trial that has had these segments and runs since then, if at all."""
    last = segment(running=since_s is not None, spans=spans, started_s=since_s or 0.0)
    return TrialRecords(row(number, "running"), lease(), None, last)


@given(st.lists(st.tuples(st.integers(0, 1), points, spans, begun), max_size=6))
def test_a_curve_that_is_recalled_is_what_its_points_and_segments_say(rounds: list[Any]) -> None:
    cache = TrialCache()
    for number, seen, ended, since_s in rounds:
        found = cache.curve(trained(number, ended, since_s), seen, 1.0)
        assert found == curve(seen, 1.0, ended, since_s)


def test_a_curve_of_which_nothing_has_changed_is_the_same_object() -> None:
    cache, runs = TrialCache(), trained(0, (), 100.0)
    first = cache.curve(runs, POINTS, 1.0)
    assert cache.curve(trained(0, (), 100.0), POINTS, 1.0) is first
    assert cache.curve(trained(1, (), 100.0), POINTS, 1.0) is not first


def test_a_round_converts_the_points_that_have_come_since_the_last_one_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = tuple((step, 1.0 / (step + 1), 101_000 + step) for step in range(1_001))
    cache, seen, converted = TrialCache(), trained(0, ((90.0, 95.0),), 100.0), 0

    def counted(*arguments: Any) -> float:
        nonlocal converted
        converted += 1
        return training_seconds(*arguments)

    monkeypatch.setattr("hermes_ops.airflow.control.jobs.training_seconds", counted)
    for count in (0, 1, 999, 1_000, 1_001):
        expected = curve(points[:count], -1.0, ((90.0, 95.0),), 100.0)
        converted = 0
        assert cache.curve(seen, points[:count], -1.0) == expected
        assert converted == {0: 0, 1: 0, 999: 998}.get(count, 1)
    assert len(cache.curve(trained(0, ((90.0, 96.0),), 100.0), points, -1.0)) == 1_000
    assert converted == 1 + 1_000  # the time of each point is another one now


class Counted(tuple[Any, ...]):
    """Points that count how many of them are looked at."""

    looked = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return Counted(found) if isinstance(index, slice) else found

    def __iter__(self) -> Any:
        Counted.looked += len(self)
        return super().__iter__()


def test_the_lowest_loss_of_a_curve_that_has_grown_costs_a_look_at_its_new_points_alone() -> None:
    cache = TrialCache()
    points = tuple((step, 1.0 / (step + 1), step) for step in range(1_000))
    assert cache.lowest_loss(0, Counted(points[:998]), 1.0) == 1 / 998
    Counted.looked = 0
    assert cache.lowest_loss(0, Counted(points), 1.0) == 1 / 1_000
    assert Counted.looked == 2


losses = st.lists(st.sampled_from([0.5, 0.25, nan, inf, -inf, 1.0]), max_size=6)


@given(st.lists(losses, max_size=6), st.sampled_from([-1.0, 1.0]))
def test_the_lowest_loss_is_that_of_all_finite_points(rounds: list[Any], sign: float) -> None:
    cache, packed = TrialCache(), PackedPoints.from_rows(())
    for values in rounds:
        more = [(len(packed) + n, value, 0) for n, value in enumerate(values)]
        for points in (packed.extended(more), tuple(more)):
            finite = [sign * value for _, value, _ in points if isfinite(value)]
            assert cache.lowest_loss(0, points, sign) == min(finite, default=None)
        packed = packed.extended(more)


def test_a_value_of_a_long_curve_takes_less_than_120_bytes_in_the_controller() -> None:
    cache, seen, count = TrialCache(), trained(0, (), 0.0), 10_000
    tracemalloc.start()
    points = PackedPoints.from_rows((n, 1.0 / n, 1_000 * n) for n in range(1, count))
    for step in range(count, count + 100):
        points = points.extended([(step, 1.0 / step, 1_000 * step)])
        columns(cache.curve(seen, points, 1.0))
        cache.lowest_loss(0, points, 1.0)
    used_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used_bytes < 120 * count


@pytest.mark.parametrize(("segments", "began_s"), [(1, 94.0), (2, 96.0)])
def test_a_curve_counts_from_the_end_of_the_start_as_far_as_that_is_measured(
    segments: int, began_s: float
) -> None:
    last = segment(started_s=90.0, startup_s=4.0, restore_s=2.0, segments=segments)
    trial = TrialRecords(row(0, "running"), lease(), None, last)
    assert TrialCache().curve(trial, POINTS, 1.0) == curve(POINTS, 1.0, (), began_s)


def test_a_trial_without_a_segment_has_a_curve_of_what_is_known() -> None:
    assert TrialCache().curve(pending(0), POINTS, -1.0) == curve(POINTS, -1.0, (), None)


FACTS = SweepFacts(SweepId("digits"), 50.0, 1.0, 1, 1.0, 20, True)
CONFIGS = ({"rate": 0.1}, {"rate": 0.2})
told = st.tuples(rows, records, points, st.sampled_from([None, *CONFIGS]))


@given(st.lists(told, max_size=8))
def test_a_job_that_is_recalled_is_what_its_trial_says_at_that_time(rounds: list[Any]) -> None:
    cache = TrialCache()
    for place, (now, said, seen, foreseen) in enumerate(rounds):
        now_s, trial = 200.0 + place, cache.trial(now, said)
        shown = cache.curve(trial, seen, FACTS.sign)
        found = cache.job(trial, FACTS, seen, now_s, foreseen)
        assert found == job(trial, FACTS, shown, now_s, foreseen)


def test_the_step_times_of_a_trial_are_measured_once_for_each_of_its_curves_and_segments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = list[int]()

    def counted(points: Any, *spans: Any) -> Any:
        measured.append(len(points))
        return step_times(points, *spans)

    monkeypatch.setattr("hermes_ops.airflow.control.jobs.step_times", counted)
    cache, sized = TrialCache(), replace(FACTS, most_gpus=2)
    runs = trained(0, ((90.0, 101.5),), 101.6)
    for points in (POINTS[:1], POINTS, POINTS, POINTS):
        cache.job(replace(runs), sized, points, 200.0)
    spans = ((90.0, 102.5),)
    resumed = TrialRecords(
        row(0, "running"), lease(), None, segment(spans=spans, sizes=(1,), started_s=103.0)
    )
    again = cache.job(resumed, sized, POINTS, 200.0)
    assert measured == [1, 2, 2]
    assert again.step_times == (StepTime(1, 1.0),)


def test_a_trial_that_waits_is_served_in_turn_though_the_clock_was_set_back_by_a_day() -> None:
    cache, running_on = TrialCache(), Job(
        JobId("digits/9"), SweepId("digits"), 0.0, Phase.RUNNING, gpus_held=(0,), started_s=-500.0,
        startup_s=1.0, curve=(Point(1, 1.0, 1.0), Point(2, 0.5, 2.0)),
    )  # fmt: skip
    policy = guarded(make_policy("2d-las", {}), default_switch_s=1.0)
    served_s = None
    for second in range(1_000):
        records = waiting(0)  # a record that changes does not begin its wait again
        ended = replace(records, segment=segment(running=False, ended_s=86_400.0 + 110.0))
        waits = cache.job(ended, FACTS, POINTS, 200.0 + second)
        jobs = (running_on, replace(waits, service_gpu_s=1e9))
        plan, _ = policy.decide(Snapshot(200.0 + second, (Gpu(0),), jobs), policy.initial())
        if served_s is None and plan.grants[0].job == waits.id:
            served_s = second
    assert served_s is not None


def test_the_job_of_a_trial_that_waits_is_the_same_object_until_something_changes() -> None:
    cache, waits = TrialCache(), waiting(0)
    first = cache.job(waits, FACTS, POINTS, 200.0)
    assert cache.job(waits, FACTS, POINTS, 300.0) is first
    assert cache.job(waits, FACTS, POINTS[:1], 300.0).curve == first.curve[:1]
    assert cache.job(waiting(0), FACTS, POINTS, 300.0) is not first


def test_the_service_of_a_trial_that_trains_grows_from_round_to_round() -> None:
    cache, runs = TrialCache(), running(0, 1)
    first, second = (cache.job(runs, FACTS, POINTS, now_s) for now_s in (200.0, 210.0))
    assert second.service_gpu_s == first.service_gpu_s + 10.0


# What the folder of a deferred trial says


@pytest.fixture
def folder() -> TrialFolder:
    found = TrialFolder.from_sweep(SWEEP, 0)
    found.path.mkdir(parents=True)
    return found


def say(folder: TrialFolder, **status: object) -> None:
    fresh = folder.path / "fresh"
    fresh.write_text(json.dumps({"epoch": 1, **status}))
    fresh.replace(folder.path / "status.json")


def test_a_status_file_says_what_was_written_last(folder: TrialFolder) -> None:
    file = StatusFile.from_folder(folder)
    assert file.read() == folder.status() == {}
    for step in (7, 8, 9):
        say(folder, step=step)
        assert file.read() == folder.status() == {"epoch": 1, "step": step}
    assert file.read() is file.read()
    (folder.path / "status.json").write_text('{"epoch": 1, "st')
    assert file.read() == folder.status() == {}
    (folder.path / "status.json").unlink()
    assert file.read() == folder.status() == {}


def test_a_status_file_that_cannot_be_read_is_an_error_with_its_path(folder: TrialFolder) -> None:
    (folder.path / "status.json").mkdir()
    with pytest.raises(HermesError, match=str(folder.path)):
        StatusFile.from_folder(folder).read()


def test_a_deferred_trial_is_made_again_only_once_its_folder_or_its_records_say_more(
    folder: TrialFolder,
) -> None:
    deferred = DeferredTrials()
    trial = TrialRecords(row(0, "deferred"), lease(pod={}), None, segment())
    say(folder, step=7)
    first = deferred.with_folder(trial, SWEEP)
    assert first.segment is not None
    assert first.segment.step == 7
    assert deferred.with_folder(trial, SWEEP) is first
    say(folder, step=8)
    assert deferred.with_folder(trial, SWEEP).segment == replace(first.segment, step=8)
    later = replace(trial, segment=segment(failures=1))
    assert deferred.with_folder(later, SWEEP).segment == replace(segment(failures=1), step=8)


@pytest.mark.parametrize(
    "status",
    [
        '{"epoch": 1, "step": "x"}',
        '{"epoch": 1, "step": 1e999}',
        '{"epoch": 1, "step": 1' + 400 * "0" + "}",
        '{"epoch": 1, "tensor_skew": "high"}',
        '{"epoch": 1, "checkpointed_s": "noon"}',
        '{"epoch": 1, "timings": [1]}',
        '{"epoch": 1, "timings": {"startup_s": "x"}}',
        '{"epoch": 1, "timings": {"restore_s": []}}',
        '{"epoch": 1, "timings": {"restore_s": 1e308}}',
        '{"epoch": 1, "timings": {"checkpoint_s": NaN}}',
        '{"epoch": 1, "timings": {"repeat_s": -7}}',
        5_000 * '{"epoch":',
    ],
)
def test_whatever_a_script_has_written_for_its_status_policies_get_numbers(
    folder: TrialFolder, status: str
) -> None:
    (folder.path / "status.json").write_text(status)
    trial = TrialRecords(row(0, "deferred"), lease(pod={}), None, segment())
    assert DeferredTrials().with_folder(trial, SWEEP) == trial


def test_of_a_status_with_a_number_that_none_can_measure_the_rest_counts(
    folder: TrialFolder,
) -> None:
    (folder.path / "status.json").write_text(
        '{"epoch": 1, "step": 7, "timings": {"startup_s": 2.5, "restore_s": -1}}'
    )
    trial = TrialRecords(row(0, "deferred"), lease(pod={}), None, segment())
    seen = DeferredTrials().with_folder(trial, SWEEP).segment
    assert seen == segment(step=7, startup_s=2.5)


def test_documents_in_a_trials_folder_that_are_nested_too_deeply_are_damaged_ones(
    folder: TrialFolder,
) -> None:
    for name in ("status.json", "result.json", "segments.jsonl", "metrics.jsonl"):
        (folder.path / name).write_text(50_000 * '{"a":' + "\n")
    assert (folder.status(), folder.result(), folder.segments()) == ({}, {}, ())
    assert [entry for entry, _ in read_lines(folder.metrics, 0)] == [None]
    assert list(Follower(folder.metrics).new()) == []
