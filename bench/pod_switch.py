"""From the controller's decision to the next trial's first line in its pod, with others waiting.

Airflow stands beside the cluster. The moments of a pod are those at which a watch told of them,
those of a trial its own; on a cluster of several machines their clocks would have to agree.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import yaml

from bench import pod_cluster, stack, switch
from bench.measure import QUICK, SCRIPTS, Figures, await_
from hermes_ops.kubernetes import ClusterPods, labels_of_sweep
from hermes_ops.kubernetes.api import PodEvent
from hermes_ops.kubernetes.template import MANAGED, SWEEP

SLOTS = 2
WAITING = 4 if QUICK else 12
SWITCHES = 4 if QUICK else 36
EPOCH_S = (1.0, 1.5) if QUICK else (2.0, 4.0)
WAIT_S, GONE_S, SETTLE_S = 150.0, 60.0, 4.0
WATCH_S = 30.0
MODES = {"worker": False, "triggerer": True}
COURSE = switch.Timeline(
    "line_s",
    (
        "decision_to_flag_seen_s",
        "flag_seen_to_delete_s",
        "delete_to_trial_exit_s",
        "trial_exit_to_pod_gone_s",
        "pod_gone_to_next_task_s",
        "next_task_to_pod_made_s",
        "pod_made_to_placed_s",
        "placed_to_hermes_trial_s",
        "hermes_trial_to_reached_s",
    ),
)


@dataclass(slots=True)
class PodTimes:
    """When (Unix seconds) each pod was first seen created, scheduled, being deleted and gone."""

    pods: ClusterPods
    _moments: dict[tuple[str, int, str], list[float]] = field(default_factory=dict)
    _seen: set[tuple[str, str]] = field(default_factory=set)
    _stop: threading.Event = field(default_factory=threading.Event)

    def loop(self) -> None:
        """Watch until `watching` ends."""
        _, version = self.pods.list_with_version(MANAGED)
        while not self._stop.is_set():
            for change in self.pods.watch_events(MANAGED, version, WATCH_S):
                self._note(change, time.time())
                version = change.version

    def _note(self, change: PodEvent, now_s: float) -> None:
        if (pod := change.pod) is None:
            return
        facts = {"made": True, "placed": bool(pod.node), "told": pod.is_being_deleted}
        for what in [w for w, holds in {**facts, "gone": change.gone}.items() if holds]:
            if (pod.uid, what) not in self._seen:
                self._seen.add((pod.uid, what))
                self._moments.setdefault((pod.sweep, pod.trial, what), []).append(now_s)

    def first(self, sweep: str, trial: int, what: str, after_s: float) -> float | None:
        """Return when a pod of the trial first had that state after a moment."""
        label = labels_of_sweep(sweep)[SWEEP]
        return next((m for m in self._moments.get((label, trial, what), ()) if m > after_s), None)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch in the background."""
        thread = threading.Thread(target=self.loop, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()


def run() -> Figures:
    """Measure stub trials in pods that take turns, each held by a worker or by the triggerer."""
    with contextlib.ExitStack() as held:
        held.enter_context(pod_cluster.cluster(nodes=2, gpus=SLOTS // 2))
        image = pod_cluster.trial_image()
        api, name = held.enter_context(pod_cluster.namespace())
        own = held.enter_context(stack.folder())
        (own.home / "sweeps").mkdir()
        held.enter_context(
            pod_cluster.volume(api, name, own.home / "sweeps", [SCRIPTS / "stub.py"])
        )
        (own.home / "pod.yaml").write_text(yaml.safe_dump(pod_cluster.defaults(image, name)))
        trials = SLOTS + WAITING
        own.up(SLOTS, "--standby", 0, *switch.taking_turns(trials, switch.RESTLESS))
        held.callback(own.down)  # before the volume under it goes; its folder is the last to go
        pods = ClusterPods(api, name)
        found = {mode: _measured(own, pods, mode, trials) for mode in MODES}
    middle = {m: found[m]["decision_to_reached_s"]["median"] for m in MODES}
    return {
        **found,
        "triggerer_over_worker": round(middle["triggerer"] / middle["worker"], 3),
        "slots": SLOTS,
        "waiting": WAITING,
        "target_median_s": 3.0,
    }


def _measured(own: stack.Stack, pods: ClusterPods, mode: str, trials: int) -> Figures:
    """Run one sweep for a number of switches, then split their times."""
    config = stack.stub_sweep(f"pods-{mode}", trials, "--epochs", 1_000_000, pause_s=EPOCH_S)
    config["trial"] |= {
        "directory": pod_cluster.SCRIPTS,
        "run_in": "pod",
        "pod": {"deferrable": MODES[mode]},
    }
    seen = PodTimes(pods)
    with seen.watching():
        sweep = own.start(config)
        deadline_s = time.monotonic() + WAIT_S
        while len(switch.stops(sweep)) < SWITCHES and time.monotonic() < deadline_s:
            time.sleep(1.0)
        time.sleep(SETTLE_S)  # the last ones arrive
        found = [_switch(sweep, seen, turn) for turn in switch.turns(sweep)]
        own.hermes("sweep", "stop", sweep.id)
        labels = labels_of_sweep(sweep.id)
        await_(lambda: not pods.find(labels), GONE_S, "the sweep's pods are gone", 0.5)
    return switch.split(found, COURSE)


def _switch(sweep: stack.Sweep, seen: PodTimes, turn: switch.Turn) -> switch.Switch:
    line_s = switch.first_line(sweep, turn.follower, "stamps.jsonl", "line_s", turn.decided_s)
    flag_s = switch.flag_seen_s(sweep, turn)
    told_s = seen.first(sweep.id, turn.victim, "told", turn.decided_s)
    if flag_s is not None and told_s is not None and flag_s > told_s:
        flag_s = None  # the line was repeated: Airflow's triggerer begins a task's log anew
    moments = (
        flag_s,
        told_s,
        switch.trial_exit_s(sweep, turn),
        seen.first(sweep.id, turn.victim, "gone", turn.decided_s),
        switch.next_task_s(sweep, turn),
        seen.first(sweep.id, turn.follower, "made", turn.decided_s),
        seen.first(sweep.id, turn.follower, "placed", turn.decided_s),
        switch.next_begins_s(sweep, turn),
        line_s,
    )
    return switch.Switch(turn.decided_s, turn.resumed, standby=False, begun_s=None, moments=moments)
