from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from hermes_ops.airflow.control.cluster import AirflowCluster
from hermes_ops.airflow.control.controller import Controller
from hermes_ops.airflow.control.feeds import PriorFeed
from hermes_ops.airflow.control.policy_settings import PolicySettings
from hermes_ops.airflow.control.sweep_state import SweepSpec
from hermes_ops.core.model import PastTrial, Plan, Point, Snapshot
from hermes_ops.errors import ConfigError, Unavailable
from hermes_ops.policies import POLICIES
from hermes_ops.policies.fifo import Fifo
from tests.unit.airflow.builders import SWEEP, run_row, sweep_with
from tests.unit.airflow.control.controllers import Database, controller_of

PAST = PastTrial((("rate", 0.1),), (Point(1, 0.5, 1.0),), 20)


@dataclass
class Archive:
    """What MLflow holds of earlier sweeps, as `past_trials` returns it."""

    found: tuple[PastTrial, ...] = (PAST,)
    away: bool = False
    asked: list[Mapping[str, Any]] = field(default_factory=list)

    def past_trials(self, tracker: Any, experiment: str, **facts: Any) -> tuple[PastTrial, ...]:
        self.asked.append({"experiment": experiment, **facts})
        if self.away:
            raise Unavailable("MLflow did not answer")
        return self.found


@pytest.fixture
def archive(monkeypatch: pytest.MonkeyPatch) -> Archive:
    found = Archive()
    monkeypatch.setattr("hermes_ops.tracking.earlier_sweeps.past_trials", found.past_trials)
    return found


def feed() -> PriorFeed:
    outside: Any = None
    return PriorFeed(outside)


def plan(**changes: Any) -> SweepSpec:
    return sweep_with(**changes).spec


def test_a_sweep_has_no_prior_until_it_is_read(archive: Archive) -> None:
    mine = feed()
    mine.follow({SWEEP: plan()})
    assert mine.prior() == ()
    mine.read_once()
    assert mine.prior() == (PAST,)


def test_earlier_sweeps_of_the_same_name_space_and_objective_are_asked_for(
    archive: Archive,
) -> None:
    mine = feed()
    mine.follow({SWEEP: plan(objective={"metric": "score", "direction": "maximize"})})
    mine.read_once()
    assert archive.asked == [
        {
            "experiment": "digits",
            "metric": "score",
            "sign": -1.0,
            "names": ("rate",),
            "sometimes": (),
            "total_steps": 20,
        }
    ]


def test_parameters_under_a_choice_may_be_missing_in_earlier_trials(archive: Archive) -> None:
    below = {"value": "sgd", "space": {"momentum": {"type": "uniform", "low": 0, "high": 1}}}
    space = {"rate": {"type": "choice", "values": ["adam", below]}}
    mine = feed()
    mine.follow({SWEEP: plan(search={"algorithm": "random", "max_trials": 4, "space": space})})
    mine.read_once()
    (asked,) = archive.asked
    assert (asked["names"], asked["sometimes"]) == (("rate",), ("momentum",))


def test_they_are_read_once_until_a_sweep_of_their_kind_ends(archive: Archive) -> None:
    mine, both = feed(), {SWEEP: plan(), "digits-2": plan()}
    for _ in range(3):
        mine.follow(both)
        mine.read_once()
    assert len(archive.asked) == 1
    before = mine.version
    archive.found = (PAST, PAST)
    mine.follow({"digits-2": plan()})
    mine.read_once()
    assert len(archive.asked) == 2
    assert mine.prior() == (PAST, PAST)
    assert mine.version > before


def test_a_sweep_that_has_gone_is_forgotten_and_read_anew_when_its_like_comes(
    archive: Archive,
) -> None:
    mine = feed()
    mine.follow({SWEEP: plan()})
    mine.read_once()
    mine.follow({})
    assert mine.prior() == ()
    mine.follow({"digits-2": plan()})
    mine.read_once()
    assert len(archive.asked) == 2
    assert mine.prior() == (PAST,)


def test_sweeps_of_one_kind_share_what_was_read_and_others_bring_their_own(
    archive: Archive,
) -> None:
    mine = feed()
    other = plan(objective={"metric": "score", "direction": "maximize"})
    mine.follow({SWEEP: plan(), "digits-2": plan(), "digits-3": other})
    mine.read_once()
    assert (len(archive.asked), mine.prior()) == (2, (PAST, PAST))


def test_an_mlflow_that_is_away_leaves_what_is_known_and_is_asked_again(archive: Archive) -> None:
    mine = feed()
    mine.follow({SWEEP: plan(), "digits-2": plan()})
    mine.read_once()
    archive.away = True
    mine.follow({SWEEP: plan()})
    mine.read_once()
    assert mine.prior() == (PAST,)
    archive.away, archive.found = False, ()
    mine.read_once()
    assert (mine.prior(), len(archive.asked)) == ((), 3)


def test_the_background_work_ends_when_it_is_told_to(archive: Archive) -> None:
    mine = feed()
    mine.follow({SWEEP: plan()})
    mine.start()
    mine.close()
    assert mine._thread is not None
    assert not mine._thread.is_alive()


# -- the controller's part -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Learner(Fifo):
    """fifo that takes a prior."""

    prior: tuple[PastTrial, ...] = ()


@dataclass(frozen=True, slots=True)
class Choosy(Learner):
    """Takes none that is not empty."""

    def __post_init__(self) -> None:
        if self.prior:
            raise RuntimeError("too much")


@dataclass(frozen=True, slots=True)
class Fragile(Learner):
    """Cannot decide with a prior."""

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        if self.prior:
            raise RuntimeError("what is this?")
        return Fifo().decide(snapshot, memory)


def controller(monkeypatch: pytest.MonkeyPatch, policy: Callable[..., Any]) -> Controller:
    """A controller of a pool with one sweep; its policy takes a prior."""
    monkeypatch.setitem(POLICIES, "learner", policy)
    PolicySettings("learner").write(PolicySettings.file())
    made = controller_of(Database(run_row()), PolicySettings.file())
    made.cluster.priors = feed()
    monkeypatch.setattr(PriorFeed, "start", lambda self: None)
    return made


def prior_of(policy: Any) -> Any:
    while hasattr(policy, "policy"):
        policy = policy.policy
    return policy.prior


def test_a_policy_gets_the_prior_once_it_is_read_and_keeps_its_memory(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = controller(monkeypatch, Learner)
    assert prior_of(made._current_policy()) == ()
    made.cluster.observe()
    assert made.cluster.priors is not None
    made.cluster.priors.read_once()
    made._memory = "kept"
    assert prior_of(made._current_policy()) == (PAST,)
    assert made._current_policy() is made._current_policy()
    assert made._memory == "kept"


def test_nothing_is_read_for_a_policy_that_takes_no_prior(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = controller(monkeypatch, Fifo)
    started: list[int] = []
    monkeypatch.setattr(PriorFeed, "start", lambda self: started.append(1))
    made._current_policy()
    assert started == []


def test_a_prior_that_the_policy_does_not_take_leaves_the_policy_in_force(
    archive: Archive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = controller(monkeypatch, Choosy)
    before = made._current_policy()
    made.cluster.observe()
    assert made.cluster.priors is not None
    made.cluster.priors.read_once()
    for _ in range(3):
        assert made._current_policy() is before
    assert sum("is left out" in r.message for r in caplog.records) == 1


def test_a_prior_that_breaks_a_decision_is_left_out_of_the_next(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_ops.airflow.control.controller.RETRY_S", 0.0)
    made = controller(monkeypatch, Fragile)
    made._current_policy()
    made.cluster.observe()
    assert made.cluster.priors is not None
    made.cluster.priors.read_once()
    waited: list[float | None] = []
    monkeypatch.setattr(AirflowCluster, "wait", lambda self, until_s: waited.append(until_s))
    made._tick()
    assert waited == []
    made._tick()
    assert len(waited) == 1


def test_a_policy_that_runs_in_a_simulation_only_is_refused_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclass(frozen=True, slots=True)
    class Sharing(Fifo):
        shares = True

    monkeypatch.setitem(POLICIES, "sharing", Sharing)
    with pytest.raises(ConfigError, match="in a simulation only"):
        PolicySettings("sharing").build()
