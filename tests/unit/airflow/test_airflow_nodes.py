"""Which nodes a pool's slots stand for, from the setting to the lease."""

from __future__ import annotations

import pytest

from hermes_ops.airflow.control.nodes import VARIABLE, leased_nodes, node_names
from hermes_ops.airflow.control.running import usable_gpus
from hermes_ops.airflow.metadata import PoolRow
from hermes_ops.core.model import Snapshot
from hermes_ops.errors import HermesError


def test_the_slots_are_the_nodes_gpus_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert node_names() == ()
    monkeypatch.setenv(VARIABLE, "node-a=2, node-b=1")
    assert node_names() == ("node-a", "node-a", "node-b")


@pytest.mark.parametrize("text", ["node-a", "node-a=x", "=2", "a=1;b=2"])
def test_another_form_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(HermesError, match="NODE=GPUS"):
        node_names()


def test_a_lease_names_the_nodes_of_its_gpus_and_none_on_one_machine() -> None:
    named = Snapshot(0.0, usable_gpus(PoolRow(4, 0), (), ("a", "a", "b")), ())
    assert [g.node for g in named.gpus] == ["a", "a", "b", "local"]
    assert leased_nodes(named, (1, 2)) == ("a", "b")
    assert leased_nodes(named, (0, 1)) == ("a",)
    assert leased_nodes(Snapshot(0.0, usable_gpus(PoolRow(2, 0), ()), ()), (0,)) == ()
