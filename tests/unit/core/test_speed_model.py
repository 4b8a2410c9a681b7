"""The model of step times, its fit, and goodput."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.core.goodput import BatchTable, efficiency, goodputs
from hermes_ops.core.sizes import BatchRange, StepTime
from hermes_ops.core.speed_model import SpeedModel, fit_speed_model

# cifar10 of Pollux' traces: 32 to 1024 samples a GPU.
CIFAR = SpeedModel(0.01725, 0.000706, 0.1301, 0.00261, 0.0355, 0.00245, 2.41)
PLACES = [(1, 1), (2, 1), (4, 1), (8, 2), (16, 4)]


def measured(model: SpeedModel, places: list[tuple[int, int]], *batches: int) -> list[StepTime]:
    times = []
    for gpus, nodes in places:
        for batch in batches:
            columns = [np.array(float(value)) for value in (gpus, nodes, batch)]
            seconds, computing = model.pass_s(*columns), model.compute_s(columns[2])
            times.append(StepTime(gpus, float(seconds), nodes, batch, float(computing)))
    return times


def predicted(model: SpeedModel, gpus: int, nodes: int, batch: int) -> float:
    return float(model.pass_s(*(np.array(float(value)) for value in (gpus, nodes, batch))))


def test_a_fit_to_a_model_predicts_what_the_model_does() -> None:
    fit = fit_speed_model(measured(CIFAR, PLACES, 32, 256, 1024))
    assert fit.error < 0.05
    for gpus, nodes in [(3, 1), (12, 3)]:
        assert predicted(fit.model, gpus, nodes, 512) == pytest.approx(
            predicted(CIFAR, gpus, nodes, 512), rel=0.1
        )


def test_what_was_not_measured_is_taken_for_free() -> None:
    alone = fit_speed_model(measured(CIFAR, PLACES[:1], 128)).model
    assert predicted(alone, 16, 4, 128) == pytest.approx(predicted(alone, 1, 1, 128), rel=1e-3)
    pair = fit_speed_model(measured(CIFAR, PLACES[:2], 128)).model
    assert predicted(pair, 8, 2, 128) > 1.0 * predicted(pair, 2, 1, 128)
    assert predicted(pair, 4, 1, 128) == pytest.approx(predicted(pair, 2, 1, 128), rel=1e-3)


def test_half_of_the_computing_is_fixed_while_one_batch_has_been_measured() -> None:
    (time,) = measured(CIFAR, PLACES[:1], 128)
    fit = fit_speed_model([time])
    assert fit.model.alpha_c == pytest.approx((time.compute_s or 0.0) / 2)
    assert fit.error < 1e-3


def test_steps_without_their_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="samples a GPU"):
        fit_speed_model([StepTime(1, 2.0)])


def test_goodputs_of_many_noise_scales_are_those_of_each() -> None:
    batches, sizes, nodes = BatchRange(128, 4096, 32, 1024), (1, 2, 4, 8), (1, 1, 1, 2)
    noise = np.geomspace(1.0, 1e5, 300)
    together = BatchTable.from_model(CIFAR, batches, sizes, nodes).rates(noise)
    for row in (0, 127, 128, 299):
        alone = goodputs(CIFAR, batches, float(noise[row]), sizes, nodes).rate
        assert together[row].tolist() == alone.tolist()


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.builds(
            StepTime, st.integers(1, 64), st.floats(1e-3, 100), st.integers(1, 16),
            st.integers(1, 4096), st.none() | st.floats(1e-4, 50),
        ),
        min_size=1, max_size=8,
    )
)  # fmt: skip
def test_any_measured_steps_give_finite_positive_predictions(times: list[StepTime]) -> None:
    fit = fit_speed_model(times)
    assert all(np.isfinite(value) and value >= 0 for value in asdict(fit.model).values())
    assert np.isfinite(fit.error)
    assert 0 < predicted(fit.model, 64, 16, 512) < np.inf


def test_an_all_reduce_never_makes_a_pass_faster_than_its_computing() -> None:
    for gpus, nodes in PLACES:
        seconds = predicted(CIFAR, gpus, nodes, 512)
        assert seconds >= float(CIFAR.compute_s(np.array(512.0)))


@given(st.floats(1, 1e6), st.integers(1, 4096), st.floats(0, 1e6))
def test_a_larger_batch_makes_no_more_progress_a_sample(
    batch: float, initial: int, noise: float
) -> None:
    small, large = efficiency(np.array([batch, batch * 2]) + initial, initial, noise)
    assert 0 < large <= small <= 1


def test_more_noise_makes_larger_batches_worth_it() -> None:
    batches = BatchRange(128, 4096, 32, 1024)
    quiet = goodputs(CIFAR, batches, 100.0, [4], [1])
    noisy = goodputs(CIFAR, batches, 10_000.0, [4], [1])
    assert quiet.batch[0] < noisy.batch[0] <= 4096
    assert quiet.rate[0] < noisy.rate[0]


def test_a_size_that_no_batch_fits_has_no_rate() -> None:
    result = goodputs(CIFAR, BatchRange(128, 256, 64, 1024), 100.0, [1, 4, 8], [1, 1, 2])
    assert [bool(rate > 0) for rate in result.rate] == [True, True, False]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 8), st.floats(0, 1e5))
def test_the_best_batch_is_within_the_range(
    least_local: int, most_local: int, gpus: int, noise: float
) -> None:
    most_local += least_local
    batches = BatchRange(16, 16 + 8 * most_local, least_local, most_local)
    result = goodputs(CIFAR, batches, noise, [gpus], [1])
    if result.rate[0] > 0:
        assert batches.least_local * gpus <= result.batch[0] <= batches.most
