from __future__ import annotations

import json
from typing import Any

import pytest

from hermes_ops.airflow.folders import (
    TrialFolder,
    counted_segments,
    write_stop_flag,
)
from hermes_ops.airflow.records import SEGMENT_KEY, STOP_KEY, SegmentRecord, decode, encode
from hermes_ops.airflow.trial import segment_run as segment_runs
from hermes_ops.airflow.trial.metrics import TrialOutcome
from hermes_ops.airflow.trial.segment_run import SegmentFailure, SegmentRun
from tests.unit.airflow.builders import SWEEP, DictStore, FakeFeed, flag, lease, segment


def begin(store: DictStore, epoch: int = 1, **changes: Any) -> tuple[SegmentRun, FakeFeed]:
    folder = TrialFolder.from_sweep(SWEEP, 0)
    folder.path.mkdir(parents=True, exist_ok=True)
    last = decode(SegmentRecord, store.get(SEGMENT_KEY))
    own = lease(epoch, **{"gpus": (0,), **changes})
    segment_run, feed = SegmentRun.from_lease(store, own, folder, last), FakeFeed()
    outside: Any = feed
    segment_run.feed = outside
    return segment_run, feed


def write(segment_run: SegmentRun, name: str, *documents: dict[str, Any]) -> None:
    lines = "".join(json.dumps(d) + "\n" for d in documents)
    (segment_run.folder.path / name).write_text(lines)


def stored(store: DictStore) -> SegmentRecord:
    record = decode(SegmentRecord, store[SEGMENT_KEY])
    assert record is not None
    return record


def test_a_segment_run_writes_nothing_before_its_process_has_started() -> None:
    store = DictStore()
    segment_run, feed = begin(store)
    assert (store, feed.said) == ({}, [])
    segment_run.opened()
    assert stored(store).running
    assert (stored(store).epoch, stored(store).segments, feed.said) == (1, 1, ["start"])


def test_what_the_trial_says_is_passed_on_once() -> None:
    store = DictStore()
    segment_run, _ = begin(store)
    write(segment_run, "status.json", {
        "epoch": 1, "step": 3, "preemptible": False, "preemptible_reason": "no checkpoint",
        "checkpointed_s": 9.0, "timings": {"startup_s": 4.0, "restore_s": None},
        "tensor_skew": 0.75,
    })  # fmt: skip
    segment_run.relay()
    found = stored(store)
    assert found.tensor_skew == 0.75
    assert (found.step, found.preemptible, found.checkpointed_s) == (3, False, 9.0)
    assert (found.startup_s, found.restore_s) == (4.0, None)
    store.clear()
    segment_run.relay()
    assert store == {}


def test_the_status_of_an_older_lease_is_not_passed_on() -> None:
    store = DictStore()
    segment_run, _ = begin(store, epoch=2)
    write(segment_run, "status.json", {"epoch": 1, "step": 3})
    segment_run.relay()
    assert store == {}


def test_a_stop_flag_counts_for_its_own_lease_only() -> None:
    store = DictStore({STOP_KEY: encode(flag(1))})
    assert begin(store, epoch=2)[0].stop_flag() is None
    assert begin(store, epoch=1)[0].stop_flag() == flag(1)


def test_a_stop_flag_beside_the_folder_counts_before_it_is_on_record() -> None:
    store = DictStore({STOP_KEY: encode(flag(2))})
    segment_run, _ = begin(store, epoch=1)
    assert segment_run.stop_flag() is None
    write_stop_flag(segment_run.folder, flag(1, "cancelled"), needed=True)
    assert segment_run.stop_flag() == flag(1, "cancelled")
    assert begin(store, epoch=2)[0].stop_flag() == flag(2)


def test_a_pause_closes_the_segment_and_sends_what_is_there() -> None:
    store = DictStore()
    segment_run, feed = begin(store)
    write(segment_run, "status.json", {"epoch": 1, "step": 5, "timings": {"checkpoint_s": 0.2}})
    write(
        segment_run,
        "segments.jsonl",
        {"epoch": 1, "gpus": [0], "start_s": 10.0, "first_step": 0},
        {"epoch": 1, "end_s": 14.0, "last_step": 5, "outcome": "preempted"},
    )
    segment_run.pause("preempted")
    assert feed.said == []
    segment_runs.run_pending()
    found = stored(store)
    assert (found.running, found.outcome, found.final) == (False, "preempted", None)
    assert (found.spans, found.service_gpu_s, found.preemptions) == (((10.0, 14.0),), 4.0, 1)
    assert (found.step, found.checkpoint_s, feed.said) == (5, 0.2, ["pump"])


def test_a_segment_that_was_killed_has_had_its_gpus_until_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = DictStore()
    segment_run, _ = begin(store)
    start = {"epoch": 1, "gpus": [0, 1], "start_s": 10.0, "first_step": 0}
    write(segment_run, "segments.jsonl", start)
    monkeypatch.setattr("hermes_ops.airflow.trial.segment_run.time.time", lambda: 15.0)
    segment_run.pause("preempted")
    assert (stored(store).spans, stored(store).service_gpu_s) == (((10.0, 15.0),), 10.0)


@pytest.mark.parametrize("is_disk_full", [False, True])
def test_a_killed_segment_has_its_end_in_its_folder_if_there_is_space(
    is_disk_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    store = DictStore()
    segment_run, _ = begin(store, epoch=2)
    ended = {"epoch": 1, "end_s": 9.0, "last_step": 3, "outcome": "preempted"}
    starts = [{"epoch": n, "gpus": [0], "start_s": 10.0 * n - 5.0, "first_step": 0} for n in (1, 2)]
    write(segment_run, "segments.jsonl", starts[0], ended, starts[1])
    write(segment_run, "status.json", {"epoch": 2, "step": 7})
    monkeypatch.setattr("hermes_ops.airflow.trial.segment_run.time.time", lambda: 20.0)
    result = {"epoch": 2, "outcome": "failed", "step": 8}  # the status could not be written
    write(segment_run, "result.json", result)
    if is_disk_full:
        monkeypatch.setattr("hermes_ops.airflow.folders.close_segment", fail)
    segment_run.pause("failed", failed=True)
    assert stored(store).spans == ((5.0, 9.0), (15.0, 20.0))
    first, second = segment_run.folder.segments()
    assert (first["end_s"], first["outcome"]) == (9.0, "preempted")
    end = None if is_disk_full else (20.0, 8, "killed")
    found = tuple(second.get(name) for name in ("end_s", "last_step", "outcome"))
    assert found == (end or (None, None, None))


NOW_S = 1_000_000.0


def of_pod(
    monkeypatch: pytest.MonkeyPatch, store: DictStore, epoch: int = 1, began_s: float = NOW_S
) -> SegmentRun:
    """The segment of a pod with two GPUs, which began then and ends a hundred seconds later."""
    monkeypatch.setattr("hermes_ops.airflow.trial.segment_run.time.time", lambda: began_s)
    segment_run, _ = begin(store, epoch, pod={}, gpus=(0, 1))
    monkeypatch.setattr("hermes_ops.airflow.trial.segment_run.time.time", lambda: began_s + 100.0)
    return segment_run


def lines(epoch: int, start_s: float, end_s: float, gpus: Any = (0, 1)) -> list[dict[str, Any]]:
    return [
        {"epoch": epoch, "gpus": list(gpus), "start_s": start_s, "first_step": 0},
        {"epoch": epoch, "end_s": end_s, "last_step": 5, "outcome": "preempted"},
    ]


@pytest.mark.parametrize(
    "told",
    [
        lines(1, NOW_S + 99.0, NOW_S + 100.0),
        lines(1, NOW_S, NOW_S + 100.0, gpus=()) + lines(1, NOW_S + 99.0, NOW_S + 99.5),
        lines(1, 5.0, 105.0),
        lines(7, NOW_S + 99.0, NOW_S + 100.0),
        [{"epoch": 1, "start_s": "long ago"}, {"end_s": []}, {"start_s": 10**400, "gpus": 3}],
        [],
    ],
)
def test_a_script_that_rewrites_its_segments_does_not_make_them_shorter(
    told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DictStore()
    segment_run = of_pod(monkeypatch, store)
    segment_run.ran_s = 90.0
    write(segment_run, "segments.jsonl", *told)
    segment_run.pause("preempted")
    found = stored(store)
    assert found.service_gpu_s >= 180.0
    assert sum((end - start) * n for (start, end), n in zip(found.spans, found.sizes, strict=True))
    assert all(start >= NOW_S for start, _ in found.spans[-1:])


def test_a_pod_that_says_that_it_has_only_started_up_has_held_its_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = DictStore(
        {SEGMENT_KEY: encode(segment(running=False, spans=((1.0, 3.0),), sizes=(2,)))}
    )
    segment_run = of_pod(monkeypatch, store, 2)
    segment_run.ran_s = 100.0
    start, end = lines(2, NOW_S, NOW_S + 100.0)
    write(segment_run, "segments.jsonl", start, {**end, "startup_s": 1e9})
    segment_run.pause("preempted")
    found = stored(store)
    assert found.spans == ((1.0, 3.0), (NOW_S + 100.0, NOW_S + 100.0))
    assert found.held_spans == ((1.0, 3.0), (NOW_S, NOW_S + 100.0))


@pytest.mark.parametrize(
    ("told", "gpus"),
    [
        (lines(1, NOW_S + 99.0, NOW_S + 100.0), (0, 1)),
        (lines(1, NOW_S, NOW_S + 100.0, gpus=(5,)), (0, 1)),
        (lines(1, NOW_S + 10.0, NOW_S + 99.0, gpus=(3, 4)), (3, 4)),
        ([], (0, 1)),
    ],
)
def test_segments_that_a_script_has_changed_count_as_they_are_on_record(
    told: list[dict[str, Any]], gpus: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = of_pod(monkeypatch, DictStore())
    first.ran_s = 100.0
    write(first, "segments.jsonl", *lines(1, NOW_S, NOW_S + 100.0))
    first.pause("preempted")
    assert counted_segments(first.folder) == first.folder.segments()
    newer = lines(2, NOW_S + 200.0, NOW_S + 210.0)
    write(first, "segments.jsonl", *told, *newer)
    found = counted_segments(first.folder)
    assert [(s["start_s"], s["end_s"]) for s in found] == [
        (NOW_S, NOW_S + 100.0),
        (NOW_S + 200.0, NOW_S + 210.0),
    ]
    assert tuple(found[0]["gpus"]) == gpus
    assert first.folder.empty()
    assert counted_segments(first.folder) == ()


def test_what_is_on_record_of_earlier_segments_outlives_their_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = DictStore()
    first = of_pod(monkeypatch, store)
    write(first, "segments.jsonl", *lines(1, NOW_S, NOW_S + 95.0))
    first.ran_s = 97.0
    first.pause("preempted")
    assert stored(store).spans == ((NOW_S, NOW_S + 95.0),)
    second = of_pod(monkeypatch, store, 2, NOW_S + 200.0)
    write(second, "segments.jsonl", *lines(2, NOW_S + 201.0, NOW_S + 299.0))
    second.ran_s = 99.0
    second.pause("preempted")
    found = stored(store)
    assert found.spans == ((NOW_S, NOW_S + 95.0), (NOW_S + 201.0, NOW_S + 299.0))
    assert (found.sizes, found.service_gpu_s) == ((2, 2), 190.0 + 196.0)
    second.end(TrialOutcome("failed"))
    assert stored(store).service_gpu_s == 190.0 + 196.0


def test_a_pod_that_was_killed_counts_once_though_its_file_is_closed_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = DictStore()
    killed = of_pod(monkeypatch, store)
    start, end = lines(1, NOW_S + 2.0, NOW_S + 80.0)
    write(killed, "segments.jsonl", start)
    killed.ran_s = 90.0
    killed.interrupt("its node was lost")
    assert stored(store).service_gpu_s == 180.0
    again = of_pod(monkeypatch, store, 2, NOW_S + 200.0)
    write(again, "segments.jsonl", start, end, *lines(2, NOW_S + 201.0, NOW_S + 299.0))
    again.ran_s = 99.0
    again.pause("preempted")
    assert stored(store).service_gpu_s == 180.0 + 196.0


def test_the_next_try_at_a_segment_that_has_ended_counts_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = DictStore()
    first = of_pod(monkeypatch, store)
    first.opened()
    write(first, "segments.jsonl", *lines(1, NOW_S + 1.0, NOW_S + 99.0))
    again, _ = begin(store, 1, pod={}, gpus=(0, 1))
    again.ran_s = 99.0
    again.pause("preempted")
    assert stored(store).service_gpu_s == 196.0


def test_a_pod_that_says_that_it_begins_later_than_now_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = DictStore()
    segment_run = of_pod(monkeypatch, store)
    write(segment_run, "status.json", {"epoch": 1, "started_s": NOW_S + 5_000.0})
    segment_run.relay()
    assert stored(store).waited_s == 100.0


@pytest.mark.parametrize("status", [{}, {"epoch": 1, "started_s": NOW_S + 60.0}])
def test_a_container_that_runs_counts_whatever_its_status_says(
    status: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DictStore()
    segment_run = of_pod(monkeypatch, store)
    segment_run.opened()
    write(segment_run, "status.json", status)
    segment_run.relay(9.0)
    segment_run.relay(95.0)
    assert stored(store).waited_s == 5.0
    store.clear()
    segment_run.relay(95.0)
    assert store == {}


def test_a_pod_begins_when_its_status_says_so_if_that_is_soon_after_its_container(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = DictStore()
    segment_run = of_pod(monkeypatch, store)
    write(segment_run, "status.json", {"epoch": 1, "started_s": NOW_S + 8.0})
    segment_run.relay(95.0)
    assert stored(store).waited_s == 8.0


def test_training_begins_after_the_start_and_the_restore_that_a_segment_has_measured() -> None:
    store = DictStore()
    segment_run, _ = begin(store)
    write(
        segment_run,
        "segments.jsonl",
        {"epoch": 1, "gpus": [0], "start_s": 10.0, "first_step": 0},
        {"startup_s": 1.5, "restore_s": None, "epoch": 1, "end_s": 14.0, "outcome": "preempted"},
        {"epoch": 2, "gpus": [0], "start_s": 20.0, "first_step": 5},
        {"startup_s": 1.0, "restore_s": 0.5, "epoch": 2, "end_s": 24.0, "outcome": "preempted"},
        {"epoch": 3, "gpus": [0], "start_s": 30.0, "first_step": 7},
        {"startup_s": 9.0, "epoch": 3, "end_s": 31.0, "outcome": "failed"},
    )
    segment_run.pause("failed", failed=True)
    found = stored(store)
    assert found.spans == ((11.5, 14.0), (21.5, 24.0), (31.0, 31.0))
    assert found.held_spans == ((10.0, 14.0), (20.0, 24.0), (30.0, 31.0))
    assert found.service_gpu_s == 9.0


def test_the_next_segment_run_goes_on_where_the_last_one_paused() -> None:
    store = DictStore({SEGMENT_KEY: encode(segment(1, running=False, step=5, startup_s=4.0))})
    segment_run, _ = begin(store, epoch=2)
    segment_run.opened()
    found = stored(store)
    assert (found.epoch, found.running, found.steps_at_start) == (2, True, 5)
    assert (found.startup_s, found.ended_s, found.outcome) == (4.0, None, "")


def test_failures_survive_pauses_and_segment_runs() -> None:
    store = DictStore()
    for epoch in (1, 2, 3):
        segment_run, _ = begin(store, epoch)
        segment_run.pause("failed", failed=True)
        between, _ = begin(store, epoch)
        between.pause("preempted")
        assert stored(store).failures == epoch


def test_an_end_is_final_and_closes_the_run() -> None:
    store = DictStore()
    segment_run, feed = begin(store)
    segment_run.end(TrialOutcome("stopped_early", "not in the best third"))
    assert stored(store).final == "stopped_early"
    assert feed.said == [TrialOutcome("stopped_early", "not in the best third")]


def test_the_last_segment_of_a_trial_counts_in_its_gpu_time() -> None:
    store = DictStore()
    segment_run, _ = begin(store)
    write(segment_run, "status.json", {"epoch": 1, "step": 5})
    write(
        segment_run,
        "segments.jsonl",
        {"epoch": 1, "gpus": [0, 1], "start_s": 10.0, "first_step": 0},
        {"epoch": 1, "end_s": 14.0, "last_step": 5, "outcome": "finished"},
    )
    segment_run.end(TrialOutcome("finished"))
    found = stored(store)
    assert (found.running, found.ended_s is None, found.outcome) == (False, False, "finished")
    assert (found.spans, found.sizes, found.service_gpu_s) == (((10.0, 14.0),), (2,), 8.0)
    assert found.step == 5


@pytest.mark.parametrize(
    ("result", "counts"),
    [
        ({"epoch": 2, "outcome": "preempted"}, True),
        ({"epoch": 1, "outcome": "finished"}, True),  # it ended while nobody looked
        ({"epoch": 1, "outcome": "failed"}, False),
        ({}, False),
    ],
)
def test_a_result_counts_for_its_lease_unless_the_trial_had_finished(
    result: dict[str, Any], counts: bool
) -> None:
    segment_run, _ = begin(DictStore(), epoch=2)
    write(segment_run, "result.json", result)
    assert segment_run.result() == (result if counts else {})


def test_the_batch_of_a_segment_is_on_record_while_it_runs_and_after_it() -> None:
    store = DictStore()
    segment_run, _ = begin(store, batch=96, samples=100)
    segment_run.record_batch()
    segment_run.opened()
    assert (stored(store).batch, stored(store).batches) == (100, ())
    write(
        segment_run,
        "segments.jsonl",
        {"epoch": 1, "gpus": [0, 1], "start_s": 10.0, "first_step": 0},
        {"epoch": 1, "end_s": 14.0, "last_step": 5, "outcome": "preempted"},
    )
    segment_run.pause("preempted")
    assert (stored(store).sizes, stored(store).batches) == ((2,), (100,))


def test_nothing_is_recorded_of_a_batch_that_is_not_known() -> None:
    segment_run, _ = begin(DictStore())
    segment_run.record_batch()
    assert not segment_run.folder.batches.exists()


FAILURE = SegmentFailure("rank 1 of 2 failed first", cause="other")


def test_the_least_number_of_workers_that_has_failed_is_on_record() -> None:
    store = DictStore()
    for epoch, (workers, size) in enumerate([("one_per_gpu", 4), ("one_per_gpu", 2)], start=1):
        gpus = tuple(range(size))
        segment_run, _ = begin(store, epoch, workers=workers, gpus=gpus)
        segment_run.pause("failed", failed=True, failure=FAILURE)
        assert stored(store).failed_size == size
    segment_run, _ = begin(store, 3, workers="one_per_gpu", gpus=(0, 1, 2))
    segment_run.pause("failed", failed=True, failure=FAILURE)
    assert stored(store).failed_size == 2


@pytest.mark.parametrize(
    ("workers", "gpus", "failure"),
    [
        ("one_process", (0, 1), FAILURE),
        ("one_per_gpu", (0,), FAILURE),
        ("one_per_gpu", (0, 1), None),
        ("one_per_gpu", (0, 1), SegmentFailure("no space left", cause="no_space")),
        ("one_per_gpu", (0, 1), SegmentFailure("its process ended with -9 and left no result")),
    ],
)
def test_one_process_a_stop_or_a_killed_supervisor_says_nothing_of_a_number_of_workers(
    workers: str, gpus: tuple[int, ...], failure: SegmentFailure | None
) -> None:
    store = DictStore()
    segment_run, _ = begin(store, workers=workers, gpus=gpus)
    is_failed = failure is not None
    outcome = "failed" if is_failed else "preempted"
    segment_run.pause(outcome, failed=is_failed, failure=failure)
    assert stored(store).failed_size is None
