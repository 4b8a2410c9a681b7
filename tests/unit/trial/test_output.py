"""Metrics in the output, and the metrics file."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.trial import metrics, report
from hermes_ops.trial.files import Follower, append_lines, decode_value, encode_value
from hermes_ops.trial.metrics import Metric, MetricsFile, parse
from hermes_ops.trial.outcome import SegmentEnding, SegmentFacts, SegmentOutcome, judge
from hermes_ops.trial.output.line_reader import (
    LINE_LIMIT_BYTES,
    TAIL_LINE_CHARACTERS,
    LineReader,
    OutputLine,
)
from hermes_ops.trial.output.metric_reader import MOST_NAMES, MetricReader
from hermes_ops.trial.output.output_reader import OutputReader
from hermes_ops.trial.redaction import Mask


def read(line: str, objective: str | None = "loss", pattern: str | None = None) -> list[Metric]:
    return MetricReader(objective, pattern, 0).read(line)


def test_pairs_of_a_line_are_metrics_at_its_step() -> None:
    assert read("epoch=3 loss=0.41 val_acc = 1e-3") == [
        Metric("loss", 0.41, 3),
        Metric("val_acc", 0.001, 3),
    ]


def test_names_and_values_that_are_aligned_as_columns_are_pairs() -> None:
    line = "epoch          : 3    loss           :    0.25    accuracy       :     0.5"
    assert read(line) == [Metric("loss", 0.25, 3), Metric("accuracy", 0.5, 3)]


def test_arguments_that_a_script_prints_are_no_metrics() -> None:
    assert read("Namespace(lr=0.1, batch_size=32)") == []
    assert read("version=1.2.3 loss=1.2.3 loss=abc") == []


def test_an_epoch_0_is_a_point_at_step_0_and_shifts_nothing() -> None:
    reader = MetricReader("loss", None, 0)
    assert [reader.read(f"epoch={e} loss=1")[0].step for e in (0, 1, 2)] == [0, 1, 2]


def test_a_trial_that_an_earlier_version_has_shifted_goes_on_shifted() -> None:
    assert MetricReader("loss", None, 0, step_offset=1).read("epoch=3 loss=1")[0].step == 4


def test_values_without_a_step_are_counted_from_the_checkpoint() -> None:
    reader = MetricReader("loss", None, 4)
    assert [reader.read("loss=1")[0].step for _ in range(2)] == [5, 6]


def test_a_name_that_came_less_often_than_epochs_is_counted_from_what_is_stored_of_it() -> None:
    stored = {"loss": 6, "val_f1": 2}
    reader = MetricReader("test_acc", None, 4, stored=stored, others={"val_f1": None, "loss": None})
    lines = ("loss=1", "val_f1=0.5", "test_acc=0.9", "loss=1")
    found = [(m.name, m.step) for line in lines for m in reader.read(line)]
    assert found == [("loss", 5), ("val_f1", 3), ("test_acc", 1), ("loss", 6)]


def test_values_that_code_between_replayed_fits_prints_again_keep_their_steps() -> None:
    stored = {"score": 3, "val_f1": 12, "mean": 13}
    others = {"val_f1": None, "mean": None}
    reader = MetricReader("score", None, 12, others=others, stored=stored, is_replay=True)
    before = [reader.read(line)[0].step for line in ("score=1", "mean=1", "score=2", "score=3")]
    assert before == [1, 1, 2, 3]
    reader.begin_training(again=True)
    assert reader.read("mean=2")[0].step == 2
    reader.begin_training(again=False)
    after = [reader.read(line)[0].step for line in ("val_f1=1", "score=4", "mean=3", "val_f1=2")]
    assert after == [13, 4, 14, 14]
    reader.begin_training(again=False)
    assert reader.read("score=5")[0].step == 5


def test_nan_and_infinity_are_values() -> None:
    assert math.isnan(read("loss=nan")[0].value)
    assert read("loss=-inf")[0].value == -math.inf


def test_a_pattern_without_a_name_means_the_objective() -> None:
    assert read("at 5: 0.5", pattern=r"at (?P<step>\d+): (?P<value>\S+)") == [
        Metric("loss", 0.5, 5)
    ]
    assert read("at 5: x", pattern=r"at (?P<step>\d+): (?P<value>\S+)") == []


OTHERS = {"latency": r"took (?P<value>\S+) ms(?: at (?P<step>\d+))?", "size": None}


def read_others(*lines: str, pattern: str | None = None) -> list[Metric]:
    reader = MetricReader("loss", pattern, 0, others=OTHERS)
    return [metric for line in lines for metric in reader.read(line)]


def test_a_metric_that_the_sweep_names_counts_on_any_line() -> None:
    assert read_others("size=7 batch=3", "size=8") == [Metric("size", 7, 1), Metric("size", 8, 2)]
    assert read_others("latency=5") == []  # it has a pattern of its own


def test_a_pattern_of_one_metric_is_read_beside_all_others() -> None:
    line = "epoch=2 loss=0.5 latency=9 took 12.5 ms"
    assert read_others(line) == [Metric("loss", 0.5, 2), Metric("latency", 12.5, 1)]
    assert read_others("took 12.5 ms at 4") == [Metric("latency", 12.5, 4)]
    general = r"(?P<name>\w+): (?P<value>\S+)"
    found = read_others("loss: 0.5 latency: 3 size: 2 took 1 ms", pattern=general)
    assert {(m.name, m.value) for m in found} == {("loss", 0.5), ("size", 2), ("latency", 1)}


def test_a_pattern_of_one_metric_that_names_another_finds_nothing() -> None:
    reader = MetricReader("loss", None, 0, others={"a": r"(?P<name>\w+) is (?P<value>\S+)"})
    assert reader.read("b is 1 a is 2 loss is 3") == [Metric("a", 2, 1)]


def test_metrics_that_the_sweep_names_are_read_beside_a_thousand_others() -> None:
    reader = MetricReader("loss", None, 0, others=OTHERS)
    flood = " ".join(f"m{n}=1" for n in range(500))
    for part in range(4):
        reader.read(f"epoch=1 loss=1 {flood.replace('m', f'p{part}m')}")
    assert [m.name for m in reader.read("epoch=2 loss=1 size=3 fresh=4")] == ["loss", "size"]


def test_lines_are_cut_across_blocks_and_long_ones_shortened() -> None:
    reader = LineReader()
    assert reader.feed(b"a") == []
    assert reader.feed(b"b\nc\r\nd") == [OutputLine("ab"), OutputLine("c")]
    assert reader.close() == [OutputLine("d")]
    assert len(reader.feed(b"x" * 100_000 + b"\n")[0].text) == LINE_LIMIT_BYTES


def test_the_tail_shows_the_last_state_of_a_progress_bar() -> None:
    reader = LineReader()
    reader.feed(b"start\n1/3\r2/3\r3/3\nend\n")
    assert reader.tail == ["start", "3/3", "end"]


def test_metrics_aside_do_not_say_how_far_a_file_is(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m")
    file.append([Metric("loss", 1.0, 3), Metric("latency", 1.0, 900)])
    assert (file.last_step(), file.last_step(secondary={"latency"})) == (900, 3)


def test_a_step_is_stored_once_whoever_writes(tmp_path: Path) -> None:
    one, two = MetricsFile(tmp_path / "m"), MetricsFile(tmp_path / "m")
    assert one.append([Metric("loss", 1.0, 1), Metric("loss", 2.0, 1)]) == [Metric("loss", 1.0, 1)]
    assert two.append([Metric("loss", 3.0, 1), Metric("loss", 3.0, 2)]) == [Metric("loss", 3.0, 2)]
    assert one.refresh() == [Metric("loss", 3.0, 2)] or one.last_step() == 2
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


def facts(**changes: object) -> SegmentFacts:
    known: dict[str, Any] = {
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
    return SegmentFacts(**{**known, **changes})


@pytest.mark.parametrize(
    ("changes", "outcome", "code"),
    [
        ({}, SegmentOutcome.FINISHED, 0),
        ({"objective_reported": False}, SegmentOutcome.FAILED, 1),
        ({"exit_code": 75, "has_checkpoint": True}, SegmentOutcome.PREEMPTED, 75),
        ({"exit_code": 75}, SegmentOutcome.INTERRUPTED, 75),
        ({"exit_code": 70}, SegmentOutcome.FAILED, 1),
        ({"exit_code": 3}, SegmentOutcome.FAILED, 3),
        ({"exit_code": -9}, SegmentOutcome.FAILED, 137),
        ({"exit_code": -15, "asked_to_stop": True}, SegmentOutcome.INTERRUPTED, 75),
        (
            {"exit_code": 0, "asked_to_stop": True, "has_checkpoint": True},
            SegmentOutcome.PREEMPTED,
            75,
        ),
        (
            {"exit_code": 0, "asked_to_stop": True, "trained_to_end": True},
            SegmentOutcome.FINISHED,
            0,
        ),
        ({"exit_code": -15, "ended_at_max_epochs": True}, SegmentOutcome.FINISHED, 0),
        ({"exit_code": 0, "verdict": "loss is NaN at step 2"}, SegmentOutcome.FAILED, 1),
    ],
)
def test_the_outcome_follows_from_what_was_seen(
    changes: dict[str, Any], outcome: SegmentOutcome, code: int
) -> None:
    ending: SegmentEnding = judge(facts(**changes))
    assert (ending.outcome, ending.code) == (outcome, code)


def test_failures_carry_the_last_line() -> None:
    assert judge(facts(exit_code=3)).reason == "exit code 3: last words"


# -- JSON, colours, progress lines -----------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        '{"epoch": 3, "val_loss": 0.2}',
        '12:00 INFO x {"epoch": 3, "val_loss": 0.2} done {not json}',
        '{"epoch": "3", "val_loss": "0.2", "message": "lr=0.1", "ok": true}',
        '{broken {"epoch": 3, "val_loss": 0.2}',
        "{'val_loss': 0.2, 'epoch': 3}",
        "{'val_loss': 0.2, 'epoch': 3.0}",
        'epoch=3 {"val_loss": 0.2}',
        "\x1b[1;32mepoch\x1b[0m=\x1b[31m3\x1b[m val_loss=\x1b]8;;x\x1b\\0.2\x1b(B",
        "\0epoch=\0003 val_loss=0.2\x08",
    ],
)
def test_a_line_says_its_epoch_and_its_loss_in_many_ways(line: str) -> None:
    data = line.encode() + b"\n"
    assert OutputReader(MetricReader("val_loss", None, 0)).feed(data) == [
        Metric("val_loss", 0.2, 3)
    ]


def test_numbers_inside_an_object_are_named_by_its_key() -> None:
    assert read('{"val": {"loss": 1, "n": {"a": 2}}, "step": 4}', "val/loss") == [
        Metric("val/loss", 1.0, 4),
        Metric("val/n/a", 2.0, 4),
    ]


@pytest.mark.parametrize(
    "line",
    [
        '{"version": 3, "batch_size": 32}',
        '{"loss": [1, 2], "a": {"loss": null}}',
        '{"a":' * 20_000,
        "{" * 60_000,
        '{"' + "x" * 300 + '": 1, "step": 1}',
        '{"\x00": 1, "step": 1}',
    ],
)
def test_other_objects_hold_no_metric(line: str) -> None:
    assert read(line) == []


def test_a_number_of_json_that_no_float_can_hold_is_infinite() -> None:
    assert read('{"loss": -1' + "0" * 400 + "}") == [Metric("loss", -math.inf, 1)]
    assert math.isnan(read('{"loss": NaN}')[0].value)


def metrics_of(*pieces: bytes, objective: str = "loss") -> list[tuple[str, float, int]]:
    reader = OutputReader(MetricReader(objective, None, 0))
    found = [m for piece in pieces for m in reader.feed(piece)]
    return [(m.name, m.value, m.step) for m in (*found, *reader.close())]


def test_a_progress_line_counts_once_in_its_last_state() -> None:
    bar = b"  0%|   | loss=3\r 50%|#  | loss=2\r100%|###| loss=1\n"
    assert metrics_of(bar, b"\r" + bar) == [("loss", 1.0, 1), ("loss", 1.0, 2)]
    assert metrics_of(bar[:-1]) == metrics_of(bar[:-1], b"\r") == [("loss", 1.0, 1)]
    assert metrics_of(bar[:-1], b"\r        \r", b"done\n") == [("loss", 1.0, 1)]


def test_a_progress_line_over_epochs_counts_once_for_each() -> None:
    data = b"loss=3, epoch=1\rloss=2, epoch=1\rloss=9, epoch=2\rloss=1, epoch=2\r\n"
    assert metrics_of(data) == [("loss", 2.0, 1), ("loss", 1.0, 2)]


def test_lines_that_end_as_on_windows_are_no_progress_lines() -> None:
    assert metrics_of(b"loss=3\r", b"\nloss=2\r\r\n", b"loss=1\r\n") == [
        ("loss", 3.0, 1),
        ("loss", 2.0, 2),
        ("loss", 1.0, 3),
    ]


OUTPUTS = st.lists(
    st.sampled_from(
        [
            *(b"\r", b"\n", b"\r\n", b"epoch=2 loss=1", b"loss=2", b'{"loss": 3}', b"{'loss': 4}"),
            *(b"\x1b[31m", b"\0", b"\xff", b"\xe2\x82\xac", b"x" * 70_000, b" "),
        ]
    ),
    max_size=12,
).map(b"".join)


@settings(deadline=None, max_examples=60)
@given(OUTPUTS, st.lists(st.integers(0, 200)))
def test_any_split_of_the_output_gives_the_same_metrics_and_tail(
    data: bytes, cuts: list[int]
) -> None:
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    whole, parts = (OutputReader(MetricReader("loss", None, 0)) for _ in range(2))
    expected = [*whole.feed(data), *whole.close()]
    found = [m for a, b in pairwise(places) for m in parts.feed(data[a:b])]
    assert [*found, *parts.close()] == expected
    assert parts.tail == whole.tail


# -- hostile output --------------------------------------------------------------------------------


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "block",
    [b"x" * 65_536, b"\ra" * 4_096, b"\n" * 4_096, b"\0\xff\x1b[" * 16_384, b'{"a":' * 13_000],
    ids=["no newline", "returns", "newlines", "binary", "open objects"],
)
def test_memory_is_bounded_whatever_comes(block: bytes) -> None:
    def work() -> None:
        reader = OutputReader(MetricReader("loss", None, 0))
        for _ in range(3):
            reader.feed(block)
        reader.close()

    assert peak_bytes(work) < 8_000_000


def test_names_are_bounded_and_the_objective_is_read_all_the_same() -> None:
    reader = MetricReader("loss", None, 0)
    reader.read("epoch=0 loss=1")
    found = [m for n in range(3000) for m in reader.read(f"epoch=1 m{n}=1")]
    assert len(found) == MOST_NAMES
    assert reader.read("epoch=1 loss=1 m5000=2 m1=3") == [
        Metric("loss", 1.0, 1),
        Metric("m1", 3.0, 1),
    ]


def test_what_was_stored_takes_no_memory_for_each_step(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m")

    def work() -> None:
        for start in range(1, 3_001, 100):
            file.append([Metric("loss", 1.0, start + i) for i in range(100)])

    assert peak_bytes(work) < 150_000
    assert MetricsFile(tmp_path / "m").last_step() == 3_000


def test_a_report_reads_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_back = []

    def counted(document: Any) -> Any:
        read_back.append(document)
        return parse(document)

    monkeypatch.setenv("HERMES_METRICS_FILE", str(tmp_path / "m"))
    monkeypatch.setattr(metrics, "parse", counted)
    for step in range(1, 41):
        report(step, loss=1.0)
        report(step, loss=2.0)
    assert len(read_back) == 40
    assert MetricsFile(tmp_path / "m").refresh() == [Metric("loss", 1.0, s) for s in range(1, 41)]


def test_the_tail_holds_no_secret_even_where_a_long_line_is_cut() -> None:
    reader = LineReader(Mask(["open sesame"]))
    line = "x" * (TAIL_LINE_CHARACTERS - 4) + "open sesame, said Ali\n"
    reader.feed(line.encode() + b"it is open sesame\n")
    assert reader.tail == ["x" * (TAIL_LINE_CHARACTERS - 4) + "***,", "it is ***"]
