"""Addresses of pages in MLflow, for people: without the password that a server's own may hold."""

from __future__ import annotations

from urllib.parse import urlsplit


def run_address(uri: str, experiment_id: str, run_id: str) -> str:
    """The page of a run on the tracking server `uri`."""
    parts = urlsplit(uri)
    shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
    return f"{shown}/#/experiments/{experiment_id}/runs/{run_id}"


def report_address(uri: str, experiment_id: str, run_id: str) -> str:
    """The report of the sweep whose run that is, among the run's artifacts."""
    return f"{run_address(uri, experiment_id, run_id)}/artifacts/report/report.html"
