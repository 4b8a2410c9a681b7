"""Restart programs that hang: `python -m hermes_ops.stack.liveness --home HOME`.

The supervisor restarts a program that ends; one that hangs does not end. Airflow's scheduler, for
example, waits for all running tasks after an error of its database, which may take days, and
schedules nothing meanwhile. This program is to a stack what liveness probes are to a cluster. A
program that is killed here has crashed for the supervisor, which starts it again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

from hermes_ops.errors import StackError
from hermes_ops.stack import health, record
from hermes_ops.stack.layout import Layout
from hermes_ops.stack.supervisor_client import RUNNING, ProgramState, SupervisorClient
from hermes_ops.trial.disk_space import disks_of

PERIOD_S = 5.0


@dataclass(slots=True)
class Liveness:
    """Counts the failed checks of each program since the last one that it passed.

    A program hangs after `limit` of them in a row, or after `start_limit` since its start.
    """

    limit: int
    start_limit: int
    _left: dict[tuple[str, int], int] = field(default_factory=dict)

    def hanging(self, states: Iterable[ProgramState], problems: Mapping[str, str]) -> list[str]:
        """Return the running programs that have failed too many checks in a row.

        `problems`: what is wrong now, by program. A program that starts has more time, until it
        works for the first time; the counts restart with each new process.
        """
        running = {(state.name, state.pid) for state in states if state.state == RUNNING}
        left = {}
        for name, pid in running:
            if name in problems:
                left[name, pid] = self._left.get((name, pid), self.start_limit) - 1
            else:
                left[name, pid] = self.limit
        self._left = left
        return sorted(name for (name, _), checks in left.items() if checks <= 0)

    def forgive(self) -> None:
        """Forget the failed checks: their cause is known, and a restart is no cure."""
        self._left = {program: max(left, self.limit) for program, left in self._left.items()}


def watch(
    liveness: Liveness,
    supervisor: SupervisorClient,
    problems: Callable[[], Mapping[str, str]],
    is_disk_full: Callable[[], bool],
    say: Callable[[str], None],
) -> None:
    """Check all programs once, and kill those that hang.

    On a full disk none is: a component of Airflow that cannot write its heartbeat is not cured by
    a restart, and trials would lose what they have not written yet.
    """
    if is_disk_full():
        liveness.forgive()
        return
    failing = problems()
    try:
        for name in liveness.hanging(supervisor.states(), failing):
            say(f"{name} hangs and is restarted: {failing[name]}")
            supervisor.kill_program(name)
    except StackError as error:  # the supervisor is away: nobody would start it again
        say(str(error))


def main(arguments: list[str] | None = None) -> None:
    """Check the programs of a home until this process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--hang-timeout-s", type=float, required=True)
    parser.add_argument("--start-timeout-s", type=float, required=True)
    options = parser.parse_args(arguments)
    layout = Layout(options.home.resolve())
    chosen, supervisor = record.load(layout.home), SupervisorClient(layout)
    limits = (ceil(s / PERIOD_S) for s in (options.hang_timeout_s, options.start_timeout_s))
    liveness = Liveness(*limits)

    def is_disk_full() -> bool:
        return any(disk.is_full for disk in disks_of(layout.folders))

    while True:
        time.sleep(PERIOD_S)
        watch(
            liveness,
            supervisor,
            lambda: health.problems(chosen),
            is_disk_full,
            lambda line: print(line, flush=True),  # noqa: T201
        )


if __name__ == "__main__":
    main()
