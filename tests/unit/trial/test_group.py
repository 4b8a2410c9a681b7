"""The place of a process in its trial, and the agreement on the step before which all leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hermes_ops.trial
from hermes_ops.trial.event_channel import send
from hermes_ops.trial.group import (
    GroupError,
    StopAgreement,
    TrainingMark,
    TrialRank,
    average_logs,
    rank_seed,
    stop_margin,
)
from hermes_ops.trial.keras.checkpoint_files import CheckpointFiles


def group(size: int, folder: Path) -> list[StopAgreement]:
    return [StopAgreement(TrialRank(rank, size, str(folder))) for rank in range(size)]


def test_without_variables_a_trial_is_one_process() -> None:
    assert TrialRank.from_environment({}) == TrialRank(0, 1)
    assert not TrialRank.from_environment({"HERMES_SIZE": "1", "HERMES_RANK": "0"}).is_distributed


def test_a_rank_finds_its_place_in_the_variables() -> None:
    place = TrialRank.from_environment(
        {"HERMES_RANK": "2", "HERMES_SIZE": "4", "HERMES_GROUP_DIR": "/trial/group"}
    )
    assert place == TrialRank(2, 4, "/trial/group")
    assert place.is_distributed
    assert not place.is_leader


@pytest.mark.parametrize(
    ("rank", "size", "folder"),
    [("2", "2", "/g"), ("-1", "2", "/g"), ("", "2", "/g"), ("0", "many", "/g"), ("0", "2", "")],
)
def test_variables_that_do_not_fit_are_an_error_that_names_them(
    rank: str, size: str, folder: str
) -> None:
    variables = {"HERMES_RANK": rank, "HERMES_SIZE": size, "HERMES_GROUP_DIR": folder}
    with pytest.raises(GroupError, match="HERMES_"):
        TrialRank.from_environment(variables)


@given(
    size=st.integers(2, 5),
    backward=st.integers(1, 5),
    asked_at=st.integers(0, 20),
    order=st.randoms(use_true_random=False),
)
def test_all_ranks_leave_before_the_same_step_however_far_ahead_some_are(
    tmp_path_factory: pytest.TempPathFactory,
    size: int,
    backward: int,
    asked_at: int,
    order: st.DataObject,
) -> None:
    """Ranks run in any order, but none passes an exchange of gradients that not all have begun."""
    ranks = group(size, tmp_path_factory.mktemp("group"))
    margin = stop_margin(backward)
    left: dict[int, int] = {}
    while len(left) < size:
        may_run = [
            rank
            for rank in range(size)
            if rank not in left
            and (
                ranks[rank].step % backward != 0
                or ranks[rank].step <= min(one.step for one in ranks)
            )
        ]
        rank = order.choice(may_run)  # type: ignore[attr-defined]
        step = ranks[rank].step
        if ranks[rank].agree_to_leave(asked=rank == 0 and step >= asked_at, margin=margin):
            left[rank] = step
    assert len(set(left.values())) == 1
    assert asked_at <= left[0] <= asked_at + margin


def test_a_follower_that_is_told_to_stop_leaves_only_with_the_leader(tmp_path: Path) -> None:
    leader, follower = group(2, tmp_path)
    assert not any(follower.agree_to_leave(asked=True, margin=2) for _ in range(5))
    assert not leader.agree_to_leave(asked=True, margin=2)
    assert json.loads((tmp_path / "stop.json").read_text()) == {"step": 2}
    assert follower.agree_to_leave(asked=False, margin=2)


def test_a_leader_that_cannot_write_asks_again_at_its_next_step(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    leader = StopAgreement(TrialRank(0, 2, str(folder)))
    assert not leader.agree_to_leave(asked=True, margin=2)
    folder.mkdir()
    assert not leader.agree_to_leave(asked=True, margin=2)
    assert json.loads((folder / "stop.json").read_text()) == {"step": 3}


def test_the_margin_is_more_than_a_rank_can_be_ahead() -> None:
    assert stop_margin(1) == 2
    assert stop_margin(4) > 4
    assert stop_margin(1, steps_in_flight=8) == 10


def test_a_rank_shows_that_it_trains_until_it_does_not(tmp_path: Path) -> None:
    mark = TrainingMark(TrialRank(1, 2, str(tmp_path)))
    mark.touch()
    mark.touch()
    assert (tmp_path / "1.fit").exists()
    mark.remove()
    mark.remove()
    assert not (tmp_path / "1.fit").exists()
    TrainingMark(TrialRank(1, 2, str(tmp_path / "gone"))).touch()


def test_values_are_averaged_over_the_ranks_that_have_them() -> None:
    assert average_logs([{"loss": 1.0, "val_loss": 4.0}, {"loss": 2.0}]) == {
        "loss": 1.5,
        "val_loss": 4.0,
    }


@given(seed=st.integers(0, 2**31 - 1))
def test_each_rank_has_a_seed_of_its_own_and_rank_0_has_the_trials(seed: int) -> None:
    seeds = [rank_seed(seed, rank) for rank in range(64)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 64
    assert all(0 <= one < 2**31 for one in seeds)


def test_a_follower_reports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_TRIAL_DIR", str(tmp_path))
    monkeypatch.setenv("HERMES_METRICS_FILE", str(tmp_path / "metrics.jsonl"))
    monkeypatch.setenv("HERMES_RANK", "1")
    send({"kind": "trained", "step": 1})
    hermes_ops.trial.report(1, loss=0.5)
    assert list(tmp_path.iterdir()) == []


def test_a_reader_of_checkpoints_removes_nothing_that_the_writer_may_be_writing(
    tmp_path: Path,
) -> None:
    CheckpointFiles(tmp_path).write({"step": 1}, [], b"1")
    unfinished = tmp_path / ".keras-2"
    unfinished.mkdir()
    reader = CheckpointFiles(tmp_path, is_reader=True)
    reader.keep(())
    assert reader.serials() == [1]
    assert unfinished.exists()
    assert CheckpointFiles(tmp_path / "none", is_reader=True).serials() == []
    assert not (tmp_path / "none").exists()
