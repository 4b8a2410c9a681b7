from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.airflow import state_store
from hermes_ops.airflow.records import LEASE_KEY, Lease, SegmentRecord, SweepRecord, decode, encode
from hermes_ops.airflow.state_store import KeyValues, piece_keys, read_record, write_record
from tests.unit.airflow.builders import lease, segment, sweep_file

LIMIT = 65_535  # Airflow's, of the JSON of one value
LONG = 10_000  # characters of one text of a sweep file
SCRIPTS = ("a", "語", "😀", "é", '"', "\\", "\u2028", "\x01")


class RefusedError(Exception):
    """The store takes no such value."""


@dataclass
class Store:
    """A task's values, by Airflow's rules; `dies_after` writes the writer is killed."""

    values: dict[str, str] = field(default_factory=dict)
    dies_after: int = 1_000_000

    def _step(self) -> None:
        if self.dies_after == 0:
            raise KeyboardInterrupt
        self.dies_after -= 1

    def read(self, key: str) -> object:
        return json.loads(self.values[key]) if key in self.values else None

    def write(self, key: str, value: object) -> None:
        self._step()
        text = json.dumps(value, allow_nan=False)
        if len(text) > LIMIT:
            raise RefusedError(f"{len(text)} bytes")
        self.values[key] = text

    def delete(self, key: str) -> None:
        self._step()
        self.values.pop(key, None)

    @property
    def own(self) -> KeyValues:
        return KeyValues(self.read, self.write, self.delete)


def wide(names: int, text: Any, **changes: Any) -> Lease:
    config = {f"p{n}": text for n in range(names)}
    variables = {f"HERMES_PARAM_P{n}": str(text) for n in range(names)}
    own = lease(config=config, environment=variables, command=("python", *map(str, config)))
    return replace(own, **changes)


@pytest.mark.parametrize("sign", SCRIPTS)
def test_a_lease_with_texts_of_the_allowed_length_comes_back_in_any_script(sign: str) -> None:
    store, own = Store(), wide(40, sign * LONG, command=("python", sign * LONG))
    write_record(store.own, LEASE_KEY, encode(own))
    assert decode(Lease, read_record(store.read, LEASE_KEY)) == own


def test_a_thousand_parameters_come_back_exactly() -> None:
    store, own = Store(), wide(1_000, 0.1 + 0.2)
    write_record(store.own, LEASE_KEY, encode(own))
    assert decode(Lease, read_record(store.read, LEASE_KEY)) == own


@pytest.mark.parametrize(
    "record",
    [
        segment(spans=tuple((n + 0.123456789, n + 0.987654321) for n in range(5_000))),
        SweepRecord(
            sweep_file(name="語" * 200, note=["語" * LONG] * 30),
            8,
            "trial",
            "parent",
            "7",
            "digits",
        ),
    ],
)
def test_every_kind_of_record_may_be_large(record: SegmentRecord | SweepRecord) -> None:
    store = Store()
    write_record(store.own, "hermes_any", encode(record))
    assert decode(type(record), read_record(store.read, "hermes_any")) == record


def test_a_small_record_is_one_value_and_nothing_is_read() -> None:
    store = Store()
    unread = KeyValues(lambda _: pytest.fail("it was read"), store.write, store.delete)
    write_record(unread, LEASE_KEY, encode(lease()))
    assert list(store.values) == [LEASE_KEY]


def test_a_new_grant_writes_the_head_alone() -> None:
    store, own = Store(), wide(1_000, 0.5)
    write_record(store.own, LEASE_KEY, encode(own))
    store.dies_after = 1
    write_record(store.own, LEASE_KEY, encode(replace(own, epoch=2, gpus=(1,))))
    found = decode(Lease, read_record(store.read, LEASE_KEY))
    assert found == replace(own, epoch=2, gpus=(1,))


def test_pieces_that_no_head_names_are_removed() -> None:
    store = Store()
    write_record(store.own, LEASE_KEY, encode(wide(1_000, 0.5)))
    write_record(store.own, LEASE_KEY, encode(wide(1_000, 0.25)))
    named = json.loads(store.values[LEASE_KEY])["pieces"].values()
    assert len(store.values) == 1 + sum(count for _, count in named)


def records(sign: str) -> Mapping[str, Any]:
    return encode(wide(60, sign * 3_000))


@settings(max_examples=25)
@given(dies_after=st.integers(0, 12))
def test_a_reader_sees_the_whole_old_record_or_the_whole_new_one(dies_after: int) -> None:
    store, old, new = Store(), records("a"), records("語")
    write_record(store.own, LEASE_KEY, old)
    store.dies_after = dies_after
    try:
        write_record(store.own, LEASE_KEY, new)
    except KeyboardInterrupt:
        assert read_record(store.read, LEASE_KEY) in (old, new)
    store.dies_after = 1_000_000
    write_record(store.own, LEASE_KEY, new)
    assert read_record(store.read, LEASE_KEY) == new


def test_a_reader_whose_pieces_are_removed_meanwhile_reads_the_new_record() -> None:
    store, new = Store(), records("b")
    write_record(store.own, LEASE_KEY, records("a"))
    old_head = store.read(LEASE_KEY)
    write_record(store.own, LEASE_KEY, new)
    heads = iter([old_head, store.read(LEASE_KEY)])
    found = read_record(lambda key: next(heads) if key == LEASE_KEY else store.read(key), LEASE_KEY)
    assert found == new


@pytest.mark.parametrize("damage", [None, "no base64", "", 7])
def test_a_record_with_a_damaged_piece_is_none(damage: object) -> None:
    store = Store()
    write_record(store.own, LEASE_KEY, records("a"))
    (piece, *_) = sorted(store.values.keys() - {LEASE_KEY})
    if damage is None:
        del store.values[piece]
    else:
        store.values[piece] = json.dumps(damage)
    assert read_record(store.read, LEASE_KEY) is None


def test_a_head_that_names_more_pieces_than_any_record_has_is_none_and_reads_none() -> None:
    indices: list[dict[str, list[object]]] = [
        {"config": ["x", 10**12]},
        {"config": ["x", 10**9], "more": ["x", -(10**9)]},
        {str(n): ["x", 1] for n in range(100)},
        {str(n): ["x", 999] for n in range(5_000)},
    ]
    for index in indices:
        head = {"pieces": index}
        store = Store({LEASE_KEY: json.dumps(head)})
        assert piece_keys(LEASE_KEY, head) == set()
        assert read_record(store.read, LEASE_KEY) is None


def test_a_field_that_unpacks_to_more_than_any_has_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    write_record(store.own, LEASE_KEY, records("a"))
    monkeypatch.setattr(state_store, "MOST_BYTES", 100_000)
    assert read_record(store.read, LEASE_KEY) is None
    monkeypatch.setattr(state_store, "MOST_BYTES", 100_000_000)
    assert read_record(store.read, LEASE_KEY) == records("a")


@pytest.mark.parametrize("head", [{"pieces": 3}, {"pieces": {"config": 1}}, {"pieces": None}, []])
def test_what_is_no_record_is_no_trouble(head: object) -> None:
    store = Store({LEASE_KEY: json.dumps(head)})
    assert decode(Lease, read_record(store.read, LEASE_KEY)) is None
    write_record(store.own, LEASE_KEY, records("a"))
    assert read_record(store.read, LEASE_KEY) == records("a")
