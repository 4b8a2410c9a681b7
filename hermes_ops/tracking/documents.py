"""Documents that MLflow keeps as artifacts: whoever may write there may have replaced them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hermes_ops.config.files import LARGEST_FILE_BYTES, read_yaml
from hermes_ops.errors import ConfigError, Problem

if TYPE_CHECKING:
    from hermes_ops.tracking.artifacts import Artifacts

SWEEP_FILE = "sweep.yaml"
MOST_SWEEP_FILE_BYTES = 4 * LARGEST_FILE_BYTES  # written with all defaults


def fetch_sweep_file(artifacts: Artifacts, parent_run_id: str, sweep: str) -> object:
    """Return the sweep file of a sweep's run as plain data, which is not validated.

    Raise Refused where there is none, ConfigError for a text that is no sweep file's, Unavailable.
    """
    source = f"{SWEEP_FILE} of {sweep}"
    content = artifacts.fetch(parent_run_id, SWEEP_FILE)
    if len(content) > MOST_SWEEP_FILE_BYTES:
        raise _not_ours(source, f"{len(content):,} bytes")
    try:
        return read_yaml(content.decode(), source).data
    except UnicodeDecodeError as error:
        raise _not_ours(source, f"no UTF-8 at byte {error.start}") from error


def _not_ours(source: str, found: str) -> ConfigError:
    allowed = f"UTF-8 of at most {MOST_SWEEP_FILE_BYTES:,} bytes"
    fix = "restore the artifact, or delete the sweep's run in MLflow"
    return ConfigError(source, (Problem(SWEEP_FILE, found, allowed, fix),))


def json_objects(content: bytes) -> list[dict[str, Any]]:
    """Return the JSON objects of a document with one a line; skip what is none."""
    found = []
    for line in content.splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found
