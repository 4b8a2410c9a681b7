"""A disk that fills up while a sweep runs, and has space again later."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.stack import processes
from tests.integration.conftest import CALM

pytestmark = [pytest.mark.integration, pytest.mark.heavy, pytest.mark.timeout(600)]

HOME_BYTES, SWEEPS_BYTES = 900 * 1024**2, 24 * 1024**2
EPOCHS, TRIALS = 40, 3
FULL_S = 6.0


@pytest.fixture
def home(tmp_path: Path, harness: Any) -> Iterator[Path]:
    """Return a state folder on a small disk, with `sweeps` on one of its own."""
    place = tmp_path / "home"
    mounted: list[Path] = []
    try:
        for folder, size_bytes in ((place, HOME_BYTES), (place / "sweeps", SWEEPS_BYTES)):
            folder.mkdir()
            options = ["-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
            done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
            mounted.append(folder)
        yield place
    finally:
        harness.kill_at_once(processes.members(place))
        for folder in reversed(mounted):
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    """Leave no free byte on a disk meanwhile, and take at once what becomes free."""
    ballast, is_over = disk / "ballast", threading.Event()

    def fill() -> None:
        while not is_over.wait(0.05):
            _append_all_that_fits(ballast)

    _append_all_that_fits(ballast)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        (disk / "more").write_bytes(b"x")
    thread = threading.Thread(target=fill)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        ballast.unlink()
        (disk / "more").unlink(missing_ok=True)


def _append_all_that_fits(ballast: Path) -> None:
    for block_bytes in (1024**2, 4096, 1):
        with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
            while file.write(b"x" * block_bytes) == block_bytes:
                pass


def test_disks_that_fill_up_in_mid_sweep_lose_and_double_nothing(
    home: Path, stack_at: Any, harness: Any, tmp_path: Path
) -> None:
    stack = stack_at(home)
    settings = f"hang_timeout_s = 40\n{CALM}"  # the scheduler may hang after a full disk
    (home / "hermes.toml").write_text(settings)
    started = stack.up("--standby", "0")
    assert started.returncode == 0, started.stderr
    assert "nearly full" in started.stdout
    supervisor = (home / "run" / "supervisord.pid").read_text()
    lab = harness.Lab(stack, tmp_path)
    try:
        rates = harness.alike(TRIALS)
        sweep = lab.start(harness.stub("full", rates, EPOCHS, 0.2, trial={"max_failures": 0}))
        harness.await_(lambda: sweep.lines(0) > 5 and sweep.lines(1) > 5, 120)
        with full(home / "sweeps"):
            harness.await_(lambda: not sweep.live(), 120)
            shown = json.loads(stack.hermes("status", "--json").stdout)
            assert any(f"{home / 'sweeps'} is full" in line for line in shown["problems"])
        before = sweep.lines(0) + sweep.lines(1)
        harness.await_(lambda: sweep.lines(0) + sweep.lines(1) > before + 4, 120)
        with full(home):
            time.sleep(FULL_S)  # the disk is full for so long; nothing is waited for
            shown = json.loads(stack.hermes("status", "--json").stdout)
            assert any(f"{home} is full" in line for line in shown["problems"])
        assert sweep.await_end(240) == "success"
        assert (home / "run" / "supervisord.pid").read_text() == supervisor
        assert sweep.states() == dict.fromkeys(range(TRIALS), "finished")
        for number, rate in enumerate(rates):
            sweep.assert_whole(number, rate, EPOCHS)
        assert [p for p in (home / "sweeps").rglob(".*") if p.name.endswith((".tmp", ".new"))] == []
    finally:
        lab.close()
        assert stack.down().returncode == 0
