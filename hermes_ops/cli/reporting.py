"""A sweep's report, written and opened from the command line."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hermes_ops.errors import HermesError

if TYPE_CHECKING:
    from hermes_ops.cli.connection import Connection
    from hermes_ops.cli.locating import Place


def write(connection: Connection, place: Place, folder: Path) -> tuple[Path, ...]:
    """Write the report of a sweep from what MLflow holds now; return its files."""
    from hermes_ops import report
    from hermes_ops.cli.outcome import collected, configured
    from hermes_ops.simulator.reported import background

    found = collected(connection, place)
    told = background(connection.tracker, configured(connection, place), found)
    return report.write(folder, found.summary, found.curves, found.segments, told)


def open_in_browser(files: Sequence[Path]) -> None:
    """Open the report's page; HermesError when there is no page or no browser."""
    from hermes_ops.report import PAGE

    page = next((file for file in files if file.name == PAGE), None)
    if page is None:
        raise HermesError(f"{PAGE} could not be made; the warning above says why.")
    if not webbrowser.open(page.absolute().as_uri()):
        raise HermesError(f"there is no browser here: open {page.absolute()} in one.")
