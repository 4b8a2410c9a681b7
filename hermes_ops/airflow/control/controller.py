"""`hermes controller`: the pool-slot scheduler, one long-running process a pool.

SIGTERM ends it and touches no trial. While HERMES_HOME/drain exists it stops every running trial
with its checkpoint and grants nothing. HERMES_HOME/policy.json (`{"policy": "fifo", "options":
{}}`) chooses the pool's policy and is read again whenever it changes; without it the variables
HERMES_POLICY and HERMES_POLICY_OPTIONS (JSON) do.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from hermes_ops.airflow.client import AirflowClient, Credentials
from hermes_ops.airflow.control.apply import Applier
from hermes_ops.airflow.control.cluster import AirflowCluster
from hermes_ops.airflow.control.curves import CurveFeed
from hermes_ops.airflow.control.decisions import DecisionLog
from hermes_ops.airflow.control.hands import AT_ONCE, Hands
from hermes_ops.airflow.control.leader import Leadership
from hermes_ops.airflow.control.monitoring import Monitor
from hermes_ops.airflow.control.monitoring_server import Address, serve
from hermes_ops.airflow.control.nodes import node_names
from hermes_ops.airflow.control.priors import PriorFeed
from hermes_ops.airflow.control.publish import publish_trouble
from hermes_ops.airflow.folders import home
from hermes_ops.airflow.metadata import Metadata
from hermes_ops.airflow.trial.metrics import tracking_uri
from hermes_ops.config.limits import within_sweeps
from hermes_ops.core.explanation import explained
from hermes_ops.core.guard_options import GuardOptions, without_guards
from hermes_ops.core.history import PastTrial
from hermes_ops.core.model import Plan, Policy, Snapshot
from hermes_ops.core.wrapper import Wrapper
from hermes_ops.errors import ConfigError, HermesError, Unavailable
from hermes_ops.loop import tick
from hermes_ops.policies import check_live, make_policy, takes_prior
from hermes_ops.tracking import Tracker

log = logging.getLogger("hermes.controller")

DEFAULT_POLICY = "frontrunner"
RETRY_S = 1.0
LOG_AGAIN_S = 60.0
"""Rounds that fail for one reason are logged so often."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The pool's policy: its name, its options, and the two guards' own options."""

    name: str = DEFAULT_POLICY
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Choice:
        """From the policy file; where there is none, from the environment. HermesError if bad."""
        try:
            text, source = path.read_text(), str(path)
        except FileNotFoundError:
            text, source = os.environ.get("HERMES_POLICY_OPTIONS") or "{}", "HERMES_POLICY_OPTIONS"
        value = _object(text, source)
        if source != str(path):
            value = {"policy": os.environ.get("HERMES_POLICY"), "options": value}
        options = value.get("options") or {}
        if not isinstance(options, dict):
            raise HermesError(f"{source}: `options` is {options!r}, not an object: correct it.")
        return cls(str(value.get("policy") or DEFAULT_POLICY), options)

    @staticmethod
    def file() -> Path:
        """Where the choice of a running pool is written."""
        return home() / "policy.json"

    def write(self, path: Path) -> None:
        """Make it the choice of the running pool, at once."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps({"policy": self.name, "options": self.options}))
        os.replace(fresh, path)

    def build(self, prior: tuple[PastTrial, ...] = ()) -> Policy[Any]:
        """The policy within its guards, knowing what earlier sweeps have shown.

        ConfigError for an unknown name or option and for a policy that runs in a simulation only.
        """
        check_live(self.name)
        given = {"prior": prior} if prior else None
        policy = make_policy(self.name, without_guards(self.options), given)
        return self.guards.around(policy)

    @property
    def guards(self) -> GuardOptions:
        """What stands around the policy; ConfigError for a bad option of it."""
        return GuardOptions.of(self.options)


@dataclass(slots=True)
class Controller:
    """Ticks until told to end; a service that is away delays it, no more."""

    cluster: AirflowCluster
    leadership: Leadership
    policy_file: Path
    stop: threading.Event = field(default_factory=threading.Event)
    monitor: Monitor = field(default_factory=Monitor)
    clock: Callable[[], float] = time.monotonic
    _choice: Choice | None = None
    _policy: Policy[Any] | None = None
    _memory: Any = None
    _complaint: str = ""
    _prior_version: int = 0
    _logged: str = ""
    _log_again_s: float = 0.0

    def run(self) -> int:
        """Lead, then tick; 0 after SIGTERM, 1 when leadership was lost (a restart is due)."""
        if not self.leadership.acquire(self._pause):
            return 0
        log.info("Leading the pool %s", self.cluster.pool)
        self.monitor.lead(True)
        while not self.stop.is_set():
            if not self.leadership.holds():
                log.error("The database lock of the pool is lost; another controller may lead")
                return 1
            self._tick()
        return 0

    def end(self, *_: object) -> None:
        """Finish the round under way and return from `run`."""
        self.stop.set()
        self.cluster.wake()

    def _pause(self) -> bool:
        """Wait a little before the next try to lead; False to give up."""
        self.monitor.beat()
        return not self.stop.wait(RETRY_S)

    def _tick(self) -> None:
        self.monitor.beat()
        failed_before = self.monitor.trouble is not None
        try:
            with self.monitor.round():
                plan = self._round()
        except Exception as error:  # the controller must outlive a round that went wrong
            if not isinstance(error, Unavailable):
                self._forget_prior()
            self._log_failure(error)
            self._pause_after_failure()
            return
        self._logged = ""
        if failed_before:
            self._show_trouble()
        self.cluster.wait(plan.review_at_s)

    def _log_failure(self, error: Exception) -> None:
        """Log why a round failed: at once where the reason is another one, else once a minute."""
        trouble, now_s = self.monitor.trouble, self.clock()
        reason = trouble.reason if trouble is not None else str(error)
        if reason == self._logged and now_s < self._log_again_s:
            return
        self._logged, self._log_again_s = reason, now_s + LOG_AGAIN_S
        outcome = "is skipped" if isinstance(error, Unavailable) else "failed"
        trace = None if isinstance(error, HermesError) else error
        log.warning("This round %s: %s", outcome, reason, exc_info=trace)

    def _pause_after_failure(self) -> None:
        self._show_trouble()
        self.stop.wait(RETRY_S)

    def _show_trouble(self) -> None:
        """Write into the pool's view that rounds fail, or that they do so no more."""
        trouble = self.monitor.trouble
        try:
            publish_trouble(self.cluster.pool, asdict(trouble) if trouble else None)
        except OSError as error:
            log.warning("The pool's view is not written: %s", error)

    def _round(self) -> Plan:
        guarded = self._current_policy()
        policy = _OfSweeps(guarded, self.cluster, self._guards().open, self.monitor)
        snapshot, plan, self._memory = tick(policy, self.cluster, self._memory)
        self.monitor.observed(snapshot)
        self.monitor.fails(len(self.cluster.faults.faults))
        return plan

    def _current_policy(self) -> Policy[Any]:
        """The policy that was chosen; while the choice is a bad one, the policy in force."""
        try:
            choice = Choice.read(self.policy_file)
            if self._policy is None or choice != self._choice:
                self._adopt(choice)
        except HermesError as error:
            if self._policy is None:
                raise
            if str(error) != self._complaint:
                log.error("The pool's policy stays as it is: %s", error)
            self._complaint = str(error)
        assert self._policy is not None
        return self._informed(self._policy)

    def _guards(self) -> GuardOptions:
        return self._choice.guards if self._choice else GuardOptions()

    def _adopt(self, choice: Choice) -> None:
        """Decide by this choice from now on, without a memory and as yet without a prior."""
        policy = choice.build()
        self._policy, self._choice, self._complaint = policy, choice, ""
        self._memory = policy.initial()
        self._prior_version = 0
        self.cluster.applier.policy_name = choice.name
        self.cluster.applier.options = choice.options
        log.info("The pool's policy is %s %s", choice.name, choice.options or "")

    def _informed(self, policy: Policy[Any]) -> Policy[Any]:
        """The policy with what earlier sweeps have shown by now; the one in force if that fails."""
        choice, feed = self._choice, self.cluster.priors
        if choice is None or feed is None or not takes_prior(choice.name):
            return policy
        feed.start()
        version = feed.version
        if version != self._prior_version:
            self._prior_version = version
            try:
                self._policy = policy = choice.build(feed.prior())
            except Exception:  # what is missing costs quality only
                log.exception("What earlier sweeps have shown is left out")
        return policy

    def _forget_prior(self) -> None:
        """Decide without a prior until another one is read, should this one have been at fault."""
        if self._choice is not None and self._prior_version:
            self._policy = self._choice.build()


@dataclass(frozen=True, slots=True)
class _OfSweeps(Wrapper[Any]):
    """The pool's policy within what each sweep asks for: known only once the round has observed."""

    cluster: AirflowCluster
    open_per_gpu: int
    monitor: Monitor

    def decide(self, snapshot: Snapshot, memory: Any) -> tuple[Plan, Any]:  # noqa: ANN401 - any memory
        """The policy's plan, by the limits and rules of the sweeps that the snapshot shows."""
        configs = {sweep: book.plan.config for sweep, book in self.cluster.books.items()}
        asked = within_sweeps(self.policy, configs, self.open_per_gpu)
        with self.monitor.deciding():
            plan, memory = asked.decide(snapshot, memory)
            return explained(snapshot, plan), memory


def _object(text: str, source: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise HermesError(f"{source} is not JSON ({error}): correct it.") from None
    if not isinstance(value, dict):
        raise HermesError(f"{source} is {value!r}, not a JSON object: correct it.")
    return value


def build(pool: str) -> Controller:
    """The controller of a pool, from the environment that `hermes up` or the user set."""
    metadata = Metadata.from_airflow()
    metadata.check()
    tracker = Tracker(tracking_uri())
    decisions = DecisionLog(tracker)
    curves = CurveFeed(tracker)
    client = AirflowClient(Credentials.from_environment())
    monitor = Monitor(pool)
    monitor.follow(curves.newest_s)
    hands = Hands(1 if metadata.engine.dialect.name == "sqlite" else AT_ONCE)
    applier = Applier(client, metadata, tracker, decisions, DEFAULT_POLICY, {}, monitor, hands,
                      idle_hands=Hands(1, in_background=True))  # fmt: skip
    priors = PriorFeed(tracker)
    cluster = AirflowCluster(
        pool, metadata, curves, applier, decisions, priors=priors, nodes=node_names()
    )
    leadership = Leadership(metadata.engine, pool)
    controller = Controller(cluster, leadership, Choice.file(), monitor=monitor)
    Choice.read(controller.policy_file).build()
    curves.start()
    threading.Thread(target=_warm, daemon=True).start()
    return controller


def _warm() -> None:
    """Import what the samplers need, so that the first round that opens a trial is no slower."""
    from hermes_ops.search import make_sampler
    from hermes_ops.search.interface import Observation
    from hermes_ops.search.space import Uniform

    told = [Observation(n, {"x": n / 4}, float(n), "finished") for n in range(3)]
    for algorithm in ("random", "tpe"):
        make_sampler(algorithm, (("x", Uniform(0.0, 1.0)),), 0, 1).ask(3, told)


def main(arguments: list[str] | None = None) -> int:
    """Run the controller until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="hermes controller", description=__doc__)
    parser.add_argument("--pool", default="gpus", help="the Airflow pool whose slots are the GPUs")
    parser.add_argument("--home", help="the state folder (HERMES_HOME)")
    parser.add_argument("--metrics-port", help="HERMES_METRICS_PORT; by default any free one")
    options = parser.parse_args(arguments)
    if options.home:
        os.environ["HERMES_HOME"] = options.home
    if options.metrics_port:
        os.environ["HERMES_METRICS_PORT"] = options.metrics_port
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # what is away is said once, by us
    try:
        address = Address.from_environment()
        controller = build(options.pool)
    except (ConfigError, HermesError) as error:
        print(error, file=sys.stderr)  # noqa: T201 - this is the command's own message
        return 2
    serve(controller.monitor, address)
    signal.signal(signal.SIGTERM, controller.end)
    signal.signal(signal.SIGINT, controller.end)
    try:
        with threadpool_limits(limits=1, user_api="blas"):  # the cores are the trials'
            return controller.run()
    finally:
        controller.cluster.close()


if __name__ == "__main__":
    sys.exit(main())
