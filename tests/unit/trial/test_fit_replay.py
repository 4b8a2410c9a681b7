"""Calls of `fit` are replayed after any number of kills: the hook with a stand-in for Keras."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermes_ops.trial.keras import checkpoint_files, fit, fit_calls
from hermes_ops.trial.keras import runtime as process
from hermes_ops.trial.keras.training_state import MismatchError

FITS, EPOCHS = 18, 2


class Variable:
    """As a variable of Keras."""

    def __init__(self, value: float) -> None:
        self._value = np.array([value])
        self.shape = self._value.shape

    def numpy(self) -> Any:
        return self._value.copy()

    def assign(self, value: Any) -> None:
        self._value = np.array(value)


class KilledError(BaseException):
    """The process is gone."""


class History:
    """As the callback that Keras adds."""

    def __init__(self) -> None:
        self.history: dict[str, list[float]] = {"loss": []}
        self.epoch: list[int] = []
        self.params: dict[str, int] = {}


class Callbacks:
    """As Keras' list of callbacks."""

    def __init__(self, model: Model, die: Callable[[int], None]) -> None:
        model.history = History()
        self.callbacks, self._model, self._die = [model.history], model, die

    def on_train_begin(self, logs: Any = None) -> None:
        self._die(-1)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        pass

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float]) -> None:
        self._model.history.epoch.append(epoch)
        self._model.history.history["loss"].append(logs["loss"])
        self._die(epoch)

    def on_train_end(self, logs: Any = None) -> None:
        self._die(EPOCHS)


class Model:
    """As a model of Keras: what it learns hangs on chance."""

    def __init__(self) -> None:
        self.weight, self.moment = Variable(np.random.rand()), Variable(0.0)
        self.variables = [self.weight]
        self.metrics: list[Any] = []
        self.optimizer = SimpleNamespace(variables=[self.moment])
        self.trainable_weights, self.stop_training = self.variables, False
        self.history: Any = None

    def save(self, path: str) -> None:
        Path(path).write_text("model")

    def fit(self, epochs: int = 1, initial_epoch: int = 0, callbacks: Any = None) -> Any:
        callbacks = Callbacks(self, callbacks or (lambda _: None))
        self.history.params["epochs"] = epochs
        self.stop_training = False
        callbacks.on_train_begin()
        for epoch in range(initial_epoch, epochs):
            callbacks.on_epoch_begin(epoch)
            self.moment.assign(0.9 * self.moment.numpy() + np.random.rand())
            self.weight.assign(self.weight.numpy() - 0.1 * self.moment.numpy())
            callbacks.on_epoch_end(epoch, {"loss": float(self.weight.numpy()[0])})
        callbacks.on_train_end()
        return self.history


class KerasBackend:
    """What differs between the kinds of Keras."""

    def build(self, session: Any) -> bool:
        return True

    def why_boundary_only(self, session: Any) -> str | None:
        return None

    def train_step(self, session: Any) -> Any:
        return None

    def dataset(self, session: Any) -> Any:
        return None

    def batches(self, session: Any) -> int | None:
        return 1

    def batch_size(self, session: Any) -> int | None:
        return None

    def samples(self, session: Any, first: int, last: int) -> int | None:
        return None

    def begin_at(self, arguments: dict[str, Any], epoch: int) -> None:
        arguments["initial_epoch"] = epoch

    def repeat_fit(self, session: Any) -> None:
        pass


fit.wrap_callbacks(Callbacks)


def script(die_at: tuple[int, int] | None) -> list[Any]:
    """Train two models in turn and a new one at times; return what the code between them sees."""
    np.random.seed(3)
    models, seen, counts = [Model(), Model()], [], [0]

    def die(epoch: int) -> None:
        if (counts[0], epoch) == die_at:
            raise KilledError

    for turn in range(FITS):
        model = models[turn % 2] if turn % 5 else Model()
        before = (np.random.rand(), float(model.weight.numpy()[0]))
        counts[0] = turn
        arguments = {"epochs": EPOCHS, "callbacks": die}
        history = fit.run_fit(KerasBackend(), Model.fit, model, (), arguments)
        after = float(model.weight.numpy()[0] + model.moment.numpy()[0])
        seen.append((turn, before, history.history["loss"], history.epoch, history.params, after))
    return seen


class Trial:
    """Runs the script as often as it is killed, each time as a new process would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def segment(self, die_at: tuple[int, int] | None) -> list[Any] | None:
        return self.run(lambda: script(die_at))

    def run(self, script: Callable[[], list[Any]]) -> list[Any] | None:
        os.environ["HERMES_TRIAL_DIR"] = str(self.folder)
        os.environ["HERMES_METRICS_FILE"] = str(self.folder / "metrics.jsonl")
        os.environ["HERMES_CHECKPOINT_DIR"] = str(self.folder / "checkpoints")
        process._runtime = None
        try:
            return script()
        except KilledError:
            return None
        finally:
            process.runtime().writer.wait()
            if (owner := process.runtime()._owner) is not None:
                os.close(owner)


@pytest.fixture
def _keras(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = SimpleNamespace(KerasVariable=Variable)
    monkeypatch.setitem(sys.modules, "keras.src.backend.common.variables", module)
    for name in ("HERMES_TRIAL_DIR", "HERMES_METRICS_FILE", "HERMES_CHECKPOINT_DIR"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(fit_calls, "_MOST_FRAMES", 1)  # those further out are the test's
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)
    process._runtime = None


KILLS = st.lists(st.tuples(st.integers(0, FITS - 1), st.integers(-1, EPOCHS)), max_size=3)


@pytest.mark.usefixtures("_keras")
@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(kills=KILLS)
def test_wherever_a_script_of_many_fits_is_killed_it_sees_what_an_unbroken_run_sees(
    tmp_path_factory: pytest.TempPathFactory, kills: list[tuple[int, int]]
) -> None:
    whole = Trial(tmp_path_factory.mktemp("whole")).segment(None)
    trial = Trial(tmp_path_factory.mktemp("trial"))
    for kill in kills:
        trial.segment(kill)
    assert trial.segment(None) == whole


@pytest.mark.usefixtures("_keras")
def test_a_trial_whose_states_need_too_much_room_keeps_none_and_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = Trial(tmp_path / "whole").segment(None)
    monkeypatch.setenv(checkpoint_files.BUDGET_VARIABLE, "1")
    trial = Trial(tmp_path / "trial")
    assert trial.segment((17, 0)) is None
    assert "not preemptible any more: the states after its 17 fit calls" in capfd.readouterr().out
    assert list((trial.folder / "checkpoints").iterdir()) == []
    assert trial.segment(None) == whole


@pytest.mark.usefixtures("_keras")
def test_calls_of_fit_that_the_limit_of_epochs_cuts_off_or_leaves_out_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HERMES_MAX_EPOCHS", "3")
    why = "budget.max_epochs (3) counts the epochs of all calls of fit, and they are trained."

    def calls(epochs: tuple[int, ...]) -> list[Any]:
        model = Model()
        arguments = [{"epochs": number} for number in epochs]
        return [fit.run_fit(KerasBackend(), Model.fit, model, (), each) for each in arguments]

    Trial(tmp_path / "kept").run(lambda: calls((1, 2)))
    assert "budget.max_epochs" not in capfd.readouterr().out
    Trial(tmp_path / "cut").run(lambda: calls((4,)))
    assert f"hermes: this fit ends after 3 of 4 epochs: {why}" in capfd.readouterr().out
    trial = Trial(tmp_path / "left out")
    trial.run(lambda: calls((3, 2, 2)))
    trial.run(lambda: calls((3, 2, 2)))  # a later segment
    assert capfd.readouterr().out.count(f"this fit and all later ones train no epoch: {why}") == 1


@pytest.mark.usefixtures("_keras")
@pytest.mark.parametrize("way", ["begins later", "asks for the rest"])
def test_a_script_that_resumes_by_itself_too_has_the_steps_and_epochs_of_an_unbroken_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], way: str
) -> None:
    def train(trial: Trial, die_at: int | None) -> list[Any] | None:
        own = trial.folder / "own"

        def die(epoch: int) -> None:
            own.write_text(str(max(done, epoch + 1)))
            if epoch == die_at:
                raise KilledError

        def call() -> list[Any]:
            np.random.seed(3)
            model = Model()
            spans = {"begins later": (done, 6), "asks for the rest": (0, 6 - done)}
            arguments = {"initial_epoch": spans[way][0], "epochs": spans[way][1], "callbacks": die}
            history = fit.run_fit(KerasBackend(), Model.fit, model, (), arguments)
            return [history.history, history.epoch, history.params]

        done = int(own.read_text()) if own.exists() else 0
        return trial.run(call)

    whole, trial = Trial(tmp_path / "whole"), Trial(tmp_path / "trial")
    expected = train(whole, None)
    assert "resumes its training by itself" not in capfd.readouterr().out
    assert train(trial, 2) is None
    assert train(trial, 4) is None
    assert train(trial, None) == expected
    assert "resumes its training by itself too" in capfd.readouterr().out
    curves = [_curve(each.folder) for each in (whole, trial)]
    assert curves[0] == curves[1]


def _curve(folder: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return sorted((line["step"], line["value"]) for line in lines)


@pytest.mark.usefixtures("_keras")
def test_a_state_that_cannot_be_read_is_no_reason_to_go_on_wrongly(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    assert trial.segment((10, 0)) is None
    first = min((tmp_path / "checkpoints").glob("keras-*"))
    (first / "arrays.bin").write_bytes(b"torn")
    with pytest.raises(MismatchError, match="the state after fit call 1 cannot be read"):
        trial.segment(None)
    assert trial.segment(None) is not None


@pytest.mark.usefixtures("_keras")
@pytest.mark.parametrize("stop", [False, True])
def test_the_best_epoch_is_saved_though_a_callback_restores_another_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: bool
) -> None:
    monkeypatch.setenv("HERMES_OBJECTIVE", "loss")
    monkeypatch.setattr(process.KerasRuntime, "end_soon", lambda _: None)
    monkeypatch.setattr(Model, "save", lambda self, path: Path(path).write_text(str(self.weight)))
    monkeypatch.setattr(Variable, "__str__", lambda self: str(self.numpy()[0]), raising=False)
    best = []

    def restore(epoch: int) -> None:
        if epoch == EPOCHS - 1:
            best.append(str(model.weight))
            process.runtime().stop = stop  # the checkpoint of this epoch is written
        if epoch == EPOCHS:
            model.weight.assign([9.0])

    def train() -> list[Any]:
        model.moment.assign([9.0])  # the loss falls
        arguments = {"epochs": EPOCHS, "callbacks": restore}
        return [fit.run_fit(KerasBackend(), Model.fit, model, (), arguments)]

    trial, model = Trial(tmp_path), Model()
    trial.run(train)
    assert (trial.folder / "model" / "model.keras").read_text() == best[0]
    assert str(model.weight) == "9.0"


class PrunedError(Exception):
    """What a callback of a script raises to end a fold, and the script catches."""


def folds(
    trained: list[tuple[int, int]], die_at: tuple[int, int] | None = None, *, prunes: bool = True
) -> list[Any]:
    """Fit a new model for each fold, the second one in vain; return what the script sees."""
    np.random.seed(3)
    seen: list[Any] = []
    for fold in range(4):

        def end(epoch: int, fold: int = fold) -> None:
            trained.append((fold, epoch))
            if (fold, epoch) == die_at:
                raise KilledError
            if prunes and (fold, epoch) == (1, 1):
                raise PrunedError

        model = Model()
        try:
            history = fit.run_fit(
                KerasBackend(), Model.fit, model, (), {"epochs": 3, "callbacks": end}
            )
            seen.append((fold, history.history["loss"], float(model.weight.numpy()[0])))
        except PrunedError:
            seen.append((fold, float(model.weight.numpy()[0]), np.random.rand()))
    return seen


@pytest.mark.usefixtures("_keras")
def test_a_fit_whose_error_the_script_catches_costs_no_other_fit_its_progress(
    tmp_path: Path,
) -> None:
    whole, trial = Trial(tmp_path / "whole"), Trial(tmp_path / "trial")
    expected = whole.run(lambda: folds([]))
    assert trial.run(lambda: folds([], (3, 1))) is None
    trained: list[tuple[int, int]] = []
    assert trial.run(lambda: folds(trained)) == expected
    assert {fold for fold, epoch in trained if 0 <= epoch < 3} == {1, 3}
    assert (3, 0) not in trained
    lines = (trial.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 11))


@pytest.mark.usefixtures("_keras")
def test_a_fit_that_raised_before_and_does_not_now_has_the_trial_begin_anew(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    assert trial.run(lambda: folds([], (3, 1))) is None
    with pytest.raises(MismatchError, match="fit call 2 ended with an error before the stop"):
        trial.run(lambda: folds([], prunes=False))
    assert trial.run(lambda: folds([], prunes=False)) is not None


def own_loop(between: Callable[[], object]) -> list[Any]:
    """Fit a model, train it outside of `fit`, and fit it again; return what is sent meanwhile."""
    model, sent = Model(), []
    arguments: dict[str, Any] = {"epochs": 1}
    fit.run_fit(KerasBackend(), Model.fit, model, (), arguments)
    events = process.runtime().folder / "events.jsonl"
    for step in (between, lambda: fit.run_fit(KerasBackend(), Model.fit, model, (), arguments)):
        before = len(events.read_text().splitlines())
        step()
        for timer in [one for one in threading.enumerate() if isinstance(one, threading.Timer)]:
            timer.join()
        lines = map(json.loads, events.read_text().splitlines()[before:])
        sent.append([line["preemptible"] for line in lines if line["kind"] == "hook"])
    return sent


@pytest.mark.usefixtures("_keras")
def test_training_outside_fit_that_goes_on_after_one_is_not_preemptible_until_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process, "OWN_LOOP_S", 0.0)

    def train() -> None:
        for _ in range(3):
            process.runtime().note_own_step()

    assert Trial(tmp_path).run(lambda: own_loop(train)) == [[False], [True]]
    said = capfd.readouterr().out
    assert said.count("the training after fit call 1 runs outside fit") == 1


@pytest.mark.usefixtures("_keras")
def test_training_outside_fit_with_checkpoints_of_its_own_stays_preemptible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "OWN_LOOP_S", 0.0)

    def train() -> None:
        (tmp_path / "checkpoints" / "ckpt-1.index").touch()
        process.runtime().note_own_step()

    assert Trial(tmp_path).run(lambda: own_loop(train)) == [[], [True]]


Die = Callable[[int, int], None]


def call_fit(number: int, model: Model, epochs: int, die: Die, **more: Any) -> None:
    """Call `fit`, and `die` with its number at the end of each of its epochs."""
    arguments = {"epochs": epochs, "callbacks": lambda epoch: die(number, epoch), **more}
    fit.run_fit(KerasBackend(), Model.fit, model, (), arguments)


def two_phases(own: Path, die: Die) -> None:
    """Warm up, unless that is done, then train on: two lines of the script call `fit`."""
    np.random.seed(3)
    model = Model()
    if not (own / "warm").exists():
        call_fit(0, model, 2, die)
        (own / "warm").write_text(str(model.weight.numpy()[0]))
    die(1, -2)
    model.weight.assign([float((own / "warm").read_text())])
    model.moment.assign([0.0])
    np.random.seed(4)
    call_fit(1, model, 3, die)
    (own / "end").write_text(str(model.weight.numpy()[0]))


def left_out_folds(own: Path, die: Die) -> None:
    """Train each fold that has no file yet: one line of the script calls `fit`."""
    best = 0.0
    for fold in range(4):
        if not (own / f"fold{fold}").exists():
            np.random.seed(fold)
            model = Model()
            call_fit(fold, model, 3, die)
            best = max(best, float(model.weight.numpy()[0]))
            (own / f"fold{fold}").write_text(str(model.weight.numpy()[0]))
        die(fold, 4)


def single_epochs(own: Path, die: Die) -> None:
    """Call `fit` for each epoch, beginning where the own file says."""
    state: list[Any] = [0, 0.5, 0.0]
    if (own / "state").exists():
        state = json.loads((own / "state").read_text())
    model = Model()
    model.weight.assign([state[1]])
    model.moment.assign([state[2]])
    for epoch in range(state[0], 5):
        np.random.seed(epoch)
        call_fit(epoch, model, epoch + 1, die, initial_epoch=epoch)
        state = [epoch + 1, float(model.weight.numpy()[0]), float(model.moment.numpy()[0])]
        (own / "state").write_text(json.dumps(state))
        die(epoch, 4)


def run_with_files(
    root: Path, habit: Callable[[Path, Die], None], kills: Sequence[tuple[int, int]]
) -> tuple[dict[str, str], list[tuple[int, float]], list[tuple[int, int]]]:
    """Run a script with files of its own; return these, its curve, and what its end trained."""
    own = root / "own"
    own.mkdir(parents=True)
    trial, trained = Trial(root), list[tuple[int, int]]()
    for kill in (*kills, None):
        trained.clear()

        def die(number: int, epoch: int, kill: tuple[int, int] | None = kill) -> None:
            trained.append((number, epoch))
            if (number, epoch) == kill:
                raise KilledError

        def script(die: Die = die) -> list[Any]:
            habit(own, die)
            return []

        trial.run(script)
    files = {path.name: path.read_text() for path in own.iterdir()}
    return files, _curve(root), trained


@pytest.mark.usefixtures("_keras")
@pytest.mark.parametrize(
    ("habit", "kills"),
    [
        (two_phases, [(1, -2)]),
        (two_phases, [(1, -1)]),
        (two_phases, [(1, 0), (1, 1)]),
        (left_out_folds, [(2, 1)]),
        (left_out_folds, [(2, -1)]),
        (left_out_folds, [(1, 4), (3, 0)]),
        (left_out_folds, [(1, 1), (2, 4), (3, 2)]),
        (single_epochs, [(3, 0)]),
        (single_epochs, [(1, 4), (2, 0), (3, 4)]),
    ],
)
def test_a_resumed_script_that_leaves_out_calls_of_fit_by_its_own_files_ends_as_an_unbroken_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    habit: Callable[[Path, Die], None],
    kills: list[tuple[int, int]],
) -> None:
    monkeypatch.setattr(fit_calls, "_MOST_FRAMES", 2)  # with that which calls `call_fit`
    whole = run_with_files(tmp_path / "whole", habit, [])
    cut = run_with_files(tmp_path / "cut", habit, kills)
    assert cut[:2] == whole[:2]
    assert len(cut[2]) < len(whole[2])


@pytest.mark.usefixtures("_keras")
def test_a_script_that_leaves_out_the_call_of_fit_in_which_it_was_stopped_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_calls, "_MOST_FRAMES", 2)
    trial = Trial(tmp_path)

    def train(folds: Iterable[int], die_in: int | None) -> list[Any]:
        def die(number: int, epoch: int) -> None:
            if (number, epoch) == (die_in, 1):
                raise KilledError

        for fold in folds:
            call_fit(fold, Model(), 3, die)
        return []

    trial.run(lambda: train(range(3), 2))
    with pytest.raises(MismatchError, match="has left out fit call 3, in which it was stopped"):
        trial.run(lambda: train([7], None))
    assert trial.run(lambda: train([7], None)) == []


def fit_in_processes(trial: Trial, kill: tuple[int, int] | None, fails: int = -1) -> list[Any]:
    """Run a segment of three processes, one after the other; `fails`: which is started again."""
    os.environ["HERMES_SEGMENT"] = os.urandom(4).hex()
    ends: list[Any] = []
    for fold in [n for n in range(3) for _ in range(2 if n == fails else 1)]:
        sys.argv[1:] = [f"--fold={fold}"]
        has_failed = fold == fails and len(ends) == fold

        def script(fold: int = fold, has_failed: bool = has_failed) -> list[Any]:
            np.random.seed(fold)
            model = Model()

            def die(number: int, epoch: int) -> None:
                if (number, epoch) == kill or (has_failed and epoch == 1):
                    raise KilledError

            call_fit(fold, model, 3, die)
            process.runtime().at_exit()
            return [fold, float(model.weight.numpy()[0])]

        ended = trial.run(script)
        if ended is None and not has_failed:
            return []
        ends.append(ended)
    return [end for end in ends if end is not None]


@pytest.mark.usefixtures("_keras")
@pytest.mark.parametrize("kills", [[], [(1, 1)], [(0, 0), (2, -1), (2, 2)]])
def test_processes_that_call_fit_one_after_the_other_each_have_their_own_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: list[tuple[int, int]]
) -> None:
    monkeypatch.setenv("HERMES_SEGMENT", "")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    expected = []
    for fold in range(3):
        np.random.seed(fold)
        model = Model()
        model.fit(3)
        expected.append([fold, float(model.weight.numpy()[0])])
    trial = Trial(tmp_path)
    for kill in kills:
        assert fit_in_processes(trial, kill) == []
    assert fit_in_processes(trial, None) == expected
    assert [step for step, _ in _curve(tmp_path)] == list(range(1, 10))
    again = Trial(tmp_path / "again")
    assert fit_in_processes(again, None, fails=1) == expected
