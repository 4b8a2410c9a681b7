"""A trial's command and environment: literal replacement of values, no shell, no evaluation."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from hermes_ops.config.model import SweepConfig
from hermes_ops.config.pod import RunIn
from hermes_ops.config.workers import LearningRateScale, ResizePoint
from hermes_ops.references import VARIABLE, refers
from hermes_ops.search.space import Value, text

MOST_ARGUMENT_BYTES = 131_071
"""Linux takes no longer argument or variable (MAX_ARG_STRLEN)."""

MOST_BYTES, PER_TEXT_BYTES = 1_900_000, 9
"""The most bytes of all arguments and variables, each with its end and its address. Linux takes
2 MiB; the rest is for Hermes' own variables and those that the script inherits."""

INTERPRETERS = ("python", "python3")
_TOKEN = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]|[^{}]+")
_OPTION = re.compile(r"--?[^-=\s{}][^=\s{}]*")
_OPTION_VALUE = re.compile(r"--?[^-=\s{}][^=\s{}]*=")
_KEY_VALUE = re.compile(r"[^-=\s{}][^=\s{}]*=")
_PLACEHOLDER = re.compile(r"\{[^{}]*\}")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an argument: plain text, the name of a parameter, or a brace without its mate."""

    text: str = ""
    name: str | None = None
    stray: bool = False


def pieces(argument: str) -> Iterator[Piece]:
    """Split an argument: `{name}` is a parameter, `{{` and `}}` are braces."""
    for token in _TOKEN.finditer(argument):
        word = token.group()
        if token.group(1) is not None:
            yield Piece(name=token.group(1))
        elif word in ("{{", "}}"):
            yield Piece(text=word[0])
        else:
            yield Piece(text=word, stray=word in ("{", "}"))


def render_command(config: SweepConfig, params: Mapping[str, Value]) -> list[str]:
    """Return the trial's argument list.

    A leading `python` or `python3` becomes `trial.python`, or the interpreter that runs this; for
    pods it stays, as the image has its own.
    Floats are written so that they round-trip, booleans as true and false, null as empty text.
    Arguments that name a parameter which the configuration does not have are left out.
    """
    given = config.trial.command
    gone = {
        place
        for index, argument in enumerate(given)
        if any(p.name is not None and p.name not in params for p in pieces(argument))
        for place in left_out(given, index)
    }
    command = [_render(a, params) for index, a in enumerate(given) if index not in gone]
    if given[0] in INTERPRETERS:
        default = given[0] if config.trial.run_in is RunIn.POD else sys.executable
        command[0] = config.trial.python or default
    return command


def left_out(command: Sequence[str], index: int) -> range:
    """Return the indices to leave out if the argument names a parameter that a configuration lacks.

    `--option={name}` goes alone, `{name}` with the option before it, and `key={name}` alone unless
    an option stands before it, whose value it might be. The range is empty for any other argument:
    the rest of the command would be ambiguous.
    """
    argument = command[index]
    after_option = index > 1 and _OPTION.fullmatch(command[index - 1]) is not None
    if index > 0 and _OPTION_VALUE.match(argument):
        return range(index, index + 1)
    if after_option and _PLACEHOLDER.fullmatch(argument):
        return range(index - 1, index + 1)
    if index > 0 and not after_option and _KEY_VALUE.match(argument):
        return range(index, index + 1)
    return range(0)


def _render(argument: str, params: Mapping[str, Value]) -> str:
    return "".join(p.text if p.name is None else text(params[p.name]) for p in pieces(argument))


def render_environment(config: SweepConfig, params: Mapping[str, Value]) -> dict[str, str]:
    """Return the sweep's own variables unchanged, and HERMES_PARAM_<NAME> for each parameter.

    Those with references to other variables stand in HERMES_REFERENCES, which `hermes_ops.trial`
    replaces. For it, too: HERMES_TENSORBOARD_DIR, HERMES_SECRETS, HERMES_KEEP_CHECKPOINTS,
    HERMES_CHECKPOINT_STORE, HERMES_OTHER_METRICS (a pattern or null for each name),
    HERMES_SCALE_LEARNING_RATE and HERMES_RESIZE, where the sweep has them.
    """
    values = {variable(name): text(value) for name, value in params.items()}
    trial = config.trial
    referring = {k: v for k, v in trial.environment.items() if refers(v)}
    plain = {k: v for k, v in trial.environment.items() if k not in referring}
    others = {metric.name: metric.pattern for metric in config.metrics}
    ours = {
        "HERMES_TENSORBOARD_DIR": trial.tensorboard or "",
        "HERMES_SECRETS": ",".join(trial.secrets),
        "HERMES_KEEP_CHECKPOINTS": str(config.checkpoints.keep_last or ""),
        "HERMES_CHECKPOINT_STORE": config.checkpoints.store or "",
        "HERMES_OTHER_METRICS": json.dumps(others) if others else "",
        "HERMES_SCALE_LEARNING_RATE": _unless(trial.scale_learning_rate, LearningRateScale.SCRIPT),
        "HERMES_RESIZE": _unless(trial.resize, ResizePoint.BATCH),
        VARIABLE: json.dumps(referring) if referring else "",
    }
    return {**plain, **values, **{k: v for k, v in ours.items() if v}}


def _unless(value: StrEnum, default: StrEnum) -> str:
    return "" if value is default else value.value


def with_batch(
    config: SweepConfig, params: Mapping[str, Value], batch: int | None, gpus: int
) -> tuple[dict[str, Value], int | None]:
    """Return the parameters for a start on that many GPUs, and the samples of a step there.

    `batch`: the samples of a step that a policy has chosen; None: the parameter's own value holds.
    Without `trial.batch` the parameters are as they were, and the samples are not known (None).
    """
    spec = config.trial.batch
    if spec is None:
        return dict(params), None
    processes = config.trial.processes(gpus)
    if batch is None:
        return dict(params), own_batch(params.get(spec.parameter), processes)
    samples = spec.of_process(batch, gpus, processes)
    return {**params, spec.parameter: samples}, samples * processes


def own_batch(value: object, processes: int) -> int | None:
    """Return the samples of a step for a parameter's value; None: it is no number of samples."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        return None
    return value * processes


def why_not_started(command: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return why Linux would not start this command with these variables; None if it would."""
    for place, argument in enumerate(command):
        if (size := _bytes(argument)) > MOST_ARGUMENT_BYTES:
            return (
                f"argument {place} of its command has {size:,} bytes, and Linux takes at most "
                f"{MOST_ARGUMENT_BYTES:,}: let the script read HERMES_PARAM_<NAME> for each "
                "parameter, or a file"
            )
    for name, value in environment.items():
        if (size := _bytes(name) + 1 + _bytes(value)) > MOST_ARGUMENT_BYTES:
            return (
                f"the environment variable {name} has {size:,} bytes, and Linux takes at most "
                f"{MOST_ARGUMENT_BYTES:,}: let the script read a file"
            )
    texts = [*command, *(f"{name}={value}" for name, value in environment.items())]
    if (size := sum(_bytes(text) + PER_TEXT_BYTES for text in texts)) > MOST_BYTES:
        return (
            f"its command and its variables have {size:,} bytes together, and Linux takes at most "
            f"{MOST_BYTES:,}: let the script read long texts from a file"
        )
    return None


def _bytes(text: str) -> int:
    return len(text.encode(errors="surrogateescape"))


def variable(name: str) -> str:
    """Return the environment variable of a parameter: upper case, all but A-Z and 0-9 as `_`."""
    return "HERMES_PARAM_" + re.sub(r"[^A-Z0-9]", "_", name.upper())
