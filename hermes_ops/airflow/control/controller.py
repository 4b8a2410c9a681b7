"""`hermes controller`: the pool-slot scheduler, one long-running process a pool.

SIGTERM ends it and touches no trial. While HERMES_HOME/drain exists it stops every running trial
with its checkpoint and grants nothing. HERMES_HOME/policy.json (`{"policy": "fifo", "options":
{}}`) chooses the pool's policy and is read again whenever it changes; without it the variables
HERMES_POLICY and HERMES_POLICY_OPTIONS (JSON) do. HERMES_HOME/quota-<pool>.json, if it is there,
is the pool's quota and is read again as well.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threadpoolctl import threadpool_limits

from hermes_ops.airflow.client import AirflowClient
from hermes_ops.airflow.control.apply import Applier
from hermes_ops.airflow.control.cluster import AirflowCluster
from hermes_ops.airflow.control.decisions import DecisionLog
from hermes_ops.airflow.control.faults import CONCURRENT_REQUESTS, RequestPool
from hermes_ops.airflow.control.feeds import CurveFeed, PriorFeed
from hermes_ops.airflow.control.leadership import Leadership
from hermes_ops.airflow.control.machine_watch import MachineWatch, PoolMachines, registry_of
from hermes_ops.airflow.control.monitoring import Address, Monitor, serve
from hermes_ops.airflow.control.policy_settings import DEFAULT_POLICY, PolicySettings
from hermes_ops.airflow.control.pool_file import publish_trouble
from hermes_ops.airflow.control.quota_settings import PastUse, QuotaInForce, QuotaSettings, past_use
from hermes_ops.airflow.credentials import AirflowCredentials
from hermes_ops.airflow.folders import home
from hermes_ops.airflow.hosts import (
    NODES_VARIABLE,
    REMEDY,
    configured_refusal,
    mark_home,
    node_names,
)
from hermes_ops.airflow.machines import MachineSlots
from hermes_ops.airflow.metadata import Metadata
from hermes_ops.airflow.state_store import refused_setting
from hermes_ops.airflow.trial.metrics import tracking_uri
from hermes_ops.config.sweep_rules import with_sweep_rules
from hermes_ops.core.model import Plan, Policy, Snapshot, SweepId
from hermes_ops.core.options import GuardOptions
from hermes_ops.core.plan import explained
from hermes_ops.core.wrapper import Wrapper
from hermes_ops.errors import ConfigError, HermesError, Unavailable
from hermes_ops.loop import tick
from hermes_ops.policies import takes_prior
from hermes_ops.tracking import Tracker

if TYPE_CHECKING:
    from hermes_ops.config.pool_quota import PoolQuota

log = logging.getLogger("hermes.controller")


RETRY_S = 1.0
LOG_AGAIN_S = 60.0
"""Rounds that fail for one reason are logged so often."""


@dataclass(slots=True)
class Controller:
    """Ticks until told to end; an outage of a service only delays it."""

    cluster: AirflowCluster
    leadership: Leadership
    policy_file: Path
    quota: QuotaInForce = field(init=False)
    stop: threading.Event = field(default_factory=threading.Event)
    monitor: Monitor = field(default_factory=Monitor)
    clock: Callable[[], float] = time.monotonic
    _settings: PolicySettings | None = None
    _policy: Policy[Any] | None = None
    _memory: Any = None
    _complaint: str = ""
    _prior_version: int = 0
    _logged: str = ""
    _log_again_s: float = 0.0

    def __post_init__(self) -> None:
        self.quota = QuotaInForce(QuotaSettings.file(self.cluster.pool), self._past_use)

    def _past_use(self, quota: PoolQuota) -> Future[PastUse]:
        """Read what teams and users have used until now, while the rounds go on."""
        cluster = self.cluster
        return cluster.applier.background.submit(
            past_use, cluster.metadata, cluster.pool, quota, cluster.clock()
        )

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
            self._show_trouble()
            self.stop.wait(RETRY_S)
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

    def _show_trouble(self) -> None:
        """Write into the pool's view that rounds fail, or that they succeed again."""
        trouble = self.monitor.trouble
        try:
            publish_trouble(self.cluster.pool, asdict(trouble) if trouble else None)
        except OSError as error:
            log.warning("The pool's view is not written: %s", error)

    def _round(self) -> Plan:
        guarded = self._current_policy()
        guards = self._settings.guards if self._settings else GuardOptions()
        if self.quota.refresh():
            self.cluster.adopt_quota(self.quota)
        enclosed, memory = self.quota.enclose(guarded, self._memory, guards)
        policy = _WithinSweepRules(enclosed, self.cluster, guards.open_per_gpu, self.monitor)
        snapshot, plan, memory = tick(policy, self.cluster, memory)
        self._memory = self.quota.release(memory)
        self._show(snapshot)
        return plan

    def _show(self, snapshot: Snapshot) -> None:
        """Show Prometheus what this round saw."""
        sweeps = self.cluster.sweeps
        limits = {SweepId(s): sweep.spec.config.budget.max_parallel for s, sweep in sweeps.items()}
        self.monitor.observed(snapshot, {s: n for s, n in limits.items() if n is not None})
        self.monitor.observed_teams(snapshot, self.quota.quota)
        trials = {sweep_id: sweep.trials for sweep_id, sweep in sweeps.items()}
        self.monitor.observed_trials(trials, snapshot.time_s)
        self.monitor.observed_problems(len(self.cluster.faults.faults))

    def _current_policy(self) -> Policy[Any]:
        """Return the policy of the settings; while those are malformed, the policy in force."""
        try:
            settings = PolicySettings.load(self.policy_file)
            if self._policy is None or settings != self._settings:
                self._adopt(settings)
        except HermesError as error:
            if self._policy is None:
                raise
            if str(error) != self._complaint:
                log.error("The pool's policy stays as it is: %s", error)
            self._complaint = str(error)
        assert self._policy is not None
        return self._with_newest_prior(self._policy)

    def _adopt(self, settings: PolicySettings) -> None:
        """Adopt these settings: start with an empty memory and without a prior."""
        policy = settings.build()
        self._policy, self._settings, self._complaint = policy, settings, ""
        self._memory = policy.initial()
        self._prior_version = 0
        self.cluster.applier.policy_name = settings.name
        self.cluster.applier.options = settings.options
        by = f", chosen by {settings.by}" if settings.by else ""
        log.info("The pool's policy is %s %s%s", settings.name, settings.options or "", by)

    def _with_newest_prior(self, policy: Policy[Any]) -> Policy[Any]:
        """Return the policy with the newest prior; the one in force if that cannot be built."""
        settings, feed = self._settings, self.cluster.priors
        if settings is None or feed is None or not takes_prior(settings.name):
            return policy
        feed.start()
        version = feed.version
        if version != self._prior_version:
            self._prior_version = version
            try:
                self._policy = policy = settings.build(feed.prior())
            except Exception:  # what is missing costs quality only
                log.exception("What earlier sweeps have shown is left out")
        return policy

    def _forget_prior(self) -> None:
        """Decide without a prior until another one is read, should this one have been at fault."""
        if self._settings is not None and self._prior_version:
            self._policy = self._settings.build()


@dataclass(frozen=True, slots=True)
class _WithinSweepRules(Wrapper[Any]):
    """The pool's policy within what each sweep asks for: known only once the round has observed."""

    cluster: AirflowCluster
    open_per_gpu: int
    monitor: Monitor

    def decide(self, snapshot: Snapshot, memory: Any) -> tuple[Plan, Any]:  # noqa: ANN401 - any memory
        """Return the policy's plan within the limits and rules of the sweeps in the snapshot."""
        configs = {sweep_id: sweep.spec.config for sweep_id, sweep in self.cluster.sweeps.items()}
        asked = with_sweep_rules(self.policy, configs, self.open_per_gpu)
        with self.monitor.deciding():
            plan, memory = asked.decide(snapshot, memory)
            return explained(snapshot, plan), memory


def build(pool: str) -> Controller:
    """Return the controller of a pool, from the environment that `hermes up` or the user set."""
    metadata = Metadata.from_airflow()
    metadata.check()
    if (refused := refused_setting()) is not None:
        raise HermesError(refused)
    tracker = Tracker(tracking_uri())
    decisions = DecisionLog(tracker)
    curves = CurveFeed(tracker)
    client = AirflowClient(AirflowCredentials.from_environment())
    monitor = Monitor(pool)
    monitor.follow(curves.newest_s)
    monitor.watch_disk(home())
    machines = _pool_machines(metadata)
    nodes = machines.machines.of_slot or _node_names(metadata, pool)
    requests = RequestPool(1 if metadata.engine.dialect.name == "sqlite" else CONCURRENT_REQUESTS)
    applier = Applier(client, metadata, tracker, decisions, DEFAULT_POLICY, {}, monitor, requests,
                      background=RequestPool(1, in_background=True), host=mark_home(),
                      machines=machines.machines)  # fmt: skip
    priors = PriorFeed(tracker)
    refusal = "" if machines.machines.of_slot else configured_refusal()
    if refusal:
        log.warning("Sweeps with `run_in: process` are refused: %s. For those: %s", refusal, REMEDY)
    cluster = AirflowCluster(
        pool, metadata, curves, applier, decisions, priors=priors,
        nodes=nodes, process_refusal=refusal, machines=machines,
    )  # fmt: skip
    leadership = Leadership(metadata.engine, pool)
    controller = Controller(cluster, leadership, PolicySettings.file(), monitor=monitor)
    PolicySettings.load(controller.policy_file).build()
    QuotaSettings.load(controller.quota.path)
    curves.start()
    threading.Thread(target=_warm, daemon=True).start()
    return controller


def _node_names(metadata: Metadata, pool: str) -> tuple[str, ...]:
    """Return the node of each slot; log if the pool is smaller, as it may be for a while."""
    nodes, row = node_names(), metadata.pool(pool, ())
    if row is not None and 0 <= row.slots < len(nodes):
        log.warning(
            "%s names %s slots and the pool %s has %s: the GPUs of the last ones are given to no "
            "trial until it has as many", NODES_VARIABLE, len(nodes), pool, row.slots,
        )  # fmt: skip
    return nodes


def _pool_machines(metadata: Metadata) -> PoolMachines:
    """Return the machines that the environment names, and begin to watch their workers."""
    machines = MachineSlots.from_environment()
    if not machines.of_slot:
        return PoolMachines()
    watch = MachineWatch(machines, registry_of(metadata.engine))
    watch.start()
    return PoolMachines(machines, watch)


def _warm() -> None:
    """Import what the samplers need, so that the first round that opens a trial is no slower."""
    from hermes_ops.search import make_sampler
    from hermes_ops.search.interface import Observation
    from hermes_ops.search.space import Uniform

    observations = [Observation(n, {"x": n / 4}, float(n), "finished") for n in range(3)]
    for algorithm in ("random", "tpe"):
        make_sampler(algorithm, (("x", Uniform(0.0, 1.0)),), 0, 1).ask(3, observations)


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
