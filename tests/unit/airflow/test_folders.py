from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any, NoReturn

import pytest

from hermes_ops.airflow.accounts import Accounts
from hermes_ops.airflow.folders import TrialFolder, WakeFile, sweep_folder
from hermes_ops.airflow.trial.metrics import segment_facts
from hermes_ops.errors import HermesError
from hermes_ops.trial.checkpoint_store.store import safe_name


def folder(*segments: dict[str, Any], torn: str = "") -> TrialFolder:
    found = TrialFolder.from_sweep("digits-1", 3)
    found.path.mkdir(parents=True)
    text = "".join(json.dumps(s) + "\n" for s in segments)
    (found.path / "segments.jsonl").write_text(text + torn)
    return found


def begin(epoch: int, start_s: float, *gpus: int) -> dict[str, Any]:
    return {"epoch": epoch, "gpus": list(gpus), "start_s": start_s, "first_step": 0}


def end(epoch: int, end_s: float, outcome: str) -> dict[str, Any]:
    return {"epoch": epoch, "end_s": end_s, "last_step": 4, "outcome": outcome}


def test_a_run_id_cannot_lead_out_of_the_sweeps_folder(home: Path) -> None:
    assert sweep_folder("../a b/c").parent == home / "sweeps"
    assert sweep_folder("..").parent == home / "sweeps"
    assert sweep_folder("..").name.startswith("..-")
    name = safe_name("scheduled__2026-01-01T00:00:00+00:00")
    assert name.startswith("scheduled__2026-01-01T00_00_00_00_00-")


def test_two_sweeps_have_two_folders() -> None:
    ids = ("a:b:run", "a_b:run", "a:b_run", "a_b_run", "a-b-run")
    assert len({safe_name(sweep) for sweep in ids}) == len(ids)
    assert safe_name("a_b_run") == "a_b_run"


@pytest.mark.parametrize("run", ["manual__2026-01-01T00:00:00+00:00", "r" * 250])
def test_a_sweep_whose_dag_group_and_run_have_long_names_has_a_folder_of_its_own(
    tmp_path: Path, run: str
) -> None:
    names = [safe_name(f"{'d' * 200}:{'g' * 199}{last}:{run}") for last in "ab"]
    names.append(safe_name("r" * 250))
    for name in names:
        (tmp_path / f"{name}.trash").mkdir()
    assert len(set(names)) == len(names)


def test_a_trial_without_files_says_nothing() -> None:
    found = TrialFolder.from_sweep("digits-1", 0)
    assert (found.status(), found.result(), found.segments()) == ({}, {}, ())


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', '{"epoch": 1, "outc'])
def test_a_torn_status_is_as_none(text: str) -> None:
    found = folder()
    (found.path / "status.json").write_text(text)
    assert found.status() == {}


def test_a_status_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr("hermes_ops.airflow.folders.confined", fail)
    with pytest.raises(HermesError, match=r"status\.json cannot be read: Input/output error"):
        folder().status()


def test_a_folder_that_a_script_has_made_in_the_place_of_its_status_is_none() -> None:
    found = folder()
    (found.path / "status.json").mkdir()
    assert found.status() == {}


def test_the_torn_last_line_of_a_killed_segment_is_passed_over() -> None:
    found = folder(begin(1, 10.0, 0), end(1, 14.0, "preempted"), torn='{"epoch": 2, "sta')
    assert [s["epoch"] for s in found.segments()] == [1]


def test_a_killed_segment_is_counted_and_charged_once_it_is_closed() -> None:
    killed = folder(begin(1, 10.0, 0), end(1, 14.0, "preempted"), begin(2, 20.0, 0, 1))
    accounts = Accounts.from_segments(killed.segments())
    span = ((10.0, 14.0),)
    assert accounts == Accounts(span, (1,), 4.0, 2, 1, held=span)
    with (killed.path / "segments.jsonl").open("a") as file:
        file.write(json.dumps(end(2, 25.0, "killed")) + "\n")
    accounts = Accounts.from_segments(killed.segments())
    spans = (*span, (20.0, 25.0))
    assert accounts == Accounts(spans, (1, 2), 14.0, 2, 1, held=spans)


def test_a_segment_in_which_the_clock_was_set_back_costs_nothing_instead_of_less() -> None:
    back = folder(begin(1, 10.0, 0), end(1, 14.0, "preempted"), begin(2, 20.0), end(2, 5.0, "x"))
    assert Accounts.from_segments(back.segments()).service_gpu_s == 4.0


def test_a_stop_without_a_checkpoint_is_a_preemption_too() -> None:
    found = folder(begin(1, 10.0), end(1, 11.0, "interrupted"))
    span = ((10.0, 11.0),)
    assert Accounts.from_segments(found.segments()) == Accounts(span, (1,), 1.0, 1, 1, held=span)


def test_an_end_without_a_begin_is_passed_over() -> None:
    assert folder(end(1, 11.0, "finished")).segments() == ()


def test_a_wake_is_taken_once(tmp_path: Path) -> None:
    waking, waiting = WakeFile(tmp_path / "nudge"), WakeFile(tmp_path / "nudge")
    assert not waiting.woken()
    waking.wake()
    assert [waiting.woken(), waiting.woken()] == [True, False]


def test_a_wake_of_a_folder_that_is_not_there_is_lost_without_harm(tmp_path: Path) -> None:
    WakeFile(tmp_path / "none" / "nudge").wake()
    assert not (tmp_path / "none").exists()


def test_a_segment_knows_the_batch_that_was_recorded_for_its_lease() -> None:
    found = folder(begin(1, 10.0, 0), end(1, 14.0, "preempted"), begin(2, 20.0, 0, 1))
    found.record_batch(2, 64)
    assert [s.get("batch") for s in found.segments()] == [None, 64]
    assert Accounts.from_segments(found.segments()).batches == ()
    with (found.path / "segments.jsonl").open("a") as file:
        file.write(json.dumps(end(2, 25.0, "preempted")) + "\n")
    assert Accounts.from_segments(found.segments()).batches == (None, 64)


def test_a_torn_record_of_a_batch_costs_itself_alone() -> None:
    found = folder(begin(1, 10.0, 0), begin(2, 20.0, 0))
    found.batches.write_text('{"epoch": 1, "bat')
    found.record_batch(2, 48)
    assert [s.get("batch") for s in found.segments()] == [None, 48]


@pytest.mark.parametrize(
    "told",
    [
        {"start_s": "soon"},
        {"start_s": float("nan")},
        {"start_s": 10**400},
        {"start_s": 10.0, "gpus": 3},
        {"start_s": 10.0, "gpus": ["first"]},
        {"start_s": 10.0, "batch": "many"},
        {"end_s": None},
        {"end_s": 20.0, "last_step": "many"},
        {"end_s": 20.0, "startup_s": []},
        {"epoch": ["1"], "end_s": 20.0},
    ],
)
def test_a_line_of_segments_that_hermes_trial_would_not_write_is_none(
    told: dict[str, Any], tmp_path: Path
) -> None:
    found = TrialFolder(tmp_path / "3")
    found.path.mkdir()
    start = {"epoch": 1, "gpus": ["0"], "start_s": 10.0, "first_step": 0}
    (found.path / "segments.jsonl").write_text(f"{json.dumps(start)}\n{json.dumps(told)}\n")
    assert found.segments() == (start,)
    assert len(segment_facts(found)) == 1
    assert Accounts.from_segments(found.segments()).segments == 1
