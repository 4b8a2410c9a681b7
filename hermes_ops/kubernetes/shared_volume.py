"""A second claim of one volume, for pods of another namespace (run as a module).

A PersistentVolumeClaim belongs to one namespace, and so do the pods that mount it. Trials in
another namespace therefore get a PersistentVolume with the same source as that of the state
folder, and a claim that is bound to it. The data is never deleted with it: the volume is retained.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hermes_ops.errors import HermesError
from hermes_ops.kubernetes.api import connect, translate_errors

PATIENCE_S = 540.0
POLL_S = 2.0
NOT_FOUND, CONFLICT = 404, 409

_NOT_OF_THE_SOURCE = (
    "claimRef",
    "persistentVolumeReclaimPolicy",
    "storageClassName",
    "volumeAttributesClassName",
)

Plain = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim by its namespace and its name."""

    namespace: str
    name: str

    @classmethod
    def from_text(cls, text: str) -> Claim:
        """Parse NAMESPACE/NAME."""
        namespace, slash, name = text.partition("/")
        if not (namespace and slash and name):
            raise argparse.ArgumentTypeError(f"{text!r} is not NAMESPACE/NAME")
        return cls(namespace, name)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def second_volume(name: str, source: Plain, claim: Claim, labels: Mapping[str, str]) -> Plain:
    """Return a PersistentVolume with the same source as another, reserved for a claim."""
    source_fields = {k: v for k, v in source["spec"].items() if k not in _NOT_OF_THE_SOURCE}
    return {
        "metadata": {"name": name, "labels": dict(labels)},
        "spec": {
            **source_fields,
            "claimRef": {"namespace": claim.namespace, "name": claim.name},
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
        },
    }


def second_claim(volume: Plain, claim: Claim) -> Plain:
    """Return the claim that is bound to this volume and no other."""
    spec = volume["spec"]
    return {
        "metadata": {"name": claim.name, "labels": volume["metadata"]["labels"]},
        "spec": {
            "accessModes": spec["accessModes"],
            "storageClassName": "",
            "volumeName": volume["metadata"]["name"],
            "resources": {"requests": {"storage": spec["capacity"]["storage"]}},
            **({"volumeMode": spec["volumeMode"]} if "volumeMode" in spec else {}),
        },
    }


def same_source(one: Plain, other: Plain) -> bool:
    """Return whether two volumes have the same source, without the fields that Kubernetes fills."""

    def of(volume: Plain) -> Plain:
        ignored = (*_NOT_OF_THE_SOURCE, "capacity", "accessModes", "mountOptions", "volumeMode")
        return {k: v for k, v in volume["spec"].items() if k not in ignored}

    return of(one) == of(other)


@dataclass(frozen=True, slots=True)
class VolumeSharing:
    """Give the volume behind `source` a second claim, `target`; safe to repeat."""

    api: Any
    source: Claim
    target: Claim
    volume: str
    labels: Mapping[str, str]
    pause: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def run(self) -> None:
        """Wait until both claims are bound; raise HermesError when they are not."""
        bound = self._await_bound(self.source)
        original = self._volume(bound["spec"]["volumeName"])
        if original is None:
            raise HermesError(f"the volume of the claim {self.source} is gone: restore it.")
        copy = second_volume(self.volume, original, self.target, self.labels)
        self._make_volume(copy)
        try:
            self.api.create_namespaced_persistent_volume_claim(
                self.target.namespace, second_claim(copy, self.target)
            )
        except Exception as error:
            if _status(error) != CONFLICT:
                raise
        claim = self._await_bound(self.target)
        if claim["spec"]["volumeName"] != self.volume:
            raise HermesError(
                f"the claim {self.target} is bound to {claim['spec']['volumeName']} and not to the "
                f"volume of {self.source}: delete it, or name it in trials.pod.claim."
            )

    def _make_volume(self, volume: Plain) -> None:
        """Create the volume, replacing a released one: that cannot be claimed again."""
        present = self._volume(self.volume)
        if present is not None and not same_source(present, volume):
            raise HermesError(
                f"the volume {self.volume} has another source than that of {self.source}: delete "
                f"the claim {self.target} and the volume; what it holds is kept."
            )
        if present is not None and (present.get("status") or {}).get("phase") == "Released":
            self.api.delete_persistent_volume(self.volume)
            self._await("the released volume to go", lambda: self._volume(self.volume) is None)
            present = None
        if present is None:
            self.api.create_persistent_volume(volume)

    def _await_bound(self, claim: Claim) -> Plain:
        claims: list[Plain] = []

        def is_bound() -> bool:
            read = self.api.read_namespaced_persistent_volume_claim
            one = _plain(read, claim.name, claim.namespace)
            claims[:] = [one] if one is not None else []
            return one is not None and (one.get("status") or {}).get("phase") == "Bound"

        self._await(f"the claim {claim} to be bound", is_bound)
        return claims[0]

    def _volume(self, name: str) -> Plain | None:
        return _plain(self.api.read_persistent_volume, name)

    def _await(self, what: str, done: Callable[[], bool]) -> None:
        until_s = self.clock() + PATIENCE_S
        while not done():
            if self.clock() >= until_s:
                raise HermesError(f"waited {PATIENCE_S:.0f} s for {what}: see its events.")
            self.pause(POLL_S)


def _plain(read: Callable[..., Any], *names: str) -> Plain | None:
    """Return the API's answer as plain data; None where there is no such object."""
    try:
        answer = read(*names, _preload_content=False)
    except Exception as error:
        if _status(error) == NOT_FOUND:
            return None
        raise
    return dict(json.loads(answer.data))


def _status(error: Exception) -> int | None:
    status: int | None = getattr(error, "status", None)
    return status


def main(arguments: list[str]) -> int:
    """Share the volume; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Claim.from_text)
    parser.add_argument("target", type=Claim.from_text)
    parser.add_argument("--volume", required=True)
    parser.add_argument("--label", action="append", default=[])
    options = parser.parse_args(arguments)
    labels = dict(label.split("=", 1) for label in options.label)
    try:
        api = connect()
        with translate_errors("share a volume"):
            VolumeSharing(api, options.source, options.target, options.volume, labels).run()
    except HermesError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{options.target} is a claim of the volume of {options.source}.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
