"""A segment on several nodes: all of its pods start or none goes on, and one end is the trial's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hermes_ops.core.summary import INCOMPLETE
from hermes_ops.kubernetes import GangSegment, PodLimits, PodSegment
from hermes_ops.kubernetes.gang_segment import GangStep, PodState, next_step
from tests.unit.kubernetes.pods import POD, FakePods

GRACE_S, START_S = 30.0, 60.0
STARTING, RUNNING = PodState(False, None, False), PodState(True, None, False)
DISMISSED, LOST = PodState(True, 0, False), PodState(True, 70, False)
NEVER, ENDING = PodState(False, 70, False), PodState(True, None, True)
WRONG, KILLED = PodState(False, 1, False, True), PodState(True, 137, False, True)


@pytest.mark.parametrize(
    ("first_started", "others", "step"),
    [
        (False, [STARTING, STARTING], GangStep.WAIT),
        (True, [RUNNING, STARTING], GangStep.WAIT),
        (True, [RUNNING, RUNNING], GangStep.WAIT),
        (True, [RUNNING, DISMISSED], GangStep.WAIT),
        (True, [RUNNING, NEVER], GangStep.GIVE_UP),
        (True, [STARTING, LOST], GangStep.GIVE_UP),
        (False, [RUNNING, LOST], GangStep.GIVE_UP),
        (True, [RUNNING, LOST], GangStep.STOP),
        (True, [RUNNING, ENDING], GangStep.STOP),
        (True, [RUNNING, PodState(True, 0, True)], GangStep.WAIT),
        (True, [LOST, KILLED], GangStep.FAIL),
        (False, [STARTING, WRONG], GangStep.FAIL),
        (True, [RUNNING, PodState(True, None, False, True)], GangStep.WAIT),
    ],
)
def test_what_is_done_follows_from_the_states_of_the_pods(
    first_started: bool, others: list[PodState], step: GangStep
) -> None:
    assert next_step(first_started, others) is step


class Gang:
    """A segment of two pods under a clock that is set by hand."""

    def __init__(
        self, pods: FakePods | None = None, *, holder: Any = None, was_whole: bool = False
    ) -> None:
        self.now_s = 1_000.0
        self.result: int | None = None
        self.said: list[str] = []
        self.pods = FakePods() if pods is None else pods
        names = ("g", "g-1")
        self.segment = GangSegment(
            self._pod(names[0], names),
            (self._pod(names[1], names),),
            self.said.append,
            was_whole=was_whole,
        )
        self.segment.first.holder = self.segment.others[0].holder = holder
        self.segment.first.record = lambda: self.result
        self.segment.start()

    def _pod(self, name: str, names: tuple[str, ...]) -> PodSegment:
        return PodSegment(
            self.pods, request=name, name=name, owner="1", epoch=1, trial={}, record=lambda: None,
            emit=self.said.append, limits=PodLimits(GRACE_S, START_S), clock=lambda: self.now_s,
            siblings=frozenset(names),
        )  # fmt: skip

    def look(self, times: int = 1) -> int | None:
        code = None
        for _ in range(times):
            self.now_s += 2.0
            code = self.segment.wait(0.0)
        return code

    def change(self, *names: str, **facts: Any) -> None:
        for name in names:
            self.pods.change(name, **facts)


def running() -> Gang:
    gang = Gang()
    gang.look()
    gang.change("g", "g-1", phase="Running", started=True)
    assert gang.look(2) is None
    return gang


def test_all_pods_of_a_lease_are_made_and_none_ends_another() -> None:
    gang = Gang()
    assert gang.look(3) is None
    assert (gang.pods.made, gang.pods.deleted) == (["g", "g-1"], [])


def test_a_holder_takes_the_pods_over_once_all_are_made() -> None:
    gang = Gang(holder="a trigger")
    handed_over = [gang.segment.handed_over]
    gang.segment.first.wait(0.0)
    handed_over.append(gang.segment.handed_over)
    gang.look()
    handed_over.append(gang.segment.handed_over)
    assert (handed_over, gang.segment.holder) == ([False, False, True], "a trigger")


def test_pods_that_had_all_started_before_are_lost_and_not_incomplete() -> None:
    alone = FakePods({"g": replace(POD, name="g", phase="Running", started=True)})
    gang = Gang(alone, was_whole=True)
    gang.segment.others[0].request = None  # it was made before, and is gone
    assert gang.look(2) is None
    assert ("g", 30) in alone.deleted
    alone.pods.clear()
    assert gang.look(2) == 70


def test_the_end_of_the_first_pod_is_that_of_the_segment_and_all_are_deleted() -> None:
    gang = running()
    gang.result = 0
    gang.change("g", phase="Succeeded", code=0)
    assert gang.look() == 0
    gang.pods.pods.pop("g")
    gang.change("g-1", phase="Succeeded", code=0)
    gang.segment.stop()
    gang.look()
    gang.pods.pods.pop("g-1")
    gang.segment.finish()
    assert gang.segment.trouble == ""
    assert not gang.pods.pods


def test_a_pod_that_does_not_start_in_time_keeps_the_others_from_training() -> None:
    gang = Gang()
    gang.look()
    gang.change("g", phase="Running", started=True)
    gang.change("g-1", message="0/2 nodes are available")
    assert gang.look() is None
    gang.now_s += START_S
    assert gang.look() == INCOMPLETE
    assert gang.segment.trouble == (
        "not all of its 2 pods have started: g-1: its pod did not start in time: "
        "0/2 nodes are available"
    )
    assert gang.look() == INCOMPLETE
    gang.pods.pods.clear()
    gang.segment.finish()
    assert gang.pods.made == ["g", "g-1"]


def test_a_first_pod_that_does_not_start_in_time_is_no_trouble_of_the_others() -> None:
    gang = Gang()
    gang.look()
    gang.change("g", message="0/2 nodes are available")
    gang.change("g-1", phase="Running", started=True)
    assert gang.look() is None
    gang.now_s += START_S
    assert [gang.look(), gang.look()] == [INCOMPLETE, INCOMPLETE]
    assert gang.segment.trouble == (
        "not all of its 2 pods have started: g: its pod did not start in time: "
        "0/2 nodes are available"
    )


def test_a_gang_that_is_stopped_before_its_first_pod_has_started_is_not_incomplete() -> None:
    gang = Gang()
    gang.look()
    gang.segment.stop()
    gang.pods.pods.clear()
    assert gang.look(2) == 70


OUT_OF_MEMORY = {"phase": "Failed", "code": 137, "ended_for": "OOMKilled"}


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (OUT_OF_MEMORY, "out of memory"),
        ({"phase": "Failed", "code": 128, "ended_for": "StartError"}, "cannot start"),
        ({"phase": "Failed", "code": 127, "ended_for": "ContainerCannotRun"}, "cannot start"),
    ],
)
def test_another_pod_that_ends_by_a_mistake_is_a_failure_of_the_trial(
    facts: dict[str, Any], why: str
) -> None:
    gang = running()
    gang.change("g-1", **facts)
    assert [gang.look(), gang.look()] == [1, 1]
    assert gang.segment.trouble.startswith("g-1: ")
    assert why in gang.segment.trouble
    assert gang.pods.deleted == []
    gang.segment.stop()  # as it is finished
    gang.look()
    gang.segment.first.wait(0.0)
    assert ("g", 30) in gang.pods.deleted  # with its grace


def test_an_image_that_only_another_pod_cannot_pull_is_a_failure_of_the_trial() -> None:
    gang = Gang()
    gang.look()
    gang.change("g", phase="Running", started=True)
    gang.change("g-1", waits_for="ErrImagePull", message="no such image")
    assert gang.look() is None
    gang.now_s += START_S
    assert gang.look() == 1
    assert "g-1: ErrImagePull: no such image: correct trial.pod" in gang.segment.trouble


def test_a_pod_that_runs_out_of_memory_while_all_are_stopped_fails_nothing() -> None:
    gang = running()
    gang.segment.stop()
    gang.change("g-1", **OUT_OF_MEMORY)
    assert gang.look(2) is None
    gang.result = 75
    gang.pods.pods.clear()
    assert gang.look() == 75


@pytest.mark.parametrize("facts", [{"deletion_grace_s": 30.0}, {"phase": "Failed", "code": 137}])
def test_a_pod_that_is_lost_stops_all_and_the_trial_goes_on_as_the_first_one_says(
    facts: dict[str, Any],
) -> None:
    gang = running()
    gang.change("g-1", **facts)
    assert gang.look(2) is None
    assert ("g", 30) in gang.pods.deleted
    assert any("All pods of the trial are stopped" in line for line in gang.said)
    gang.result = 75
    gang.pods.pods.clear()
    assert gang.look() == 75


def test_a_pod_that_vanishes_stops_all() -> None:
    gang = running()
    gang.pods.pods.pop("g-1")
    assert gang.look(2) is None
    assert "g-1: its pod was deleted or its node lost" in gang.segment.trouble
    assert ("g", 30) in gang.pods.deleted


def test_a_stop_is_one_of_all_pods_at_the_same_time() -> None:
    gang = running()
    gang.segment.stop()
    assert gang.look() is None
    assert sorted(gang.pods.deleted) == [("g", 30), ("g-1", 30)]
    gang.segment.hurry()
    gang.look()
    assert ("g-1", 5) in gang.pods.deleted


def test_a_second_attempt_finds_the_pods_of_the_first() -> None:
    gang = running()
    again = Gang(gang.pods)
    again.result = None
    assert again.look(3) is None
    assert gang.pods.made == ["g", "g-1"]
    gang.segment.release()
    again.segment.release()
