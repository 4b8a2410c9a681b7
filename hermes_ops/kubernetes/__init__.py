"""A trial's segment as a Kubernetes pod: its manifest, and its lifecycle from creation to end."""

from hermes_ops.kubernetes.api import ClusterPods, Pods, PodView, Rejected, connect, own_namespace
from hermes_ops.kubernetes.gang_segment import GangSegment
from hermes_ops.kubernetes.orphan_pods import (
    LeasesInForce,
    OrphanFindings,
    WatchedPods,
    find_orphans,
)
from hermes_ops.kubernetes.pod_segment import OwnershipLost, PodLimits, PodSegment
from hermes_ops.kubernetes.references import check_manifest
from hermes_ops.kubernetes.template import PodGang, PodRequest, labels_of_sweep, manifest

__all__ = [
    "ClusterPods",
    "GangSegment",
    "LeasesInForce",
    "OrphanFindings",
    "OwnershipLost",
    "PodGang",
    "PodLimits",
    "PodRequest",
    "PodSegment",
    "PodView",
    "Pods",
    "Rejected",
    "WatchedPods",
    "check_manifest",
    "connect",
    "find_orphans",
    "labels_of_sweep",
    "manifest",
    "own_namespace",
]
