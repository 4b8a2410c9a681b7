from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops import cli
from hermes_ops.airflow.control.quota_settings import QuotaSettings
from hermes_ops.config.pool_quota import parse_quota
from hermes_ops.core.summary import Segment

NOON_S = 1_793_534_400.0  # 2026-11-01 12:00 UTC


def run_of(sweep: str, state: str = "finished", ended_s: float | None = NOON_S) -> Any:
    ended_ms = None if ended_s is None else int(ended_s * 1000)
    started_ms = int((NOON_S - 100.0) * 1000)
    times = {"started_ms": started_ms, "ended_ms": ended_ms}
    tags = {"hermes.pool": f"pool of {sweep}"}  # where each has the GPUs 0 and 1
    return SimpleNamespace(ref=sweep, state=state, tags=tags, **times)


class Mlflow:
    """The sweeps of three people: one triggered, one scheduled, one whose run is gone."""

    def newest_sweeps(self, most: int) -> dict[str, Any]:
        old = run_of("old", ended_s=NOON_S - 10 * 86_400.0)
        return {name: run_of(name) for name in ("ann-1", "nightly_x:run", "gone")} | {"old": old}

    def every_run(self, ref: str) -> tuple[Any, tuple[Any, ...]]:
        assert ref != "old"
        first = Segment(
            0, 1, (0, 1), NOON_S - 90.0, NOON_S - 60.0, outcome="preempted", startup_s=5
        )
        second = Segment(0, 2, (0,), NOON_S - 40.0, NOON_S - 30.0, outcome="finished")
        run = {"number": 0, "state": "running", "tags": {}, "started_ms": 0, "ended_ms": None}
        return run_of(ref), (SimpleNamespace(segments=(first, second), **run),)


class Airflow:
    """The runs of the sweeps that Airflow still has."""

    def all_dag_runs(self, dags: list[str]) -> Iterator[dict[str, Any]]:
        assert "nightly_x" in dags
        triggered = {"triggering_user_name": "ann"}
        yield {"dag_id": "hermes_sweep", "dag_run_id": "ann-1", **triggered}
        yield {"dag_id": "nightly_x", "dag_run_id": "run", "triggering_user_name": None}

    def get_state(self, task: Any, key: str) -> None:
        return None

    def dag(self, dag_id: str) -> dict[str, Any]:
        return {"owners": ["eve", "bob"]}


@pytest.fixture(autouse=True)
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    reached = SimpleNamespace(airflow=Airflow(), tracker=Mlflow(), pool="gpus")
    monkeypatch.setattr("hermes_ops.cli.connection.Connection.from_home", lambda home: reached)
    data = {"teams": [{"name": "vision", "users": ["ann"]}]}
    QuotaSettings(parse_quota(data, "test")).write(QuotaSettings.file("gpus"))


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["hermes", "usage", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert ended.value.code == code
    out, err = capsys.readouterr()
    return out if code == 0 else err


ROW = {
    "trials": 1,
    "gpu_seconds": 70.0,
    "trained_gpu_seconds": 60.0,
    "lost_gpu_seconds": 10.0,
    "waiting_seconds": 30.0,
    "preemptions": 1,
    "preemptions_caused": 0,
    "borrowed_gpu_seconds": 70.0,
    "lent_gpu_seconds": None,
}


def test_the_use_of_each_owner_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(said(capsys, "--since", "2026-10-31", "--json"))
    assert [row.pop("key") for row in document["usage"]] == ["", "ann", "bob"]
    assert document["usage"] == [ROW, ROW, ROW]


def test_a_sweep_that_runs_again_counts_though_it_had_ended_before_the_date(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    again = {"nightly_x:run": run_of("nightly_x:run", "running", NOON_S - 10 * 86_400.0)}
    monkeypatch.setattr(Mlflow, "newest_sweeps", lambda self, most: again)
    document = json.loads(said(capsys, "--since", "2026-10-31", "--by", "sweep", "--json"))
    assert [row["key"] for row in document["usage"]] == ["nightly_x:run"]


def test_a_rate_gives_each_row_a_price(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(said(capsys, "--since", "2026-10-31", "--rate", "3600", "--json"))
    assert [row["price"] for row in document["usage"]] == pytest.approx([70.0] * 3)
    data = {"teams": [{"name": "vision", "guaranteed": 1, "users": ["ann"]}], "rate": 36.0}
    QuotaSettings(parse_quota(data, "test")).write(QuotaSettings.file("gpus"))
    table = said(capsys, "--since", "2026-10-31", "--by", "team", "--csv").splitlines()
    assert table[0].endswith(",preemptions,preemptions_caused,price")
    assert float(table[2].rpartition(",")[2]) == pytest.approx(0.7)
    assert "0.70" in said(capsys, "--since", "2026-10-31", "--by", "team")


@pytest.mark.parametrize(
    ("by", "keys"),
    [
        ("team", ["", "vision"]),
        ("sweep", ["ann-1", "gone", "nightly_x:run"]),
        ("day", ["2026-11-01"]),
    ],
)
def test_it_is_counted_by_other_groups_too(
    capsys: pytest.CaptureFixture[str], by: str, keys: list[str]
) -> None:
    table = said(capsys, "--since", "2026-10-31", "--by", by, "--csv").splitlines()
    assert table[0].startswith(f"{by},trials,gpu_seconds,trained_gpu_seconds,lost_gpu_seconds")
    assert [line.partition(",")[0] for line in table[1:]] == keys


def test_it_is_said_that_teams_of_dags_are_counted_by_the_page_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said(capsys, "--since", "2026-10-31", "--by", "team", "--json")
    data = {"teams": [{"name": "vision", "airflow_team": "vision-dags"}, {"name": "speech"}]}
    QuotaSettings(parse_quota(data, "test")).write(QuotaSettings.file("gpus"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["hermes", "usage", "--since", "2026-10-31", "--json"])
        with pytest.raises(SystemExit):
            cli.main()
    out, err = capsys.readouterr()
    assert json.loads(out)
    assert "counts the sweeps of vision by their DAGs" in err


def test_it_is_said_where_the_quota_of_the_pool_cannot_be_known(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def notes() -> str:
        monkeypatch.setattr(sys, "argv", ["hermes", "usage", "--since", "2026-11-01"])
        with pytest.raises(SystemExit):
            cli.main()
        return capsys.readouterr().err

    assert notes() == ""
    QuotaSettings.file("gpus").unlink()
    assert "its quota is not known here" in notes()
    (tmp_path / "pool-gpus.json").write_text("{}")
    assert notes() == ""


def test_a_table_names_who_is_not_known_and_says_when_there_is_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = said(capsys, "--since", "2026-10-31")
    assert "unknown" in table
    assert "ann" in table
    assert "No trial held GPUs" in said(capsys, "--since", "2026-11-01T12:00:00")


def test_a_time_with_an_offset_is_not_taken_for_one_in_utc(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "ann" in said(capsys, "--since", "2026-11-01T13:59:00+02:00")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--since", "yesterday"), "write a date as 2026-11-01"),
        (("--since", "2026-11-01", "--by", "colour"), "user, team, sweep, day"),
        (("--since", "2026-11-01", "--json", "--csv"), "not both"),
        (("--since", "2026-11-01", "--rate", "inf"), "such as 2.5"),
    ],
)
def test_a_wrong_option_is_named(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert words in " ".join(said(capsys, *arguments, code=2).replace("│", " ").split())
