"""Addresses of pages in MLflow, for people: without the password that a server's own may hold."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from hermes_ops.tracking import SweepRef


def run_address(uri: str, experiment_id: str, run_id: str) -> str:
    """The page of a run on the tracking server `uri`."""
    return f"{_server(uri)}/#/experiments/{experiment_id}/runs/{run_id}"


def report_address(uri: str, experiment_id: str, run_id: str) -> str:
    """The report of the sweep whose run that is, among the run's artifacts."""
    return f"{run_address(uri, experiment_id, run_id)}/artifacts/report/report.html"


def comparison_address(uri: str, sweep: SweepRef) -> str:
    """The page of the tracking server `uri` that compares the trials of a sweep."""
    from hermes_ops.tracking.comparison import comparison_path

    return f"{_server(uri)}{comparison_path(sweep)}"


def _server(uri: str) -> str:
    """The address of a server without its password."""
    parts = urlsplit(uri)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
