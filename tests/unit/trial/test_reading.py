"""Lines of real scripts: which values count, and at which step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hermes_ops.trial.output.metric_reader import MetricReader
from hermes_ops.trial.output.output_reader import OutputReader

ARGUMENTS = {"epochs": 5, "step": 1, "lr": 0.1, "batch_size": 32}


def points(*lines: str, name: str = "val_loss", **known: Any) -> list[tuple[float, int]]:
    """The curve that lines give."""
    reader = MetricReader(name, None, 0, **known)
    return [(m.value, m.step) for line in lines for m in reader.read(line) if m.name == name]


def notes(*lines: str, name: str = "val_loss", **known: Any) -> str:
    reader = OutputReader(MetricReader(name, None, 0, **known))
    reader.feed("\n".join(lines).encode())
    reader.close()
    return "\n".join(reader.metrics.notes.values())


@pytest.mark.parametrize(
    "line",
    [
        '{"global_step": 300, "epoch": 3, "val_loss": 0.5}',
        '{"iteration": 300, "val_loss": 0.5, "trainer": {"step": 30, "epoch": 3}}',
        '{"progress": {"global_step": 300, "epoch": "3"}, "val_loss": 0.5}',
        "{'step': 300, 'val_loss': np.float64(0.5), 'epoch': np.int64(3)}",
        "step=300 iteration=30 epoch=3 val_loss=0.5",
        "step=300 Epoch 3/10 val_loss=0.5",
        "iteration: 300, Epoch: [3/10], val_loss: 0.5",
        "INFO:root:global_step=300 epoch: 3/10 - val_loss: 0.5",
        "EPOCH 003: val_loss: 0.5, best epoch: 2",
        "Epoch [3][ 30/100] val_loss=0.5",
        "epoch=3 val_loss=0.5 (best val_loss: 0.4 at epoch 2)",
        "Epoch 3: 100%|####| 10/10 [00:01<00:00, 9.9it/s, loss=1, val_loss=0.5]",
    ],
)
def test_of_several_steps_on_a_line_the_epoch_counts(line: str) -> None:
    assert points(line) == [(0.5, 3)]


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("step 300/1000: val_loss=0.5", 300),
        ("global step 1,000 val_loss=0.5", 1000),
        ("step=1,000 val_loss=0.5", 1000),
        ("[12]\tval_loss:0.5", 12),
        ("12:\tlearn: 0.7\tval_loss: 0.5\ttotal: 1.2ms", 12),  # CatBoost
        ("12:\tval_loss: 0.5", 1),
        ("[12] val_loss=0.5", 1),  # the number of a process, perhaps
        ("val_loss=0.5 of 10 epochs", 1),
    ],
)
def test_a_line_without_an_epoch_says_another_step_or_is_counted(line: str, step: int) -> None:
    assert points(line) == [(0.5, step)]


def test_a_fraction_of_an_epoch_is_no_epoch_and_that_is_said() -> None:
    lines = [f"{{'val_loss': {1 / e}, 'epoch': {e}}}" for e in (0.5, 1.0, 1.5, 2.0)]
    assert points(*lines) == [(1.0, 1), (0.5, 2)]
    assert "epoch 0.5 is no whole number" in notes(*lines)


def test_two_different_epochs_on_a_line_are_not_guessed_at() -> None:
    assert points("epoch=1 val_loss=0.5 epoch=2") == []
    assert points("epoch=1 val_loss=0.5 epoch=1") == [(0.5, 1)]
    assert "two different" in notes("epoch=1 val_loss=0.5 epoch=2")


@pytest.mark.parametrize(
    "dump",
    [
        "Namespace(epochs=5, step=1, lr=0.1, val_loss=9.0)",
        str({**ARGUMENTS, "val_loss": 9.0}),
        json.dumps({**ARGUMENTS, "val_loss": 9.0}),
        json.dumps({"train": ARGUMENTS, "val_loss": 9}),
        json.dumps({**ARGUMENTS, "val_loss": 9.0}, indent=2),
        "epochs=5 step=1 lr=0.1 val_loss=9",
        "epoch=1 seed=7 val_loss=9",
        "TrainingArguments(epoch=1, rate=0.1, val_loss=9.0)",
        "Config(step=1, rate=0.1, val_loss=9.0)",
        "rate=0.1 epoch=1 val_loss=9",  # a parameter of the sweep
        "python train.py --epoch=1 --val_loss=9",
        "\n".join(f"{name}: {value}" for name, value in ARGUMENTS.items()),
        "step: 1\nloss: mse",
    ],
)
def test_arguments_that_a_script_prints_at_its_start_are_no_metrics(dump: str) -> None:
    lines = [*dump.splitlines(), "epoch=1 val_loss=0.5", "epoch=2 val_loss=0.4"]
    reader = MetricReader("val_loss", None, 0, parameters=["RATE"], others={"lr": None})
    found = [tuple(m) for line in lines for m in reader.read(line)]
    assert [f for f in found if f[0] != "lr"] == [("val_loss", 0.5, 1), ("val_loss", 0.4, 2)]


@pytest.mark.parametrize("line", ["epochs=5 step=1 lr=0.1", json.dumps(ARGUMENTS), str(ARGUMENTS)])
def test_an_argument_is_no_metric_even_if_it_has_a_step_and_comes_again(line: str) -> None:
    reader = MetricReader("val_loss", None, 0, others={"lr": None})
    assert [m for _ in range(2) for m in reader.read(line)] == []


def test_the_first_line_of_a_metric_counts_too_where_the_objective_comes_in_between() -> None:
    reader = MetricReader("val_loss", None, 0)
    lines = ["epoch 1: lr=0.1", "epoch 1: val_loss=2", "epoch 2: lr=0.2"]
    found = [(m.name, m.step, m.value) for line in lines for m in reader.read(line)]
    assert found == [("val_loss", 1, 2.0), ("lr", 1, 0.1), ("lr", 2, 0.2)]


def test_what_an_earlier_segment_has_read_is_no_argument_of_the_next_one() -> None:
    resumed = MetricReader("val_loss", None, 3, stored={"val_loss": 3, "lr": 3})
    assert [m.step for m in resumed.read("epoch 4: lr=0.4")] == [4]
    assert resumed.read("epochs=9 step=4 lr=0.1 seed=3") == []


def test_a_format_of_metrics_that_looks_like_arguments_is_one_when_it_comes_again() -> None:
    lines = [f"epoch={e} epochs=5 lr=0.1 val_loss={1 / e}" for e in (1, 2, 4)]
    assert points(*lines) == [(1.0, 1), (0.5, 2), (0.25, 4)]
    assert points(lines[0]) == []
    assert "list of the script's arguments" in notes(lines[0])


def test_lines_of_batches_before_the_first_objective_are_kept_once_they_go_on() -> None:
    reader = MetricReader("val_loss", None, 0)
    lines = ["step=10 loss=3", "step=20 loss=2", "epoch=1 val_loss=1", "epoch=1 accuracy=0.5"]
    assert [tuple(m) for line in lines for m in reader.read(line)] == [
        ("loss", 3.0, 10),
        ("loss", 2.0, 20),
        ("val_loss", 1.0, 1),
        ("accuracy", 0.5, 1),
    ]


def test_once_the_objective_has_a_step_a_value_without_one_is_not_counted() -> None:
    lines = ["epoch=1 val_loss=0.5", "best so far: val_loss=0.5", "epoch=2 val_loss=0.4"]
    assert points(*lines) == [(0.5, 1), (0.4, 2)]
    assert "has come with its step before" in notes(*lines)
    assert points("val_loss=0.5", steps_by="epoch") == []  # in an earlier segment of the trial
    assert points("step=7 val_loss=0.5", steps_by="epoch") == []


@pytest.mark.parametrize(
    "line",
    [
        "epoch=1 val_loss=0.5 then val_loss=0.4",
        '{"epoch": 1, "val_loss": 0.5, "val_loss": 0.4}',
        '{"epoch": 1, "val_loss": 0.5} {"val_loss": 0.4}',
        "epoch=1 val_loss=1.5 --> val_loss=0.5, saving",
        "Epoch 1: val_loss: 0.5 val_loss: 0.4",
    ],
)
def test_a_line_that_names_the_objective_twice_is_not_guessed_at(line: str) -> None:
    assert points(line) == []
    assert notes(line).count("not read") == 1
    assert points(line.replace("0.4", "0.5").replace("1.5 -->", "0.5,")) == [(0.5, 1)]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("epoch=1 val/mAP@0.5=0.5", "val/mAP@0.5"),
        ("Epoch 1 metrics/mAP50-95(B): 0.5", "metrics/mAP50-95(B)"),
        ("epoch 1, eval loss: 0.5", "eval loss"),
        ("Epoch 1: top-1 %: 0.5", "top-1 %"),
        ("[1]\tvalid_0's l2: 0.5\tvalid_1's l2: 0.3", "valid_0's l2"),
        ("epoch=1 acc [val] = 0.5", "acc [val]"),
        ("epoch=1 $loss$=0.5", "$loss$"),
        ("epoch=1 validation perdida: 0.5", "validation perdida"),
        ("{'epoch': 1, 'P(B) @ 0.5': 0.5}", "P(B) @ 0.5"),
        ("1 epoch=1 Verlust/größe=0.5", "Verlust/größe"),
    ],
)
def test_a_name_that_the_sweep_file_asks_for_is_found_as_it_stands(line: str, name: str) -> None:
    assert points(line, name=name) == [(0.5, 1)]


@pytest.mark.parametrize(
    "line",
    [
        *("epoch=1 val_loss=0.5", "epoch=1 val/loss=0.5", "epoch=1 self.loss=0.5"),
        *("epoch=1 --loss=0.5", "epoch=1 loss_val=0.5", "epoch=1 loss@2=0.5", "epoch=1 loss==0.5"),
        *("epoch=1 best loss=0.5", "epoch=1 train loss: 0.5", "epoch=1 Generator loss: 0.5"),
    ],
)
def test_a_name_inside_of_another_one_is_not_it(line: str) -> None:
    assert points(line, name="loss") == []


def test_a_word_that_says_what_the_name_says_too_is_no_part_of_it() -> None:
    assert points("epoch=1 Validation val_loss: 0.5") == [(0.5, 1)]
    assert points("epoch=1 best val_loss: 0.5") == []


def test_a_metric_at_parts_of_epochs_is_counted_and_moves_nothing() -> None:
    reader = MetricReader("eval_loss", None, 0, max_epochs=2)
    lines = [f"{{'loss': {e}, 'epoch': {e}}}" for e in (0.25, 0.5, 0.75)]
    found = [m for line in lines for m in reader.read(line)]
    assert [(m.value, m.step) for m in found] == [(0.25, 1), (0.5, 2), (0.75, 3)]


def test_a_level_of_a_log_is_no_part_of_a_name() -> None:
    assert points("2026-01-02 12:00:00,123 INFO loss: 0.5", name="loss") == [(0.5, 1)]


@pytest.mark.parametrize(
    "value",
    [
        "tensor(0.5, device='cuda:0')",
        "<tf.Tensor: shape=(), dtype=float32, numpy=0.5>",
        "Array(0.5, dtype=float32, a=1)",
    ],
)
def test_what_stands_inside_of_a_value_is_no_metric(value: str) -> None:
    for line in (f"epoch=1 val_loss={value} b=2", f"epoch=1 b=2 a={value} val_loss={value}"):
        found = MetricReader("val_loss", None, 0).read(line)
        assert {m.name: m.value for m in found if m.name != "a"} == {"val_loss": 0.5, "b": 2.0}


@pytest.mark.parametrize(
    "word",
    ["device=cuda:0", "device='cuda:0'", "at=http://host:80", "x=a:1", "train.py:42", "a/b.py:42:"],
)
def test_a_colon_in_a_value_makes_no_metric(word: str) -> None:
    found = MetricReader("val_loss", None, 0).read(f"epoch=1 {word} val_loss=0.5 12:30:01")
    assert found == [("val_loss", 0.5, 1)]


def test_steps_beyond_the_last_epoch_are_no_part_of_the_curve() -> None:
    reader = MetricReader("val_loss", None, 0, max_epochs=2)
    lines = [f"step={e} val_loss={e} loss=1" for e in (0, 1, 2, 3)]
    found = [m for line in lines for m in reader.read(line)]
    assert {m.step for m in found} == {0, 1, 2}
    assert reader.beyond == 3


def test_a_count_of_batches_beyond_the_last_epoch_is_no_epoch() -> None:
    reader = MetricReader("loss", None, 0, max_epochs=5)
    lines = ["step=0 loss=9", "step=100 loss=3", "epoch=1 loss=2", "step=200 loss=1"]
    assert [(m.value, m.step) for line in lines for m in reader.read(line)] == [(9.0, 0), (2.0, 1)]
    assert reader.beyond is None
    assert "beyond budget.max_epochs" in reader.notes["beyond"]


@pytest.mark.parametrize(
    ("first_step", "steps", "is_noted"),
    [
        (12, (0, 1, 2), True),
        (12, (1, 2), True),
        (12, (0, 13, 14), False),
        (12, (13, 14), False),
        (12, (10, 11, 12, 13), False),
        (2, (1, 2, 3), False),
        (0, (0, 1, 2), False),
    ],
)
def test_a_resumed_script_that_counts_from_the_start_again_is_told_so(
    first_step: int, steps: tuple[int, ...], is_noted: bool
) -> None:
    reader = MetricReader("eval-loss", None, first_step)
    for step in steps:
        reader.read(f"[{step}]\teval-loss:0.41")
    assert ("counts its steps from the start" in reader.notes.get("restart", "")) == is_noted


def test_steps_of_other_metrics_are_never_compared_with_the_last_epoch() -> None:
    reader = MetricReader("val_loss", None, 0, max_epochs=5)
    lines = ["epoch=1 val_loss=1", "step=700 loss=3", "step=800 loss=2"]
    assert [m.step for line in lines for m in reader.read(line)] == [1, 700, 800]
    assert reader.beyond is None
