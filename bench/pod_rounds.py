"""The live controller on a pool of `bench.pod_trials`: `python -m bench.pod_rounds CASE RESULT`.

CASE is a file with a `DriverCase` as JSON; the figures go to the file RESULT. The environment is
that of a stack whose own controller and scheduler do not run.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.measure import Figures, figures
from bench.pod_driver import DriverCase
from bench.pod_trials import StubCurveFeed, World
from bench.pod_world import Fleet, Rows, sweep_config
from hermes_ops.airflow.control.controller import Controller, build
from hermes_ops.airflow.control.monitoring import Monitor
from hermes_ops.airflow.control.policy_settings import PolicySettings
from hermes_ops.airflow.trial.metrics import tracking_uri
from hermes_ops.core.model import Snapshot
from hermes_ops.core.plan import Action
from hermes_ops.tracking import Tracker

POOL = "gpus"


@dataclass(frozen=True, slots=True)
class Round:
    """The times of one round."""

    took_s: float
    cpu_s: float
    observe_s: float
    decide_s: float
    actions: int


class Rounds(Monitor):
    """The controller's monitor, which also records each round and runs what follows it."""

    def __init__(self, after: Callable[[list[Round]], None]) -> None:
        super().__init__(POOL)
        self.kept: list[Round] = []
        self._after = after
        self._actions = 0
        self._decided = (0.0, 0.0)

    @contextmanager
    def round(self) -> Iterator[None]:
        """Time one round."""
        self._actions = 0
        begun_s, cpu_s = time.perf_counter(), time.thread_time()
        with super().round():
            yield
        took_s, used_s = time.perf_counter() - begun_s, time.thread_time() - cpu_s
        before_s, after_s = self._decided
        decide_s = after_s - before_s
        self.kept.append(Round(took_s, used_s, before_s - begun_s, decide_s, self._actions))
        self._after(self.kept)

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Time one decision."""
        begun_s = time.perf_counter()
        with super().deciding():
            yield
        self._decided = (begun_s, time.perf_counter())

    def decided(self, snapshot: Snapshot, actions: Sequence[Action]) -> None:
        """Count the actions of a round."""
        self._actions += len(actions)
        super().decided(snapshot, actions)


WARM = 5
"""Warm-up rounds, in which modules are imported and connections opened."""
ORPHAN = 1_000_000
"""A trial number that the sweep does not have."""


@dataclass(slots=True)
class Run:
    """The run of the controller in that world, from its first round to the last one."""

    world: World
    controller: Controller
    sweep: str
    begun_s: float = 0.0
    made_s: float = 0.0
    gone_s: float | None = None
    calls: list[dict[str, int]] = field(default_factory=list)

    def after(self, kept: list[Round]) -> None:
        """Advance the trials; record requests to the cluster's API; end after the last round."""
        fleet = self.world.fleet
        if len(kept) == WARM:
            self.calls.append(fleet.calls())
            self.begun_s = self.made_s = time.monotonic()
            fleet.run(self.sweep, ORPHAN, 1, self.world.nodes[0])
        elif (
            len(kept) > WARM
            and self.gone_s is None
            and fleet.is_being_deleted(self.sweep, ORPHAN, 1)
        ):
            self.gone_s = time.monotonic() - self.made_s
        if len(kept) >= WARM + self.world.case.rounds:
            self.calls.append(fleet.calls())
            self.controller.end()
        else:
            self.world.go_on(self.controller.cluster.sweeps)

    def figures(self, kept: list[Round]) -> Figures:
        """Return all figures."""
        rounds, minutes = kept[WARM:], (time.monotonic() - self.begun_s) / 60.0
        before, first, last = self.calls
        return {
            "loop_ms": _ms([r.took_s for r in rounds]),
            "loop_without_an_action_ms": _ms([r.took_s for r in rounds if not r.actions]),
            "loop_with_actions_ms": _ms([r.took_s for r in rounds if r.actions]),
            "first_loop_ms": round(kept[0].took_s * 1000.0),
            "cpu_ms": _ms([r.cpu_s for r in rounds]),
            "observe_ms": _ms([r.observe_s for r in rounds]),
            "decide_ms": _ms([r.decide_s for r in rounds]),
            "apply_ms": _ms([r.took_s - r.observe_s - r.decide_s for r in rounds]),
            "actions_a_round": figures(r.actions for r in rounds),
            "lists_at_start": first["list"] - before["list"],
            "lists_a_minute": round((last["list"] - first["list"]) / minutes, 2),
            "watches_a_minute": round((last["watch"] - first["watch"]) / minutes, 2),
            "orphan_deleted_after_s": None if self.gone_s is None else round(self.gone_s, 1),
            "pods": self.world.fleet.count(),
            "nodes": len(set(self.world.nodes)),
        }


def _ms(seconds: list[float]) -> Figures:
    found = sorted(seconds)
    p95 = found[min(len(found) - 1, int(len(found) * 0.95))] if found else None
    return {
        **figures((s * 1000.0 for s in found), 1),
        "p95": None if p95 is None else round(p95 * 1000.0, 1),
    }


def measured(case: DriverCase) -> Figures:
    """Create the world, run the controller in it, and remove the world."""
    PolicySettings(case.policy).write(PolicySettings.file())
    controller, curves = build(POOL), StubCurveFeed()
    controller.cluster.curves.close()
    controller.cluster.curves = curves  # type: ignore[assignment]
    spec = sweep_config("spec", 1, case.namespace).trial.pod
    assert spec is not None
    fleet = Fleet(case.namespace, spec)
    rows = Rows(controller.cluster.metadata.engine, POOL)
    world = World(case, rows, fleet, curves, random.Random(case.seed))
    sweeps = []
    try:
        sweeps = world.make(Tracker(tracking_uri()))
        run = Run(world, controller, sweeps[0])
        rounds = Rounds(run.after)
        controller.monitor = controller.cluster.applier.monitor = rounds
        run.calls.append(fleet.calls())
        controller.run()
        return run.figures(rounds.kept)
    finally:
        for sweep in sweeps:
            rows.end(sweep)
        fleet.clear()


def main(case: str, result: str) -> None:
    """Measure the case in that file."""
    logging.basicConfig(level=logging.WARNING)
    found = measured(DriverCase(**json.loads(Path(case).read_text())))
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
