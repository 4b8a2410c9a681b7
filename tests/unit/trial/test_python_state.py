"""State that the user's own code holds: found by the way to it, read and put back."""

from __future__ import annotations

import pickle
import random
from argparse import Namespace
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.trial.keras import python_state
from hermes_ops.trial.keras.python_state import ReachableState, is_plain, is_small, reachable

seen: list[float] = []
count = 0
chance = np.random.default_rng(1)


class Meter:
    def __init__(self) -> None:
        self.values: list[float] = []
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.values.append(value)
        self.sum += value


class Own:
    """A callback in the manner of a user."""

    def __init__(self, log: Path) -> None:
        self.meter, self.order, self.log = Meter(), random.Random(2), open(log, "w")  # noqa: SIM115

    def on_epoch_end(self) -> float:
        global count  # noqa: PLW0603 - what a script does
        count += 1
        value = float(chance.random()) + self.order.random()
        self.meter.add(value)
        seen.append(value)
        self.log.write(f"{value}\n")
        return value


def closure() -> Callable[[], tuple[int, list[int], set[int]]]:
    calls, past, once = 0, deque([0]), {0}

    def call() -> tuple[int, list[int], set[int]]:
        nonlocal calls
        calls += 1
        past.append(calls)
        once.add(calls)
        return calls, list(past), set(once)

    return call


def found(*roots: Any) -> ReachableState:
    named = [(f"callback/{number}", root) for number, root in enumerate(roots)]
    return reachable(named, lambda thing: type(thing).__name__ == "Variable")


def kept(state: ReachableState) -> dict[str, Any]:
    restored: dict[str, Any] = pickle.loads(pickle.dumps(state.read()))
    return restored


def test_a_callback_goes_on_with_its_numbers_its_objects_and_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    own, call = Own(log), closure()
    own.on_epoch_end(), call()
    saved = kept(found(own, call))
    expected = [own.on_epoch_end(), own.on_epoch_end()], call(), list(seen), count
    own.log.close()
    text = log.read_text()

    again, call_again = Own(log), closure()
    seen.append(99.0)
    found(again, call_again).write(saved)
    assert ([again.on_epoch_end(), again.on_epoch_end()], call_again(), seen, count) == expected
    again.log.close()
    assert log.read_text() == text
    assert again.meter.values == own.meter.values
    assert again.meter.sum == own.meter.sum


def test_a_list_that_others_hold_too_is_changed_in_place() -> None:
    held = seen
    saved = kept(found(Own.on_epoch_end))
    seen.extend([1.0, 2.0])
    found(Own.on_epoch_end).write(saved)
    assert held is seen
    assert seen == next(v for k, v in saved.items() if k.endswith(":seen"))


def test_what_a_function_only_reads_is_left_as_the_new_process_has_it() -> None:
    started_s = 1.0

    def elapsed() -> float:
        return started_s

    saved = kept(found(elapsed))
    started_s = 5.0
    found(elapsed).write(saved)
    assert elapsed() == 5.0


def test_variables_are_found_wherever_they_hang_and_each_once() -> None:
    class Variable:
        pass

    first, second = Variable(), Variable()

    def loss() -> tuple[object, object]:
        return first, second

    variables = found(loss, {"again": [first]}).variables
    assert sorted(map(id, variables.values())) == sorted(map(id, (first, second)))
    assert list(variables) == list(found(loss, {"again": [first]}).variables)


def test_an_endless_object_is_not_walked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_state, "_MOST_OBJECTS", 500)

    class Endless:
        @property
        def __dict__(self) -> dict[str, Any]:  # type: ignore[override]  # a new child each time
            return {"child": Endless()}

    assert found(Endless()).variables == {}


@given(
    st.recursive(st.integers() | st.text() | st.floats(allow_nan=False), st.lists, max_leaves=40)
)
def test_what_is_plain_is_the_same_after_pickling(value: object) -> None:
    assert is_plain(value)
    assert is_small(value)
    assert pickle.loads(pickle.dumps(value)) == value


@pytest.mark.parametrize(
    ("value", "small"),
    [
        (np.zeros(300_000), False),
        (np.arange(300_000), True),
        (np.arange(3_000_000), False),
        (list(range(99_000)), True),
        (list(range(101_000)), False),
        ([[0] * 1_000] * 1_000, False),
        ("text", True),
    ],
)
def test_data_are_not_kept_with_every_checkpoint_but_an_order_of_samples_is(
    value: object, small: bool
) -> None:
    assert is_small(value) is small


def test_an_object_that_cannot_be_kept_fails_nothing_and_is_told() -> None:
    class Variable:
        pass

    class Broken(random.Random):
        def getstate(self) -> tuple[Any, ...]:
            raise OSError("no state")

    state = found({"broken": Broken(), "whole": random.Random(1), "variable": Variable()})
    assert list(state.read()) == ["callback/0/whole"]
    assert state.failed == {"callback/0/broken": "OSError('no state')"}


def test_arrays_in_a_dictionary_are_put_back_whatever_the_new_process_has_there() -> None:
    best: dict[str, Any] = {"weights": np.ones(3), "loss": 0.4}

    def note() -> dict[str, Any]:
        return best

    saved = kept(found(note))
    best["weights"], best["loss"] = np.zeros(3), 0.4
    state = found(note)
    state.write(saved)
    assert best["weights"].tolist() == [1.0, 1.0, 1.0]
    assert state.failed == {}


def test_a_state_that_is_put_back_twice_is_the_same_whatever_has_come_in_between() -> None:
    begun: dict[str, list[int]] = {"epochs": [0, 1]}

    def begin() -> None:
        begun["epochs"].append(2)

    saved = kept(found(begin))
    begun.clear()
    for _ in range(2):
        found(begin).write(saved)
        assert begun == {"epochs": [0, 1]}
        begin()


class TrackedList(list[Any]):
    """As the list that a Keras model makes of one that is set on it."""

    __module__ = "keras.src.utils.tracking"


class Network:
    """A model in the manner of a user; Keras replaces its lists by its own."""

    def __init__(self) -> None:
        self.seen = TrackedList([TrackedList([0.5])])
        self.layers = TrackedList([object()])


def test_a_list_that_keras_tracks_on_a_model_is_kept_and_stays_the_same_object() -> None:
    saved = kept(reachable([("model", Network())], lambda _: False))
    later = Network()
    seen = later.seen
    seen.clear()
    reachable([("model", later)], lambda _: False).write(saved)
    assert later.seen is seen
    assert seen == [[0.5]]
    assert len(later.layers) == 1


class Settings:
    """As a script keeps its settings, and numbers among them."""

    best, folder, rate = 9.0, "runs/10-30", 0.1
    history: ClassVar[list[float]] = []

    @classmethod
    def note(cls, loss: float) -> None:
        cls.history.append(loss)
        cls.rate = loss / 10


class Plain:
    wait, best = 0, 9.0


args = Namespace(best=9.0, seed=1)
plain = Plain()
settings_module: Any = ModuleType("settings_of_a_user")
vars(settings_module).update(__file__=__file__, steps=0, width=16)
counts: Counter[str] = Counter()


class Setting:
    """A callback that sets attributes of objects that are not its own."""

    calls = 0

    def __init__(self) -> None:
        Settings.folder = "runs/11-45"

    def on_epoch_end(self, loss: float) -> None:
        Settings.note(loss)
        Settings.best = args.best = plain.best = min(Settings.best, loss)
        plain.wait += 1
        settings_module.steps += 8
        self.__class__.calls += 1
        counts["epochs"] += 1


def test_attributes_of_classes_namespaces_and_modules_that_a_callback_sets_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for thing, name in (
        (Settings, "best"), (Settings, "folder"), (Settings, "rate"), (args, "best"),
        (plain, "best"), (plain, "wait"), (settings_module, "steps"), (Setting, "calls"),
    ):  # fmt: skip
        monkeypatch.setattr(thing, name, getattr(thing, name))
    own = Setting()
    own.on_epoch_end(0.5)
    saved = kept(found(own))
    Settings.best, Settings.rate, Settings.folder = 9.0, 0.3, "runs/12-50"
    args.best, args.seed, plain.best, plain.wait = 9.0, 2, 9.0, 0
    vars(settings_module).update(steps=0, width=32)
    Setting.calls = 0
    counts.clear()
    Settings.history.clear()
    found(own).write(saved)
    assert (Settings.best, Settings.folder) == (0.5, "runs/12-50")
    assert (Settings.rate, Settings.history) == (0.05, [0.5])
    assert (args.best, args.seed, plain.best, plain.wait) == (0.5, 2, 0.5, 1)
    assert vars(settings_module)["steps"] == 8
    assert (vars(settings_module)["width"], Setting.calls, dict(counts)) == (32, 1, {"epochs": 1})
