"""The model of step times, its fit, and goodput."""

from __future__ import annotations

from dataclasses import asdict
from math import inf, log2

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hermes_ops.core.goodput import BatchTable, efficiency, goodputs
from hermes_ops.core.sizes import BatchRange, StepTime
from hermes_ops.core.speed_model import AllReduceSpeed, SpeedModel, fit_speed_model

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


def true_speed(gpus: int) -> float:
    return 1 / (8 / gpus + 0.3 * log2(gpus) / gpus + 2 * (gpus - 1) / gpus**2 + 0.1)


def test_speeds_of_its_own_form_are_found_again_at_sizes_that_were_not_measured() -> None:
    model = AllReduceSpeed.fit(tuple((gpus, true_speed(gpus)) for gpus in (1, 2, 4, 8, 16)))
    assert model.error < 1e-6
    assert model.speed(32) == pytest.approx(true_speed(32), rel=1e-4)


def test_the_error_is_that_of_the_measured_sizes() -> None:
    model = AllReduceSpeed.fit(((1, 1 / 6.37), (2, 1 / 3.78), (4, 1 / 2.21), (8, 1 / 1.40)))
    assert model.measured == 4
    assert 0 < model.error < 0.05


def test_with_one_measured_size_the_speed_up_is_linear() -> None:
    model = AllReduceSpeed.fit(((2, 3.0),))
    assert [model.speed(gpus) for gpus in (1, 2, 8)] == pytest.approx([1.5, 3.0, 12.0])
    assert model.error == pytest.approx(0.0)


def test_with_two_measured_sizes_a_part_of_the_work_does_not_shrink() -> None:
    model = AllReduceSpeed.fit(((1, 1 / 10.0), (2, 1 / 6.0)))
    assert model.speed(1_000) == pytest.approx(1 / 2.0, rel=0.01)


def test_a_speed_is_never_above_that_of_the_weights_that_are_not_negative() -> None:
    model = AllReduceSpeed.fit(((1, 1.0), (2, 3.0), (4, 9.0)))  # more than linear: not its form
    assert min(model.weights) >= 0
    assert model.error > 0.1


def test_a_fit_by_which_one_gpu_takes_no_time_is_linear() -> None:
    model = AllReduceSpeed.fit(((2, 1.0), (3, 1 / 3), (6, 1e-9)))
    assert model.weights[1:] == (0.0, 0.0, 0.0)
    assert model.speed(2) == pytest.approx(2 * model.speed(1))


@pytest.mark.parametrize("speeds", [(), ((0, 1.0),), ((1, 0.0),), ((1, float("nan")),)])
def test_no_speed_or_a_wrong_one_is_refused(speeds: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        AllReduceSpeed.fit(speeds)


@given(
    st.dictionaries(st.integers(1, 16), st.floats(1e-9, 1e9), min_size=1, max_size=5),
    st.integers(1, 64),
)
@example({1: 1 / 3, 2: 1e9, 3: 10.0}, 1)  # a size far too fast: nothing is left on one GPU
def test_a_speed_is_above_0_and_finite_whatever_was_measured(
    measured: dict[int, float], gpus: int
) -> None:
    assert 0 < AllReduceSpeed.fit(tuple(measured.items())).speed(gpus) < inf


@pytest.mark.parametrize("seconds", [(1e9, 1e-9, 1.0), (1e-9, 1e9, 1.0), (1.0, 1e9, 1e-9)])
def test_speeds_that_contradict_each_other_still_give_one_to_each_size(
    seconds: tuple[float, float, float],
) -> None:
    model = AllReduceSpeed.fit(tuple(zip((1, 2, 3), (1 / s for s in seconds), strict=True)))
    assert all(0 < model.speed(gpus) < 1e300 for gpus in (1, 2, 3, 64))
