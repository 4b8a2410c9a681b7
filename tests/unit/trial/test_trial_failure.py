"""Which failures are tried again, and what a person reads of each."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.trial.failure import (
    Cause,
    classify,
    is_error_at_stop,
    is_final,
    last_line,
    lines_since,
    may_start_later,
    no_objective,
)
from hermes_ops.trial.outcome import SegmentEnding, SegmentFacts, SegmentOutcome, judge
from hermes_ops.trial.output.line_reader import LineReader

FRAME = ["Traceback (most recent call last):", '  File "train.py", line 1, in <module>']


def raised(line: str, source: str = "    work()") -> list[str]:
    return [*FRAME, source, line]


TORCHRUN = [
    "E1130 04:21:19.182000 13269 torch/distributed/elastic/multiprocessing/api.py:1002] failed "
    "(exitcode: 1) local_rank: 0 (pid: 13796) of binary: /opt/torch/bin/python",
    *raised("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "),
    "============================================================",
    "train.py FAILED",
    "------------------------------------------------------------",
    "Root Cause (first observed failure):",
    "  exitcode  : 1 (pid: 13796) ",
    "============================================================",
]
RANK = """\
[{0}]:
  time      : 2026-11-30_04:21:19
  host      : node-a
  rank      : {0} (local_rank: {0})
  exitcode  : 1 (pid: 1379{0})
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""
HYDRA = "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace."

NOT_AGAIN: dict[str, tuple[int, list[str], Cause]] = {
    "a missing package": (
        1, raised("ModuleNotFoundError: No module named 'foo'"), Cause.MISSING_MODULE),
    "an answer that nobody gives": (
        1, raised("EOFError: EOF when reading a line"), Cause.REFUSED_ARGUMENT),
    "a missing name": (
        1, raised("ImportError: cannot import name 'x' from 'y' (y.py)"), Cause.MISSING_MODULE),
    "a missing package, on every rank": (
        1, ["[rank0]: " + line for line in raised("ModuleNotFoundError: No module named 'foo'")],
        Cause.MISSING_MODULE),
    "a missing package under a launcher": (
        1, [*raised("ModuleNotFoundError: No module named 'foo'"),
            *raised("subprocess.CalledProcessError: Command 'x' returned non-zero exit status 1.")],
        Cause.MISSING_MODULE),
    "a missing package under torchrun": (
        1, [*raised("ModuleNotFoundError: No module named 'foo'"), *TORCHRUN],
        Cause.MISSING_MODULE),
    "a missing package in a frame of several lines": (
        1, [*FRAME, "    call(", "    ^^^^^", "    ...<3 lines>...", "    )", "    ^",
            "ModuleNotFoundError: No module named 'foo'"], Cause.MISSING_MODULE),
    "a missing package in a box": (
        1, ["╭─ Traceback (most recent call last) ─╮", "│ x.py:1 │", "╰───────╯",
            "ModuleNotFoundError: No module named 'foo'"], Cause.MISSING_MODULE),
    "a missing package, then what a tracker says": (
        1, [*raised("ModuleNotFoundError: No module named 'foo'"),
            *["wandb: View run at x"] * 20], Cause.MISSING_MODULE),
    "a missing package, then what Python says of shared memory": (
        1, [*raised("ModuleNotFoundError: No module named 'foo'"),
            "/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: "
            "resource_tracker: There appear to be 1 leaked shared_memory objects to clean up",
            "  warnings.warn('resource_tracker: There appear to be %d '"], Cause.MISSING_MODULE),
    "a missing package that the script has noticed": (
        1, ["ERROR: No module named 'foo'"], Cause.MISSING_MODULE),
    "a module for python -m": (
        1, ["/usr/bin/python3: No module named train"], Cause.MISSING_MODULE),
    "a package of R": (
        1, ["Error in library(foo) : there is no package called ‘foo’", "Execution halted"],
        Cause.MISSING_MODULE),
    "processes that would train apart": (
        1, raised("hermes_ops.trial.group.GroupError: the script does not use Horovod: 2 copies "
            "would train apart: call hvd.init()"), Cause.TRAINS_APART),
    "a syntax error": (
        1, ['  File "train.py", line 3', "    x = = 3", "        ^", "SyntaxError: invalid syntax"],
        Cause.SYNTAX_ERROR),
    "an indentation error": (
        1, ['  File "t.py", line 3', "    x", "IndentationError: unexpected indent"],
        Cause.SYNTAX_ERROR),
    "a syntax error of the shell": (
        2, ["train.sh: line 5: syntax error near unexpected token `do'"], Cause.SYNTAX_ERROR),
    "argparse": (
        2, ["usage: train.py [-h]", "train.py: error: unrecognized arguments: --x=1"],
        Cause.REFUSED_ARGUMENT),
    "argparse, a value": (
        2, ["usage: train.py [-h] --lr LR", "train.py: error: argument --lr: invalid float value"],
        Cause.REFUSED_ARGUMENT),
    "argparse, the script's own check": (
        2, ["usage: train.py [-h]", "train.py: error: --a needs --b"], Cause.REFUSED_ARGUMENT),
    "click": (
        2, ["Usage: train.py [OPTIONS]", "Try 'train.py --help' for help.", "",
            "Error: No such option: --x"], Cause.REFUSED_ARGUMENT),
    "typer": (
        2, ["Usage: train.py [OPTIONS]", "╭─ Error ──────╮", "│ No such option: --x │", "╰────╯"],
        Cause.REFUSED_ARGUMENT),
    "absl": (
        1, ["FATAL Flags parsing error:", "  Unknown command line flag 'x'",
            "Pass --helpshort or --helpfull to see help on flags."], Cause.REFUSED_ARGUMENT),
    "hydra": (
        1, ["Could not override 'x'.", "Key 'x' is not in struct", "    full_key: x",
            "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace."],
        Cause.REFUSED_ARGUMENT),
    "fire": (
        2, ["ERROR: Could not consume arg: --x", "Usage: train.py -"], Cause.REFUSED_ARGUMENT),
    "Transformers": (
        1, raised("ValueError: Some specified arguments are not used by the HfArgumentParser: x"),
        Cause.REFUSED_ARGUMENT),
    "an option of a compiled program": (
        1, ["train: unrecognized option '--x'"], Cause.REFUSED_ARGUMENT),
    "no script": (
        2, ["python: can't open file '/x/no.py': [Errno 2] No such file or directory"],
        Cause.CANNOT_START),
    "no program": (127, ["train.sh: line 1: python9: command not found"], Cause.CANNOT_START),
    "no permission": (126, ["bash: ./train: Permission denied"], Cause.CANNOT_START),
    "a loss that the script sees is NaN": (
        1, ["Loss is nan, stopping training"], Cause.DIVERGED),
    "a loss that Lightning sees is NaN": (
        1, raised("ValueError: The loss returned in `training_step` is nan or inf."),
        Cause.DIVERGED),
    "a gradient that is NaN": (
        1, raised("RuntimeError: Function 'LogBackward0' returned nan values in its 0th output."),
        Cause.DIVERGED),
    "a perplexity that is too great": (
        1, raised("OverflowError: math range error"), Cause.DIVERGED),
}  # fmt: skip

AGAIN: dict[str, tuple[int, list[str]]] = {
    "out of memory": (1, raised("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate")),
    "out of memory, by the kernel": (-9, raised("ModuleNotFoundError: No module named 'foo'")),
    "out of memory, by the kernel, under a shell": (137, ["Killed"]),
    "an error of CUDA": (1, raised("RuntimeError: CUDA error: an illegal memory access")),
    "a driver that this node lacks": (
        1, raised("ImportError: libcuda.so.1: cannot open shared object file")),
    "a disk that is away": (
        1, raised("ImportError: [Errno 116] Stale file handle: '/net/site-packages/x.py'")),
    "a script on a disk that is away": (
        2, ["python: can't open file '/net/t.py': [Errno 5] Input/output error"]),
    "a lost node": (1, raised("RuntimeError: NCCL error: remote process exited")),
    "what the script says itself": (1, ["the data set is gone"]),
    "an exit of 2 without a usage": (2, ["error: the data set is gone"]),
    "data that are not finite": (1, raised("ValueError: Input X contains NaN.")),
    "an import that was caught before": (
        1, [*raised("ModuleNotFoundError: No module named 'apex'"), "going on without apex",
            "epoch=1 loss=0.4", "the data set is gone"]),
    "an import that was named, not raised": (
        1, ["ImportError: no apex, going on", "the data set is gone"]),
    "another exception while one was handled": (
        1, [*raised("ModuleNotFoundError: No module named 'fast'"),
            "During handling of the above exception, another exception occurred:",
            *raised("ConnectionError: no answer")]),
    "hydra's job": (
        1, ["Error executing job with overrides: []", *raised("OSError: no data"),
            "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace."]),
    "nothing at all": (1, []),
    "a segmentation fault": (-11, []),
}  # fmt: skip


@pytest.mark.parametrize("what", NOT_AGAIN)
def test_what_cannot_change_is_not_tried_again(what: str) -> None:
    code, tail, cause = NOT_AGAIN[what]
    found = classify(code, ["epoch=1 loss=0.3", *tail])
    assert found.cause is cause
    assert found.line
    assert is_final(found.cause, worked_before=False)


@pytest.mark.parametrize("what", AGAIN)
def test_what_may_go_better_another_time_is_tried_again(what: str) -> None:
    found = classify(*AGAIN[what])
    assert not is_final(found.cause, worked_before=False)


def test_a_syntax_error_is_named_with_its_file_and_line() -> None:
    found = classify(*NOT_AGAIN["a syntax error"][:2])
    assert found.line == 'SyntaxError: invalid syntax ("train.py", line 3)'


def test_what_was_there_in_an_earlier_segment_is_waited_for_but_a_mistake_stays_one() -> None:
    waited = {c for c in Cause if not is_final(c, worked_before=True)}
    seen_before = {Cause.MISSING_MODULE, Cause.CANNOT_START, Cause.TRAINS_APART}
    assert waited == seen_before | {Cause.OTHER, Cause.NO_SPACE}


def test_a_program_that_is_not_there_never_starts_and_one_on_a_lost_disk_may() -> None:
    numbers = {"ENOENT": 2, "EACCES": 13, "ENOEXEC": 8, "EIO": 5, "ENOMEM": 12, "ESTALE": 116}
    assert {n for n, number in numbers.items() if may_start_later(number)} == {
        "EIO", "ENOMEM", "ESTALE",
    }  # fmt: skip


@given(st.integers(-64, 255), st.lists(st.text(max_size=30), max_size=20))
def test_whatever_a_script_prints_it_is_classified(code: int, tail: list[str]) -> None:
    assert isinstance(classify(code, tail).cause, Cause)
    assert isinstance(is_error_at_stop(code, tail), bool)


def test_the_summary_of_many_ranks_does_not_hide_what_the_script_has_raised() -> None:
    summary = [*TORCHRUN[:-3], *(line for n in range(8) for line in RANK.format(n).splitlines())]
    printed = [*raised("ModuleNotFoundError: No module named 'foo'"), *summary, *TORCHRUN[-3:]]
    reader = LineReader()
    reader.feed("".join(f"{line}\n" for line in printed).encode())
    failure = classify(1, reader.tail)
    assert failure.cause is Cause.MISSING_MODULE
    assert last_line(reader.tail) == "ModuleNotFoundError: No module named 'foo'"


def test_the_reason_of_a_script_that_was_killed_says_when_the_kernel_does_that() -> None:
    assert "memory" in judge(facts(-9, ["epoch=3 loss=0.5"])).reason
    assert "memory" not in judge(facts(-11, ["epoch=3 loss=0.5"])).reason


def test_the_fields_that_pydantic_refuses_are_named() -> None:
    error = "pydantic_core._pydantic_core.ValidationError: 1 validation error for C"
    field = ["typo", "  Extra inputs are not permitted", "    For further information visit x"]
    assert last_line([*raised(error), *field]) == f"{error} typo Extra inputs are not permitted"


ERRORS_AT_STOP = {
    "a handler that fails": (1, raised("NameError: name 'save' is not defined")),
    "a handler that names the signal": (1, raised("RuntimeError: boom in the SIGTERM handler")),
    "a state that cannot be saved": (
        1, [*raised("KeyboardInterrupt"), *raised("TypeError: cannot pickle 'generator' object")]),
    "an iterator": (1, raised("StopIteration")),
    "what a launcher runs": (
        1, [*raised("NameError: name 'save' is not defined"),
            *raised("subprocess.CalledProcessError: Command 'x' returned exit status 1.")]),
    "a missing package": (1, raised("ModuleNotFoundError: No module named 'foo'")),
    "a refused argument": (2, ["usage: t.py", "t.py: error: unrecognized arguments: --x"]),
}  # fmt: skip
STOPS = {
    "no handler": (-15, []),
    "the end of the grace": (-9, raised("NameError: name 'x' is not defined")),
    "an exit by the handler": (1, ["saved, going"]),
    "an exit by a shell": (143, ["Terminated"]),
    "an interrupt": (1, raised("KeyboardInterrupt")),
    "an exit that is shown": (1, raised("SystemExit: 15")),
    "an exception of its own": (1, raised("__main__.Preempted")),
    "an exception that names the signal": (1, raised("RuntimeError: received SIGTERM")),
    "torchrun": (
        1, raised("torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got "
                  "signal: 15")),
    "a worker of a loader": (
        1, raised("RuntimeError: DataLoader worker (pid 7) is killed by signal: Terminated. ")),
    "workers of a loader": (
        1, raised("RuntimeError: DataLoader worker (pid(s) 7, 8) exited unexpectedly")),
    "a pool": (
        1, raised("concurrent.futures.process.BrokenProcessPool: A process in the process pool "
                  "was terminated abruptly")),
    "a child": (
        1, raised("subprocess.CalledProcessError: Command 'x' died with <Signals.SIGTERM: 15>.")),
    "a launcher whose command has left": (
        1, raised("subprocess.CalledProcessError: Command 'x' returned non-zero exit status 75.")),
    "a pipe": (1, raised("BrokenPipeError: [Errno 32] Broken pipe")),
    "MPI": (1, ["MPI_ABORT was invoked on rank 0 in communicator MPI_COMM_WORLD"]),
    "a crash while Python shuts down": (-11, []),
}  # fmt: skip


@pytest.mark.parametrize("what", ERRORS_AT_STOP)
def test_an_error_after_the_stop_is_a_failure(what: str) -> None:
    code, lines = ERRORS_AT_STOP[what]
    ending = judge(facts(code, lines, asked_to_stop=True, has_checkpoint=True))
    assert ending.outcome is SegmentOutcome.FAILED
    assert ending.reason.startswith(f"told to stop, it failed: exit code {code}: ")


@pytest.mark.parametrize("what", STOPS)
def test_what_a_stop_brings_with_it_is_no_failure(what: str) -> None:
    code, lines = STOPS[what]
    ending = judge(facts(code, lines, asked_to_stop=True, has_checkpoint=True))
    assert (ending.outcome, ending.code) == (SegmentOutcome.PREEMPTED, 75)


def test_an_error_that_was_logged_before_the_stop_is_no_failure() -> None:
    before = [*raised("ValueError: one bad file, left out"), "epoch=1 loss=2"]
    told = facts(1, [*before, "saved"], asked_to_stop=True, tail_at_stop=before)
    assert judge(told).outcome is SegmentOutcome.INTERRUPTED
    assert judge(told._replace(tail_at_stop=before[:1])).outcome is SegmentOutcome.FAILED


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(4, 9), max_size=12))
def test_the_lines_since_a_moment_are_those_that_came_after_it(
    before: list[int], after: list[int]
) -> None:
    whole = [str(n) for n in [*before, *after]]
    kept = whole[max(0, len(whole) - 12) :]
    assert lines_since([str(n) for n in before], kept) == [str(n) for n in after]


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        ([*raised("RuntimeError: boom"), *TORCHRUN], "RuntimeError: boom"),
        ([*raised("RuntimeError: boom"), *FRAME, *TORCHRUN], "RuntimeError: boom"),
        (["[rank0]: " + line for line in raised("RuntimeError: boom")] + TORCHRUN,
         "RuntimeError: boom"),
        ([*raised("RuntimeError: boom"),
          *raised("subprocess.CalledProcessError: Command 'x' returned non-zero exit status 1.")],
         "RuntimeError: boom"),
        ([*raised("OSError: no data"), "", HYDRA], "OSError: no data"),
        ([*raised("omegaconf.errors.ValidationError: no float"), "    full_key: lr"],
         "omegaconf.errors.ValidationError: no float"),
        ([*raised("RuntimeError: Error(s) in loading state_dict for Net:"), "\tsize mismatch"],
         "RuntimeError: Error(s) in loading state_dict for Net: size mismatch"),
        ([*raised("OSError: going on"), "the data set is gone"], "the data set is gone"),
        (TORCHRUN, TORCHRUN[-1]),
        ([], "no output"),
    ],
)  # fmt: skip
def test_the_reason_of_a_failure_is_the_scripts_own_exception_whatever_its_launcher_says_of_it(
    tail: list[str], said: str
) -> None:
    assert judge(facts(1, tail)).reason == f"exit code 1: {said}"


def facts(code: int, tail: list[str], **changes: Any) -> SegmentFacts:
    known = SegmentFacts(
        exit_code=code,
        asked_to_stop=False,
        ended_at_max_epochs=False,
        verdict=None,
        has_checkpoint=False,
        objective="val_loss",
        objective_reported=True,
        trained_to_end=False,
        tail=tail,
    )
    return known._replace(**changes)


def test_a_value_that_is_not_finite_is_final_and_a_time_limit_is_not() -> None:
    told = facts(-15, [], verdict="val_loss is NaN at step 2")
    assert judge(told._replace(diverged=True)) == SegmentEnding(
        SegmentOutcome.FAILED, "val_loss is NaN at step 2", 143, "diverged", False
    )
    assert judge(told).retryable


@pytest.mark.parametrize(
    ("objective", "reported", "said"),
    [
        ("val_loss", ["val_acc"], "reported val_acc: did you mean objective.metric: val_acc with "
         "direction: maximize?"),
        ("val_loss", ["acc", "loss", "validation_loss", "val_acc"],
         "reported validation_loss, acc, loss, val_acc: did you mean objective.metric: "
         "validation_loss?"),
        ("val_accuracy", ["train/loss", "val/Acc"], "objective.metric: val/Acc with direction"),
        ("loss", [], "print `loss=VALUE`, set trial.metric_pattern"),
        ("mAP", [f"m{n:02d}" for n in range(30)], "and 22 more"),
    ],
)  # fmt: skip
def test_what_was_reported_in_the_place_of_the_objective_is_named(
    objective: str, reported: list[str], said: str
) -> None:
    ending = judge(facts(0, [], objective=objective, objective_reported=False, reported=reported))
    assert ending.reason.startswith(f"it ended without ever reporting {objective!r}")
    assert said in ending.reason
    assert not ending.retryable
    assert no_objective(objective, "maximize", reported).remedy.count("direction") == 0


def test_lines_that_look_like_the_objective_are_named_also_where_the_script_ends_soon() -> None:
    tail = ["[LightGBM] [Info] Start training", "[12]\tvalid_0's l2: 0.266091"]
    told = facts(0, tail, objective="l2", objective_reported=False)
    assert judge(told).reason.endswith("would be read with objective.metric: valid_0's l2")
    said = told._replace(refused=["no value of 'l2' so far. Lines that look like metrics: x"])
    assert judge(said).reason.endswith("metrics: x")
    assert "Lines" not in judge(told._replace(reported=["loss"])).reason


@pytest.mark.parametrize("words", [
    "There appears to be a concurrent caching iterator running - cache lockfile already exists "
    "('data/train_0.lockfile'). If you are sure no other running TF computations are using this "
    "cache prefix, delete the lockfile and re-initialize the iterator. Lockfile contents: Created "
    "at: 1795980347",
    "TensorBundle at data/train shard 0 (32 bytes): Checksum does not match: stored 308 vs. 177",
])  # fmt: skip
def test_of_two_trials_that_write_one_cache_the_one_that_fails_says_so(words: str) -> None:
    kind = "tensorflow.python.framework.errors_impl.DataLossError: Graph execution error:"
    lines = [*raised(kind), words, "\t [[{{node IteratorGetNext}}]] [Op:__inference_1477]"]
    ending = judge(facts(1, lines))
    begin = "exit code 1: another process writes the same tf.data cache, data/train: "
    assert ending.reason.startswith(begin)
    assert ending.retryable
