"""Which call of `fit` a resumed script makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from hermes_ops.trial.keras.fit_calls import FitCall, describe_call, fit_number


def call(line: int, *, first: int = 0, epochs: int = 5, text: str = "a", **values: Any) -> FitCall:
    checksum = sum(map(ord, text))
    return FitCall(f"train.py:<module>:{line}", {"train.py": checksum}, values, first, epochs)


FOLDS = [call(9, fold=fold, path=f"{fold}.keras", lr="x") for fold in range(3)]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_script_that_leaves_out_nothing_has_its_calls_in_their_order(number: int) -> None:
    assert fit_number(FOLDS, number, 2, FOLDS[number]) == number


@pytest.mark.parametrize(
    ("known", "complete", "made", "number"),
    [
        ([call(5), call(9)], 1, call(9), 1),
        ([call(5), call(9)], 2, call(9), 1),
        ([call(5), call(9)], 2, call(12), 2),
        ([call(5), call(9)], 1, call(12), 1),
        (FOLDS, 2, FOLDS[2], 2),
        (FOLDS, 3, FOLDS[1], 1),
        (FOLDS, 3, call(9, fold=3, path="3.keras", lr="x"), 3),
        (FOLDS, 2, call(9, fold=4, path="4.keras", lr="x"), None),
        ([call(9, x="a1"), call(9, x="b2"), call(9, x="c3")], 2, call(9, x="c3"), 2),
    ],
)
def test_a_script_that_leaves_out_complete_calls_goes_on_with_the_one_that_it_makes(
    known: list[FitCall], complete: int, made: FitCall, number: int | None
) -> None:
    assert fit_number(known, 0, complete, made) == number


@pytest.mark.parametrize(
    "made",
    [
        call(7, text="an edited script"),
        call(7, first=3),  # the rest of the first one, from a file of the script's own
        call(5, now=1_234),
    ],
)
def test_a_call_that_only_looks_like_another_one_is_the_next(made: FitCall) -> None:
    assert fit_number([call(5, now=1), call(9)], 0, 2, made) == 0


def test_a_counter_that_starts_again_does_not_outvote_the_fold_and_its_file() -> None:
    folds = [call(9, fold=k, path=f"{k}.keras", trained=k) for k in range(3)]
    assert fit_number(folds, 0, 2, call(9, fold=2, path="2.keras", trained=0)) == 2


@dataclass
class Batches:
    """As a `PyDataset`: to read a batch may cost time and draw random numbers."""

    read: list[Any] = field(default_factory=list)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: Any) -> Any:
        self.read.append(index)


def test_data_that_are_made_when_they_are_asked_for_are_not_asked_for() -> None:
    batches = Batches()
    assert "x" not in describe_call({"x": batches}).values
    assert batches.read == []


def test_calls_of_a_loop_differ_in_its_variables_and_data_and_in_nothing_else() -> None:
    rows, calls = np.arange(12.0).reshape(6, 2), []
    for fold in range(2):
        calls.append(describe_call({"x": rows[fold:], "epochs": 3}))
    first, second = calls
    assert (first.place, first.sources, first.epochs) == (second.place, second.sources, 3)
    differing = {name for name in first.values if first.values[name] != second.values[name]}
    assert differing == {"0.fold", "x"}
    assert first.place.startswith("test_fit_calls.py:test_calls_of_a_loop")
