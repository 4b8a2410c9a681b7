"""Functions of all benchmarks: figures, the machine, waiting, and child processes."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hermes_ops.stack.lifecycle import signals_ignored

QUICK = os.environ.get("BENCH_QUICK", "0") not in ("", "0")
SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[1]
LEAVE_S = 40.0
"""Seconds that a child gets between SIGTERM and SIGKILL: a trial may take 30 to checkpoint."""

Figures = dict[str, Any]

OURS = ("HERMES_", "AIRFLOW", "MLFLOW_", "BENCH_")
ONE_CORE = {  # with a single inter-op thread some epochs take twice as long
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",
}


class NotMeasuredError(Exception):
    """The benchmark has no figures; the message says why."""


def figures(values: Iterable[float], digits: int = 4) -> Figures:
    """Return median, minimum, maximum and number of the values; the caller's key has the unit."""
    found = sorted(values)
    if not found:
        return {"median": None, "min": None, "max": None, "n": 0}
    shown = (statistics.median(found), found[0], found[-1])
    median, low, high = (round(value, digits) for value in shown)
    return {"median": median, "min": low, "max": high, "n": len(found)}


def machine() -> Figures:
    """Return the processor, the cores that we may use, memory and system."""
    cpu = platform.processor() or platform.machine()
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def environment(**more: str) -> dict[str, str]:
    """Return an ordinary user's environment: no stack, cached bytecode, a quiet TensorFlow."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    return {**kept, "TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow", **more}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines, none without the file; skip torn lines."""
    found = []
    for line in _lines(str(path)):
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def await_(condition: Callable[[], bool], timeout_s: float, what: str, period_s: float) -> None:
    """Wait until the condition holds; raise NotMeasuredError after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise NotMeasuredError(f"{what}: not within {timeout_s:g} s")
        time.sleep(period_s)


@contextlib.contextmanager
def child(
    command: Sequence[object], env: Mapping[str, str], cwd: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in its own session, so that Ctrl-C reaches us alone; end it with the block.

    Its output is shown on standard error if the block is left by an error.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        except Exception:
            output.seek(0)
            print(output.read().decode(errors="replace")[-4000:], file=sys.stderr)
            raise
        finally:
            with signals_ignored():
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def timed(
    command: Sequence[object], env: Mapping[str, str], timeout_s: float, expected: int = 0
) -> float:
    """Return the seconds of a process from start to exit, with the expected exit code."""
    started_s = time.monotonic()
    with child(command, env) as process:
        code = process.wait(timeout_s)
        took_s = time.monotonic() - started_s
        if code != expected:
            raise NotMeasuredError(f"{' '.join(map(str, command))} ended with {code}")
    return took_s
