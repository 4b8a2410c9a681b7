"""The only way to a SweepConfig: data in, a valid config out, or a ConfigError with all problems.

Validation has two phases: pydantic's errors, then the conditions between keys on the valid model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from hermes_ops.config.conditions import violations
from hermes_ops.config.files import KeyPath, line_of
from hermes_ops.config.model import SweepConfig
from hermes_ops.config.overrides import read_with_overrides, source_name
from hermes_ops.config.pod import RunIn
from hermes_ops.config.problems import Violation, translate_errors, with_line
from hermes_ops.errors import ConfigError, Problem

MOST_PROBLEMS = 50


def load_file(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> SweepConfig:
    """Read a sweep from YAML or (.json) JSON; problems name the line where YAML has one.

    Each `KEY=VALUE` of `overrides` replaces what the file has, and counts as if it stood there.
    A relative `trial.directory` or `trial.python` with a slash is taken from the file's folder,
    unless the trials are pods: then both are of the image.
    """
    file = Path(os.path.expanduser(path))
    document = read_with_overrides(file, overrides)
    config, problems = _validate(document.data)
    problems = [*document.problems, *problems]
    if config is None or problems:
        source = source_name(file, overrides)
        raise _error(source, problems, document.lines, file.name)
    return _absolute(config, file.absolute().parent)


def parse(data: object, source: str, base: Path | None) -> SweepConfig:
    """Make a config of plain data, such as the configuration of a DAG run.

    `source` names the data in the error. Relative paths are taken from `base`; None leaves them.
    """
    config, problems = _validate(data)
    if config is None:
        raise _error(source, problems, {}, "")
    return config if base is None else _absolute(config, base)


def _validate(data: object) -> tuple[SweepConfig | None, list[Violation]]:
    """Return the config, or None and the problems: pydantic's, else those between keys."""
    try:
        config = SweepConfig.model_validate(data)
    except ValidationError as error:
        return None, translate_errors(error.errors(include_url=False), data)
    problems = list(violations(config))
    return (None if problems else config), problems


def _error(
    source: str, problems: list[Violation], lines: Mapping[KeyPath, int], name: str
) -> ConfigError:
    ordered = sorted(problems, key=lambda entry: line_of(lines, entry[0]) or 0)
    shown = [with_line(path, problem, lines, name) for path, problem in ordered[:MOST_PROBLEMS]]
    if len(ordered) > MOST_PROBLEMS:
        rest = f"{len(ordered) - MOST_PROBLEMS} more problems"
        shown.append(Problem("and elsewhere", rest, "none", "correct these first"))
    return ConfigError(source, tuple(shown))


def _absolute(config: SweepConfig, base: Path) -> SweepConfig:
    trial = config.trial
    if trial.run_in is RunIn.POD:
        return config
    python = trial.python
    if python is not None and "/" in python:
        python = _from(base, python)
    changes = {"directory": _from(base, trial.directory), "python": python}
    return config.model_copy(update={"trial": trial.model_copy(update=changes)})


def _from(base: Path, path: str) -> str:
    # Not resolve(): a virtual environment's interpreter is a link that must stay one.
    return os.path.normpath(base.absolute() / os.path.expanduser(path))
