"""A script that leaves by os._exit leaves no temporary file behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import atexit, os, sys, tempfile, threading, time, weakref
from hermes_ops.trial.keras.temporary_files import remove_temporary_files

def leave(wait_s=10.0):
    began_s = time.monotonic()
    remove_temporary_files(wait_s)
    print(time.monotonic() - began_s, flush=True)
    os._exit(75)

def generate():
    sys.path.insert(0, tempfile.gettempdir())
    with open(os.path.join(tempfile.gettempdir(), "__autograph_generated_fileabc.py"), "w"): pass
    __import__("__autograph_generated_fileabc")

atexit.register(lambda: time.sleep(100))
weakref.finalize(leave, time.sleep, 100)
folder = tempfile.TemporaryDirectory()
open(os.path.join(folder.name, "shard"), "w").close()
"""


def run(tmp_path: Path, text: str) -> float:
    """Run a script whose temporary files go to a folder; return the seconds of its clean-up."""
    place = tmp_path / "tmp"
    place.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + text],
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "TMPDIR": str(place)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (75, "")
    return float(done.stdout.split()[-1])


def left_in(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "tmp").rglob("*") if path.is_file()]


def test_generated_modules_and_temporary_folders_are_gone_and_nothing_else_is_waited_for(
    tmp_path: Path,
) -> None:
    run(tmp_path, "generate(); leave()")
    assert left_in(tmp_path) == []
    assert [p.name for p in (tmp_path / "tmp").iterdir()] == ["__pycache__"]


def test_a_folder_that_takes_long_to_remove_is_left(tmp_path: Path) -> None:
    slow = "tempfile.TemporaryDirectory._rmtree = lambda *_, **__: time.sleep(100)\n"
    assert run(tmp_path, slow + "leave(0.2)") < 50


def test_a_signal_that_comes_while_a_thread_is_started_holds_nothing_up(tmp_path: Path) -> None:
    run(tmp_path, "threading._active_limbo_lock.acquire(); leave()")
    assert left_in(tmp_path) == []


def test_a_process_that_multiprocessing_has_forked_removes_nothing_of_its_parent(
    tmp_path: Path,
) -> None:
    text = """
import multiprocessing
child = multiprocessing.get_context("fork").Process(target=leave)
child.start()
child.join()
assert os.path.exists(os.path.join(folder.name, "shard"))
leave()
"""
    run(tmp_path, text)
    assert left_in(tmp_path) == []
