"""A volume with two claims: one of the state folder, one of the trials' namespace."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import MaxRetryError

from hermes_ops.errors import HermesError
from hermes_ops.kubernetes import shared_volume
from hermes_ops.kubernetes.shared_volume import Claim, VolumeSharing

HOME, TRIALS = Claim("hermes", "hermes-home"), Claim("hermes-trials", "hermes-trials")
SOURCE = {"csi": {"driver": "nfs", "volumeHandle": "v-1"}, "accessModes": ["ReadWriteMany"],
          "capacity": {"storage": "50Gi"}, "mountOptions": ["hard"]}  # fmt: skip


class ApiError(Exception):
    def __init__(self, status: int) -> None:
        self.status = status


class Api:
    """Volumes and claims; a claim is bound as soon as its volume is there, or after `waits`."""

    def __init__(self, waits: int = 0) -> None:
        self.volumes: dict[str, Any] = {
            "pvc-1": {"metadata": {"name": "pvc-1"},
                      "spec": {**SOURCE, "claimRef": {"name": "hermes-home", "uid": "u"},
                               "persistentVolumeReclaimPolicy": "Delete",
                               "storageClassName": "fast"}}
        }  # fmt: skip
        self.claims: dict[Claim, Any] = {HOME: {"spec": {"volumeName": "pvc-1"}}}
        self.waits = waits
        self.created: list[Any] = []
        self.deleted: list[Any] = []

    def read_persistent_volume(self, name: str, **_: Any) -> Any:
        return self._answer(self.volumes, name)

    def read_namespaced_persistent_volume_claim(self, name: str, namespace: str, **_: Any) -> Any:
        phase = "Pending" if self.waits else "Bound"
        self.waits = max(0, self.waits - 1)
        claim = self.claims.get(Claim(namespace, name))
        if claim is not None:
            claim["status"] = {"phase": phase}
        return self._answer(self.claims, Claim(namespace, name))

    def create_persistent_volume(self, body: Any) -> None:
        self.created.append(body)
        self.volumes[body["metadata"]["name"]] = body

    def delete_persistent_volume(self, name: str) -> None:
        self.deleted.append(name)
        del self.volumes[name]

    def create_namespaced_persistent_volume_claim(self, namespace: str, body: Any) -> None:
        claim = Claim(namespace, body["metadata"]["name"])
        if claim in self.claims:
            raise ApiError(409)
        self.claims[claim] = body

    def _answer(self, objects: dict[Any, Any], key: Any) -> Any:
        if key not in objects:
            raise ApiError(404)
        return SimpleNamespace(data=json.dumps(objects[key]).encode())


def sharing(api: Api) -> VolumeSharing:
    now = iter(range(10_000))
    return VolumeSharing(
        api, HOME, TRIALS, "second", {"a": "b"}, lambda _: None, lambda: next(now) * 60
    )


def test_the_trials_namespace_gets_a_claim_of_the_same_volume_that_deletes_nothing() -> None:
    api = Api(waits=2)
    sharing(api).run()
    volume = api.volumes["second"]["spec"]
    assert {k: volume[k] for k in SOURCE} == SOURCE
    assert volume["claimRef"] == {"namespace": "hermes-trials", "name": "hermes-trials"}
    assert volume["persistentVolumeReclaimPolicy"] == "Retain"
    claim = api.claims[TRIALS]["spec"]
    assert (claim["volumeName"], claim["storageClassName"]) == ("second", "")
    assert claim["resources"] == {"requests": {"storage": "50Gi"}}


def test_it_may_be_repeated_whatever_of_it_was_cut_off() -> None:
    api = Api()
    sharing(api).run()
    sharing(api).run()
    del api.claims[TRIALS]
    sharing(api).run()
    assert len(api.created) == 1
    assert api.deleted == []


def test_a_volume_whose_claim_is_gone_is_made_again() -> None:
    api = Api()
    sharing(api).run()
    del api.claims[TRIALS]
    api.volumes["second"]["status"] = {"phase": "Released"}
    sharing(api).run()
    assert (len(api.created), api.deleted) == (2, ["second"])
    assert TRIALS in api.claims


def test_a_claim_of_another_volume_is_an_error_that_says_what_to_do() -> None:
    api = Api()
    sharing(api).run()
    api.volumes["pvc-1"]["spec"]["csi"] = {"driver": "nfs", "volumeHandle": "v-2"}
    with pytest.raises(HermesError, match="another source than that of hermes/hermes-home"):
        sharing(api).run()
    other = Api()
    other.claims[TRIALS] = {"spec": {"volumeName": "foreign"}}
    with pytest.raises(HermesError, match=r"bound to foreign.*trials\.pod\.claim"):
        sharing(other).run()


def test_a_claim_that_is_never_bound_is_an_error_and_not_an_endless_wait() -> None:
    with pytest.raises(HermesError, match="hermes/hermes-home to be bound"):
        sharing(Api(waits=1_000)).run()


REFUSED = ApiException(status=403, reason="Forbidden")
REFUSED.body = json.dumps({"message": "cannot create resource persistentvolumes"})


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (REFUSED, "answered 403 (share a volume): cannot create resource persistentvolumes"),
        (MaxRetryError(None, "/", None), "did not answer (share a volume)"),  # type: ignore[arg-type]
    ],
    ids=["refused", "away"],
)
def test_what_the_cluster_refuses_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, said: str
) -> None:
    class Refusing(Api):
        def create_persistent_volume(self, body: Any) -> None:
            raise error

    monkeypatch.setattr(shared_volume, "connect", Refusing)
    arguments = ["hermes/hermes-home", "hermes-trials/hermes-trials", "--volume=second"]
    assert shared_volume.main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
