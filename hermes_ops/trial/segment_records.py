"""The records of a trial's segments in its folder: status, segments, result."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hermes_ops.trial.files import Folder, Follower, append_lines, read_json, write_json
from hermes_ops.trial.metrics import Metric, MetricsFile, as_document, parse
from hermes_ops.trial.outcome import SegmentEnding, SegmentOutcome
from hermes_ops.trial.processes.tree import boot_id
from hermes_ops.trial.retention import unfinished

_RESERVE_BYTES = 65_536


class TrialStatus:
    """status.json: what the trial is doing now."""

    def __init__(self, epoch: int, pid: int, started_s: float) -> None:
        self.epoch = epoch
        self.pid = pid
        self.started_s = started_s
        self.workers = 1
        self.preemptible = False
        self.preemptible_reason = "it has not written a checkpoint to $HERMES_CHECKPOINT_DIR yet"
        self.step = 0
        self.checkpoint_step: int | None = None
        self.checkpointed_s: float | None = None
        self.step_offset = 0  # of a trial that an earlier version has begun
        self.fits = 0  # of Keras, complete at the checkpoint: they are not run again
        self.training = False  # a fit of Keras has begun in this segment
        self.steps_by = ""  # how the objective's steps are known, once it has come
        self.said: list[str] = []  # kinds of notes that the output has had
        self.advice = ""  # while no value of the objective is read
        self.tensor_skew: float | None = None  # the largest tensor's share of the model
        self.saves_on_stop = False  # the last time it was told to stop, without the hook
        names = ("startup_s", "restore_s", "checkpoint_s", "repeat_s")
        self.timings: dict[str, float | None] = dict.fromkeys(names)

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return dict(self.__dict__, timings=dict(self.timings), said=list(self.said))


def continued_status(folder: Folder, epoch: int, has_checkpoint: bool) -> TrialStatus:
    """Return a new segment's status, with the last one's checkpoints and timings."""
    status = TrialStatus(epoch=epoch, pid=os.getpid(), started_s=time.time())
    last = read_json(folder.status) or {}
    status.step_offset = int(last.get("step_offset") or 0)
    status.steps_by = str(last.get("steps_by") or "")
    status.said = [str(kind) for kind in last.get("said") or ()]
    status.tensor_skew = last.get("tensor_skew")
    status.saves_on_stop = bool(last.get("saves_on_stop"))
    timings = last.get("timings")
    if isinstance(timings, dict):
        status.timings.update({k: v for k, v in timings.items() if k in status.timings})
    if has_checkpoint:
        status.preemptible, status.preemptible_reason = True, ""
        status.checkpoint_step = last.get("checkpoint_step")
        status.fits = int(last.get("fits") or 0)
        status.checkpointed_s = last.get("checkpointed_s")
    return status


def newest_checkpoint_s(folder: Folder) -> float | None:
    """Return the Unix time of the newest committed file below checkpoints/; None without any.

    Hidden files and the usual names of unfinished ones (*.tmp, *.part) do not count. A link to a
    folder elsewhere counts as a file: what is below may be large.
    """
    newest: float | None = None
    inside = os.path.realpath(folder.checkpoints) + os.sep
    for parent, folders, names in os.walk(folder.checkpoints):
        folders[:] = [f for f in folders if not unfinished(f)]
        for name in (*names, *(f for f in folders if _leads_out(os.path.join(parent, f), inside))):
            if not unfinished(name):
                with contextlib.suppress(OSError):
                    written_s = os.stat(os.path.join(parent, name)).st_mtime
                    newest = written_s if newest is None else max(newest, written_s)
    return newest


def _leads_out(path: str, inside: str) -> bool:
    return os.path.islink(path) and not os.path.realpath(path).startswith(inside)


def set_folders_aside(folder: Folder) -> list[str]:
    """Rename the folders that a script has made in the place of our files; return a line for each.

    Otherwise no later segment could write there. Hold the folder's lock.
    """
    ours = (folder.epoch, folder.status, folder.segments, folder.metrics, folder.events,
            folder.logged_values, folder.result, folder.reserve)  # fmt: skip
    lines = []
    for path in ours:
        if path.is_dir() and not path.is_symlink():
            aside = path.with_name(f"{path.name}.aside.{time.time_ns()}")
            path.rename(aside)
            lines.append(f"{path} was a folder where hermes-trial writes a file: now {aside.name}")
    return lines


def open_segment(folder: Folder, epoch: int, gpus: tuple[str, ...], step: int) -> None:
    """Write the line of a segment's start."""
    start = {"epoch": epoch, "gpus": list(gpus), "start_s": time.time(), "first_step": step}
    append_lines(folder.segments, [{**start, "boot": boot_id(), "uptime_s": time.monotonic()}])


def newest_segment_epoch(folder: Folder) -> int:
    """Return the greatest lease epoch of a segment that has begun; -1 before the first."""
    epochs = [line.get("epoch") for line in Follower(folder.segments).new()]
    return max((epoch for epoch in epochs if isinstance(epoch, int)), default=-1)


def close_segment(
    folder: Folder,
    epoch: int,
    step: int,
    outcome: str,
    *,
    end_s: float | None = None,
    timings: Mapping[str, float] | None = None,
) -> None:
    """Write the line of a segment's end, with what was measured in it.

    It ends now, or earlier at `end_s`. As the clock may have been set meanwhile, its duration is at
    least 0 and at most what the machine's uptime has grown by.
    """
    starts = [line for line in Follower(folder.segments).new() if "start_s" in line]
    now_s = time.time()
    if starts:
        start_s = float(starts[-1]["start_s"])
        passed_s = _passed_s(starts[-1])
        now_s = now_s if passed_s is None else start_s + passed_s
        end_s = max(start_s, now_s if end_s is None else min(end_s, now_s))
    end_s = now_s if end_s is None else end_s
    end = {"epoch": epoch, "end_s": end_s, "last_step": step, "outcome": outcome}
    append_lines(folder.segments, [{**(timings or {}), **end}])


def _passed_s(start: Mapping[str, Any]) -> float | None:
    """Return the seconds since a segment's start by the uptime; None if they are not known.

    They are not known after a reboot, from an earlier version that wrote no uptime, or on a system
    without an id of its boot.
    """
    try:
        passed_s = time.monotonic() - float(start["uptime_s"])
    except (KeyError, TypeError, ValueError):
        return None
    return passed_s if start.get("boot") and start["boot"] == boot_id() and passed_s >= 0 else None


def close_lost_segment(folder: Folder, step: int) -> None:
    """End a segment that has no end on record, at the last sign of its life.

    Its supervisor was killed, or the disk was full: then its result is there, in the reserved
    space, with values that the metrics file did not take. Call this before `recover_values`, which
    writes that file now.
    """
    lines = list(Follower(folder.segments).new())
    if not lines or "end_s" in lines[-1]:
        return
    end_s = float(lines[-1].get("start_s") or 0.0)
    for path in (folder.metrics, folder.status, folder.events, folder.result):
        with contextlib.suppress(OSError):
            end_s = max(end_s, os.stat(path).st_mtime)
    reached = (read_json(folder.result) or {}).get("step")
    step = max(step, reached) if isinstance(reached, int) else step
    close_segment(folder, int(lines[-1].get("epoch") or 0), step, "killed", end_s=end_s)


def trained_s(lines: Iterable[Mapping[str, Any]]) -> float:
    """Return the training time in the closed segments since the trial's last failure, in seconds.

    A trial that is tried again has its whole time limit again, or trying it would be in vain.
    `lines`: those of segments.jsonl, or segments with start and end together.
    """
    total_s, start_s = 0.0, None
    for line in lines:
        if "start_s" in line:
            start_s = float(line["start_s"])
            if "end_s" not in line:
                continue
        if start_s is not None:
            total_s += max(0.0, float(line.get("end_s") or start_s) - start_s)
            start_s = None
            if line.get("outcome") == SegmentOutcome.FAILED.value:
                total_s = 0.0
    return total_s


def keep_reserve(path: Path) -> None:
    """Hold a little disk space, so that the result can be written on a full disk."""
    with contextlib.suppress(OSError):
        if not path.exists() or path.stat().st_size != _RESERVE_BYTES:
            with open(path, "wb") as stream:
                stream.write(b"\0" * _RESERVE_BYTES)
                stream.flush()
                os.fsync(stream.fileno())  # now, or the space may not be there when it is needed


def recover_values(folder: Folder) -> None:
    """Append to the metrics file what a segment before could not, as its result has it.

    An OSError leaves the result as it is: then the next segment does it.
    """
    unwritten = (read_json(folder.result) or {}).get("unwritten")
    lines = unwritten if isinstance(unwritten, list) else []
    lines = [line for line in lines if isinstance(line, dict)]
    metrics = [metric for line in lines if (metric := parse(line)) is not None]
    if metrics:
        MetricsFile(folder.metrics).append(metrics)


def write_result(
    folder: Folder,
    ending: SegmentEnding,
    *,
    epoch: int,
    exit_code: int,
    tail: list[str],
    step: int,
    checkpoint_step: int | None,
    unwritten: Sequence[Metric] = (),
) -> None:
    """Write result.json, in the reserved space if the disk is full.

    `unwritten` are values that the metrics file did not take.
    """
    document: dict[str, Any] = {
        "epoch": epoch,
        "outcome": ending.outcome.value,
        "exit_code": exit_code,
        "reason": ending.reason,
        "cause": ending.cause,
        "retryable": ending.retryable,
        "tail": tail,
        "step": step,
        "checkpoint_step": checkpoint_step,
    }
    if unwritten:
        document["unwritten"] = [as_document(metric) for metric in unwritten]
    try:
        write_json(folder.result, document, durable=True)
    except OSError:
        _write_in_reserve(folder, _fit(document))


def _fit(document: dict[str, Any]) -> bytes:
    """Return a result as JSON that fits the reserved space if it can: older last lines are left
    out for that, and no value."""
    tail = list(document["tail"])
    while True:
        data = json.dumps({**document, "tail": tail}, allow_nan=False).encode()
        if len(data) <= _RESERVE_BYTES or not tail:
            return data
        del tail[0]


def _write_in_reserve(folder: Folder, data: bytes) -> None:
    """Make the reserved file the result: no space that it gives up can be taken by others."""
    handle = os.open(folder.reserve, os.O_WRONLY | os.O_CLOEXEC)
    try:
        if os.fstat(handle).st_size < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder.result))
        written = os.pwrite(handle, data, 0)
        if written != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder.result))
        os.ftruncate(handle, len(data))
        os.fsync(handle)
    finally:
        os.close(handle)
    os.replace(folder.reserve, folder.result)
