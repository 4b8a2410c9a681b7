"""A trial in several processes: which of them this is, and how all leave at the same batch.

hermes-trial starts the processes and names each by its environment. Rank 0, the leader, owns the
trial: it reports and writes checkpoints. The others, the followers, restore the same checkpoint,
write nothing and are told nothing by signals: the leader decides.

The protocol is files in $HERMES_GROUP_DIR, which is empty at the start of a segment. `stop.json`
names the step before which all leave. `RANK.fit` is there while a rank trains: it is touched at
most each second while steps are made. Where the processes are on several nodes, the step is not in
a file but in the store that $HERMES_GROUP_STORE names: a shared file system may show a new file
late, and then a rank would leave at another step.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hermes_ops.trial.files import read_json, write_json

if TYPE_CHECKING:
    from hermes_ops.trial.store_client import StoreClient

RANK_VARIABLE, SIZE_VARIABLE = "HERMES_RANK", "HERMES_SIZE"
GROUP_VARIABLE = "HERMES_GROUP_DIR"
STORE_VARIABLE = "HERMES_GROUP_STORE"
RESIZE_VARIABLE = "HERMES_RESIZE"
RATE_VARIABLE = "HERMES_SCALE_LEARNING_RATE"
_OF_FIT = {
    "trial.scale_learning_rate: hermes": (RATE_VARIABLE, "hermes"),
    "trial.resize: epoch": (RESIZE_VARIABLE, "epoch"),
}
_STOP = "stop.json"
_STOP_PLACE = "hermes", "stop"  # scope and key in the store
_TOUCH_S = 1.0
_BACKWARD_STEPS = 1
"""Steps from one exchange of gradients to the next, unless the script sums them up longer."""


class GroupError(RuntimeError):
    """The processes of a trial cannot train together; the message says why and what to do."""


class TrialRank(NamedTuple):
    """This process's place in its trial; the default is a trial of one process.

    `store`: the address of the store, where the processes are on several nodes.
    """

    rank: int = 0
    size: int = 1
    folder: str = ""
    store: str = ""

    @property
    def is_leader(self) -> bool:
        """Tell whether this process owns the trial."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Tell whether there are other processes."""
        return self.size > 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> TrialRank:
        """Return what hermes-trial has said in the variables; GroupError if they do not fit."""
        size = environment.get(SIZE_VARIABLE)
        if not size:
            return cls()
        rank, folder = environment.get(RANK_VARIABLE, ""), environment.get(GROUP_VARIABLE, "")
        if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
            raise GroupError(
                f"{RANK_VARIABLE} must be a number below {SIZE_VARIABLE}, not {rank!r} of "
                f"{size!r}: leave these variables as hermes-trial sets them"
            )
        if int(size) == 1:
            return cls()
        if not folder:
            raise GroupError(f"{GROUP_VARIABLE} is not set: leave it as hermes-trial sets it")
        return cls(int(rank), int(size), folder, environment.get(STORE_VARIABLE, ""))


def is_follower() -> bool:
    """Tell whether this process is one that reports nothing: not rank 0 of its trial."""
    return os.environ.get(RANK_VARIABLE, "0") != "0"


def settings_without_effect(environment: Mapping[str, str]) -> str:
    """Return which settings of a sweep a script ignores that trains without `Model.fit` of Keras.

    Empty if it has none of them.
    """
    settings = [key for key, (name, value) in _OF_FIT.items() if environment.get(name) == value]
    if not settings:
        return ""
    return (
        f"{' and '.join(settings)}: without effect, as the script does not train by Model.fit of "
        "Keras: let it scale its learning rate by WORLD_SIZE, and stop where it can, itself"
    )


def rank_seed(seed: int, rank: int) -> int:
    """Return the seed of a rank, below 2^31: that of rank 0 is `seed` itself."""
    return (seed + 1_000_003 * rank) % 2**31


# -- the step before which all leave ---------------------------------------------------------------


def stop_margin(backward_steps: int, steps_in_flight: int = 0) -> int:
    """Return how many steps ahead the leader puts the stop; more than any rank can be ahead.

    Ranks wait for each other where they exchange gradients, once in `backward_steps` steps.
    `steps_in_flight`: steps that a rank may begin before the exchange of an earlier one is over.
    """
    return max(_BACKWARD_STEPS, backward_steps) + 1 + max(0, steps_in_flight)


class StopNotice(Protocol):
    """The place where the leader writes the step before which all leave."""

    def write(self, step: int) -> None:
        """Write it, for all ranks at once; OSError, and nobody sees it, if that fails."""

    def read(self) -> int | None:
        """Return it; None while there is none."""


class StopFile:
    """A file in the folder of the group, on one node."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, _STOP)

    def write(self, step: int) -> None:
        """Write it, for all ranks at once; OSError, and nobody sees it, if that fails."""
        write_json(Path(self._path), {"step": step})

    def read(self) -> int | None:
        """Return it; None while there is none."""
        if not os.path.exists(self._path):
            return None
        return (read_json(Path(self._path)) or {}).get("step")


class StoredStop:
    """A value in the store of a trial on several nodes.

    A store that does not answer three times is an error for a follower too: it must not go on
    where the others may leave.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._client: StoreClient | None = None

    def write(self, step: int) -> None:
        """Write it, for all ranks at once; OSError, and nobody sees it, if that fails."""
        from hermes_ops.trial.store_client import insist

        insist(lambda: self._store().put(*_STOP_PLACE, str(step).encode()))

    def read(self) -> int | None:
        """Return it; None while there is none."""
        from hermes_ops.trial.store_client import insist

        value = insist(lambda: self._store().get(*_STOP_PLACE))
        return int(value) if value else None

    def _store(self) -> StoreClient:
        from hermes_ops.trial.store_client import StoreClient  # imports http.client

        if self._client is None:
            self._client = StoreClient(self._address)
        return self._client


class StopAgreement:
    """Agree on the step before which all ranks leave, without any communication in a step.

    The leader writes the step down before it begins another step; each rank looks before each
    step. No rank can be `margin` steps ahead of the leader, as they wait for each other's
    gradients. Steps are counted over all fits of the process, alike in all ranks.
    """

    def __init__(self, group: TrialRank) -> None:
        self._is_leader = group.is_leader
        self._notice: StopNotice = (
            StoredStop(group.store) if group.store else StopFile(group.folder)
        )
        self._agreed: int | None = None
        self.step = 0

    def agree_to_leave(self, asked: bool, margin: int) -> bool:
        """Return, before a step, whether all ranks leave now; count the step if they do not.

        `asked`: the leader has been told to stop. It then names the step that is `margin` steps
        ahead. A full disk delays the stop: the leader tries again at its next step.
        """
        if self._agreed is None and asked and self._is_leader:
            with contextlib.suppress(OSError):
                self._notice.write(self.step + margin)
                self._agreed = self.step + margin
        elif self._agreed is None and not self._is_leader:
            self._agreed = self._notice.read()
        if self._agreed is not None and self.step >= self._agreed:
            return True
        self.step += 1
        return False


class TrainingMark:
    """The file by which hermes-trial knows that this rank trains, and makes steps."""

    def __init__(self, group: TrialRank) -> None:
        self._path = Path(group.folder) / f"{group.rank}.fit"
        self._touched_s = 0.0

    def touch(self) -> None:
        """Note a step that has been made; a disk that is full is not told."""
        now_s = time.monotonic()
        if now_s - self._touched_s >= _TOUCH_S:
            self._touched_s = now_s
            with contextlib.suppress(OSError):
                self._path.touch()

    def remove(self) -> None:
        """Note that no step is to be expected."""
        self._touched_s = 0.0
        with contextlib.suppress(OSError):
            self._path.unlink()


# -- what the ranks' values are together -----------------------------------------------------------


def average_logs(by_rank: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean of each value over the ranks that have it."""
    values: dict[str, list[float]] = {}
    for logs in by_rank:
        for name, value in logs.items():
            values.setdefault(name, []).append(float(value))
    return {name: sum(series) / len(series) for name, series in values.items()}
