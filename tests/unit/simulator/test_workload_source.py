from __future__ import annotations

from pathlib import Path

import pytest

from hermes_ops.core.model import JobId
from hermes_ops.errors import ConfigError
from hermes_ops.policies import make_policy
from hermes_ops.simulator.comparison import Contender
from hermes_ops.simulator.engine import layout, simulate
from hermes_ops.simulator.workload import Interference, NodeFailure
from hermes_ops.simulator.workload_source import DisturbedSource, TraceSource, read_disturbances

HEADER = "node,at_s,until_s,speed\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "nodes.csv"


def test_speed_0_is_a_failure_and_any_other_an_interference(file: Path) -> None:
    file.write_text(f"{HEADER}node-1, 5, 20, 0\n\nnode-0,1,2.5,0.5\n")
    assert read_disturbances(file) == (
        NodeFailure(5.0, "node-1", 20.0),
        Interference(1.0, "node-0", 2.5, 0.5),
    )


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("node-0,1,2", "4 cells"),
        (",1,2,0", "the first a node"),
        ("node-0,1,x,0", "three numbers"),
        ("node-0,2,1,0", "the end after the begin"),
        ("node-0,0,inf,0", "the end after the begin"),
        ("node-0,nan,3,0", "the end after the begin"),
        ("node-0,1,2,1.5", r"0 \(the node is away\) to 1"),
        ("node-0,1,2,nan", r"0 \(the node is away\) to 1"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(file: Path, row: str, said: str) -> None:
    file.write_text(f"{HEADER}node-0,1,2,0\n{row}\n")
    with pytest.raises(ConfigError, match=rf"line 3.*{said}"):
        read_disturbances(file)


@pytest.mark.parametrize("text", ["", "node,at_s\n", "node,at_s,until_s,speed,colour\n"])
def test_other_columns_are_refused(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"line 1.*node,at_s,until_s,speed"):
        read_disturbances(file)


def test_a_file_that_is_not_there_is_refused_by_its_name(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"nodes\.csv.*correct the path"):
        read_disturbances(file)


def test_a_job_on_a_slow_node_takes_so_much_longer(file: Path, tmp_path: Path) -> None:
    trace = tmp_path / "one.csv"
    trace.write_text("job_id,submit_time_s,num_gpus,duration_s\na,0,1,100\n")
    file.write_text(f"{HEADER}node-0,20,1000,0.5\n")
    source = DisturbedSource(TraceSource(trace), file)
    draw = source.draw(0)
    run = simulate(draw.workload, layout("1"), Contender("fifo").make(draw))
    assert {o.work.id: o.ended_s for o in run.outcomes} == {JobId("a"): 180.0}
    assert (source.name, source.varies) == ("one", False)


def test_a_node_that_is_not_there_is_refused_by_its_name(file: Path, tmp_path: Path) -> None:
    trace = tmp_path / "one.csv"
    trace.write_text("job_id,submit_time_s,num_gpus,duration_s\na,0,1,100\n")
    file.write_text(f"{HEADER}rack-7,20,1000,0\n")
    workload = DisturbedSource(TraceSource(trace), file).draw(0).workload
    with pytest.raises(ConfigError, match=r"rack-7.*node-0"):
        simulate(workload, layout("1"), make_policy("fifo", {}))
