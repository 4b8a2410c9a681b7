"""Laws of the curve fits."""

from __future__ import annotations

from itertools import pairwise
from math import exp, inf, isfinite, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.core.curves import Memo
from hermes_ops.core.model import Point
from hermes_ops.core.speed_model import Floats
from hermes_ops.policies.toolbox.curve_fit import Fitted, fit, lowest_fits

STEPS = np.arange(1.0, 41.0)
LOSSES = st.lists(st.floats(-10, 10), min_size=3, max_size=20)


def one(losses: Floats, **options: Any) -> Fitted:
    return fit([STEPS[: len(losses)]], [losses], **options)[0]


def differs(fitted: Fitted, losses: Floats) -> float:
    """The largest difference on the curve, in ranges of the loss."""
    found = np.array([fitted.loss(step) for step in STEPS[: len(losses)]])
    return float(np.abs(found - losses).max() / (losses.max() - losses.min()))


@given(a=st.floats(0.01, 2), b=st.floats(0.05, 3), c=st.floats(-5, 5))
@settings(max_examples=60, deadline=None)
def test_a_noiseless_hyperbola_is_found_again(a: float, b: float, c: float) -> None:
    fitted = one(1 / (a * STEPS + b) + c, exponential=False, squared=False)
    assert fitted.b == pytest.approx(a, rel=1e-4)
    assert fitted.c == pytest.approx(b, rel=1e-3, abs=1e-4)
    assert fitted.floor == pytest.approx(c, abs=1e-4)


@given(a=st.floats(0.001, 0.1), b=st.floats(0, 1), c=st.floats(0.1, 3), d=st.floats(-5, 5))
@settings(max_examples=60, deadline=None)
def test_a_noiseless_curve_of_slaqs_first_form_is_met(
    a: float, b: float, c: float, d: float
) -> None:
    losses = 1 / ((a * STEPS + b) * STEPS + c) + d
    assert differs(one(losses), losses) < 1e-3


@given(size=st.floats(0.1, 10), rate=st.floats(0.02, 1), floor=st.floats(-5, 5))
@settings(max_examples=60, deadline=None)
def test_a_noiseless_exponential_is_found_again(size: float, rate: float, floor: float) -> None:
    fitted = one(size * np.exp(-rate * STEPS) + floor)
    assert fitted.amplitude == pytest.approx(size, rel=1e-3)
    assert fitted.rate == pytest.approx(rate, rel=1e-3)
    assert fitted.loss(100.0) == pytest.approx(size * exp(-100 * rate) + floor, abs=1e-3 * size)


@given(LOSSES)
@settings(max_examples=80, deadline=None)
def test_a_fit_never_rises_and_its_parameters_are_not_negative(losses: list[float]) -> None:
    fitted = one(np.array(losses))
    values = [fitted.loss(step) for step in (*range(1, 60), 1e3, 1e6, inf)]
    assert all(later <= before + 1e-9 for before, later in pairwise(values))
    shape = (fitted.a, fitted.b, fitted.c, fitted.amplitude, fitted.rate, fitted.error)
    assert min(shape) >= 0
    assert fitted.floor <= min(losses) + 1e-9 or fitted.error == 0


@given(
    noise=st.lists(st.floats(-0.05, 0.05), min_size=20, max_size=20),
    scale=st.sampled_from([1e-3, 0.5, 7.0, 1e4]),
    shift=st.sampled_from([-100.0, 0.0, 3.0]),
)
@settings(max_examples=60, deadline=None)
def test_a_fit_follows_the_scale_and_the_origin_of_the_loss(
    noise: list[float], scale: float, shift: float
) -> None:
    losses = 1 / (0.2 * STEPS[:20] + 0.5) + np.array(noise)
    plain, moved = one(losses), one(scale * losses + shift)
    for step in (1, 20, 40):
        wanted = scale * plain.loss(step) + shift
        assert moved.loss(step) == pytest.approx(wanted, abs=1e-3 * scale + 1e-9 * abs(shift))


@given(st.lists(LOSSES, min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_a_curve_is_fitted_alike_alone_and_among_others(many: list[list[float]]) -> None:
    curves = [np.array(losses) for losses in many]
    together = fit([STEPS[: len(c)] for c in curves], curves)
    for losses, fitted in zip(curves, together, strict=True):
        alone = one(losses)
        span = float(losses.max() - losses.min())
        assert fitted.error == pytest.approx(alone.error, rel=0.05, abs=1e-3 * span)


def test_newer_points_weigh_more() -> None:
    losses = np.concatenate((np.full(10, 2.0), np.full(10, 1.0)))
    old, new = one(losses, decay=1.0), one(losses, decay=0.5)
    assert abs(new.loss(20) - 1.0) < abs(old.loss(20) - 1.0)


def test_losses_that_are_not_finite_are_left_out() -> None:
    losses = 1 / (0.2 * STEPS + 0.5)
    holed = losses.copy()
    holed[[3, 7, 20]] = nan, inf, -inf
    assert differs(one(holed), losses) < 1e-3


@pytest.mark.parametrize("losses", [[], [3.0], [4.0, 3.0], [3.0, 3.0, 3.0, 3.0], [nan, 3.0]])
def test_a_curve_without_a_shape_stays_at_its_newest_loss(losses: list[float]) -> None:
    fitted = one(np.array(losses))
    assert fitted.loss(7) == fitted.loss(inf) == (losses[-1] if losses else inf)


def test_a_decay_over_one_is_refused() -> None:
    with pytest.raises(ValueError, match="decay"):
        one(STEPS, decay=1.5)


def test_what_is_fitted_are_the_lowest_losses_so_far() -> None:
    curve = tuple(Point(n, 1 / n if n != 5 else 9.0, float(n)) for n in range(1, 11))
    lowest = np.minimum.accumulate([p.loss for p in curve])
    found = lowest_fits([curve, curve[:5]])
    assert found[:1] == fit([np.arange(1.0, 11.0)], [lowest])
    assert isfinite(found[1].error)


def test_a_memo_makes_each_fact_once_whatever_else_is_asked_beside_it() -> None:
    made = []

    def make(facts: list[tuple[int, ...]], factor: int) -> list[list[int]]:
        made.append((facts, factor))
        return [[factor * sum(fact)] for fact in facts]

    memo = Memo[tuple[int, ...], list[int]](make, size=3)
    one, two = (1, 2), (3, 4)
    first, other = memo.get([one], 10), memo.get([one], 20)
    again = memo.get([two, one, two], 10)
    assert again == [[70], [30], [70]]
    assert again[1] is first[0]
    assert other == [[60]]
    assert made == [([one], 10), ([one], 20), ([two], 10)]


def test_a_memo_forgets_the_oldest_beyond_its_size() -> None:
    memo = Memo[tuple[int, ...], list[int]](lambda facts: map(list, facts), size=2)
    facts = [(1,), (2,), (3,)]
    first = memo.get(facts)
    later = memo.get(facts[1:]) + memo.get(facts[:1])
    assert [kept is made for kept, made in zip(later, (*first[1:], first[0]), strict=True)] == [
        True,
        True,
        False,
    ]


def test_a_memo_answers_though_another_thread_has_it_forget_meanwhile() -> None:
    kept, new, other = (1,), (2,), (3,)

    def make(facts: list[tuple[int, ...]]) -> list[list[int]]:
        if new in facts:
            memo.get([other])  # as another thread would, in the midst of it
        return [list(fact) for fact in facts]

    memo = Memo[tuple[int, ...], list[int]](make, size=1)
    memo.get([kept])
    assert memo.get([kept, new]) == [[1], [2]]
