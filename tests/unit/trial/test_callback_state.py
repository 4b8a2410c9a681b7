"""What a checkpoint holds of the callbacks of a `fit`, and how it is put back."""

from __future__ import annotations

import enum
import pickle
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hermes_ops.trial.keras.training_state import given_data, read_callback, write_callback


class Callback(SimpleNamespace):
    """A callback in the manner of a user."""


def kept(callback: Any) -> dict[str, Any]:
    state: dict[str, Any] = pickle.loads(pickle.dumps(read_callback(callback)))
    return state


def test_a_list_that_the_script_holds_too_goes_on_as_one_with_that_of_its_callback() -> None:
    saved = kept(Callback(losses=[0.5, 0.4]))
    losses: list[float] = []
    callback = Callback(losses=losses)
    write_callback(callback, saved)
    callback.losses.append(0.3)
    assert losses == [0.5, 0.4, 0.3]


def test_what_a_callback_appends_at_the_beginning_of_its_epoch_is_there_once() -> None:
    saved = kept(Callback(begun=[0, 1], by_phase={"warm": [0, 1]}))
    callback = Callback(begun=[], by_phase={})
    for _ in range(2):  # when the fit begins, and in its first epoch, after the callbacks
        write_callback(callback, saved)
        assert (callback.begun, callback.by_phase) == ([0, 1], {"warm": [0, 1]})
        callback.begun.append(2)
        callback.by_phase["warm"].append(2)


def test_large_weights_of_a_callback_are_put_back_in_its_list() -> None:
    weights = [np.ones((600, 600)), np.zeros(3)]
    callback = Callback(best=[np.zeros(3), np.ones(2)])
    write_callback(callback, kept(Callback(best=weights)))
    assert all(np.array_equal(a, b) for a, b in zip(callback.best, weights, strict=True))


def test_a_function_that_the_resumed_script_defines_later_fails_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = ModuleType("script_of_a_user")
    exec("def warm(): pass\ndef cold(): pass", vars(script))
    monkeypatch.setitem(sys.modules, script.__name__, script)
    data = pickle.dumps(read_callback(Callback(schedule=script.cold)))
    del script.cold
    saved = pickle.loads(data)
    callback = Callback(schedule=script.warm)
    write_callback(callback, saved)
    assert callback.schedule is script.warm


def test_a_function_that_a_callback_has_chosen_is_put_back() -> None:
    callback = Callback(better=np.greater, read=read_callback)
    write_callback(callback, kept(Callback(better=np.less, read=write_callback)))
    assert callback.better is np.less
    assert callback.read is write_callback


class Phase(enum.Enum):
    WARM, MAIN = 1, 2


def test_a_member_of_an_enumeration_is_put_back() -> None:
    callback = Callback(phase=Phase.WARM)
    write_callback(callback, kept(Callback(phase=Phase.MAIN)))
    assert callback.phase is Phase.MAIN


class History(Callback):
    """As the callback that Keras adds."""


class Tensor:
    """As a tensor or a variable of a framework."""

    def __init__(self, value: float | list[float]) -> None:
        self.value = value

    def numpy(self) -> Any:
        return np.float32(self.value) if isinstance(self.value, float) else np.array(self.value)


def test_a_history_is_kept_though_callbacks_have_added_tensors_to_it() -> None:
    history = {"loss": [0.5, 0.4], "lr": [Tensor(0.5), Tensor([0.25, 1.0])], "odd": [object(), 1]}
    callback = History(history={})
    write_callback(callback, kept(History(history=history)))
    first, second = callback.history.pop("lr")
    assert (first, second.tolist()) == (0.5, [0.25, 1.0])
    assert callback.history == {"loss": [0.5, 0.4], "odd": [None, 1]}


def test_given_data_that_a_callback_was_given_are_not_kept_and_what_it_has_changed_is() -> None:
    data, sums = np.ones((600, 600)), np.zeros((600, 600))
    callback = Callback(data=data, sums=sums, best=None)
    given = given_data(callback)
    sums[0, 0], callback.best = 1.0, [np.ones((600, 600))]
    saved = read_callback(callback, given)
    assert sorted(saved) == ["best", "sums"]
    later = Callback(data=data, sums=np.zeros((600, 600)), best=None)
    write_callback(later, saved)
    assert later.sums[0, 0] == 1.0
    assert later.best[0].all()


def test_a_path_that_the_script_names_anew_is_not_that_of_the_segment_before() -> None:
    callback = Callback(filepath="runs/10-30/best.keras", phase="warm")
    given = given_data(callback)
    callback.phase = "cold"
    saved = read_callback(callback, given)
    later = Callback(filepath="runs/11-45/best.keras", phase="warm")
    write_callback(later, saved)
    assert (later.filepath, later.phase) == ("runs/11-45/best.keras", "cold")
