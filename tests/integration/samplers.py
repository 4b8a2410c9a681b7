"""What holds the GPUs of a home, and which workers live, looked at again and again."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import psutil

from hermes_ops.stack import processes

S = TypeVar("S", bound="Looking")


class Looking(Protocol):
    """What looks at something again and again until it is told to stop."""

    stop: threading.Event

    def loop(self) -> None:
        """Look until `stop` is set."""


@contextlib.contextmanager
def sampling(sampler: S) -> Iterator[S]:
    """It looks in a thread of its own, as long as this lasts; what it raises is raised here."""
    with ThreadPoolExecutor(1) as threads:
        looks = threads.submit(sampler.loop)
        try:
            yield sampler
        finally:
            sampler.stop.set()
        looks.result()


class _Use(NamedTuple):
    """One process by which a trial has a GPU: it holds its lock, or is a script that was given it.

    A hermes-trial that waits for the lock of a trial before it has none.
    """

    process: psutil.Process
    trial: str
    gpu: int

    def lasts(self) -> bool:
        """Tell whether it still has it."""
        with contextlib.suppress(psutil.Error, OSError):
            return self in _uses([self.process])
        return False


def held_gpus(home: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Sweep/number and GPUs of each trial of this home that has GPUs.

    What was there at a first look and still is at a second one was there in between, all at once.
    """
    first = _uses(m.process for m in processes.trials(processes.members(home)))
    found: dict[str, set[int]] = {}
    for use in [use for use in first if use.lasts()]:
        found.setdefault(use.trial, set()).add(use.gpu)
    return [(trial, tuple(sorted(gpus))) for trial, gpus in sorted(found.items())]


def _uses(trial_processes: Iterable[psutil.Process]) -> list[_Use]:
    found = []
    for process in trial_processes:
        with contextlib.suppress(psutil.Error, OSError, KeyError):  # it has just ended
            environment = process.environ()
            trial = f"{environment['HERMES_SWEEP']}/{environment['HERMES_TRIAL']}"
            if processes.is_trial_command(process.cmdline()):
                gpus = _locked(process.pid)
            else:
                gpus = [int(gpu) for gpu in environment["HERMES_GPUS"].split(",") if gpu]
            if process.status() != psutil.STATUS_ZOMBIE:
                found += [_Use(process, trial, gpu) for gpu in gpus]
    return found


def _locked(pid: int) -> list[int]:
    """Return the GPUs whose lock a process holds: the kernel says it of each open file."""
    found = []
    for handle in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it has just been closed
            file = handle.readlink()
            is_gpu = file.suffix == ".lock" and file.parent.parent.name == "gpus"
            if is_gpu and "FLOCK" in Path(f"/proc/{pid}/fdinfo/{handle.name}").read_text():
                found.append(int(file.stem))
    return found


@dataclass
class Sample:
    """Who held which GPUs at one instant, from the live processes: (trial, GPUs)."""

    time_s: float
    held: list[tuple[str, tuple[int, ...]]]

    @property
    def gpus(self) -> list[int]:
        return [gpu for _, gpus in self.held for gpu in gpus]


@dataclass
class Sampler:
    """Looks each 0.1 s which trials hold GPUs."""

    home: Path
    samples: list[Sample] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def loop(self) -> None:
        while not self.stop.wait(0.1):
            self.samples.append(Sample(time.time(), held_gpus(self.home)))

    @property
    def most(self) -> int:
        return max(len(s.gpus) for s in self.samples)

    @property
    def doubly_held(self) -> list[Sample]:
        return [s for s in self.samples if len(s.gpus) != len(set(s.gpus))]

    def most_trials(self, sweep: str) -> int:
        return max(sum(t.startswith(f"{sweep}/") for t, _ in s.held) for s in self.samples)


@dataclass
class WorkerSampler:
    """Looks each 0.1 s which processes of scripts/workers.py live: they list themselves."""

    folder: Path
    samples: list[list[int]] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    _gone: set[int] = field(default_factory=set)

    def loop(self) -> None:
        while not self.stop.wait(0.1):
            self.samples.append(self.alive())

    def alive(self) -> list[int]:
        """Return the process ids of the workers that live."""
        listed = {int(file.name.partition("-")[0]) for file in self.folder.glob("*.json")}
        found = []
        for pid in sorted(listed - self._gone):
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    found.append(pid)
                    continue
            self._gone.add(pid)
        return found

    @property
    def most(self) -> int:
        return max(map(len, self.samples), default=0)

    @property
    def starts(self) -> list[dict[str, Any]]:
        """Return the facts of all workers, in the order in which they have started."""
        facts = [json.loads(file.read_text()) for file in self.folder.glob("*.json")]
        return sorted(facts, key=lambda fact: float(fact["time_s"]))

    def groups(self, sweep: str) -> list[list[dict[str, Any]]]:
        """Return the workers of each segment of a sweep of one trial that all have started."""
        mine = [fact for fact in self.starts if fact["sweep"] == sweep]
        found = []
        while mine:
            size = int(mine[0]["size"])
            group, mine = mine[:size], mine[size:]
            found.append(group)
        return found

    def batches(self, worker: Mapping[str, Any]) -> int:
        """Return how many batches a worker of scripts/horovod_train.py has trained."""
        file = self.folder / f"{worker['pid']}-{worker['rank']}.batches"
        return int(file.read_text())
