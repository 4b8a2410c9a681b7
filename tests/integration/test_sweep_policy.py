"""Who gets the slots: convergence, first come first served, weights, limits, early stopping."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def _seen_at(sweep: Any, number: int) -> float:
    """When the trial had shown two losses, Unix seconds: from then on it can be compared."""
    lines = (sweep.folder / "trials" / str(number) / "metrics.jsonl").read_text().splitlines()
    return float(json.loads(lines[1])["time_ms"]) / 1000


@pytest.fixture(scope="module")
def race(lab: Any, harness: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three trials for one slot, under which the last one falls fastest."""
    options = {"threshold": 3, "guard_k": 0, "guard_quanta": 1000}
    slow = harness.slow_file(tmp_path_factory.mktemp("race"))
    with lab.pool(1), lab.policy("hermes", **options):
        sweep = lab.start(harness.stub("race", [0.001, 0.1, 2.0], 18, 1.0, slow_while=slow))
        harness.await_(lambda: sweep.lines(2) >= 8)
        slow.unlink()
        sweep.await_end()
    return sweep


def test_with_one_slot_each_trial_is_seen_once_before_any_is_compared(race: Any) -> None:
    first = [race.segments(n)[0]["start_s"] for n in range(3)]
    assert first == sorted(first)
    assert all(race.segments(n)[0]["outcome"] == "preempted" for n in (0, 1))


def test_then_the_slot_goes_to_the_one_whose_loss_falls_fastest(race: Any) -> None:
    all_seen = max(_seen_at(race, n) for n in range(3))
    ends = [race.segments(n)[-1]["end_s"] for n in range(3)]
    later = [s["start_s"] for n in (0, 1) for s in race.segments(n) if s["start_s"] > all_seen]
    assert ends[2] < ends[1] < ends[0]
    assert later
    assert min(later) >= ends[2]
    assert set(race.states().values()) == {"finished"}


def test_the_decisions_say_for_whom_a_trial_was_stopped(race: Any) -> None:
    stops = [d for d in race.decisions() if d["action"] == "stop"]
    assert [d["trial"] for d in stops][:2] == [0, 1]
    assert all(f"{race.id}/" in d["reason"] or d["runner_up"] for d in stops)


def test_fifo_runs_the_trials_in_order_without_preemption(lab: Any, harness: Any) -> None:
    with lab.pool(1), lab.policy("fifo"):
        assert "fifo" in lab.hermes("policy").stdout
        sweep = lab.run(harness.stub("line", [0.001, 0.1, 2.0], epochs=5, pause=0.3))
    segments = [sweep.segments(n) for n in range(3)]
    assert [len(s) for s in segments] == [1, 1, 1]
    assert all(a[0]["end_s"] <= b[0]["start_s"] for a, b in pairwise(segments))
    assert {sweep.tag(n, "hermes.preemptions") for n in range(3)} == {"0"}
    assert {d["policy"] for d in sweep.decisions()} == {"fifo"}
    assert lab.hermes("policy").stdout.startswith("frontrunner")


@pytest.fixture(scope="module")
def rivals(lab: Any, harness: Any) -> Any:
    """Two sweeps for two slots, the second three times as heavy, until their time is over.

    That of the first is a budget, that of the second a deadline.
    """
    ends: dict[str, Any] = {
        "light": {"budget": {"wall_clock_seconds": 25}},
        "heavy": {"deadline": "25s"},
    }
    with lab.policy("hermes", guard_k=0), lab.sampled() as sampler:
        light, heavy = (
            lab.start(harness.stub(name, harness.alike(5), 1000, 0.3, weight=weight, **ends[name]))
            for name, weight in (("light", 1.0), ("heavy", 3.0))
        )
        light.await_end()
        heavy.await_end()
    return light, heavy, sampler


def _gpu_seconds(sweep: Any) -> float:
    return sum(float(runs[0]["tags"]["hermes.gpu_seconds"]) for runs in sweep.runs().values())


def _starting_gpu_seconds(sweep: Any) -> float:
    """Return how long GPUs were held before scripts began: it counts for the budget, too."""
    total = 0.0
    for file in sweep.folder.glob("trials/*/segments.jsonl"):
        lease = json.loads(file.parent.with_suffix(".lease.json").read_text())
        for line in map(json.loads, file.read_text().splitlines()):
            if "start_s" in line and line["epoch"] == lease["epoch"]:
                total += line["start_s"] - lease["granted_s"]
    return total


def test_two_sweeps_in_one_pool_both_progress_and_the_heavier_gets_more(rivals: Any) -> None:
    light, heavy, _ = rivals
    assert sum(light.lines(n) for n in range(5)) >= 3
    assert _gpu_seconds(heavy) > _gpu_seconds(light)


def test_two_sweeps_together_never_use_more_than_the_pool(rivals: Any) -> None:
    _, _, sampler = rivals
    assert sampler.most == 2
    assert sampler.doubly_held == []


def test_a_sweep_whose_time_is_over_ends_with_every_trial_final(rivals: Any) -> None:
    for sweep, end in zip(
        rivals[:2], ("wall_clock_seconds", "its deadline has passed"), strict=True
    ):
        assert end in sweep.parent["tags"]["hermes.closed"]
        assert sweep.parent["tags"]["hermes.state"] == "cancelled"
        assert set(sweep.states().values()) == {"cancelled"}
        assert {t["state"] for (task, _), t in sweep.tasks().items() if task == "trial"} == {
            "skipped"
        }
        document = sweep.document()
        assert {t["state"] for t in document["trials"]} == {"cancelled"}
        assert document.get("deadline", {}).get("kept") is (False if sweep is rivals[1] else None)


SLOTS, LEASE_S = 2, 6
OTHER_USER = "hermes-controller"
"""An Airflow user that each stack has beside its administrator."""


@pytest.fixture(scope="module")
def fair(lab: Any, harness: Any, second_user: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A sweep holds two slots; one of another user joins it, then a third of the first user.

    GPUs are shared by sweeps, then by users.
    """
    lasts = harness.slow_file(tmp_path_factory.mktemp("fair"))

    def start(name: str, client: Any = None) -> Any:
        content = harness.stub(name, harness.alike(2), harness.LONG, 0.5, slow_while=lasts)
        return lab.start(content, client)

    said: dict[str, str] = {}
    with lab.policy("themis", knob=0, lease_s=LEASE_S, guard_k=0):
        first = start("first")
        harness.await_(lambda: len(first.on_gpus()) == 2)
        second = start("second", second_user)
        harness.await_(lambda: len(second.on_gpus()) == 1 == len(first.on_gpus()))
        said["sweeps"] = lab.hermes("explain", f"{second.id}/0").stdout
        by_user = {"knob": 0, "lease_s": LEASE_S, "by": "user", "guard_k": 0}
        with lab.policy("themis", **by_user):
            third = start("third")
            harness.await_(third.tasks)
            said["users"] = harness.await_(lambda: _explained_by_user(lab, second))
            shares = _shares_over_leases(harness, (first, third), second)
            lasts.unlink()
            for sweep in (first, second, third):
                sweep.await_end()
    return first, second, third, said, shares


def _explained_by_user(lab: Any, sweep: Any) -> str:
    said = str(lab.hermes("explain", f"{sweep.id}/0").stdout)
    return said if f"user {OTHER_USER} would end after" in said else ""


def _shares_over_leases(harness: Any, ours: Any, theirs: Any) -> set[tuple[int, int]]:
    """Return what the two users held while both GPUs were held, over the ends of three leases."""
    until_s, found = time.time() + 3 * LEASE_S, set[tuple[int, int]]()

    def is_over() -> bool:
        shares = sum(len(sweep.on_gpus()) for sweep in ours), len(theirs.on_gpus())
        if sum(shares) == SLOTS:
            found.add(shares)
        return time.time() > until_s

    harness.await_(is_over)
    return found


def test_a_sweep_that_comes_later_gets_its_share_at_the_end_of_a_lease(fair: Any) -> None:
    first, second, _, said, _ = fair
    stop = next(d for d in first.decisions() if d["action"] == "stop")
    assert stop["policy"].startswith("themis")
    assert stop["time_s"] <= second.segments(0)[0]["start_s"]
    assert "would end after" in said["sweeps"]


def test_by_users_a_second_sweep_of_a_user_takes_nothing_from_another_user(fair: Any) -> None:
    *_, said, shares = fair
    assert f"user {OTHER_USER} would end after" in said["users"]
    assert shares == {(1, 1)}


def test_sweeps_that_shared_the_gpus_fairly_all_finish(fair: Any) -> None:
    for sweep in fair[:3]:
        assert sweep.states() == dict.fromkeys(range(2), "finished")


def test_max_parallel_bounds_the_trials_that_train_at_once(lab: Any, harness: Any) -> None:
    content = harness.stub("narrow", harness.alike(3), 5, 0.3, budget={"max_parallel": 1})
    with lab.sampled() as sampler:
        sweep = lab.run(content)
    assert sampler.most_trials(sweep.id) == 1
    assert set(sweep.states().values()) == {"finished"}
    assert len(sweep.states()) == 3


def test_a_sweep_whose_gpu_seconds_are_spent_ends(lab: Any, harness: Any) -> None:
    sweep = lab.run(harness.stub("thrifty", harness.alike(4), 1000, 0.2, budget={"gpu_seconds": 6}))
    assert "gpu_seconds" in sweep.parent["tags"]["hermes.closed"]
    assert _gpu_seconds(sweep) + _starting_gpu_seconds(sweep) >= 6
    assert set(sweep.states().values()) == {"cancelled"}
    assert {t["state"] for t in sweep.document()["trials"]} == {"cancelled"}


def test_early_stop_by_the_median_ends_the_hopeless_trial_alone(lab: Any, harness: Any) -> None:
    rates = [*harness.alike(4), -5.0]  # the last one's loss rises
    epochs = 50  # 15 s: a machine with other work to do may see and stop it seconds late
    with lab.pool(4), lab.policy("fifo"):  # it runs after the others, which it is measured against
        sweep = lab.run(harness.stub("median", rates, epochs, 0.3, early_stop="median"))
    document = sweep.document()
    assert [t["state"] for t in document["trials"]] == ["finished"] * 4 + ["stopped_early"]
    assert document["trials"][4]["steps"] < epochs
    assert sweep.tasks()["trial", 4]["state"] == "skipped"
    assert sweep.runs()[4][0]["info"]["status"] == "KILLED"
    assert "median" in sweep.tag(4, "hermes.reason")
    ends = [d for d in sweep.decisions() if d["action"] == "end"]
    assert {d["trial"] for d in ends} == {4}
    assert len(ends) == 1
