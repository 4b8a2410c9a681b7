"""The sizes and batches of a job."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.model import Gpu, Grant, Phase, Plan, Snapshot
from hermes_ops.core.plan import Resize, check, diff
from hermes_ops.core.sizes import BatchRange, powers_of_two
from hermes_ops.errors import ConfigError, PlanError
from tests.builders import job, world


@pytest.mark.parametrize(
    "values", [(0, 8, 1, None), (8, 4, 1, None), (8, 16, 0, 4), (8, 16, 8, 4), (2, 4, 8, None)]
)
def test_a_range_of_batches_that_no_size_allows_is_refused(
    values: tuple[int, int, int, int | None],
) -> None:
    with pytest.raises(ConfigError):
        BatchRange(*values)


@given(st.integers(1, 64), st.integers(1, 64))
def test_powers_of_two_are_all_of_the_range(least: int, most: int) -> None:
    expected = [n for n in range(least, most + 1) if n.bit_count() == 1]
    assert list(powers_of_two(least, most)) == expected


@given(st.integers(1, 512), st.integers(1, 16))
def test_a_batch_fits_on_each_gpu_in_its_passes_and_in_no_fewer(batch: int, gpus: int) -> None:
    passes = BatchRange(1, 512, most_local=7).passes(batch, gpus)
    assert passes * 7 * gpus >= batch
    assert passes == 1 or (passes - 1) * 7 * gpus < batch


def test_a_job_takes_the_sizes_of_its_list_alone() -> None:
    sized = job("s/a", min_gpus=1, max_gpus=8, sizes=(1, 2, 8))
    assert list(sized.sizes_up_to(7)) == [1, 2]
    assert [n for n in range(10) if sized.takes(n)] == [1, 2, 8]
    with pytest.raises(PlanError, match="1 or 2 or 8"):
        check(world(sized, gpus=4), Plan((Grant(sized.id, (0, 1, 2)),)))


def test_a_batch_outside_of_the_range_is_refused() -> None:
    sized = job("s/a", batch_range=BatchRange(32, 128, least_local=32), max_gpus=4)
    snapshot = world(sized, gpus=4)
    check(snapshot, Plan((Grant(sized.id, (0, 1), batch=64),)))
    with pytest.raises(PlanError, match="32 to 128"):
        check(snapshot, Plan((Grant(sized.id, (0, 1, 2, 3), batch=96),)))
    with pytest.raises(PlanError, match="no range"):
        check(world(job("s/b")), Plan((Grant(job("s/b").id, (0,), batch=96),)))


def test_another_batch_on_the_same_gpus_is_a_resize_and_no_batch_keeps_the_one_there_is() -> None:
    runs = job("s/a", Phase.RUNNING, gpus_held=(0,), batch_range=BatchRange(32, 128), batch_held=32)
    snapshot = Snapshot(0.0, (Gpu(0),), (runs,))
    (action,) = diff(snapshot, Plan((Grant(runs.id, (0,), batch=64),)))
    assert isinstance(action, Resize)
    assert action.batch == 64
    assert diff(snapshot, Plan((Grant(runs.id, (0,)),))) == ()
    assert diff(snapshot, Plan((Grant(runs.id, (0,), batch=32),))) == ()
