"""A trial's segment as a pod: what the pod is like, and its life from its creation to its end."""

from hermes_ops.kubernetes.access import connect, own_namespace
from hermes_ops.kubernetes.api import ClusterPods, Pods, PodView, Rejected
from hermes_ops.kubernetes.life import Limits, OwnershipLost, PodSegment
from hermes_ops.kubernetes.orphans import Findings, Leased, judge
from hermes_ops.kubernetes.template import Facts, labels_of_sweep, manifest
from hermes_ops.kubernetes.watched import WatchedPods

__all__ = [
    "ClusterPods",
    "Facts",
    "Findings",
    "Leased",
    "Limits",
    "OwnershipLost",
    "PodSegment",
    "PodView",
    "Pods",
    "Rejected",
    "WatchedPods",
    "connect",
    "judge",
    "labels_of_sweep",
    "manifest",
    "own_namespace",
]
