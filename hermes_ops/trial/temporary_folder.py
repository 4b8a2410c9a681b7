"""The temporary folder of a segment: the TMPDIR of its script.

A script that is stopped or killed leaves its temporary files behind: folders of `tempfile.mkdtemp`,
sockets of multiprocessing, modules that TensorFlow has generated. In `/tmp` they would pile up. The
path is short, because that of a socket in it may have 107 bytes at most. Its beginning follows from
the trial, so that a later segment removes what a killed one has left.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from hermes_ops.trial.hook import TEMPORARY_VARIABLE

_BASE = "/tmp"  # noqa: S108 - what is made there is the user's alone
_CHOSEN = ("TMPDIR", "TEMP", "TMP")
_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "torchinductor_{user}", "TFHUB_CACHE_DIR": "tfhub_modules"}
"""Folders in `/tmp` that PyTorch and TensorFlow Hub keep for later processes, by their variable."""


class TemporaryFolder:
    """The folder of one segment of a trial, on one of its nodes; `token` is the segment's own."""

    def __init__(self, trial: Path, token: str, node: int = 0, base: str = _BASE) -> None:
        key = hashlib.blake2b(f"{trial}\0{node}".encode(), digest_size=6).hexdigest()
        self._base = base
        self._of_trial = os.path.join(base, f"hermes-{key}-")
        self.path = Path(self._of_trial + token[:4])

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Make the folder and return the variables that lead to it.

        There are none where the user has chosen a folder, and where none can be made. Libraries
        keep what later segments use again where they would without Hermes.
        """
        if any(environment.get(name) for name in _CHOSEN):
            return {}
        try:
            self.path.mkdir(mode=0o700)
        except OSError:
            return {}
        user = environment.get("USER") or environment.get("LOGNAME") or str(os.getuid())
        caches = {
            name: environment.get(name) or os.path.join(self._base, place.format(user=user))
            for name, place in _CACHES.items()
        }
        return {"TMPDIR": str(self.path), TEMPORARY_VARIABLE: str(self.path), **caches}

    def close(self, *, is_last: bool, has_fitted: bool) -> None:
        """Remove the folders of the trial, unless they are another user's.

        The callbacks of a call of Keras' `fit` look for their files again when that is resumed. So
        what a segment with such a call (`has_fitted`) leaves stays until the end of the next one.
        """
        for path in glob.glob(glob.escape(self._of_trial) + "*"):
            is_kept = (path == str(self.path)) == has_fitted
            if is_last or not is_kept:
                _remove(path)
        self.remove_if_empty()

    def remove_if_empty(self) -> None:
        """Remove the folder if nothing is in it."""
        with contextlib.suppress(OSError):
            self.path.rmdir()


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            shutil.rmtree(path, ignore_errors=True)
