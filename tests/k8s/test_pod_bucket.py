"""A trial whose pods have no volume in common: the next one goes on from the bucket."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest

from tests.bucket import Bucket
from tests.integration import harness
from tests.k8s.conftest import Cluster
from tests.k8s.faults import RATE

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(900)]

EPOCHS, PAUSE_S = 20, 0.5
READY_S = 180.0
UNPRIVILEGED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


class Pod:
    """A pod of the trial with a folder of its own, which ends with it; its output is kept."""

    def __init__(self, cluster: Cluster, image: str, store: str, epoch: int) -> None:
        self.cluster, self.name, self.output = cluster, f"bucket-{epoch}", ""
        cluster.api.create_namespaced_pod(cluster.namespace, self.body(image, store, epoch))
        harness.await_(lambda: self.phase() in ("Running", "Succeeded"), READY_S)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def body(self, image: str, store: str, epoch: int) -> dict[str, Any]:
        script = f"/scripts/stub.py --rate {RATE} --epochs {EPOCHS} --pause {PAUSE_S}"
        guard = f"--dir /trial --epoch {epoch} --objective loss --max-epochs {EPOCHS}"
        variables = {
            "HERMES_CHECKPOINT_STORE": store, "HERMES_KEEP_CHECKPOINTS": "2",
            "HERMES_SWEEP": "bucket", "HERMES_TRIAL": "0",
        }  # fmt: skip
        container = {
            "name": "trial",
            "image": image,
            "command": ["hermes-trial", *guard.split(), "--", "python3", *script.split()],
            "env": [{"name": name, "value": value} for name, value in variables.items()],
            "envFrom": [{"secretRef": {"name": "bucket"}}],
            "securityContext": UNPRIVILEGED,
            "volumeMounts": [
                {"name": "trial", "mountPath": "/trial"},
                {"name": "scripts", "mountPath": "/scripts"},
            ],
        }
        volumes = [
            {"name": "trial", "emptyDir": {}},
            {"name": "scripts", "configMap": {"name": "scripts"}},
        ]
        spec = {"containers": [container], "volumes": volumes, "restartPolicy": "Never"}
        return {"metadata": {"name": self.name}, "spec": spec}

    def read(self) -> None:
        where = self.name, self.cluster.namespace
        log = self.cluster.api.read_namespaced_pod_log(*where, follow=True, _preload_content=False)
        for part in log.stream():
            self.output += part.decode()

    def facts(self) -> dict[str, Any]:
        answer = self.cluster.api.read_namespaced_pod(
            self.name, self.cluster.namespace, _preload_content=False
        )
        return dict(json.loads(answer.data))

    def phase(self) -> str:
        return str(self.facts()["status"]["phase"])

    def stop(self) -> None:
        """Delete it with the grace that it has; wait for its last words."""
        self.cluster.api.delete_namespaced_pod(self.name, self.cluster.namespace)
        self.reader.join(READY_S)

    def curve(self) -> list[tuple[int, float]]:
        found = re.findall(r"epoch=(\d+) loss=(\S+)", self.output)
        return [(int(step), float(loss)) for step, loss in found]


def test_a_pod_that_is_deleted_leaves_its_checkpoint_in_the_bucket_for_the_next(
    cluster: Cluster, pod_bucket: Bucket, image_with_s3: str
) -> None:
    first = Pod(cluster, image_with_s3, pod_bucket.url, 1)
    harness.await_(lambda: len(first.curve()) >= 5, READY_S)
    first.stop()
    second = Pod(cluster, image_with_s3, pod_bucket.url, 2)
    harness.await_(lambda: second.phase() == "Succeeded", READY_S)
    second.reader.join(READY_S)
    assert "comes from the store" in second.output
    alone = list(enumerate(harness.plain_curve(RATE, EPOCHS), 1))
    done, (resumed_at, _) = first.curve()[-1][0], second.curve()[0]
    assert done < EPOCHS
    assert done <= resumed_at <= done + 1
    assert first.curve() == alone[:done]
    assert second.curve() == alone[resumed_at - 1 :]
    for text in (first.output, second.output, json.dumps(second.facts())):
        assert pod_bucket.key not in text
        assert pod_bucket.secret not in text
