from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.model import PastTrial, Point
from hermes_ops.errors import ConfigError
from hermes_ops.simulator.curves import CurveDataset, read_curves, sample
from hermes_ops.simulator.workload import Costs


def arrays(rows: int = 12, epochs: int = 3) -> dict[str, Any]:
    """Row r: hyper-parameters (r / 2, r), losses falling to r + 1, r + 1 seconds an epoch."""
    row = np.arange(rows, dtype=np.float32)
    return {
        "hyperparameter_names": np.array(["rate", "layers"]),
        "configs": np.stack((row / 2, row), axis=1),
        "val_loss": row[:, None] + 1.0 + np.arange(epochs)[::-1],
        "val_accuracy": np.zeros((rows, epochs)),
        "elapsed_s": (row[:, None] + 1.0) * np.arange(1, epochs + 1),
    }


def saved(folder: Path, **changes: Any) -> Path:
    path = folder / "small.npz"
    kept = {k: v for k, v in {**arrays(), **changes}.items() if v is not None}
    np.savez(path, **kept)
    return path


def curves(rows: int = 12) -> CurveDataset:
    made = arrays(rows)
    names = tuple(str(n) for n in made.pop("hyperparameter_names"))
    return CurveDataset("small", names, **made)


def complaint(path: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        read_curves(path)
    return str(refused.value)


def test_a_file_is_read_with_its_names_and_shapes(tmp_path: Path) -> None:
    found = read_curves(saved(tmp_path))
    assert (found.name, len(found), found.epochs) == ("small", 12, 3)
    assert found.hyperparameter_names == ("rate", "layers")
    assert found.curve(4) == (Point(1, 7.0, 5.0), Point(2, 6.0, 10.0), Point(3, 5.0, 15.0))


def test_a_column_of_whole_numbers_becomes_integers_and_no_other_does() -> None:
    found = curves().configuration(4)
    assert found == (("rate", 2.0), ("layers", 4))
    assert [type(value) for _, value in found] == [float, int]


def test_a_column_with_an_infinite_value_has_no_integers(tmp_path: Path) -> None:
    given = arrays()
    given["configs"][0, 1] = np.inf
    pairs = read_curves(saved(tmp_path, configs=given["configs"])).configuration(0)
    assert [type(value) for _, value in pairs][1] is float


def test_an_archive_that_is_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "damaged.npz"
    np.savez_compressed(path, **arrays(rows=200))
    data, names = bytearray(path.read_bytes()), zipfile.ZipFile(path)
    for member in names.infolist():  # no compressed block begins with these bits
        lengths = struct.unpack_from("<HH", data, member.header_offset + 26)
        data[member.header_offset + 30 + sum(lengths)] = 0xFF
    path.write_bytes(data)
    assert "an .npz of plain arrays" in complaint(path)


def test_every_missing_key_is_named_at_once(tmp_path: Path) -> None:
    said = complaint(saved(tmp_path, val_loss=None, configs=None))
    assert "val_loss: found nothing" in said
    assert "configs: found nothing" in said


@pytest.mark.parametrize("key", ["configs", "val_accuracy", "elapsed_s"])
def test_a_wrong_shape_is_named_with_the_right_one(tmp_path: Path, key: str) -> None:
    said = complaint(saved(tmp_path, **{key: np.ones((2, 5))}))
    assert f"{key}: found shape [2, 5]; allowed: [12, {2 if key == 'configs' else 3}]" in said


def test_losses_that_are_no_table_are_refused(tmp_path: Path) -> None:
    assert "val_loss" in complaint(saved(tmp_path, val_loss=np.ones(3)))


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -1.0, 3.0])
def test_seconds_that_are_no_number_or_fall_are_refused_with_their_place(
    tmp_path: Path, value: float
) -> None:
    seconds = arrays()["elapsed_s"]
    seconds[3, 1] = value  # 4 seconds before it
    assert "elapsed_s[3, 1]: found" in complaint(saved(tmp_path, elapsed_s=seconds))


def test_seconds_may_stand_still(tmp_path: Path) -> None:
    seconds = arrays()["elapsed_s"]
    seconds[3, 1] = seconds[3, 0]
    assert read_curves(saved(tmp_path, elapsed_s=seconds)).elapsed_s[3, 1] == 4.0


def test_pickled_arrays_are_refused_and_never_run(tmp_path: Path) -> None:
    class Mine:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    names = np.array([Mine(), Mine()], dtype=object)
    assert "the file" in complaint(saved(tmp_path, hyperparameter_names=names))
    assert not (tmp_path / "ran").exists()


def test_text_in_place_of_numbers_is_refused(tmp_path: Path) -> None:
    said = complaint(saved(tmp_path, configs=np.full((12, 2), "adam")))
    assert "configs: found type <U4; allowed: numbers" in said


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"a,b\n1,2\n"])
def test_a_file_that_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "torn.npz"
    path.write_bytes(content)
    assert "torn.npz is not valid" in complaint(path)


def test_a_single_array_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.ones(3))
    assert "the file" in complaint(tmp_path / "one.npy")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "gone.npz" in complaint(tmp_path / "gone.npz")


def test_a_drawn_trial_is_its_row() -> None:
    costs = Costs(startup_s=3.0)
    workload, prior = sample(curves(), 4, 7, costs=costs)
    assert prior == ()
    assert [w.id for w in workload.jobs] == [f"small-7/{n}" for n in range(4)]
    for work in workload.jobs:
        row = int(dict(work.configuration)["layers"])
        assert work.curve == curves().curve(row)
        assert work.seconds == 3.0 * (row + 1)
        assert (work.total_steps, work.costs, work.submitted_s) == (3, costs, 0.0)
        assert work.sweep == "small-7"


def rows_of(trials: Any) -> list[int]:
    return [int(dict(t.configuration)["layers"]) for t in trials]


@given(seed=st.integers(0, 1000), trials=st.integers(1, 4), priors=st.integers(0, 2))
def test_no_configuration_is_drawn_twice_and_priors_change_no_sweep(
    seed: int, trials: int, priors: int
) -> None:
    workload, prior = sample(curves(), trials, seed, prior_sweeps=priors)
    assert workload == sample(curves(), trials, seed)[0]
    assert len(workload.jobs) == trials
    assert len(prior) == trials * priors
    drawn = rows_of((*workload.jobs, *prior))
    assert len(set(drawn)) == len(drawn)
    assert all(p == PastTrial(p.configuration, curves().curve(r), 3)
               for p, r in zip(prior, rows_of(prior), strict=True))  # fmt: skip


def test_another_seed_draws_another_sweep() -> None:
    drawn = {tuple(rows_of(sample(curves(), 6, seed)[0].jobs)) for seed in range(5)}
    assert len(drawn) == 5


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        ({"trials": 0}, "trials: found 0"),
        ({"trials": 13}, "trials: found 13; allowed: 1 to 12"),
        ({"trials": 5, "prior_sweeps": 2}, "5 trials and 2 earlier sweeps"),
        ({"trials": 3, "good": 4}, "good: found 4; allowed: 1 to 3"),
        ({"trials": 12, "good": 12}, "good: found 12 of 12"),
    ],
)
def test_a_draw_that_is_not_possible_says_what_is(ask: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        sample(curves(), seed=0, **ask)
    assert named in str(refused.value)


@given(seed=st.integers(0, 200), good=st.integers(1, 6))
def test_a_set_has_exactly_as_many_good_ones_as_asked(seed: int, good: int) -> None:
    many = arrays(400)
    many["val_loss"] = many["val_loss"] + 500.0  # 1 % are five rows and more
    names = tuple(str(n) for n in many.pop("hyperparameter_names"))
    workload, prior = sample(
        CurveDataset("many", names, **many), 20, seed, good=good, prior_sweeps=1
    )
    lowest = [min(p.loss for p in w.curve) for w in workload.jobs]
    assert sum(loss <= 1.01 * min(lowest) for loss in lowest) == good
    drawn = rows_of((*workload.jobs, *prior))
    assert len(set(drawn)) == 40
