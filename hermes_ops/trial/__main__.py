"""`hermes-trial`: run one segment of a trial beside the user's script."""

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

from hermes_ops.trial import apart, books
from hermes_ops.trial.channel import RUN_VARIABLE, URI_VARIABLE
from hermes_ops.trial.entropy import entropy
from hermes_ops.trial.failure import Cause, is_final, may_start_later
from hermes_ops.trial.files import Folder, read_json
from hermes_ops.trial.locks import BusyError, fence, take, take_gpus
from hermes_ops.trial.metrics import MetricsFile
from hermes_ops.trial.options import Options, parse
from hermes_ops.trial.outcome import INFRASTRUCTURE, PREEMPTED, Ending, Outcome
from hermes_ops.trial.process import SEGMENT_VARIABLE, Child, adopt_orphans, sweep_up
from hermes_ops.trial.process_record import own_record
from hermes_ops.trial.reaper import END_S, PlainChild, Reaper, fork_reaper
from hermes_ops.trial.segment import Segment
from hermes_ops.trial.standby_client import Order, learn, order
from hermes_ops.trial.standby_client import take as take_standby
from hermes_ops.trial.workspace import COPY, WorkspaceError, ensure_workspace, written_originals

if TYPE_CHECKING:
    from hermes_ops.trial.fetching import Answer

_GPU_WAIT_S = 10.0
_STORE_VARIABLE = "HERMES_CHECKPOINT_STORE"  # the folder that the sweep names

SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")


class _End(NamedTuple):
    """How the script ended, and what it said last."""

    ending: Ending
    exit_code: int
    tail: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run hermes-trial; return its exit code."""
    parent = os.getppid()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == [apart.EMPTY_OPTION]:
        return apart.main(given[1:])
    options = parse(given)
    if options.on_word and not sys.stdin.buffer.read(1):
        return INFRASTRUCTURE  # whoever has started this has no use for it, or is no more
    folder = Folder(options.folder)
    try:
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        take(folder.lock, options.lock_wait_s, "the trial's folder")
        fence(folder, options.epoch)
        if options.gpu_locks is not None:
            take_gpus(options.gpu_locks, options.gpus, min(_GPU_WAIT_S, 2 * options.lock_wait_s))
    except (BusyError, OSError) as busy:
        print(f"hermes-trial: {busy}", file=sys.stderr, flush=True)
        return INFRASTRUCTURE
    if (read_json(folder.result) or {}).get("outcome") == Outcome.FINISHED.value:
        print("hermes-trial: this trial has finished already", flush=True)
        return 0
    try:
        return _run(options, folder, parent)
    except OSError as error:  # our own files: the script is not at fault
        print(f"hermes-trial: cannot write in {folder.root}: {error}", file=sys.stderr, flush=True)
        return INFRASTRUCTURE


def _run(options: Options, folder: Folder, parent: int) -> int:
    if options.node is not None:
        apart.claim(folder, options.node)
    books.close_lost_segment(folder, _last_step(options, folder))
    folder.result.unlink(missing_ok=True)
    books.keep_reserve(folder.reserve)
    token = os.urandom(16).hex()
    stops: list[int] = []
    _on_stop(lambda number, _: stops.append(number))
    signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the loop
    adopt_orphans()
    own_record(folder.root).end(END_S)  # of a segment that was killed with its reaper
    reaper = fork_reaper(at_end=lambda: _end_left(folder, token))
    with contextlib.suppress(OSError):  # the script's own process would say so
        entropy(folder.root)
    books.open_segment(folder, options.epoch, options.gpus, _last_step(options, folder))
    url = _store()
    answer = _fetch(url, options, folder, token, stops) if url is not None else None
    options, refused = _own_directory(options, folder)
    segment = Segment(options, folder, token, parent)
    _on_stop(segment.request_stop)
    for _ in stops:
        segment.request_stop()
    segment.write_status()
    end = _not_begun(answer) or refused or _watch(options, folder, segment, token, reaper)
    if segment.on_training is not None:
        segment.on_training()
    _finish(options, folder, segment, end)
    reaper.release()
    return end.ending.code


def _end_left(folder: Folder, token: str) -> None:
    """In the reaper, once hermes-trial has vanished: end what runs in a standby interpreter.

    The reaper has inherited the locks: folder and GPUs are free only after that.
    """
    sweep_up(token, wait_s=END_S)
    own_record(folder.root).end(END_S)


def _last_step(options: Options, folder: Folder) -> int:
    return MetricsFile(folder.metrics).progress(options.objective, options.aside)


def _on_stop(handler: Callable[[int, object], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, handler)


def _store() -> str | None:
    """The trial's place in the store; None without one."""
    store, sweep, number = (
        os.environ.get(n, "") for n in (_STORE_VARIABLE, "HERMES_SWEEP", "HERMES_TRIAL")
    )
    if not (store and sweep and number):
        return None
    from hermes_ops.trial.copies import place

    return place(store, sweep, number)


def _fetch(url: str, options: Options, folder: Folder, token: str, stops: list[int]) -> Answer:
    """The newest checkpoints from the store, unless they are here."""
    from hermes_ops.trial.copies import ANEW_VARIABLE
    from hermes_ops.trial.fetching import bring

    since = int(os.environ.get(ANEW_VARIABLE) or 0)
    answer = bring(
        url, folder, options.epoch, since=since, token=token, stopped=lambda: bool(stops)
    )
    if answer.said:
        print(f"hermes-trial: {answer.said}", flush=True)
    return answer


def _not_begun(answer: Answer | None) -> _End | None:
    """How a segment ends whose checkpoint could not be had; None for one that may begin."""
    if answer is None or answer.state == "ready":
        return None
    if answer.state == "refused":
        return _End(Ending(Outcome.FAILED, answer.said, 1), 1, [answer.said])
    code = PREEMPTED if answer.state == "stopped" else INFRASTRUCTURE
    return _End(Ending(Outcome.INTERRUPTED, answer.said, code), code, [answer.said])


def _own_directory(options: Options, folder: Folder) -> tuple[Options, _End | None]:
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
        ending = Ending(Outcome.FAILED, reason, 127, cause.value, retryable=is_ours)
        return options, _End(ending, 127, [reason])
    return options._replace(directory=str(place), copied_from=source), None


def _watch(options: Options, folder: Folder, segment: Segment, token: str, reaper: Reaper) -> _End:
    try:
        child = _start(options, segment, environment(options, folder, token, os.environ), reaper)
    except OSError as error:
        ending = _cannot_start(options, error, segment.has_trained)
        print(f"hermes-trial: {ending.reason}", flush=True)
        return _End(ending, 127, [ending.reason])
    url = _store()
    if url is not None:
        _copy_from_now_on(url, options, folder, segment, token)
    ending, code = segment.run(child)
    _copy_rest(ending, segment)
    return _End(ending, code, segment.tail)


def _copy_from_now_on(
    url: str, options: Options, folder: Folder, segment: Segment, token: str
) -> None:
    """A thread of ours copies checkpoints; only now, as the script is started from one thread."""
    from hermes_ops.trial.copying import Copier

    segment.copier = Copier(url, folder, options.epoch, token)
    segment.copier.start()


def _copy_rest(ending: Ending, segment: Segment) -> None:
    """Have the newest checkpoint in the store, unless the trial has no more use for it."""
    if segment.copier is None:
        return
    if ending.outcome is Outcome.FINISHED:
        segment.copier.finish(0.0, lambda: True)
    elif not segment.copy_rest(segment.copier):
        print("hermes-trial: the newest checkpoint has not reached the store", flush=True)


def _start(
    options: Options, segment: Segment, environment: Mapping[str, str], reaper: Reaper
) -> Child:
    """Start the script in a standby interpreter if one is to be had, plainly otherwise."""
    socket = options.standby
    wanted = None
    if socket is not None:
        folders = options.directory, options.copied_from
        wanted = order(_command(options), *folders, environment)
    if socket is not None and wanted is not None:
        segment.on_training = lambda: _teach(socket, wanted, segment.imports)
        child = take_standby(socket, wanted)
        if child is not None:
            return child
    return PlainChild(reaper, _command(options), environment, options.directory)


def _teach(socket: Path, wanted: Order, imports: Mapping[str, bool]) -> None:
    ahead = all(imports.values())
    learn(socket, wanted, list(imports) if ahead else [])


def _command(options: Options) -> tuple[str, ...]:
    if options.python is not None and options.command[0] == "python":
        return (options.python, *options.command[1:])
    return options.command


def _cannot_start(options: Options, error: OSError, has_trained: bool) -> Ending:
    """Return the failure of a script whose process cannot be started: it names the wrong key.

    A folder that is not there may be on a disk that is away: that is tried again.
    """
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
    return Ending(
        Outcome.FAILED, reason, 127, cause.value, retryable=not is_final(cause, has_trained)
    )


def environment(
    options: Options, folder: Folder, token: str, own: Mapping[str, str]
) -> dict[str, str]:
    """The script's environment: our own, the trial's files, and the way to the hook.

    A fixed hash seed makes sets and dictionaries of a resumed script iterate as they did before.
    """
    result = dict(own)
    path = [p for p in (SITE, own.get("PYTHONPATH", "")) if p]
    result.update(
        PYTHONPATH=os.pathsep.join(path),
        HERMES_TRIAL_DIR=str(folder.root),
        HERMES_CHECKPOINT_DIR=str(folder.checkpoints),
        HERMES_METRICS_FILE=str(folder.metrics),
        HERMES_STARTED_S=repr(time.time()),
    )
    result[SEGMENT_VARIABLE] = token
    result[RUN_VARIABLE] = own.get("MLFLOW_RUN_ID", "")
    result[URI_VARIABLE] = own.get("MLFLOW_TRACKING_URI", "")
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


def _finish(options: Options, folder: Folder, segment: Segment, end: _End) -> None:
    status, ending = segment.status, end.ending
    with contextlib.suppress(OSError):
        outcome = ending.outcome.value
        books.close_segment(
            folder, options.epoch, time.time(), status.step, outcome, timings=segment.timings
        )
    books.write_result(
        folder,
        ending,
        epoch=options.epoch,
        exit_code=end.exit_code,
        tail=end.tail,
        step=status.step,
        checkpoint_step=status.checkpoint_step,
    )
    if options.node is not None and ending.outcome is Outcome.FINISHED:
        with contextlib.suppress(OSError):
            apart.give_up(folder)
    for original in written_originals(folder.root):
        print(
            f"hermes-trial: {original} has been written, and all trials share it: it is too large "
            "for a copy; put it elsewhere, or write results under another name",
            flush=True,
        )
    if ending.outcome is Outcome.FAILED:
        print(f"hermes-trial: failed: {ending.reason}", flush=True)


if __name__ == "__main__":
    exit_code = main()
    with contextlib.suppress(OSError):  # nobody reads any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)  # at once: the next trial waits for this GPU
