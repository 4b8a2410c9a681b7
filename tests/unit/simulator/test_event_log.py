"""The lines of an event log, and what is read back from them."""

from __future__ import annotations

import json
from math import inf, nan

from hermes_ops.core.model import JobId, Point, SweepId
from hermes_ops.policies import make_policy
from hermes_ops.simulator.engine import layout, simulate
from hermes_ops.simulator.event_log import EventLog, replay
from hermes_ops.simulator.workload import Costs, Work, Workload

FULL = Work(
    JobId("s/1"),
    submitted_s=1.5,
    seconds=4.0,
    gpus=2,
    sweep=SweepId("s"),
    user="ann",
    virtual_cluster="vc1",
    model_name="vgg16",
    tensor_skew=0.744,
    weight=2.0,
    deadline_s=99.0,
    preemptible=False,
    total_steps=2,
    curve=(Point(1, 0.1 + 0.2, 2.0), Point(2, inf, 4.0)),
    configuration=(("rate", 0.1), ("units", 8), ("kind", "adam"), ("nesterov", True)),
    costs=Costs(0.25, 0.5, 0.125),
    cut_short=True,
)


def logged(*jobs: Work) -> list[str]:
    lines: list[str] = []
    simulate(
        Workload("made", jobs), layout("2"), make_policy("fifo", {}), log=EventLog(lines.append)
    )
    return lines


def test_each_event_is_a_line_with_its_time_and_its_reason() -> None:
    lines = logged(Work(JobId("a"), 0.0, 3.0, curve=(Point(1, 0.5, 2.0),), costs=Costs(1.0)))
    events = [json.loads(line) for line in lines]
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in lines)
    assert [(e["at_s"], e["event"]) for e in events] == [
        (0.0, "submitted"),
        (0.0, "granted"),
        (0.0, "began"),
        (1.0, "trains"),
        (3.0, "point"),
        (4.0, "left"),
        (4.0, "ended"),
        (4.0, "closed"),
    ]
    assert events[1]["reason"].startswith("starts: it was submitted before")
    assert (events[4]["step"], events[4]["loss"]) == (1, 0.5)
    assert (events[5]["outcome"], events[6]["state"]) == ("finished", "finished")


def test_every_field_of_a_job_comes_back() -> None:
    assert replay(logged(FULL))[0].work == FULL


def test_a_loss_that_is_no_number_comes_back() -> None:
    job = Work(JobId("a"), 0.0, 3.0, curve=(Point(1, nan, 1.0),))
    loss = replay(logged(job))[0].work.curve[0].loss
    assert loss != loss


def test_a_log_that_breaks_off_gives_what_is_known() -> None:
    lines = logged(Work(JobId("a"), 0.0, 3.0), Work(JobId("b"), 0.0, 9.0))
    upto = next(n for n, line in enumerate(lines) if json.loads(line)["event"] == "ended")
    a, b = replay(lines[: upto + 1])
    assert (a.state, a.ended_s) == ("finished", 3.0)
    assert (b.state, b.ended_s, b.first_start_s) == ("stopped_early", None, 0.0)
