"""The requests to preempt a trial, and the grace that they leave its script."""

from __future__ import annotations

import math


class StopRequests:
    """Count the requests: the first one begins the grace, a further one ends it.

    Times are on the monotonic clock.
    """

    def __init__(self, grace_s: float) -> None:
        self.count = 0
        self._grace_s = grace_s
        self._obeyed = 0
        self._is_node_left = False  # another one, and nobody has told this one to stop since
        self._kill_at_s: float | None = None

    def request(self, *_: object) -> None:
        """Count a request; called by signal handlers."""
        if self._is_node_left:
            self._is_node_left = False  # the first one, from this node too
        else:
            self.count += 1

    def leave_node(self) -> None:
        """Request a stop as another node has to be left; a stop of this node is the same one."""
        if not self.count:
            self.count, self._is_node_left = 1, True

    def begin_grace(self, now_s: float, most_s: float = math.inf) -> None:
        """Begin the grace, of at most `most_s`."""
        self._kill_at_s = now_s + min(self._grace_s, most_s)

    def end_grace_soon(self, now_s: float, left_s: float) -> None:
        """Let the grace end in `left_s` at the latest."""
        if self._kill_at_s is not None:
            self._kill_at_s = min(self._kill_at_s, now_s + left_s)

    def obey(self) -> None:
        """Note that the script has been told of all requests so far."""
        self._obeyed = self.count

    @property
    def has_grace(self) -> bool:
        """Tell whether the grace has begun."""
        return self._kill_at_s is not None

    @property
    def is_hurried(self) -> bool:
        """Tell whether a further request ends the grace."""
        return self.count > max(1, self._obeyed)

    def is_grace_over(self, now_s: float) -> bool:
        """Tell whether the time of the grace is over."""
        return self._kill_at_s is not None and now_s >= self._kill_at_s

    def left_s(self, now_s: float) -> float:
        """Return what is left of the grace: all of it without a request."""
        if not self.count or self._kill_at_s is None:
            return self._grace_s
        return self._kill_at_s - now_s
