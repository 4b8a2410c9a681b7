"""Sweep files from what other tools have: a Katib experiment, a W&B sweep, an Optuna study.

Each converter turns plain data into a `Draft`: a sweep file and a note for everything that has no
counterpart or had to be guessed. Nothing of the source is run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from hermes_ops.config.files import read_document
from hermes_ops.errors import ConfigError
from hermes_ops.sweep_import import katib, optuna_study, wandb_sweep
from hermes_ops.sweep_import.draft import Draft, DraftOptions, Note, refusal

__all__ = ["Draft", "DraftOptions", "Note", "SourceFormat", "import_sweep"]

_SQLITE = b"SQLite format 3\x00"


class SourceFormat(StrEnum):
    """The formats that can be imported."""

    KATIB = "katib"
    WANDB = "wandb"
    OPTUNA = "optuna"


def import_sweep(source: str, options: DraftOptions, form: SourceFormat | None = None) -> Draft:
    """Convert a source to a valid sweep file; ConfigError with the reason where that fails.

    `source` is the file of a Katib experiment or of a W&B sweep (YAML or JSON), the file of an
    Optuna study (SQLite or a journal), or the URL of its database. Without `form` the format is
    recognised by the content.
    """
    if (form or _optuna_or_none(source)) is SourceFormat.OPTUNA:
        draft = optuna_study.convert(source, options)
    else:
        path = Path(os.path.expanduser(source))
        document = read_document(path)
        if document.problems:
            raise ConfigError(str(path), tuple(problem for _, problem in document.problems))
        converters = {SourceFormat.KATIB: katib.convert, SourceFormat.WANDB: wandb_sweep.convert}
        recognised = form or _recognised(document.data, str(path))
        draft = converters[recognised](_mapping(document.data, str(path)), str(path), options)
    draft.check()
    return draft


def _optuna_or_none(source: str) -> SourceFormat | None:
    """Recognise the storage of a study: a database URL, a SQLite file, a journal file."""
    if re.match(r"[a-z][a-z0-9+]*://", source):
        return SourceFormat.OPTUNA
    path = Path(os.path.expanduser(source))
    try:
        if not path.is_file():
            return None
        with path.open("rb") as stream:
            head = stream.read(64)
    except OSError:  # read_document says what is wrong with it
        return None
    is_study = head.startswith(_SQLITE) or re.match(rb'\{"op_code": ?\d+', head) is not None
    return SourceFormat.OPTUNA if is_study else None


def _mapping(data: object, source: str) -> Mapping[str, object]:
    if not isinstance(data, Mapping):
        raise refusal(source, "(top level)", "no mapping", "keys with values", "check the file")
    return data


def _recognised(data: object, source: str) -> SourceFormat:
    keys = _mapping(data, source)
    if keys.get("kind") == "Experiment" and "spec" in keys:
        return SourceFormat.KATIB
    if "method" in keys and "parameters" in keys:
        return SourceFormat.WANDB
    if "search" in keys and "trial" in keys:
        raise refusal(
            source,
            "(top level)",
            "a sweep file of Hermes",
            "a Katib experiment, a W&B sweep or an Optuna study",
            "run it as it is: `hermes sweep run FILE`",
        )
    raise refusal(
        source,
        "(top level)",
        "neither `kind: Experiment` with `spec` (Katib) nor `method` with `parameters` (W&B)",
        "a Katib experiment, a W&B sweep file, or the storage of an Optuna study",
        "name the right file, or the format with --from",
    )
