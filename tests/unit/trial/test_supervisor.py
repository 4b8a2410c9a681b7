"""hermes-trial as a process, with small scripts in place of training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trial.supervised import ROOT, SupervisedTrial, output_of


class Trial(SupervisedTrial):
    """Runs hermes-trial on a script, at epoch 1 until a test says otherwise."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.epoch = 1

    def start(self, *options: str, command: list[str] | None = None) -> subprocess.Popen[bytes]:
        command = command or [sys.executable, str(self.script)]
        # The reaper of the segment before holds the folder until all of its processes have ended.
        return self.supervise(["--lock-wait", "30", *options], command, errors=subprocess.STDOUT)

    def run(self, *options: str, command: list[str] | None = None) -> tuple[int, bytes]:
        process = self.start(*options, command=command)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def write(self, text: str) -> None:
        self.script.write_text(text)

    @property
    def metrics(self) -> list[tuple[str, float, int]]:
        return [(m["name"], m["value"], m["step"]) for m in self.lines("metrics.jsonl")]


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


def says(process: subprocess.Popen[bytes], word: bytes) -> None:
    for line in output_of(process):
        if word in line:
            return
    raise AssertionError(f"{word!r} was never printed")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


CHECKPOINTING = """
import os, sys, time
folder = os.environ["HERMES_CHECKPOINT_DIR"]
path = os.path.join(folder, "state")
done = int(open(path).read()) if os.path.exists(path) else 0
metrics = os.environ["HERMES_METRICS_FILE"]
for epoch in range(done + 1, 6):
    print(f"epoch={epoch} loss={1 / epoch}", flush=True)
    # A checkpoint counts for the epochs that have been read by then.
    while not os.path.exists(metrics) or open(metrics).read().count("\\n") < epoch:
        time.sleep(0.01)
    with open(path + ".tmp", "w") as stream:
        stream.write(str(epoch))
    os.replace(path + ".tmp", path)
    if epoch == 3 and done == 0:
        print("pausing", flush=True)
        time.sleep(60)
"""


def test_what_a_stop_costs_a_script_without_the_hook_is_measured(trial: Trial) -> None:
    paced = CHECKPOINTING.replace("    print(", "    time.sleep(0.3)\n    print(", 1)
    trial.write(paced)
    process = trial.start("--objective", "loss")
    says(process, b"pausing")
    wait_for(lambda: trial.status["checkpoint_step"] == 3)
    process.terminate()
    assert process.wait(60) == 75
    timings = trial.status["timings"]
    assert timings["startup_s"] >= 0
    assert timings["repeat_s"] > 0  # half of what lies between two checkpoints
    assert not trial.status["saves_on_stop"]
    _, segment = trial.lines("segments.jsonl")
    assert segment["startup_s"] == timings["startup_s"]
    assert "restore_s" not in segment  # it began from scratch


def test_a_script_that_saves_when_it_is_told_to_stop_loses_nothing(trial: Trial) -> None:
    handler = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: (save(3), sys.exit(0)))\n"
    save = "def save(epoch):\n    open(path, 'w').write(str(epoch))\n"
    trial.write(CHECKPOINTING.replace("metrics =", f"{save}{handler}metrics =", 1))
    process = trial.start("--objective", "loss")
    says(process, b"pausing")
    wait_for(lambda: trial.status["checkpoint_step"] == 3)  # it is older than what the stop saves
    process.terminate()
    assert process.wait(60) == 75
    assert trial.status["saves_on_stop"]
    _, segment = trial.lines("segments.jsonl")
    assert segment["checkpoint_s"] == trial.status["timings"]["checkpoint_s"]


def test_metrics_of_a_plain_script_are_written_and_it_finishes(trial: Trial) -> None:
    trial.write("for e in range(1, 4): print(f'epoch={e} loss={1 / e} acc={e}')")
    code, output = trial.run("--objective", "loss")
    assert code == 0
    assert output == b"epoch=1 loss=1.0 acc=1\nepoch=2 loss=0.5 acc=2\nepoch=3 loss=" + (
        f"{1 / 3} acc=3\n".encode()
    )
    assert trial.result["outcome"] == "finished"
    assert trial.result["step"] == 3
    assert sorted(trial.metrics) == sorted(
        [(n, v, e) for e in (1, 2, 3) for n, v in (("loss", 1 / e), ("acc", float(e)))]
    )
    start, end = trial.lines("segments.jsonl")
    assert (start["first_step"], end["last_step"], end["outcome"]) == (0, 3, "finished")


def test_a_segment_keeps_what_was_measured_of_its_own_start(trial: Trial) -> None:
    lines = [
        "from hermes_ops.trial.event_channel import send",
        "send({'kind': 'hook', 'startup_s': 1.5})",
        "send({'kind': 'restored', 'seconds': 0.25})",
        "raise SystemExit(1)",
    ]
    trial.write("\n".join(lines))
    trial.run()
    trial.epoch = 2
    trial.write("raise SystemExit(1)")
    trial.run()
    _, first, _, second = trial.lines("segments.jsonl")
    assert (first["startup_s"], first["restore_s"]) == (1.5, 0.25)
    assert "startup_s" not in second
    assert trial.status["timings"]["startup_s"] == 1.5


def test_a_preempted_script_resumes_and_no_step_is_twice_or_missing(trial: Trial) -> None:
    trial.write(CHECKPOINTING)
    process = trial.start("--objective", "loss")
    says(process, b"pausing")
    wait_for(lambda: trial.status["preemptible"])
    process.terminate()
    assert process.wait(60) == 75
    assert trial.result["outcome"] == "preempted"
    assert trial.result["checkpoint_step"] == 3
    trial.epoch = 2
    code, _ = trial.run("--objective", "loss")
    assert code == 0
    assert [step for _, _, step in trial.metrics] == [1, 2, 3, 4, 5]


def test_a_script_without_a_checkpoint_is_interrupted_and_not_preemptible(trial: Trial) -> None:
    trial.write("import time; print('ready', flush=True); time.sleep(60)")
    process = trial.start()
    says(process, b"ready")
    wait_for((trial.folder / "status.json").exists)
    assert not trial.status["preemptible"]
    assert "HERMES_CHECKPOINT_DIR" in trial.status["preemptible_reason"]
    process.terminate()
    assert process.wait(60) == 75
    assert trial.result["outcome"] == "interrupted"


def test_a_clean_exit_on_sigterm_is_not_taken_for_the_end(trial: Trial) -> None:
    trial.write(
        "import os, signal, sys, time\n"
        "def stop(*_):\n"
        "    open(os.environ['HERMES_CHECKPOINT_DIR'] + '/state', 'w').write('1')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('epoch=1 loss=1', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = trial.start("--objective", "loss")
    says(process, b"loss")
    process.terminate()
    assert process.wait(60) == 75
    assert trial.result["outcome"] == "preempted"


def test_a_script_that_ignores_sigterm_is_killed_after_the_grace_period(trial: Trial) -> None:
    trial.write(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready', flush=True)\ntime.sleep(60)\n"
    )
    process = trial.start("--grace", "0.3")
    says(process, b"ready")
    process.terminate()
    assert process.wait(60) == 75
    assert trial.result["exit_code"] == -9


def test_a_second_signal_ends_the_grace_period(trial: Trial) -> None:
    trial.write(
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(1)\n"
    )
    process = trial.start("--grace", "1000")
    says(process, b"ready")
    process.terminate()
    says(process, b"asked")
    process.terminate()
    assert process.wait(60) == 75


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import sys; print('oh dear'); sys.exit(1)", "exit code 1: oh dear"),
        ("def broken(:", "SyntaxError"),
        ("print('epoch=1 loss=1'); print('epoch=2 loss=nan')", "loss is NaN at step 2"),
        ("print('loss=inf')", "loss is infinite at step 1"),
        ("print('hello')", "without ever reporting 'loss'"),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
        ("raise OSError(28, 'No space left on device')", "no space left on the device"),
    ],
)
def test_a_failing_script_fails_with_its_reason(trial: Trial, text: str, reason: str) -> None:
    trial.write(text)
    code, output = trial.run("--objective", "loss")
    assert code not in (0, 70, 75)
    assert trial.result["outcome"] == "failed"
    assert reason in trial.result["reason"]
    assert reason.encode() in output


def test_a_missing_script_and_a_missing_program_and_a_missing_folder_fail_in_one_line(
    trial: Trial,
) -> None:
    assert trial.run(command=[sys.executable, "absent.py"])[0] == 2
    assert "absent.py" in trial.result["reason"]
    assert trial.run(command=["no-such-program"])[0] == 127
    assert "no-such-program" in trial.result["reason"]
    assert trial.run("--directory", "/no/such/folder", command=["true"])[0] == 127
    assert "working directory /no/such/folder does not exist" in trial.result["reason"]


def test_a_script_over_its_time_limit_fails_and_earlier_segments_count(trial: Trial) -> None:
    trial.write("import time; time.sleep(60)")
    trial.folder.mkdir()
    (trial.folder / "segments.jsonl").write_text(
        '{"epoch": 0, "gpus": [], "start_s": 100.0, "first_step": 0}\n'
        '{"epoch": 0, "end_s": 199.9, "last_step": 0, "outcome": "preempted"}\n'
    )
    assert trial.run("--time-limit", "100")[0] not in (0, 70, 75)
    assert "time limit" in trial.result["reason"]


def test_a_trial_that_is_tried_again_after_a_failure_has_its_whole_time_limit_again(
    trial: Trial,
) -> None:
    trial.write("print('epoch=1 loss=1')")
    trial.folder.mkdir()
    (trial.folder / "segments.jsonl").write_text(
        '{"epoch": 0, "gpus": [], "start_s": 100.0, "first_step": 0}\n'
        '{"epoch": 0, "end_s": 200.0, "last_step": 0, "outcome": "failed"}\n'
    )
    assert trial.run("--time-limit", "100")[0] == 0


def test_a_script_is_ended_as_finished_at_max_epochs(trial: Trial) -> None:
    trial.write(
        "import itertools, time\n"
        "for e in itertools.count(1): print(f'epoch={e} loss=1', flush=True); time.sleep(0.05)\n"
    )
    assert trial.run("--objective", "loss", "--max-epochs", "3")[0] == 0
    assert trial.result["outcome"] == "finished"


def test_a_metric_beside_the_objective_does_not_count_as_an_epoch(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERMES_OTHER_METRICS", json.dumps({"size": r"(?P<value>\d+) MB"}))
    trial.write(
        "for n in range(50): print(f'{n} MB', flush=True)\n"
        "for e in (1, 2): print(f'epoch={e} loss=1', flush=True)\n"
    )
    assert trial.run("--objective", "loss", "--max-epochs", "3")[0] == 0
    assert trial.status["step"] == 2
    assert ("size", 49.0, 50) in trial.metrics


def test_a_pattern_that_this_python_cannot_read_is_refused_in_one_line(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERMES_OTHER_METRICS", '{"size": "("}')
    trial.write("print('loss=1')")
    code, output = trial.run("--objective", "loss")
    assert code == 2
    assert b"the pattern of size is not a regular expression" in output


def test_a_segment_that_waits_for_the_word_touches_nothing_before_it(trial: Trial) -> None:
    trial.write("print('loss=1')")
    command = [sys.executable, "-m", "hermes_ops.trial", "--dir", str(trial.folder)]
    command += ["--epoch", "1", "--on-word", "--", sys.executable, str(trial.script)]
    for word, code, begun in ((b"", 70, False), (b"\n", 0, True)):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT)
        trial.started.append(process)
        process.communicate(word, timeout=60)
        assert (process.returncode, trial.folder.exists()) == (code, begun)


def test_a_busy_folder_and_a_stale_lease_and_a_busy_gpu_are_no_failures(trial: Trial) -> None:
    trial.write("import time; print('ready', flush=True); time.sleep(60)")
    trial.epoch = 5
    locks = trial.base / "gpus"
    first = trial.start("--gpus", "0,1", "--gpu-locks", str(locks))
    says(first, b"ready")
    at_once = ("--lock-wait", "0.1")
    assert trial.run(*at_once)[0] == 70
    other = Trial(trial.base / "other")
    other.base.mkdir()
    other.write("print(1)")
    assert other.run("--gpus", "1", "--gpu-locks", str(locks), *at_once)[0] == 70
    assert not (other.folder / "result.json").exists()
    first.terminate()
    first.wait(60)
    trial.epoch = 4
    assert trial.run()[0] == 70
    assert other.run("--gpus", "1", "--gpu-locks", str(locks))[0] == 0
    other.close()


def test_a_finished_trial_is_not_run_again(trial: Trial) -> None:
    trial.write("print('loss=1')")
    assert trial.run()[0] == 0
    code, output = trial.run()
    assert code == 0
    assert b"finished already" in output


def test_progress_bars_and_binary_output_and_huge_lines_pass_unchanged(trial: Trial) -> None:
    trial.write(
        "import sys\nout = sys.stdout.buffer\n"
        "out.write(b'\\rstep 1/2\\rstep 2/2\\n' + bytes(range(256)) + b'\\n')\n"
        "out.write(b'x' * 10_000_000 + b'\\n')\nout.write(b'epoch=1 loss=0.5\\nno end')\n"
    )
    code, output = trial.run("--objective", "loss")
    assert code == 0
    expected = b"\rstep 1/2\rstep 2/2\n" + bytes(range(256)) + b"\n" + b"x" * 10_000_000 + b"\n"
    assert output == expected + b"epoch=1 loss=0.5\nno end"
    assert trial.metrics == [("loss", 0.5, 1)]
    assert "no end" in trial.result["tail"][-1]


def test_grandchildren_do_not_outlive_the_script(trial: Trial) -> None:
    trial.write(
        "import subprocess, sys\n"
        "a = subprocess.Popen(['sleep', '300'], stdout=subprocess.DEVNULL)\n"
        "b = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "print('children', a.pid, b.pid)\nprint('loss=1')\n"
    )
    code, output = trial.run()
    assert code == 0
    pids = [int(word) for word in output.split(b"\n")[0].split()[1:]]
    wait_for(lambda: not any(alive(pid) for pid in pids))


def test_nothing_outlives_a_supervisor_that_is_killed_and_its_segment_is_closed(
    trial: Trial,
) -> None:
    trial.write(
        "import os, subprocess, time\n"
        "a = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "open(os.environ['HERMES_CHECKPOINT_DIR'] + '/state', 'w').write('1')\n"
        "print('epoch=1 loss=1 pids', os.getpid(), a.pid, flush=True)\ntime.sleep(60)\n"
    )
    process = trial.start()
    line = output_of(process).readline()
    pids = [int(word) for word in line.split()[3:]]
    wait_for(lambda: trial.status["step"] == 1)
    process.kill()
    process.wait(60)
    wait_for(lambda: not any(alive(pid) for pid in pids))
    trial.write("print('epoch=2 loss=1')")
    trial.epoch = 2
    assert trial.run()[0] == 0
    outcomes = [line.get("outcome") for line in trial.lines("segments.jsonl")]
    assert outcomes == [None, "killed", None, "finished"]
    assert [step for _, _, step in trial.metrics] == [1, 2]


def test_the_trial_is_preempted_when_the_parent_of_its_supervisor_dies(trial: Trial) -> None:
    trial.write(CHECKPOINTING)
    arguments = ["--dir", str(trial.folder), "--epoch", "1", "--", sys.executable]
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(60)",
            sys.executable,
            "-m",
            "hermes_ops.trial",
            *arguments,
            str(trial.script),
        ],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    says(parent, b"pausing")
    pid = trial.status["pid"]
    parent.kill()
    parent.wait(60)
    output_of(parent).close()
    wait_for(lambda: not alive(pid))
    assert trial.result["outcome"] == "preempted"


def test_a_trial_goes_on_when_nobody_reads_its_output_any_more(trial: Trial) -> None:
    trial.script.write_text("print('epoch=5 loss=0.5'); print('epoch=6 loss=0.4')")
    reader, writer = os.pipe()
    os.close(reader)  # what it says of a curve that begins at step 5 is lost
    process = trial.supervise(
        ["--objective", "loss"], [sys.executable, str(trial.script)], writer, subprocess.DEVNULL
    )
    os.close(writer)
    assert process.wait(60) == 0
    assert (trial.result["outcome"], trial.result["step"]) == ("finished", 6)


def test_values_without_steps_continue_from_the_checkpoint(trial: Trial) -> None:
    trial.write(CHECKPOINTING.replace("epoch={epoch} ", ""))
    process = trial.start("--objective", "loss")
    says(process, b"pausing")
    wait_for(lambda: trial.status["checkpoint_step"] == 3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    assert trial.run("--objective", "loss")[0] == 0
    assert [step for _, _, step in trial.metrics] == [1, 2, 3, 4, 5]


def test_report_works_in_a_foreign_interpreter_and_wins_over_the_output(trial: Trial) -> None:
    trial.write(
        "from hermes_ops.trial import report, checkpoint_dir\n"
        "import sys\n"
        "assert not any('site-packages' in p and 'hermes' in p for p in sys.path)\n"
        "assert checkpoint_dir().is_dir()\n"
        "for e in (1, 2):\n"
        "    report(e, loss=1 / e)\n"
        "    report(e, loss=9.0)\n"
    )
    code, output = trial.run("--objective", "loss", command=["python3", "-S", str(trial.script)])
    assert code != 0 or trial.metrics  # -S leaves the hook out; report() still works
    assert trial.metrics == [("loss", 1.0, 1), ("loss", 0.5, 2)], output


def test_a_torn_last_line_of_the_metrics_is_dropped(trial: Trial) -> None:
    trial.folder.mkdir()
    whole = '{"name": "loss", "value": 1.0, "step": 1, "time_ms": 1}\n'
    (trial.folder / "metrics.jsonl").write_text(whole + '{"name": "lo')
    trial.write("print('epoch=1 loss=5'); print('epoch=2 loss=0.5')")
    assert trial.run("--objective", "loss")[0] == 0
    assert trial.metrics == [("loss", 1.0, 1), ("loss", 0.5, 2)]


def test_a_users_pattern_finds_its_metrics(trial: Trial) -> None:
    trial.write("print('[7] val: 0.25 lr=3')")
    pattern = r"\[(?P<step>\d+)\] (?P<name>\w+): (?P<value>\S+)"
    assert trial.run("--objective", "val", "--metric-pattern", pattern)[0] == 0
    assert trial.metrics == [("val", 0.25, 7)]


def test_the_users_own_sitecustomize_still_runs(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = trial.base / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('own site')")
    monkeypatch.setenv("PYTHONPATH", str(own))
    trial.write("print('loss=1')")
    process = trial.start(command=[sys.executable, str(trial.script)])
    output, _ = process.communicate(timeout=60)
    assert output.count(b"own site") >= 1


def test_the_environment_names_the_trials_files(trial: Trial) -> None:
    trial.write("import os; print(os.environ['HERMES_METRICS_FILE']); print('loss=1')")
    _, output = trial.run("--gpus", "1", "--gpu-locks", str(trial.base))
    assert output.splitlines()[0].decode() == os.fspath(trial.folder / "metrics.jsonl")


def test_a_secret_of_the_environment_is_in_no_output_no_tail_and_no_reason(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_swordfish")
    trial.write(
        "import os, sys\nhalf = os.environ['HF_TOKEN']\n"
        "sys.stdout.write('a ' + half[:5]); sys.stdout.flush()\n"
        "sys.stdout.write(half[5:] + ' b\\nloss=1\\n'); sys.stdout.flush()\n"
        "raise SystemExit('refused: ' + half)\n"
    )
    code, output = trial.run("--objective", "loss")
    assert code == 1
    assert output.splitlines()[0] == b"a *** b"
    assert trial.result["reason"] == "exit code 1: refused: ***"
    written = b"".join(p.read_bytes() for p in trial.folder.rglob("*") if p.is_file())
    assert b"swordfish" not in output + written


EVENTS = """
import os, socket, struct, sys
from hermes_ops.trial.tensorboard import masked_crc
name = f"events.out.tfevents.1700000000.{socket.gethostname()}.{os.getpid()}.0"
os.makedirs("runs/now", exist_ok=True)
def write(data):
    length = struct.pack("<Q", len(data))
    sums = [struct.pack("<I", masked_crc(part)) for part in (length, data)]
    with open("runs/now/" + name, "ab") as stream:
        stream.write(length + sums[0] + data + sums[1])
for epoch in range(3):
    value = b"\\n\\x08val_loss\\x15" + struct.pack("<f", 0.5 / (epoch + 1))
    summary = b"\\n" + bytes([len(value)]) + value
    write(b"\\x10" + bytes([epoch]) + b"\\x2a" + bytes([len(summary)]) + summary)
    print(f"step={epoch} loss=7", flush=True)
"""


def test_event_files_of_tensorboard_are_metrics(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERMES_TENSORBOARD_DIR", "runs")
    trial.write(EVENTS)
    code, output = trial.run("--objective", "val_loss", "--directory", str(trial.base))
    assert code == 0, output
    curve = [(value, step) for name, value, step in trial.metrics if name == "val_loss"]
    assert curve == [(0.5, 1), (0.25, 2), (pytest.approx(0.5 / 3), 3)]


def test_what_is_reported_counts_however_much_is_printed_beside_it(trial: Trial) -> None:
    trial.write(
        "from hermes_ops.trial import report\nimport time\n"
        "for e in range(1, 4):\n"
        "    report(e, loss=1 / e)\n"
        "    print(f'epoch={e} accuracy=0.5', flush=True)\n"
        "    time.sleep(0.2)\n"
        "report(9, loss=0.1)\nprint('epoch=4 accuracy=0.5', flush=True)\n"
    )
    code, output = trial.run("--objective", "loss")
    assert code == 0, output
    assert trial.result["step"] == 9


@pytest.mark.parametrize(
    ("text", "options", "cause"),
    [
        ("import no_such_package", (), "missing_module"),
        ("def broken(:", (), "syntax_error"),
        (
            "import argparse; argparse.ArgumentParser().parse_args(['--surprise'])",
            (),
            "refused_argument",
        ),
        ("print('epoch=1 loss=1'); print('epoch=2 loss=nan')", (), "diverged"),
        ("print('epoch=1 val_acc=0.4')", (), "no_objective"),
        ("print('epoch=1 loss=1')", ("--python", "/no/such/python"), "cannot_start"),
        ("print('epoch=1 loss=1'); raise OSError('no data')", (), "other"),
    ],
)
def test_the_result_says_whether_the_trial_is_to_be_tried_again(
    trial: Trial, text: str, options: tuple[str, ...], cause: str
) -> None:
    trial.write(text)
    trial.run("--objective", "loss", *options, command=["python" if options else sys.executable,
                                                        str(trial.script)])  # fmt: skip
    result = trial.result
    assert (result["outcome"], result["cause"]) == ("failed", cause)
    assert result["retryable"] is (cause == "other")


def test_an_interpreter_that_is_not_there_is_named_by_its_key(trial: Trial) -> None:
    trial.run("--python", "/no/such/python", command=["python", "train.py"])
    assert trial.result["reason"].endswith("correct trial.python")
    trial.run("--python", "/no/such/python", command=["/no/such/python", "train.py"])
    assert trial.result["reason"].endswith("correct trial.python")
    trial.run("--python", "/no/such/python", command=["no-such-program"])
    assert trial.result["reason"].endswith("correct trial.command")
    trial.write("#!/no/such/shell\n")
    trial.script.chmod(0o755)
    trial.run(command=[str(trial.script)])
    assert "the interpreter that its first line names is not there" in trial.result["reason"]


def test_a_script_that_raises_when_it_is_told_to_stop_has_failed(trial: Trial) -> None:
    trial.write(
        "import os, signal, time\n"
        "open(os.environ['HERMES_CHECKPOINT_DIR'] + '/state', 'w').write('1')\n"
        "def stop(*_): raise TypeError('cannot save this')\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('epoch=1 loss=1', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = trial.start("--objective", "loss")
    says(process, b"loss")
    process.terminate()
    assert process.wait(60) == 1
    assert trial.result["outcome"] == "failed"
    assert (
        "told to stop, it failed: exit code 1: TypeError: cannot save this"
        in (trial.result["reason"])
    )


def test_a_package_that_was_there_in_an_earlier_segment_is_waited_for(trial: Trial) -> None:
    trial.write("print('epoch=1 loss=1'); raise SystemExit(75)")
    trial.run("--objective", "loss")
    trial.write("import no_such_package")
    trial.epoch = 2
    trial.run("--objective", "loss")
    assert (trial.result["cause"], trial.result["retryable"]) == ("missing_module", True)


A_FOLDER_OF_THE_METRICS = """
import os, pathlib, time
metrics = pathlib.Path(os.environ["HERMES_TRIAL_DIR"], "metrics.jsonl")
metrics.unlink(missing_ok=True)
metrics.mkdir()
print("epoch=1 loss=0.5", flush=True)
time.sleep(60)
"""


def test_values_that_a_disk_with_room_does_not_take_are_told_as_what_they_are(trial: Trial) -> None:
    trial.write(A_FOLDER_OF_THE_METRICS)
    code, _ = trial.run("--objective", "loss")
    assert code != 0
    assert trial.result["cause"] == "other"
    assert "a metric could not be written: Is a directory" in trial.result["reason"]


def killed_and_resumed(trial: Trial, script: str, *options: str) -> dict[str, Any]:
    """Run a script that kills itself once, then to its end; return the status in between."""
    trial.write(script)
    code, output = trial.run(*options)
    assert code not in (0, 75), output
    between = trial.status
    code, output = trial.run(*options)
    assert code == 0, output
    return between


FINAL = """
import os, signal
from hermes_ops.trial.event_channel import send
path = os.path.join(os.environ["HERMES_CHECKPOINT_DIR"], "state")
if not os.path.exists(path):
    open(path, "w").close()
    for epoch in range(1, 5):
        send({"kind": "hook", "preemptible": True})
        send({"kind": "checkpoint", "step": epoch, "seconds": 0.1})
    os.kill(os.getpid(), signal.SIGKILL)
print("Test accuracy: 0.9")
"""


def test_an_objective_that_is_printed_once_at_the_end_counts_after_a_resume_too(
    trial: Trial,
) -> None:
    options = ("--objective", "Test accuracy", "--max-epochs", "4")
    assert killed_and_resumed(trial, FINAL, *options)["checkpoint_step"] == 4
    assert trial.metrics == [("Test accuracy", 0.9, 1)]


FITS_IN_A_LOOP = """
import os, signal, time
from pathlib import Path
from hermes_ops.trial.event_channel import send
from hermes_ops.trial.keras.output_order import after_replay
state = Path(os.environ["HERMES_CHECKPOINT_DIR"], "state")
done = int(state.read_text()) if state.exists() else 0
for fit in range(5):
    if fit >= done:
        with after_replay(Path(os.environ["HERMES_TRIAL_DIR"]), 0 < done == fit):
            send({"kind": "hook", "preemptible": True})
        state.write_text(str(fit + 1))
        send({"kind": "checkpoint", "step": fit + 1, "seconds": 0.1, "fits": fit + 1})
    print(f"score: {fit / 10}", flush=True)
    if fit == 2 and not done:
        metrics = Path(os.environ["HERMES_METRICS_FILE"])
        while not metrics.exists() or metrics.read_text().count("\\n") < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_values_that_are_printed_between_fits_have_the_steps_of_a_run_that_never_stopped(
    trial: Trial,
) -> None:
    options = ("--objective", "score", "--max-epochs", "5")
    assert killed_and_resumed(trial, FITS_IN_A_LOOP, *options)["fits"] == 3
    assert trial.metrics == [("score", fit / 10, fit + 1) for fit in range(5)]
