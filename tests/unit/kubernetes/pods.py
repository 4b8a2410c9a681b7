"""A cluster of one namespace in memory, and pods as its API shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hermes_ops.errors import HermesError
from hermes_ops.kubernetes.api import PodView

POD = PodView(name="p-1", uid="u-1", version="1", phase="Pending", owner="1", epoch=1)


@dataclass
class FakePods:
    """Answers from `pods`; while `away` is set every call raises it."""

    pods: dict[str, PodView] = field(default_factory=dict)
    deleted: list[tuple[str, int]] = field(default_factory=list)
    made: list[Any] = field(default_factory=list)
    lines: tuple[str, ...] = ()
    away: HermesError | None = None
    refuses_pods: HermesError | None = None
    next_uid: int = 1
    mount_failures: tuple[str, ...] | None = ()
    refuses_events: HermesError | None = None
    looks: int = 0  # at events
    fetches: int = 0

    def create(self, pod: Any) -> PodView | None:
        self._answer()
        if self.refuses_pods is not None:
            raise self.refuses_pods
        if pod in self.pods:
            return None
        self.made.append(pod)
        view = replace(POD, name=pod, uid=f"new-{self.next_uid}")
        self.next_uid += 1
        self.pods[pod] = view
        return view

    def fetch(self, name: str) -> PodView | None:
        self.fetches += 1
        self._answer()
        return self.pods.get(name)

    def find(self, labels: Mapping[str, str]) -> list[PodView]:
        self._answer()
        return list(self.pods.values())

    def set_owner(self, pod: PodView, attempt: str) -> bool:
        self.pods[pod.name] = replace(self.pods[pod.name], owner=attempt)
        return True

    def delete(self, pod: PodView, grace_s: int) -> bool:
        self._answer()
        self.deleted.append((pod.name, grace_s))
        return True

    def log(self, name: str, since_s: int | None) -> Iterator[str]:
        yield from self.lines

    def unmounted(self, pod: PodView) -> tuple[str, ...] | None:
        self._answer()
        self.looks += 1
        if self.refuses_events is not None:
            raise self.refuses_events
        return self.mount_failures

    def change(self, name: str, **facts: Any) -> None:
        self.pods[name] = replace(self.pods[name], **facts)

    def _answer(self) -> None:
        if self.away is not None:
            raise self.away
