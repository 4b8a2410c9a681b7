from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from hermes_ops.cli.pool_commands import _Setter, follow_once
from hermes_ops.errors import StackError, Unavailable
from hermes_ops.kubernetes.gpus import Node, Slots


def test_the_pool_gets_what_the_nodes_can_give() -> None:
    put: list[int] = []
    follow_once(Slots(0.0), lambda: (Node("a", 2), Node("b", 4)), put.append)
    assert put == [6]


def test_a_cluster_that_is_away_leaves_the_pool_alone(capsys: pytest.CaptureFixture[str]) -> None:
    def away() -> tuple[Node, ...]:
        raise Unavailable("the cluster did not answer")

    put: list[int] = []
    follow_once(Slots(0.0), away, put.append)
    assert put == []
    assert "stays as it is: the cluster did not answer" in capsys.readouterr().err


def test_an_airflow_that_is_away_does_not_end_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(slots: int) -> None:
        raise StackError("Airflow did not answer")

    follow_once(Slots(0.0), lambda: (Node("a", 2),), refuse)
    assert "stays as it is: Airflow did not answer" in capsys.readouterr().err


def test_a_change_by_hand_is_set_right_at_the_next_look(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, str, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.url.path, request.content.decode()))
        return httpx.Response(200, json={"access_token": "t"})

    client = httpx.Client
    monkeypatch.setattr(
        "hermes_ops.stack.airflow_admin.httpx.Client",
        lambda **given: client(
            base_url=given["base_url"], transport=httpx.MockTransport(answer), trust_env=False
        ),
    )
    setter = _Setter("http://airflow", "hermes-pool", lambda: "secret", "gpus")
    setter.set(4)
    setter.set(4)
    patches = [a for a in asked if a[0] == "PATCH"]
    assert [path for _, path, _ in patches] == ["/api/v2/pools/gpus"] * 2
    assert '"slots":4' in patches[0][2].replace(" ", "")
    assert capsys.readouterr().out == "The pool gpus has 4 slots\n"


def test_without_a_cluster_the_remedy_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hermes_ops.errors import HermesError
    from hermes_ops.kubernetes.gpus import reader

    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(
        "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none")
    )
    with pytest.raises(HermesError, match="set KUBECONFIG"):
        reader()
