"""What a user is told whose script prints values that are not read."""

from __future__ import annotations

import re

import pytest
import yaml

from hermes_ops.config.fields import _metric_pattern
from hermes_ops.trial.output.advice import advice
from hermes_ops.trial.output.metric_reader import MetricReader


def told(*lines: str, objective: str = "val_loss") -> list[tuple[str, str, str | None]]:
    """The line, the name and the pattern of each piece of advice."""
    found = re.findall(
        r'"([^"]*)" would be read with (?:trial.metric_pattern: (\'(?:[^\']|\'\')*\'))?(?: and )?'
        r"(?:objective.metric: ([^;]+))?(?:; |$)",
        advice(lines, objective),
    )
    return [
        (line, name or objective, yaml.safe_load(pattern) if pattern else None)
        for line, pattern, name in found
    ]


@pytest.mark.parametrize(
    ("line", "name", "value", "step"),
    [
        ("epoch 3 done, validation loss is 0.41", "validation loss", 0.41, 3),
        ("12:00:00 INFO Epoch 3 | val loss 0.41 | acc 0.9", "val loss", 0.41, 3),
        ("| epoch   3 | 200/ 2983 batches | lr 5.00 | loss  0.41 |", "loss", 0.41, 3),
        ("Train Epoch: 3 [640/60000 (1%)]\tLoss: 0.41", "Loss", 0.41, 3),
        ("Test set: Average loss: 0.41, Accuracy: 98/100", "Average loss", 0.41, 1),
        ("Epoch 3: train loss: 0.5, val loss: 0.41", "val loss", 0.41, 3),
        ("epoch=3 val_accuracy=0.41", "val_accuracy", 0.41, 3),
        ("val_loss 0.41", "val_loss", 0.41, 1),
        ("[3]\tvalid_0's l2: 0.41", "valid_0's l2", 0.41, 3),
        ("step 3, it's loss > 0.41", "it's loss", 0.41, 3),
        ("step 500: val_loss=0.41", "val_loss", 0.41, 1),
    ],
)
def test_the_first_key_that_is_named_reads_the_value(
    line: str, name: str, value: float, step: int
) -> None:
    shown, told_name, pattern = told("loading", line)[0]
    assert (shown, told_name) == (line, name)
    assert pattern is None or _metric_pattern(pattern) == pattern
    found = [m for m in MetricReader(name, pattern, 0).read(line) if m.name == name]
    assert found == [(name, value, step)]


@pytest.mark.parametrize("line", ["hello", "loading 3 files", "epochs: 5", "", "x" * 9000 + " 0.4"])
def test_a_line_without_a_metric_is_not_shown(line: str) -> None:
    assert advice([line], "val_loss") == ""


TABLES = {
    "fastai": ("epoch   train_loss  val_loss  time", "3       0.512000    0.410000  00:04"),
    "YOLO": ("  Epoch  GPU_mem  val_loss  cls", "    3/10    2.31G    0.41    1.2"),
    "CSV": ("epoch,val_loss,accuracy", "3,0.41,0.9"),
    "markdown": ("| epoch | val_loss |", "| 3 | 0.41 |"),
    "rich": ("\u2503 step \u2503 val_loss \u2503", "\u2502 3    \u2502 0.41     \u2502"),
}


@pytest.mark.parametrize("table", TABLES)
def test_a_pattern_is_named_that_reads_the_column_of_a_table(table: str) -> None:
    header, row = TABLES[table]
    ((shown, name, pattern),) = told(header, row, "3 files of 0.7 GB read")[:1]
    assert (shown, name) == (row.strip(), "val_loss")
    assert pattern is not None
    assert _metric_pattern(pattern) == pattern
    assert MetricReader("val_loss", pattern, 0).read(row) == [("val_loss", 0.41, 3)]
    assert MetricReader("val_loss", pattern, 0).read(header) == []


def test_lines_that_differ_by_their_numbers_are_shown_once() -> None:
    lines = [f"epoch {e} | val loss {1 / e:.3f}" for e in (1, 2, 3)]
    assert [line for line, _, _ in told(*lines)] == [lines[-1]]


@pytest.mark.parametrize("piece", ["a", "a ", "a b c ", "(", "1.", " ", "a.", "epoch 1 a b "])
def test_advice_on_a_hostile_line_is_bounded(piece: str) -> None:
    text = advice([piece * (65_536 // len(piece))] * 50, "val_loss")
    assert len(text) < 10_000
