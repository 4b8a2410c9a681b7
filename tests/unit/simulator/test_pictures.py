from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.model import Gpu, JobId, Point
from hermes_ops.simulator import pictures
from hermes_ops.simulator.pictures import cdf, in_use, quartiles_over_time
from hermes_ops.simulator.workload import (
    JobOutcome,
    SimulatedSegment,
    SimulationRun,
    Work,
    Workload,
)


def run(*segments: tuple[int, tuple[int, ...], float, float, str], gpus: int = 2) -> SimulationRun:
    numbers = sorted({s[0] for s in segments})
    works = tuple(Work(JobId(f"s/{n}"), 0.0, 1.0, curve=(Point(1, n + 1.0, 1.0),)) for n in numbers)
    outcomes = tuple(JobOutcome(w, "finished", 0.0, 1.0, 1.0, 1.0, 0.0, 0, 0.0) for w in works)
    found = tuple(
        SimulatedSegment(JobId(f"s/{n}"), g, b, e, 0.0, how) for n, g, b, e, how in segments
    )
    pool = tuple(Gpu(i) for i in range(gpus))
    return SimulationRun(Workload("drawn", works), pool, "fifo", outcomes, found)


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def drawn_axes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The axes of the pictures that are drawn from now on."""
    seen: list[Any] = []

    def kept(figure: Any) -> bytes:
        seen.extend(figure.axes)
        return b""

    monkeypatch.setattr(pictures, "png", kept)
    return seen


@given(st.lists(st.floats(0, 1e9), max_size=50))
def test_a_distribution_rises_to_one(values: list[float]) -> None:
    xs, ys = cdf(values)
    assert xs == sorted(values)
    assert ys == sorted(ys)
    assert ys[-1:] == ([1.0] if values else [])
    assert all(0 < y <= 1 for y in ys)


def test_half_of_four_jobs_were_done_by_the_second() -> None:
    assert cdf([4.0, 1.0, 3.0, 2.0]) == ([1.0, 2.0, 3.0, 4.0], [0.25, 0.5, 0.75, 1.0])


def test_every_policy_has_its_line_of_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = drawn_axes(monkeypatch)
    pictures.completion_cdf({"fifo": [1.0, 2.0], "asha": [1.0, 9.0]})
    (axes,) = seen
    assert [line.get_label() for line in axes.lines] == ["fifo", "asha"]
    assert list(axes.lines[1].get_xdata()) == [1.0, 9.0]
    assert axes.get_xscale() == "linear"


def test_times_of_very_different_size_are_drawn_logarithmically(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = drawn_axes(monkeypatch)
    pictures.completion_cdf({"fifo": [0.0, 1.0, 1000.0]})
    assert seen[0].get_xscale() == "log"


def test_pictures_of_nothing_are_pictures() -> None:
    for png in (
        pictures.completion_cdf({"fifo": []}),
        pictures.regret_curves({"fifo": [()]}),
        pictures.gpu_timeline(run()),
    ):
        assert min(size_of(png)) > 100


def test_the_middle_of_three_seeds_is_the_middle_one_at_each_time() -> None:
    seeds = [((1.0, 9.0), (4.0, 0.0)), ((2.0, 8.0), (3.0, 1.0)), ((0.0, 7.0),)]
    grid, (low, middle, high) = quartiles_over_time(seeds, 6.0)
    assert list(grid) == [2.0, 3.0, 4.0, 6.0]
    assert list(middle) == [8.0, 7.0, 1.0, 1.0]
    assert list(low) == [7.5, 4.0, 0.5, 0.5]
    assert np.all(low <= middle)
    assert np.all(middle <= high)


def test_regret_is_drawn_with_its_quartiles_and_zero_at_the_bottom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = drawn_axes(monkeypatch)
    steps = [((1.0, 2.0), (5.0, 0.0)), ((1.0, 4.0), (6.0, 0.0))]
    pictures.regret_curves({"fifo": steps, "never": [()]})
    (axes,) = seen
    (line,) = axes.lines
    assert list(line.get_ydata()) == [3.0, 2.0, pytest.approx(4e-4)]
    assert axes.get_ylim()[0] == pytest.approx(4e-4)
    assert len(axes.collections) == 1


def test_each_gpu_of_a_segment_has_a_bar_and_each_preemption_an_edge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = drawn_axes(monkeypatch)
    pictures.gpu_timeline(
        run((0, (0, 1), 0.0, 10.0, "preempted"), (1, (0,), 10.0, 30.0, "finished"), gpus=3)
    )
    (axes,) = seen
    bars, cuts = axes.collections
    assert len(bars.get_paths()) == 3
    assert len(cuts.get_segments()) == 2
    assert sorted(t.get_text() for t in axes.texts) == ["0", "0", "1"]
    assert axes.get_ylim() == (2.5, -0.5)
    assert axes.get_xlim() == (0.0, 30.0)


def test_the_best_trial_alone_has_a_dark_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = drawn_axes(monkeypatch)
    pictures.gpu_timeline(run((0, (0,), 0.0, 10.0, "finished"), (1, (1,), 0.0, 10.0, "finished")))
    dark = [sum(edge[:3]) < 0.5 for edge in seen[0].collections[0].get_edgecolors()]
    assert dark == [True, False]


def test_of_too_many_bars_the_gpus_in_use_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = drawn_axes(monkeypatch)
    monkeypatch.setattr(pictures, "MOST_BARS", 1)
    pictures.gpu_timeline(run((0, (0,), 0.0, 10.0, "finished"), (1, (1,), 5.0, 12.0, "finished")))
    assert seen[0].get_ylabel() == "GPUs in use"


def test_the_gpus_in_use_rise_and_fall_with_the_segments() -> None:
    found = run((0, (0,), 0.0, 10.0, "finished"), (1, (0, 1), 10.0, 12.0, "finished"))
    times, counts = in_use(found)
    assert list(times) == [0.0, 10.0, 12.0]
    assert list(counts) == [1, 2, 0]


def test_a_timeline_begins_with_the_first_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = drawn_axes(monkeypatch)
    made = run((0, (0,), 100.0, 110.0, "finished"))
    late = replace(made.workload.jobs[0], submitted_s=90.0)
    pictures.gpu_timeline(replace(made, workload=Workload("late", (late,))))
    (bar,) = seen[0].collections[0].get_paths()
    assert list(bar.vertices[:2, 0]) == [10.0, 20.0]
