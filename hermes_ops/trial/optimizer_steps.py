"""PyTorch in several processes: SIGTERM comes to all ranks after the same step of the optimizer.

A script that handles SIGTERM takes note of it and leaves after the step that it is in. Ranks get a
signal at different moments, and one that leaves a step before the others lets them wait for it for
ever. So hermes-trial does not send it while all ranks make steps. It asks rank 0, which names a
step; each rank sends the signal to itself when it has made that step.

The protocol is that of `group`, with two kinds of files more in $HERMES_GROUP_DIR: `RANK.steps` is
there while a rank makes steps and has had no signal; `asked` is what hermes-trial writes.
"""
# ruff: noqa: ANN401 - the objects of PyTorch have no types here

from __future__ import annotations

import contextlib
import os
import signal
import sys
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hermes_ops.trial.group import StopAgreement, TrialRank, stop_margin

STEPS_IN_FLIGHT = 2
"""Steps that the processor may be ahead of the GPU: no more, or ranks could be further apart.

Two keep the GPU busy; with more, ranks of slow steps come to the named one too late.
"""

_MOST_OTHER_STEPS = 100
_ASKED = "asked"


def mark_path(folder: Path, rank: int) -> Path:
    """Return the file by which hermes-trial knows that a rank can leave after a named step."""
    return folder / f"{rank}.steps"


def asked_path(folder: Path) -> Path:
    """Return the file by which rank 0 knows that it is to name a step."""
    return folder / _ASKED


def patch(optimizer_module: ModuleType) -> None:
    """Have each step of an optimizer counted, in a process of a trial that has several."""
    group = TrialRank.from_environment(os.environ)
    register = getattr(optimizer_module, "register_optimizer_step_post_hook", None)
    if group.is_distributed and register is not None:  # from PyTorch 2.0 on
        steps = CountedSteps(group)

        def after_step(optimizer: Any, *_: Any) -> None:
            if not _is_compiled():
                steps.count(optimizer)

        register(after_step)


def _is_compiled() -> bool:
    """Tell whether this step is only compiled, or part of what is: nothing can be done in it."""
    compiler = getattr(sys.modules["torch"], "compiler", None)  # it is imported after optimizers
    is_compiling: Callable[[], bool] | None = getattr(compiler, "is_compiling", None)
    return is_compiling is not None and is_compiling()


def _send_sigterm() -> None:
    signal.raise_signal(signal.SIGTERM)


class CountedSteps:
    """The steps of one optimizer in this process, which are alike in all ranks.

    A script may have several optimizers. The first one to make a step is counted, until others
    have made 100 steps without it. Steps count once the script has called `init_process_group`
    with the size of the trial: other processes that it starts take no part. `leave` is called
    after the step that the ranks have agreed on.
    """

    def __init__(self, group: TrialRank, leave: Callable[[], None] = _send_sigterm) -> None:
        self._group = group
        self._leave = leave
        self._agreement = StopAgreement(group)
        folder = Path(group.folder)
        self._mark, self._asked = mark_path(folder, group.rank), str(asked_path(folder))
        self._counted: Callable[[], Any] = lambda: None
        self._other_steps = _MOST_OTHER_STEPS
        self._process = 0  # the one that counts: a fork of it does not
        self._is_over = False
        self._in_flight: deque[Any] = deque()

    def count(self, optimizer: Any) -> None:
        """Count a step that this optimizer has made; send SIGTERM if it is the agreed one."""
        if self._is_over or not self._is_counted(optimizer) or not self._takes_part():
            return
        is_on_gpu = self._bound_steps_in_flight(optimizer)
        asked = self._group.is_leader and os.path.exists(self._asked)
        if self._agreement.agree_to_leave(
            asked, stop_margin(1, STEPS_IN_FLIGHT if is_on_gpu else 0)
        ):
            self._is_over = True
            with contextlib.suppress(OSError):
                self._mark.unlink()
            self._leave()

    def _is_counted(self, optimizer: Any) -> bool:
        if self._counted() is not optimizer:
            self._other_steps += 1
            if self._other_steps <= _MOST_OTHER_STEPS:
                return False
            self._counted = weakref.ref(optimizer)
        self._other_steps = 0
        return True

    def _takes_part(self) -> bool:
        if self._process:
            return self._process == os.getpid()
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available():
            return False
        if not distributed.is_initialized() or distributed.get_world_size() != self._group.size:
            return False
        self._process = os.getpid()
        with contextlib.suppress(OSError):  # without the mark the signal comes at once
            self._mark.touch()
        return True

    def _bound_steps_in_flight(self, optimizer: Any) -> bool:
        """Wait until the GPU has made all steps but the newest; tell whether there is a GPU.

        The processor only enters steps in the GPU's queue, so ranks that wait for each other on
        their GPUs may be far apart in what they have entered.
        """
        groups: Any = getattr(optimizer, "param_groups", ())
        if not any(parameter.is_cuda for one in groups for parameter in one["params"][:1]):
            return False
        cuda = sys.modules["torch.cuda"]
        if not cuda.is_current_stream_capturing():
            event = cuda.Event()
            event.record()
            self._in_flight.append(event)
            if len(self._in_flight) > STEPS_IN_FLIGHT:
                self._in_flight.popleft().synchronize()
        return True
