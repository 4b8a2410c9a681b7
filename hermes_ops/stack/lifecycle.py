"""Start, stop and look at the stack of one home."""

from __future__ import annotations

import contextlib
import fcntl
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hermes_ops.errors import StackError
from hermes_ops.stack import (
    airflow_admin,
    airflow_settings,
    credentials,
    health,
    preflight,
    processes,
    programs,
    record,
)
from hermes_ops.stack.layout import Layout, write_private
from hermes_ops.stack.settings import Settings
from hermes_ops.stack.supervisor import RUNNING, ProgramState, Supervisor

POLL_S = 0.1
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StackStatus:
    """One look at a stack: `record` is None where none was started."""

    record: record.StackRecord | None
    programs: tuple[ProgramState, ...]

    @property
    def running(self) -> bool:
        """Tell whether every program is up."""
        return bool(self.programs) and all(p.state == RUNNING for p in self.programs)


@contextlib.contextmanager
def _only_one(layout: Layout) -> Iterator[None]:
    """Hold the home against a second `up` or `down` at the same time."""
    with (layout.home / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            message = f"Another `hermes up` or `hermes down` works in {layout.home}: wait for it"
            raise StackError(message) from None
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Let no second Ctrl-C cut a clean stop short."""
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
    with _only_one(layout):
        supervisor = Supervisor(layout)
        _refuse_if_running(layout, supervisor)
        chosen = _checked(settings)
        _clear(layout, supervisor, say)
        try:
            _start(settings, chosen, supervisor, say)
        except BaseException:
            say("Stopping what was started …")
            with undisturbed():
                _stop(layout, supervisor, settings.drain_timeout_s, say)
            raise
        return chosen


def down(layout: Layout, drain_timeout_s: float, say: Say) -> bool:
    """Stop the trials with their checkpoints, then everything; False if nothing was running.

    Raises `StackError` if a process of this home is still there at the end.
    """
    if not layout.home.is_dir():
        return False
    with _only_one(layout):
        supervisor = Supervisor(layout)
        alive = supervisor.is_alive()
        if not alive and not processes.members(layout.home):
            _forget(layout)
            return False
        _stop(layout, supervisor, drain_timeout_s, say)
    return True


def status(layout: Layout) -> StackStatus:
    """Return the state of every program; no programs if the stack is not running."""
    try:
        known = _with_policy_in_force(layout, record.load(layout.home))
    except StackError:
        known = None
    supervisor = Supervisor(layout)
    states = tuple(supervisor.states()) if supervisor.is_alive() else ()
    return StackStatus(known, states)


def _with_policy_in_force(layout: Layout, known: record.StackRecord) -> record.StackRecord:
    """Return `known` with the policy that the controller reads now: it may have been changed."""
    try:
        policy = json.loads(layout.policy.read_text())
        return replace(known, policy=policy["policy"], policy_options=policy["options"])
    except (OSError, ValueError, KeyError, TypeError):
        return known


def _refuse_if_running(layout: Layout, supervisor: Supervisor) -> None:
    """Raise if a stack is up. One whose start was cut off has no record: it is started anew."""
    if not supervisor.is_alive() or not layout.record.exists():
        return
    running = record.load(layout.home)
    raise StackError(
        f"Hermes is already running in {layout.home}: Airflow at {running.airflow_url}, MLflow at "
        f"{running.mlflow_url}. See `hermes status`; stop it with `hermes down` first"
    )


def _checked(settings: Settings) -> record.StackRecord:
    slots = preflight.slots_of(settings)
    preflight.check_disk(settings.layout)
    preflight.check_policy(settings)
    preflight.check_dags(settings)
    preflight.check_databases(settings)
    airflow_port = preflight.choose_port(settings.airflow_port, "--airflow-port")
    mlflow_port = preflight.choose_port(settings.mlflow_port, "--mlflow-port")
    if airflow_port == mlflow_port:
        raise StackError(f"Airflow and MLflow cannot share port {airflow_port}: change one of them")
    metrics_port = preflight.choose_port(settings.metrics_port, "--metrics-port")
    standby = slots if settings.standby is None else settings.standby
    return record.StackRecord(
        home=str(settings.home),
        airflow_url=f"http://127.0.0.1:{airflow_port}",
        mlflow_url=f"http://127.0.0.1:{mlflow_port}",
        pool=settings.pool,
        slots=slots,
        policy=settings.policy,
        policy_options=dict(settings.policy_options),
        mlflow_auth=settings.mlflow_auth,
        standby=standby if programs.standby_is_available() else 0,
        started_s=time.time(),
        metrics_url=f"http://127.0.0.1:{metrics_port}/metrics",
    )


def _clear(layout: Layout, supervisor: Supervisor, say: Say) -> None:
    """End what an earlier stack left behind: a crash leaves processes, sockets and flag files."""
    supervisor.shutdown()
    ended = processes.end(layout.home)
    if ended:
        say(f"Ended {ended} processes that an earlier start had left behind")
    _forget(layout)


def _forget(layout: Layout) -> None:
    for file in (layout.drain, layout.record, layout.standby_socket, layout.supervisor_socket):
        file.unlink(missing_ok=True)


def _start(
    settings: Settings, chosen: record.StackRecord, supervisor: Supervisor, say: Say
) -> None:
    secrets = credentials.ensure(settings.layout)
    table = _configure(settings, chosen, secrets)
    supervisor.start()
    gate = health.Gate(settings.layout, supervisor, settings.start_timeout_s)
    say("Starting MLflow, preparing Airflow's database …")
    supervisor.start_program("mlflow")
    airflow_admin.migrate(settings, programs.base_environment(chosen))
    say("Starting Airflow …")
    for name in programs.AIRFLOW_PROGRAMS:
        supervisor.start_program(name)
    gate.wait([health.api_check(chosen.airflow_url)])
    with contextlib.closing(airflow_admin.administrator(chosen.airflow_url, secrets)) as client:
        airflow_admin.set_pool(client, chosen.pool, chosen.slots)
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
    text = airflow_settings.render(settings, secrets, chosen.slots, port)
    write_private(settings.layout.airflow_config, text)
    table = programs.programs_of(settings, secrets, chosen)
    programs.write_configuration(settings.layout, table, chosen)
    policy = {"policy": chosen.policy, "options": chosen.policy_options}
    write_private(settings.layout.policy, json.dumps(policy) + "\n")
    return table


def _stop(layout: Layout, supervisor: Supervisor, drain_timeout_s: float, say: Say) -> None:
    try:
        if supervisor.is_alive():
            _drain(layout, supervisor, drain_timeout_s, say)
            _stop_programs(supervisor)
            supervisor.shutdown()
        processes.end(layout.home)
    finally:
        _forget(layout)
    left = processes.members(layout.home)
    if left:
        pids = ", ".join(str(member.pid) for member in left)
        raise StackError(f"These processes of {layout.home} did not end: {pids}. Run down again")


def _drain(layout: Layout, supervisor: Supervisor, timeout_s: float, say: Say) -> None:
    """Have the controller stop every trial with its checkpoint; what is left gets SIGTERM."""
    layout.drain.touch()
    states = {state.name: state.state for state in supervisor.states()}
    live = processes.trials(processes.members(layout.home))
    if live:
        running = len(processes.leaders(live))
        trials = (
            "1 running trial with its checkpoint"
            if running == 1
            else (f"{running} running trials with their checkpoints")
        )
        say(f"Stopping {trials} …")
    deadline_s = time.monotonic() + (timeout_s if states.get("controller") == RUNNING else 0.0)
    while live and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        live = processes.trials(processes.members(layout.home))
    processes.end_trials(live)


def _stop_programs(supervisor: Supervisor) -> None:
    """Stop in order: no new grants, no new tasks, then what those report to."""
    known = [state.name for state in supervisor.states()]
    waves = [["controller"], ["scheduler", "standby"]]
    last = [name for name in known if not any(name in wave for wave in waves)]
    for wave in [*waves, last]:
        supervisor.stop_programs([name for name in wave if name in known])


def wait_for_signal(announce: Callable[[], None]) -> None:
    """Call `announce`, then block until SIGINT or SIGTERM; one that comes meanwhile counts."""
    received = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: received.set())
    announce()
    received.wait()
