from __future__ import annotations

import json
from typing import Any

import pytest

from hermes_ops.airflow.folders import TrialFolder
from hermes_ops.airflow.records import SEGMENT_KEY, STOP_KEY, Segment, decode, encode
from hermes_ops.airflow.trial import afterwards
from hermes_ops.airflow.trial.beside import tell
from hermes_ops.airflow.trial.metrics import Ending
from hermes_ops.airflow.trial.visit import Visit
from tests.unit.airflow.worlds import SWEEP, DictStore, FakeFeed, flag, lease, segment


def begin(store: DictStore, epoch: int = 1) -> tuple[Visit, FakeFeed]:
    folder = TrialFolder.of(SWEEP, 0)
    folder.path.mkdir(parents=True, exist_ok=True)
    last = decode(Segment, store.get(SEGMENT_KEY))
    visit, feed = Visit.begin(store, lease(epoch), folder, last), FakeFeed()
    outside: Any = feed
    visit.feed = outside
    return visit, feed


def write(visit: Visit, name: str, *documents: dict[str, Any]) -> None:
    (visit.folder.path / name).write_text("\n".join(json.dumps(d) for d in documents))


def stored(store: DictStore) -> Segment:
    record = decode(Segment, store[SEGMENT_KEY])
    assert record is not None
    return record


def test_a_visit_writes_nothing_before_its_process_has_started() -> None:
    store = DictStore()
    visit, feed = begin(store)
    assert (store, feed.said) == ({}, [])
    visit.opened()
    assert stored(store).running
    assert (stored(store).epoch, stored(store).segments, feed.said) == (1, 1, ["start"])


def test_what_the_trial_says_is_passed_on_once() -> None:
    store = DictStore()
    visit, _ = begin(store)
    write(visit, "status.json", {
        "epoch": 1, "step": 3, "preemptible": False, "preemptible_reason": "no checkpoint",
        "checkpointed_s": 9.0, "timings": {"startup_s": 4.0, "restore_s": None},
        "tensor_skew": 0.75,
    })  # fmt: skip
    visit.relay()
    found = stored(store)
    assert found.tensor_skew == 0.75
    assert (found.step, found.preemptible, found.checkpointed_s) == (3, False, 9.0)
    assert (found.startup_s, found.restore_s) == (4.0, None)
    store.clear()
    visit.relay()
    assert store == {}


def test_the_status_of_an_older_lease_is_not_passed_on() -> None:
    store = DictStore()
    visit, _ = begin(store, epoch=2)
    write(visit, "status.json", {"epoch": 1, "step": 3})
    visit.relay()
    assert store == {}


def test_a_stop_flag_counts_for_its_own_lease_only() -> None:
    store = DictStore({STOP_KEY: encode(flag(1))})
    assert begin(store, epoch=2)[0].stop_flag() is None
    assert begin(store, epoch=1)[0].stop_flag() == flag(1)


def test_a_stop_flag_beside_the_folder_counts_before_it_is_on_record() -> None:
    store = DictStore({STOP_KEY: encode(flag(2))})
    visit, _ = begin(store, epoch=1)
    assert visit.stop_flag() is None
    tell(visit.folder, flag(1, "cancelled"), needed=True)
    assert visit.stop_flag() == flag(1, "cancelled")
    assert begin(store, epoch=2)[0].stop_flag() == flag(2)


def test_a_pause_closes_the_segment_and_sends_what_is_there() -> None:
    store = DictStore()
    visit, feed = begin(store)
    write(visit, "status.json", {"epoch": 1, "step": 5, "timings": {"checkpoint_s": 0.2}})
    write(
        visit,
        "segments.jsonl",
        {"epoch": 1, "gpus": [0], "start_s": 10.0, "first_step": 0},
        {"epoch": 1, "end_s": 14.0, "last_step": 5, "outcome": "preempted"},
    )
    visit.pause("preempted")
    assert feed.said == []
    afterwards.run()
    found = stored(store)
    assert (found.running, found.outcome, found.final) == (False, "preempted", None)
    assert (found.spans, found.service_gpu_s, found.preemptions) == (((10.0, 14.0),), 4.0, 1)
    assert (found.step, found.checkpoint_s, feed.said) == (5, 0.2, ["pump"])


def test_training_begins_after_the_start_and_the_restore_that_a_segment_has_measured() -> None:
    store = DictStore()
    visit, _ = begin(store)
    write(
        visit,
        "segments.jsonl",
        {"epoch": 1, "gpus": [0], "start_s": 10.0, "first_step": 0},
        {"startup_s": 1.5, "restore_s": None, "epoch": 1, "end_s": 14.0, "outcome": "preempted"},
        {"epoch": 2, "gpus": [0], "start_s": 20.0, "first_step": 5},
        {"startup_s": 1.0, "restore_s": 0.5, "epoch": 2, "end_s": 24.0, "outcome": "preempted"},
        {"epoch": 3, "gpus": [0], "start_s": 30.0, "first_step": 7},
        {"startup_s": 9.0, "epoch": 3, "end_s": 31.0, "outcome": "failed"},
    )
    visit.pause("failed", failed=True)
    found = stored(store)
    assert found.spans == ((11.5, 14.0), (21.5, 24.0), (31.0, 31.0))
    assert found.service_gpu_s == 9.0


def test_the_next_visit_goes_on_where_the_last_one_paused() -> None:
    store = DictStore({SEGMENT_KEY: encode(segment(1, running=False, step=5, startup_s=4.0))})
    visit, _ = begin(store, epoch=2)
    visit.opened()
    found = stored(store)
    assert (found.epoch, found.running, found.steps_at_start) == (2, True, 5)
    assert (found.startup_s, found.ended_s, found.outcome) == (4.0, None, "")


def test_failures_survive_pauses_and_visits() -> None:
    store = DictStore()
    for epoch in (1, 2, 3):
        visit, _ = begin(store, epoch)
        visit.pause("failed", failed=True)
        between, _ = begin(store, epoch)
        between.pause("preempted")
        assert stored(store).failures == epoch


def test_an_end_is_final_and_closes_the_run() -> None:
    store = DictStore()
    visit, feed = begin(store)
    visit.end(Ending("stopped_early", "not in the best third"))
    assert stored(store).final == "stopped_early"
    assert feed.said == [Ending("stopped_early", "not in the best third")]


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
    visit, _ = begin(DictStore(), epoch=2)
    write(visit, "result.json", result)
    assert visit.result() == (result if counts else {})
