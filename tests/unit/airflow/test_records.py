from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.airflow.records import (
    CloseRecord,
    Lease,
    SegmentRecord,
    StopFlag,
    SweepRecord,
    decode,
    encode,
    is_active,
)
from tests.unit.airflow.builders import flag, lease, segment, sweep_record

TIMES = st.floats(0, 2e9)


@given(
    st.builds(
        SegmentRecord,
        epoch=st.integers(0),
        running=st.booleans(),
        started_s=TIMES,
        spans=st.lists(st.tuples(TIMES, TIMES)).map(tuple),
        gpus=st.lists(st.integers(0, 15)).map(tuple),
        checkpoint_s=st.none() | TIMES,
        final=st.none() | st.text(),
    )
)
def test_a_record_comes_back_from_json_as_it_was(record: SegmentRecord) -> None:
    assert decode(SegmentRecord, json.loads(json.dumps(encode(record)))) == record


@pytest.mark.parametrize("record", [lease(), flag(), CloseRecord("no money", "cancelled", 3.0)])
def test_every_kind_of_record_comes_back_as_it_was(record: Any) -> None:
    assert decode(type(record), json.loads(json.dumps(encode(record)))) == record


def test_an_encoded_record_has_lists_where_airflow_refuses_tuples() -> None:
    assert encode(segment(spans=((1.0, 2.0),)))["spans"] == [[1.0, 2.0]]


def test_keys_of_a_newer_release_are_ignored() -> None:
    assert decode(StopFlag, {**encode(flag()), "colour": "red"}) == flag()


@pytest.mark.parametrize("value", [None, "text", 3, [], {}, {"epoch": 1}])
def test_what_is_no_record_is_none(value: object) -> None:
    assert decode(Lease, value) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"epoch": "one"},
        {"granted_s": float("nan")},
        {"granted_s": float("inf")},
        {"gpus": [-1]},
        {"gpus": [0, 0]},
        {"gpus": ["a"]},
        {"gpus": 1},
        {"config": []},
        {"command": [1]},
        {"environment": {"A": 1}},
        {"machine": "m" * 201},
    ],
)
def test_a_lease_with_a_value_of_another_kind_is_none(changed: dict[str, object]) -> None:
    assert decode(Lease, encode(lease())) == lease()
    assert decode(Lease, {**encode(lease()), **changed}) is None


def test_a_sweep_record_keeps_its_configuration() -> None:
    found = decode(SweepRecord, sweep_record())
    assert found is not None
    assert found.config["search"]["space"]["rate"]["high"] == 0.1


@pytest.mark.parametrize(
    ("own", "last", "active"),
    [
        (None, None, False),
        (None, segment(1), False),
        (lease(1), None, True),
        (lease(2), segment(1, running=False), True),
        (lease(2), segment(1), True),
        (lease(2), segment(2), True),
        (lease(2), segment(2, running=False), False),
        (lease(2), segment(3), False),
        (lease(2, revoked=True), None, False),
        (lease(2, revoked=True), segment(2), False),
    ],
)
def test_a_lease_is_in_force_until_it_is_revoked_or_used_up(
    own: Lease | None, last: SegmentRecord | None, active: bool
) -> None:
    assert is_active(own, last) is active


def test_a_lease_and_a_segment_of_an_earlier_version_have_one_process_and_no_batch() -> None:
    added = ("workers", "tf_config", "most_gpus", "batch", "samples")
    old = {k: v for k, v in encode(lease(gpus=(0, 1))).items() if k not in added}
    found = decode(Lease, old)
    assert found is not None
    assert (found.workers, found.worker_count, found.batch, found.samples) == (
        "one_process", 1, None, None,
    )  # fmt: skip
    old = {k: v for k, v in encode(segment()).items() if k not in ("batch", "batches")}
    assert decode(SegmentRecord, old) == segment()
