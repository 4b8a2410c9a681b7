"""Trials with a worker on each GPU under a policy that sizes them, on a real scheduler."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.samplers import WorkerSampler, sampling

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

SLOTS = 4


def _slots(sweep: Any) -> int:
    """Return the slots that the trial's task has in Airflow."""
    return int(sweep.tasks()["trial", 0]["pool_slots"])


@pytest.fixture(scope="module")
def resized(lab: Any, harness: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trial alone on four slots, and a second one that comes and goes while the first lasts."""
    folder, log = tmp_path_factory.mktemp("resized"), tmp_path_factory.mktemp("workers")
    first_lasts, second_lasts = harness.slow_file(folder), harness.slow_file(folder)
    looking = WorkerSampler(log)
    slots = []

    def start(name: str, lasts: Any) -> Any:
        return lab.start(harness.workers(name, harness.alike(1), log, lasts))

    with (
        lab.pool(SLOTS),
        lab.policy("doubling", guard_k=0),
        lab.sampled() as sampler,
        sampling(looking),
    ):
        first = start("alone", first_lasts)
        harness.await_(lambda: first.sizes() == [4] and first.lines(0) > 3)
        slots.append(_slots(first))
        second = start("joins", second_lasts)
        harness.await_(lambda: first.sizes()[-1] == 2 and second.sizes() == [2])
        harness.await_(lambda: second.lines(0) > 3 and len(looking.alive()) == SLOTS)
        slots.append(_slots(first) + _slots(second))
        second_lasts.unlink()
        second.await_end()
        harness.await_(lambda: first.sizes()[-1] == 4 and len(looking.alive()) == SLOTS)
        first_lasts.unlink()
        first.await_end()
    return first, second, sampler, looking, slots


def test_a_trial_gives_workers_to_another_one_and_has_them_again_when_that_ends(
    resized: Any,
) -> None:
    first, second, *_, slots = resized
    assert (first.sizes(), second.sizes()) == ([4, 2, 4], [2])
    assert first.states() == second.states() == {0: "finished"}
    assert [s["outcome"] for s in first.segments(0)] == ["preempted", "preempted", "finished"]
    assert slots == [SLOTS, SLOTS]


def test_never_more_workers_live_than_there_are_slots(resized: Any) -> None:
    *_, sampler, looking, _ = resized
    assert looking.most == sampler.most == SLOTS
    assert sampler.doubly_held == []
    assert looking.alive() == []


def test_no_resize_reschedules_a_task(resized: Any) -> None:
    first, second, *_ = resized
    log = first.log("trial", 0)
    assert "Trial 0 waits" not in log
    assert log.count("Trial 0 keeps its slots") == 2
    assert "Trial 0 waits" not in second.log("trial", 0)


def test_each_segment_has_a_worker_of_each_rank_that_sees_all_gpus(resized: Any) -> None:
    first, *_, looking, _ = resized
    mine = [fact for fact in looking.starts if fact["sweep"] == first.id]
    for segment in first.segments(0):
        workers, mine = mine[: len(segment["gpus"])], mine[len(segment["gpus"]) :]
        assert sorted(fact["rank"] for fact in workers) == list(range(len(workers)))
        assert {fact["size"] for fact in workers} == {len(workers)}
        assert {fact["gpus"] for fact in workers} == {",".join(map(str, segment["gpus"]))}
    assert mine == []


def test_the_curve_is_that_of_rank_0_and_of_a_trial_that_was_never_stopped(
    resized: Any, harness: Any
) -> None:
    first, *_ = resized
    assert set(first.runs()) == {0}
    first.assert_whole(0, harness.alike(1)[0])


def test_the_decisions_the_document_and_mlflow_say_the_sizes(resized: Any, lab: Any) -> None:
    first, *_ = resized
    resizes = [d for d in first.decisions() if d["action"] == "resize"]
    assert [len(d["gpus"]) for d in resizes] == [2, 4]
    shown = lab.hermes("sweep", "show", first.id, "--json")
    (trial,) = json.loads(shown.stdout)["trials"]
    assert trial["sizes"] == [4, 2, 4]
    explained = lab.hermes("explain", f"{first.id}/0").stdout
    assert "resize" in explained
    run_id = first.runs()[0][0]["info"]["run_id"]
    told = lab.history(run_id, "hermes.workers")
    assert {workers for _, workers in told} == {2.0, 4.0}
    ends = {(s["first_step"], float(len(s["gpus"]))) for s in first.segments(0)}
    assert ends <= set(told)


def test_a_policy_chooses_the_batch_and_the_script_gets_a_workers_part_of_it(
    lab: Any, harness: Any, tmp_path: Any
) -> None:
    lasts, log = harness.slow_file(tmp_path), tmp_path / "workers"
    log.mkdir()
    looking = WorkerSampler(log)
    batch = {"parameter": "batch_size", "min": 32, "max": 256, "per_gpu_max": 64}
    content = harness.workers("batch", harness.alike(1), log, lasts, batch=batch)
    content["trial"]["command"] += ["--batch-size", "{batch_size}"]
    content["search"]["space"]["batch_size"] = {"type": "choice", "values": [32]}
    with lab.pool(SLOTS), lab.policy("saxena"):  # within its quantum it keeps its batch
        sweep = lab.start(content)
        harness.await_(lambda: sweep.sizes() == [4] and sweep.lines(0) > 3)
        lasts.unlink()
        sweep.await_end()
    assert [fact["batch"] for fact in looking.starts] == [32 // SLOTS] * SLOTS  # its own is 32
    (trial,) = sweep.document()["trials"]
    assert (trial["sizes"], trial["batches"]) == ([SLOTS], [32])
    assert trial["config"]["batch_size"] == 32
    run_id = sweep.runs()[0][0]["info"]["run_id"]
    assert {value for _, value in lab.history(run_id, "hermes.batch")} == {32.0}
