"""The command line of `hermes-trial`."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hermes_ops.trial.gang.layout import STORE_PORT, Gang
from hermes_ops.trial.workspace import COPY, SHARED

MOST_WORKERS = 256
_OTHERS_VARIABLE = "HERMES_OTHER_METRICS"  # those beside the objective, from the sweep file


class SegmentOptions(NamedTuple):
    """One segment of one trial: where it lives, what it may use, what it runs.

    `others`: the metrics that the sweep names besides the objective, each with its own pattern, if
    any. `finish_s`: how long the script may take after its last epoch.
    `advise_s`: when the user is told that nothing that it prints is read. `node`: checkpoints are
    on a volume of this node's own. `on_word`: touch nothing before a byte has come on standard
    input. `workers`: processes of the command; above 1 they get ranks. `tf_config`: and TF_CONFIG.
    `start_timeout_s`: from the first worker that trains until all of them do. `gang`: the nodes of
    the workers where there are several; they wait `gang_timeout_s` for each other. `torchrun`: one
    worker alone has torchrun's variables too.
    """

    folder: Path
    epoch: int
    command: tuple[str, ...]
    gpus: tuple[str, ...] = ()
    gpu_locks: Path | None = None
    time_limit_s: float | None = None
    max_epochs: int | None = None
    objective: str | None = None
    direction: str | None = None
    metric_pattern: str | None = None
    others: tuple[tuple[str, str | None], ...] = ()
    grace_s: float = 30.0
    finish_s: float = 300.0
    advise_s: float = 60.0
    python: str | None = None
    standby: Path | None = None
    directory: str | None = None
    workspace: str = SHARED
    copied_from: str | None = None  # the folder of which `directory` is the trial's own copy
    lock_wait_s: float = 5.0
    node: str | None = None
    on_word: bool = False
    workers: int = 1
    tf_config: bool = False
    start_timeout_s: float = 600.0
    gang: Gang | None = None
    gang_timeout_s: float = 600.0
    torchrun: bool = False

    @property
    def secondary(self) -> frozenset[str]:
        """Metrics whose steps say nothing of how far the trial has trained."""
        return frozenset(name for name, _ in self.others)


def parse(arguments: Sequence[str] | None = None) -> SegmentOptions:
    """Read the command line; a mistake ends the process with code 2 and one clear line."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    command = tuple(parsed.command[1:] if parsed.command[:1] == ["--"] else parsed.command)
    if not command:
        parser.error(
            "no command: put it after --, as in `hermes-trial --dir D --epoch 1 -- python t.py`"
        )
    if parsed.gpus and parsed.gpu_locks is None:
        parser.error("--gpus needs --gpu-locks, the folder of the lock files")
    if not 1 <= parsed.workers <= MOST_WORKERS:
        parser.error(f"--workers is a whole number from 1 to {MOST_WORKERS}, not {parsed.workers}")
    gang = _parse_gang(parser, parsed)
    _check_pattern(parser, "--metric-pattern", parsed.metric_pattern)
    others = json.loads(os.environ.get(_OTHERS_VARIABLE) or "{}")
    for name, pattern in others.items():
        _check_pattern(parser, f"the pattern of {name}", pattern)
    return SegmentOptions(
        folder=Path(parsed.dir).resolve(),
        epoch=parsed.epoch,
        command=command,
        gpus=tuple(g for g in parsed.gpus.split(",") if g),
        gpu_locks=parsed.gpu_locks,
        time_limit_s=parsed.time_limit,
        max_epochs=parsed.max_epochs,
        objective=parsed.objective,
        direction=parsed.direction,
        metric_pattern=parsed.metric_pattern,
        others=tuple(others.items()),
        grace_s=parsed.grace,
        finish_s=parsed.finish_seconds,
        advise_s=parsed.advise_after,
        python=parsed.python,
        standby=parsed.standby,
        directory=parsed.directory,
        workspace=parsed.workspace,
        lock_wait_s=parsed.lock_wait,
        node=parsed.checkpoints_on,
        on_word=parsed.on_word,
        workers=parsed.workers,
        tf_config=parsed.tf_config,
        start_timeout_s=parsed.start_timeout,
        gang=gang,
        gang_timeout_s=parsed.gang_timeout,
        torchrun=parsed.torchrun,
    )


def _parse_gang(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> Gang | None:
    if parsed.gang is None:
        return None
    try:
        gang = Gang.parse(parsed.gang, parsed.gang_node, parsed.gang_port)
    except ValueError as error:
        parser.error(f"--gang: {error}")
    if gang.size != parsed.workers:
        parser.error(f"--gang has {gang.size} workers, and --workers is {parsed.workers}")
    return gang


def _check_pattern(parser: argparse.ArgumentParser, what: str, pattern: str | None) -> None:
    if pattern is None:
        return
    try:
        groups = re.compile(pattern).groupindex
    except (re.error, OverflowError, RecursionError) as error:
        parser.error(f"{what} is not a regular expression: {error}")
    if "value" not in groups:
        parser.error(f"{what} needs a group (?P<value>...), and may have name and step")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hermes-trial",
        description="Run one segment of a trial: report its metrics, checkpoint it on SIGTERM.",
        epilog="Exit codes: 0 finished, 75 preempted, 70 a lock or lease is not ours, else failed.",
    )
    parser.add_argument("--dir", required=True, metavar="TRIALDIR", help="the trial's folder")
    parser.add_argument("--epoch", required=True, type=int, help="the lease's epoch")
    parser.add_argument("--gpus", default="", help="GPU indices, as in 0,1")
    parser.add_argument("--gpu-locks", type=Path, metavar="DIR", help="folder of GPU lock files")
    parser.add_argument("--time-limit", type=float, metavar="S", help="over all segments")
    parser.add_argument("--max-epochs", type=int, metavar="N", help="end after this many epochs")
    parser.add_argument("--objective", metavar="NAME", help="the metric that must be reported")
    parser.add_argument("--direction", choices=["minimize", "maximize"], help="of the objective")
    parser.add_argument("--metric-pattern", metavar="REGEX", help="groups name, value, step")
    parser.add_argument("--grace", type=float, default=30.0, metavar="S", help="SIGTERM to SIGKILL")
    parser.add_argument(
        "--finish-seconds", type=float, default=300.0, metavar="S", help="after its last epoch"
    )
    parser.add_argument("--advise-after", type=float, default=60.0, help=argparse.SUPPRESS)
    parser.add_argument("--python", metavar="INTERPRETER", help="replaces a leading `python`")
    parser.add_argument("--standby", type=Path, metavar="SOCKET", help="of the standby server")
    parser.add_argument("--directory", metavar="DIR", help="the script's working directory")
    parser.add_argument(
        "--workspace", choices=[SHARED, COPY], default=SHARED, help="run in it, or in a copy of it"
    )
    parser.add_argument("--checkpoints-on", metavar="NODE", help="they are on its own volume")
    parser.add_argument("--workers", type=int, default=1, metavar="K", help="processes, with ranks")
    parser.add_argument("--torchrun", action="store_true", help="its variables for 1 worker too")
    parser.add_argument("--tf-config", action="store_true", help="set TF_CONFIG for each worker")
    parser.add_argument(
        "--start-timeout", type=float, default=600.0, metavar="S", help="until all workers train"
    )
    parser.add_argument("--gang", metavar="HOST=K,...", help="the workers of each of its nodes")
    parser.add_argument("--gang-node", type=int, default=0, metavar="N", help="which one this is")
    parser.add_argument(
        "--gang-timeout", type=float, default=600.0, metavar="S", help="until all nodes are there"
    )
    parser.add_argument("--gang-port", type=int, default=STORE_PORT, help=argparse.SUPPRESS)
    parser.add_argument("--on-word", action="store_true", help="wait for a byte on stdin first")
    parser.add_argument("--lock-wait", type=float, default=5.0, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the training command")
    return parser
