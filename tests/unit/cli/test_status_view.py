"""What `hermes status` prints, at every width."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from hermes_ops.cli.stack_commands import _print_status
from hermes_ops.stack.lifecycle import StackStatus
from hermes_ops.stack.record import StackRecord
from hermes_ops.stack.supervisor_client import ProgramState

NAMES = ("mlflow", "api-server", "dag-processor", "controller")


@pytest.mark.parametrize("width", [30, 40, 80])
def test_names_process_ids_and_addresses_are_whole_at_every_width(
    width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"guard_k": 7, "guard_quanta": 3, "guard_open": 2, "mode": "[/queue]"}
    record = StackRecord(
        home="/state",
        airflow_url="http://127.0.0.1:28080",
        mlflow_url="http://127.0.0.1:25000",
        pool="gpus",
        slots=2,
        policy="frontrunner",
        policy_options=options,
        mlflow_auth=False,
        standby=0,
        started_s=1.0,
        metrics_url="http://127.0.0.1:23456/metrics",
    )
    programs = tuple(ProgramState(n, "RUNNING", 1_234_567, 7_500.0, 1.0) for n in NAMES)
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None)
    _print_status(console, StackStatus(record, programs), {"gpus": [], "time_s": 0.5})
    table, lines = out.getvalue(), capsys.readouterr().out.splitlines()
    assert all(name in table.split() for name in NAMES)
    assert table.count("1234567") == len(NAMES)
    assert table.count("2 h 05 min") == len(NAMES)
    assert max(map(len, table.splitlines())) <= width
    assert "Metrics  http://127.0.0.1:23456/metrics" in lines
    of_policy = "frontrunner guard_k=7 guard_quanta=3 guard_open=2 mode=[/queue]"
    assert lines[-1] == f"Pool     gpus: 2 slots, policy {of_policy}"
    view = {"gpus": [0, 1, 2], "time_s": 2.0}
    _print_status(console, StackStatus(record, programs), view)
    changed = "Pool     gpus: 2 slots at its start, 3 for trials now, policy"
    assert capsys.readouterr().out.splitlines()[-1] == f"{changed} {of_policy}"
