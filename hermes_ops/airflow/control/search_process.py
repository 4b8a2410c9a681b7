"""Searches that are slow to answer, asked in processes of their own: no round waits for them.

A question of TPE takes seconds with 1,000 parameters, or with thousands of past trials, and holds
Python's interpreter lock all the while: a thread would slow every round down. A slow search has a
process that keeps its history; only what is new is sent. The answer is taken in a later round, and
the next question is asked before a trial needs it.

Nothing is kept here that must not be lost: a question that a killed controller had not had
answered is asked again.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hermes_ops.airflow.folders import controller_wake_file
from hermes_ops.config import SweepConfig, parse
from hermes_ops.errors import HermesError, error_text
from hermes_ops.search.interface import Observation

SLOW_WORK = 10_000
"""Parameters times trials from which a question may take more than a tenth of a second."""

FEWEST_TRIALS = 100
"""A question about fewer trials takes as long as one about this many."""

CONSTRAINED = 4
"""A suggestion that violates a constraint is made again."""

MOST_PROCESSES = 4
"""Each takes some 150 MB; searches beyond that wait for their turn."""

ANSWER_S = 300.0
"""A search that has not answered for so long is ended; it counts as a failure of the draw."""

NICENESS = 10
PARENT_PERIOD_S = 1.0


def is_slow(config: SweepConfig, axes: int, number: int, observed: int) -> bool:
    """Return whether a question about `observed` trials may take too long for a round.

    How long the sampler of another package takes is not known.
    """
    search = config.search
    if not search.algorithm.is_builtin:
        return number >= len(search.points_to_evaluate)
    if not search.learns or number < search.startup_trials or not observed:
        return False
    work = axes * max(FEWEST_TRIALS, observed)
    return work * (CONSTRAINED if search.constraints else 1) > SLOW_WORK


class Unanswered(HermesError):
    """A search has given no answer and never will: it raised an error, ended, or took too long."""


@dataclass(slots=True)
class SearchProcess:
    """The process of one sweep's search: it is asked one question at a time."""

    config: Mapping[str, Any]
    clock: Callable[[], float] = time.monotonic
    _answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    _requested: int | None = None
    _asked_s: float = 0.0
    _failed: dict[int, str] = field(default_factory=dict)
    _observed: dict[int, Observation] = field(default_factory=dict)
    _process: subprocess.Popen[str] | None = None

    def ask(self, number: int, history: Sequence[Observation]) -> None:
        """Ask which configuration a trial has; nothing while a question is open."""
        if self._requested is not None:
            return
        lines: list[Any] = []
        if self._process is None:
            self._process, self._observed = _started(), {}
            lines.append(self.config)
        for seen in history:
            before = self._observed.get(seen.number)
            if before != seen:
                lines.append(_message(seen, with_config=before is None))
                self._observed[seen.number] = seen
        lines.append({"ask": number})
        self._requested, self._asked_s = number, self.clock()
        talk = (self._process, number, lines)
        name = f"search {number}"
        threading.Thread(target=self._converse, args=talk, daemon=True, name=name).start()

    def pop_answer(self, number: int) -> dict[str, Any] | None:
        """Return the configuration of a trial, once; None while there is no answer (Unanswered)."""
        if number in self._failed:
            raise Unanswered(self._failed.pop(number))
        return self._answers.pop(number, None)

    def answered(self) -> frozenset[int]:
        """Return the trials whose configuration, or why there is none, can be taken."""
        return frozenset((*self._answers, *self._failed))

    def keep_only(self, numbers: Collection[int]) -> None:
        """Drop the answers for all other trials, which would never be taken."""
        for number in self.answered().difference(numbers):
            self._answers.pop(number, None)
            self._failed.pop(number, None)

    @property
    def is_asked(self) -> bool:
        """Return whether a question is open."""
        return self._requested is not None

    def give_up_if_late(self) -> None:
        """Give up the question if it has been open for too long."""
        number = self._requested
        if number is not None and self.clock() - self._asked_s > ANSWER_S:
            self._failed[number] = f"the search has given no answer for {ANSWER_S:.0f} s"
            self.close()

    @property
    def is_alive(self) -> bool:
        """Return whether it has a process."""
        return self._process is not None

    def close(self) -> None:
        """End the process; the next question starts another."""
        process, self._process, self._requested = self._process, None, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()

    def _converse(
        self, process: subprocess.Popen[str], number: int, lines: Sequence[object]
    ) -> None:
        """Tell the process what is new, wait for its answer, and wake the controller."""
        answer = _exchanged(process, lines)
        if process is not self._process:
            return  # it was closed meanwhile
        if "config" in answer:
            self._answers[number] = answer["config"]
        else:
            ended = "the process of the search has ended without an answer"
            self._failed[number] = str(answer.get("error") or ended)
            if "error" not in answer:
                self.close()
        self._requested = None
        controller_wake_file().wake()


@dataclass(slots=True)
class SlowSearches:
    """The slow searches of a controller, by sweep; a bounded number has a process."""

    _processes: dict[str, SearchProcess] = field(default_factory=dict)

    def pop_answer(self, sweep: str, number: int) -> dict[str, Any] | None:
        """Return the configuration of a trial, once; None if it is not known (Unanswered)."""
        process = self._processes.get(sweep)
        return None if process is None else process.pop_answer(number)

    def ask(
        self,
        sweep: str,
        config: Mapping[str, Any],
        number: int,
        history: Callable[[], Sequence[Observation]],
    ) -> None:
        """Ask for a trial's configuration, unless a question of the sweep is open or answered."""
        for each in self._processes.values():
            each.give_up_if_late()
        process = self._processes.get(sweep)
        if process is not None and (process.is_asked or process.answered()):
            return
        alive = [p for p in self._processes.values() if p.is_alive and p is not process]
        if len(alive) >= MOST_PROCESSES and not (process is not None and process.is_alive):
            idle = next((p for p in alive if not p.is_asked), None)
            if idle is None:
                return  # all are at work: it waits for its turn
            idle.close()
        if process is None:
            process = self._processes[sweep] = SearchProcess(config)
        process.ask(number, history())

    def keep_only(self, sweep: str, numbers: Collection[int]) -> None:
        """Drop the answers for all trials of a sweep except these."""
        process = self._processes.get(sweep)
        if process is not None:
            process.keep_only(numbers)

    def answered(self, sweep: str) -> frozenset[int]:
        """Return the trials of a sweep whose configuration can be taken."""
        process = self._processes.get(sweep)
        return frozenset() if process is None else process.answered()

    def forget(self, sweep: str) -> None:
        """End the search of a sweep."""
        process = self._processes.pop(sweep, None)
        if process is not None:
            process.close()

    def close(self) -> None:
        """End all of them."""
        for sweep in tuple(self._processes):
            self.forget(sweep)


def _started() -> subprocess.Popen[str]:
    # -P: the working directory is no place to import from.
    command = [sys.executable, "-P", "-m", "hermes_ops.airflow.control.search_process"]
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, **one_thread},
    )


def _exchanged(process: subprocess.Popen[str], lines: Sequence[object]) -> dict[str, Any]:
    """Return the answer to a question; empty if the process has ended."""
    if process.stdin is None or process.stdout is None:
        return {}
    try:
        process.stdin.writelines(f"{json.dumps(line)}\n" for line in lines)
        process.stdin.flush()
        answer = json.loads(process.stdout.readline() or "{}")
    except (OSError, ValueError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _message(seen: Observation, *, with_config: bool) -> dict[str, Any]:
    """Return the message about a trial: its configuration once, its result when it changes."""
    message = {"number": seen.number, "loss": seen.loss, "state": seen.state}
    return {**message, "config": dict(seen.config)} if with_config else message


def answers(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the response to each request among the lines; runs in the search's process."""
    config = parse(json.loads(next(lines)), source="the sweep", base=None)
    sampler = config.search.to_sampler()
    observations: dict[int, Observation] = {}
    for line in lines:
        message = json.loads(line)
        if "ask" not in message:
            number = message["number"]
            drawn = message["config"] if "config" in message else observations[number].config
            observations[number] = Observation(number, drawn, message["loss"], message["state"])
            continue
        try:
            yield {"config": dict(sampler.ask(message["ask"], tuple(observations.values())))}
        except Exception as error:  # whatever a search raises is its sweep's own fault
            yield {"error": error_text(error)}


def _end_with_parent() -> None:
    """End this process when the controller is gone, also in the midst of a question."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(PARENT_PERIOD_S)
    os._exit(1)


def main() -> None:
    """Answer questions on standard output until standard input ends.

    What a sampler prints is redirected to standard error, the controller's log, so that it is not
    read as an answer.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(NICENESS)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as replies:
        os.dup2(2, 1)
        with contextlib.suppress(StopIteration, BrokenPipeError):
            for answer in answers(iter(sys.stdin)):
                replies.write(f"{json.dumps(answer)}\n")
                replies.flush()


if __name__ == "__main__":
    main()
