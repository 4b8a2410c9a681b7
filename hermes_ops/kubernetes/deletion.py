"""When a pod that is being deleted may be removed by force, because its node does not end it.

Time is measured by the local clock: that of the cluster, which sets `deletionTimestamp`, may be
minutes behind or ahead.
"""

from __future__ import annotations

from collections.abc import Mapping

from hermes_ops.kubernetes.api import PodView

FORCE_AFTER_S = 30.0
"""Seconds beyond its grace after which a pod is removed by force: its node does not answer."""


def force_at_s(pod: PodView, known_s: Mapping[str, float], now_s: float) -> float | None:
    """Return when a pod that is being deleted may be removed by force; None for any other pod.

    Its grace period counts from the first call for the pod; a shorter one that comes later counts
    too.

    :param known_s: the earlier results, by uid of the pod
    :param now_s: the local monotonic or Unix time, in which the result is as well
    """
    if pod.deletion_grace_s is None:
        return None
    at_s = now_s + pod.deletion_grace_s + FORCE_AFTER_S
    return min(at_s, known_s.get(pod.uid, at_s))
