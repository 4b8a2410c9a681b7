"""The process supervisor on a disk that is full: /dev/full refuses every write as such a disk."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from supervisor.loggers import LevelsByName, LogRecord

from hermes_ops.stack import programs
from hermes_ops.stack.layout import Layout
from hermes_ops.stack.process_supervisor import LogFile
from hermes_ops.stack.record import StackRecord
from hermes_ops.stack.supervisor_client import SupervisorClient

FULL = Path("/dev/full")
# Numbers its lines; ends with code 3 if one cannot be written.
TALKS = """import sys, time
n = 0
while True:
    n += 1
    try:
        print(f"{n:06d} " + "x" * 1000, flush=True)
    except OSError:
        sys.exit(3)
    time.sleep(0.001)
"""
LINE_BYTES = 1008

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


def _await(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def _record(home: Path) -> StackRecord:
    urls = ("http://127.0.0.1:8080", "http://127.0.0.1:5000")
    return StackRecord(str(home), *urls, "gpus", 1, "fifo", {}, False, 0, 0.0)


def test_a_full_disk_ends_neither_the_supervisor_nor_a_program_and_logs_go_on(
    tmp_path: Path,
) -> None:
    layout = Layout(tmp_path / "home")
    layout.create()
    talks = programs.Program("talks", (sys.executable, "-c", TALKS))
    programs.write_configuration(layout, [talks], _record(layout.home))
    names = ("talks", "supervisor", "supervisor-output")
    for name in names:
        layout.log(name).symlink_to(FULL)
    supervisor = SupervisorClient(layout)
    try:
        supervisor.start()
        supervisor.start_program("talks")
        _await(lambda: supervisor.states()[0].uptime_s > 2)
        pid = supervisor.states()[0].pid
        for name in names:
            layout.log(name).unlink()
        _await(lambda: layout.log("talks").exists() and layout.log("talks").stat().st_size > 10_000)
        assert supervisor.states()[0].pid == pid
        assert "bytes of output could not be written here" in layout.log("talks").read_text()[:90]
    finally:
        supervisor.shutdown()


def _record_of(data: bytes) -> LogRecord:
    return LogRecord(LevelsByName.INFO, data)


@settings(max_examples=100, deadline=None)
@given(records=st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=30))
def test_whatever_writes_fail_the_log_has_the_rest_and_says_how_much_was_lost(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[int, bool]]
) -> None:
    path = tmp_path_factory.mktemp("log") / "a.log"
    log = LogFile(str(path), "a", 0, 2)
    fails, real = False, os.write

    def write(descriptor: int, data: bytes) -> int:
        if fails:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", write)
        expected, lost = b"", 0
        for number, (size, fails) in enumerate(records):
            data = f"<{number:03d}:{'x' * size}>".encode()
            log.emit(_record_of(data))
            if fails:
                lost += len(data)
                continue
            said = f"\n({lost} bytes of output could not be written here)\n".encode()
            expected, lost = expected + (said if lost else b"") + data, 0
        log.close()
    assert (path.read_bytes() if path.exists() else b"") == expected


def test_a_log_is_rotated_and_the_oldest_of_three_files_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    log = LogFile(str(path), "a", 10, 2)
    for letter in "abcd":
        log.emit(_record_of(letter.encode() * 10))
    log.emit(_record_of(b"e"))
    log.close()
    contents = {file.name: file.read_text()[0] for file in tmp_path.iterdir()}
    assert contents == {"a.log": "e", "a.log.1": "d", "a.log.2": "c"}


def test_a_log_that_somebody_removes_gives_its_space_back_and_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    log = LogFile(str(path), "a", 0, 2)
    log.emit(_record_of(b"first"))
    path.unlink()
    log.emit(_record_of(b"second"))
    log.close()
    assert path.read_text() == "second"


def test_a_log_whose_folder_is_away_is_written_once_it_is_back(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "a.log"
    log = LogFile(str(path), "a", 0, 2)
    log.emit(_record_of(b"lost"))
    path.parent.mkdir()
    log.emit(_record_of(b"kept"))
    log.close()
    assert path.read_text() == "\n(4 bytes of output could not be written here)\nkept"
