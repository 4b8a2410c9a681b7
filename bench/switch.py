"""The time from the controller's decision until the next trial trains, with others waiting."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from bench import postgres, stack
from bench.measure import QUICK, ROOT, SCRIPTS, Figures, NotMeasuredError, figures, read_lines

SLOTS = 2
WAITING = 6 if QUICK else 40
STUB_SWITCHES = 10 if QUICK else 100
KERAS_TRIALS = 4 if QUICK else 8
KERAS_SWITCHES = 3 if QUICK else 20
# Different for each trial: two slots that switch in step would wait for each other's processes.
EPOCH_S = (0.3, 0.5) if QUICK else (2.0, 4.0)
WAIT_S = 240.0 if QUICK else 1_200.0

# Each trial waits for as long as the pool needs to serve all others once: they take turns.
IN_TURN = ("guard_quanta=1",)
# Nor is there a quantum: a trial makes way as soon as it has shown something. With one, as users
# have it, the next standby interpreter has time to be ready.
RESTLESS = ("guard_k=0", *IN_TURN)


class MeasuredSweep(Protocol):
    """A sweep whose decisions and whose trials' folders can be read."""

    def decisions(self) -> list[dict[str, Any]]:
        """Return the controller's decisions."""

    def trial(self, number: int) -> Path:
        """Return the folder of a trial."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A decision: the victim, the follower, and whether the follower had run before."""

    decided_s: float
    victim: int
    follower: int
    resumed: bool


@dataclass(frozen=True, slots=True)
class Switch:
    """One preemption: victim, follower, and the Unix seconds of each event."""

    decided_s: float
    resumed: bool
    standby: bool
    begun_s: float | None  # of a Keras trial: its first batch begins
    moments: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The events of a switch; its parts are the intervals between them."""

    reached: str
    parts: tuple[str, ...] = (
        "decision_to_flag_seen_s",
        "flag_seen_to_trial_exit_s",
        "trial_exit_to_next_task_s",
        "next_task_to_hermes_trial_s",
        "hermes_trial_to_reached_s",
    )


def run() -> Figures:
    """Measure stubs, 40 of them waiting, on SQLite and PostgreSQL: decision → next first line."""
    course, trials = Timeline("line_s"), SLOTS + WAITING
    config = stack.stub_sweep("switch", trials, "--epochs", 1_000_000, pause_s=EPOCH_S)
    options = taking_turns(trials, RESTLESS)
    found = {"sqlite": _measured(config, options, STUB_SWITCHES, course)}
    with postgres.server() as server:
        databases = ("--airflow-db", server.url("airflow"), "--mlflow-db", server.url("mlflow"))
        found["postgresql"] = _measured(config, (*options, *databases), STUB_SWITCHES, course)
    return {**found, "slots": SLOTS, "waiting": WAITING, "target_median_s": 0.5}


def run_keras() -> Figures:
    """Measure the digits example with and without standby: decision → first batch done."""
    course = Timeline("first_batch_end_s")
    options = taking_turns(KERAS_TRIALS, IN_TURN)
    with_s = _measured(_digits(), options, KERAS_SWITCHES, course)
    without = _measured(_digits(), (*options, "--standby", 0), KERAS_SWITCHES, course)
    return {
        "with_standby": with_s,
        "without_standby": without,
        "slots": SLOTS,
        "waiting": KERAS_TRIALS - SLOTS,
        "target_median_with_standby_s": 3.0,
    }


def taking_turns(trials: int, guards: tuple[str, ...]) -> tuple[object, ...]:
    """Return options of `hermes up` under which all trials are open at once and take turns."""
    pairs = (f"threshold={trials // SLOTS}", *guards)
    return ("--policy", "hermes", *(p for pair in pairs for p in ("--policy-option", pair)))


def _digits() -> Figures:
    """Return an endless examples/digits/sweep.yaml with a script that stamps its first batch."""
    import yaml

    config: Figures = yaml.safe_load((ROOT / "examples/digits/sweep.yaml").read_text())
    config["search"].update(algorithm="random", max_trials=KERAS_TRIALS)
    config["search"].pop("startup_trials", None)
    command = config["trial"]["command"]
    command[command.index("train.py")] = "stamped.py"
    command[command.index("--epochs") + 1] = "100000"
    config["trial"]["directory"] = str(SCRIPTS)
    config["budget"] = {"max_epochs": 100_000}
    return config


def _measured(
    config: Figures, options: tuple[object, ...], wanted: int, course: Timeline
) -> Figures:
    """Run the sweep for `wanted` switches, then split their times."""
    with stack.running(SLOTS, *options) as own:
        sweep = own.start(config)
        deadline_s = time.monotonic() + WAIT_S
        while len(stops(sweep)) < wanted and time.monotonic() < deadline_s:
            time.sleep(2.0)
        time.sleep(10.0 if course.reached != "line_s" else 3.0)  # the last ones arrive
        own.hermes("sweep", "stop", sweep.id)
        return split([_switch(sweep, course, turn) for turn in turns(sweep)], course)


def stops(sweep: MeasuredSweep) -> list[dict[str, Any]]:
    """Return the decisions to preempt."""
    return [d for d in sweep.decisions() if d["action"] == "stop"]


def turns(sweep: MeasuredSweep) -> list[Turn]:
    """Return each stop with the start that takes its GPU in the same round."""
    rounds: dict[float, list[dict[str, Any]]] = {}
    for entry in sweep.decisions():
        rounds.setdefault(entry["time_s"], []).append(entry)
    holder: dict[int, int] = {}
    begun: set[int] = set()
    found: list[Turn] = []
    for time_s, entries in sorted(rounds.items()):
        stopped = {e["trial"] for e in entries if e["action"] == "stop"}
        for entry in (e for e in entries if e["action"] == "start"):
            gpu, follower = entry["gpus"][0], entry["trial"]
            victim = holder.get(gpu)
            if victim in stopped and victim is not None:
                found.append(Turn(time_s, victim, follower, follower in begun))
            holder[gpu] = follower
            begun.add(follower)
    return found


def _switch(sweep: stack.Sweep, course: Timeline, turn: Turn) -> Switch:
    stamps = read_lines(sweep.trial(turn.follower) / "stamps.jsonl")
    stamp = next((s for s in stamps if s.get(course.reached, 0.0) > turn.decided_s), {})
    moments = (
        flag_seen_s(sweep, turn),
        trial_exit_s(sweep, turn),
        next_task_s(sweep, turn),
        next_begins_s(sweep, turn),
        stamp.get(course.reached),
    )
    begun_s = stamp.get("first_batch_begin_s")
    return Switch(turn.decided_s, turn.resumed, bool(stamp.get("standby")), begun_s, moments)


def flag_seen_s(sweep: stack.Sweep, turn: Turn) -> float | None:
    """Return when the victim's task saw the stop flag."""
    return stack.first_after(sweep.task_log(turn.victim), "It is to stop", turn.decided_s)


def trial_exit_s(sweep: MeasuredSweep, turn: Turn) -> float | None:
    """Return when the victim's script had checkpointed and ended."""
    return first_line(sweep, turn.victim, "segments.jsonl", "end_s", turn.decided_s)


def next_task_s(sweep: stack.Sweep, turn: Turn) -> float | None:
    """Return when the follower's task started."""
    return stack.first_after(sweep.task_log(turn.follower), "::group::Pre Execute", turn.decided_s)


def next_begins_s(sweep: MeasuredSweep, turn: Turn) -> float | None:
    """Return when the follower's `hermes-trial` started its segment."""
    return first_line(sweep, turn.follower, "segments.jsonl", "start_s", turn.decided_s)


def first_line(
    sweep: MeasuredSweep, trial: int, file: str, key: str, after_s: float
) -> float | None:
    """Return the first value of that key after a moment in a trial's file of JSON lines."""
    found = (line.get(key, 0.0) for line in read_lines(sweep.trial(trial) / file))
    return next((time_s for time_s in found if time_s > after_s), None)


def split(found: list[Switch], course: Timeline) -> Figures:
    """Summarise switches and their parts; count those with missing events only."""
    whole = [s for s in found if s.moments[-1] is not None]
    if not whole:
        raise NotMeasuredError("no preemption was seen from the decision to the next trial")
    split: dict[str, list[float]] = {part: [] for part in course.parts}
    for switch in whole:
        line = (switch.decided_s, *switch.moments)
        for part, (before_s, after_s) in zip(course.parts, pairwise(line), strict=True):
            if before_s is not None and after_s is not None:
                split[part].append(after_s - before_s)
    begun = [s.begun_s - s.decided_s for s in whole if s.begun_s is not None]
    return {
        "decision_to_reached_s": figures(_took(s) for s in whole),
        **({"decision_to_first_batch_begin_s": figures(begun)} if begun else {}),
        "next_is_resumed_s": figures(_took(s) for s in whole if s.resumed),
        "next_is_new_s": figures(_took(s) for s in whole if not s.resumed),
        "reached": course.reached,
        "from_standby": sum(s.standby for s in whole),
        "not_seen_whole": len(found) - len(whole),
        **{part: figures(values) for part, values in split.items()},
    }


def _took(switch: Switch) -> float:
    reached_s = switch.moments[-1]
    assert reached_s is not None
    return reached_s - switch.decided_s
