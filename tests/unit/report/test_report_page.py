from __future__ import annotations

import math
import re
from base64 import b64decode, b64encode
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from hermes_ops.config import parse
from hermes_ops.core.deadline import DeadlineResult
from hermes_ops.core.secondary_metrics import MetricOutcome, SecondaryMetric, violations
from hermes_ops.core.summary import TrialSummary
from hermes_ops.report import Alternative, Background, BestSoFar, TrialEnding
from hermes_ops.report.background import Improvement
from hermes_ops.report.figures import measured_course
from hermes_ops.report.page import _facts
from tests.unit.airflow.builders import sweep_file
from tests.unit.report.sweeps import (
    BEGIN_S,
    EVIL,
    SECTIONS,
    Page,
    Sweep,
    conditional,
    curve,
    piece,
    summary,
    trial,
)

COURSE = BestSoFar((Improvement(2.0, 2.0, 0.9), Improvement(4.0, 5.0, 0.2)), 6.0, 8.0)


def whole(size: int = 12) -> Sweep:
    """So many trials with everything that a report can tell."""
    trials = [replace(conditional(n), preemptions=int(n == 3)) for n in range(size)]
    curves = {n: curve(2.0, 1.5, 1.0 / (n + 1), begin_s=2.0 * n) for n in range(size)}
    pieces = [piece(n, 2.0 * n, 2.0 * n + 3.0, gpus=(n % 2,)) for n in range(size)]
    pieces[3] = replace(pieces[3], outcome="preempted", end_s=BEGIN_S + 7.5, last_step=1)
    courses = (COURSE, replace(COURSE, improvements=COURSE.improvements[:1]))
    fifo = Alternative("fifo", (30.0, 45.0), (36.0, 40.0), (0.0, 0.0), (50.0, 60.0),
                       courses, (7,), (7,))  # fmt: skip
    background = Background(policy="hermes", started_s=BEGIN_S, best_finished=11,
                            time_to_best_s=25.0, alternatives=(fifo,))  # fmt: skip
    return Sweep(summary(*trials), curves, [*pieces, piece(3, 8.0, 9.0, gpus=(1,))], background)


@pytest.fixture(scope="module")
def text() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hermes_ops.report.parameter_plots._TREES", 5)
        return whole().html


def test_every_trial_has_its_row_and_every_section_its_picture(text: str) -> None:
    found = Page(text)
    assert list(found.rows) == [f"trial-{n}" for n in range(12)]
    assert found.rows["trial-3"][:4] == ["3", "finished", "0.25", "0.25"]
    assert tuple(found.images) == SECTIONS
    for section in SECTIONS:
        assert found.drawing(section)
        assert "val_loss of 12 trials, best trial 11" in found.images[section]["alt"]


def test_the_page_loads_nothing_and_links_nowhere(text: str) -> None:
    found = Page(text)
    assert all(address.startswith("data:image/svg+xml;base64,") for address in found.addresses())
    assert "url(" not in text
    assert "http" not in re.sub(r"http-equiv", "", text)
    for image in found.images.values():
        drawn = b64decode(image["src"].partition(",")[2]).decode()
        assert set(re.findall(r'(?:href|src)="([^#"]*)', drawn)) <= {""}
        hosts = re.findall(r"https?://([^/\"]+)", drawn.partition("<svg")[2])
        assert set(hosts) == {"www.w3.org"}  # names of XML's own, which nothing loads


def test_the_pages_policy_allows_its_own_script_alone(text: str) -> None:
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = b64encode(sha256(script.encode()).digest()).decode()
    (policy,) = (g["content"] for t, g in Page(text).tags if g.get("http-equiv"))
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_the_policys_effect_is_told_beside_its_replay(text: str) -> None:
    told = " ".join(Page(text).texts["policy"].split())
    assert (
        "The policy hermes gave GPUs to 12 of 12 trials on 2 slots. It stopped 1 trial 1 time"
        in told
    )
    assert "had ended 25 s after the sweep's start" in told
    assert "Replayed under fifo, the best trial ends after 30 s to 45 s: 5 s to 20 s later" in told
    assert "hermes, as it ran 25 " in told
    assert "fifo, replayed 30 to 45 36 to 40 0 50 to 60" in told


def test_a_picture_that_fails_leaves_one_line_and_all_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a <b>bad</b>\nvalue")

    monkeypatch.setattr("hermes_ops.report.pictures.slices", fail)
    text = whole(5).html
    found = Page(text)
    assert tuple(found.images) == SECTIONS[:4]
    assert "could not be drawn (ValueError: a <b>bad</b> value)." in found.texts["slices"]
    assert "<b>bad" not in text
    assert len(found.rows) == 5


def test_a_story_that_fails_leaves_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise TypeError("not a number")

    monkeypatch.setattr("hermes_ops.report.page.switching_gpu_s", fail)
    found = Page(whole(5).html)
    assert "could not be told (TypeError: not a number)" in found.texts["policy"]
    assert len(found.rows) == 5


def test_whatever_users_write_stays_text() -> None:
    bad = TrialSummary(0, EVIL, {EVIL: EVIL, "list": [EVIL]}, 0.5, 0.5, 1, 1, 0, 1.0)
    other = replace(bad, number=1, config={EVIL: "日本"}, best=0.7)
    facts = replace(summary(bad, other, metric=EVIL), sweep=EVIL, state=EVIL)
    told = Background(policy=EVIL, closed=EVIL, endings={0: TrialEnding(EVIL, EVIL)},
                      alternatives=(Alternative(EVIL, None, None, None, None, (COURSE,)),),
                      no_alternatives=EVIL)  # fmt: skip
    text = Sweep(facts, {0: curve(0.9, 0.5)}, [piece(0, 0, 3)], told).html
    found = Page(text)
    assert text.count("<script") == 1
    assert [tag for tag, _ in found.tags].count("script") == 1
    assert not any(name.startswith("on") for _, given in found.tags for name in given)
    assert found.rows["trial-0"][-2] == EVIL
    assert EVIL in found.texts["endings"]
    assert "日本" in found.drawing("parallel")


LATENCY = SecondaryMetric("latency", "minimize", at_most=20.0)
ACCURACY = SecondaryMetric("accuracy")


def bounded(*latencies: float) -> Sweep:
    """Trials with losses that fall with their numbers and these latencies."""
    trials = [
        trial(
            number,
            1.0 - number / 10,
            metrics={"latency": MetricOutcome(value, value / 2), "accuracy": MetricOutcome(0.5)},
            violates=violations([LATENCY], {"latency": value}),
        )
        for number, value in enumerate(latencies)
    ]
    curves = {t.number: curve(2.0, t.best or 0.0, begin_s=t.number) for t in trials}
    return Sweep(summary(*trials, metrics=(LATENCY, ACCURACY)), curves, [piece(0, 0, 9)])


def test_a_trial_that_misses_a_bound_is_marked_and_is_not_the_best() -> None:
    text = bounded(10.0, 12.0, 99.0).html
    found = Page(text)
    assert '<tr id="trial-1" class="best">' in text
    assert "Best: trial 1" in " ".join(found.texts[""].split())
    assert "The best trial keeps: latency at most 20." in found.texts[""]
    assert found.rows["trial-2"][8:12] == [
        "99", "49.5", "0.5", "latency is 99, at most 20 is allowed"
    ]  # fmt: skip
    assert found.rows["trial-0"][8:12] == ["10", "5", "0.5", "kept"]
    assert "best latency" in found.texts["trials"]
    assert "best accuracy" not in found.texts["trials"]


def test_values_of_a_trial_that_misses_a_bound_are_no_regret() -> None:
    sweep = bounded(10.0, 99.0)
    course = measured_course(sweep.summary, sweep.curves, sweep.segments, BEGIN_S)
    assert [fall.value for fall in course.improvements] == [2.0, 1.0]


def test_where_all_trials_miss_a_bound_the_page_says_which() -> None:
    head = " ".join(Page(bounded(30.0, 40.0).html).texts[""].split())
    assert "No trial keeps every bound" in head
    assert "trial 1: latency is 40, at most 20 is allowed" in head


NOBODY = summary()
ALL_FAILED = summary(*(trial(n, 0.5 if n else None, state="failed") for n in range(3)))
PENDING = summary(*(TrialSummary(n, "pending") for n in range(3)))


@pytest.mark.parametrize(
    "facts", [NOBODY, ALL_FAILED, PENDING], ids=["nobody", "failed", "pending"]
)
def test_without_a_value_the_pictures_of_values_say_so(facts: Any) -> None:
    found = Page(Sweep(facts).html)
    assert len(found.rows) == len(facts.trials)
    assert set(found.images) == {"curves", "gpus"}
    assert "No trial has reported val_loss." in found.drawing("curves")
    for section in ("parallel", "slices"):
        assert "No trial has reported val_loss." in found.texts[section]
    assert "Too few trials: 0 have a value" in found.texts["importance"]
    assert "No trial that can be the best has reported" in found.texts["regret"]
    assert "No trial that did not fail has reported val_loss." in " ".join(found.texts[""].split())


def test_a_sweep_of_one_trial_has_its_page() -> None:
    found = Page(Sweep(summary(trial(0, 0.5)), {0: curve(0.5)}, [piece(0, 0, 2)]).html)
    assert list(found.rows) == ["trial-0"]
    assert {"curves", "regret", "gpus", "slices"} == set(found.images)
    assert "the same configuration" in found.texts["parallel"]
    assert "gave GPUs to 1 of 1 trial on 2 slots and stopped none" in found.texts["policy"]


@pytest.mark.parametrize("values", [(math.nan,), (math.inf,), (1e308,), (0.0,), (-5.0, 1e-9, 1e9)])
def test_no_value_is_too_odd_for_a_page(values: tuple[float, ...]) -> None:
    trials = [trial(n, value) for n, value in enumerate(values)]
    curves = {n: curve(value, value) for n, value in enumerate(values)}
    found = Page(Sweep(summary(*trials), curves, [piece(0, 0, None)]).html)
    assert len(found.rows) == len(values)
    assert not any("could not be drawn" in said for said in found.texts.values())


def test_what_was_spent_stands_beside_the_budget() -> None:
    config = parse(
        {
            "name": "digits",
            "objective": {"metric": "val_loss"},
            "search": {"algorithm": "tpe", "max_trials": 2,
                       "space": {"rate": {"type": "uniform", "low": 0, "high": 1}}},
            "trial": {"command": ["python", "train.py", "{rate}"], "directory": "/"},
            "early_stop": "median",
            "budget": {"max_epochs": 10, "gpu_seconds": 600, "failed_trials": 3},
        },
        "digits-1",
        None,
    )  # fmt: skip
    trials = (
        trial(0, 0.5, steps=10, gpu_seconds=60.0),
        trial(1, 0.7, steps=4, state="stopped_early", gpu_seconds=30.0),
    )
    found = Page(Sweep(summary(*trials), background=Background(config=config)).html)
    head = " ".join(found.texts[""].split())
    assert "minimize val_loss. Search: tpe. Early stopping: median." in head
    for fact in ("1 min 30 sof 10 min", "14 of 20steps", "0 of 3failed"):
        assert fact.replace(" ", "") in head.replace(" ", "")
    assert "1 trial was ended early" in found.texts["policy"]
    assert "6 of its 10 steps were not trained." in found.texts["policy"]


@pytest.mark.law
def test_two_hundred_trials_of_a_hundred_steps_make_less_than_five_megabytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "hermes_ops.report.parameter_plots._judge", judged
    )  # slow, and the same size
    numbers = range(200)
    trials = [trial(n, 1.0 / (n + 1), config={"rate": n / 200, "units": n % 7}) for n in numbers]
    curves = {n: curve(*(1.0 / (n + s) for s in range(1, 101))) for n in numbers}
    pieces = [
        piece(n, 9.0 * k + n, 9.0 * k + n + 5, gpus=(n % 8,)) for n in numbers for k in range(4)
    ]
    text = Sweep(summary(*trials), curves, pieces).html
    assert set(Page(text).images) == set(SECTIONS)
    assert 200_000 < len(text.encode()) < 5_000_000


def judged(table: Any, ranks: Any) -> tuple[Any, float]:
    return np.zeros((10, table.shape[1])), 0.5


@pytest.mark.parametrize(("kept", "word"), [(True, "kept"), (False, "not kept")])
def test_the_report_says_whether_the_deadline_was_kept(kept: bool, word: str) -> None:
    facts = _facts(summary(trial(0, 0.5), deadline=DeadlineResult(60.0, kept)), Background())
    assert (f"1970-01-01 00:01:00 UTC: {word}", "deadline") in facts
    assert "deadline" not in [name for _, name in _facts(summary(trial(0, 0.5)), Background())]


def test_the_time_in_which_a_sweep_had_ended_is_no_wall_time_of_its_budget() -> None:
    file = sweep_file({"wall_clock_seconds": 120})
    background = Background(config=parse(file, "digits-1", None))
    whole = summary(trial(0, 0.5), wall_seconds=300.0)
    assert ("5 min 00 s of 2 min 00 s", "wall time") in _facts(whole, background)
    resumed = replace(whole, ended_seconds=240.0)
    assert ("1 min 00 s", "wall time, without 4 min 00 s after an end") in _facts(
        resumed, background
    )
