from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.cli.simulation_options import contenders
from hermes_ops.core.guards import guarded
from hermes_ops.core.model import JobId, PastTrial, Point
from hermes_ops.core.quota import Quota, TeamQuota
from hermes_ops.errors import ConfigError
from hermes_ops.policies import POLICIES
from hermes_ops.policies.fifo import Fifo
from hermes_ops.policies.hermes import Hermes
from hermes_ops.policies.yarn_cs import YarnCs
from hermes_ops.simulator import comparison as module
from hermes_ops.simulator.comparison import (
    Comparison,
    Contender,
    Interval,
    PolicyResult,
    compare,
    simulate_seed,
)
from hermes_ops.simulator.engine import layout
from hermes_ops.simulator.metrics import Metrics
from hermes_ops.simulator.tables import cell, comparison_rows, document, number
from hermes_ops.simulator.workload import Work, Workload
from hermes_ops.simulator.workload_source import (
    CurvesSource,
    DrawnWorkload,
    PoissonSource,
    TraceSource,
)

QUOTA = Quota((TeamQuota("a", 3), TeamQuota("b")))
FIFO, ASHA, BOUND = Contender("fifo"), Contender("asha"), Contender("oracle-best")


@dataclass(frozen=True)
class Drawn:
    """Three trials a seed on falling curves; remembers what was drawn."""

    name: str = "drawn"
    varies: bool = True
    seen: list[tuple[int, Workload]] = field(default_factory=list)

    def draw(self, seed: int) -> DrawnWorkload:
        chance = np.random.default_rng(seed)
        works = []
        for n, (seconds, loss) in enumerate(chance.uniform(1, 9, size=(3, 2))):
            points = (Point(e, loss + 3 - e, seconds * e / 3) for e in (1, 2, 3))
            works.append(Work(JobId(f"t/{n}"), 0.0, seconds, curve=tuple(points), total_steps=3))
        found = DrawnWorkload(Workload(f"drawn-{seed}", tuple(works)))
        self.seen.append((seed, found.workload))
        return found


@pytest.fixture
def curves(tmp_path: Path) -> Path:
    row = np.arange(20.0)[:, None]
    epoch = np.arange(1.0, 5.0)
    path = tmp_path / "small.npz"
    names = np.array(["rate"])
    np.savez(path, hyperparameter_names=names, configs=row, val_loss=(row * 7) % 20 + 1 / epoch,
             val_accuracy=np.zeros((20, 4)), elapsed_s=(row % 3 + 1) * epoch)  # fmt: skip
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "two.csv"
    path.write_text("job_id,submit_time_s,num_gpus,duration_s\na,0,2,10\nb,0,1,5\n")
    return path


def metrics(**changes: Any) -> Metrics:
    numbers: dict[str, Any] = dict.fromkeys(Metrics.__dataclass_fields__, 1.0)
    return Metrics(**{**numbers, **changes})


def comparison(values: Mapping[str, tuple[float | None, ...]]) -> Comparison:
    results = [
        PolicyResult(policy, seed, metrics(time_to_best_seconds=value), (1.0,), ((1.0, 0.0),))
        for policy, found in values.items()
        for seed, value in enumerate(found)
    ]
    seeds = tuple(range(len(next(iter(values.values())))))
    return Comparison("made", 4, seeds, tuple(values), tuple(results))


# -- the same workloads for all -----------------------------------------------------------------


def test_every_policy_gets_the_workload_of_each_seed() -> None:
    task = Drawn()
    found = compare(task, layout("2"), (FIFO, ASHA), range(3, 6), jobs=1)
    assert [(r.policy, r.seed) for r in found.results] == [
        (p, s) for p in ("fifo", "asha") for s in (3, 4, 5)
    ]
    by_seed: dict[int, set[Workload]] = {}
    for seed, workload in task.seen:
        by_seed.setdefault(seed, set()).add(workload)
    assert {seed: len(found) for seed, found in by_seed.items()} == {3: 1, 4: 1, 5: 1}


def test_processes_change_no_figure(curves: Path) -> None:
    def figures(jobs: int) -> list[object]:
        found = compare(CurvesSource(curves, 6), layout("2"), (FIFO, ASHA), range(2), jobs=jobs)
        timeless = [replace(r.metrics, decision_ms=0, decision_ms_median=0) for r in found.results]
        return [(r.policy, r.seed, m, r.regret)
                for r, m in zip(found.results, timeless, strict=True)]  # fmt: skip

    assert figures(1) == figures(2)


def test_a_trace_is_simulated_once_whatever_the_seeds(trace: Path) -> None:
    found = compare(TraceSource(trace), layout("2"), (FIFO,), range(5), jobs=1)
    assert len(found.results) == 1
    assert document(found)["seeds"] == 1
    assert found.interval("fifo", "mean_completion_seconds") == Interval(12.5, 12.5, 12.5)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10_000), gpus=st.integers(1, 3))
def test_nobody_finishes_the_best_trial_sooner_than_the_bound(seed: int, gpus: int) -> None:
    times = {
        c.policy: simulate_seed(Drawn(), layout(str(gpus)), c, seed).metrics.time_to_best_seconds
        for c in (FIFO, ASHA, Contender("hermes"), BOUND)
    }
    bound = times["oracle-best"]
    assert bound is not None
    assert all(value is not None and value >= bound - 1e-9 for value in times.values())


def test_random_jobs_differ_by_seed() -> None:
    task = PoissonSource(30, 60.0, 600.0)
    assert task.draw(1) == task.draw(1)
    assert task.draw(1) != task.draw(2)


# -- what a task and a contender bring -----------------------------------------------------------


def test_every_segment_pays_for_its_start(curves: Path, trace: Path) -> None:
    for task, costly in (
        (CurvesSource(curves, 4), CurvesSource(curves, 4, startup_s=3.0)),
        (TraceSource(trace), TraceSource(trace, startup_s=3.0)),
    ):
        free, paid = (simulate_seed(t, layout("2"), FIFO, 0).metrics for t in (task, costly))
        gpus = sum(w.gpus for w in task.draw(0).workload.jobs)
        assert paid.lost_gpu_seconds == pytest.approx(3.0 * gpus)
        assert free.lost_gpu_seconds == 0.0


def test_a_policy_learns_of_earlier_sweeps_when_it_asks_for_them(
    curves: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass(frozen=True)
    class Learning(Fifo):
        prior: tuple[PastTrial, ...] = ()

    monkeypatch.setitem(POLICIES, "learning", Learning)
    made = Contender("learning").make(CurvesSource(curves, 5, prior_sweeps=2).draw(0))
    assert isinstance(made, Learning)
    assert [len(trial.curve) for trial in made.prior] == [4] * 10


def test_guards_are_there_when_they_are_asked_for() -> None:
    draw = Drawn().draw(0)
    assert Contender("hermes", guards=True).make(draw) == guarded(Hermes())
    assert Contender("hermes").make(draw) == Hermes()


def test_parameters_of_the_guards_are_theirs_and_not_the_policy_s() -> None:
    given = (("threshold", 3), ("guard_quanta", 5), ("guard_k", 1))
    draw = Drawn().draw(0)
    assert Contender("hermes", given, guards=True).make(draw) == guarded(Hermes(3), 1.0, 5)
    for guards, name in ((True, "guard_colour"), (False, "guard_quanta")):
        with pytest.raises(ConfigError, match=name):
            Contender("hermes", ((name, 1),), guards).make(draw)


def test_an_unknown_policy_is_refused_before_anything_is_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "simulate", lambda *_: pytest.fail("it was simulated"))
    with pytest.raises(ConfigError, match="fastest"):
        compare(Drawn(), layout("1"), (FIFO, Contender("fastest")), (0,), jobs=1)


def test_a_job_that_is_wider_than_the_pool_is_refused(trace: Path) -> None:
    with pytest.raises(ConfigError, match="found 1 job of up to 2 GPUs; allowed: at most 1"):
        compare(TraceSource(trace), layout("1"), (FIFO,), (0,), jobs=1)


# -- tables --------------------------------------------------------------------------------------


def test_a_seed_that_never_came_to_it_leaves_no_mean() -> None:
    found = comparison({"fifo": (4.0, 6.0), "killer": (2.0, None)})
    assert found.interval("killer", "time_to_best_seconds") is None
    assert found.speed_up("killer", "time_to_best_seconds") is None
    policies: Any = document(found)["policies"]
    assert policies["killer"]["time_to_best_seconds"] == dict.fromkeys(("mean", "low", "high"))
    assert policies["fifo"]["time_to_best_seconds"]["mean"] == 5.0


def test_a_speed_up_compares_seed_with_seed() -> None:
    found = comparison({"fifo": (4.0, 90.0), "fast": (2.0, 45.0)})
    assert found.speed_up("fast", "time_to_best_seconds") == Interval(2.0, 2.0, 2.0)
    assert found.speed_up("fifo", "time_to_best_seconds", "fast") == Interval(0.5, 0.5, 0.5)


def test_columns_of_curves_stand_only_where_there_are_curves(trace: Path) -> None:
    with_curves, _ = comparison_rows(comparison({"fifo": (1.0,)}))
    without, rows = comparison_rows(compare(TraceSource(trace), layout("2"), (FIFO,), (0,), jobs=1))
    assert "best finished, s" in with_curves
    assert "best finished, s" not in without
    assert len(rows[0]) == len(without)


def test_numbers_read_well() -> None:
    shown = [number(v) for v in (0, 0.0, 3, 0.01234, 1.5, 999.994, 12345.6, 2e6)]
    assert shown == ["0", "0", "3", "0.0123", "1.50", "999.99", "12,346", "2,000,000"]
    assert cell(None) == "–"
    assert cell(Interval(2.0, 2.0, 2.0)) == "2.00"
    assert cell(Interval(2.0, 1.0, 3.0)) == "2.00 (1.00–3.00)"


def test_yarn_cs_guarantees_its_queues_what_the_quota_guarantees_to_teams() -> None:
    capacities = (("a", 3.0), ("b", 0.001))
    (bare,) = contenders("yarn-cs", None, guards=False, quota=QUOTA)
    assert bare.make(DrawnWorkload(Workload("w", ()))) == YarnCs(capacities=capacities)
    (own,) = contenders("yarn-cs", ['yarn-cs.capacities={"a": 1}'], guards=False, quota=QUOTA)
    assert own.make(DrawnWorkload(Workload("w", ()))) == YarnCs(capacities=(("a", 1.0),))
    (without,) = contenders("yarn-cs", None, guards=False)
    assert without.make(DrawnWorkload(Workload("w", ()))) == YarnCs()
