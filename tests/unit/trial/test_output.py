"""Metrics in the output, and the metrics file."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hermes_ops.trial.files import Follower, append_lines, decode_value, encode_value
from hermes_ops.trial.metrics import Metric, MetricsFile
from hermes_ops.trial.outcome import Ending, Facts, Outcome, judge
from hermes_ops.trial.output import LINE_LIMIT_BYTES, LineReader, MetricReader


def read(line: str, objective: str | None = "loss", pattern: str | None = None) -> list[Metric]:
    return MetricReader(objective, pattern, 0).read(line)


def test_pairs_of_a_line_are_metrics_at_its_step() -> None:
    assert read("epoch=3 loss=0.41 val_acc = 1e-3") == [
        Metric("loss", 0.41, 3),
        Metric("val_acc", 0.001, 3),
    ]


def test_arguments_that_a_script_prints_are_no_metrics() -> None:
    assert read("Namespace(lr=0.1, batch_size=32)") == []
    assert read("version=1.2.3 loss=1.2.3 loss=abc") == []


def test_a_script_that_counts_from_zero_is_counted_from_one() -> None:
    reader = MetricReader("loss", None, 0)
    assert [reader.read(f"epoch={e} loss=1")[0].step for e in (0, 1, 2)] == [1, 2, 3]
    assert MetricReader("loss", None, 0, step_offset=1).read("epoch=3 loss=1")[0].step == 4


def test_values_without_a_step_are_counted_from_the_checkpoint() -> None:
    reader = MetricReader("loss", None, 4)
    assert [reader.read("loss=1")[0].step for _ in range(2)] == [5, 6]


def test_nan_and_infinity_are_values() -> None:
    assert math.isnan(read("loss=nan")[0].value)
    assert read("loss=-inf")[0].value == -math.inf


def test_a_pattern_without_a_name_means_the_objective() -> None:
    assert read("at 5: 0.5", pattern=r"at (?P<step>\d+): (?P<value>\S+)") == [
        Metric("loss", 0.5, 5)
    ]
    assert read("at 5: x", pattern=r"at (?P<step>\d+): (?P<value>\S+)") == []


def test_lines_are_cut_across_blocks_and_long_ones_shortened() -> None:
    reader = LineReader()
    assert reader.feed(b"a") == []
    assert reader.feed(b"b\nc\r\nd") == ["ab", "c"]
    assert reader.close() == ["d"]
    assert len(reader.feed(b"x" * 100_000 + b"\n")[0]) == LINE_LIMIT_BYTES


def test_the_tail_shows_the_last_state_of_a_progress_bar() -> None:
    reader = LineReader()
    reader.feed(b"start\n1/3\r2/3\r3/3\nend\n")
    assert reader.tail == ["start", "3/3", "end"]


def test_a_step_is_stored_once_whoever_writes(tmp_path: Path) -> None:
    one, two = MetricsFile(tmp_path / "m"), MetricsFile(tmp_path / "m")
    assert one.append([Metric("loss", 1.0, 1), Metric("loss", 2.0, 1)]) == [Metric("loss", 1.0, 1)]
    assert two.append([Metric("loss", 3.0, 1), Metric("loss", 3.0, 2)]) == [Metric("loss", 3.0, 2)]
    assert one.refresh() == [Metric("loss", 3.0, 2)] or one.last_step("loss") == 2
    assert len((tmp_path / "m").read_text().splitlines()) == 2


def test_a_follower_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "events"
    follower = Follower(path)
    path.write_text('{"a": 1}\n{"a"')
    assert list(follower.new()) == [{"a": 1}]
    with path.open("a") as stream:
        stream.write(": 2}\n")
    assert list(follower.new()) == [{"a": 2}]


def test_a_torn_line_is_cut_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "segments"
    path.write_text('{"a": 1}\n{"b"')
    append_lines(path, [{"c": 3}])
    assert path.read_text() == '{"a": 1}\n{"c": 3}\n'


@pytest.mark.parametrize("value", [0.1, -math.inf, math.inf, 1e300])
def test_values_survive_their_encoding(value: float) -> None:
    assert decode_value(encode_value(value)) == value


def facts(**changes: object) -> Facts:
    known: dict = {
        "exit_code": 0,
        "asked_to_stop": False,
        "ended_at_max_epochs": False,
        "verdict": None,
        "has_checkpoint": False,
        "objective": "loss",
        "objective_reported": True,
        "trained_to_end": False,
        "tail": ["last words"],
    }
    return Facts(**{**known, **changes})


@pytest.mark.parametrize(
    ("changes", "outcome", "code"),
    [
        ({}, Outcome.FINISHED, 0),
        ({"objective_reported": False}, Outcome.FAILED, 1),
        ({"exit_code": 75, "has_checkpoint": True}, Outcome.PREEMPTED, 75),
        ({"exit_code": 75}, Outcome.INTERRUPTED, 75),
        ({"exit_code": 70}, Outcome.FAILED, 1),
        ({"exit_code": 3}, Outcome.FAILED, 3),
        ({"exit_code": -9}, Outcome.FAILED, 137),
        ({"exit_code": -15, "asked_to_stop": True}, Outcome.INTERRUPTED, 75),
        ({"exit_code": 0, "asked_to_stop": True, "has_checkpoint": True}, Outcome.PREEMPTED, 75),
        ({"exit_code": 0, "asked_to_stop": True, "trained_to_end": True}, Outcome.FINISHED, 0),
        ({"exit_code": -15, "ended_at_max_epochs": True}, Outcome.FINISHED, 0),
        ({"exit_code": 0, "verdict": "loss is NaN at step 2"}, Outcome.FAILED, 1),
    ],
)
def test_the_outcome_follows_from_what_was_seen(changes: dict, outcome: Outcome, code: int) -> None:
    ending: Ending = judge(facts(**changes))
    assert (ending.outcome, ending.code) == (outcome, code)


def test_failures_carry_the_last_line() -> None:
    assert judge(facts(exit_code=3)).reason == "exit code 3: last words"
