"""SIGTERM where the trial's command is a shell script."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.trial.supervised import SupervisedTrial, output_of
from tests.unit.trial.test_group_trial import STEPS, GroupTrial, last_steps, says

SAVES = """\
import os, signal, sys, time
def stop(*_):
    time.sleep(0.3)
    print("saving", flush=True)
    open(os.environ["HERMES_CHECKPOINT_DIR"] + "/state", "w").write("1")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("epoch=1 loss=1", flush=True)
time.sleep(60)
"""
PYTHON = sys.executable

# As `conda run` does: it writes a shell script that runs the command, and waits for it.
CONDA_RUN = """\
import subprocess, sys
sys.exit(subprocess.call(["bash", "-c", '"$@"; exit $?', "-", *sys.argv[3:]]))
"""

HANDLES = """\
import os, signal, subprocess, sys
def stop(*_):
    is_there = child.poll() is None
    child.kill()
    open(os.environ["HERMES_CHECKPOINT_DIR"] + "/state", "w").write(str(is_there))
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
child = subprocess.Popen(["sleep", "60"])
print("epoch=1 loss=1", flush=True)
child.wait()
"""

LAUNCHERS = {
    # As `accelerate launch` does with one process, GNU time, and many a script of its own.
    "subprocess": "import subprocess, sys\nsys.exit(subprocess.run(sys.argv[1:]).returncode)\n",
    "nested": "import subprocess, sys\n"
    "sys.exit(subprocess.call([sys.executable, '-c', "
    "'import subprocess, sys; subprocess.call(sys.argv[1:])', *sys.argv[1:]]))\n",
    "spawn": """\
import multiprocessing, runpy, sys
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=runpy.run_path, args=(sys.argv[2],))
    process.start()
    process.join()
    sys.exit(process.exitcode)
""",
    "poll": """\
import subprocess, sys, time
process = subprocess.Popen(sys.argv[1:])
while process.poll() is None:
    time.sleep(0.2)
sys.exit(process.returncode)
""",
    "timeout": "import subprocess, sys\n"
    "sys.exit(subprocess.run(sys.argv[1:], timeout=600).returncode)\n",
}

READS = """\
import subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)
"""
READERS = {
    "lines": READS
    + """
for line in process.stdout:
    print("read", line, end="", flush=True)
sys.exit(process.wait())
""",
    "thread": READS
    + """
import threading
def pump():
    for line in process.stdout:
        print("read", line, end="", flush=True)
thread = threading.Thread(target=pump)
thread.start()
process.wait()
thread.join()
sys.exit(process.returncode)
""",
    "asyncio": """\
import asyncio, sys
async def main():
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*sys.argv[1:], stdout=pipe)
    async for line in process.stdout:
        print("read", line.decode(), end="", flush=True)
    return await process.wait()
sys.exit(asyncio.run(main()))
""",
    "terminal": """\
import os, pty, sys
def read(handle):
    return b"read " + os.read(handle, 1000)
sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:], read)))
""",
    "again": """\
import subprocess, sys
for _ in range(20):
    process = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        print("read", line, end="", flush=True)
    process.wait()
""",
}


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[SupervisedTrial]:
    trial = SupervisedTrial(tmp_path)
    trial.epoch = 1
    yield trial
    trial.close()


def stopped(trial: SupervisedTrial, text: str, grace_s: float = 30.0) -> tuple[int, bytes]:
    """Run a shell script around the training, and stop it once it trains."""
    trial.script.write_text(SAVES)
    shell = trial.base / "run.sh"
    shell.write_text(text.format(train=f"{PYTHON} {trial.script}", folder=trial.base))
    options = ["--objective", "loss", "--grace", str(grace_s)]
    process = trial.supervise(options, ["bash", str(shell)])
    lines = output_of(process)
    seen = next(line for line in lines if b"loss" in line)
    process.terminate()
    return process.wait(60), seen + lines.read()


@pytest.mark.parametrize(
    "text",
    [
        "{train}\n",
        "set -e\n{train}\nsleep 60\n",
        "{train}\n{train}\n",
        "{train} | cat\n",
        "echo | {train}\n",
        "yes | {train} | cat\ntrue\n",
        "sleep 99 | (cd /; {train}) && true\ntrue\n",
        "{train} 2>&1 | tee {folder}/log.txt\ntrue\n",
        "exec > >(cat)\n{train}\ntrue\n",
        "sh -c '{train}; true'\ntrue\n",
        "{train} &\nwait\n",
        "trap 'kill $!; wait $!' TERM\n{train} &\nwait\nwait\n",
        "trap '' TERM\n{train}\n",
        "exec {train}\n",
        "echo {train} | xargs env\n",
        "echo 1 | while read line; do {train}; done\n",
    ],
)
def test_training_that_a_shell_script_runs_writes_its_checkpoint_before_all_ends(
    trial: SupervisedTrial, text: str
) -> None:
    code, output = stopped(trial, text)
    assert (code, trial.result["outcome"]) == (75, "preempted")
    assert output.count(b"saving") == 1
    assert (trial.folder / "checkpoints" / "state").read_text() == "1"


@pytest.mark.parametrize("text", ["{train}\n{next}", "sh -c '{train}; {next}'\n{next}"])
def test_a_shell_that_is_told_to_stop_begins_nothing_after_the_training_has_ended(
    trial: SupervisedTrial, text: str
) -> None:
    begun = trial.base / "begun"
    code, _ = stopped(trial, text.replace("{next}", f"touch {begun}; sleep 60"))
    assert code == 75
    assert not begun.exists()


def test_a_trap_of_a_shell_runs_after_the_training_has_ended(trial: SupervisedTrial) -> None:
    trapped = trial.base / "trapped"
    code, output = stopped(
        trial, f"trap 'touch {trapped}; exit 75' TERM\nsh -c '{{train}}; true'\ntrue\n"
    )
    assert (code, output.count(b"saving")) == (75, 1)
    assert trapped.exists()


def test_training_that_conda_runs_writes_its_checkpoint_before_all_ends(
    trial: SupervisedTrial,
) -> None:
    trial.script.write_text(SAVES)
    conda = trial.base / "conda"
    conda.write_text(f"#!{PYTHON}\n{CONDA_RUN}")
    conda.chmod(0o755)
    command = [str(conda), "run", "--no-capture-output", PYTHON, str(trial.script)]
    process = trial.supervise(["--objective", "loss"], command)
    next(line for line in output_of(process) if b"loss" in line)
    process.terminate()
    assert process.wait(60) == 75
    assert (trial.folder / "checkpoints" / "state").read_text() == "1"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_training_that_a_launcher_waits_for_writes_its_checkpoint_before_all_ends(
    trial: SupervisedTrial, launcher: str
) -> None:
    trial.script.write_text(SAVES)
    launch = trial.base / "launch.py"
    launch.write_text(LAUNCHERS[launcher])
    command = [PYTHON, str(launch), PYTHON, str(trial.script)]
    process = trial.supervise(["--objective", "loss"], command)
    next(line for line in output_of(process) if b"loss" in line)
    process.terminate()
    assert (process.wait(60), trial.result["outcome"]) == (75, "preempted")
    assert (trial.folder / "checkpoints" / "state").read_text() == "1"


@pytest.mark.parametrize("reader", READERS)
def test_what_a_training_prints_while_it_stops_passes_a_launcher_that_reads_it(
    trial: SupervisedTrial, reader: str
) -> None:
    trial.script.write_text(SAVES)
    launch = trial.base / "launch.py"
    launch.write_text(READERS[reader])
    command = [PYTHON, str(launch), PYTHON, str(trial.script)]
    process = trial.supervise(["--objective", "loss"], command)
    lines = output_of(process)
    next(line for line in lines if b"loss" in line)
    process.terminate()
    assert b"read saving" in lines.read()
    assert (process.wait(60), trial.result["outcome"]) == (75, "preempted")
    assert (trial.folder / "checkpoints" / "state").read_text() == "1"


def test_a_script_with_a_handler_of_its_own_gets_the_signal_itself_while_it_waits(
    trial: SupervisedTrial,
) -> None:
    trial.script.write_text(HANDLES)
    process = trial.supervise(["--objective", "loss"], [PYTHON, str(trial.script)])
    next(line for line in output_of(process) if b"loss" in line)
    process.terminate()
    assert process.wait(60) == 75
    assert (trial.folder / "checkpoints" / "state").read_text() == "True"


def test_what_a_shell_script_runs_is_killed_at_the_end_of_the_grace_if_it_ignores_the_signal(
    trial: SupervisedTrial,
) -> None:
    prints = f"{PYTHON} -c 'print(\"loss=1\", flush=True)'"
    loops = "sh -c 'while true; do sleep 0.05; done'"
    code, _ = stopped(trial, f"trap '' TERM\n{prints}\n{loops}\n", grace_s=0.5)
    assert code == 75
    assert trial.result["exit_code"] == -9


SAVES_AS_RANK = """
import signal
def stop(*_):
    time.sleep(0.3)
    name = f"state-{rank}"
    open(os.path.join(os.environ["HERMES_CHECKPOINT_DIR"], name), "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
barrier()
print("epoch=1 loss=1", flush=True)
time.sleep(60)
"""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[GroupTrial]:
    trial = GroupTrial(tmp_path)
    yield trial
    trial.close()


def stopped_group(group: GroupTrial, text: str) -> int:
    """Run a shell script around the training in two workers, and stop them once they train."""
    shell = group.base / "run.sh"
    shell.write_text(text.format(train=f"{PYTHON} {group.script}"))
    options = ["--objective", "loss", "--workers", "2"]
    process = group.supervise(options, ["bash", str(shell)])
    says(process, b"loss")
    process.terminate()
    return process.wait(60)


@pytest.mark.parametrize("text", ["{train}\n", "set -e\n{train}\nsleep 60\n", "{train} | cat\n"])
def test_every_worker_that_is_a_shell_script_lets_its_training_write_a_checkpoint(
    group: GroupTrial, text: str
) -> None:
    group.write(SAVES_AS_RANK)
    assert stopped_group(group, text) == 75
    assert group.result["outcome"] == "preempted"
    saved = {path.name for path in (group.folder / "checkpoints").iterdir()}
    assert saved == {"state-0", "state-1"}


def test_a_shell_script_begins_nothing_after_the_step_that_its_worker_leaves_at(
    group: GroupTrial,
) -> None:
    group.write(STEPS)
    evaluate = (
        f"{PYTHON} -c 'import time; print(\"epoch=99999 loss=9\", flush=True); time.sleep(60)'"
    )
    assert stopped_group(group, f"{{train}}\n{evaluate}\n") == 75
    assert len(set(last_steps(group))) == 1
    assert 9.0 not in [metric["value"] for metric in group.lines("metrics.jsonl")]
