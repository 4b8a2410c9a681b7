from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops import cli
from hermes_ops.airflow.records import SweepRecord, encode
from tests.unit.simulator.recorded_sweeps import Mlflow, config


class Airflow:
    """Knows one planned sweep."""

    def dag_run(self, dag: str, sweep: str) -> dict[str, Any] | None:
        return {"state": "success"} if sweep == "digits-1" else None

    def get_state(self, task: object, key: str) -> object:
        facts = json.loads(config().to_json())
        return encode(SweepRecord(facts, 2, "trial", "parent", "1", "digits"))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The addresses that the browser is given; the current folder is an empty one."""
    found: list[str] = []

    def browse(address: str) -> bool:
        found.append(address)
        return True

    connection = SimpleNamespace(airflow=Airflow(), tracker=Mlflow())
    monkeypatch.setattr("hermes_ops.cli.connection.Connection.from_home", lambda home: connection)
    monkeypatch.setattr("webbrowser.open", browse)
    monkeypatch.chdir(tmp_path)
    return found


def hermes(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and error output of `hermes sweep report ARGUMENTS`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["hermes", "sweep", "report", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    code: Any = ended.value.code
    return (code or 0, *capsys.readouterr())


def test_the_report_names_its_files_and_opens_nothing_unasked(
    opened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = hermes(capsys, "digits-1", "--out", "here")
    assert code == 0
    assert "here/report.html" in out.splitlines()
    assert "Replayed under asha" in Path("here/report.html").read_text()
    assert opened == []


def test_the_page_is_opened_when_asked(
    opened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, _ = hermes(capsys, "digits-1", "--open")
    assert code == 0
    assert opened == [(Path.cwd() / "report" / "report.html").as_uri()]


def test_without_a_browser_the_page_is_named(
    opened: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webbrowser.open", lambda _: False)
    code, _, error = hermes(capsys, "digits-1", "--open")
    assert code == 1
    assert "there is no browser here: open" in error
    assert Path("report/report.html").exists()


def test_a_page_that_could_not_be_made_is_an_error_of_opening_it(
    opened: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise OSError("no template")

    monkeypatch.setattr("hermes_ops.report.page.page", fail)
    code, out, error = hermes(capsys, "digits-1", "--open")
    assert code == 1
    assert "summary.json" in out
    assert "report.html could not be made" in error
