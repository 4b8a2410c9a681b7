"""Numbers as programs print them: exact, or refused, never something else."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.trial.output.metric_reader import MetricReader
from hermes_ops.trial.output.numerals import numeral, whole_numeral

FLOATS = st.floats(allow_nan=False, allow_infinity=False)

# How a library prints a value: the whole line, and the number that stands in it. `{}` is the name.
SPELLINGS = {
    "python": lambda x: (f"epoch=3 {{}}={x!r}", x),
    "python, two digits": lambda x: (f"epoch=3 {{}}={x:.2f}", float(f"{x:.2f}")),
    "python, an exponent": lambda x: (f"epoch=3 {{}}={x:.3e}, done", float(f"{x:.3e}")),
    "python, a sentence": lambda x: (f"Epoch 3: {{}}: {x:.4f}.", float(f"{x:.4f}")),
    "python, thousands": lambda x: (f"epoch=3 {{}}={x:,.2f}", float(f"{x:.2f}")),
    "python, thousands by _": lambda x: (f"epoch=3 {{}}={x:_.2f}", float(f"{x:.2f}")),
    "python, a share": lambda x: (f"epoch=3 {{}}={x:.1f}%", float(f"{x:.1f}")),
    "python, seconds": lambda x: (f"epoch=3 {{}}={x:.3f}s lr=1", float(f"{x:.3f}")),
    "python, a dictionary": lambda x: (f"{{{{'epoch': 3, '{{}}': {x!r}}}}}", x),
    "json": lambda x: (f'{{{{"epoch": 3, "{{}}": {x!r}}}}}', x),
    "numpy 2": lambda x: (f"{{{{'epoch': 3, '{{}}': np.float64({x!r})}}}}", x),
    "numpy 2, 32 bits": lambda x: (f"{{{{'{{}}': np.float32({x!r}), 'epoch': 3}}}}", x),
    "pytorch": lambda x: (f"epoch=3 {{}}=tensor({x:.4f})", float(f"{x:.4f}")),
    "pytorch on a GPU": lambda x: (
        f"epoch 3 {{}}: tensor({x:.4e}, device='cuda:0', grad_fn=<AddBackward0>)",
        float(f"{x:.4e}"),
    ),
    "tensorflow": lambda x: (
        f"epoch=3 {{}}=<tf.Tensor: shape=(), dtype=float32, numpy={x!r}>", x
    ),
    "tensorflow, printed": lambda x: (
        f"epoch=3 {{}}=tf.Tensor({x!r}, shape=(), dtype=float64)", x
    ),
    "jax": lambda x: (f"epoch=3 {{}}=Array({x!r}, dtype=float32, weak_type=True)", x),
    "keras": lambda x: (
        f"Epoch 3: 5/5 - 0s - 9ms/step - accuracy: 0.9000 - {{}}: {x:.4f}", float(f"{x:.4f}")
    ),
    "lightning": lambda x: (
        f"Epoch 3: 100%|█████| 10/10 [00:00<00:00, 50.12it/s, v_num=0, {{}}={x:.3f}]",
        float(f"{x:.3f}"),
    ),
    "transformers": lambda x: (
        f"{{{{'loss': 0.5, 'learning_rate': 5e-05, '{{}}': {x!r}, 'epoch': 3.0}}}}", x
    ),
    "transformers 5": lambda x: (f"{{{{'{{}}': '{x!r}', 'epoch': '3'}}}}", x),
    "ultralytics": lambda x: (
        f"{{{{'epoch': 3, 'metrics/mAP50(B)': 0.5, '{{}}': np.float64({x!r})}}}}", x
    ),
    "xgboost": lambda x: (f"[3]\ttrain-rmse:0.50000\t{{}}:{x:.5f}", float(f"{x:.5f}")),
    "xgboost, folds": lambda x: (f"[3]\t{{}}:{x:.5f}+0.01230", float(f"{x:.5f}")),
    "lightgbm": lambda x: (f"[3]\ttraining's l2: 0.5\t{{}}: {x:g}", float(f"{x:g}")),
}  # fmt: skip
NAMES = ["val_loss", "val/mAP@0.5", "metrics/mAP50-95(B)", "eval loss", "top-1 %", "valid_0's l2"]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=str)
@given(FLOATS, st.sampled_from(NAMES))
def test_a_value_comes_back_as_it_was_printed(spelling: str, x: float, name: str) -> None:
    line, printed = SPELLINGS[spelling](x)
    if "'" in name and "{'" in line.replace("{{", "{"):
        name = "val_loss"  # Python would quote such a key in another way
    line = line.format(name)
    reader = MetricReader(name, None, 0)
    found = [m for m in reader.read(line) if m.name == name]
    assert [(m.value, m.step) for m in found] == [(printed, 3)], reader.notes


@pytest.mark.parametrize(
    "text",
    [
        *("0,41", "12,5", "9,500", "9.500,00", "1.234.567", "0,412.5", "1,23,456.0", "0.41,0.42"),
        *("9 500.00", "9\u00a0500.00", "9\u202f500", "9'500.00", "0\u00b741", "1.2.3", "0x1F"),
        *("0.41ms", "1.2k", "3M", "1e", "0:10:21", "2026-01-02", "3/10", "3 / 10", "1/2"),
        *("0.5 -> 0.4", "0.5-->0.4", "0.5 \u2192 0.4", "1.5\u00d710^-3", "1.5 x 10^-3", "2*3"),
        *("tensor([0.41, 0.3])", "tensor(0.41, 0.3)", "array([0.4 0.5])", "np.float64(0,41)"),
        *("<tf.Tensor: shape=(2,), dtype=float32, numpy=array([1., 2.])>", "'0,41'", "0.41-0.02"),
    ],
)
def test_what_may_be_another_number_is_refused_loudly(text: str) -> None:
    assert (numeral(text, 0).value, bool(numeral(text, 0).refusal)) == (None, True)
    reader = MetricReader("val_loss", None, 0)
    assert reader.read(f"epoch=1 val_loss={text} lr=0.1 ") == [("lr", 0.1, 1)]
    assert f"epoch=1 val_loss={text}" in " ".join(reader.notes.values())


@pytest.mark.parametrize("text", ["[0.41]", "(0.4, 0.5)", "log(0.3)", "~0.3", "\u0664\u0662", "$5"])
def test_a_value_of_the_objective_that_is_no_number_is_said(text: str) -> None:
    reader = MetricReader("val_loss", None, 0)
    assert reader.read(f"epoch=1 val_loss={text}") == []
    assert reader.notes


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("0.33.", 0.33), ("0.41s", 0.41), ("85%", 85.0), ("85 %", 85.0), ("0.5!", 0.5)),
        *(("0.5*", 0.5), ("0.5 *", 0.5), ("0.5\u2193", 0.5)),
        *(("5.", 5.0), (".5", 0.5), ("-1E+3", -1000.0), ("\u22120.5", -0.5), ("1_000", 1000.0)),
        *(("1,234,567", 1234567.0), ("-9,500.25", -9500.25), ("0.41\u00b10.02", 0.41)),
        *(("tensor([0.41])", 0.41), ("Decimal('0.41')", 0.41), ("torch.tensor(1.)", 1.0)),
        *(("inf", math.inf), ("-Infinity", -math.inf), ("np.float64(inf)", math.inf)),
    ],
)
def test_other_spellings_of_one_number_are_read(text: str, value: float) -> None:
    assert numeral(text, 0).value == value
    assert numeral(f"{text} x=1", 0).value == value


def test_nan_is_a_value_and_words_that_begin_like_it_are_none() -> None:
    assert math.isnan(numeral("nan,", 0).value or 0.0)
    assert math.isnan(numeral("tensor(nan, device='cuda:0')", 0).value or 0.0)
    assert numeral("nano", 0).value is numeral("info", 0).value is None


def test_what_a_pattern_captures_is_read_whole() -> None:
    assert whole_numeral(" 9,500.00, ").value == 9500.0
    assert whole_numeral("0.41 of 3").value is None
    reader = MetricReader("loss", r"L (?P<value>.+?)$", 0)
    assert [reader.read(f"L {text}") for text in ("0,41", "x", "0.5;")] == [
        [],
        [],
        [("loss", 0.5, 1)],
    ]
    assert "L 0,41" in " ".join(reader.notes.values())


def digits(count: int) -> str:
    return "1" * count


@pytest.mark.parametrize(
    "piece",
    [
        *("1", "1,", "1,000", "1_", "1.", "a", "a.", "a=", "a:", "a=1,", "=", "' ", "'a'", "'a':"),
        *(
            "val_loss",
            "val_loss=",
            "val_loss: ",
            "epoch ",
            "epoch=1 ",
            "{",
            '{"',
            '{"a":',
            "[",
            "(",
        ),
        *("tensor(", "np.", "<tf.Tensor: ", "numpy=", " ", "\t", "val ", "->", "1 ", "\u00a01"),
    ],
)
def test_a_hostile_line_is_read_in_bounded_time(piece: str) -> None:
    """A regular expression that backtracks would take hours, not the time limit of a test."""
    line = piece * (65_536 // len(piece))
    for end in ("", "x", "val_loss=1"):
        reader = MetricReader("val_loss", None, 0, others={"val loss": None})
        found = reader.read(f"val_loss={line}{end}")
        assert len({metric.name for metric in found}) == len(found) <= 1000 + 2
