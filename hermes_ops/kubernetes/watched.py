"""The pods of a namespace as a watch shows them: listed once, then only changes are asked for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.kubernetes.api import Change, PodView

log = logging.getLogger(__name__)

WATCH_S = 60.0
"""How long one watch lasts; a connection that has died unseen is noticed by then."""

SHORT_S = 1.0
"""A watch that ends sooner has broken off."""


class Watchable(Protocol):
    """The pods of one namespace, and what becomes of them."""

    def listed(self, labels: Mapping[str, str]) -> tuple[list[PodView], str]:
        """All pods with these labels, and the version from which `changes` goes on."""

    def changes(self, labels: Mapping[str, str], version: str, seconds: float) -> Iterator[Change]:
        """What becomes of them after that version, as it comes, so long."""

    def delete(self, pod: PodView, grace_s: int) -> bool:
        """Delete it if it is still as it was seen; False when it has changed meanwhile."""


@dataclass(slots=True)
class WatchedPods:
    """The pods with some labels, kept up to date in the background.

    When a watch has broken off (the API was away, or does not know any more what has changed since)
    they are listed anew as they are next asked for.
    """

    pods: Watchable
    labels: Mapping[str, str]
    clock: Callable[[], float] = time.monotonic
    _known: dict[str, PodView] = field(default_factory=dict)  # by uid
    _version: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _left: bool = False
    _complained: bool = False

    def now(self) -> list[PodView]:
        """All of them as they are now; HermesError when they cannot be listed."""
        if self._thread is None or not self._thread.is_alive():
            found, self._version = self.pods.listed(self.labels)
            self._known = {pod.uid: pod for pod in found}
            self._thread = threading.Thread(target=self.follow, daemon=True)
            self._thread.start()
        with self._lock:
            return list(self._known.values())

    def delete(self, pod: PodView, grace_s: int) -> bool:
        """Delete it if it is still as it was seen; False when it has changed meanwhile."""
        return self.pods.delete(pod, grace_s)

    def leave(self) -> None:
        """Watch no longer than the watch under way lasts."""
        self._left = True

    def follow(self) -> None:
        """Take in what changes, one watch after the other, until one breaks off."""
        lasts = True
        while lasts and not self._left:
            begun_s = self.clock()
            try:
                self._take_in()
            except Unavailable:  # whoever asks next is told if that lasts
                return
            except Exception as error:  # the controller must outlive whatever a client raises
                self._complain(error)
                return
            lasts = self.clock() - begun_s >= SHORT_S

    def _take_in(self) -> None:
        for change in self.pods.changes(self.labels, self._version, WATCH_S):
            self._version = change.version
            if change.pod is not None:
                with self._lock:
                    if change.gone:
                        self._known.pop(change.pod.uid, None)
                    else:
                        self._known[change.pod.uid] = change.pod

    def _complain(self, error: Exception) -> None:
        text = str(error) if isinstance(error, HermesError) else f"{type(error).__name__}: {error}"
        if not self._complained:
            log.warning("Pods are listed each time, as they cannot be watched: %s", text)
        self._complained = True
