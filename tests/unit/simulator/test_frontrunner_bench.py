"""The measurements of `frontrunner` on recorded tasks: their split, states, variants, intervals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from bench import frontrunner as bench
from bench.curve_tasks import KNOWN, folder, split
from bench.frontrunner import Setting, Store, Variant, interval_of_mean, ratio, time_to_best_s
from bench.frontrunner_chances import ABLATIONS, MODEL, depths_of, nats, random_states, random_walk
from bench.frontrunner_deadline import best_by, better_trials
from bench.frontrunner_ranks import trials_ahead
from hermes_ops.core.model import Gpu, Phase
from hermes_ops.errors import ConfigError
from hermes_ops.policies import make_policy
from hermes_ops.policies.frontrunner import forecast
from hermes_ops.policies.frontrunner.correction import FILE
from hermes_ops.policies.frontrunner.table import judging_depths
from hermes_ops.simulator.curves import sample
from hermes_ops.simulator.engine import layout, simulate
from hermes_ops.simulator.metrics import time_to_best_s as measured_time_to_best_s
from tests.builders import job

ROOT = Path(__file__).resolve().parents[3]
TASK = KNOWN[2]


def test_the_documentation_lists_the_split_that_the_rule_makes() -> None:
    text = (ROOT / "docs/frontrunner-measured.md").read_text("utf-8")
    sides = [tuple(sorted(_names(text, side))) for side in (r"\* Training:", r"\* Validation:")]
    assert [len(side) for side in sides] == [18, 10]
    assert split(tuple(name for side in sides for name in side)) == tuple(sides)


def _names(text: str, side: str) -> list[str]:
    listed = re.search(rf"{side}(.*?)\.(?:\n| )", text, re.DOTALL)
    assert listed is not None
    names, family = [], ""
    for word in re.findall(r"`?\w+`?", listed[1]):
        if word.startswith("`"):
            family = word.strip("`")
        else:
            names.append(family + word)
    return names


def test_a_task_of_another_family_moves_no_task_to_another_side() -> None:
    before = split(("a_1", "a_2", "a_3"))
    after = split(("a_1", "a_2", "a_3", "b_1", "b_2", "b_3"))
    assert all(set(few) < set(many) for few, many in zip(before, after, strict=True))


def test_a_missing_folder_of_tasks_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HERMES_CURVE_TASKS", raising=False)
    with pytest.raises(ConfigError, match="HERMES_CURVE_TASKS"):
        folder()


def test_a_simulation_until_the_best_trial_ends_takes_the_time_of_the_whole_one() -> None:
    whole, _ = sample(bench.dataset(TASK), bench.TRIALS, 1)
    gpus = tuple(Gpu(index, "node-0") for index in range(4))
    run = simulate(whole, gpus, make_policy("fifo", {}))
    assert time_to_best_s(Variant("fifo"), TASK, 1, Setting()) == measured_time_to_best_s(run)


def test_a_variant_sets_its_constants_only_while_it_is_applied() -> None:
    variant = Variant.parse("frontrunner:forecast.SURER=0.5:forecast.MODEL_ERRORS=[[0.0, 1.0]]")
    before = forecast.SURER, forecast.MODEL_ERRORS
    with variant.applied():
        assert forecast.SURER == 0.5
        assert list(forecast.MODEL_ERRORS) == [(0.0, 1.0)]
    assert before == (forecast.SURER, forecast.MODEL_ERRORS)


@pytest.mark.parametrize("name", sorted(ABLATIONS))
def test_every_ablation_changes_the_chances_of_a_state(name: str) -> None:
    (state,) = random_states(bench.dataset(TASK), 103, 1)
    model, without = (nats(Variant.parse(text), [state]) for text in (MODEL, ABLATIONS[name]))
    assert model != without


def test_every_ablation_names_constants_that_exist() -> None:
    for text in ABLATIONS.values():
        variant = Variant.parse(text)
        with variant.applied():
            assert variant.changes


def test_stored_times_are_not_simulated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    asked: list[int] = []

    def counted(variant: Variant, task: str, seed: int, setting: Setting) -> float:
        asked.append(seed)
        return 1.0 + seed

    monkeypatch.setattr(bench, "time_to_best_s", counted)
    for seeds in (2, 3):
        times_s = Store().times_s(Variant("fifo"), TASK, seeds, Setting())
    assert (times_s.tolist(), asked) == ([1.0, 2.0, 3.0], [0, 1, 2])


def test_a_correction_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    """Else each round of learning would simulate with the correction of the first."""
    (state,) = random_states(bench.dataset(TASK), 103, 1)
    file, shipped = tmp_path / "learnt.json", json.loads(Path(FILE).read_text("utf-8"))
    variant = Variant("frontrunner", (("correction.FILE", str(file)),))
    found, digests = [], set()
    for linear in (shipped["linear"], [0.0] * len(shipped["linear"])):
        file.write_text(json.dumps({**shipped, "linear": linear}), "utf-8")
        found += nats(variant, [state])
        digests.add(variant.files)
    assert found[0] != found[1]
    assert len(digests) == 2


def test_the_table_of_settings_names_the_tasks_on_which_asha_is_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    times_s = {"fifo": 8.0, "asha": 3.0, "frontrunner": 2.0}

    def simulated(variant: Variant, task: str, seed: int, setting: Setting) -> float:
        lost = task == TASK and setting.switch_s > 0 and variant.policy == "frontrunner"
        return 6.0 if lost else times_s[variant.policy]

    monkeypatch.setattr(bench, "time_to_best_s", simulated)
    settings = [Setting(switch_s, 10.0) for switch_s in (0.0, 3.0)]
    _, _, *rows = bench.grid(Variant("frontrunner"), (TASK, KNOWN[1]), 2, settings)
    free, costly = ([cell.strip() for cell in row.split("|")[1:-1]] for row in rows)
    assert free == ["0 s", "10 s", "4.00 (4.00 to 4.00)", "1.50 (1.50 to 1.50)", "none"]
    assert costly[-1] == f"{TASK} 0.50"


def test_the_interval_of_equal_ratios_is_the_ratio() -> None:
    assert ratio(np.full((3, 4), 6.0), np.full((3, 4), 2.0)) == pytest.approx((3.0, 3.0, 3.0))


def test_few_tasks_make_a_wide_interval_however_many_seeds_they_have() -> None:
    values = np.repeat([[0.0], [1.0]], 500, axis=1)
    mean, low, high = interval_of_mean(values)
    assert (mean, low, high) == (0.5, 0.0, 1.0)


def test_each_step_of_a_random_walk_trains_one_trial_and_the_best_never_ends() -> None:
    losses = np.sort(np.random.default_rng(0).random((6, 4)), axis=1)[:, ::-1]
    steps = np.array(random_walk(losses, 2, np.random.default_rng(1)))
    assert (np.diff(steps.sum(axis=1)) == 1).all()
    assert (steps[:, 2] < 4).all()


def test_depths_are_those_at_which_the_policy_judges() -> None:
    assert depths_of(51) == judging_depths([job(1, Phase.PENDING, total_steps=51)])


def test_nobody_is_ahead_of_the_best_trial_at_the_end() -> None:
    curves = bench.dataset(TASK)
    depths = depths_of(curves.epochs)
    ahead = trials_ahead(curves, depths, 5)
    assert ahead.shape == (5, len(depths))
    assert not ahead[:, -1].any()
    assert ahead[:, 0].any()


def test_no_chance_is_scored_on_what_has_not_been_seen() -> None:
    state = next(random_states(bench.dataset(TASK), 100, 1))
    table = state.table
    assert (table.seen.sum(axis=1) == table.reached).all()
    assert 0.0 < nats(Variant("frontrunner"), [state])[0] < 10.0


def test_the_best_value_by_a_deadline_is_the_lowest_that_was_reported_until_then() -> None:
    workload, _ = sample(bench.dataset(TASK), 8, 0)
    whole = simulate(workload, layout(bench.GPUS), make_policy("fifo", {}, {}))
    times_s = [seen.at_s for seen in whole.observations]
    middle_s = times_s[len(times_s) // 2]
    until = [seen.loss for seen in whole.observations if seen.at_s <= middle_s]
    assert best_by(workload, "fifo", middle_s) == min(until)
    assert best_by(workload, "fifo", times_s[0] / 2) == np.inf
    assert best_by(workload, "fifo", max(times_s)) == min(seen.loss for seen in whole.observations)


def test_all_trials_count_as_better_where_none_has_reported_by_the_deadline() -> None:
    assert set(better_trials(TASK, 0, 1e-6, 0.0).values()) == {bench.TRIALS}
