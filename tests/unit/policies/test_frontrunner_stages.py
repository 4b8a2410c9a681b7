"""What curves and similar configurations say of the final losses."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from hermes_ops.policies.frontrunner_pooling import Crowd, pooled
from hermes_ops.policies.frontrunner_stages import Ends, Stages
from hermes_ops.policies.frontrunner_table import Table

Floats = NDArray[np.float64]
DEPTHS = (1, 2, 3, 5, 8, 13)


def stages(scaled: Floats, slowness: Floats | None = None, gain: float = 0.0) -> Stages:
    """The stages of these losses, on the scale that the regressions use."""
    count = len(scaled)
    made = Table(
        depths=DEPTHS,
        losses=scaled,
        seconds=np.where(np.isnan(scaled), np.nan, np.array(DEPTHS, float)),
        reached=(~np.isnan(scaled)).sum(axis=1),
        over=np.zeros(count, bool),
        configurations=((),) * count,
    )
    return Stages(made, scaled, np.zeros(count) if slowness is None else slowness, gain)


def falling(levels: list[float], reached: list[int]) -> Floats:
    """Losses that fall by 0.3 a stage, seen for so many depths each."""
    full = np.array(levels)[:, None] - 0.3 * np.arange(len(DEPTHS))
    seen = np.arange(len(DEPTHS)) < np.array(reached)[:, None]
    return np.where(seen, full, np.nan)


def test_a_curve_is_extended_along_the_drops_of_those_that_are_further() -> None:
    scaled = falling([0.0, 0.4, -0.3, 0.2, 0.7], [6, 6, 6, 6, 2])
    found = stages(scaled).ends()
    assert found.mean[4] == pytest.approx(0.7 - 1.5, abs=0.15)
    np.testing.assert_allclose(found.mean[:4], scaled[:4, -1])


def test_the_deeper_a_curve_is_known_the_surer_its_end() -> None:
    found = stages(falling([0.0, 0.4, -0.3, 0.2], [6, 5, 3, 1])).ends()
    assert (np.diff(found.ahead) < 0).all()
    assert found.ahead[-1] == 0.0
    np.testing.assert_allclose(found.variance, found.ahead[[5, 4, 2, 0]])


def test_who_has_not_begun_has_no_end_of_its_own() -> None:
    found = stages(falling([0.0, 0.4, -0.3], [6, 2, 0])).ends()
    assert np.isnan(found.mean[2])
    assert np.isnan(found.variance[2])


def test_a_slow_trial_is_believed_to_fall_further_only_in_the_world_that_says_so() -> None:
    scaled = falling([0.0, 0.0, 0.0, 0.0], [2, 2, 2, 2])
    slowness = np.array([-1.0, -1.0, 1.0, 1.0])
    none, some = (stages(scaled, slowness, gain).ends().mean for gain in (0.0, 3.0))
    assert none[2] == pytest.approx(none[0])
    assert some[2] < some[0] - 0.2


def test_a_trial_without_a_curve_is_guessed_from_the_ones_like_it() -> None:
    place = np.array([0.0, 0.1, 0.2, 0.8, 0.9, 1.0, 0.05, 0.95])
    kernel = np.exp(-8 * (place[:, None] - place) ** 2)
    mean = np.where(np.arange(8) < 6, place, np.nan)
    ends = Ends(mean, np.where(np.isnan(mean), np.nan, 0.01), np.full(6, 0.1), 0.5)
    crowd = Crowd(kernel[None], np.zeros(8), 8)
    (found,) = pooled([ends], [0.0], crowd)
    assert found.mean[6] < 0.35 < 0.65 < found.mean[7]
    assert found.sd[6] > found.sd[0]
    assert (found.alone >= found.sd**2 - 1e-9)[:6].all()


def test_a_finished_trial_is_known_exactly() -> None:
    mean = np.array([0.3, 0.5, 0.1, 0.9])
    ends = Ends(mean, np.array([0.0, 0.0, 0.2, 0.2]), np.zeros(6), 0.5)
    (found,) = pooled([ends], [0.0], Crowd(np.zeros((0, 4, 4)), np.zeros(4), 4))
    np.testing.assert_allclose(found.mean[:2], mean[:2], atol=1e-3)
    assert found.sd[2] > 10 * found.sd[0]
    assert 0.1 < found.mean[2] < found.mean[3] < 0.9
