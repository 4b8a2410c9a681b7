"""One segment of a trial: take its locks, start its script, supervise it, record its end."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hermes_ops.trial import node_checkpoints, segment_records
from hermes_ops.trial.environment import resolve_references, restore_script_variables
from hermes_ops.trial.event_channel import RUN_VARIABLE, URI_VARIABLE
from hermes_ops.trial.failure import Cause, is_final, may_start_later
from hermes_ops.trial.files import Folder, read_json, trial_seeds
from hermes_ops.trial.locks import (
    RESTART_EPOCH_VARIABLE,
    BusyError,
    LockHolder,
    fence,
    lock_file,
    lock_gpus,
    newest_epoch,
)
from hermes_ops.trial.metrics import MetricsFile
from hermes_ops.trial.outcome import INFRASTRUCTURE, PREEMPTED, SegmentEnding, SegmentOutcome
from hermes_ops.trial.output.relay import say
from hermes_ops.trial.processes.reaper import END_S, PlainChild, Reaper, fork_reaper
from hermes_ops.trial.processes.record import KILL_AFTER_S, own_record
from hermes_ops.trial.processes.tree import SEGMENT_VARIABLE, Child, adopt_orphans, sweep_up
from hermes_ops.trial.processes.workers import WorkerProcesses
from hermes_ops.trial.standby.client import (
    StandbyChild,
    StandbyOrder,
    report_imports,
    standby_order,
    start_standby,
)
from hermes_ops.trial.supervisor.options import SegmentOptions, parse
from hermes_ops.trial.supervisor.stop_requests import StopRequests
from hermes_ops.trial.supervisor.supervisor import ScriptSupervisor
from hermes_ops.trial.temporary_folder import TemporaryFolder
from hermes_ops.trial.workspace import COPY, WorkspaceError, ensure_workspace, written_originals

if TYPE_CHECKING:
    from hermes_ops.trial.checkpoint_store.download import DownloadResult
    from hermes_ops.trial.gang.layout import Gang
    from hermes_ops.trial.group_start import MeetingPlaces
    from hermes_ops.trial.ports import ReservedPort

_GPU_WAIT_S = 10.0
_REAPER_LOST = (errno.EPIPE, errno.ECONNRESET, errno.ESRCH)
"""What the connection to a reaper answers once it is gone; no program is refused so."""
_KEPT_FILES = ("lock", "nudge", "sent.json")
"""Files of a trial's folder that its task or its lock needs while the trial begins from scratch."""
_STORE_VARIABLE = "HERMES_CHECKPOINT_STORE"  # the folder that the sweep names

SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")


class _ScriptEnd(NamedTuple):
    """How the script ended, and what it said last."""

    ending: SegmentEnding
    exit_code: int
    tail: list[str]


def _not_started(ending: SegmentEnding) -> _ScriptEnd:
    """Return the end of a script that has not been started: its reason is all that there is."""
    return _ScriptEnd(ending, ending.code, [ending.reason])


def run(words: Sequence[str]) -> int:
    """Run the segment that this command line asks for; return the exit code of hermes-trial."""
    parent = os.getppid()
    if words[:1] == [node_checkpoints.EMPTY_OPTION]:
        return node_checkpoints.main(words[1:])
    restore_script_variables(os.environ)
    options = parse(words)
    if options.on_word and not sys.stdin.buffer.read(1):
        return INFRASTRUCTURE  # whoever has started this has no use for it, or is no more
    folder = Folder(options.folder)
    if options.gang is not None and not options.gang.is_leader:
        return _serve_node(options.gang, options, folder)
    return _lead(options, folder, parent)


def _lead(options: SegmentOptions, folder: Folder, parent: int) -> int:
    """Run the segment as the one owner of the trial's folder and GPUs."""
    try:
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        holder, hang_s = LockHolder.current(parent, folder.root), options.grace_s + KILL_AFTER_S
        lock_file(folder.lock, options.lock_wait_s, "the trial's folder", holder, hang_s)
        _restart_from_scratch(folder)
        _set_folders_aside(folder)
        fence(folder, options.epoch)
        if options.gpu_locks is not None:
            wait_s = min(_GPU_WAIT_S, 2 * options.lock_wait_s)
            lock_gpus(options.gpu_locks, options.gpus, wait_s, holder, hang_s)
    except (BusyError, OSError) as busy:
        say(str(busy), sys.stderr)
        return INFRASTRUCTURE
    if (read_json(folder.result) or {}).get("outcome") == SegmentOutcome.FINISHED.value:
        say("this trial has finished already")
        return 0
    try:
        return _run(options, folder, parent)
    except OSError as error:  # our own files: the script is not at fault
        say(f"cannot write in {folder.root}: {error}", sys.stderr)
        return INFRASTRUCTURE


def _restart_from_scratch(folder: Folder) -> None:
    """Delete what an earlier life of the trial has left. Hold the folder's lock.

    The trial's task deletes it too, but cannot where its user is not that of the trial's pods.
    A folder that comes from a backup has no epoch, but its segments.
    """
    seen = max(newest_epoch(folder), segment_records.newest_segment_epoch(folder))
    if seen >= int(os.environ.get(RESTART_EPOCH_VARIABLE) or -1):
        return
    mounted = folder.checkpoints  # it may be a volume
    is_empty = node_checkpoints.delete_content(folder.root, (*_KEPT_FILES, mounted.name))
    if not (node_checkpoints.delete_content(mounted) and is_empty):
        raise BusyError(f"{folder.root} cannot be emptied: the trial is to begin from scratch")


def _set_folders_aside(folder: Folder) -> None:
    for line in segment_records.set_folders_aside(folder):
        say(line)


def _serve_node(gang: Gang, options: SegmentOptions, folder: Folder) -> int:
    """Run the workers of a node that does not lead: the first one owns the trial and its folder."""
    from hermes_ops.trial.gang.member import GangMember, NodeWorkers
    from hermes_ops.trial.group_start import start_node
    from hermes_ops.trial.store_client import StoreClient

    stops = StopRequests(options.grace_s)
    token = os.urandom(16).hex()
    _on_stop(stops.request)
    adopt_orphans()
    temporary = TemporaryFolder(folder.root, token, gang.node)

    def end_rest() -> None:
        sweep_up(token, wait_s=END_S)
        temporary.remove_if_empty()

    reaper = fork_reaper(at_end=end_rest)

    def start() -> NodeWorkers:
        reason = resolve_references(os.environ)
        ready, refused = _prepare_directory(options, folder)
        if reason is not None or refused is not None:
            raise OSError(reason or (refused.ending.reason if refused else ""))
        variables = environment(ready, folder, token, os.environ)
        variables.update(temporary.variables(variables))
        return start_node(ready, folder, variables, _command(ready), reaper)

    store = StoreClient(f"{gang.nodes[0].host}:{gang.port}")
    member = GangMember(gang, store, start, lambda: stops.count > 0, options.gang_timeout_s)
    code = member.run(options.grace_s + KILL_AFTER_S)
    sweep_up(token, wait_s=END_S)
    temporary.close(is_last=True, has_fitted=False)
    reaper.release()
    return code


def _run(options: SegmentOptions, folder: Folder, parent: int) -> int:
    if options.node is not None:
        node_checkpoints.claim(folder, options.node)
    segment_records.close_lost_segment(folder, _last_step(options, folder))
    segment_records.recover_values(folder)
    folder.result.unlink(missing_ok=True)
    segment_records.keep_reserve(folder.reserve)
    token = os.urandom(16).hex()
    stops = StopRequests(options.grace_s)
    _on_stop(stops.request)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the loop
    adopt_orphans()
    own_record(folder.root).end(END_S)  # of a segment that was killed with its reaper
    reaper = fork_reaper(at_end=lambda: _end_leftovers(folder, token))
    with contextlib.suppress(OSError):  # the script's own process would say so
        trial_seeds(folder.root)
    segment_records.open_segment(folder, options.epoch, options.gpus, _last_step(options, folder))
    refused = _end_without_variable()
    url = _store_url() if refused is None else None
    answer = _download(url, options, folder, token, stops) if url is not None else None
    if refused is None:
        options, refused = _prepare_directory(options, folder)
    supervisor = ScriptSupervisor(options, folder, token, parent, stops)
    supervisor.write_status()
    end = _end_without_checkpoint(answer) or refused
    if end is None:
        end = _watch(options, folder, supervisor, token, reaper)
    if supervisor.on_training is not None:
        supervisor.on_training()
    _finish(options, folder, supervisor, end)
    is_last = end.ending.outcome is SegmentOutcome.FINISHED or not end.ending.retryable
    temporary = TemporaryFolder(folder.root, token)
    temporary.close(is_last=is_last, has_fitted=supervisor.status.training)
    reaper.release()
    return end.ending.code


def _end_leftovers(folder: Folder, token: str) -> None:
    """End what runs in a standby interpreter; called in the reaper once hermes-trial has gone.

    The reaper has inherited the locks: folder and GPUs are free only after that.
    """
    sweep_up(token, wait_s=END_S)
    own_record(folder.root).end(END_S)
    TemporaryFolder(folder.root, token).remove_if_empty()


def _last_step(options: SegmentOptions, folder: Folder) -> int:
    return MetricsFile(folder.metrics).progress(options.objective, options.secondary)


def _on_stop(handler: Callable[..., None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, handler)


def _store_url() -> str | None:
    """Return the trial's place in the store; None without one."""
    store, sweep, number = (
        os.environ.get(n, "") for n in (_STORE_VARIABLE, "HERMES_SWEEP", "HERMES_TRIAL")
    )
    if not (store and sweep and number):
        return None
    from hermes_ops.trial.checkpoint_store.store import place

    return place(store, sweep, number)


def _download(
    url: str, options: SegmentOptions, folder: Folder, token: str, stops: StopRequests
) -> DownloadResult:
    """Download the newest checkpoints from the store, unless the folder has them."""
    from hermes_ops.trial.checkpoint_store.download import ensure_checkpoints

    since = int(os.environ.get(RESTART_EPOCH_VARIABLE) or 0)
    answer = ensure_checkpoints(
        url, folder, options.epoch, since=since, token=token, stopped=lambda: stops.count > 0
    )
    if answer.message:
        say(answer.message)
    return answer


def _end_without_checkpoint(answer: DownloadResult | None) -> _ScriptEnd | None:
    """Return the end of a segment whose checkpoint could not be fetched; None to go on."""
    if answer is None or answer.state == "ready":
        return None
    if answer.state == "refused":
        return _not_started(SegmentEnding(SegmentOutcome.FAILED, answer.message, 1))
    code = PREEMPTED if answer.state == "stopped" else INFRASTRUCTURE
    return _not_started(SegmentEnding(SegmentOutcome.INTERRUPTED, answer.message, code))


def _end_without_variable() -> _ScriptEnd | None:
    """Replace references in our environment; how the segment ends where one leads nowhere."""
    reason = resolve_references(os.environ)
    if reason is None:
        return None
    say(reason)
    cause = Cause.CANNOT_START.value
    return _not_started(SegmentEnding(SegmentOutcome.FAILED, reason, 127, cause, retryable=False))


def _prepare_directory(
    options: SegmentOptions, folder: Folder
) -> tuple[SegmentOptions, _ScriptEnd | None]:
    """Let the script run in a copy of its folder where the sweep asks for it."""
    source = os.path.abspath(options.directory or os.getcwd())
    if options.workspace != COPY or not os.path.isdir(source):
        return options, None
    try:
        place = ensure_workspace(Path(source), folder.root, os.environ)
    except (WorkspaceError, OSError) as error:
        is_ours = isinstance(error, OSError)
        reason = f"the copy of {source} could not be made: {error}"
        cause = Cause.OTHER if is_ours else Cause.CANNOT_START
        ending = SegmentEnding(SegmentOutcome.FAILED, reason, 127, cause.value, retryable=is_ours)
        return options, _not_started(ending)
    return options._replace(directory=str(place), copied_from=source), None


def _watch(
    options: SegmentOptions,
    folder: Folder,
    supervisor: ScriptSupervisor,
    token: str,
    reaper: Reaper,
) -> _ScriptEnd:
    places = _open_meeting_places(options, folder) if options.workers > 1 else None
    if places is not None and (absent := _await_nodes(options, supervisor, places)) is not None:
        places.close()
        return absent
    variables = environment(options, folder, token, os.environ)
    variables.update(TemporaryFolder(folder.root, token).variables(variables))
    try:
        if options.torchrun and places is None:
            variables, _ports = _lone_worker(options, variables)  # reserved while we hold them
        child = _start(options, supervisor, variables, reaper, places)
    except OSError as error:
        if places is not None:
            places.close()
        ending = _cannot_start(options, error, supervisor.has_trained)
        say(ending.reason)
        return _not_started(ending)
    url = _store_url()
    if url is not None:
        _start_upload(url, options, folder, supervisor, token)
    ending, code = supervisor.run(child)
    if places is not None:
        places.close()
    _finish_upload(ending, supervisor)
    return _ScriptEnd(ending, code, supervisor.tail)


def _open_meeting_places(options: SegmentOptions, folder: Folder) -> MeetingPlaces:
    from hermes_ops.trial.group_start import open_meeting_places  # with an HTTP server

    return open_meeting_places(options, folder)


def _lone_worker(
    options: SegmentOptions, variables: Mapping[str, str]
) -> tuple[dict[str, str], Sequence[ReservedPort]]:
    """Return the environment of the one worker, and its ports, reserved while they are held."""
    from hermes_ops.trial.ports import reserve_ports
    from hermes_ops.trial.worker_environment import lone_worker_environment

    ports = reserve_ports(2 if options.tf_config else 1)
    return lone_worker_environment(variables, *(port.number for port in ports)), ports


def _await_nodes(
    options: SegmentOptions, supervisor: ScriptSupervisor, places: MeetingPlaces
) -> _ScriptEnd | None:
    """Have all nodes start their workers once all are there; else return how the segment ends."""
    leader = places.leader
    if leader is None:
        return None
    from hermes_ops.trial.gang.leader import await_nodes

    leader.on_told_to_stop = supervisor.stops.leave_node
    missing = await_nodes(leader, options.gang_timeout_s, lambda: supervisor.stops.count > 0)
    if not missing and not supervisor.stops.count:
        leader.go()
        return None
    reason = "stopped before the workers of all its nodes were there"
    cause, code = Cause.OTHER, PREEMPTED
    if not supervisor.stops.count:
        waited = f"within {options.gang_timeout_s:.0f} s"
        reason = f"nothing was heard of {' and '.join(missing)} {waited}: none of its workers runs"
        cause, code = Cause.INCOMPLETE, INFRASTRUCTURE
    say(reason)
    return _not_started(SegmentEnding(SegmentOutcome.INTERRUPTED, reason, code, cause.value))


def _start_upload(
    url: str, options: SegmentOptions, folder: Folder, supervisor: ScriptSupervisor, token: str
) -> None:
    """Start the upload thread, after the script: a script is started from a single thread."""
    from hermes_ops.trial.checkpoint_store.upload import CheckpointUploader

    supervisor.copier = CheckpointUploader(url, folder, options.epoch, token)
    supervisor.copier.start()


def _finish_upload(ending: SegmentEnding, supervisor: ScriptSupervisor) -> None:
    """Upload the newest checkpoint, unless the trial has finished."""
    if supervisor.copier is None:
        return
    if ending.outcome is SegmentOutcome.FINISHED:
        supervisor.copier.finish(0.0, lambda: True)
    elif not supervisor.copy_rest(supervisor.copier):
        say("the newest checkpoint has not reached the store")


def _start(
    options: SegmentOptions,
    supervisor: ScriptSupervisor,
    environment: Mapping[str, str],
    reaper: Reaper,
    places: MeetingPlaces | None,
) -> Child:
    """Start the script, once for each worker: in standby interpreters if they are to be had."""
    if places is None:
        child = _start_standby(options, supervisor, environment)
        return child or PlainChild(reaper, _command(options), environment, options.directory)
    return _start_workers(options, supervisor, environment, reaper, places)


def _start_workers(
    options: SegmentOptions,
    supervisor: ScriptSupervisor,
    environment: Mapping[str, str],
    reaper: Reaper,
    places: MeetingPlaces,
) -> WorkerProcesses:
    from hermes_ops.trial.group_start import make_group, start_processes, worker_environments

    children = start_processes(
        worker_environments(environment, places.addresses),
        lambda inherited: _start_standby(options, supervisor, inherited),
        _command(options),
        options.directory,
        reaper,
    )
    leader = places.leader
    remote = [] if leader is None else leader.workers()
    workers = make_group(places.folder, [*children, *remote], lambda: supervisor.output.tail)
    lost_nodes = tuple if leader is None else lambda: leader.lost
    supervisor.watch_group(workers, places.addresses.folder, lost_nodes)
    return workers


def _start_standby(
    options: SegmentOptions, supervisor: ScriptSupervisor, environment: Mapping[str, str]
) -> StandbyChild | None:
    """Start the script in a standby interpreter; None if none is to be had."""
    socket = options.standby
    if socket is None:
        return None
    folders = options.directory, options.copied_from
    wanted = standby_order(_command(options), *folders, environment)
    if wanted is None:
        return None
    supervisor.on_training = lambda: _report_imports(socket, wanted, supervisor.imports)
    return start_standby(socket, wanted)


def _report_imports(socket: Path, wanted: StandbyOrder, imports: Mapping[str, bool]) -> None:
    ahead = all(imports.values())
    report_imports(socket, wanted, list(imports) if ahead else [])


def _command(options: SegmentOptions) -> tuple[str, ...]:
    if options.python is not None and options.command[0] == "python":
        return (options.python, *options.command[1:])
    return options.command


def _cannot_start(options: SegmentOptions, error: OSError, has_trained: bool) -> SegmentEnding:
    """Return the failure of a script whose process cannot be started: it names the wrong key.

    A folder that is not there may be on a disk that is away: that is tried again. A reaper that was
    killed before it has started the script is no failure of it.
    """
    if error.errno in _REAPER_LOST:
        reason = "the process that starts the script was killed"
        return SegmentEnding(SegmentOutcome.INTERRUPTED, reason, INFRASTRUCTURE)
    directory, program = options.directory, _command(options)[0]
    cause = Cause.OTHER if may_start_later(error.errno) else Cause.CANNOT_START
    if directory is not None and not os.path.isdir(directory):
        reason = f"the working directory {directory} does not exist: correct trial.directory"
        cause = Cause.OTHER
    else:
        key = "trial.python" if program == options.python else "trial.command"
        why = error.strerror
        if error.errno == errno.ENOENT and os.path.isfile(os.path.join(directory or "", program)):
            why = "the interpreter that its first line names is not there"
        reason = f"cannot start {program!r}: {why}: correct {key}"
    return SegmentEnding(
        SegmentOutcome.FAILED, reason, 127, cause.value, retryable=not is_final(cause, has_trained)
    )


def environment(
    options: SegmentOptions, folder: Folder, token: str, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the script's environment: our own, the trial's files, and the path of the hook.

    A fixed hash seed makes sets and dictionaries of a resumed script iterate as they did before.
    """
    result = dict(inherited)
    path = [p for p in (SITE, inherited.get("PYTHONPATH", "")) if p]
    result.update(
        PYTHONPATH=os.pathsep.join(path),
        HERMES_TRIAL_DIR=str(folder.root),
        HERMES_CHECKPOINT_DIR=str(folder.checkpoints),
        HERMES_METRICS_FILE=str(folder.metrics),
        HERMES_STARTED_S=repr(time.time()),
    )
    result[SEGMENT_VARIABLE] = token
    result[RUN_VARIABLE] = inherited.get("MLFLOW_RUN_ID", "")
    result[URI_VARIABLE] = inherited.get("MLFLOW_TRACKING_URI", "")
    result.setdefault("PYTHONUNBUFFERED", "1")
    result.setdefault("PYTHONHASHSEED", "0")
    for name, value in (
        ("HERMES_OBJECTIVE", options.objective),
        ("HERMES_DIRECTION", options.direction),
        ("HERMES_MAX_EPOCHS", options.max_epochs),
    ):
        if value is not None:
            result[name] = str(value)
    if options.gpus:
        result["HERMES_GPUS"] = ",".join(options.gpus)
        result.setdefault("CUDA_VISIBLE_DEVICES", ",".join(options.gpus))
    return result


def _finish(
    options: SegmentOptions, folder: Folder, supervisor: ScriptSupervisor, end: _ScriptEnd
) -> None:
    status, ending = supervisor.status, end.ending
    with contextlib.suppress(OSError):
        _set_folders_aside(folder)
        outcome = ending.outcome.value
        segment_records.close_segment(
            folder, options.epoch, status.step, outcome, timings=supervisor.timings
        )
    segment_records.write_result(
        folder,
        ending,
        epoch=options.epoch,
        exit_code=end.exit_code,
        tail=end.tail,
        step=status.step,
        checkpoint_step=status.checkpoint_step,
        unwritten=supervisor.unwritten,
    )
    if options.node is not None and ending.outcome is SegmentOutcome.FINISHED:
        with contextlib.suppress(OSError):
            node_checkpoints.release(folder)
    for original in written_originals(folder.root):
        say(
            f"{original} has been written, and all trials share it: it is too large for a copy; "
            "put it elsewhere, or write results under another name"
        )
    if ending.outcome is SegmentOutcome.FAILED:
        say(f"failed: {ending.reason}")
