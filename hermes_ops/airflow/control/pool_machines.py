"""The machines of a pool in one round: which GPUs may be granted, and how many slots there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hermes_ops.airflow.clock_steps import is_due
from hermes_ops.airflow.control.machine_watch import Absence, MachineWatch
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.airflow.machines import MachineSlots
from hermes_ops.airflow.metadata_rows import OCCUPYING

RECHECK_S = 10.0
"""Seconds after which the pool's slots are set again: a person may have changed them."""


class Pools(Protocol):
    """Airflow's pools."""

    def resize_pool(self, name: str, slots: int) -> None:
        """Give the pool that many slots; NotPermitted if Airflow does not let this user."""


@dataclass(slots=True)
class PoolMachines:
    """The machines of one pool, none where it has none; the workers that are alive count."""

    machines: MachineSlots = field(default_factory=MachineSlots)
    watch: MachineWatch | None = None
    away: Mapping[str, Absence] = field(default_factory=dict)
    _slots: int = -1
    _again_s: float = 0.0

    def refresh(self) -> None:
        """See which machines are away; Unavailable before that is known."""
        if self.watch is not None:
            self.away = self.watch.away()

    def close(self) -> None:
        """End the watch."""
        if self.watch is not None:
            self.watch.close()

    @property
    def lendable(self) -> frozenset[int] | None:
        """Return the slots whose GPUs may be granted now; None: all of the pool."""
        if not self.machines.of_slot:
            return None
        return self.machines.slots_of(n for n in self.machines.names if n not in self.away)

    def follow(self, pool: str, pools: Pools, trials: Iterable[TrialRecords], now_s: float) -> None:
        """Set the pool's slots to the GPUs of the machines that are there.

        Tasks that Airflow still counts on a machine that is away keep their slots until it gives
        them up: nobody else waits for those meanwhile.
        """
        lendable = self.lendable
        if lendable is None:
            return
        slots = len(lendable) + sum(
            trial.row.pool_slots
            for trial in trials
            if trial.row.state in OCCUPYING
            and trial.lease is not None
            and trial.lease.machine in self.away
        )
        if slots != self._slots or is_due(now_s, self._again_s, RECHECK_S):
            pools.resize_pool(pool, slots)
            self._slots, self._again_s = slots, now_s + RECHECK_S

    def view(self) -> dict[str, Any]:
        """Return what people see of the machines."""
        return {name: self._machine(name) for name in self.machines.names}

    def _machine(self, name: str) -> dict[str, Any]:
        slots, absence = self.machines.slots_of([name]), self.away.get(name)
        known: dict[str, Any] = {"first_gpu": min(slots), "gpus": len(slots)}
        if absence is not None:
            known |= {"away_since_s": absence.since_s, "reason": absence.reason}
        return known
