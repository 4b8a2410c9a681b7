"""Frontrunner in small worlds: curves fall from 1.0, steps take one second unless told."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import exp, inf, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.core.model import Gpu, Job, JobId, PastTrial, Phase, Plan, Point, Snapshot, SweepId
from hermes_ops.core.plan import check
from hermes_ops.policies.frontrunner import CONTENDERS, Commitments, Frontrunner, contenders
from hermes_ops.policies.frontrunner.configurations import features
from hermes_ops.policies.frontrunner.forecast import forecast_sweep
from hermes_ops.policies.frontrunner.regression import RegressionPrior, fit
from hermes_ops.policies.frontrunner.table import judging_depths, tabulate
from tests.builders import curve

TOTAL = 51


def losses(level: float, steps: int) -> list[float]:
    """A curve that falls towards its level."""
    return [level + (1.0 - level) * exp(-n / 12) for n in range(1, steps + 1)]


def points(values: list[float], pace_s: float = 1.0) -> tuple[Point, ...]:
    return curve(*values, step_s=pace_s)


def trial(
    number: int, values: list[float] | None = None, gpu: int | None = None, **facts: Any
) -> Job:
    """A trial with these losses: on a GPU, else waiting, or pending when it has none."""
    values = values or []
    phase = Phase.RUNNING if gpu is not None else Phase.WAITING if values else Phase.PENDING
    known: dict[str, Any] = {"sweep": SweepId("s"), "submitted_s": 0.0, "phase": phase}
    known |= {"gpus_held": () if gpu is None else (gpu,), "total_steps": TOTAL}
    known |= {"curve": points(values, facts.pop("pace_s", 1.0)), "steps_at_start": 0}
    return Job(JobId(f"s/{number}"), **(known | facts))


def decide(
    jobs: list[Job], gpus: int = 1, goals: dict[str, int] | None = None, **own: Any
) -> tuple[Plan, Commitments]:
    memory = Commitments(tuple(sorted((JobId(k), v) for k, v in (goals or {}).items())))
    snapshot = Snapshot(100.0, tuple(Gpu(n) for n in range(gpus)), tuple(jobs))
    plan, memory = Frontrunner(**own).decide(snapshot, memory)
    check(snapshot, plan)
    return plan, memory


def granted(jobs: list[Job], gpus: int = 1, **own: Any) -> list[str]:
    return sorted(grant.job for grant in decide(jobs, gpus, **own)[0].grants)


@pytest.mark.parametrize("ended", range(2, 9))
@pytest.mark.parametrize("fresh", range(2, 9))
def test_new_trials_of_which_nothing_is_known_start_in_the_order_of_their_numbers(
    ended: int, fresh: int
) -> None:
    paces_s = [0.1 + 0.003 * (n * 7 % 5) for n in range(ended)]
    over = [
        trial(
            n,
            [100 - (0.3 + n * 5 % 7 / 4) * step for step in range(1, 5)],
            pace_s=pace_s,
            phase=Phase.ENDED,
            total_steps=4,
            configuration=(("rate", 0.1 + n / 10),),
        )
        for n, pace_s in enumerate(paces_s)
    ]
    new = [trial(n, total_steps=4) for n in range(ended, ended + fresh)]
    plan, _ = decide([*over, *new], gpus=2)
    assert [grant.job for grant in plan.grants] == [f"s/{ended}", f"s/{ended + 1}"]


def field(levels: list[float], steps: int = 8) -> list[Job]:
    return [trial(n, losses(level, steps)) for n, level in enumerate(levels)]


def test_new_trials_fill_the_gpus() -> None:
    assert len(granted([trial(n) for n in range(9)], gpus=4)) == 4


def test_the_trial_that_leads_clearly_gets_the_gpu() -> None:
    levels = [0.6, 0.55, 0.1, 0.62, 0.58, 0.65, 0.57, 0.6]
    assert granted(field(levels)) == ["s/2"]


def test_a_trial_that_is_far_slower_than_all_others_is_no_likelier_than_the_leader() -> None:
    """Slow trials may fall further, but not ever further the slower they are."""
    paces_s = [1.0 + 0.05 * (n % 5) for n in range(24)]
    jobs = [trial(n, [0.8 + 0.01 * n], pace_s=pace_s) for n, pace_s in enumerate(paces_s)]
    leader, slow = trial(24, [0.5]), trial(25, [0.85], pace_s=20.0)
    chance = forecast_sweep(tabulate([*jobs, leader, slow], ())).chance
    assert chance[24] == chance.max()
    assert chance[24] > chance[25]


def test_of_equal_trials_the_one_with_less_time_left_gets_the_gpu() -> None:
    jobs = field([0.6, 0.61, 0.62, 0.63])
    rivals = [trial(4, losses(0.3, 8), pace_s=20.0), trial(5, losses(0.3, 8), pace_s=1.0)]
    assert granted([*jobs, *rivals]) == ["s/5"]


def test_a_trial_keeps_its_gpu_to_the_end_of_its_slice() -> None:
    runs, better = trial(0, losses(0.7, 9), gpu=0), trial(1, losses(0.1, 8))
    assert granted([runs, better], goals={"s/0": 13}) == ["s/0"]
    assert granted([runs, better], goals={"s/0": 9}) == ["s/1"]


def test_a_trial_that_has_trained_to_its_end_keeps_its_gpu_for_its_last_lines() -> None:
    done, better = trial(0, losses(0.7, TOTAL), gpu=0), trial(1, losses(0.1, 8))
    assert granted([done, better], goals={"s/0": TOTAL}) == ["s/0"]
    assert granted([done, better]) == ["s/0"]
    assert granted([done, better], gpus=2) == ["s/0", "s/1"]


def test_the_goal_is_the_next_depth() -> None:
    _, memory = decide([trial(0, losses(0.3, 8))])
    assert memory.goals == (("s/0", 13),)


def test_a_costly_switch_makes_the_slice_longer() -> None:
    _, memory = decide([trial(0, losses(0.3, 8), restore_s=20.0)])
    assert memory.goals == (("s/0", 34),)


def test_a_diverged_trial_comes_last() -> None:
    bad = [trial(n, [nan, inf, nan]) for n in (7, 8)]
    plan, _ = decide([*field([0.5, 0.3, 0.4], steps=3), *bad])
    assert set(plan.ranking[-2:]) == {"s/7", "s/8"}


@pytest.mark.parametrize("values", [[nan] * 3, [inf] * 3, [-inf] * 3, [1e300] * 3, [0.0] * 3])
def test_curves_that_say_nothing_still_get_the_gpus(values: list[float]) -> None:
    assert len(granted([trial(n, values) for n in range(3)], gpus=2)) == 2


def test_who_is_over_gets_nothing_but_teaches() -> None:
    over = [trial(n, losses(0.5, TOTAL), phase=Phase.ENDED) for n in range(3)]
    assert granted([*over, trial(5, losses(0.6, 3))], gpus=4) == ["s/5"]


def test_without_a_known_end_trials_still_run() -> None:
    jobs = [replace(job, total_steps=None) for job in field([0.6, 0.1, 0.6, 0.65])]
    assert granted(jobs) == ["s/1"]
    assert judging_depths(jobs)[-1] == 16


def near(number: int, place: float, steps: int = 0) -> Job:
    """A trial whose level is its hyper-parameter `x`."""
    job = trial(number, losses(0.1 + 0.8 * place, steps) if steps else None)
    return replace(job, configuration=(("x", place), ("note", "a")))


def test_a_new_trial_like_the_good_ones_is_opened_first() -> None:
    begun = [near(n, n / 20, steps=13) for n in range(0, 20, 2)]
    over = [replace(job, phase=Phase.ENDED) for job in begun]
    assert granted([*over, near(31, 0.9), near(32, 0.5), near(33, 0.02)]) == ["s/33"]


def test_an_earlier_sweep_says_which_new_trial_is_first() -> None:
    prior = tuple(
        PastTrial(job.configuration, job.curve, TOTAL)
        for job in (near(n, n / 20, steps=TOTAL) for n in range(20))
    )
    jobs = [near(31, 0.9), near(32, 0.5), near(33, 0.02)]
    assert granted(jobs, prior=prior) == ["s/33"]
    assert granted(jobs) == ["s/31"]


def test_an_earlier_sweep_cut_short_is_passed_over() -> None:
    alike = near(0, 0.5)
    short, whole = (points(losses(0.2, steps)) for steps in (9, TOTAL))
    assert len(tabulate([alike], (PastTrial(alike.configuration, whole, TOTAL),)).losses) == 2
    assert len(tabulate([alike], (PastTrial(alike.configuration, short, TOTAL),)).losses) == 1


def test_a_clock_that_stood_still_once_says_nothing_of_the_rest() -> None:
    jobs = field([0.5, 0.52, 0.54, 0.56, 0.58, 0.6])
    stood = [replace(point, seconds=max(point.seconds, 8.0)) for point in jobs[0].curve]
    ahead = forecast_sweep(tabulate([replace(jobs[0], curve=tuple(stood)), *jobs[1:]], ())).left_s
    assert ahead[0, -1] > ahead[1, -1] / 20
    np.testing.assert_allclose(ahead[1:, -1], 43.0, rtol=0.3)


@settings(max_examples=20, deadline=None)
@given(
    levels=st.lists(st.floats(0.05, 0.9), min_size=4, max_size=12, unique=True),
    factor=st.sampled_from([0.25, 4.0, 1024.0]),
    shift=st.sampled_from([0.0, 8.0, -8.0]),
)
def test_units_of_loss_and_time_do_not_matter(
    levels: list[float], factor: float, shift: float
) -> None:
    jobs = field(levels)
    moved = [
        replace(j, curve=tuple(Point(p.step, p.loss * factor + shift, p.seconds) for p in j.curve))
        for j in jobs
    ]
    slower = [
        replace(j, curve=tuple(Point(p.step, p.loss, p.seconds * factor) for p in j.curve))
        for j in jobs
    ]
    chances = [forecast_sweep(tabulate(some, ())).chance for some in (jobs, moved, slower)]
    np.testing.assert_allclose(chances[0], chances[1], atol=0.02)
    np.testing.assert_allclose(chances[0], chances[2], atol=0.02)


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(8)))
def test_the_order_of_the_jobs_does_not_matter(order: list[int]) -> None:
    jobs = field([0.3, 0.31, 0.29, 0.5, 0.3, 0.6, 0.28, 0.7])
    plan, memory = decide(jobs, gpus=3)
    again, same = decide([jobs[n] for n in order], gpus=3)
    assert (plan.grants, plan.ranking, memory) == (again.grants, again.ranking, same)


def test_sweeps_share_the_gpus_by_weight() -> None:
    mine = [trial(n, weight=3.0) for n in range(6)]
    jobs = [*mine, *(trial(n, sweep=SweepId("t")) for n in range(10, 16))]
    served = granted(jobs, gpus=4)
    assert sum(job in {j.id for j in mine} for job in served) == 3


def test_a_sweep_of_many_trials_compares_its_best_and_its_first() -> None:
    begun = [trial(n, losses(0.3 + n / 1000, 3)) for n in range(300)]
    new = [trial(n) for n in range(300, 600)]
    plan, _ = decide([*begun, *new], gpus=2)
    assert len(plan.grants) == 2
    assert plan.reasons[JobId("s/299")].text.endswith("not compared now")


def test_a_reason_states_the_chance_the_time_and_the_runner_up() -> None:
    plan, _ = decide(field([0.1, 0.5, 0.5, 0.55]))
    reason = plan.reasons[JobId("s/0")]
    assert reason.text.startswith("starts: best with chance")
    assert {term.name for term in reason.terms} >= {"chance_to_be_best", "seconds_left"}
    assert reason.terms[1].value == pytest.approx(43.0, rel=0.05)
    assert reason.runner_up in {"s/1", "s/2", "s/3"}


def test_the_goals_of_a_decision_are_remembered() -> None:
    _, memory = decide(field([0.1, 0.5, 0.4]), gpus=2)
    assert memory.goals


def test_a_sweep_is_forecast_again_once_a_trial_has_passed_a_depth_and_not_before() -> None:
    jobs = field([0.2, 0.3, 0.25, 0.5, 0.7])
    at = judging_depths(jobs)
    between = next(b - 1 for a, b in pairwise(at) if b - a > 2 and a > 1)
    jobs[0] = replace(jobs[0], curve=points(losses(0.2, between - 1)))
    first = forecast_sweep(tabulate(jobs, ()))
    nearer = [replace(jobs[0], curve=points(losses(0.2, between))), *jobs[1:]]
    assert forecast_sweep(tabulate(nearer, ())) is first
    passed = [replace(jobs[0], curve=points(losses(0.2, between + 1))), *jobs[1:]]
    assert forecast_sweep(tabulate(passed, ())) is not first


def test_a_large_sweep_compares_its_best_trials_and_its_first_new_ones_in_their_order() -> None:
    begun = [trial(n, losses(0.2 + (n * 7 % 200) / 400, 5)) for n in range(200)]
    new = [trial(n) for n in range(200, 300)]
    found = contenders(begun + new)
    best_losses = sorted(losses(0.2 + n / 400, 5)[-1] for n in range(200))[:96]
    kept = {job.id for job in begun if job.curve[-1].loss <= best_losses[-1]}
    assert [job.id for job in found if job.curve] == [j.id for j in begun if j.id in kept]
    assert [job.id for job in found if not job.curve] == [job.id for job in new[:32]]
    assert len(found) == CONTENDERS


def test_chances_add_up_to_one() -> None:
    found = forecast_sweep(tabulate(field([0.2, 0.3, 0.25, 0.5, 0.7]), ()))
    assert found.chance.sum() == pytest.approx(1.0)
    assert found.chance.argmax() == 0


def test_repeated_whole_numbers_are_codes() -> None:
    """As codes 0 is as far from 1 as from 7; as numbers it is nearer."""
    coded = tuple(tuple((f"op_{k}", code) for k in range(3)) for code in (0, 1, 7, 0))
    made = features(coded)
    distance = np.linalg.norm(made[0] - made[1]), np.linalg.norm(made[0] - made[2])
    assert distance[0] == pytest.approx(distance[1])
    np.testing.assert_allclose(made[0], made[3], atol=1e-9)


def test_missing_and_constant_hyperparameters_tell_nothing() -> None:
    made = features(((), (("a", 1.0),), (("a", 1.0),), ()))
    assert not made.any()


def test_the_regression_finds_the_line() -> None:
    x = np.linspace(-1, 1, 40)
    rows = np.stack([np.ones(40), x], axis=1)
    belief = RegressionPrior(np.zeros(2), np.ones(2), (1.0,), 0.1, 2.0)
    found = fit(rows, 0.5 + 2 * x + 0.01 * np.sin(97 * x), belief)
    np.testing.assert_allclose(found.mean, [0.5, 2.0], atol=0.02)
    assert 0 < found.noise < 0.1


def test_an_earlier_sweep_of_another_space_teaches_nothing() -> None:
    other = PastTrial((("y", 0.5),), points(losses(0.2, TOTAL)), TOTAL)
    assert len(tabulate([near(0, 0.5)], (other,)).losses) == 1


def test_trials_that_failed_before_a_report_take_no_place_of_new_ones_in_a_large_sweep() -> None:
    failed = [trial(n, phase=Phase.ENDED) for n in range(CONTENDERS)]
    begun = [trial(n, losses(0.5, 3)) for n in range(200, 203)]
    new = [trial(n) for n in range(300, 500)]
    found = {job.id for job in contenders([*failed, *begun, *new])}
    assert found == {job.id for job in (*begun, *new[: CONTENDERS - len(begun)])}


def test_open_trials_are_compared_however_many_have_ended_with_a_lower_loss() -> None:
    ended = [trial(n, losses(0.1, TOTAL), phase=Phase.ENDED) for n in range(300)]
    running = [trial(n, losses(0.5, 2)) for n in range(300, 310)]
    new = [trial(n) for n in range(400, 500)]
    found = {job.id for job in contenders([*ended, *running, *new])}
    assert {job.id for job in running} < found
    assert len(found) == CONTENDERS
    assert len(found & {job.id for job in ended}) == CONTENDERS * 3 // 4 - len(running)


def test_a_trial_that_lost_its_gpu_after_its_last_step_is_served_first() -> None:
    trained = trial(9, losses(0.1, TOTAL))
    others = [trial(n, losses(0.05 * n, 9)) for n in range(1, 5)]
    new = [trial(n) for n in range(10, 30)]
    plan, _ = decide([*others, *new, trained], gpus=1)
    assert [grant.job for grant in plan.grants] == ["s/9"]
    assert "trained to its last step" in plan.reasons[trained.id].text


def test_chances_are_numbers_though_losses_differ_by_more_than_the_largest_float() -> None:
    diverged = [trial(n, [1e308, 1e308]) for n in range(6)]
    jobs = [*diverged, trial(6, [-1e308, -1e308]), trial(7, losses(0.5, 4))]
    chance = forecast_sweep(tabulate(jobs, ())).chance
    assert np.isfinite(chance).all()
    assert chance.argmax() == 6
