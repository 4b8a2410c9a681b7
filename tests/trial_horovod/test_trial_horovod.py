"""Trials of several Horovod workers: stopped, resumed at the same size and at others, and failing.

The data are 192 samples in batches of 16: an epoch has 12 batches, divided by the workers.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.trial_horovod.conftest import KERAS, HorovodTrial, Trials

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600)]


def _scripts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scripts", Path(__file__).with_name("scripts.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


scripts = _scripts()


def newest_header(trial: HorovodTrial) -> dict[str, Any]:
    path = max((trial.folder / "checkpoints").glob("keras-*")) / "manifest.json"
    header: dict[str, Any] = json.loads(path.read_text())["header"]
    return header


def test_a_trial_of_two_workers_stopped_and_resumed_has_the_same_curve(
    plain_trials: Trials,
) -> None:
    whole, cut = plain_trials(scripts.ONE), plain_trials(scripts.ONE)
    assert whole.segment(2) == 0, whole.output
    assert cut.segment(2, at="TERM:1:2:0") == 75, cut.output
    assert newest_header(cut)["batch"] > 0, "it was not stopped in mid-epoch"
    assert cut.segment(2, at="TERM:3:1:*") == 75, cut.output
    assert cut.segment(2) == 0, cut.output
    found, expected = cut.metrics(), whole.metrics()
    assert sorted(found) == sorted(expected)
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, abs=1e-5), key
    assert cut.weights(0) == pytest.approx(whole.weights(0), abs=1e-5)
    assert cut.weights(0) == cut.weights(1)
    assert cut.batches(0, 2) == cut.batches(1, 2) == whole.batches(0, 2)
    assert expected["samples", 5] == 5 * 192
    assert (cut.folder / "model" / "model.keras").exists()


def test_a_stop_at_the_last_batch_lets_all_ranks_end_the_script(trials: Trials) -> None:
    trial = trials(scripts.ONE)
    assert trial.segment(2, at="TERM:4:5:*") == 0, trial.output
    assert trial.notes(0)[-1]["ended"]
    assert trial.notes(1)[-1]["ended"]
    assert trial.result["outcome"] == "finished"


def test_a_follower_alone_that_is_told_to_stop_goes_on_training(trials: Trials) -> None:
    trial = trials(scripts.ONE)
    assert trial.segment(2, at="TERM:1:1:1") == 0, trial.output
    assert trial.batches(0, 2) == trial.batches(1, 2)
    assert len(trial.batches(0, 2)) == 5 * 6


def test_a_trial_goes_on_with_three_workers_and_then_with_one(trials: Trials) -> None:
    trial = trials(scripts.ONE)
    assert trial.segment(2, at="TERM:1:1:0") == 75, trial.output
    assert trial.batches(0, 2) == trial.batches(1, 2)
    stopped = newest_header(trial)
    assert (stopped["epoch"], stopped["size"], stopped["batches"]) == (1, 2, 6)
    assert trial.segment(3, at="TERM:3:0:0") == 75, trial.output
    assert "goes on with 3 workers instead of 2" in trial.output
    by_rank = [trial.batches(rank, 3) for rank in range(3)]
    assert by_rank[0] == by_rank[1] == by_rank[2]
    assert by_rank[0][0] == (1, stopped["batch"] * 2 // 3)
    assert [batch for epoch, batch in by_rank[0] if epoch == 2] == [0, 1, 2, 3]
    stopped = newest_header(trial)
    assert trial.segment(1) == 0, trial.output
    alone = trial.batches(0, 1)
    assert alone[0] == (stopped["epoch"], stopped["batch"] * 3)
    assert [batch for epoch, batch in alone if epoch == 4] == list(range(12))
    for size, rate in ((2, 0.1), (3, 0.15), (1, 0.05)):
        assert trial.rates(size) == pytest.approx([rate] * len(trial.rates(size)))
    losses = [value for (name, _), value in sorted(trial.metrics().items()) if name == "loss"]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert abs(newest_header(trial)["samples"] - 5 * 192) <= 3 * 16 * 3, "of each resize some"


def test_a_sharded_pipeline_goes_on_where_it_was_and_at_the_same_share_with_one_worker(
    trials: Trials,
) -> None:
    whole, cut = trials(scripts.PIPELINE), trials(scripts.PIPELINE)
    assert whole.segment(2) == 0, whole.output
    assert cut.segment(2, at="TERM:1:1:0") == 75, cut.output
    assert cut.segment(2, at="TERM:2:1:0") == 75, cut.output
    found, expected = cut.metrics(), whole.metrics()
    assert len(found) >= 2 * 5
    assert found == {key: pytest.approx(expected[key], abs=1e-5) for key in found}
    stopped = newest_header(cut)
    assert cut.segment(1) == 0, cut.output
    assert cut.batches(0, 1)[0] == (2, stopped["batch"] * 2)
    assert len(cut.batches(0, 1)) == 12 - stopped["batch"] * 2 + 12


def test_a_script_that_does_not_scale_its_rate_has_it_scaled_from_the_first_resize(
    trials: Trials,
) -> None:
    trial = trials(scripts.UNSCALED)
    assert trial.segment(1, at="TERM:1:2:0") == 75, trial.output
    assert trial.segment(2) == 0, trial.output
    assert trial.rates(1)[0] == pytest.approx(0.05)
    assert trial.rates(2) == pytest.approx([0.1] * len(trial.rates(2)))
    assert "does not multiply its learning rate" in trial.output
    assert trial.weights(0) == trial.notes(1)[-1]["weights"]


def test_hermes_scales_the_rate_from_the_start_where_it_is_told_to(trials: Trials) -> None:
    trial = trials(scripts.UNSCALED)
    setting = {"HERMES_SCALE_LEARNING_RATE": "hermes"}
    assert trial.segment(2, at="TERM:1:2:0", **setting) == 75, trial.output
    assert trial.segment(1, **setting) == 0, trial.output
    assert trial.rates(2) == pytest.approx([0.1] * len(trial.rates(2)))
    assert trial.rates(1) == pytest.approx([0.05] * len(trial.rates(1)))


def test_a_schedule_of_steps_is_left_alone_and_that_is_said(trials: Trials) -> None:
    trial = trials(scripts.SCHEDULE)
    assert trial.segment(2, at="TERM:1:2:0") == 75, trial.output
    assert trial.segment(1) == 0, trial.output
    assert "follows a schedule" in trial.output


def test_ranks_that_sum_gradients_over_four_steps_leave_before_the_same_step(
    trials: Trials,
) -> None:
    trial = trials(scripts.SUMMED)
    assert trial.segment(2, at="TERM:1:2:0") == 75, trial.output
    assert trial.batches(0, 2) == trial.batches(1, 2)
    assert trial.segment(2) == 0, trial.output
    assert trial.weights(0) == trial.weights(1)


def test_a_resize_waits_for_the_end_of_the_epoch_where_that_is_asked_for(trials: Trials) -> None:
    trial = trials(scripts.ONE)
    setting = {"HERMES_RESIZE": "epoch"}
    assert trial.segment(2, at="TERM:1:1:0", **setting) == 75, trial.output
    assert trial.batches(1, 2)[-1] == trial.batches(0, 2)[-1] == (1, 5)
    assert trial.segment(1, **setting) == 0, trial.output
    assert trial.batches(0, 1)[0] == (2, 0)


def test_a_callback_that_rank_0_alone_has_shifts_no_other_callback(trials: Trials) -> None:
    trial = trials(scripts.UNEVEN_CALLBACKS)
    assert trial.segment(2, at="TERM:2:2:0") == 75, trial.output
    assert trial.segment(2, at="TERM:3:2:0") == 75, trial.output
    assert trial.segment(1, at="TERM:4:2:0") == 75, trial.output
    assert trial.segment(3) == 0, trial.output
    assert trial.rates(3) == pytest.approx([0.15] * len(trial.rates(3)))
    rows = (trial.folder / "log.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["epoch", *"01234"]


def test_the_warm_up_of_another_size_is_not_restored(trials: Trials) -> None:
    trial = trials(scripts.UNEVEN_CALLBACKS)
    assert trial.segment(1, at="TERM:0:2:0") == 75, trial.output
    assert trial.segment(2) == 0, trial.output
    epochs = [epoch for epoch, _ in trial.batches(0, 2)]
    after = [rate for epoch, rate in zip(epochs, trial.rates(2), strict=True) if epoch > 0]
    assert after == pytest.approx([0.1] * len(after))


def test_early_stopping_sees_what_all_ranks_have_and_ends_them_together(trials: Trials) -> None:
    trial = trials(scripts.EARLY)
    assert trial.segment(2) == 0, trial.output
    assert trial.batches(0, 2) == trial.batches(1, 2)
    assert trial.weights(0) == trial.weights(1)


def test_a_fit_that_is_complete_is_not_run_again_at_another_size(trials: Trials) -> None:
    trial = trials(scripts.TWO_FITS)
    assert trial.segment(2, at="TERM:2:1:0") == 75, trial.output
    stopped = newest_header(trial)
    assert (stopped["fit"], stopped["epoch"]) == (1, 2)
    assert trial.segment(1) == 0, trial.output
    alone = trial.batches(0, 1)
    assert alone[0] == (2, stopped["batch"] * 2)
    assert {epoch for epoch, _ in alone} == {2, 3}
    assert trial.rates(1) == pytest.approx([0.05] * len(alone))


def test_a_script_without_horovod_fails_at_once(plain_trials: Trials) -> None:
    trial = plain_trials(scripts.NO_HOROVOD)
    assert trial.segment(2) not in (0, 75)
    assert "does not use Horovod: 2 copies would train apart" in trial.result["reason"]


def test_an_optimizer_that_is_not_horovods_fails_at_once(trials: Trials) -> None:
    trial = trials(scripts.NOT_WRAPPED)
    assert trial.segment(2) not in (0, 75)
    assert "2 copies would train apart" in trial.result["reason"]


@pytest.mark.skipif(KERAS == "keras", reason="there is Keras 2 alone")
def test_keras_3_with_horovod_is_refused_with_the_reason(plain_trials: Trials) -> None:
    trial = plain_trials(scripts.KERAS_3)
    assert trial.segment(2, TF_USE_LEGACY_KERAS="0") not in (0, 75)
    assert "Horovod does not average the gradients of Keras 3" in trial.result["reason"]


def test_a_rank_that_is_killed_is_named_and_the_trial_goes_on_from_its_checkpoint(
    trials: Trials,
) -> None:
    trial = trials(scripts.ONE)
    assert trial.segment(2, at="KILL:2:1:1") not in (0, 75)
    assert "rank 1" in trial.result["reason"]
    assert trial.segment(2) == 0, trial.output
    assert trial.weights(0) == trial.weights(1)
