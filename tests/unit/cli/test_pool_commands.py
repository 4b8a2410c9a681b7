from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from hermes_ops.airflow.credentials import AirflowCredentials
from hermes_ops.cli.pool_commands import _SlotSetter, follow_once, wait_for_count
from hermes_ops.errors import StackError, Unavailable
from hermes_ops.kubernetes.gpu_nodes import GpuNode, SettledSlots


def test_the_pool_gets_what_the_nodes_can_give() -> None:
    put: list[int] = []
    follow_once(SettledSlots(0.0), lambda: (GpuNode("a", 2), GpuNode("b", 4)), put.append)
    assert put == [6]


def test_fewer_gpus_have_to_last_just_after_a_restart_too() -> None:
    put: list[int] = []
    slots = SettledSlots(30.0)
    for _ in range(2):
        follow_once(slots, lambda: (GpuNode("a", 4),), put.append, lambda: 8)
    assert put == [8, 8]
    follow_once(SettledSlots(30.0), lambda: (GpuNode("a", 4),), put.append, lambda: None)
    assert put == [8, 8, 4]


@pytest.mark.parametrize(("status", "slots"), [(200, 6), (404, None), (403, None)])
def test_the_slots_of_the_pool_are_read_where_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch, status: int, slots: int | None
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, json={"slots": 6})

    client = httpx.Client
    monkeypatch.setattr(
        "hermes_ops.stack.airflow_service.httpx.Client",
        lambda **given: client(
            base_url=given["base_url"], transport=httpx.MockTransport(answer), trust_env=False
        ),
    )
    assert _SlotSetter(AirflowCredentials("http://airflow", token="t"), "gpus").slots() == slots


def test_a_cluster_that_is_away_leaves_the_pool_alone(capsys: pytest.CaptureFixture[str]) -> None:
    def away() -> tuple[GpuNode, ...]:
        raise Unavailable("the cluster did not answer")

    put: list[int] = []
    follow_once(SettledSlots(0.0), away, put.append)
    assert put == []
    assert "stays as it is: the cluster did not answer" in capsys.readouterr().err


def test_an_airflow_that_is_away_does_not_end_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(slots: int) -> None:
        raise StackError("Airflow did not answer")

    follow_once(SettledSlots(0.0), lambda: (GpuNode("a", 2),), refuse)
    assert "stays as it is: Airflow did not answer" in capsys.readouterr().err


SimulationOptions = list[tuple[str, str, str]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> SimulationOptions:
    """What Airflow was asked: method, path and log-in."""
    found: SimulationOptions = []

    def answer(request: httpx.Request) -> httpx.Response:
        found.append((request.method, request.url.path, request.headers.get("authorization", "")))
        if request.url.path.startswith("/api"):
            assert json.loads(request.content)["slots"] == 4
        return httpx.Response(200, json={"access_token": "t"})

    client = httpx.Client
    monkeypatch.setattr(
        "hermes_ops.stack.airflow_service.httpx.Client",
        lambda **given: client(
            base_url=given["base_url"], transport=httpx.MockTransport(answer), trust_env=False
        ),
    )
    return found


def test_a_change_by_hand_is_set_right_at_the_next_look(
    asked: SimulationOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "password").write_text("secret")
    own = AirflowCredentials("http://airflow", "hermes-pool", tmp_path / "password")
    setter = _SlotSetter(own, "gpus")
    setter.set(4)
    setter.set(4)
    patches = [a for a in asked if a[0] == "PATCH"]
    assert patches == [("PATCH", "/api/v2/pools/gpus", "Bearer t")] * 2
    assert capsys.readouterr().out == "The pool gpus has 4 slots\n"


def test_a_pool_without_slots_is_said_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hermes_ops.stack.airflow_service.set_pool", lambda *_: None)
    setter = _SlotSetter(
        AirflowCredentials("http://airflow", token="t"), "gpus", ": no node has any"
    )
    for slots in (0, 0, 2):
        setter.set(slots)
    said = ["The pool gpus has 0 slots: no node has any", "The pool gpus has 2 slots"]
    assert capsys.readouterr().out.splitlines() == said


def test_the_pool_is_set_with_a_token_that_may_be_written_anew(
    asked: SimulationOptions, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    setter = _SlotSetter(AirflowCredentials("http://airflow", token_file=file), "gpus")
    for token in ("one", "two"):
        file.write_text(f"{token}\n")
        setter.set(4)
    assert asked == [("PATCH", "/api/v2/pools/gpus", f"Bearer {t}") for t in ("one", "two")]


def test_without_a_cluster_the_remedy_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hermes_ops.errors import HermesError
    from hermes_ops.kubernetes.gpu_nodes import node_reader

    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(
        "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none")
    )
    with pytest.raises(HermesError, match="set KUBECONFIG"):
        node_reader()


def test_a_slot_that_a_trial_leaves_on_a_cordoned_node_is_counted_at_once() -> None:
    waited: list[float] = []
    answers = [{"b": 2, "a": 1}, {"b": 2}, None, {"a": 1}]

    def held() -> dict[str, int]:
        answer = answers.pop(0)
        if answer is None:
            raise Unavailable("the API is away")
        return answer

    def stopped(seconds: float) -> bool:
        waited.append(seconds)
        return False

    nodes = (GpuNode("a", 2), GpuNode("b", 2, cordoned=True, held=2))
    assert wait_for_count(nodes, held, 10.0, stopped)
    assert (waited, answers) == ([1.0, 1.0, 1.0, 1.0], [])


def test_without_a_trial_on_a_cordoned_node_pods_are_read_once_a_period() -> None:
    waited: list[float] = []
    nodes = follow_once(
        SettledSlots(0.0), lambda: (GpuNode("a", 2), GpuNode("b", 2, cordoned=True)), lambda _: None
    )

    def held() -> dict[str, int]:
        raise AssertionError("nobody asks for the pods meanwhile")

    def stopped(seconds: float) -> bool:
        waited.append(seconds)
        return len(waited) > 1

    assert wait_for_count(nodes, held, 10.0, stopped)
    assert not wait_for_count((), held, 10.0, stopped)
    assert waited == [10.0, 10.0]
