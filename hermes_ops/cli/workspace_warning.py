"""Whether the script's folder can be copied for each trial, where the sweep asks for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hermes_ops.config import RunIn, SweepConfig, SweepWarning
from hermes_ops.config.model import Workspace
from hermes_ops.trial.workspace import WorkspaceError, survey


def workspace_warnings(
    config: SweepConfig, environ: Mapping[str, str] | None
) -> tuple[SweepWarning, ...]:
    """Return the warning of a folder that holds too much; `environ` None: it is elsewhere."""
    trial, folder = config.trial, Path(config.trial.directory)
    is_here = environ is not None and trial.run_in is RunIn.PROCESS and folder.is_dir()
    if trial.workspace is not Workspace.COPY or not is_here:
        return ()
    home = os.environ.get("HERMES_HOME")
    try:
        survey(folder, [Path(home)] if home else [])
    except WorkspaceError as error:
        found, _, fix = str(error).partition(": ")
        return (SweepWarning(("trial", "workspace"), found, "no trial can start", fix),)
    return ()
