from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hermes_ops import report
from hermes_ops.core.amounts import duration
from hermes_ops.core.secondary_metrics import MetricOutcome, SecondaryMetric
from hermes_ops.core.summary import CurvePoints, Segment, SweepSummary, TrialSummary
from hermes_ops.report.figures import learning_curves
from hermes_ops.report.table import csv_text


def summary(*trials: TrialSummary, direction: str = "minimize", name: str = "s") -> SweepSummary:
    return SweepSummary(name, "finished", trials, "val_loss", direction, 75.04, 2, 2)


def trial(number: int, best: float | None, **changes: Any) -> TrialSummary:
    facts: dict[str, Any] = {"state": "finished", "config": {"lr": 0.1}, "final": best}
    return TrialSummary(number, best=best, **{**facts, **changes})


def test_the_document_has_exactly_the_promised_keys() -> None:
    document = summary(trial(0, 0.5), TrialSummary(1, "pending")).to_document()
    assert list(document) == [
        "sweep",
        "state",
        "trials",
        "best",
        "wall_seconds",
        "pool_slots",
        "max_slots_used",
    ]
    assert list(document["trials"][0]) == [
        "number",
        "state",
        "config",
        "final",
        "best",
        "steps",
        "segments",
        "preemptions",
        "gpu_seconds",
        "sizes",
    ]
    assert document["best"] == document["trials"][0]


def test_the_best_follows_the_direction_and_of_two_equal_ones_is_the_first() -> None:
    trials = [trial(0, 0.5), trial(1, 0.9), trial(2, 0.2), trial(3, 0.2), trial(4, 0.9)]
    lowest, highest = summary(*trials).best, summary(*trials, direction="maximize").best
    assert lowest is not None
    assert highest is not None
    assert (lowest.number, highest.number) == (2, 1)


def test_a_failed_trial_is_never_the_best() -> None:
    best = summary(trial(0, 0.1, state="failed"), trial(1, 0.3, state="stopped_early")).best
    assert best is not None
    assert best.number == 1


def test_values_that_are_no_numbers_are_null_and_never_the_best() -> None:
    document = summary(trial(0, math.nan), trial(1, math.inf), trial(2, None)).to_document()
    assert document["best"] is None
    assert [t["final"] for t in document["trials"]] == [None, None, None]
    json.dumps(document, allow_nan=False)


def test_the_report_is_complete_and_its_json_is_the_document(tmp_path: Path) -> None:
    world = summary(trial(0, 0.5, segments=2, preemptions=1), trial(1, 0.7))
    curves: dict[int, CurvePoints] = {0: ((1, 0.9, 1_000), (2, 0.5, 5_000)), 1: ((1, 0.7, 3_000),)}
    segments = [
        Segment(0, 1, (0,), 0.0, 1.5, 0, 1, "preempted"),
        Segment(1, 1, (0,), 2.0, 3.5, 0, 1, "finished"),
        Segment(0, 2, (0, 1), 4.0, None, 1, None, ""),
    ]
    files = report.write(tmp_path / "report", world, curves, segments)
    assert sorted(f.name for f in files) == [
        "best.json",
        "curves.png",
        "gpus.png",
        "report.html",
        "summary.json",
        "trials.csv",
    ]
    folder = tmp_path / "report"
    assert json.loads((folder / "summary.json").read_text()) == world.to_document()
    assert json.loads((folder / "best.json").read_text())["number"] == 0
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "gpus.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("values", [(), (math.nan,), (0.0,), (-1.0, 5.0), (1e-9, 1e9), (1e308,)])
def test_any_curve_can_be_drawn(tmp_path: Path, values: tuple[float, ...]) -> None:
    points = tuple((i, v, i * 1_000) for i, v in enumerate(values, 1))
    curves = {0: points} if points else {}
    report.write(tmp_path, summary(trial(0, None)), curves, [])
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "curves.png").exists()


def test_a_part_that_fails_does_not_take_the_others_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no font")

    monkeypatch.setattr("hermes_ops.report.page.learning_curves", fail)
    files = report.write(tmp_path, summary(trial(0, 0.5)), {}, [])
    names = {f.name for f in files}
    assert "curves.png" not in names
    assert {"gpus.png", "report.html", "summary.json"} < names
    assert "curves.png could not be made" in caplog.text


def test_the_csv_has_the_metrics_beside_the_objective_and_the_bounds() -> None:
    latency = SecondaryMetric("latency", "minimize", at_most=20.0)
    kept = trial(0, 0.5, metrics={"latency": MetricOutcome(9.0, 8.0)}, segments=1)
    missed = trial(1, 0.4, metrics={"latency": MetricOutcome(99.0)}, violates=("latency is 99",))
    facts = replace(summary(kept, missed, trial(2, None)), metrics=(latency,))
    found = list(csv.DictReader(io.StringIO(csv_text(facts))))
    names = ("metric.latency.last", "metric.latency.best", "bounds")
    assert [tuple(row[name] for name in names) for row in found] == [
        ("9.0", "8.0", "kept"), ("99.0", "", "latency is 99"), ("", "", "")
    ]  # fmt: skip


def test_the_csv_has_all_parameters_and_no_formula() -> None:
    trials = (
        trial(0, 1 / 3, config={"lr": 0.1}),
        trial(1, -0.5, config={"lr": -2, "opt": "=cmd|' /C calc'!A0", "layers": [1, 2]}),
        TrialSummary(2, "pending"),
    )
    rows = list(csv.DictReader(io.StringIO(csv_text(summary(*trials)))))
    assert [r["number"] for r in rows] == ["0", "1", "2"]
    assert float(rows[0]["best"]) == 1 / 3
    assert (rows[1]["best"], rows[1]["config.lr"]) == ("-0.5", "-2")
    assert rows[1]["config.opt"].startswith("'=")
    assert rows[1]["config.layers"] == "[1, 2]"
    assert (rows[2]["best"], rows[2]["config.lr"]) == ("", "")


def test_durations_read_well() -> None:
    assert [duration(s) for s in (0, 59.4, 59.6, 185, 7_800)] == [
        "0 s",
        "59 s",
        "1 min 00 s",
        "3 min 05 s",
        "2 h 10 min",
    ]


def test_the_table_has_the_gpus_and_batches_of_trials_that_had_several() -> None:
    wide = trial(0, 0.5, sizes=(1, 2, 2, 1), batches=(None, 64, 128, 128))
    text = csv_text(summary(wide, trial(1, 0.7, sizes=(1,))))
    header, first, second = csv.reader(text.splitlines())
    columns = [header.index("gpus"), header.index("batch")]
    assert [first[column] for column in columns] == ["1 → 2 → 1", "64 → 128"]
    assert [second[column] for column in columns] == ["1", ""]
    assert wide.to_document()["batches"] == [None, 64, 128, 128]
    assert "gpus" not in csv_text(summary(trial(1, 0.7, sizes=(1,))))


def test_the_curves_of_many_trials_are_a_few_shapes_and_show_each_value() -> None:
    from matplotlib.collections import LineCollection

    trials = range(300)
    curves: dict[int, CurvePoints] = {
        t: tuple((s, 1.0 / s + t, 1_000 * (t + s)) for s in range(1, 9)) for t in trials
    }
    curves[7] = curves[7][:1]
    segments = [
        Segment(t, epoch, (0,), t + 4.0 * epoch - 4.0, t + 4.0 * epoch, 0, 4 * epoch, "preempted")
        for t in trials
        for epoch in (1, 2)
    ]
    many = summary(*(trial(number, None) for number in trials))
    by_step, by_time = learning_curves(many, curves, segments).axes
    for axes in (by_step, by_time):
        assert len(axes.lines) + len(axes.collections) < 10
        assert axes.get_ylim()[0] < 0.2 < 299.0 < axes.get_ylim()[1]
    lines = by_step.collections[0]
    assert isinstance(lines, LineCollection)
    assert len(lines.get_segments()) == len(trials)
    assert lines.get_rasterized()
    rings: Any = by_step.collections[-1]
    assert len(rings.get_offsets()) == len(trials) - 1  # the one of trial 7 ended before step 4
