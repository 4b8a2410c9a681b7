"""hermes-trial beside scripts that write without measure: bounded memory, nothing lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.trial.supervised import SupervisedTrial

MOST_KIB = 40_000  # of the supervisor, interpreter included; what it is sent is more

BEGIN = "import os, sys, time\nopen('pid', 'w').write(str(os.getpid()))\nout = sys.stdout.buffer\n"
WAIT = "out.flush()\nwhile not os.path.exists('go'): time.sleep(0.01)\n"


class Trial(SupervisedTrial):
    def start(self, script: str, output: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        self.script.write_text(BEGIN + script)
        self.epoch = 1
        options = ["--objective", "loss", "--directory", str(self.base)]
        return self.supervise(options, [sys.executable, "train.py"], output)

    def metrics(self) -> list[tuple[float, int]]:
        try:
            text = (self.base / "trial" / "metrics.jsonl").read_text()
        except FileNotFoundError:
            return []
        documents = [
            json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"
        ]
        return [(d["value"], d["step"]) for d in documents if d["name"] == "loss"]

    def go(self) -> None:
        (self.base / "go").touch()


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    trial = Trial(tmp_path)
    yield trial
    trial.close()


def wait_for(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def peak_kib(process: subprocess.Popen[bytes]) -> int:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    found = int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    return found


@pytest.mark.parametrize(
    "hostile",
    [
        "for _ in range(30): out.write(b'x' * 1_000_000)\n",
        "for _ in range(4): out.write(os.urandom(500_000))\n",
        "for _ in range(10): out.write(b'\\0\\xff\\xfe\\r\\x1b[' * 20_000)\n",
        "for n in range(6_000): out.write(b'epoch=1 m%d=1 ' % n * 20 + b'\\n')\n",
    ],
    ids=["one long line", "random bytes", "controls", "many names"],
)
def test_whatever_a_script_writes_its_supervisor_stays_small_and_reads_on(
    trial: Trial, hostile: str
) -> None:
    process = trial.start(hostile + "out.write(b'\\n\\x1b[0mepoch=7 loss=0.5\\n')\n" + WAIT)
    wait_for(lambda: (0.5, 7) in trial.metrics())
    assert peak_kib(process) < MOST_KIB
    trial.go()
    assert process.wait(60) == 0
    (trial.base / "trial" / "result.json").read_bytes().decode("ascii")


def test_every_step_of_a_flood_of_metrics_is_stored_in_order(trial: Trial) -> None:
    flood = "for n in range(1, 20_001): out.write(b'step=%d loss=%d.5\\n' % (n, n))\n"
    process = trial.start(flood + WAIT)
    wait_for(lambda: (20_000.5, 20_000) in trial.metrics())
    assert peak_kib(process) < MOST_KIB
    trial.go()
    assert process.wait(60) == 0
    assert trial.metrics() == [(n + 0.5, n) for n in range(1, 20_001)]


def test_a_script_waits_for_a_reader_that_is_slow_and_nothing_is_lost(trial: Trial) -> None:
    script = (
        "for n in range(1, 31):\n"
        "    out.write(b'x' * 500_000 + b'\\nepoch=%d loss=1\\n' % n)\n"
        "    out.flush()\n"
    )
    process = trial.start(script, subprocess.PIPE)
    wait_for((trial.base / "pid").exists)
    wait_for((trial.base / "pid").read_text)
    pid = (trial.base / "pid").read_text()
    wait_for(lambda: "pipe" in Path(f"/proc/{pid}/wchan").read_text() and trial.metrics())
    before = len(trial.metrics())
    assert 0 < before < 8
    assert peak_kib(process) < MOST_KIB
    assert process.stdout is not None
    output = process.stdout.read()
    assert process.wait(60) == 0
    assert len(output) == sum(500_001 + len(f"epoch={n} loss=1\n") for n in range(1, 31))
    assert trial.metrics() == [(1.0, n) for n in range(1, 31)]


def test_the_last_metrics_count_even_if_nobody_reads_the_output(trial: Trial) -> None:
    script = "out.write((b'x' * 999 + b'\\n') * 1_179 + b'epoch=1 loss=0.25\\n')\nout.flush()\n"
    reading, writing = os.pipe()
    try:
        process = trial.start(script, writing)
        wait_for((trial.base / "trial" / "result.json").exists)
        assert trial.metrics() == [(0.25, 1)]
        assert trial.result["outcome"] == "finished"
        process.kill()
    finally:
        os.close(reading)
        os.close(writing)
