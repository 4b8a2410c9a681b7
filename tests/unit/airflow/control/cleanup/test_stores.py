"""What a store holds of a sweep is deleted with what its folders hold."""

from __future__ import annotations

import json
import sys
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fsspec.core import url_to_fs

from hermes_ops.airflow.control.cleanup import janitor
from hermes_ops.airflow.control.cleanup.janitor import (
    KEEP_FILE,
    CheckpointQuota,
    check_store,
    clear_sweep,
    clear_trials,
    free_ended,
    free_expired,
    make_room,
)
from hermes_ops.airflow.folders import TrialFolder, sweep_folder
from hermes_ops.airflow.trial.local import trial_variables
from hermes_ops.errors import HermesError
from hermes_ops.trial.checkpoint_store.store import CheckpointStore, StoreError, connect
from tests.bucket import Bucket
from tests.unit.airflow.builders import SWEEP, lease, running, sweep_with

STATES = {0: "finished", 1: "stopped_early", 2: "cancelled", 3: "failed"}


@pytest.fixture
def in_bucket(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in s3.variables.items():
        monkeypatch.setenv(name, value)
    return f"{s3.url}/{uuid.uuid4().hex}"


@pytest.fixture
def in_folder(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


def filesystem(url: str) -> Any:
    return url_to_fs(url, auto_mkdir=True) if "file:" in url else url_to_fs(url)


@pytest.fixture(params=["in_folder", pytest.param("in_bucket", marks=pytest.mark.heavy)])
def store(home: Path, request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(request.param)
    sweep_folder(SWEEP).mkdir(parents=True)
    files, root = filesystem(url)
    for number in STATES:
        files.pipe_file(f"{root}/{SWEEP}/{number}/copies/0000000001-000001-ab.json", b"{}")
    files.pipe_file(f"{root}/other/0/state", b"not ours")
    return url


def left(store: str) -> list[str]:
    files, root = url_to_fs(store, use_listings_cache=False)
    return sorted(path.removeprefix(f"{root}/") for path in files.glob(f"{root}/*/*"))


def refuse(_: str) -> CheckpointStore:
    raise StoreError("it is away")


def test_at_the_end_the_store_keeps_what_can_go_on_until_its_time_is_over(store: str) -> None:
    free_ended(SWEEP, STATES, 60.0, 1_000.0, store)
    assert set(left(store)) == {"other/0", f"{SWEEP}/2", f"{SWEEP}/3"}
    assert free_expired(lambda _: False, 1_059.0) == []
    assert f"{SWEEP}/2" in left(store)
    assert free_expired(lambda _: False, 1_061.0) == [sweep_folder(SWEEP)]
    assert left(store) == ["other/0"]


def test_nothing_stays_in_the_store_when_nothing_is_kept(store: str) -> None:
    free_ended(SWEEP, STATES, 0.0, 1_000.0, store)
    assert left(store) == ["other/0"]
    assert not (sweep_folder(SWEEP) / KEEP_FILE).exists()


@pytest.mark.parametrize(
    ("keep_s", "places"), [(0.0, [SWEEP]), (60.0, [f"{SWEEP}/0", f"{SWEEP}/1"])]
)
def test_a_store_is_opened_once_for_a_sweep_of_which_nothing_is_kept(
    store: str, monkeypatch: pytest.MonkeyPatch, keep_s: float, places: list[str]
) -> None:
    opened: list[str] = []

    def connecting(url: str) -> CheckpointStore:
        opened.append(url.removeprefix(f"{store}/"))
        return connect(url)

    monkeypatch.setattr(janitor, "clear_trials", partial(clear_trials, open_store=connecting))
    monkeypatch.setattr(janitor, "clear_sweep", partial(clear_sweep, open_store=connecting))
    free_ended(SWEEP, STATES, keep_s, 1_000.0, store)
    assert opened == places


def test_a_store_that_was_away_at_the_end_is_asked_again_by_the_controller(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(janitor, "clear_trials", partial(clear_trials, open_store=refuse))
        patch.setattr(janitor, "clear_sweep", partial(clear_sweep, open_store=refuse))
        free_ended(SWEEP, STATES, 0.0, 1_000.0, store)
        assert free_expired(lambda _: False, 1_001.0) == []
    assert f"{SWEEP}/0" in left(store)
    note = json.loads((sweep_folder(SWEEP) / KEEP_FILE).read_text())
    assert note == {"until_s": 1_000.0, "sweep": SWEEP, "store": store}
    assert free_expired(lambda _: False, 1_021.0) == [sweep_folder(SWEEP)]
    assert left(store) == ["other/0"]


def test_only_copies_of_checkpoints_are_deleted_in_the_folder_that_a_sweep_names(
    store: str,
) -> None:
    files, root = filesystem(store)
    theirs = ("train.csv", "0/checkpoints/w.bin", "0/files/notes.txt", "copies/keep", "raw/1/x")
    for name in theirs:
        files.pipe_file(f"{root}/{SWEEP}/{name}", b"not ours")
    free_ended(SWEEP, STATES, 0.0, 1_000.0, store)
    files, root = url_to_fs(store, use_listings_cache=False)
    found = files.find(f"{root}/{SWEEP}")
    assert sorted(path.removeprefix(f"{root}/{SWEEP}/") for path in found) == sorted(theirs)


def test_no_sweep_deletes_the_copies_of_another_one_though_it_names_its_place(store: str) -> None:
    before = left(store)
    for sweep in ("0", "copies"):
        free_ended(sweep, {0: "finished", 1: "finished"}, 0.0, 1_000.0, f"{store}/{SWEEP}")
    assert left(store) == before


def test_room_is_made_in_the_store_too(store: str) -> None:
    for number in STATES:
        folder = TrialFolder.from_sweep(SWEEP, number).checkpoints
        folder.mkdir(parents=True)
        (folder / "state").write_bytes(b"x" * 100)
    assert make_room(CheckpointQuota(SWEEP, 350.0, (1, 0), store)) == 300.0
    assert f"{SWEEP}/1" not in left(store)
    assert f"{SWEEP}/0" in left(store)


def test_the_room_of_a_sweep_knows_its_store() -> None:
    rules = {"max_gigabytes": 1.0, "store": "s3://bucket/prefix"}
    room = CheckpointQuota.from_sweep(sweep_with(running(0, 0), checkpoints=rules))
    assert room is not None
    assert room.store == "s3://bucket/prefix"


def test_a_trial_that_began_from_scratch_says_so_to_its_segments() -> None:
    folder = TrialFolder.from_sweep(SWEEP, 0)
    assert "HERMES_BEGAN_ANEW" not in trial_variables(lease(), folder, SWEEP, 0)
    anew = trial_variables(replace(lease(), anew=4), folder, SWEEP, 0)
    assert anew["HERMES_BEGAN_ANEW"] == "4"


def test_a_store_without_its_package_is_refused_when_the_sweep_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_store(None)
    check_store("file:///mnt/share")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(HermesError, match="install gcsfs"):
        check_store("gs://bucket/prefix")


def test_a_store_that_is_away_is_said_once(store: str, caplog: pytest.LogCaptureFixture) -> None:
    assert not clear_trials(store, SWEEP, [7], refuse)
    assert not clear_trials(store, SWEEP, [7], refuse)
    assert [r.message.count("it is away") for r in caplog.records] == [1]
