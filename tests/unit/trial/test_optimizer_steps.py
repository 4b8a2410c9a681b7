"""The step of a PyTorch optimizer after which all ranks of a trial get SIGTERM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.trial.group import TrialRank
from hermes_ops.trial.optimizer_steps import CountedSteps, asked_path, mark_path, patch
from hermes_ops.trial.segment import SITE


class Optimizer:
    """An optimizer of parameters on the processor."""

    param_groups = ({"params": [SimpleNamespace(is_cuda=False)]},)


class Rank:
    """A process of the trial, and how many steps it had made when it was told to leave."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.steps = CountedSteps(TrialRank(rank, size, str(folder)), self.leave)
        self.optimizer = Optimizer()
        self.made = 0
        self.left_at: int | None = None

    def leave(self) -> None:
        assert self.left_at is None, "it has had the signal before"
        self.left_at = self.made

    def step(self, optimizer: Any = None) -> None:
        self.made += 1
        self.steps.count(optimizer or self.optimizer)


class Distributed(ModuleType):
    """What a script has of torch.distributed."""

    def __init__(self, size: int, is_initialized: bool = True) -> None:
        super().__init__("torch.distributed")
        self.size, self.has_group = size, is_initialized

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.has_group

    def get_world_size(self) -> int:
        return self.size


@pytest.fixture
def distributed(monkeypatch: pytest.MonkeyPatch) -> Distributed:
    made = Distributed(2)
    monkeypatch.setitem(sys.modules, "torch.distributed", made)
    return made


def group(size: int, folder: Path) -> list[Rank]:
    return [Rank(rank, size, folder) for rank in range(size)]


@given(
    size=st.integers(2, 5),
    asked_at=st.integers(0, 20),
    order=st.randoms(use_true_random=False),
)
def test_all_ranks_get_the_signal_after_the_same_step_in_whatever_order_they_run(
    tmp_path_factory: pytest.TempPathFactory, size: int, asked_at: int, order: Any
) -> None:
    """No rank makes a step whose exchange of gradients not all have begun."""
    folder = tmp_path_factory.mktemp("group")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "torch.distributed", Distributed(size))
        ranks = group(size, folder)
        while any(rank.left_at is None for rank in ranks):
            slowest = min(rank.made for rank in ranks)
            rank = order.choice([r for r in ranks if r.left_at is None and r.made <= slowest])
            rank.step()
            if sum(r.made for r in ranks) >= asked_at:
                asked_path(folder).touch()
    assert len({rank.left_at for rank in ranks}) == 1
    assert not [n for n in range(size) if mark_path(folder, n).exists()]


def test_a_follower_alone_leaves_by_no_file_of_its_own_accord(
    tmp_path: Path, distributed: Distributed
) -> None:
    asked_path(tmp_path).touch()
    _, follower = group(2, tmp_path)
    for _ in range(50):
        follower.step()
    assert follower.left_at is None
    assert mark_path(tmp_path, 1).exists()


@pytest.mark.parametrize("why", ["no process group", "another size"])
def test_a_process_that_trains_by_itself_takes_no_part(
    tmp_path: Path, distributed: Distributed, why: str
) -> None:
    distributed.has_group = why != "no process group"
    distributed.size = 2 if why == "no process group" else 1
    asked_path(tmp_path).touch()
    leader = group(2, tmp_path)[0]
    for _ in range(10):
        leader.step()
    assert leader.left_at is None
    assert not mark_path(tmp_path, 0).exists()


def test_a_fork_of_a_rank_counts_no_steps(tmp_path: Path, distributed: Distributed) -> None:
    leader = group(2, tmp_path)[0]
    leader.step()
    asked_path(tmp_path).touch()
    child = os.fork()
    if child == 0:
        for _ in range(10):
            leader.step()
        os._exit(0 if leader.left_at is None else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_of_two_optimizers_the_steps_of_one_are_counted(
    tmp_path: Path, distributed: Distributed
) -> None:
    other = Optimizer()
    leader = group(2, tmp_path)[0]
    leader.step()
    asked_path(tmp_path).touch()
    for _ in range(20):
        leader.step(other)
    assert leader.left_at is None
    for _ in range(3):
        leader.step()
    assert leader.left_at is not None


def test_an_optimizer_that_has_taken_the_place_of_the_first_one_is_counted(
    tmp_path: Path, distributed: Distributed
) -> None:
    ranks = group(2, tmp_path)
    second = [Optimizer(), Optimizer()]
    for rank in ranks:
        rank.step()
    asked_path(tmp_path).touch()
    while ranks[0].left_at is None:
        for rank, optimizer in zip(ranks, second, strict=True):
            rank.step(optimizer)
    assert ranks[0].left_at == ranks[1].left_at


class GpuOptimizer(Optimizer):
    param_groups = ({"params": [SimpleNamespace(is_cuda=True)]},)


def test_the_processor_is_at_most_eight_steps_ahead_of_the_gpu(
    tmp_path: Path, distributed: Distributed, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int] = []
    recorded: list[int] = []

    class Event:
        def record(self) -> None:
            self.number = len(recorded)
            recorded.append(self.number)

        def synchronize(self) -> None:
            waited.append(self.number)

    cuda = SimpleNamespace(Event=Event, is_current_stream_capturing=lambda: False)
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)
    leader = group(2, tmp_path)[0]
    optimizer = GpuOptimizer()
    for made in range(1, 31):
        leader.step(optimizer)
        assert waited == list(range(made - 2))
    asked_path(tmp_path).touch()
    for _ in range(20):
        if leader.left_at is None:
            leader.step(optimizer)
    assert leader.left_at is not None
    assert leader.left_at > 30 + 2, "a rank may have entered that many steps already"


# -- in the script's process -----------------------------------------------------------------------


def registered(monkeypatch: pytest.MonkeyPatch, folder: Path, size: str) -> list[Any]:
    """What is registered with PyTorch in a process of a trial of that size."""
    found: list[Any] = []
    module = ModuleType("torch.optim.optimizer")
    module.register_optimizer_step_post_hook = found.append  # type: ignore[attr-defined]
    variables = {"HERMES_RANK": "0", "HERMES_SIZE": size, "HERMES_GROUP_DIR": str(folder)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    patch(module)
    return found


def test_a_trial_of_one_process_registers_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert registered(monkeypatch, tmp_path, "1") == []
    assert len(registered(monkeypatch, tmp_path, "2")) == 1


def test_a_step_that_is_only_compiled_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, distributed: Distributed
) -> None:
    torch = ModuleType("torch")
    torch.compiler = SimpleNamespace(is_compiling=lambda: True)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    (after_step,) = registered(monkeypatch, tmp_path, "2")
    after_step(Optimizer(), (), {})
    assert not mark_path(tmp_path, 0).exists()


def test_a_pytorch_without_hooks_for_steps_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert registered(monkeypatch, tmp_path, "2")  # with them, in the same process
    before_2_0 = ModuleType("torch.optim.optimizer")
    attributes = dict(vars(before_2_0))
    patch(before_2_0)
    assert vars(before_2_0) == attributes


SCRIPT = """
import os, signal, sys
import torch.optim.optimizer
signal.signal(signal.SIGTERM, lambda *_: print("told after", made))
class Optimizer: param_groups = ()
optimizer = Optimizer()
open(os.path.join(os.environ["HERMES_GROUP_DIR"], "asked"), "w").close()
for made in range(1, 10):
    torch.optim.optimizer.after(optimizer, (), {})
"""


def test_the_scripts_own_handler_is_called_in_the_step(tmp_path: Path) -> None:
    package = tmp_path / "torch"
    (package / "optim").mkdir(parents=True)
    (package / "__init__.py").write_text("import torch.distributed\n")
    (package / "optim" / "__init__.py").write_text("")
    (package / "optim" / "optimizer.py").write_text(
        "def register_optimizer_step_post_hook(hook):\n    global after\n    after = hook\n"
    )
    (package / "distributed.py").write_text(
        "is_available = is_initialized = lambda: True\nget_world_size = lambda: 2\n"
    )
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "group").mkdir()
    done = subprocess.run(
        [sys.executable, str(tmp_path / "train.py")],
        env={
            "PYTHONPATH": SITE, "HERMES_TRIAL_DIR": str(tmp_path), "HERMES_RANK": "0",
            "HERMES_SIZE": "2", "HERMES_GROUP_DIR": str(tmp_path / "group"),
        },
        capture_output=True,
        text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout == "told after 3\n", done.stderr
    assert done.stderr == ""
