"""Start and stop the stack of one home, and report its status.

A stop ends the trials with their checkpoints, then the programs in order. It works with and without
the process supervisor: one that was killed leaves its programs running, and they are ended in the
same order.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from http.client import HTTPException

from hermes_ops.errors import StackError
from hermes_ops.stack import (
    airflow_service,
    credentials,
    health,
    preflight,
    processes,
    programs,
    record,
)
from hermes_ops.stack.layout import Layout, write_private
from hermes_ops.stack.settings import Settings
from hermes_ops.stack.supervisor_client import RUNNING, ProgramState, SupervisorClient
from hermes_ops.trial.disk_space import DiskSpace, disks_of, write_remedy
from hermes_ops.trial.environment import InheritanceRule

UNSUPERVISED = "UNSUPERVISED"
# How often `up --foreground` looks for its supervisor, and after how many looks it gives it up.
LOOK_S, LOOKS_IN_VAIN = 2.0, 3
NAMES_SAID = 8
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StackStatus:
    """The status of a stack: `record` is None if none was started.

    `orphans` are the programs that run on although their supervisor has ended, and `trials` is the
    number of trials that train with them; both are empty while a supervisor answers. `trouble` says
    why the record of the start cannot be read, as that of another version; empty where it can.
    """

    record: record.StackRecord | None
    programs: tuple[ProgramState, ...]
    orphans: tuple[ProgramState, ...] = ()
    trials: int = 0
    disks: tuple[DiskSpace, ...] = ()
    trouble: str = ""

    @property
    def is_unsupervised(self) -> bool:
        """True if something runs although its supervisor has ended."""
        return bool(self.orphans or self.trials)

    @property
    def is_running(self) -> bool:
        """True if every program is up."""
        return bool(self.programs) and all(p.state == RUNNING for p in self.programs)


@contextlib.contextmanager
def _locked(layout: Layout) -> Iterator[None]:
    """Lock the home against a second `up` or `down` at the same time."""
    file = layout.home / ".lock"
    try:  # for reading: a disk that is full or read-only does not keep `down` from its work
        descriptor = os.open(file, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        message = f"{file} cannot be opened ({error.strerror}): {write_remedy(error)}"
        raise StackError(message) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            message = f"Another `hermes up` or `hermes down` works in {layout.home}: wait for it"
            raise StackError(message) from None
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def hold_stopped(layout: Layout) -> Iterator[None]:
    """Lock a home in which nothing runs against a start; raises `StackError` if something runs."""
    with _locked(layout):
        if SupervisorClient(layout).is_alive() or processes.members(layout.home):
            raise StackError(
                f"Hermes is running in {layout.home}: stop it with `hermes down --home "
                f"{layout.home}` first"
            )
        yield


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM, so that a second Ctrl-C does not interrupt a clean stop."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def up(settings: Settings, say: Say) -> record.StackRecord:
    """Start the stack and return when all of it is healthy.

    Raises `StackError` or `ConfigError` with the remedy; whatever was started is stopped then, and
    likewise on KeyboardInterrupt.
    """
    layout = settings.layout
    preflight.prepare_home(layout)
    with _locked(layout):
        supervisor = SupervisorClient(layout)
        _refuse_if_running(layout, supervisor)
        slots = _check(settings, say)
        _end_leftovers(layout, supervisor, settings.drain_timeout_s, say)
        _print_missed_variables(settings, say)
        try:
            chosen = _choose(settings, slots)
            _start(settings, chosen, supervisor, say)
        except BaseException:
            say("Stopping what was started …")
            with signals_ignored():
                stop(layout, supervisor, settings.drain_timeout_s, say)
            raise
        return chosen


def down(layout: Layout, drain_timeout_s: float, say: Say) -> bool:
    """Stop the trials with their checkpoints, then everything; False if nothing was running.

    Raises `StackError` if a process of this home is still there at the end.
    """
    if not layout.home.is_dir():
        return False
    with _locked(layout):
        supervisor = SupervisorClient(layout)
        alive = supervisor.is_alive()
        if not alive and not processes.members(layout.home):
            _forget(layout)
            return False
        stop(layout, supervisor, drain_timeout_s, say)
    return True


def status(layout: Layout) -> StackStatus:
    """Return the state of every program; no programs if the stack is not running."""
    current, trouble = None, ""
    try:
        current = _with_policy_in_force(layout, record.load(layout.home))
    except StackError as error:
        trouble = str(error) if layout.record.exists() else ""
    supervisor = SupervisorClient(layout)
    disks = tuple(disks_of(layout.folders))
    if supervisor.is_alive():
        return StackStatus(current, tuple(supervisor.states()), disks=disks, trouble=trouble)
    left = processes.members(layout.home)
    trials = len(processes.leaders(processes.trials(left)))
    return StackStatus(current, (), _orphans(left, time.time()), trials, disks, trouble)


def _orphans(left: list[processes.HomeProcess], now_s: float) -> tuple[ProgramState, ...]:
    return tuple(
        ProgramState(
            name=member.program,
            state=UNSUPERVISED,
            pid=member.pid,
            uptime_s=max(0.0, now_s - member.started_s),
            started_s=member.started_s,
        )
        for member in processes.programs(left)
    )


def _with_policy_in_force(layout: Layout, started: record.StackRecord) -> record.StackRecord:
    """Return `started` with the policy that the controller reads now: it may have been changed."""
    try:
        policy = json.loads(layout.policy.read_text())
        return replace(started, policy=policy["policy"], policy_options=policy["options"])
    except (OSError, ValueError, KeyError, TypeError):
        return started


def _refuse_if_running(layout: Layout, supervisor: SupervisorClient) -> None:
    """Raise if a stack is up. One whose start was interrupted has no record: it is restarted."""
    if not supervisor.is_alive() or not layout.record.exists():
        return
    running = record.load(layout.home)
    raise StackError(
        f"Hermes is already running in {layout.home}: Airflow at {running.airflow_url}, MLflow at "
        f"{running.mlflow_url}. See `hermes status`; stop it with `hermes down` first"
    )


def _check(settings: Settings, say: Say) -> int:
    """Return the pool's slots; raise before anything is ended or started if `up` cannot go on."""
    from hermes_ops.stack import migrations  # imports SQLAlchemy, which no other command needs

    migrations.refuse_newer(
        migrations.recorded_versions(settings.layout), f"The state folder {settings.home}"
    )
    slots = preflight.slots_of(settings)
    for line in preflight.check_disks(settings.layout):
        say(line)
    preflight.check_policy(settings)
    preflight.check_dags(settings)
    preflight.check_databases(settings)
    ours = {member.pid for member in processes.members(settings.home)}
    preflight.check_ports(settings, ours)
    return slots


def _choose(settings: Settings, slots: int) -> record.StackRecord:
    airflow_port = preflight.choose_port(settings.airflow_port, "--airflow-port")
    mlflow_port = preflight.choose_port(settings.mlflow_port, "--mlflow-port")
    metrics_port = preflight.choose_port(settings.metrics_port, "--metrics-port")
    return record.StackRecord(
        home=str(settings.home),
        airflow_url=f"http://127.0.0.1:{airflow_port}",
        mlflow_url=f"http://127.0.0.1:{mlflow_port}",
        pool=settings.pool,
        slots=slots,
        policy=settings.policy,
        policy_options=dict(settings.policy_options),
        mlflow_auth=settings.mlflow_auth,
        standby=slots if settings.standby is None else settings.standby,
        started_s=time.time(),
        metrics_url=f"http://127.0.0.1:{metrics_port}/metrics",
        trial_environment=settings.trial_environment,
        inherited=programs.passed_to_trials(settings.trial_environment),
    )


def _print_missed_variables(settings: Settings, say: Say) -> None:
    """Name the variables of this shell that scripts often need and that trials do not inherit."""
    missed = InheritanceRule(settings.trial_environment).missed(os.environ)
    if not missed:
        return
    more = f" and {len(missed) - NAMES_SAID} more" if len(missed) > NAMES_SAID else ""
    say(
        f"Trials do not inherit {', '.join(missed[:NAMES_SAID])}{more}: "
        f"--trial-environment NAME passes a variable on"
    )


def _end_leftovers(
    layout: Layout, supervisor: SupervisorClient, drain_timeout_s: float, say: Say
) -> None:
    """End what an earlier stack left behind: a crash leaves processes, sockets and flag files."""
    left = processes.members(layout.home)
    if not left and not supervisor.is_alive():
        _forget(layout)
        return
    say(f"Ending {len(left)} processes that an earlier start has left behind …")
    stop(layout, supervisor, drain_timeout_s, say)


def _start(
    settings: Settings, chosen: record.StackRecord, supervisor: SupervisorClient, say: Say
) -> None:
    from hermes_ops.stack import migrations

    secrets = credentials.ensure(settings.layout, settings.people)
    table = _configure(settings, chosen, secrets)
    migrations.record_versions(settings.layout)
    migrations.upgrade_mlflow(settings, programs.base_environment(chosen))
    supervisor.start()
    gate = health.HealthGate(settings.layout, supervisor, settings.start_timeout_s)
    say("Starting MLflow, preparing Airflow's database …")
    supervisor.start_program("mlflow")
    migrations.migrate_airflow(settings, programs.base_environment(chosen))
    say("Starting Airflow …")
    for name in programs.AIRFLOW_PROGRAMS:
        supervisor.start_program(name)
    gate.wait([health.api_check(chosen.airflow_url)])
    with contextlib.closing(airflow_service.administrator(chosen.airflow_url, secrets)) as client:
        airflow_service.set_pool(client, chosen.pool, chosen.slots)
        record.save(settings.layout, chosen)
        for program in table:
            if program.name not in {"mlflow", *programs.AIRFLOW_PROGRAMS}:
                supervisor.start_program(program.name)
        checks = [health.mlflow_check(chosen.mlflow_url), health.dag_check(client)]
        checks += health.heartbeat_checks(chosen.airflow_url, chosen.started_s)
        checks += [health.running_check(supervisor, program.name) for program in table]
        gate.wait(checks)


def _configure(
    settings: Settings, chosen: record.StackRecord, secrets: credentials.Credentials
) -> list[programs.Program]:
    port = int(chosen.airflow_url.rpartition(":")[2])
    text = airflow_service.render(settings, secrets, chosen.slots, port)
    write_private(settings.layout.airflow_config, text)
    table = programs.programs_of(settings, secrets, chosen)
    programs.write_configuration(settings.layout, table, chosen)
    policy = {"policy": chosen.policy, "options": chosen.policy_options}
    write_private(settings.layout.policy, json.dumps(policy) + "\n")
    return table


def wait_for_signal(
    announce: Callable[[], None], is_alive: Callable[[], bool], *, look_s: float = LOOK_S
) -> bool:
    """Call `announce`, then block until SIGINT or SIGTERM; one that comes meanwhile counts.

    Returns False if the stack has lost its supervisor before: `is_alive` was false LOOKS_IN_VAIN
    times in a row.
    """
    received = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: received.set())
    announce()
    missed = 0
    while missed < LOOKS_IN_VAIN and not received.wait(look_s):
        missed = 0 if is_alive() else missed + 1
    return missed < LOOKS_IN_VAIN


POLL_S = 0.1
CONTROLLER = "controller"
SUPERVISOR = "supervisor"
FIRST_WAVES = ((programs.LIVENESS, CONTROLLER), ("scheduler", "standby"))
"""Programs to stop first: nothing is restarted and nothing granted any more, then no new tasks,
then the services that they use."""

ORPHAN_GRACE_S = 10.0
"""Time of a program without a supervisor between SIGTERM and SIGKILL."""


def stop(layout: Layout, supervisor: SupervisorClient, drain_timeout_s: float, say: Say) -> None:
    """Stop everything of a home; raises `StackError` if a process is still there at the end."""
    try:
        _drain(layout, drain_timeout_s, say)
        if supervisor.is_alive():
            with contextlib.suppress(StackError, OSError, HTTPException):  # it may end or hang now
                _stop_programs(supervisor)
            supervisor.shutdown()
        _end_orphans(layout)
        processes.end(layout.home)
    finally:
        _forget(layout)
    left = processes.members(layout.home)
    if left:
        pids = ", ".join(str(member.pid) for member in left)
        raise StackError(f"These processes of {layout.home} did not end: {pids}. Run down again")


def _forget(layout: Layout) -> None:
    """Remove the files that mark a running stack; a read-only file system keeps them."""
    for file in (layout.drain, layout.record, layout.standby_socket, layout.supervisor_socket):
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def _drain(layout: Layout, timeout_s: float, say: Say) -> None:
    """Let the controller stop every trial at a checkpoint; send SIGTERM to what is left."""
    is_told = _tell_to_drain(layout)
    alive = processes.members(layout.home)
    live = processes.trials(alive)
    if live:
        running = len(processes.leaders(live))
        trials = (
            "1 running trial with its checkpoint"
            if running == 1
            else f"{running} running trials with their checkpoints"
        )
        say(f"Stopping {trials} …")
    can_drain = is_told and any(member.program == CONTROLLER for member in alive)
    deadline_s = time.monotonic() + (timeout_s if can_drain else 0.0)
    while live and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        live = processes.trials(processes.members(layout.home))
    processes.end_trials(live)


def _tell_to_drain(layout: Layout) -> bool:
    """Tell the controller to stop all trials; False if the disk does not take the file."""
    try:
        layout.drain.touch()
    except OSError:
        return False
    return True


def _stop_programs(supervisor: SupervisorClient) -> None:
    for wave in _waves([state.name for state in supervisor.states()]):
        supervisor.stop_programs(wave)


def _end_orphans(layout: Layout) -> None:
    """End the programs that run without their supervisor, in the order of a clean stop.

    A supervisor that is there and does not answer goes first: it would start them again.
    """
    processes.end_programs(layout.home, [SUPERVISOR], 0.0)
    running = [m.program for m in processes.members(layout.home) if m.program and not m.trial]
    for wave in _waves(dict.fromkeys(running)):
        processes.end_programs(layout.home, wave, ORPHAN_GRACE_S)


def _waves(names: Iterable[str]) -> list[list[str]]:
    all_names = list(names)
    first = [[name for name in wave if name in all_names] for wave in FIRST_WAVES]
    last = [name for name in all_names if not any(name in wave for wave in FIRST_WAVES)]
    return [wave for wave in (*first, last) if wave]
