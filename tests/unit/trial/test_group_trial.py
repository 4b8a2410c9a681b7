"""hermes-trial with several workers: small scripts that meet by sockets in place of training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.unit.trial.supervised import ROOT, SupervisedTrial, output_of

MEETING = """
import os, socket, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
group = os.environ["HERMES_GROUP_DIR"]

def meet():
    if rank == 0:
        with socket.create_server(place) as server:
            return [server.accept()[0] for _ in range(size - 1)]
    while True:
        try:
            return [socket.create_connection(place)]
        except ConnectionRefusedError:
            time.sleep(0.01)

peers = meet()

def barrier():
    for peer in peers:
        peer.sendall(b"x")
    for peer in peers:
        if peer.recv(1) != b"x":
            raise ConnectionError("Connection closed by peer")

def mark(name):
    open(os.path.join(group, name), "w").close()

barrier()
"""

STEPS = """
import signal, types
from hermes_ops.trial.group import TrialRank
from hermes_ops.trial.optimizer_steps import CountedSteps
sys.modules["torch.distributed"] = types.SimpleNamespace(
    is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: size)
class Optimizer: param_groups = ()
steps, optimizer = CountedSteps(TrialRank.from_environment(os.environ)), Optimizer()
made, told = 0, []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
while not told:
    barrier()
    made += 1
    if rank == 0:
        print(f"epoch={made} loss=1", flush=True)
    steps.count(optimizer)
if rank == 0:
    open(os.path.join(os.environ["HERMES_CHECKPOINT_DIR"], "state"), "w").close()
mark(f"left-{rank}-after-{made}")
sys.exit(75)
"""


class GroupTrial(SupervisedTrial):
    """Runs hermes-trial with workers of one script, which meet before its own lines."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.epoch = 1

    def write(self, *lines: str, meets: bool = True) -> None:
        self.script.write_text((MEETING if meets else "") + "\n".join(lines))

    def start(self, *options: str, workers: int = 2) -> subprocess.Popen[bytes]:
        own = ["--lock-wait", "30", "--objective", "loss", "--workers", str(workers), *options]
        command = [sys.executable, str(self.script)]
        return self.supervise(own, command, errors=subprocess.STDOUT)

    def run(self, *options: str, workers: int = 2) -> tuple[int, bytes]:
        process = self.start(*options, workers=workers)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def log(self, rank: int) -> str:
        return (self.folder / f"rank-{rank}.log").read_text()


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[GroupTrial]:
    trial = GroupTrial(tmp_path)
    yield trial
    trial.close()


def wait_for(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)


def says(process: subprocess.Popen[bytes], word: bytes) -> None:
    for line in output_of(process):
        if word in line:
            return
    raise AssertionError(f"{word!r} was never printed")


@pytest.mark.parametrize("value", ["hermes", "off"])
def test_a_script_without_the_hook_is_told_which_settings_have_no_effect_on_it(
    trial: GroupTrial, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("HERMES_SCALE_LEARNING_RATE", value)
    trial.write(
        "for epoch in (1, 2):", "    print(f'epoch={epoch} loss=1', flush=True)", "barrier()"
    )
    code, output = trial.run()
    assert code == 0
    said = output.count(b"trial.scale_learning_rate: hermes: without effect")
    assert said == (value == "hermes")


def test_workers_that_meet_and_end_are_one_trial_that_has_finished(trial: GroupTrial) -> None:
    trial.write("print(f'epoch=1 loss={rank + 1}')", "print('rank', rank, 'of', size)")
    code, output = trial.run(workers=3)
    assert (code, output) == (0, b"epoch=1 loss=1\nrank 0 of 3\n")
    assert [(m["value"], m["step"]) for m in trial.lines("metrics.jsonl")] == [(1.0, 1)]
    assert trial.result["outcome"] == "finished"
    assert trial.status["workers"] == 3
    for rank in (1, 2):
        assert trial.log(rank).endswith(f"epoch=1 loss={rank + 1}\nrank {rank} of 3\n")
    assert trial.status["step"] == 1


def test_what_another_worker_prints_or_reports_is_no_value_of_the_trial(trial: GroupTrial) -> None:
    trial.write(
        "from hermes_ops.trial import report",
        "if rank == 1:",
        "    print('epoch=9 loss=9'); report(9, loss=9.0, other=9.0)",
        "barrier()",
        "if rank == 0: report(1, loss=0.5)",
    )
    assert trial.run()[0] == 0
    assert [(m["name"], m["value"]) for m in trial.lines("metrics.jsonl")] == [("loss", 0.5)]


def test_one_worker_has_no_rank_and_no_folder_of_a_group(trial: GroupTrial) -> None:
    trial.write(
        "import os",
        "marks = ('RANK', 'WORLD_SIZE', 'HOROVOD', 'MASTER_', 'HERMES_SIZE', 'HERMES_GROUP')",
        "print([n for n in os.environ if n.startswith(marks) or n.endswith('_RANK')])",
        "print('loss=1')",
        meets=False,
    )
    code, output = trial.run(workers=1)
    assert (code, output) == (0, b"[]\nloss=1\n")
    assert not (trial.folder / "group").exists()
    assert not list(trial.folder.glob("rank-*"))


def test_a_worker_that_raises_is_named_with_its_last_lines(trial: GroupTrial) -> None:
    trial.write("if rank == 1: raise ValueError('oh dear')", "barrier()")
    code, output = trial.run(workers=3)
    assert code == 1
    result = trial.result
    assert result["outcome"] == "failed"
    assert "rank 1 of 3 failed first (rank-1.log in the trial's folder)" in result["reason"]
    assert result["reason"].endswith("exit code 1: ValueError: oh dear")
    assert result["tail"][-1] == "ValueError: oh dear"
    assert b"failed: rank 1 of 3 failed first" in output
    assert b"by peer" in output, "it has lost rank 1"


def test_a_trial_whose_first_worker_has_finished_does_not_fail_by_one_that_has_lost_it(
    trial: GroupTrial,
) -> None:
    trial.write("print('loss=1', flush=True)", "if rank == 1: barrier()")
    assert trial.run()[0] == 0
    assert trial.result["outcome"] == "finished"
    assert "Connection" in trial.log(1)


def test_what_makes_a_worker_fail_is_judged_by_its_own_last_lines(trial: GroupTrial) -> None:
    trial.write("if rank == 1: import no_such_package", "barrier()")
    assert trial.run()[0] == 1
    assert (trial.result["cause"], trial.result["retryable"]) == ("missing_module", False)


def test_workers_that_do_not_notice_the_death_of_one_are_ended(trial: GroupTrial) -> None:
    trial.write(
        "print('pid', os.getpid(), flush=True)",
        "if rank == 1: os.kill(os.getpid(), 9)",
        "time.sleep(600)",
    )
    code, output = trial.run()
    assert code == 128 + signal.SIGKILL
    assert "rank 1 of 2 failed first" in trial.result["reason"]
    assert "killed by SIGKILL" in trial.result["reason"]
    assert not psutil.pid_exists(int(output.split()[1]))


def test_workers_that_all_leave_with_75_are_preempted(trial: GroupTrial) -> None:
    trial.write(
        "barrier()",
        "if rank == 0: open(os.environ['HERMES_CHECKPOINT_DIR'] + '/state', 'w').close()",
        "sys.exit(75)",
    )
    assert trial.run()[0] == 75
    assert trial.result["outcome"] == "preempted"


def test_sigterm_reaches_all_and_the_first_one_has_its_grace(trial: GroupTrial) -> None:
    trial.write(
        "import signal",
        "def stop(*_):",
        "    while os.path.exists(os.path.join(group, 'alive')): time.sleep(0.01)",
        "    open(os.environ['HERMES_CHECKPOINT_DIR'] + '/state', 'w').close()",
        "    sys.exit(75)",
        "if rank == 0: signal.signal(signal.SIGTERM, stop); mark('alive')",
        "barrier()",
        "if rank == 1:",
        "    def leave(*_): os.remove(os.path.join(group, 'alive')); os._exit(1)",
        "    signal.signal(signal.SIGTERM, leave)",
        "barrier()",
        "print('ready', flush=True)",
        "time.sleep(600)",
    )
    process = trial.start()
    says(process, b"ready")
    process.terminate()
    assert process.wait(60) == 75
    assert trial.result["outcome"] == "preempted"


def test_an_error_of_another_worker_after_the_stop_is_told(trial: GroupTrial) -> None:
    trial.write(
        "import signal",
        "def stop(*_): raise ValueError('cannot save')",
        "signal.signal(signal.SIGTERM, stop if rank else signal.SIG_DFL)",
        "barrier()",
        "print('ready', flush=True)",
        "time.sleep(600)",
    )
    process = trial.start()
    says(process, b"ready")
    process.terminate()
    assert process.wait(60) == 1
    assert trial.result["reason"] == (
        "rank 1 of 2 failed first (rank-1.log in the trial's folder): told to stop, it failed: "
        "exit code 1: ValueError: cannot save"
    )


def test_workers_that_make_steps_are_asked_and_not_told_before_half_of_the_grace(
    trial: GroupTrial,
) -> None:
    trial.write(
        "import signal",
        "asked = os.path.join(group, 'asked')",
        "def stop(*_): print('told, asked:', os.path.exists(asked), flush=True); sys.exit(75)",
        "signal.signal(signal.SIGTERM, stop)",
        "mark(f'{rank}.steps')",
        "barrier()",
        "print('ready', flush=True)",
        "while not os.path.exists(asked): time.sleep(0.01)",
        "if rank == 1: os.remove(os.path.join(group, '1.steps')); sys.exit(75)",
        "time.sleep(600)",
    )
    process = trial.start("--grace", "12")
    says(process, b"ready")
    process.terminate()
    output = output_of(process).read()
    assert process.wait(60) == 75
    assert output == b"told, asked: True\n"
    assert "told" not in trial.log(1), "it has left by itself"


def last_steps(trial: GroupTrial) -> list[str]:
    """Return after which step each rank has left."""
    return [path.name.split("-after-")[1] for path in (trial.folder / "group").glob("left-*")]


def test_all_workers_get_sigterm_after_the_same_step(trial: GroupTrial) -> None:
    trial.write(STEPS)
    process = trial.start(workers=3)
    says(process, b"epoch=20")
    process.terminate()
    assert process.wait(60) == 75
    assert trial.result["outcome"] == "preempted"
    assert len(last_steps(trial)) == 3
    assert len(set(last_steps(trial))) == 1


def test_a_worker_that_makes_no_steps_has_all_told_at_once(trial: GroupTrial) -> None:
    trial.write(
        "import signal",
        "def stop(*_): print('asked:', os.listdir(group), flush=True); sys.exit(75)",
        "signal.signal(signal.SIGTERM, stop)",
        "if rank == 0: mark('0.steps')",
        "barrier()",
        "print('ready', flush=True)",
        "time.sleep(600)",
    )
    process = trial.start()
    says(process, b"ready")
    process.terminate()
    assert output_of(process).read() == b"asked: ['0.steps']\n"
    assert process.wait(60) == 75


def test_a_worker_alone_has_the_variables_of_torchrun_where_it_may_have_others(
    trial: GroupTrial,
) -> None:
    trial.write(
        "import socket",
        "names = 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR'.split()",
        "print([os.environ[name] for name in names])",
        "own = 'HOROVOD', 'HERMES_SIZE', 'HERMES_GROUP'",
        "print([name for name in os.environ if name.startswith(own)])",
        "socket.create_server(('127.0.0.1', int(os.environ['MASTER_PORT']))).close()",
        "print('loss=1')",
        meets=False,
    )
    trial.script.write_text("import os\n" + trial.script.read_text())
    code, output = trial.run("--torchrun", workers=1)
    assert (code, output) == (0, b"['0', '1', '0', '1', '127.0.0.1']\n[]\nloss=1\n")
    assert not (trial.folder / "group").exists()


def test_a_worker_alone_has_tf_config_where_its_sweep_asks_for_it(trial: GroupTrial) -> None:
    trial.write("import os", "print(os.environ['TF_CONFIG'])", "print('loss=1')", meets=False)
    code, output = trial.run("--torchrun", "--tf-config", workers=1)
    assert code == 0
    assert b'"task": {"type": "worker", "index": 0}' in output


def test_workers_that_ignore_the_stop_are_all_killed_after_the_grace(trial: GroupTrial) -> None:
    trial.write(
        "import signal",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "barrier()",
        "print('ready', flush=True)",
        "time.sleep(600)",
    )
    process = trial.start("--grace", "0.3")
    says(process, b"ready")
    pids = scripts_of(process.pid, trial.script)
    assert len(pids) == 2
    process.terminate()
    assert process.wait(60) == 75
    assert not any(map(psutil.pid_exists, pids))


def scripts_of(pid: int, script: Path) -> list[int]:
    """The processes below that one that run the script."""
    below = psutil.Process(pid).children(recursive=True)
    return [p.pid for p in below if p.cmdline()[1:] == [str(script)]]


@pytest.mark.parametrize("killed", ["hermes-trial", "reaper"])
def test_no_worker_and_nothing_that_one_has_started_outlives_the_trial(
    trial: GroupTrial, killed: str
) -> None:
    trial.write(
        "import subprocess",
        "null = subprocess.DEVNULL",
        "subprocess.Popen(['sleep', '600'], start_new_session=True, env={}, stdout=null)",
        "barrier()",
        "print('ready', flush=True)",
        "time.sleep(600)",
    )
    process = trial.start(workers=3)
    says(process, b"ready")
    below = psutil.Process(process.pid).children(recursive=True)
    assert sum(p.name() == "sleep" for p in below) == 3
    assert len(scripts_of(process.pid, trial.script)) == 3
    wait_for((trial.folder / "processes.json").exists)
    wait_for(lambda: (trial.folder / "processes.json").read_text().count(",") >= 2 * 6)
    if killed == "hermes-trial":
        process.kill()
    else:
        (reaper,) = {p.ppid() for p in below if p.cmdline()[1:] == [str(trial.script)]}
        os.kill(reaper, signal.SIGKILL)
    process.wait(60)
    wait_for(lambda: not any(p.is_running() for p in below))
    assert process.returncode == (75 if killed == "reaper" else -9)


def test_a_rank_that_does_not_train_with_the_others_ends_the_trial_as_failed(
    trial: GroupTrial,
) -> None:
    trial.write("if rank == 0: mark('0.fit')", "print('trains', flush=True)", "time.sleep(600)")
    assert trial.run("--start-timeout", "1", "--grace", "0.5")[0] not in (0, 70, 75)
    assert "1 of 2 have been training and the others not" in trial.result["reason"]
    assert trial.result["retryable"]


def test_ranks_that_train_and_make_no_step_end_the_trial_as_failed(trial: GroupTrial) -> None:
    trial.write("mark(f'{rank}.fit')", "print('trains', flush=True)", "time.sleep(600)")
    assert trial.run("--start-timeout", "1", "--grace", "0.5")[0] not in (0, 70, 75)
    assert "rank 0 has made no step for" in trial.result["reason"]


def test_a_stop_of_an_earlier_segment_is_gone_in_the_next(trial: GroupTrial) -> None:
    trial.write(
        "print('left:', sorted(os.listdir(group)), flush=True)",
        "barrier()",
        "mark('stop.json')",
        "sys.exit(75)",
    )
    for _ in range(2):
        code, output = trial.run()
        assert code == 75
        assert b"left: []" in output
        assert (trial.folder / "group" / "stop.json").exists()
        trial.epoch += 1
    assert trial.log(1).count("a segment with 2 workers begins") == 2


def test_the_logs_of_other_workers_are_bounded(trial: GroupTrial) -> None:
    trial.write("if rank: print('x' * 3_000_000); print('the end')", "barrier()", "print('loss=1')")
    assert trial.run()[0] == 0
    assert (trial.folder / "rank-1.log").stat().st_size <= 1_048_576
    assert trial.log(1).endswith("the end\nloss=1\n")


def test_a_command_that_cannot_be_started_fails_in_one_line(trial: GroupTrial) -> None:
    process = trial.supervise(["--workers", "2"], ["no-such-program"], errors=subprocess.STDOUT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 127
    assert output.count(b"\n") == 2
    assert "cannot start 'no-such-program'" in trial.result["reason"]


@pytest.mark.parametrize("workers", ["0", "-1", "257", "two"])
def test_a_number_of_workers_that_is_none_is_refused(trial: GroupTrial, workers: str) -> None:
    process = trial.supervise(["--workers", workers], ["true"], errors=subprocess.STDOUT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert b"--workers" in output
    assert not trial.folder.exists()


def test_tf_config_comes_with_its_option_and_names_ports_that_are_free(trial: GroupTrial) -> None:
    trial.write(
        "import json",
        "config = json.loads(os.environ['TF_CONFIG'])",
        "assert config['task'] == {'type': 'worker', 'index': rank}",
        "host, _, port = config['cluster']['worker'][rank].partition(':')",
        "socket.create_server((host, int(port)))",
        "barrier()",
        "print('loss=1')",
    )
    assert trial.run("--tf-config")[0] == 0


def test_a_trial_goes_on_with_another_number_of_workers(trial: GroupTrial) -> None:
    trial.write(
        "import os, sys",
        "rank, size = os.environ.get('RANK', '0'), os.environ.get('WORLD_SIZE', '1')",
        "path = os.path.join(os.environ['HERMES_CHECKPOINT_DIR'], 'state')",
        "done = int(open(path).read()) if os.path.exists(path) else 0",
        "if rank == '0':",
        "    print(f'epoch={done + 1} loss={size}', flush=True)",
        "    with open(path + '.tmp', 'w') as stream: stream.write(str(done + 1))",
        "    os.replace(path + '.tmp', path)",
        "sys.exit(75 if size != '3' else 0)",
        meets=False,
    )
    for workers, code in ((2, 75), (1, 75), (3, 0)):
        assert trial.run(workers=workers)[0] == code
        trial.epoch += 1
    found = [(m["step"], m["value"]) for m in trial.lines("metrics.jsonl")]
    assert found == [(1, 2.0), (2, 1.0), (3, 3.0)]


def test_the_first_worker_is_named_without_a_log_of_its_own(trial: GroupTrial) -> None:
    trial.write("if rank == 0: sys.exit(4)", "barrier()")
    assert trial.run(workers=3)[0] == 4
    assert trial.result["reason"].startswith("rank 0 of 3 failed first: exit code 4")
    assert not (trial.folder / "rank-0.log").exists()


HALF_STARTED = """
import os, time
from hermes_ops.trial.group_start import start_processes
from hermes_ops.trial.processes.reaper import PlainChild, fork_reaper

first = PlainChild(fork_reaper(), ["sleep", "600"], dict(os.environ), None)
ready = iter([first, None])
reaper = fork_reaper()
try:
    start_processes([{}, {}], lambda _: next(ready), ["no-such-program"], None, reaper)
except FileNotFoundError as error:
    print(error.filename)
while first.poll() is None:
    time.sleep(0.01)
print(first.poll())
"""


def test_if_one_worker_cannot_be_started_none_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HALF_STARTED],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.stdout.split() == ["no-such-program", "-9"]
