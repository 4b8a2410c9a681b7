from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.errors import Refused
from hermes_ops.tracking import MetricSender, SweepRef, Tracker
from hermes_ops.tracking.curves import CurveReader
from hermes_ops.tracking.sender import load_offset

pytestmark = pytest.mark.integration

NOW_MS = 1_700_000_000_000


def line(name: str, step: int, value: float | str | None = None) -> str:
    shown = 1 / (step + 1) if value is None else value
    entry = {"name": name, "value": shown, "step": step, "time_ms": NOW_MS + step}
    return json.dumps(entry) + "\n"


def sender(run_id: str, folder: Path, tracker: Tracker) -> MetricSender:
    return MetricSender(run_id, folder / "metrics.jsonl", folder / "sent.json", tracker)


def steps(tracker: Tracker, run_id: str, name: str) -> list[int]:
    return [m.step for m in tracker.history(run_id, name)]


def test_metrics_arrive_in_order_with_their_recorded_times(
    tracker: Tracker, sweep: SweepRef, tmp_path: Path
) -> None:
    run_id = tracker.open_trial(sweep, 0, {})
    file = tmp_path / "metrics.jsonl"
    mine = sender(run_id, tmp_path, tracker)
    assert mine.pump() == 0
    file.write_text("".join(line("loss", i) + line("val_loss", i) for i in range(1, 1_301)))
    assert mine.pump() == 2_600
    assert mine.pump() == 0
    history = tracker.history(run_id, "loss")
    assert [m.step for m in history] == list(range(1, 1_301))
    assert [m.time_ms for m in history] == [NOW_MS + i for i in range(1, 1_301)]


def test_a_lost_acknowledgement_leaves_no_point_twice(
    tracker: Tracker, sweep: SweepRef, tmp_path: Path
) -> None:
    run_id = tracker.open_trial(sweep, 0, {})
    file = tmp_path / "metrics.jsonl"
    values: list[float | str] = [0.5, "NaN", "Infinity", "-Infinity", 1e-300]
    file.write_text("".join(line("loss", i, v) for i, v in enumerate(values, 1)))
    assert sender(run_id, tmp_path, tracker).drain(10)
    (tmp_path / "sent.json").unlink()
    with file.open("a") as out:
        out.write(line("loss", 6))
    again = sender(run_id, tmp_path, tracker)
    assert again.drain(10)
    assert steps(tracker, run_id, "loss") == [1, 2, 3, 4, 5, 6]
    stored = [m.value for m in tracker.history(run_id, "loss")]
    assert math.isnan(stored[1])
    assert stored[2:4] == [math.inf, -math.inf]


def test_a_step_that_the_file_has_twice_is_sent_once(
    tracker: Tracker, sweep: SweepRef, tmp_path: Path
) -> None:
    run_id = tracker.open_trial(sweep, 0, {})
    file = tmp_path / "metrics.jsonl"
    file.write_text(line("loss", 1) + line("loss", 2) + line("loss", 2, 9.0))
    assert sender(run_id, tmp_path, tracker).pump() == 2
    with file.open("a") as out:  # a resumed segment, with a sender of its own
        out.write(line("loss", 2, 7.0) + line("loss", 3))
    assert sender(run_id, tmp_path, tracker).pump() == 1
    assert steps(tracker, run_id, "loss") == [1, 2, 3]


def test_torn_and_damaged_lines_hold_nothing_up(
    tracker: Tracker, sweep: SweepRef, tmp_path: Path
) -> None:
    run_id = tracker.open_trial(sweep, 0, {})
    file = tmp_path / "metrics.jsonl"
    torn = line("loss", 3)
    damaged = '{"name": "loss", "va\n[]\n\xff\n{"name": 3, "value": 1, "step": 1, "time_ms": 1}\n'
    file.write_text(line("loss", 1) + damaged + line("loss", 2) + torn[:20])
    mine = sender(run_id, tmp_path, tracker)
    assert mine.pump() == 2
    assert mine.drain(10)
    assert mine.behind_bytes == 20
    with file.open("a") as out:
        out.write(torn[20:])
    assert mine.pump() == 1
    assert mine.behind_bytes == 0
    assert steps(tracker, run_id, "loss") == [1, 2, 3]


def test_a_name_that_mlflow_does_not_allow_arrives_under_a_legal_one(
    tracker: Tracker, sweep: SweepRef, tmp_path: Path
) -> None:
    run_id = tracker.open_trial(sweep, 0, {})
    names = ["top1%", "top1?", "a//b", "../x", "größe", "", "x" * 400, "a/b c.d-e:f"]
    (tmp_path / "metrics.jsonl").write_text("".join(line(n, 1) for n in names))
    assert sender(run_id, tmp_path, tracker).drain(10)
    (trial,) = tracker.trials(sweep)
    assert len(trial.metrics) == len(names)
    assert all(steps(tracker, run_id, name) == [1] for name in names)


def test_a_step_too_great_for_mlflow_is_left_out(
    tracker: Tracker, sweep: SweepRef, tmp_path: Path
) -> None:
    run_id = tracker.open_trial(sweep, 0, {})
    impossible = line("loss", 1).replace('"step": 1', f'"step": {2**70}')
    (tmp_path / "metrics.jsonl").write_text(line("loss", 1) + impossible + line("loss", 2))
    assert sender(run_id, tmp_path, tracker).drain(10)
    assert steps(tracker, run_id, "loss") == [1, 2]


class PickyTracker(Tracker):
    """Stands for a server that refuses a batch because of one of its metrics."""

    def log_metrics(self, run_id: str, metrics: Sequence[Mapping[str, Any]]) -> None:
        if any(m["key"] == "bad" for m in metrics):
            raise Refused("bad", "INVALID_PARAMETER_VALUE")
        super().log_metrics(run_id, metrics)


def test_one_metric_that_mlflow_refuses_does_not_keep_the_others_back(
    server: object, sweep: SweepRef, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = PickyTracker(server.uri)  # type: ignore[attr-defined]
    run_id = tracker.open_trial(sweep, 0, {})
    lines = [line("loss", i) for i in range(1, 10)]
    (tmp_path / "metrics.jsonl").write_text("".join([*lines[:4], line("bad", 1), *lines[4:]]))
    assert sender(run_id, tmp_path, tracker).drain(10)
    assert steps(tracker, run_id, "loss") == list(range(1, 10))
    assert "refused the metric" in caplog.text
    tracker.close()


def test_metrics_of_a_deleted_run_are_dropped(
    tracker: Tracker, sweep: SweepRef, tmp_path: Path
) -> None:
    run_id = tracker.open_trial(sweep, 0, {})
    tracker._rest.post("runs/delete", {"run_id": run_id})
    (tmp_path / "metrics.jsonl").write_text(line("loss", 1))
    assert sender(run_id, tmp_path, tracker).drain(10)


def test_metrics_written_while_mlflow_is_dead_arrive_in_order_after_its_restart(
    server: object, tracker: Tracker, sweep: SweepRef, tmp_path: Path
) -> None:
    run_id = tracker.open_trial(sweep, 0, {})
    file = tmp_path / "metrics.jsonl"
    file.write_text(line("loss", 1))
    mine = sender(run_id, tmp_path, tracker)
    reader = CurveReader(tracker, "loss")
    assert mine.pump() == 1
    assert len(reader.fetch(sweep).points[0]) == 1
    kill: Callable[[], None] = server.kill  # type: ignore[attr-defined]
    kill()
    acknowledged = load_offset(tmp_path / "sent.json")
    with file.open("a") as out:
        out.write("".join(line("loss", i) for i in range(2, 2_502)))
    assert mine.pump() == 0
    assert not mine.drain(0.2)
    assert load_offset(tmp_path / "sent.json") == acknowledged
    assert len(reader.held(sweep).points[0]) == 1
    server.start()  # type: ignore[attr-defined]
    assert mine.drain(30)
    assert steps(tracker, run_id, "loss") == list(range(1, 2_502))
    assert len(reader.fetch(sweep).points[0]) == 2_501


def test_what_mlflow_stored_is_one_row_a_point(
    server: object, tracker: Tracker, sweep: SweepRef, tmp_path: Path
) -> None:
    run_id = tracker.open_trial(sweep, 0, {})
    (tmp_path / "metrics.jsonl").write_text("".join(line("loss", i) for i in range(50)))
    for _ in range(3):
        (tmp_path / "sent.json").unlink(missing_ok=True)
        assert sender(run_id, tmp_path, tracker).drain(10)
    database = server._folder / "mlflow.db"  # type: ignore[attr-defined]
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    rows = connection.execute("select count(*) from metrics where run_uuid = ?", (run_id,))
    assert rows.fetchone() == (50,)
    connection.close()
