"""Why a script failed, and whether trying it again can help: a pure function of how it ended.

What depends on the machine or the moment is tried again: a lack of memory, an error of CUDA, a lost
node, a full disk. What depends on the script, its interpreter or its configuration is not: it would
fail in the same way.
"""

from __future__ import annotations

import enum
import errno
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Cause(str, enum.Enum):  # noqa: UP042 - enum.StrEnum is not in Python 3.9
    """The cause of a failed segment; OTHER stands for all causes that a retry may cure.

    NO_SPACE is a disk that is full: the script is not at fault. TRAINS_APART: the processes of the
    trial would each train a model of its own. INCOMPLETE: not all nodes of the trial were there.
    """

    OTHER = "other"
    DIVERGED = "diverged"
    NO_OBJECTIVE = "no_objective"
    MISSING_MODULE = "missing_module"
    SYNTAX_ERROR = "syntax_error"
    REFUSED_ARGUMENT = "refused_argument"
    CANNOT_START = "cannot_start"
    NO_SPACE = "no_space"
    TRAINS_APART = "trains_apart"
    INCOMPLETE = "incomplete"


class Failure(NamedTuple):
    """The cause, the line of the output that says it, and what a person can do about it."""

    cause: Cause
    line: str = ""
    remedy: str = ""


class RaisedException(NamedTuple):
    """An exception: the name of its class, its line, and where in the output that is."""

    kind: str
    line: str
    place: int


_MOST_LAST_WORDS = 12  # lines that a script may print after the exception that ends it

_RANK = re.compile(r"^\[[\w ]*rank\s*\d+\]:? ?")
_EXCEPTION = re.compile(r"^((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?::\s(.*)|:?)$")
_TRACEBACK = "Traceback (most recent call last)"
_FRAME = re.compile(r'^[\s>]+File ("[^"]*", line \d+)|^[╰└]─')
_LAUNCHERS = ("CalledProcessError", "ChildFailedError", "ProcessRaisedException")
_LAUNCHER_LOG = re.compile(r"torch[./]distributed[./](?:elastic|run)\b")
_OF_ONE_RANK = re.compile(r"\[\d+\]:$|  (?:time|host|rank|exitcode|error_file|traceback) *: ")
_VALUE = re.compile(r"[A-Za-z_]\w* ?[=:] ?[-+]?\d")

_IMPORT_ERRORS = (
    "ModuleNotFoundError",
    "ImportError",
    "PackageNotFoundError",
    "DistributionNotFound",
)
_SYNTAX_ERRORS = ("SyntaxError", "IndentationError", "TabError")
_MISSING_MODULE = re.compile(
    r"^\S*python[\d.]*(?:\.exe)?: (?:No module named \S+|Error while finding module specification)"
    r"|there is no package called|^Error: Cannot find module '|^[^=]*No module named '[\w.]+'\W*$"
    r"|Package \S+ not found in current path"
)
_NO_SCRIPT = re.compile(r": can't open file '|: can't find '__main__' module in '")
_SHELL_SYNTAX = re.compile(r": line \d+: syntax error|: Syntax error: ")
_PASSING = re.compile(
    r"\[Errno (?:5|11|12|23|24|104|110|111|112|113|116|121)\]|Stale (?:NFS )?file handle"
    r"|Input/output error|Transport endpoint|Remote I/O|Resource temporarily unavailable"
    r"|Too many open files|Cannot allocate memory|timed out|Connection (?:reset|refused)"
    r"|libcuda\.so|libnvidia",  # what the driver of a GPU brings is missing on a node, not for all
    re.IGNORECASE,
)
_USAGE = re.compile(
    r"^\W*usage:|try '[^']*--?h(?:elp)?\b|╭─+ (?:error|unrec|parsing|required)|^\S+: error: \S",
    re.IGNORECASE,
)
_REFUSED = re.compile(
    r"unrecognized (?:arguments?|options?)|unrecognised (?:arguments?|options?)|unexpected argument"
    r"|no such option|unknown (?:command line )?(?:flag|option)|could not consume arg"
    r"|flag provided but not defined|flags parsing error|the following arguments are required"
    r"|missing (?:option|argument) '|invalid value for '|argument \S+: (?:invalid|expected)"
    r"|not used by the HfArgumentParser|GetoptError: |^EOFError: EOF when reading a line$",
    re.IGNORECASE,
)
_REFUSES = 2  # what argparse, click and others exit with
_HYDRA, _HYDRA_JOB = "HYDRA_FULL_ERROR=1", "Error executing job"
_HYDRA_REFUSED = re.compile(
    r"^(?:Could not|Key '|Error (?:parsing|merging)|In '|mismatched|no viable|missing |extraneous "
    r"|token |You must specify)"
)

_NOT_FINITE = re.compile(
    r"\b(?:nans?|infs?|infinit[ey]|non-?finite|not finite|diverg\w+|explod\w+)\b", re.IGNORECASE
)
_OF_TRAINING = re.compile(
    r"loss|objective|grad|weight|logit|activation|\bmetric|backward\w*' returned|perplexity"
    r"|probability tensor|training|float (?:nan|infinity) to integer",
    re.IGNORECASE,
)
_ARITHMETIC = ("FloatingPointError", "OverflowError")
_OVERFLOW = re.compile(r"math range error|overflow|invalid value|divide by zero|loss|infinity")

_STOPPING_NAME = re.compile(
    r"preempt|interrupt|stop(?!iteration|asynciteration)|exit|terminat|signal|kill|cancel|abort"
    r"|shutdown|quit|brokenpipe|connectionreset|brokenprocesspool|eoferror",
    re.IGNORECASE,
)
_STOPPING = re.compile(
    r"\b(?:got|receiv\w+|caught|by|with|on)\b.{0,20}(?:sig(?:term|kill|int|hup)|\bsignals?\b)"
    r"|signal:? (?:15|9|terminated|killed)|worker.{0,40}(?:exited|terminated|killed|died)"
    r"|terminated abruptly|broken pipe|connection (?:reset|closed)|has been shut down|MPI_ABORT"
    r"|preempted|interrupted|remote process exited",
    re.IGNORECASE,
)

_PEER_LOST = re.compile(
    r"has been shut ?down|connection (?:was )?(?:reset|closed|refused|aborted)|broken pipe"
    r"|closed by (?:the )?(?:peer|remote)|socket closed|remote process exited|EOFError"
    r"|HorovodInternalError|DistBackendError|DistNetworkError|gloo::\w*Exception"
    r"|ncclRemoteError|(?:peer|remote|other) (?:rank|worker|process|task).{0,40}"
    r"(?:gone|lost|exit|died|dead|fail|unavailable|preempt)",
    re.IGNORECASE,
)

_NEVER_STARTS = (
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ENOEXEC,
    errno.ELOOP, errno.ENAMETOOLONG, errno.E2BIG, errno.EINVAL,
)  # fmt: skip
_SHELL_CANNOT_START = (126, 127)


def may_start_later(number: int | None) -> bool:
    """Return whether a program that could not be started for that `errno` may start later."""
    return number not in _NEVER_STARTS


def is_final(cause: Cause, worked_before: bool) -> bool:
    """Return whether the trial would fail in the same way again.

    `worked_before`: an earlier segment of the trial has reported values, and this one none. Then
    what is missing was there before: its disk may be away for a while; and a script that trains in
    one process may go on with one.
    """
    if cause in (Cause.OTHER, Cause.NO_SPACE):
        return False
    passing = (Cause.MISSING_MODULE, Cause.CANNOT_START, Cause.TRAINS_APART)
    return not (worked_before and cause in passing)


def classify(exit_code: int, tail: Sequence[str]) -> Failure:
    """Return the failure of a script that has ended with that code and those last lines."""
    if exit_code <= 0 or exit_code > 128:
        return Failure(Cause.OTHER)
    lines = _own_lines(tail)
    if (shared := _of_shared_cache(lines)) is not None:
        return shared
    error = exception(lines)
    if error is not None:
        after = lines[error.place + 1 :]
        if _is_last(after):
            return _of_exception(error, lines) or Failure(Cause.OTHER)
        lines = after  # it was caught, and the script went on
    return (
        _of_interpreter(exit_code, lines)
        or _of_arguments(exit_code, lines)
        or _of_last_words(lines)
        or Failure(Cause.OTHER)
    )


def is_error_at_stop(exit_code: int, lines: Sequence[str]) -> bool:
    """Return whether a script that was told to stop has failed; `lines`: what it printed since.

    Signals, an exit without a traceback, and what a stop makes other processes of the script say
    (workers that were killed, pipes that broke, a launcher whose command has ended) are the stop
    itself.
    """
    if exit_code <= 0 or exit_code > 128:
        return False
    error = exception(_without_launcher([line.rstrip() for line in lines if line.strip()]))
    if error is None:
        return classify(exit_code, lines).cause is not Cause.OTHER
    is_stop = error.kind in _LAUNCHERS or _STOPPING_NAME.search(error.kind)
    return not (is_stop or _STOPPING.search(error.line))


def is_peer_loss(lines: Sequence[str]) -> bool:
    """Return whether a worker has failed because it has lost another; `lines`: its last ones."""
    last = [line.rstrip() for line in lines if line.strip()]
    error = exception(last)
    words = last[-_MOST_LAST_WORDS:] if error is None else [error.line, *last[error.place + 1 :]]
    return any(map(_PEER_LOST.search, words))


def exception(lines: Sequence[str]) -> RaisedException | None:
    """Return the exception that the last traceback in the lines ends with; None without one."""
    last, in_frame = None, False
    for place, raw in enumerate(lines):
        line = _RANK.sub("", raw)
        if _FRAME.match(line):
            in_frame = True
        elif in_frame and not line[:1].isspace() and not line.startswith("[Previous line"):
            in_frame = False
            if match := _EXCEPTION.match(line):
                last = RaisedException(match[1].rpartition(".")[2], line, place)
    return last


def lines_since(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return the lines of `after` that have come since `before`, both the ends of one output."""
    for kept in range(min(len(before), len(after)), 0, -1):
        if list(before[-kept:]) == list(after[:kept]):
            return list(after[kept:])
    return list(after)


_TRACKER, _WARN = "UserWarning: resource_tracker: ", "warnings.warn("


def without_tracker(lines: Sequence[str]) -> list[str]:
    """Leave out what Python's resource tracker says once the script has ended.

    It removes shared memory that the script has left, and is never why that has failed.
    """
    of_tracker = [_TRACKER in line for line in lines]
    pairs = zip(lines, of_tracker, [False, *of_tracker], strict=False)
    return [
        line
        for line, is_its, follows in pairs
        if not (is_its or (follows and line.lstrip().startswith(_WARN)))
    ]


def last_line(tail: Sequence[str]) -> str:
    """Return the line that says how a script has ended: that of its exception, else its last one.

    An exception's message may have further lines, of which the last is indented.
    """
    lines = [n for n in _own_lines(tail) if not _is_tracker(n)]
    if not lines:
        return "no output"
    error = exception(lines)
    after = lines[error.place + 1 :] if error is not None else []
    if error is None or (after and not after[-1][:1].isspace()):
        return lines[-1].strip()
    is_heading = after and not after[0][:1].isspace()  # pydantic's: a field, and what is wrong
    more = after[:2] if is_heading else after[: error.line.endswith(":")]
    return " ".join([error.line, *(line.strip() for line in more)])


def _own_lines(tail: Sequence[str]) -> list[str]:
    """Return the script's own last lines, without what its launcher and Python say of its end."""
    return _without_launcher([line.rstrip() for line in without_tracker(tail) if line.strip()])


def is_of_one_rank(line: str) -> bool:
    """Tell whether a line looks like one of torchrun's summary that is about a single rank.

    There are seven a rank: so many would take the place of what the script has raised before.
    """
    return _OF_ONE_RANK.match(line) is not None


def _without_launcher(lines: list[str]) -> list[str]:
    """Leave out what a launcher (torchrun, accelerate) says of a script that it has started."""
    error = exception(lines)
    if error is None or error.kind not in _LAUNCHERS:
        return lines
    starts = [n for n in range(error.place) if _TRACEBACK in lines[n]]
    script_lines = [n for n in lines[: starts[-1]] if not _is_launcher_log(n)] if starts else []
    return _without_torn_traceback(script_lines) or lines


def _without_torn_traceback(lines: list[str]) -> list[str]:
    """Leave out the traceback at the end of which a process was killed by its launcher."""
    starts = [n for n, line in enumerate(lines) if _TRACEBACK in line]
    is_torn = starts and all(_RANK.sub("", n)[:1].isspace() for n in lines[starts[-1] + 1 :])
    return lines[: starts[-1]] if is_torn else lines


def _is_launcher_log(line: str) -> bool:
    return bool(_LAUNCHER_LOG.search(line)) and not _FRAME.match(line)


def _is_tracker(line: str) -> bool:
    """Tell whether a line is a tracker's or Hydra's, who say something after the script's end."""
    return line.startswith("wandb:") or _HYDRA in line


def _is_last(after: Sequence[str]) -> bool:
    """Return whether a script ended by an exception after which it printed these lines.

    One that was caught and logged is followed by the script's work.
    """
    printed = [line for line in after if not _is_tracker(line)]
    return len(printed) <= _MOST_LAST_WORDS and not any(map(_VALUE.search, printed))


def _of_exception(error: RaisedException, lines: Sequence[str]) -> Failure | None:
    kind, line = error.kind, error.line
    if kind in _SYNTAX_ERRORS:
        frames = [frame for n in range(error.place) if (frame := _FRAME.match(lines[n]))]
        where = f" ({frames[-1][1]})" if frames and frames[-1][1] else ""
        return Failure(Cause.SYNTAX_ERROR, f"{line}{where}", "correct the script")
    if kind in _IMPORT_ERRORS and not _PASSING.search(line):
        return Failure(Cause.MISSING_MODULE, line, _INSTALL)
    if kind == "GroupError" and "would train apart" in line:
        return Failure(Cause.TRAINS_APART, line)  # the line has the remedy
    if _REFUSED.search(line):
        remedy = _NO_INPUT if kind == "EOFError" else _CORRECT
        return Failure(Cause.REFUSED_ARGUMENT, line, remedy)
    if kind in _ARITHMETIC and _OVERFLOW.search(line):
        return Failure(Cause.DIVERGED, line)
    return _of_last_words([line])


_INSTALL = "install it for the script's interpreter, or name one that has it in trial.python"


def _of_interpreter(exit_code: int, lines: Sequence[str]) -> Failure | None:
    """Return what the interpreter or the shell says of a script that it cannot run."""
    for line in reversed(lines):
        if _PASSING.search(line):
            continue
        if _NO_SCRIPT.search(line):
            return Failure(Cause.CANNOT_START, line, "correct trial.command or trial.directory")
        if _MISSING_MODULE.search(line):
            return Failure(Cause.MISSING_MODULE, line, _INSTALL)
        if exit_code == _REFUSES and _SHELL_SYNTAX.search(line):
            return Failure(Cause.SYNTAX_ERROR, line, "correct the script")
    if exit_code in _SHELL_CANNOT_START and not any(map(_PASSING.search, lines)):
        return Failure(Cause.CANNOT_START, lines[-1] if lines else "", "correct trial.command")
    return None


def _of_arguments(exit_code: int, lines: Sequence[str]) -> Failure | None:
    """Return what a parser of arguments says that refuses one."""
    refused = next((line for line in reversed(lines) if _REFUSED.search(line)), None)
    by_hydra = any(_HYDRA in line for line in lines) and not any(_HYDRA_JOB in n for n in lines)
    if refused is None and by_hydra:
        refused = next((line for line in lines if _HYDRA_REFUSED.match(line)), lines[0])
    if refused is None and exit_code == _REFUSES and any(map(_USAGE.search, lines)):
        errors = (line for line in reversed(lines) if re.search(r"(?i)\berror\b", line))
        refused = next(errors, lines[-1])
    if refused is None:
        return None
    return Failure(Cause.REFUSED_ARGUMENT, refused.strip(" │|"), _CORRECT)


_CORRECT = "correct trial.command, or the parameter that it gets"
_NO_INPUT = "a trial has no standard input: answer in trial.command, or with a pipe in front of it"


_CACHE = re.compile(
    r"cache lockfile already exists \('(?P<locked>.*)_\d+\.lockfile'\)"
    r"|TensorBundle at (?P<torn>.+) shard \d+ .*Checksum does not match"
)


def _of_shared_cache(lines: Sequence[str]) -> Failure | None:
    """Return the failure of a script whose `tf.data` cache another process has written too."""
    last = lines[-_MOST_LAST_WORDS:]
    match = next(filter(None, map(_CACHE.search, last)), None)
    if match is None or not any("IteratorGetNext" in line for line in last):
        return None
    words = f"another process writes the same tf.data cache, {match['locked'] or match['torn']}"
    return Failure(Cause.OTHER, words, _OWN_CACHE)


_OWN_CACHE = "cache into $HERMES_TRIAL_DIR, or write trial.directory: copy"


def _of_last_words(lines: Sequence[str]) -> Failure | None:
    """Return the failure of a script that has itself noticed a value that is not finite."""
    for words in [*lines[-1:], *(w for w in lines[-2:-1] if "=" not in w)]:
        if _NOT_FINITE.search(words) and _OF_TRAINING.search(words):
            return Failure(Cause.DIVERGED, words)
    return None


# -- an objective that was never reported ----------------------------------------------------------

_SAME = {
    "val": "val", "valid": "val", "validation": "val", "eval": "val", "dev": "val",
    "acc": "accuracy", "accuracy": "accuracy", "train": "train", "training": "train",
    "err": "error", "error": "error",
}  # fmt: skip
_GREATER_IS_BETTER = {"accuracy", "f1", "auc", "auroc", "precision", "recall", "map", "bleu", "r2",
                      "iou", "reward", "score", "dice", "psnr", "ssim"}  # fmt: skip
_MOST_NAMES = 8


def no_objective(objective: str, direction: str | None, reported: Iterable[str]) -> Failure:
    """Return the failure of a script that has ended well and never reported its objective."""
    names = sorted(set(reported) - {objective})
    lead = f"it ended without ever reporting {objective!r}"
    if not names:
        return Failure(
            Cause.NO_OBJECTIVE,
            lead,
            f"name the objective as the script reports it, print `{objective}=VALUE`, set "
            "trial.metric_pattern or call hermes_ops.trial.report()",
        )
    likely = max(names, key=lambda name: likeness(objective, name))
    shown = ", ".join([likely, *(n for n in names if n != likely)][:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    shown += f" and {more} more" if more > 0 else ""
    greater = bool(_GREATER_IS_BETTER & set(_words(likely))) and "loss" not in _words(likely)
    turned = " with direction: maximize" if greater and direction != "maximize" else ""
    meant = f"did you mean objective.metric: {likely}{turned}?"
    return Failure(Cause.NO_OBJECTIVE, f"{lead}; it reported {shown}", meant)


def likeness(objective: str, name: str) -> tuple[float, float]:
    """Return how like a name is to the objective's: by its words, then by its letters."""
    import difflib

    wanted, words = _words(objective), _words(name)
    shared = len(set(wanted) & set(words)) / max(1, len({*wanted, *words}))
    return shared, difflib.SequenceMatcher(None, objective.lower(), name.lower()).ratio()


def _words(name: str) -> list[str]:
    parts = re.findall(r"[A-Z]?[a-z]+\d*|[A-Z]+|\d+", name)
    return [_SAME.get(p.lower(), p.lower()) for p in parts]
