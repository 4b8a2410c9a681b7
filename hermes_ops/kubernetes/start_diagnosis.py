"""Why a pod does not start, and whether waiting for it can help.

The status of a pod shows what is wrong with its image or a variable. What is wrong with its volumes
is only in its events.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from hermes_ops.errors import Unavailable
from hermes_ops.kubernetes.api import Pods, PodView, Rejected

IMAGE_TROUBLE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull",
                 "ImageInspectError", "SignatureValidationFailed")  # fmt: skip
BACK_OFF = ("ImagePullBackOff", "CrashLoopBackOff")
"""Reasons that follow another one, and may not repeat what it said."""
CONFIG_TROUBLE = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError",
                  "CrashLoopBackOff")  # fmt: skip
_PASSING = re.compile(
    r"toomanyrequests|too many requests|internal server error|bad gateway|service unavailable"
    r"|gateway time-?out|i/o timeout|TLS handshake timeout|deadline exceeded|connection reset"
    r"|unexpected EOF|server misbehaving",
    re.IGNORECASE,
)
"""What a node says of a registry that is busy or away, or of itself: no setting is wrong."""
FIRST_LOOK_S, LOOK_S = 10.0, 15.0
"""Seconds from when a pod has a node to the first look at its events, and between two of them.

Most pods have started by then, and no look follows once a pod's volumes are mounted: Kubernetes
searches all events of the namespace each time.
"""

_MISSING = re.compile(
    r'(?:secret|configmap|persistentvolumeclaim) "[^"]+" not found'
    r"|references non-existent (?:secret|config) key: \S+"
)


@dataclass(slots=True)
class StartDiagnosis:
    """Finds out why one pod does not start."""

    pods: Pods
    clock: Callable[[], float]
    emit: Callable[[str], None]
    _look_at_s: float | None = None
    _trouble: str = ""  # of its image or container, in the node's last own words
    _unmounted: tuple[str, ...] = ()

    def find_mistake(self, pod: PodView) -> str:
        """Return what is wrong with the pod's settings; empty if it may only need time."""
        if pod.waits_for in IMAGE_TROUBLE + CONFIG_TROUBLE:
            if pod.waits_for not in BACK_OFF or _PASSING.search(pod.message):
                self._trouble = pod.message
            may_pass = _PASSING.search(self._trouble)
            return "" if may_pass else f"{pod.waits_for}: {pod.message}: correct trial.pod"
        self._trouble = ""
        self._look(pod)
        for text in (pod.message, *self._unmounted):
            if missing := _MISSING.search(text):
                return f"{missing[0]}: create it in the trials' namespace, or correct trial.pod"
        return ""

    def reason(self, pod: PodView) -> str:
        """Return what the pod waits for."""
        last = self._unmounted[-1] if self._unmounted else ""
        return self._trouble or pod.message or last or pod.waits_for or "it has not started"

    def _look(self, pod: PodView) -> None:
        """Read the events of a pod that has a node, at intervals, until its volumes are mounted."""
        if not pod.node:
            return
        if self._look_at_s is None:
            self._look_at_s = self.clock() + FIRST_LOOK_S
        if self.clock() < self._look_at_s:
            return
        self._look_at_s = self.clock() + LOOK_S
        try:
            failures = self.pods.unmounted(pod)
            if failures is None:
                self._look_at_s = inf
            self._unmounted = failures or ()
        except Unavailable:
            return
        except Rejected as error:
            self._look_at_s = inf
            self.emit(f"A missing volume of the pod is noticed late: {error}")
