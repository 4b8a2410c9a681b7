"""Who a worker is and where the others are, by its environment; the ports; the shared folder."""

from __future__ import annotations

import json
import os
import socket
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.trial.ports import port_range, reserve_ports
from hermes_ops.trial.worker_environment import (
    GroupAddresses,
    empty_group_folder,
    lone_worker_environment,
    worker_environment,
)

FOLDER = Path("/h/trial/group")


def addresses(size: int, *task_ports: int) -> GroupAddresses:
    return GroupAddresses(size, FOLDER, 40_001, 40_002, task_ports)


@given(st.integers(2, 16).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n))))
def test_all_frameworks_are_told_the_same_rank_and_size(place: tuple[int, int]) -> None:
    rank, size = place
    found = worker_environment({"RANK": "7", "HOROVOD_SIZE": "9"}, rank, addresses(size))
    ranks = ("HERMES_RANK", "HERMES_LOCAL_RANK", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "RANK",
             "LOCAL_RANK")  # fmt: skip
    sizes = ("HERMES_SIZE", "HERMES_LOCAL_SIZE", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE",
             "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # fmt: skip
    assert {found[name] for name in ranks} == {str(rank)}
    assert {found[name] for name in sizes} == {str(size)}
    assert (found["HOROVOD_CROSS_RANK"], found["HOROVOD_CROSS_SIZE"]) == ("0", "1")
    assert found["HERMES_GROUP_DIR"] == str(FOLDER)
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("127.0.0.1", "40002")
    assert found["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "40001"
    assert "TF_CONFIG" not in found


def test_all_workers_see_all_gpus_of_the_trial_and_differ_by_their_ranks_alone() -> None:
    own = {"HERMES_GPUS": "2,5", "CUDA_VISIBLE_DEVICES": "2,5", "PATH": "/bin"}
    first, second = (worker_environment(own, rank, addresses(2)) for rank in range(2))
    assert first["CUDA_VISIBLE_DEVICES"] == second["CUDA_VISIBLE_DEVICES"] == "2,5"
    different = {name for name in first if first[name] != second[name]}
    assert all(name.endswith("RANK") for name in different - {"JAX_LOCAL_DEVICE_IDS"})
    assert set(first) == set(second)


def test_the_user_says_how_horovod_works_and_hermes_who_is_who() -> None:
    own = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "77", "HOROVOD_GPU_OPERATIONS": "NCCL",
           "HOROVOD_CONTROLLER": "mpi"}  # fmt: skip
    found = worker_environment(own, 0, addresses(2))
    assert found["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "77"
    assert found["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert found["HOROVOD_CONTROLLER"] == "gloo"


def test_pytorch_on_one_machine_connects_by_loopback_unless_told_otherwise() -> None:
    names = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
    for found in (worker_environment({}, 1, addresses(2)), lone_worker_environment({}, 40_003)):
        assert [found[name] for name in names] == ["lo", "lo"]
    own = {"GLOO_SOCKET_IFNAME": "eth1"}
    assert lone_worker_environment(own, 40_003)["GLOO_SOCKET_IFNAME"] == "eth1"
    assert worker_environment(own, 0, addresses(2))["GLOO_SOCKET_IFNAME"] == "eth1"


def test_a_worker_alone_differs_by_nothing_but_the_variables_of_pytorch_and_jax() -> None:
    found = lone_worker_environment({"PATH": "/bin", "RANK": "3"}, 40_003)
    assert (found.pop("RANK"), found.pop("WORLD_SIZE"), found.pop("MASTER_PORT")) == (
        "0", "1", "40003",
    )  # fmt: skip
    assert set(found) == {
        "PATH", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME", "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS",
        "JAX_LOCAL_DEVICE_IDS",
    }  # fmt: skip


def test_tf_config_is_there_on_one_gpu_too_where_it_is_asked_for() -> None:
    assert "TF_CONFIG" not in lone_worker_environment({}, 40_002)
    found = json.loads(lone_worker_environment({}, 40_002, 40_003)["TF_CONFIG"])
    cluster = {"worker": ["127.0.0.1:40003"]}
    assert found == {"cluster": cluster, "task": {"type": "worker", "index": 0}}


def test_jax_starts_on_one_gpu_as_on_several() -> None:
    alone = lone_worker_environment({}, 40_002)
    first = worker_environment({}, 0, addresses(2))
    names = [name for name in first if name.startswith("JAX_")]
    assert {name: alone.get(name) for name in names} == {name: first[name] for name in names}


def test_jax_is_told_where_the_first_worker_is_and_to_take_the_gpu_of_its_rank() -> None:
    found = worker_environment({"JAX_PLATFORMS": "cuda"}, 1, addresses(2))
    assert {name: value for name, value in found.items() if name.startswith("JAX_")} == {
        "JAX_PLATFORMS": "cuda",
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:40002",
        "JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:40002",
        "JAX_LOCAL_DEVICE_IDS": "1",
    }


def test_tf_config_names_a_port_for_each_worker_and_this_one() -> None:
    found = worker_environment({}, 1, addresses(2, 5001, 5002))
    assert json.loads(found["TF_CONFIG"]) == {
        "cluster": {"worker": ["127.0.0.1:5001", "127.0.0.1:5002"]},
        "task": {"type": "worker", "index": 1},
    }


# -- ports -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("outgoing", ["32768\t60999\n", "15000 60999", "40000 50000"])
def test_ports_lie_below_those_of_outgoing_connections(outgoing: str) -> None:
    first, end = port_range(outgoing)
    assert 1024 < first < end <= int(outgoing.split(maxsplit=1)[0])


@pytest.mark.parametrize("outgoing", ["", "x y", "1024 65535"])
def test_without_room_below_there_is_a_range_all_the_same(outgoing: str) -> None:
    first, end = port_range(outgoing)
    assert 1024 < first < end <= 65_536


def test_a_reserved_port_is_free_for_a_worker_and_taken_by_no_other_trial() -> None:
    (port,) = reserve_ports(1)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port.number))
    with pytest.raises(OSError, match="no 1 ports"):
        reserve_ports(1, lambda first, end: port.number)
    port.release()
    again = reserve_ports(1, lambda first, end: port.number)
    assert [p.number for p in again] == [port.number]
    again[0].release()


def test_ports_that_are_in_use_or_proposed_twice_are_passed_over() -> None:
    with socket.socket() as listener:
        (probe,) = reserve_ports(1)
        listener.bind(("127.0.0.1", probe.number))
        listener.listen()
        probe.release()
        numbers = count(probe.number)
        ports = reserve_ports(3, lambda first, end: next(numbers) // 2 + probe.number // 2)
        found = [port.number for port in ports]
        assert len(set(found)) == 3
        assert probe.number not in found
        for port in ports:
            port.release()


# -- the folder ------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["nothing", "files", "a file", "a link"])
def test_the_shared_folder_is_empty_at_the_start_of_a_segment(tmp_path: Path, before: str) -> None:
    place, elsewhere = tmp_path / "group", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("")
    if before == "files":
        (place / "deep").mkdir(parents=True)
        (place / "stop.json").write_text("{}")
    elif before == "a file":
        place.write_text("")
    elif before == "a link":
        place.symlink_to(elsewhere)
    empty_group_folder(place)
    assert place.is_dir()
    assert not place.is_symlink()
    assert os.listdir(place) == []
    assert os.listdir(elsewhere) == ["kept"]
