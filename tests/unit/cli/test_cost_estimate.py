from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.cli import connection, sweep_check
from hermes_ops.config import parse
from hermes_ops.errors import Refused, StackError, Unavailable
from hermes_ops.tracking.earlier_sweeps import SweepCost, earlier_spending


def config(**budget: Any) -> Any:
    file = {
        "name": "digits",
        "objective": {"metric": "loss"},
        "search": {
            "algorithm": "random",
            "max_trials": 10,
            "space": {"rate": {"type": "uniform", "low": 0, "high": 1}},
        },
        "trial": {"command": ["python", "work/train.py", "{rate}"], "directory": "/"},
        "budget": {"max_epochs": 20, **budget},
    }
    return parse(file, "test", None)


@pytest.mark.parametrize(
    ("command", "script"),
    [
        (["python", "work/train.py", "--x=1"], "train.py"),
        (["python", "-m", "pkg.train"], "pkg.train"),
        (["/opt/bin/trainer", "--fast"], "trainer"),
        (["torchrun", "--nproc=2", "a.py", "b.py"], "a.py"),
        ([], ""),
    ],
)
def test_a_command_is_known_by_its_script(command: list[str], script: str) -> None:
    assert sweep_check.script_of(command) == script


def test_the_estimate_is_the_quartiles_of_an_epoch_times_all_epochs() -> None:
    earlier = (
        SweepCost("new", (1.0, 2.0, 3.0), 50.0, 9.0),
        SweepCost("old", (4.0, 5.0), 99.0, 9.0),
    )
    found = sweep_check.estimate_cost(config(), earlier)
    assert found is not None
    assert (found.sweeps, found.trials, found.gpu_s_per_epoch) == (2, 5, 3.0)
    assert (found.low_gpu_s, found.gpu_s, found.high_gpu_s) == (400.0, 600.0, 800.0)
    assert found.last_gpu_s == 50.0
    assert "600 (0.2 hours), from 400 to 800" in found.render("train.py")


def test_the_estimate_stays_within_the_budget_and_one_trial_is_enough_for_one() -> None:
    found = sweep_check.estimate_cost(config(gpu_seconds=300), (SweepCost("a", (2.0,), 5.0, 9.0),))
    assert found is not None
    assert (found.low_gpu_s, found.gpu_s, found.high_gpu_s) == (300.0, 300.0, 300.0)
    assert sweep_check.estimate_cost(config(), ()) is None


SAME = "trial: {command: [python, elsewhere/train.py], gpus: 1}"


class Mlflow:
    """Ended sweeps by their sweep files; of each one trial of 10 epochs in 30 GPU-seconds."""

    def __init__(self, **files: str) -> None:
        self.files = files

    @property
    def artifacts(self) -> Any:
        return SimpleNamespace(fetch=self._fetch)

    def _fetch(self, run: str, path: str) -> bytes:
        assert path == "sweep.yaml"
        if not self.files[run]:
            raise Refused("gone", "RESOURCE_DOES_NOT_EXIST")
        return self.files[run].encode()

    def sweeps(self, experiment: str) -> Any:
        assert experiment == "digits"
        return [
            SimpleNamespace(
                ref=SimpleNamespace(parent_run_id=name, sweep_id=name),
                state="running" if name == "running" else "finished",
                started_ms=1_000,
                ended_ms=61_000,
            )
            for name in self.files
        ]

    def trials(self, ref: Any) -> Any:
        tags = {"hermes.gpu_seconds": "30.0", "hermes.steps": "10"}
        return (SimpleNamespace(tags=tags), SimpleNamespace(tags={"hermes.steps": "x"}))


def test_only_ended_sweeps_of_the_same_script_and_gpus_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = "trial: {command: [python, other.py]}"
    wider = SAME.replace("gpus: 1", "gpus: 2")
    server = Mlflow(a=SAME, running=SAME, b=other, c=wider, d="", e="[", f="trial: 3", g=SAME)
    monkeypatch.setattr(connection, "connect_tracker", lambda _: server)
    text = sweep_check.estimate_text(config(), tmp_path)
    assert text is not None
    assert "from 2 trials of 2 earlier sweeps of train.py" in text
    assert "GPU-seconds an epoch 3.00" in text
    assert "600 (0.2 hours)" in text


def test_what_a_sweep_cost_is_read_from_its_trials() -> None:
    server: Any = Mlflow(a=SAME)
    (spent,) = earlier_spending(server, "digits", lambda _: True)
    assert spent == SweepCost("a", (3.0,), 30.0, 60.0)


@pytest.mark.parametrize(
    ("error", "said"),
    [(StackError("no stack"), None), (Unavailable("it is away"), "No estimate: it is away")],
)
def test_without_mlflow_there_is_the_bound_alone(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str | None
) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(connection, "connect_tracker", fail)
    assert sweep_check.estimate_or_reason(config(), None) == said
