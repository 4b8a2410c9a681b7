"""What of a trial hangs is killed from outside once its grace is over."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.airflow.folders import TrialFolder
from hermes_ops.airflow.trial.local import KillDeadline, LocalSegment
from hermes_ops.trial.locks import lock_file
from hermes_ops.trial.outcome import PREEMPTED
from hermes_ops.trial.processes.record import KILL_AFTER_S
from hermes_ops.trial.processes.tree import Process, descendants, end_all, marked, process_of
from tests.unit.airflow.builders import lease

SECONDS = st.floats(0, 1e6)

SCRIPT = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
away = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork() and "
away += "os._exit(0); open('away', 'a').write('x'); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", away], start_new_session=True)
while not os.path.exists("away"): time.sleep(0.01)
print("epoch=1 loss=1", flush=True)
time.sleep(600)
"""


@given(SECONDS, st.lists(SECONDS, min_size=1, max_size=4), st.floats(1, 600))
def test_a_first_stop_leaves_the_grace_and_a_second_one_none(
    now_s: float, pauses_s: list[float], grace_s: float
) -> None:
    first = KillDeadline().stopped(now_s, grace_s)
    assert first.next_s == now_s + grace_s + KILL_AFTER_S
    later = first
    for pause_s in pauses_s:
        now_s += pause_s
        again = later.stopped(now_s, grace_s)
        assert again.next_s == min(later.next_s, now_s + KILL_AFTER_S)
        later = again


@given(SECONDS, st.floats(-1e6, 1e6), st.floats(1, 600))
def test_a_time_limit_leaves_the_grace_for_the_last_checkpoint(
    now_s: float, left_s: float, grace_s: float
) -> None:
    limited = KillDeadline().limited(now_s, left_s, grace_s)
    assert limited.next_s >= now_s + grace_s + KILL_AFTER_S
    assert limited.next_s >= now_s + left_s + grace_s + KILL_AFTER_S
    assert limited.after_stop_s == inf


def test_nothing_is_killed_without_a_stop_or_a_limit() -> None:
    assert KillDeadline().next_s == inf


@pytest.fixture
def started(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], LocalSegment]]:
    """Starts trials on GPU 0 and freezes all of them but their script."""
    monkeypatch.setattr("hermes_ops.airflow.trial.local.KILL_AFTER_S", 0.2)
    monkeypatch.setattr("hermes_ops.airflow.trial.local.GRACE_S", 0.2)
    monkeypatch.setattr("hermes_ops.airflow.trial.local.STATUS_PERIOD_S", 0.0)
    (tmp_path / "train.py").write_text(SCRIPT)
    segments: list[LocalSegment] = []

    def start() -> LocalSegment:
        command = (sys.executable, "train.py")
        own = replace(lease(gpus=(0,)), directory=str(tmp_path), command=command)
        folder = TrialFolder(tmp_path / "trial")
        segment = LocalSegment(own, folder, "s", 3, "gpus", lambda _: None)
        segments.append(segment)
        segment.start()
        wait_for(lambda: folder.metrics.exists() and folder.metrics.read_text())
        wait_for(lambda: len(recorded(home)) >= 3)  # the reaper, the script and the one far away
        assert segment.wait(0.0) is None
        return segment

    yield start
    for segment in segments:
        end_all([p for p in [process_of(segment.pid)] if p], 5.0)
        end_all(of_trial(tmp_path), 5.0)
        segment.finish()


def recorded(home: Path) -> list[Process]:
    from hermes_ops.trial.processes.record import recorded as found

    return [process for _, process in found(home)]


def of_trial(base: Path) -> list[Process]:
    return marked(str(base / "trial"), "HERMES_TRIAL_DIR")


def freeze(segment: LocalSegment, base: Path) -> list[Process]:
    """Stop its hermes-trial and its reaper; return all of its processes."""
    everyone = {*descendants(segment.pid), *of_trial(base)}
    scripts = {process.pid for process in of_trial(base)}
    for process in everyone:
        if process.pid not in scripts:
            os.kill(process.pid, signal.SIGSTOP)
    os.kill(segment.pid, signal.SIGSTOP)
    return [*everyone, *[p for p in [process_of(segment.pid)] if p]]


def wait_for(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)


def ended(segment: LocalSegment) -> int:
    deadline_s = time.monotonic() + 60.0
    while (code := segment.wait(0.05)) is None:
        assert time.monotonic() < deadline_s, "it has not ended"
    return code


def is_gone(process: Process) -> bool:
    return process_of(process.pid) != process


def test_a_trial_that_hangs_after_a_stop_is_killed_whole_and_goes_on_later(
    started: Callable[[], LocalSegment], tmp_path: Path, home: Path
) -> None:
    segment = started()
    everyone = freeze(segment, tmp_path)
    assert len(everyone) >= 4
    segment.stop()
    assert ended(segment) == PREEMPTED
    assert "hermes-trial did not end in time" in segment.trouble
    assert all(map(is_gone, everyone))
    assert of_trial(tmp_path) == recorded(home) == []
    os.close(lock_file(home / "gpus" / "gpus" / "0.lock", 0.0, "GPU 0"))


def test_a_trial_that_hangs_beyond_its_time_limit_is_killed_whole_and_has_failed(
    started: Callable[[], LocalSegment], tmp_path: Path
) -> None:
    segment = started()
    everyone = freeze(segment, tmp_path)  # before the limit that hermes-trial would keep itself
    segment.lease = replace(segment.lease, time_limit_s=0.5)
    assert ended(segment) not in (PREEMPTED, 0)
    assert segment.trouble.startswith("time limit: 0.5 s are over")
    assert all(map(is_gone, everyone))


def test_a_task_that_ends_leaves_nothing_of_a_trial_that_hangs(
    started: Callable[[], LocalSegment], tmp_path: Path
) -> None:
    segment = started()
    everyone = freeze(segment, tmp_path)
    segment.finish()
    assert all(map(is_gone, everyone))
