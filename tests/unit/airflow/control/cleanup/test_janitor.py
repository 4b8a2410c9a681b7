from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hermes_ops.airflow.control.cleanup.janitor import (
    KEEP_FILE,
    CheckpointQuota,
    Janitor,
    free_ended,
    free_expired,
    make_room,
)
from hermes_ops.airflow.control.cleanup.sweep_end import due_end
from hermes_ops.airflow.control.trial_state import TrialRecords, TrialState
from hermes_ops.airflow.folders import TrialFolder, sweep_folder
from hermes_ops.airflow.metadata_rows import RunRow
from hermes_ops.airflow.records import CLOSED_TAG, REACHED_TAG, CloseRecord
from hermes_ops.config.sections import WEEK_S
from tests.unit.airflow.builders import (
    SWEEP,
    Journal,
    lease,
    pending,
    row,
    running,
    segment,
    sweep_with,
)
from tests.unit.airflow.control.controllers import Database, controller_of


def none_is_unfinished(_: str) -> bool:
    return False


STATES = {0: "finished", 1: "stopped_early", 2: "cancelled", 3: "failed"}


def checkpoint(number: int, size: int = 100) -> Path:
    folder = TrialFolder.from_sweep(SWEEP, number).checkpoints
    folder.mkdir(parents=True)
    (folder / "state").write_bytes(b"x" * size)
    return folder


def ended(number: int, final: str, state: str = "success") -> TrialRecords:
    own = lease(run_id=f"run-{number}")
    return TrialRecords(row(number, state), own, None, segment(running=False, final=final))


def test_only_trials_that_can_go_on_keep_their_checkpoints_after_the_end() -> None:
    folders = [checkpoint(n) for n in STATES]
    free_ended(SWEEP, STATES, 60.0, 1_000.0)
    assert [f.exists() for f in folders] == [False, False, True, True]
    note = json.loads((sweep_folder(SWEEP) / KEEP_FILE).read_text())
    assert note == {"until_s": 1_060.0, "sweep": SWEEP, "store": None}


def test_nothing_is_kept_when_the_time_is_zero_nor_when_all_finished() -> None:
    folders = [checkpoint(n) for n in STATES]
    free_ended(SWEEP, STATES, 60.0, 1_000.0)
    free_ended(SWEEP, STATES, 0.0, 1_000.0)
    assert [f.exists() for f in folders] == [False] * 4
    assert not (sweep_folder(SWEEP) / KEEP_FILE).exists()


def test_checkpoints_go_when_their_time_is_over_and_not_before() -> None:
    folder = checkpoint(2)
    free_ended(SWEEP, {2: "cancelled"}, 60.0, 1_000.0)
    assert free_expired(none_is_unfinished, 1_059.0) == []
    assert folder.exists()
    assert free_expired({SWEEP}.__contains__, 1_061.0) == []  # it has been resumed
    assert folder.exists()
    assert free_expired(none_is_unfinished, 1_061.0) == [sweep_folder(SWEEP)]
    assert not folder.exists()
    assert free_expired(none_is_unfinished, 1_061.0) == []


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"until_s": null}', '{"until_s": NaN}'])
def test_a_damaged_note_deletes_no_checkpoints_for_a_week(text: str) -> None:
    folder = checkpoint(2)
    free_ended(SWEEP, {2: "cancelled"}, 60.0, 1_000.0)
    note = sweep_folder(SWEEP) / KEEP_FILE
    note.write_text(text)
    os.utime(note, (1_000.0, 1_000.0))
    assert free_expired(none_is_unfinished, 1_000.0 + WEEK_S - 1.0) == []
    assert folder.exists()
    assert free_expired(none_is_unfinished, 1_001.0 + WEEK_S) == [sweep_folder(SWEEP)]
    assert not folder.exists()


def test_a_note_that_cannot_be_read_now_deletes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(2)
    free_ended(SWEEP, {2: "cancelled"}, 60.0, 1_000.0)

    def fail(_: Path, *args: object, **named: object) -> bytes:
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", fail)
        patch.setattr(Path, "read_bytes", fail)
        assert free_expired(none_is_unfinished, 1e12) == []
    assert folder.exists()


@pytest.mark.parametrize(
    ("state", "stays"), [("queued", True), ("running", True), ("failed", False), (None, False)]
)
def test_a_sweep_that_goes_on_keeps_its_checkpoints_though_its_pool_has_another_controller(
    state: str | None, stays: bool, tmp_path: Path
) -> None:
    """It was resumed: its note is of its first end. The controller has read no sweep this round."""
    folder = checkpoint(2)
    free_ended(SWEEP, {2: "cancelled"}, 60.0, 1_000.0)
    run = RunRow(1, "hermes_sweep", SWEEP, "plan", state or "", 900.0, {})
    database = Database(*([] if state is None else [run]))
    controller_of(database, tmp_path / "view").cluster._janitor.clean((), 1_061.0)
    assert folder.exists() is stays


def test_a_trials_own_working_directory_is_kept_as_long_whatever_its_end_and_counts() -> None:
    folders = [checkpoint(n).with_name("workspace") for n in STATES]
    for folder in folders[:2]:
        folder.mkdir()
        (folder / "result.txt").write_bytes(b"x" * 50)
    free_ended(SWEEP, {0: "finished", 1: "stopped_early"}, 60.0, 1_000.0)
    assert [f.exists() for f in folders] == [True, True, False, False]
    assert make_room(CheckpointQuota(SWEEP, 250.0, (1, 0))) == 250.0  # two of 100 and one of 50
    assert [f.exists() for f in folders] == [True, False, False, False]
    assert free_expired(none_is_unfinished, 1_061.0) == [sweep_folder(SWEEP)]
    assert not folders[0].exists()
    folders[0].mkdir(parents=True)
    free_ended(SWEEP, {0: "finished"}, 0.0, 1_000.0)
    assert not folders[0].exists()


def test_a_sweep_without_a_limit_asks_for_no_room() -> None:
    assert CheckpointQuota.from_sweep(sweep_with(running(0, 0))) is None


def test_room_is_made_of_ended_trials_never_of_open_ones_nor_of_the_best() -> None:
    world = sweep_with(
        ended(0, "failed", "failed"),
        ended(1, "finished"),
        ended(2, "finished"),
        running(3, 0),
        pending(4),
        checkpoints={"max_gigabytes": 1e-9 * 250},
    )
    world.curves = {0: ((1, 0.1, 0),), 1: ((1, 0.5, 0),), 2: ((1, 0.9, 0),)}
    room = CheckpointQuota.from_sweep(world)
    assert room is not None
    assert room.spare == (2, 0)
    folders = [checkpoint(n) for n in range(4)]
    assert make_room(room) == 200.0
    assert [f.exists() for f in folders] == [False, True, False, True]


def test_no_room_is_made_before_it_is_known_which_trial_is_the_best() -> None:
    """A controller that has just begun has not read the curves; those of MLflow that is away."""
    trials = (ended(0, "finished"), ended(1, "finished"), running(2, 0))
    world = sweep_with(*trials, checkpoints={"max_gigabytes": 1e-9 * 250})
    world.curves_read = False
    assert CheckpointQuota.from_sweep(world) is None
    world.curves, world.curves_read = {0: ((1, 0.1, 0),), 1: ((1, 0.5, 0),)}, True
    room = CheckpointQuota.from_sweep(world)
    assert room is not None
    assert room.spare == (1,)


def test_no_room_is_made_of_a_trial_that_a_person_has_cleared_while_mlflow_is_away() -> None:
    """It continues from its checkpoint once MLflow answers."""
    trials = (ended(0, "finished"), ended(1, "failed", "scheduled"), ended(2, "cancelled"))
    world = sweep_with(*trials, checkpoints={"max_gigabytes": 1e-9 * 150})
    world.curves = {0: ((1, 0.1, 0),)}
    assert world.trials[1].state is TrialState.CLEARED
    Journal(mlflow_away=True).applier().settle(world, 200.0)
    folders = [checkpoint(n) for n in range(3)]
    room = CheckpointQuota.from_sweep(world)
    assert room is not None
    assert make_room(room) == 200.0
    assert [f.exists() for f in folders] == [True, True, False]


def test_room_is_made_no_further_than_the_limit_asks() -> None:
    folders = [checkpoint(n) for n in range(3)]
    assert make_room(CheckpointQuota(SWEEP, 200.0, (0, 1, 2))) == 200.0
    assert [f.exists() for f in folders] == [False, True, True]


def test_a_link_that_a_script_has_left_for_its_checkpoints_is_not_followed(tmp_path: Path) -> None:
    folders = [checkpoint(n) for n in range(2)]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "data").write_bytes(b"x" * 10_000)
    TrialFolder.from_sweep(SWEEP, 2).path.mkdir(parents=True)
    TrialFolder.from_sweep(SWEEP, 2).checkpoints.symlink_to(elsewhere)
    assert make_room(CheckpointQuota(SWEEP, 250.0, (0, 1, 2))) == 200.0
    assert [f.exists() for f in folders] == [True, True]


def test_open_trials_above_the_limit_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    checkpoint(0)
    janitor = Janitor(none_is_unfinished)
    for now_s in (1.0, 2.0):
        janitor.clean((CheckpointQuota(SWEEP, 10.0, ()),), now_s)
    assert [r.levelno for r in caplog.records].count(logging.WARNING) == 1
    assert "max_gigabytes" in caplog.text


@pytest.mark.parametrize(
    ("direction", "values", "reached"),
    [
        ("minimize", [0.4, 0.2], True),
        ("minimize", [0.4, 0.21], False),
        ("maximize", [0.1, 0.2], True),
        ("maximize", [float("nan"), 0.1], False),
    ],
)
def test_a_sweep_ends_when_a_trial_reaches_the_target(
    direction: str, values: list[float], reached: bool
) -> None:
    objective = {"metric": "acc", "direction": direction, "target": 0.2}
    world = sweep_with(running(0, 0), pending(1), objective=objective)
    world.curves = {0: tuple((n, v, 0) for n, v in enumerate(values, start=1))}
    close = due_end(world, 100.0)
    assert (close is not None) == reached
    if close is not None:
        assert (close.state, close.tag) == ("stopped_early", REACHED_TAG)
        assert close.reason == "trial 0 reached objective.target 0.2: acc 0.2"


LATENCY = {"name": "latency", "at_most": 20}


@pytest.mark.parametrize(
    ("losses", "latencies", "reached"),
    [
        ([0.4, 0.1], [40.0, 20.0], True),
        ([0.4, 0.1], [40.0], False),  # that of the second step is still to come
        ([0.4], [40.0, 20.0], False),  # here the objective is
        ([0.4, 0.1], [], False),
        ([0.1, 0.4], [40.0, 20.0], True),
        ([0.4, 0.1], [20.0, 21.0], False),
        ([0.4, 0.1], [20.0, float("nan")], False),
    ],
)
def test_a_target_ends_a_sweep_once_the_trials_last_values_keep_the_bounds(
    losses: list[float], latencies: list[float], reached: bool
) -> None:
    objective = {"metric": "loss", "target": 0.2}
    world = sweep_with(running(0, 0), running(1, 1), objective=objective, metrics=[LATENCY])
    world.curves = {0: ((1, 0.1, 0),), 1: tuple((n, v, 0) for n, v in enumerate(losses, start=1))}
    own = tuple((n, v, 0) for n, v in enumerate(latencies, start=1))
    world.constraint_metrics = {"latency": {0: ((1, 21.0, 0),), 1: own}}
    close = due_end(world, 100.0)
    expected = "trial 1 reached objective.target 0.2: loss 0.1, latency 20 (at most 20)"
    assert (close.reason if close else None) == (expected if reached else None)


def test_a_failed_trial_reaches_no_target_and_a_sweep_without_one_goes_on() -> None:
    objective = {"metric": "acc", "target": 0.2}
    world = sweep_with(ended(0, "failed", "failed"), pending(1), objective=objective)
    world.curves = {0: ((1, 0.1, 0),)}
    assert due_end(world, 100.0) is None
    free = sweep_with(running(0, 0), pending(1))
    free.curves = {0: ((1, -1e9, 0),)}
    assert due_end(free, 100.0) is None


def test_a_reached_target_is_no_cancellation() -> None:
    journal = Journal()
    world = sweep_with(running(0, 0), objective={"metric": "acc", "target": 0.2})
    world.curves = {0: ((1, 0.1, 0),)}
    journal.applier().settle(world, 100.0)
    tags = {key for call in journal.of("tag") for key in call[2]}
    assert REACHED_TAG in tags
    assert CLOSED_TAG not in tags


@pytest.mark.parametrize(("last", "is_cancelled"), [
    (running(1, 1), True), (ended(1, "cancelled", "skipped"), True),
    (ended(1, "finished"), False), (ended(1, "failed", "failed"), False),
])  # fmt: skip
def test_a_sweep_that_is_stopped_after_its_last_trial_is_not_cancelled(
    last: TrialRecords, is_cancelled: bool
) -> None:
    journal, close = Journal(), CloseRecord("stopped by ann")
    world = sweep_with(ended(0, "finished"), last, close=close)
    world = replace(world, spec=replace(world.spec, record=replace(world.spec.record, trials=2)))
    journal.applier().settle(world, 100.0)
    tags = {key for call in journal.of("tag") for key in call[2]}
    assert (CLOSED_TAG in tags) is is_cancelled
