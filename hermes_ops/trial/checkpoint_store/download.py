"""Download the newest copy from the store before a segment trains, if the folder has less.

A child process asks the store, so that a stop is obeyed at once whatever the store does, and so
that the supervisor has a single thread when it starts the script.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hermes_ops.trial import segment_records
from hermes_ops.trial.checkpoint_store.store import (
    CheckpointStore,
    DamagedError,
    ManifestName,
    NotInstalledError,
    StoreError,
    StoreMark,
    connect,
    digest,
    snapshot,
)
from hermes_ops.trial.files import Folder, read_json, write_json
from hermes_ops.trial.processes.tree import SEGMENT_VARIABLE, die_with_parent
from hermes_ops.trial.retention import entries

READY, STOPPED, REFUSED, AWAY = "ready", "stopped", "refused", "away"
_ATTEMPTS, _PAUSE_S = 3, 2.0
_POLL_S = 0.1
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from hermes_ops.trial.checkpoint_store.download import main; sys.exit(main(sys.argv[2:]))"
)


class DownloadResult(NamedTuple):
    """READY, or why not; `message` is for a person."""

    state: str
    message: str = ""


def ensure_checkpoints(
    url: str, folder: Folder, epoch: int, *, since: int, token: str, stopped: Callable[[], bool]
) -> DownloadResult:
    """Make the folder's checkpoints the newest that there are, and mark them as this segment's.

    AWAY only where the store may have something newer than the folder. `since` is the epoch at
    which the trial began from scratch.
    """
    mark = StoreMark.read(folder)
    is_current = bool(entries(folder.checkpoints)) and mark.sound and mark.epoch >= epoch - 1
    if is_current:
        answer = DownloadResult(READY)
    else:
        answer = _download_in_child(url, folder, since, token, stopped)
    if answer.state == AWAY and epoch <= max(1, since):
        answer = DownloadResult(
            READY, f"{answer.message}: the trial has nothing there yet and goes on"
        )
    if answer.state == READY:
        mark = StoreMark.read(folder)
        tokens = (*mark.tokens, token) if mark.epoch >= epoch - 1 else (token,)
        mark._replace(epoch=epoch, tokens=tokens[-64:], sound=True).write(folder)
    return answer


def _download_in_child(
    url: str, folder: Folder, since: int, token: str, stopped: Callable[[], bool]
) -> DownloadResult:
    arguments = [url, str(folder.root), str(since), str(os.getpid())]
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _START, json.dumps(sys.path), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**os.environ, SEGMENT_VARIABLE: token},
    )
    while True:
        try:
            output, _ = process.communicate(timeout=_POLL_S)
            break
        except subprocess.TimeoutExpired:
            if stopped():
                process.kill()
                process.communicate()
                return DownloadResult(STOPPED, "stopped while its checkpoint was being fetched")
    with contextlib.suppress(ValueError, TypeError, IndexError):
        return DownloadResult(*json.loads(output.splitlines()[-1]))
    return DownloadResult(AWAY, f"fetching from {url} ended with {process.returncode}")


def main(arguments: Sequence[str]) -> int:
    """Download in a child process; print the result as the last line on standard output."""
    url, root, since, parent = arguments
    die_with_parent(int(parent))
    folder = Folder(Path(root))
    answer = DownloadResult(AWAY)
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_S)
        try:
            answer = DownloadResult(READY, fetch(connect(url), folder, int(since)))
            break
        except NotInstalledError as error:
            answer = DownloadResult(REFUSED, str(error))
            break
        except StoreError as error:
            answer = DownloadResult(AWAY, f"{url} cannot be read ({error})")
    print(json.dumps(answer), flush=True)
    return 0


def fetch(copies: CheckpointStore, folder: Folder, since: int) -> str:
    """Put the newest whole copy into the folder unless what it has is as new; what was done.

    Raises: StoreError, with the folder as it was or marked as unsound.
    """
    with contextlib.suppress(StoreError):
        if since:
            copies.clear_below(since)
    for name in copies.names():
        if name.epoch < since or not _is_newer(name, folder):
            break
        try:
            document = copies.read(name)
            _install(copies, folder, name, document)
        except DamagedError as error:
            print(f"hermes-trial: a copy is left out: {error}", file=sys.stderr, flush=True)
            continue
        step = (document.get("books") or {}).get("checkpoint_step")
        return f"its checkpoint{f' of step {step}' if step else ''} comes from the store"
    return ""


def _is_newer(name: ManifestName, folder: Folder) -> bool:
    mark = StoreMark.read(folder)
    if not mark.sound or not entries(folder.checkpoints):
        return True
    return name.epoch > mark.epoch or (name.epoch == mark.epoch and name.token not in mark.tokens)


def _install(
    copies: CheckpointStore, folder: Folder, name: ManifestName, document: dict[str, Any]
) -> None:
    fresh = folder.checkpoints / ".fetched"
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        fresh.mkdir(parents=True)
        copies.download(document, fresh)
        StoreMark(sound=False).write(folder)
        for _, old in entries(folder.checkpoints):
            _remove(folder.checkpoints / old)
        for entry in sorted(os.listdir(fresh)):
            os.rename(fresh / entry, folder.checkpoints / entry)
        _restore_state(folder, document.get("books") or {})
        copied = digest(snapshot(folder.checkpoints))
        StoreMark(name.epoch, (name.token,), True, copied).write(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _restore_state(folder: Folder, recorded: dict[str, Any]) -> None:
    """Restore what the status and the retention file recorded about the copied checkpoints."""
    status = read_json(folder.status) or {}
    status.update({n: recorded.get(n) for n in ("checkpoint_step", "step_offset")})
    status["checkpointed_s"] = segment_records.newest_checkpoint_s(folder)
    write_json(folder.status, status)
    if isinstance(recorded.get("kept"), dict):
        write_json(folder.root / "kept.json", recorded["kept"])


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
