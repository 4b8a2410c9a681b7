from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.airflow.control import search_process
from hermes_ops.airflow.control.search_process import (
    ANSWER_S,
    MOST_PROCESSES,
    SearchProcess,
    SlowSearches,
    Unanswered,
    answers,
    is_slow,
)
from hermes_ops.airflow.control.sweep_state import SweepState
from hermes_ops.config import parse
from hermes_ops.core.model import Gpu, Grant, JobId, Plan, Reason, Snapshot
from hermes_ops.core.plan import Start
from hermes_ops.search.interface import Observation
from tests.unit.airflow.builders import (
    SWEEP,
    Journal,
    pending,
    row,
    running,
    sweep_file,
    sweep_with,
)

TRIAL = {"command": ["python", "train.py"], "directory": "/"}


def search(axes: int = 2, **changes: Any) -> dict[str, Any]:
    space = {f"p{n}": {"type": "uniform", "low": 0, "high": 1} for n in range(axes)}
    own = {"algorithm": "tpe", "seed": 7, "max_trials": 50, "startup_trials": 2, "space": space}
    return sweep_file(search={**own, **changes}, trial=TRIAL)


def seen(number: int, loss: float | None) -> Observation:
    state: Any = "running" if loss is None else "finished"
    return Observation(number, {"p0": 0.1 * number, "p1": 0.5}, loss, state)


HISTORY = (seen(0, 0.5), seen(1, 0.25), seen(2, None))


def wait_for(own: SearchProcess, number: int) -> None:
    """Until there is an answer, by the one thing that can tell: the thread that reads it."""
    while number not in own.answered():
        for thread in threading.enumerate():
            if thread.name == f"search {number}":
                thread.join(60.0)


@pytest.fixture
def asked() -> Any:
    own = SearchProcess(search())
    yield own
    own.close()


def test_a_process_answers_as_the_sampler_itself_does(asked: SearchProcess) -> None:
    sampler = parse(search(), source="x", base=None).search.to_sampler()
    asked.ask(3, HISTORY)
    assert asked.is_asked
    wait_for(asked, 3)
    assert asked.pop_answer(3) == sampler.ask(3, HISTORY)
    assert asked.pop_answer(3) is None
    more = (*HISTORY[:2], seen(2, 0.125), seen(3, None))
    asked.ask(4, more)
    wait_for(asked, 4)
    assert asked.pop_answer(4) == sampler.ask(4, more)


def test_a_search_whose_process_is_killed_says_so_and_answers_again(asked: SearchProcess) -> None:
    sampler = parse(search(), source="x", base=None).search.to_sampler()
    asked.ask(3, HISTORY)
    process = asked._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    wait_for(asked, 3)
    with pytest.raises(Unanswered, match="ended without an answer"):
        asked.pop_answer(3)
    asked.ask(3, HISTORY)
    wait_for(asked, 3)
    assert asked.pop_answer(3) == sampler.ask(3, HISTORY)


def test_a_search_that_never_answers_is_given_up() -> None:
    now = [0.0]
    own = SearchProcess(search(), clock=lambda: now[0])
    own.ask(3, HISTORY)
    process = own._process
    assert process is not None
    now[0] = ANSWER_S + 1.0
    assert (own.is_asked, own.answered()) == (True, frozenset())
    own.give_up_if_late()
    assert not own.is_asked
    with pytest.raises(Unanswered, match="no answer for 300 s"):
        own.pop_answer(3)
    assert process.poll() is not None


def test_what_a_search_raises_is_its_answer_and_ends_nothing() -> None:
    import json

    lines = [search(max_trials=5), {"ask": 9}, {"ask": 0}]
    refused, drawn = answers(iter(json.dumps(line) for line in lines))
    assert refused["error"].startswith("IndexError: the sweep has 5 trials")
    assert set(drawn["config"]) == {"p0", "p1"}


class Fake:
    """A search without a process."""

    made: list[Fake]

    def __init__(self, config: Any) -> None:
        self.is_asked = self.is_alive = False
        Fake.made.append(self)

    def ask(self, number: int, history: Any) -> None:
        self.is_asked = self.is_alive = True

    def give_up_if_late(self) -> None: ...

    def answered(self) -> frozenset[int]:
        return frozenset()

    def close(self) -> None:
        self.is_alive = self.is_asked = False


def test_a_bounded_number_of_searches_has_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    Fake.made = []
    monkeypatch.setattr(search_process, "SearchProcess", Fake)
    searches = SlowSearches()
    for number in range(MOST_PROCESSES + 2):
        searches.ask(f"s{number}", {}, 0, tuple)
    assert sum(own.is_alive for own in Fake.made) == MOST_PROCESSES
    Fake.made[1].is_asked = False  # it has answered: its place is another's
    searches.ask("late", {}, 0, tuple)
    assert [own.is_alive for own in Fake.made] == [True, False, True, True, True]
    searches.close()
    assert not any(own.is_alive for own in Fake.made)


@pytest.mark.parametrize(
    ("axes", "number", "observed", "changes", "slow"),
    [
        (1_000, 9, 1, {}, True),
        (1_000, 1, 1, {}, False),  # a start-up trial is drawn at random
        (1_000, 9, 0, {}, False),
        (1_000, 9, 1, {"algorithm": "random"}, False),
        (10, 9, 50, {}, False),
        (10, 9, 2_000, {}, True),
        (30, 9, 100, {"constraints": ["p0 <= p1"]}, True),
        (30, 9, 100, {}, False),
    ],
)
def test_a_search_is_slow_with_many_parameters_or_many_trials(
    axes: int, number: int, observed: int, changes: dict[str, Any], slow: bool
) -> None:
    config = parse(search(axes, **changes), source="x", base=None)
    assert is_slow(config, axes, number, observed) is slow


def test_what_a_sampler_prints_is_no_answer() -> None:
    """A library that it calls may print too, past Python's own stream."""
    talk = """
import os
from hermes_ops.airflow.control import search_process

def answers(lines):
    print("trial 3 looks good")
    os.write(1, b"trial 4 too" + b"\\n")
    yield {"config": {"x": 0.25}}

search_process.answers = answers
search_process.main()
"""
    command = [sys.executable, "-c", talk]
    said = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    assert said.stdout == '{"config": {"x": 0.25}}\n'
    assert sorted(said.stderr.splitlines()) == ["trial 3 looks good", "trial 4 too"]


class Answering(SlowSearches):
    """Searches that answer when they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.known: dict[int, dict[str, Any]] = {}

    def ask(self, sweep: str, config: Any, number: int, history: Any) -> None:
        if not self.known and number not in self.asked:
            self.asked.append(number)

    def pop_answer(self, sweep: str, number: int) -> dict[str, Any] | None:
        return self.known.pop(number, None)

    def answered(self, sweep: str) -> frozenset[int]:
        return frozenset(self.known)


def wide(*trials: Any) -> SweepState:
    return sweep_with(*trials, search=search(1_000)["search"], trial=TRIAL)


def test_a_trial_waits_for_its_slow_search_and_is_offered_with_the_answer() -> None:
    outside, searches = Journal(), Answering()
    applier = outside.applier()
    applier._granting.searches = searches
    trials = (running(0, 0), running(1, 1), pending(2), pending(3))

    def offered() -> list[str]:
        world = wide(*trials)
        applier.settle(world, 200.0)
        return [j.id.rpartition("/")[2] for j in world.jobs(200.0)]

    assert offered() == ["0", "1"]
    assert searches.asked == [2]
    searches.known[2] = {f"p{n}": 0.25 for n in range(1_000)}
    assert offered() == ["0", "1", "2"]
    job = JobId(f"{SWEEP}/2")
    world = wide(*trials)
    applier.settle(world, 200.0)
    snapshot = Snapshot(200.0, (Gpu(0), Gpu(1), Gpu(2)), tuple(world.jobs(200.0)))
    begin = Start(job, (2,), Reason("it has not been seen"))
    applier.apply({SWEEP: world}, snapshot, Plan((Grant(job, (2,)),)), (begin,), {})
    ((_, number, config, _),) = outside.of("open")
    assert (number, config["p7"]) == (2, 0.25)
    assert applier.faults.faults == ()


ANSWER = {f"p{n}": 0.25 for n in range(1_000)}


@pytest.mark.parametrize("how", ["mlflow knows it already", "a person has skipped it"])
def test_an_answer_that_nobody_takes_does_not_stop_a_search(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that was killed had drawn the configuration, or the trial is to run no more."""
    process = SimpleNamespace(stdin=None, stdout=None, kill=lambda: None, wait=lambda: None)
    monkeypatch.setattr(search_process, "_started", lambda: process)
    monkeypatch.setattr(search_process, "_exchanged", lambda *_: {"config": ANSWER})
    outside = Journal(opened={2: ANSWER} if how.startswith("mlflow") else {})
    applier = outside.applier()
    trials = [running(0, 0), running(1, 1), pending(2), pending(3)]

    def offered() -> list[str]:
        world = wide(*trials)
        applier.settle(world, 200.0)
        return [j.id.rpartition("/")[2] for j in world.jobs(200.0)]

    offered()
    wait_for(applier._granting.searches._processes[SWEEP], 2)
    assert offered() == ["0", "1", "2"]
    if outside.opened:
        world = wide(*trials)
        applier.settle(world, 200.0)
        snapshot = Snapshot(200.0, (Gpu(0), Gpu(1), Gpu(2)), tuple(world.jobs(200.0)))
        begin = Start(JobId(f"{SWEEP}/2"), (2,), Reason("it has not been seen"))
        plan = Plan((Grant(begin.job, (2,)),))
        applier.apply({SWEEP: world}, snapshot, plan, (begin,), {})
        trials[2] = running(2, 2)
    else:
        trials[2] = replace(trials[2], row=row(2, "skipped"))
    offered()
    wait_for(applier._granting.searches._processes[SWEEP], 3)
    assert "3" in offered()
