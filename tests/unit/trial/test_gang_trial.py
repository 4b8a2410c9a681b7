"""A trial on two nodes: two hermes-trial processes on this machine, with one folder."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes_ops.trial.ports import ReservedPort, reserve_ports
from tests.unit.trial.test_group_trial import STEPS, GroupTrial, last_steps, says, wait_for

pytestmark = pytest.mark.timeout(120)

TRAIN = """
import json, signal
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
epoch = 0
while True:
    epoch += 1
    barrier_or_leave()
    if rank == 0:
        print(f"epoch={epoch} loss={1 / epoch}", flush=True)
    time.sleep(0.05)
"""
LEAVE = """
def barrier_or_leave():
    stop = os.path.join(group, "stop")
    if rank == 0 and told:
        with open(os.path.join(os.environ["HERMES_CHECKPOINT_DIR"], "state"), "w") as file:
            file.write(str(epoch))
        mark("stop")
    barrier()
    if os.path.exists(stop):
        sys.exit(75)
    barrier()
"""


class GangTrial(GroupTrial):
    """Runs hermes-trial on each of two "nodes", of which the first has two workers."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.ports: list[ReservedPort] = reserve_ports(1)

    def node(self, number: int, *options: str) -> subprocess.Popen[bytes]:
        gang = ["--gang", "127.0.0.1=2,localhost=1", "--gang-node", str(number)]
        port = ["--gang-port", str(self.ports[0].number)]
        return self.start(*gang, *port, *options, workers=3)

    def nodes(self, *options: str) -> list[subprocess.Popen[bytes]]:
        return [self.node(number, *options) for number in (0, 1)]

    def end(self, *nodes: subprocess.Popen[bytes]) -> list[int]:
        return [node.wait(60) for node in nodes]

    def close(self) -> None:
        super().close()
        for port in self.ports:
            port.release()


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[GangTrial]:
    trial = GangTrial(tmp_path)
    yield trial
    trial.close()


def test_workers_on_two_nodes_meet_and_are_one_trial_that_has_finished(trial: GangTrial) -> None:
    trial.write(
        "print(f'epoch=1 loss={rank + 1}')",
        "own = 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'HOROVOD_CROSS_SIZE'",
        "print(rank, 'of', size, *(os.environ[name] for name in own))",
    )
    member = trial.node(1)
    leader = trial.node(0)
    output, _ = leader.communicate(timeout=60)
    assert (leader.returncode, member.wait(30)) == (0, 0)
    assert output == b"epoch=1 loss=1\n0 of 3 0 2 0 2\n"
    assert [(m["value"], m["step"]) for m in trial.lines("metrics.jsonl")] == [(1.0, 1)]
    assert (trial.result["outcome"], trial.status["workers"]) == ("finished", 3)
    assert trial.log(1).endswith("epoch=1 loss=2\n1 of 3 1 2 0 1\n")
    assert trial.log(2).endswith("epoch=1 loss=3\n2 of 3 0 1 1 2\n")


@pytest.mark.parametrize("told", [[0], [1], [0, 1]], ids=["first", "other", "both"])
def test_a_stop_of_any_node_preempts_the_trial_on_all(trial: GangTrial, told: list[int]) -> None:
    trial.write("import time", LEAVE, TRAIN)
    nodes = trial.nodes()
    says(nodes[0], b"epoch=2")
    for number in told:
        nodes[number].send_signal(signal.SIGTERM)
    assert trial.end(*nodes) == [75, 0]
    assert trial.result["outcome"] == "preempted"


@pytest.mark.parametrize("told", [0, 1], ids=["first", "other"])
def test_workers_on_all_nodes_get_sigterm_after_the_same_step(trial: GangTrial, told: int) -> None:
    trial.write(STEPS)
    nodes = trial.nodes()
    says(nodes[0], b"epoch=20")
    nodes[told].send_signal(signal.SIGTERM)
    assert trial.end(*nodes) == [75, 0]
    assert trial.result["outcome"] == "preempted"
    assert len(last_steps(trial)) == 3
    assert len(set(last_steps(trial))) == 1


def test_a_worker_that_fails_on_another_node_is_named_with_its_last_lines(
    trial: GangTrial,
) -> None:
    trial.write("if rank == 2:", "    raise ValueError('no such data')", "barrier()")
    assert trial.end(*trial.nodes()) == [1, 0]
    assert trial.result["outcome"] == "failed"
    assert trial.result["reason"].startswith("rank 2 of 3 failed first (rank-2.log")
    assert "ValueError: no such data" in trial.result["reason"]
    assert trial.result["tail"][-1] == "ValueError: no such data"


def test_a_node_that_is_lost_interrupts_the_trial_and_is_no_failure_of_it(
    trial: GangTrial,
) -> None:
    trial.write("import time", LEAVE, TRAIN)
    leader, member = trial.nodes()
    says(leader, b"epoch=2")
    member.kill()
    assert trial.end(leader) == [75]
    assert trial.result["outcome"] == "interrupted"
    assert trial.result["reason"] == "nothing is heard of the trial's workers on localhost"


def test_a_node_whose_leader_is_killed_leaves_with_its_workers(trial: GangTrial) -> None:
    trial.write("import time", LEAVE, TRAIN)
    leader, member = trial.nodes()
    says(leader, b"epoch=2")
    leader.kill()
    assert trial.end(member) == [70]


def test_no_worker_runs_unless_all_nodes_are_there(trial: GangTrial) -> None:
    trial.write("mark('ran')", meets=False)
    assert trial.end(trial.node(0, "--gang-timeout", "1")) == [70]
    assert (trial.result["outcome"], trial.result["cause"]) == ("interrupted", "incomplete")
    assert "nothing was heard of localhost within 1 s" in trial.result["reason"]
    assert not (trial.folder / "group" / "ran").exists()


def test_a_stop_while_nodes_wait_for_each_other_is_obeyed(trial: GangTrial) -> None:
    trial.write(meets=False)
    leader = trial.node(0)
    wait_for((trial.folder / "status.json").exists)
    leader.send_signal(signal.SIGTERM)
    assert trial.end(leader) == [75]
    assert trial.end(trial.node(1, "--gang-timeout", "0.5")) == [70]  # there is no first node


def test_a_node_that_comes_late_does_not_join(trial: GangTrial) -> None:
    trial.write("import time", LEAVE, TRAIN)
    leader, member = trial.nodes()
    says(leader, b"epoch=2")
    assert trial.end(trial.node(1)) == [70]
    leader.send_signal(signal.SIGTERM)
    assert trial.end(leader, member) == [75, 0]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--gang", "a=1"], "of two nodes or more"),
        (["--gang", "a=1,b=1", "--gang-node", "2"], "they count from 0 to 1"),
        (["--gang", "a=1,b=1"], "--gang has 2 workers, and --workers is 3"),
    ],
)
def test_an_impossible_gang_is_one_clear_line(
    trial: GangTrial, options: list[str], why: str
) -> None:
    trial.write()
    code, output = trial.run(*options, workers=3)
    assert code == 2
    assert why in output.decode()
