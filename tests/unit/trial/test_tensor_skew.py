"""How unevenly a model's weights are spread over its tensors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hermes_ops.trial.files import Folder, write_json
from hermes_ops.trial.keras.training_state import tensor_skew
from hermes_ops.trial.segment_records import continued_status


def model(*shapes: tuple[int, ...]) -> SimpleNamespace:
    return SimpleNamespace(trainable_weights=[SimpleNamespace(shape=shape) for shape in shapes])


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (((3, 4), (2, 2), (4,)), 12 / 20),
        (((5,),), 1.0),
        (((), (1,)), 0.5),
        ((), None),
        (((0,),), None),
    ],
)
def test_the_skew_is_the_largest_tensors_share(
    shapes: tuple[tuple[int, ...], ...], expected: float | None
) -> None:
    assert tensor_skew(model(*shapes)) == expected


def test_a_resumed_trial_still_knows_its_skew(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = Folder(tmp_path_factory.mktemp("trial"))
    assert continued_status(folder, 1, has_checkpoint=False).tensor_skew is None
    write_json(folder.status, {"epoch": 1, "tensor_skew": 0.7})
    assert continued_status(folder, 2, has_checkpoint=True).document()["tensor_skew"] == 0.7
