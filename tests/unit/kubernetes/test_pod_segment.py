"""One pod a lease: made or found again, ended with grace, judged by the trial's own word."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from hermes_ops.errors import Unavailable
from hermes_ops.kubernetes.api import Forbidden, PodView, Rejected
from hermes_ops.kubernetes.deletion import FORCE_AFTER_S
from hermes_ops.kubernetes.pod_segment import (
    LOG_PAUSE_S,
    LogFollower,
    OwnershipLost,
    PodLimits,
    PodSegment,
)
from tests.unit.kubernetes.pods import POD, FakePods

NAME = POD.name
GRACE_S, START_S = 30.0, 600.0


class World:
    """A segment under a clock that is set by hand."""

    def __init__(self, pods: FakePods, **watch_events: Any) -> None:
        self.now_s = 1_000.0
        self.result: int | None = None
        self.said: list[str] = []
        self.pods = pods
        facts: dict[str, Any] = {
            "request": NAME,
            "name": NAME,
            "owner": "1",
            "epoch": 1,
            "trial": {},
            "record": lambda: self.result,
            "emit": self.said.append,
            "limits": PodLimits(GRACE_S, START_S),
            "clock": lambda: self.now_s,
        }
        self.segment = PodSegment(pods, **{**facts, **watch_events})
        self.segment.start()

    def look(self, after_s: float = 2.0) -> int | None:
        self.now_s += after_s
        return self.segment.wait(0.0)


def made(**facts: Any) -> World:
    world = World(FakePods())
    world.look()
    if facts:
        world.pods.change(NAME, **facts)
    return world


def ended(code: int, result: int | None, **facts: Any) -> tuple[int | None, str]:
    world = made(code=code, phase="Failed" if code else "Succeeded", started=True, **facts)
    world.result = result
    return world.look(), world.segment.trouble


def test_a_container_has_run_as_long_as_its_node_says_and_else_as_it_was_seen() -> None:
    world = made(phase="Running", started=True)
    seen = [world.segment.ran_s]
    for after_s in (2.0, 7.0):
        world.look(after_s)
        seen.append(world.segment.ran_s)
    del world.pods.pods[NAME]
    world.look()
    assert [*seen, world.segment.ran_s] == [None, 0.0, 7.0, 7.0]
    again = made(phase="Succeeded", started=True, code=0, ran_s=60.0)
    again.look()
    assert again.segment.ran_s == 60.0


def test_the_pod_is_made_once() -> None:
    world = made()
    assert world.look() is None
    assert world.pods.made == [NAME]


def test_a_second_attempt_goes_on_with_the_pod_that_is_there() -> None:
    pods = FakePods({NAME: replace(POD, phase="Running", started=True)})
    world = World(pods, owner="2")
    assert world.look() is None
    assert (pods.made, pods.pods[NAME].owner, pods.deleted) == ([], "2", [])


def test_the_first_attempt_then_leaves_the_pod_alone() -> None:
    world = made(owner="2")
    with pytest.raises(OwnershipLost):
        world.look()
    world.segment.finish()
    assert world.pods.deleted == []


def test_what_a_trial_left_while_nobody_looked_counts_and_no_pod_is_made() -> None:
    world = World(FakePods())
    world.result = 75
    assert world.look() == 75
    world.segment.finish()
    assert world.pods.made == []


def test_a_pod_that_ended_while_nobody_looked_is_judged_and_cleared_away() -> None:
    pods = FakePods({NAME: replace(POD, code=0, phase="Succeeded", started=True)})
    world = World(pods, owner="2")
    world.result = 0
    world.look()
    assert world.look() == 0
    assert pods.made == []


@pytest.mark.parametrize(("code", "result"), [(0, 0), (75, 75), (137, 0), (0, 75), (1, 3)])
def test_the_trials_own_word_goes_before_its_containers(code: int, result: int) -> None:
    assert ended(code, result)[0] == result


def test_without_a_word_the_containers_exit_code_counts() -> None:
    assert ended(137, None) == (137, "")
    code, trouble = ended(137, None, ended_for="OOMKilled")
    assert code == 137
    assert "trial.pod.limits.memory" in trouble


@pytest.mark.parametrize(
    "message",
    [
        "Pod ephemeral local storage usage exceeds the total limit of containers 20Mi. ",
        'Usage of EmptyDir volume "tmp" exceeds the limit "20Mi". ',
        'Container base exceeded its local ephemeral storage limit "20Mi". ',
    ],
)
@pytest.mark.parametrize("exit_code", [137, None, 75])
def test_a_pod_that_is_evicted_for_its_own_limit_is_a_failure_that_says_so(
    message: str, exit_code: int | None
) -> None:
    world = made(code=exit_code, phase="Failed", lost="Evicted", message=message)
    world.result = 75 if exit_code == 75 else None  # it had a second to say that it was stopped
    assert world.look() == 1
    assert world.segment.is_mistake
    assert f"{message.strip()} Write less to /tmp" in world.segment.trouble


def test_a_trial_that_had_finished_when_it_was_evicted_has_finished() -> None:
    message = 'Usage of EmptyDir volume "tmp" exceeds the limit "20Mi". '
    assert ended(0, 0, lost="Evicted", message=message)[0] == 0


def test_an_evicted_pod_is_trouble_of_the_infrastructure() -> None:
    code, trouble = ended(137, None, lost="Evicted", message="the node was low on memory")
    assert code == 70
    assert "low on memory" in trouble


def test_an_init_container_that_fails_is_a_mistake_unless_the_pod_was_deleted() -> None:
    world = made(phase="Failed", init_failure="its init container data ended with 3")
    assert world.look() == 1
    assert "init container data" in world.segment.trouble
    assert world.segment.is_mistake
    world = made(phase="Failed", init_failure="its init container data ended with 143",
                 deletion_grace_s=GRACE_S)  # fmt: skip
    world.look()
    world.pods.pods.clear()
    assert world.look() == 70


def test_a_pod_that_vanished_is_trouble_of_the_infrastructure_unless_the_trial_had_its_say() -> (
    None
):
    world = made(phase="Running", started=True)
    world.look()
    world.pods.pods.clear()
    assert world.look() == 70
    assert "deleted" in world.segment.trouble
    world = made(phase="Running", started=True)
    world.result = 75
    world.pods.pods.clear()
    assert world.look() == 75


def test_a_pod_of_the_same_name_that_somebody_else_made_is_not_this_segments() -> None:
    world = made(phase="Running", started=True)
    world.look()
    world.pods.change(NAME, uid="another")
    assert world.look() == 70


def test_a_stopped_pod_counts_only_once_it_is_gone() -> None:
    world = made(phase="Running", started=True)
    world.look()
    world.segment.stop()
    assert world.look() is None
    assert world.pods.deleted == [(NAME, 30)]
    world.pods.change(NAME, deletion_grace_s=GRACE_S, code=75)
    world.result = 75
    assert world.look() is None
    world.pods.pods.clear()
    assert world.look() == 75
    assert world.pods.deleted == [(NAME, 30)]


def test_a_trial_that_is_over_is_cut_off_sooner() -> None:
    world = made(phase="Running", started=True)
    world.segment.stop()
    world.look()
    world.pods.change(NAME, deletion_grace_s=GRACE_S)
    world.segment.hurry()
    world.look()
    world.look()
    assert world.pods.deleted == [(NAME, 30), (NAME, 5)]


def test_a_sidecar_that_ignores_sigterm_holds_an_ended_trials_gpu_for_a_moment_only() -> None:
    stopped = made(phase="Running", started=True, sidecars_run=True)
    stopped.segment.stop()
    stopped.look()
    stopped.pods.change(NAME, deletion_grace_s=GRACE_S)
    stopped.look()
    assert stopped.pods.deleted == [(NAME, 30)]
    stopped.pods.change(NAME, code=75)
    stopped.look()
    assert stopped.pods.deleted == [(NAME, 30)]  # a node does not shorten what it has begun
    done = made(phase="Running", started=True, sidecars_run=True, code=0)
    done.result = 0
    assert done.look() == 0
    done.segment.stop()  # as its task does once it has ended
    done.look()
    assert done.pods.deleted == [(NAME, 5)]


def test_the_object_of_a_node_that_does_not_answer_is_removed_by_force() -> None:
    world = made(phase="Running", started=True)
    world.segment.stop()
    world.look()
    world.pods.change(NAME, deletion_grace_s=GRACE_S)
    world.look()
    world.look(GRACE_S + FORCE_AFTER_S - 5.0)
    assert (NAME, 0) not in world.pods.deleted
    world.look(10.0)
    assert world.pods.deleted[-1] == (NAME, 0)


def test_a_pod_that_its_lost_node_never_ends_is_removed_though_nobody_told_it_to_stop() -> None:
    world = made(phase="Running", started=True)
    world.look()
    world.pods.change(NAME, deletion_grace_s=GRACE_S)
    world.look()
    world.look(GRACE_S)
    assert world.pods.deleted == []
    world.look(FORCE_AFTER_S + 5.0)
    assert world.pods.deleted == [(NAME, 0)]
    world.pods.pods.clear()
    assert world.look() == 70


@pytest.mark.parametrize("deleted_at", ["1970-01-01T00:00:00Z", "2970-01-01T00:00:00Z"])
def test_a_pod_has_its_whole_grace_whatever_the_clock_of_the_cluster_shows(deleted_at: str) -> None:
    metadata = {"name": NAME, "uid": "new-1", "resourceVersion": "2",
                "labels": {"hermes-ops/try": "1", "hermes-ops/epoch": "1"},
                "deletionTimestamp": deleted_at, "deletionGracePeriodSeconds": 30}  # fmt: skip
    world = made(phase="Running", started=True)
    world.look()
    world.pods.pods[NAME] = PodView.from_json({"metadata": metadata, "status": {}})
    for _ in range(2):
        world.look((GRACE_S + FORCE_AFTER_S) / 2 - 1.0)
    world.look()
    assert world.pods.deleted == []
    world.look(GRACE_S + FORCE_AFTER_S)
    assert world.pods.deleted == [(NAME, 0)]


def test_a_shorter_grace_brings_the_removal_by_force_forward() -> None:
    world = made(phase="Running", started=True)
    world.look()
    for grace_s in (300.0, 5.0):
        world.pods.change(NAME, deletion_grace_s=grace_s)
        world.look()
    world.look(FORCE_AFTER_S + 6.0)
    assert world.pods.deleted == [(NAME, 0)]


def test_a_stop_before_the_pod_is_made_makes_none() -> None:
    world = World(FakePods())
    world.segment.stop()
    assert world.look() == 70
    assert world.pods.made == []


def test_the_pod_of_an_earlier_lease_is_gone_before_the_new_one_is_made() -> None:
    pods = FakePods({"p-0": replace(POD, name="p-0", epoch=0)})
    world = World(pods)
    assert world.look() is None
    assert (pods.made, pods.deleted) == ([], [("p-0", 30)])
    pods.pods.clear()
    world.look()
    assert pods.made == [NAME]


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_pod_of_another_installations_sweep_of_the_same_name_is_left_alone(epoch: int) -> None:
    theirs = replace(POD, name="p-theirs", epoch=epoch, installation="theirs")
    world = World(FakePods({"p-theirs": theirs}), installation="ours")
    assert world.look() is None
    assert (world.pods.made, world.pods.deleted) == ([NAME], [])


def test_a_pod_of_an_earlier_version_that_names_no_installation_counts_as_ours() -> None:
    pods = FakePods({"p-0": replace(POD, name="p-0", epoch=0)})
    World(pods, installation="ours").look()
    assert pods.deleted == [("p-0", 30)]


def test_the_pod_of_a_later_lease_is_left_alone() -> None:
    pods = FakePods({"p-2": replace(POD, name="p-2", epoch=2)})
    with pytest.raises(OwnershipLost):
        World(pods).look()
    assert (pods.made, pods.deleted) == ([], [])


def test_an_image_that_is_missing_is_a_mistake_that_says_so() -> None:
    world = made(waits_for="ImagePullBackOff", message="image gone:1 not found")
    assert world.look() is None
    assert world.look(61.0) == 1
    assert "gone:1" in world.segment.trouble
    world.look()
    assert set(world.pods.deleted) == {(NAME, 0)}


def test_an_image_that_is_missing_is_a_mistake_however_short_the_start_may_be() -> None:
    world = World(FakePods(), limits=PodLimits(GRACE_S, 10.0))
    world.look()
    world.pods.change(NAME, waits_for="ErrImagePull")
    assert world.look(12.0) == 1


@pytest.mark.parametrize(
    "answer",
    [
        "unexpected status code https://r.example/v2/: 429 Too Many Requests - toomanyrequests",
        "unexpected status from HEAD request to https://r.example/v2/: 503 Service Unavailable",
        'Head "https://r.example/v2/": dial tcp 10.0.0.1:443: i/o timeout',
        "context deadline exceeded",
    ],
)
def test_a_registry_that_is_busy_for_minutes_is_no_mistake_of_the_trial(answer: str) -> None:
    world = made()
    for _ in range(4):
        world.pods.change(NAME, waits_for="ErrImagePull", message=answer)
        assert world.look(50.0) is None
        world.pods.change(NAME, waits_for="ImagePullBackOff", message='Back-off pulling "train:1"')
        assert world.look(50.0) is None
    assert world.look(200.0) == 70
    assert answer in world.segment.trouble


def test_a_tag_that_reads_like_an_answer_of_the_registry_is_a_mistake() -> None:
    world = made(waits_for="ErrImagePull", message='"r.example/train:429": not found')
    world.look()
    assert world.look(61.0) == 1


def test_an_image_that_is_missing_after_all_is_a_mistake_once_the_registry_says_so() -> None:
    world = made(waits_for="ErrImagePull", message="429 Too Many Requests")
    world.look(100.0)
    world.pods.change(NAME, message="train:1: not found")
    world.look()
    assert world.look(61.0) == 1


def test_an_image_that_comes_at_last_is_no_mistake() -> None:
    world = made(waits_for="ErrImagePull", message="too many requests")
    world.look(50.0)
    world.pods.change(NAME, waits_for="ContainerCreating")
    world.look()
    world.pods.change(NAME, waits_for="ErrImagePull")
    assert world.look() is None
    assert world.look(50.0) is None


NO_MAP = 'MountVolume.SetUp failed for volume "volume-0" : configmap "sgd" not found'


@pytest.mark.parametrize(
    ("failure", "missing"),
    [
        (NO_MAP, 'configmap "sgd" not found'),
        ('MountVolume.SetUp failed for volume "k" : secret "key" not found', '"key" not found'),
        ("... : references non-existent secret key: token", "non-existent secret key: token"),
    ],
)
def test_a_volume_whose_source_is_missing_is_a_mistake_that_says_so(
    failure: str, missing: str
) -> None:
    world = made(waits_for="ContainerCreating", node="n")
    world.pods.mount_failures = (failure, "Unable to attach or mount volumes: timed out")
    world.look()
    assert world.look(11.0) is None
    assert world.look(61.0) == 1
    assert missing in world.segment.trouble
    assert "trial.pod" in world.segment.trouble
    assert world.segment.is_mistake


def test_a_claim_that_is_missing_is_a_mistake_that_says_so() -> None:
    world = made(message='0/2 nodes are available: persistentvolumeclaim "data" not found.')
    assert (world.look(), world.look(61.0)) == (None, 1)
    assert world.segment.trouble.startswith('persistentvolumeclaim "data" not found: create it')


def test_a_secret_that_comes_at_last_is_no_mistake() -> None:
    world = made(waits_for="ContainerCreating", node="n")
    world.pods.mount_failures = (NO_MAP,)
    for _ in range(4):
        assert world.look(15.0) is None
    world.pods.mount_failures = ()
    for _ in range(5):
        assert world.look(30.0) is None


def test_a_volume_that_is_away_gives_the_turn_back_in_time_and_says_why() -> None:
    world = made(waits_for="ContainerCreating", node="n")
    world.pods.mount_failures = ("MountVolume.SetUp failed: nfs server not responding",)
    world.look()
    assert world.look(START_S - 10.0) is None
    assert world.look(10.0) == 70
    assert "nfs server not responding" in world.segment.trouble


def test_events_are_read_seldom_and_only_of_a_pod_that_has_a_node() -> None:
    world = made(message="0/2 nodes are available")
    for _ in range(20):
        world.look(1.0)
    assert world.pods.looks == 0
    world.pods.change(NAME, node="n", waits_for="ContainerCreating", message="")
    for _ in range(30):
        world.look(1.0)
    assert world.pods.looks == 2


def test_events_are_read_no_more_once_the_volumes_are_mounted() -> None:
    world = made(waits_for="ContainerCreating", node="n")
    world.pods.mount_failures = (NO_MAP,)
    for _ in range(3):
        world.look(10.0)
    world.pods.mount_failures = None
    for _ in range(10):
        assert world.look(30.0) is None
    assert world.pods.looks == 2


def test_who_may_not_read_events_says_so_once_and_the_pod_goes_on() -> None:
    world = made(waits_for="ContainerCreating", node="n")
    world.pods.refuses_events = Rejected("events is forbidden")
    for _ in range(4):
        assert world.look(20.0) is None
    assert [line for line in world.said if "events is forbidden" in line] == [
        "A missing volume of the pod is noticed late: events is forbidden"
    ]


def test_a_pod_that_finds_no_node_gives_its_turn_back_in_time() -> None:
    world = made(message="0/2 nodes are available: 2 Insufficient nvidia.com/gpu")
    assert world.look(START_S - 10.0) is None
    assert world.look(10.0) == 70
    assert "Insufficient" in world.segment.trouble


def test_a_pod_that_waits_long_for_a_node_is_read_seldom() -> None:
    world = made(message="0/2 nodes are available")
    seen = world.pods.fetches
    for _ in range(50):
        world.look(0.2)
    assert world.pods.fetches - seen == 50
    world.look(60.0)
    seen = world.pods.fetches
    for _ in range(500):
        world.look(0.2)
    assert 90 <= world.pods.fetches - seen <= 110
    world.segment.stop()
    seen = world.pods.fetches
    for _ in range(20):
        world.look(0.2)
    assert world.pods.fetches - seen == 20


def test_a_cluster_that_is_away_costs_a_running_trial_nothing() -> None:
    world = made(phase="Running", started=True)
    world.look()
    world.pods.away = Unavailable("refused")
    assert world.look(3 * START_S) is None
    world.pods.away = None
    assert world.look() is None
    assert world.pods.deleted == []


def test_a_quota_that_is_used_up_is_not_said_to_be_a_cluster_that_does_not_answer() -> None:
    world = World(FakePods(away=Unavailable("Kubernetes answered 403: exceeded quota: gpus")))
    assert world.look() is None
    assert world.said == ["There is no pod yet: Kubernetes answered 403: exceeded quota: gpus"]
    world = made(phase="Running", started=True)
    world.look()
    world.pods.away = Unavailable("Kubernetes did not answer")
    world.look()
    assert world.said[-1] == "The pod goes on: Kubernetes did not answer"


def test_a_request_that_is_rejected_fails_with_the_reason() -> None:
    pods = FakePods(refuses_pods=Rejected("violates PodSecurity"))
    world = World(pods)
    assert world.look() == 1
    assert "PodSecurity" in world.segment.trouble
    assert world.segment.is_mistake


def test_a_right_that_is_away_for_a_moment_costs_a_trial_that_starts_nothing() -> None:
    world = World(FakePods(away=Rejected("Unauthorized")))
    assert (world.look(), world.look(50.0)) == (None, None)
    world.pods.away = None
    assert world.look() is None
    assert world.pods.made == [NAME]


def test_a_right_that_stays_away_fails_a_trial_that_has_no_pod_yet() -> None:
    world = World(FakePods(away=Rejected("pods is forbidden")))
    assert (world.look(), world.look(61.0)) == (None, 1)
    assert world.segment.trouble == "pods is forbidden"
    world.segment.finish()
    assert world.pods.deleted == []


def test_a_right_that_is_away_for_a_moment_costs_a_running_trial_nothing() -> None:
    world = made(phase="Running", started=True)
    world.look()
    for _ in range(2):
        world.pods.away = Rejected("Unauthorized")
        assert (world.look(), world.look(50.0)) == (None, None)
        world.pods.away = None
        assert world.look() is None
    assert world.pods.deleted == []


def test_a_right_that_stays_away_fails_the_trial_with_the_reason() -> None:
    world = made(phase="Running", started=True)
    world.look()
    world.pods.away = Rejected("pods is forbidden")
    assert (world.look(), world.look(61.0)) == (None, 1)
    assert world.segment.trouble == "pods is forbidden"


def test_a_finished_pod_is_cleared_away() -> None:
    world = made(code=0, phase="Succeeded", started=True)
    world.result = 0
    assert world.look() == 0
    world.pods.away = None
    pods = world.pods
    real = pods.delete

    def delete(pod: Any, grace_s: int) -> bool:
        pods.pods.clear()
        return real(pod, grace_s)

    pods.delete = delete  # type: ignore[method-assign]
    world.segment.finish()
    assert pods.deleted == [(NAME, 30)]


def test_the_log_of_the_container_is_passed_on() -> None:
    pods = FakePods(lines=("2026-01-01T00:00:00.1Z epoch=1 loss=3",))
    world = World(pods)
    world.look()
    pods.change(NAME, code=0, phase="Succeeded", started=True)
    world.result = 0
    world.look()
    pods.pods.clear()
    world.segment.finish()
    assert "epoch=1 loss=3" in world.said


LINES = [f"2026-01-01T00:00:0{n}.{fraction}Z line {n}" for n, fraction in ((1, "9"), (2, "15"))]


class Breaking(FakePods):
    """Its log breaks off after the first line, and is whole the second time."""

    asked: list[int | None]

    def log(self, name: str, since_s: int | None) -> Iterator[str]:
        self.asked.append(since_s)
        yield LINES[0]
        if len(self.asked) == 1:
            raise Unavailable("the connection broke")
        yield LINES[1]


def test_no_line_is_lost_or_doubled_when_the_connection_breaks() -> None:
    pods = Breaking()
    pods.asked = []
    said: list[str] = []
    follower = LogFollower(pods, "p", said.append, lambda: None)

    def on_end() -> None:
        if len(pods.asked) == 2:
            follower.finish(0.0)

    follower.on_end = on_end
    follower.run()
    assert said == ["line 1", "line 2"]
    assert pods.asked[:2] == [None, 5]
    assert LOG_PAUSE_S < 1.0


class Silent(FakePods):
    """Does not give its log, for these reasons; then it is empty."""

    reasons: list[Exception]

    def log(self, name: str, since_s: int | None) -> Iterator[str]:
        if self.reasons:
            raise self.reasons.pop(0)
        yield from ()


def test_a_log_that_may_not_be_read_is_said_to_be_so_once() -> None:
    pods = Silent()
    pods.reasons = [Forbidden("Kubernetes answered 403: pods/log is forbidden")] * 3
    said: list[str] = []
    paused: list[float] = []
    follower = LogFollower(
        pods, "p", said.append, lambda: follower.finish(0.0), pause=paused.append
    )
    follower.run()
    assert said == [
        "The log of the pod p cannot be read: Kubernetes answered 403: pods/log is forbidden"
    ]
    assert min(paused) > 10.0


def test_a_log_that_breaks_off_wakes_nobody() -> None:
    pods = Silent()
    pods.reasons = [Unavailable("no answer"), Rejected("pod not found")]
    ends: list[int] = []

    def on_end() -> None:
        ends.append(len(pods.reasons))
        follower.finish(0.0)

    follower = LogFollower(pods, "p", lambda line: None, on_end, pause=lambda seconds: None)
    follower.run()
    assert ends == [0]


def test_times_of_different_precision_are_in_order() -> None:
    said: list[str] = []
    stamps = ("2026-01-01T00:00:01.9Z a", "2026-01-01T00:00:01.95Z b", "2026-01-01T00:00:02Z c")
    pods = FakePods(lines=stamps)
    follower = LogFollower(pods, "p", said.append, lambda: None)
    follower.finish(0.0)
    follower.run()
    assert said == ["a", "b", "c"]


def test_times_of_a_node_in_another_zone_are_in_order_when_its_clock_is_put_back() -> None:
    said: list[str] = []
    stamps = ("2026-10-25T02:59:59.5+02:00 summer", "2026-10-25T02:00:00.1+01:00 winter")
    follower = LogFollower(FakePods(lines=stamps), "p", said.append, lambda: None)
    follower.finish(0.0)
    follower.run()
    assert said == ["summer", "winter"]


def test_a_line_of_the_node_itself_is_said_once_and_hides_no_later_one() -> None:
    said: list[str] = []
    trouble = "failed to create fsnotify watcher: too many open files"
    pods = FakePods(lines=("2026-01-01T00:00:01Z a", trouble))
    follower = LogFollower(pods, "p", said.append, lambda: None)

    def on_end() -> None:
        if len(pods.lines) == 3:
            follower.finish(0.0)
        pods.lines = ("2026-01-01T00:00:01Z a", "2026-01-01T00:00:02Z b", trouble)

    follower.on_end = on_end
    follower.run()
    assert said == ["a", trouble, "b"]
