"""Whoever may edit a task in Airflow can write its records: what that does to other sweeps."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hermes_ops.airflow.control.policy_settings import PolicySettings
from hermes_ops.airflow.metadata_rows import RunRow, TaskInstanceRow
from hermes_ops.airflow.records import (
    CLOSE_KEY,
    HELD_POOL_SLOTS,
    LEASE_KEY,
    SEGMENT_KEY,
    STOP_KEY,
    CloseRecord,
    Lease,
    SegmentRecord,
    StopFlag,
    decode,
    encode,
)
from tests.unit.airflow.builders import lease, row, run_row
from tests.unit.airflow.control.controllers import Database, controller_of

SOUND: dict[str, Any] = {
    LEASE_KEY: lease(gpus=(7,)),
    SEGMENT_KEY: SegmentRecord(1, running=True, started_s=50.0),
    STOP_KEY: StopFlag(1, "another one", 60.0),
    CLOSE_KEY: CloseRecord("enough"),
}
KINDS = {LEASE_KEY: Lease, SEGMENT_KEY: SegmentRecord, STOP_KEY: StopFlag, CLOSE_KEY: CloseRecord}
FORGER = 5
"""The number of the trial with forged records; those of the other sweep are 0 and 1."""

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.just(10**30)
    | st.floats()
    | st.text(max_size=2)
)
values = leaves | st.lists(leaves | st.lists(leaves, max_size=2), max_size=2)


@st.composite
def forged(draw: st.DrawFn) -> dict[str, Any]:
    """Records of a trial, as JSON, with fields of which some are changed at will."""
    records = {}
    for key, sound in SOUND.items():
        if key == LEASE_KEY or draw(st.booleans()):
            document = encode(sound)
            changed = draw(st.dictionaries(st.sampled_from(sorted(document)), values, max_size=3))
            records[key] = json.loads(json.dumps({**document, **changed}))
    return records


class Forged(Database):
    """The database of two sweeps: one waits for GPUs, the other one's records are forged."""

    def __init__(self, records: dict[str, Any], state: str) -> None:
        super().__init__(run_row(), replace(run_row(), run_key=2, run_id="forged"))
        self.forged, self.state = records, state

    def trials(self, run: RunRow, task: str) -> tuple[TaskInstanceRow, ...]:
        if run.run_id != "forged":
            return row(0), row(1)
        slots = HELD_POOL_SLOTS if self.state == "scheduled" else 1
        return (row(FORGER, self.state, run_key=2, pool_slots=slots),)

    def records(self, run: RunRow) -> dict[tuple[str, int], dict[str, Any]]:
        if run.run_id != "forged":
            return {}
        of_plan = {k: v for k, v in self.forged.items() if k == CLOSE_KEY}
        return {("trial", FORGER): self.forged, ("plan", -1): of_plan}


SEGMENT = encode(SOUND[SEGMENT_KEY])


@example({LEASE_KEY: encode(SOUND[LEASE_KEY]), SEGMENT_KEY: SEGMENT | {"step": [1.0]}}, "running")
@example({LEASE_KEY: encode(SOUND[LEASE_KEY]) | {"granted_s": [1.5]}}, "scheduled")
@given(forged(), st.sampled_from(["scheduled", "queued", "running", "deferred", "success"]))
def test_forged_records_of_one_trial_do_not_keep_another_sweep_from_its_gpus(
    records: dict[str, Any], state: str
) -> None:
    controller = controller_of(Forged(records, state), PolicySettings.file())
    controller._round()
    journal: Any = controller.cluster.applier.client
    granted = {n for kind, n, key, *_ in journal.of("put") if key == LEASE_KEY}
    assert granted & {0, 1}


@given(forged())
def test_a_record_that_is_read_has_the_types_that_it_declares(records: dict[str, Any]) -> None:
    for key, document in records.items():
        kind: Any = KINDS[key]
        found = decode(kind, document)
        if found is not None:
            assert decode(kind, json.loads(json.dumps(encode(found)))) == found
            assert all(isinstance(gpu, int) for gpu in getattr(found, "gpus", ()))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_run_of_the_main_dag_does_not_take_the_place_of_another_dags_sweep(
    *, is_first: bool
) -> None:
    own = replace(run_row(), dag_id="team", run_id="digits-1")
    other = replace(run_row(), run_key=2, dag_id="hermes_sweep", run_id="team:digits-1")
    assert own.sweep_id == other.sweep_id
    runs = (other, own) if is_first else (own, other)
    cluster = controller_of(Database(*runs), PolicySettings.file()).cluster
    cluster.observe()
    assert [s.spec.run for s in cluster.sweeps.values()] == [own]
