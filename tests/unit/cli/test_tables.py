from __future__ import annotations

import io
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from hermes_ops.airflow.identity import MAIN_DAG
from hermes_ops.cli.inspection_commands import print_list, with_states
from hermes_ops.cli.live_view import live_table
from hermes_ops.cli.outcome import outcome_table
from hermes_ops.cli.sweep_location import (
    AmbiguousIdError,
    ListedSweep,
    full_id,
    locate,
    matching_ids,
)
from hermes_ops.cli.tables import TableColumn, TableRow, fit_table, output_console, print_whole
from tests.unit.cli.airflow_runs import Airflow
from tests.unit.cli.views import facts, job, view

ID = "a-name-of-a-sweep-that-is-as-long-as-a-name-of-a-sweep-may-be-64-20261125-080000-a1b2"


def printed(what: Any, width: int) -> str:
    out = io.StringIO()
    print_whole(Console(file=out, width=width, color_system=None), what)
    return out.getvalue()


@pytest.mark.parametrize(("columns", "width"), [(None, 100_000), ("60", 60)])
def test_nothing_is_fitted_to_a_width_that_a_pipe_does_not_have(
    monkeypatch: pytest.MonkeyPatch, columns: str | None, width: int
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    for stderr in (False, True):
        assert output_console(stderr=stderr).width == width


def test_a_table_in_a_pipe_has_one_line_for_a_row_however_many_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    heads = [f"a column of a wide table {n}" for n in range(12)]
    console = output_console()
    row = TableRow(tuple(map(str, range(12))))
    print_whole(console, fit_table("wide", list(map(TableColumn, heads)), [row], console.width))
    assert sum("│" in line for line in capsys.readouterr().out.splitlines()) == 1


words = st.text("abcdefgh_-.:0123", min_size=1, max_size=40)


@given(st.lists(words, min_size=1, max_size=9, unique=True), st.integers(20, 200), st.data())
def test_no_head_and_no_cell_is_cut_or_wrapped_at_any_width(
    heads: list[str], width: int, data: st.DataObject
) -> None:
    cells = tuple(data.draw(words) for _ in heads)
    text = printed(fit_table("", [TableColumn(h) for h in heads], [TableRow(cells)], width), width)
    lines = [line.replace("│", " ").replace("┃", " ").split() for line in text.splitlines()]
    found = {word for line in lines for word in line}
    assert found >= {*heads, *cells}


def test_a_table_that_is_wider_than_the_terminal_loses_no_column() -> None:
    columns = [TableColumn("00"), TableColumn("0" * 23)]
    text = printed(fit_table("", columns, [TableRow(("a", "b"))], 20), 20)
    assert text.split() == ["00", "0" * 23, "a", "b"]


HEADS = ("trial", "state", "epoch", "value", "why")


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_table_of_follow_has_whole_heads_and_states_at_every_width(width: int) -> None:
    jobs = (
        job(n, "ended", final="stopped_early", reason="it was beaten " * 9) for n in (7, 123456)
    )
    text = printed(live_table(view(*jobs), "digits-1", width), width)
    assert all(head in text.split() for head in HEADS)
    assert text.count("stopped_early") == 2
    assert "123456" in text
    assert max(map(len, text.splitlines())) <= width


def test_the_table_of_the_end_keeps_every_column_in_80_columns() -> None:
    names = ["latency_ms", "validation_accuracy_top_5"]
    metrics = {name: {"last": 0.123456, "best": None} for name in names}
    trial = facts(3, state="stopped_early", metrics=metrics)
    text = printed(
        outcome_table(ID, {"state": "finished", "trials": [trial], "best": None}, 80), 80
    )
    heads = ["trial", "state", "epochs", "final", "best", *names, "segments", "preemptions",
             "GPU-seconds"]  # fmt: skip
    assert all(head in text.split() for head in heads)
    assert "stopped_early" in text
    assert f"{ID}: finished" in text


def test_cells_of_two_lines_and_numbers_at_the_right_stay_whole() -> None:
    columns = [TableColumn("policy"), TableColumn("completion, s", right=True)]
    rows = [TableRow(("fifo", "12\n(10 to 14)")), TableRow(("frontrunner", "9"))]
    for width in (20, 80):
        lines = printed(fit_table("", columns, rows, width), width).splitlines()
        assert any("(10 to 14)" in line for line in lines)
        assert any("completion, s" in line for line in lines)


def listed(sweep: str = ID, state: str = "success", **changes: Any) -> ListedSweep:
    moment = "2026-11-25T08:00:00.123Z"
    return ListedSweep(sweep, MAIN_DAG, sweep, state, moment, moment, **changes)


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("reason", [None, "8 trials failed alike: no package foo"])
def test_the_list_shows_whole_ids_at_every_width(width: int, reason: str | None) -> None:
    out = io.StringIO()
    rows = [listed(reason=reason), listed("digits-1")]
    print_list(Console(file=out, width=width, color_system=None), rows)
    lines = out.getvalue().splitlines()
    assert any(ID in line for line in lines)
    assert any("digits-1" in line for line in lines)
    said = " ".join(out.getvalue().split())
    assert (reason or "success") in said
    assert "2026-11-25 08:00:00" in said
    assert "UTC" in said


def recorded(state: str, **tags: str) -> Any:
    found = {f"hermes.{name}": text for name, text in tags.items()}
    return SimpleNamespace(state=state, tags=found, started_ms=0)


def test_the_list_has_one_state_of_each_sweep_and_why() -> None:
    rows = [listed("a"), listed("b", "failed"), listed("c", "running"), listed("d", "failed")]
    runs = {
        "a": recorded("cancelled", closed="stopped by its user", failures="Trial 0 failed: x"),
        "b": recorded("failed", failures="8 trials failed alike: x"),
        "c": recorded("running", closed="of an earlier end"),
    }
    live = {"sweeps": {"c": {"closing": None, "failures": ["Trial 1 failed: y"]}}}
    assert [(r.state, r.reason) for r in with_states(rows, runs, live)] == [
        ("cancelled", "stopped by its user"),
        ("failed", "8 trials failed alike: x"),
        ("running", "Trial 1 failed: y"),
        ("failed", None),
    ]


@pytest.mark.parametrize(("began", "shown"), [
    ("2026-11-18T21:30:00.500Z", "2026-11-18T21:30:00.500000Z"),
    ("2026-11-25T08:00:01Z", "2026-11-25T08:00:00.123Z"),
])  # fmt: skip
def test_the_list_says_when_a_resumed_sweep_first_began(began: str, shown: str) -> None:
    run = recorded("finished")
    run.started_ms = round(datetime.fromisoformat(began).timestamp() * 1_000)
    assert [r.start_date for r in with_states([listed("a"), listed("b")], {"a": run}, None)] == [
        shown, "2026-11-25T08:00:00.123Z",
    ]  # fmt: skip


def known(*sweeps: str) -> Any:
    return Airflow(*((MAIN_DAG, s, "success", {"plan": "success"}) for s in sweeps))


def test_the_beginning_of_an_id_is_enough_where_it_is_that_of_one_sweep() -> None:
    airflow = known("digits-1-aa", "digits-1-bb", "digits2-1-cc")
    assert locate(airflow, "digits2").sweep == "digits2-1-cc"
    assert locate(airflow, "digits-1-a").sweep == "digits-1-aa"
    assert full_id(airflow, "digits-1-b") == "digits-1-bb"
    assert full_id(airflow, "other") == "other"
    with pytest.raises(AmbiguousIdError, match="digits-1-aa, digits-1-bb: write more of the id"):
        full_id(airflow, "digits")


def test_a_whole_id_is_never_taken_for_a_beginning() -> None:
    assert locate(known("digits-1", "digits-1-aa"), "digits-1").sweep == "digits-1"


def test_what_goes_on_after_a_dash_comes_before_what_goes_on_within_a_word() -> None:
    assert matching_ids("a", ["ab-1", "a-1", "b"]) == ["a-1"]
    assert matching_ids("a", ["ab-1", "ac-1"]) == ["ab-1", "ac-1"]
    assert matching_ids("", ["a"]) == []


def test_a_terminal_gets_the_escapes_of_the_styles_and_none_of_a_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    evil = "\x1b]0;all is well\x07a\x1b[2Jdam\x9b"
    console = output_console()
    columns = [TableColumn("optimiser"), TableColumn("why", wraps=True)]
    print_whole(console, fit_table("", columns, [TableRow((evil, evil), "bold green")], 80))
    console.print(Text(evil))
    shown = capsys.readouterr().out
    assert "\x1b[1;32m" in shown
    assert "\x1b]" not in shown
    assert "\x1b[2J" not in shown
    assert "\x9b" not in shown
    assert shown.splitlines()[-1].endswith("dam")
