"""What goes on at another number of processes: the batch, the learning rate, whose state."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.trial.group import GroupError, TrialRank
from hermes_ops.trial.keras.callback_files import match_callbacks
from hermes_ops.trial.keras.legacy_keras import tf_keras_as_keras
from hermes_ops.trial.keras.ranks import (
    EpochVote,
    SingleProcess,
    fit_ranks,
    may_be_resized,
    rank_parts,
    refuse_keras_3,
    started_horovod,
)
from hermes_ops.trial.keras.resize import (
    EpochShape,
    FitRate,
    SizeChange,
    arrays_of_rank,
    fingerprints,
    follows_schedule,
    objects_of_rank,
    rate_scaling,
    read_rate,
    resized_callbacks,
    resized_python,
    resumed_batch,
    size_dependent,
)

# -- the batch -------------------------------------------------------------------------------------


def resumed(batch: int, before: int, now: int, *batches: int | None) -> int:
    return resumed_batch(batch, SizeChange(before, now), *(EpochShape(n, 16) for n in batches))


def test_an_epoch_goes_on_at_the_same_share_of_its_data() -> None:
    assert resumed(6, 2, 3, 12, 8) == 4
    assert resumed(5, 2, 3, 12, 8) == 3
    assert resumed(4, 3, 1, 8, 24) == 12
    assert resumed(12, 1, 3, None, None) == 4


def test_no_batch_is_skipped_that_an_epoch_of_unknown_length_may_lack() -> None:
    assert resumed(4, 3, 1, None, None) == 4


def test_at_the_same_size_the_batch_is_the_same() -> None:
    assert resumed(7, 2, 2, None, None) == 7


def test_batches_of_another_size_count_by_their_samples() -> None:
    shapes = EpochShape(12, 16), EpochShape(6, 32)
    assert resumed_batch(6, SizeChange(2, 2), *shapes) == 3
    assert resumed_batch(6, SizeChange(2, 4), EpochShape(12, 32), EpochShape(12, 16)) == 6


def test_one_process_with_batches_of_another_size_goes_on_at_the_same_share() -> None:
    alone = SizeChange(1, 1)
    assert resumed_batch(30, alone, EpochShape(40, 4), EpochShape(10, 16)) == 7
    assert resumed_batch(30, alone, EpochShape(40), EpochShape(10)) == 7
    assert resumed_batch(7, alone, EpochShape(10), EpochShape(40)) == 28
    assert resumed_batch(39, alone, EpochShape(40, 4), EpochShape(10, 16)) == 9
    assert resumed_batch(30, alone, EpochShape(None, 4), EpochShape(None, 16)) == 7


def test_where_the_data_are_not_divided_the_batch_stays() -> None:
    assert resumed(7, 1, 2, 10, 10) == 7


@given(
    batch=st.integers(0, 500),
    before=st.integers(1, 16),
    now=st.integers(1, 16),
    batches=st.integers(1, 500),
)
def test_a_batch_is_left_to_train_in_the_epoch(
    batch: int, before: int, now: int, batches: int
) -> None:
    assert 0 <= resumed(batch, before, now, batch + 1, batches) < batches


# -- the learning rate -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "by_script", "factor", "word"),
    [
        ("script", (0.1, 0.2), 2.0, ""),
        ("script", (0.1, 0.1), 2.0, "does not multiply"),
        ("script", (0.1, 0.1 * 2**0.5), 2**0.5, ""),
        ("script", (None, 0.1), 2.0, ""),
        ("hermes", (0.1, 0.1), 2.0, ""),
        ("hermes", (0.1, 0.2), 2.0, "set it to script"),
        ("off", (0.1, 0.2), 1.0, ""),
    ],
)
def test_the_rate_follows_the_linear_rule_or_the_scripts_own(
    mode: str, by_script: tuple[float | None, float], factor: float, word: str
) -> None:
    scaling = rate_scaling(mode, SizeChange(2, 4), *by_script)
    assert scaling.factor == pytest.approx(factor)
    assert word in scaling.notice
    assert bool(word) == bool(scaling.notice)


@given(
    sizes=st.lists(st.integers(1, 16), min_size=2, max_size=8),
    scales=st.booleans(),
    mode=st.sampled_from(["script", "hermes"]),
)
def test_whatever_the_sizes_were_the_rate_depends_on_the_first_and_the_last(
    sizes: list[int], scales: bool, mode: str
) -> None:
    rate = 0.05
    for before, now in pairwise(sizes):
        by_script = (0.05 * before, 0.05 * now) if scales else (0.05, 0.05)
        rate *= rate_scaling(mode, SizeChange(before, now), *by_script).factor
    assert rate == pytest.approx(0.05 * sizes[-1] / sizes[0])


class Optimizer:
    def __init__(self, rate: Any) -> None:
        self.learning_rate = rate


class LearningRateSchedule:
    """Named as that of Keras."""


class Model:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def train_step(self) -> None:
        """Stand for that of Keras."""

    train_step.__module__ = "tf_keras.src.engine.training"


class Runtime:
    def __init__(self) -> None:
        self.scaled_optimizers: list[Any] = []
        self.printed: list[str] = []

    def say_once(self, text: str) -> None:
        self.printed.append(text)


def fit_rate(
    optimizer: Optimizer, change: SizeChange, runtime: Runtime, header: dict[str, Any]
) -> FitRate:
    return FitRate(Model(optimizer), runtime, change, header)  # type: ignore[arg-type]


def test_a_rate_restored_twice_is_scaled_once() -> None:
    optimizer = Optimizer(0.2)
    header = {"rate": 0.05, "rate_by_script": 0.1}
    rate = fit_rate(optimizer, SizeChange(1, 2), Runtime(), header)
    rate.restore()
    rate.restore()
    assert optimizer.learning_rate == pytest.approx(0.1)
    assert rate.header() == {"rate": pytest.approx(0.1), "rate_by_script": 0.2}


def test_hermes_multiplies_the_rate_of_each_optimizer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_SCALE_LEARNING_RATE", "hermes")
    optimizer, runtime = Optimizer(0.05), Runtime()
    fit_rate(optimizer, SizeChange(4, 4), runtime, {}).begin()
    fit_rate(optimizer, SizeChange(4, 4), runtime, {}).begin()
    assert optimizer.learning_rate == pytest.approx(0.2)
    resumed = Optimizer(0.05)
    fit_rate(resumed, SizeChange(4, 4), runtime, {"rate": 0.2}).begin()
    assert resumed.learning_rate == 0.05, "it is restored, not multiplied"


class Rateless:
    """An optimizer without a learning rate, as Keras 2.11 and later has it."""

    @property
    def learning_rate(self) -> float:
        raise ValueError("Missing learning rate, please set self.learning_rate")


def test_an_optimizer_without_a_rate_trains_as_it_is() -> None:
    rate = FitRate(Model(Rateless()), Runtime(), SizeChange(1, 1), {})  # type: ignore[arg-type]
    rate.begin()
    rate.restore()
    assert rate.header() == {"rate": None, "rate_by_script": None}


@pytest.mark.parametrize("mode", ["script", "hermes"])
def test_the_optimizers_of_earlier_fits_do_not_stay_in_memory(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERMES_SCALE_LEARNING_RATE", mode)
    runtime = Runtime()
    earlier: list[weakref.ref[Optimizer]] = []
    for _ in range(3):
        optimizer = Optimizer(0.1)
        fit_rate(optimizer, SizeChange(2, 2), runtime, {"rate": 0.1}).restore()
        earlier.append(weakref.ref(optimizer))
    del optimizer
    gc.collect()
    assert [one() for one in earlier] == [None, None, None]


def test_a_schedule_is_not_touched_and_that_is_said() -> None:
    optimizer, runtime = Optimizer(0.05), Runtime()
    optimizer._learning_rate = LearningRateSchedule()  # type: ignore[attr-defined]
    assert follows_schedule(optimizer)
    assert read_rate(optimizer) is None
    fit_rate(optimizer, SizeChange(1, 2), runtime, {"rate": 0.05}).restore()
    assert optimizer.learning_rate == 0.05
    assert "schedule" in runtime.printed[0]


# -- callbacks and objects -------------------------------------------------------------------------


class Early:
    def __init__(self, **state: Any) -> None:
        vars(self).update(state)


class Logger(Early):
    pass


def saved(*callbacks: Early) -> list[dict[str, Any]]:
    return [{"type": type(c).__name__, "state": dict(vars(c))} for c in callbacks]


def test_a_callback_gets_the_state_of_the_same_one_of_its_type() -> None:
    first, second = Early(), Early()
    pairs = list(match_callbacks([Logger(), first, second], saved(Early(n=1), Early(n=2))))
    assert [(callback is first, entry["state"]["n"]) for callback, entry in pairs] == [
        (True, 1),
        (False, 2),
    ]


def test_what_the_script_sets_by_the_size_is_not_restored_at_another_one() -> None:
    at_two = fingerprints(saved(Early(steps=60, wait=0)), {"model:n": [2]})
    at_three = fingerprints(saved(Early(steps=40, wait=0)), {"model:n": [2]})
    dependent = size_dependent(at_two, at_three)
    callback = Early(steps=40, wait=0)
    found = list(resized_callbacks([callback], saved(Early(steps=60, wait=3)), dependent))
    assert found == [(callback, {"wait": 3})]
    assert "model:n" not in dependent


def test_horovods_own_callbacks_begin_anew_at_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    callback = Early(broadcast_done=False)
    monkeypatch.setattr(Early, "__module__", "horovod._keras.callbacks")
    assert list(resized_callbacks([callback], saved(Early(broadcast_done=True)), frozenset())) == []


def test_what_the_data_hold_is_not_restored_at_another_size() -> None:
    python = {"x:shard": [1], "model:n": [2], "callback/0:m": [3], "model:size": [4]}
    dependent = frozenset({"model:size"})
    assert resized_python(python, dependent, True) == {"model:n": [2], "callback/0:m": [3]}
    assert resized_python(python, dependent, False) == {"model:n": [2]}


# -- what each rank has of its own -----------------------------------------------------------------

SAVED = {
    "random": "leader's",
    "python": "leader's",
    "pipeline": None,
    "ranks": [{}, {"random": "second's", "python": "second's", "arrays": {"k/random/0": 11}}],
}
ARRAYS = {"k/model/0": 1, "k/random/0": 10}


@pytest.mark.parametrize(
    ("rank", "is_same", "random", "python"),
    [
        (0, True, "leader's", "leader's"),
        (0, False, "leader's", "leader's"),
        (1, True, "second's", "second's"),
        (1, False, "second's", "leader's"),
        (2, False, None, "leader's"),
    ],
)
def test_a_rank_goes_on_with_its_own_random_numbers_and_a_new_one_with_new_ones(
    rank: int, is_same: bool, random: str | None, python: str
) -> None:
    objects = objects_of_rank(SAVED, rank, is_same)
    assert (objects["random"], objects["python"]) == (random, python)


def test_variables_that_differ_by_rank_are_those_of_the_rank() -> None:
    assert arrays_of_rank(ARRAYS, SAVED, 0, True) == ARRAYS
    assert arrays_of_rank(ARRAYS, SAVED, 1, True) == {"k/model/0": 1, "k/random/0": 11}
    assert arrays_of_rank(ARRAYS, SAVED, 1, False) == {"k/model/0": 1, "k/random/0": 11}
    assert arrays_of_rank(ARRAYS, SAVED, 2, False) == {"k/model/0": 1}


class Leader(SingleProcess):
    """A leader without followers, that keeps what it has sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def gather(self, value: Any) -> list[Any]:
        self.sent.append(value)
        return [value]


class Follower(SingleProcess):
    """A follower of a leader that sends these values."""

    def __init__(self, leader_sends: list[Any]) -> None:
        self.leader_sends = iter(leader_sends)

    def gather(self, value: Any) -> list[Any]:
        return [next(self.leader_sends), value]


def test_a_follower_sends_only_what_differs_from_the_leader() -> None:
    same, other = np.zeros(3), np.ones(3)
    leader = Leader()
    rank_parts(leader, 0, {"a": same, "b": same}, {})
    follower = Follower([leader.sent[0], {}])
    parts, is_complete = rank_parts(follower, 1, {"a": same, "b": other}, {"random": 1})
    assert is_complete
    assert list(parts[1]["arrays"]) == ["b"]
    assert parts[1]["random"] == 1


# -- one process, and Keras 3 ----------------------------------------------------------------------


def test_one_process_agrees_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = fit_ranks(TrialRank())
    vote, logs = EpochVote(True, False, True), {"loss": 1.0}
    ranks.check(None)
    ranks.average(logs)
    ranks.mark_step()
    ranks.mark_end()
    ranks.leave()
    assert (ranks.agree(vote), ranks.gather(3), logs) == (vote, [3], {"loss": 1.0})
    assert ranks.is_stop_due(asked=True)
    assert not ranks.is_stop_due(asked=False)
    monkeypatch.setenv("HERMES_RESIZE", "epoch")
    assert not ranks.is_stop_due(asked=True)


def test_several_processes_without_horovod_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = fit_ranks(TrialRank(0, 2, "/none"))
    with pytest.raises(GroupError, match="2 copies would train apart"):
        ranks.check(Model(None))
    started = ModuleType("horovod.tensorflow")
    vars(started).update(is_initialized=lambda: True, size=lambda: 1)
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", started)
    with pytest.raises(GroupError, match="2 copies would train apart"):
        ranks.check(Model(None))
    vars(started).update(size=lambda: 2)
    with pytest.raises(GroupError, match="DistributedOptimizer"):
        ranks.check(Model(Optimizer(0.1)))
    assert may_be_resized(TrialRank())


def test_horovod_that_is_being_imported_has_not_been_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", ModuleType("horovod.tensorflow"))
    assert started_horovod() is None


def test_keras_3_is_refused_in_several_processes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_keras_3(TrialRank())
    with pytest.raises(GroupError, match="does not use Horovod"):
        refuse_keras_3(TrialRank(0, 2, "/none"))
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", ModuleType("horovod.tensorflow"))
    with pytest.raises(GroupError, match="Keras 3"):
        refuse_keras_3(TrialRank(0, 2, "/none"))


# -- tf_keras under the name of Keras --------------------------------------------------------------


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "tf_keras"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "backend.py").write_text("constant = 'of Keras 2'")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("tf_keras", "tf_keras.backend", "keras", "keras.backend"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("packages")
def test_keras_means_tf_keras_while_horovod_is_imported_and_not_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    third = ModuleType("keras")
    monkeypatch.setitem(sys.modules, "keras", third)
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    with tf_keras_as_keras():
        from keras import backend

        assert backend.constant == "of Keras 2"
    assert sys.modules["keras"] is third
    assert "keras.backend" not in sys.modules


@pytest.mark.usefixtures("packages")
def test_keras_stays_what_it_is_where_the_script_does_not_ask_for_tf_keras(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
    with tf_keras_as_keras():
        assert "keras" not in sys.modules
    assert "TF_USE_LEGACY_KERAS" not in os.environ
