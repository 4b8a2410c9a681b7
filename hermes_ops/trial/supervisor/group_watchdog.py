"""Notice that the workers of a trial wait for each other for ever: a decision from what they show.

A worker that skips a batch, or leaves its training while the others go on, ends nothing: the others
wait in an exchange of gradients. Frameworks do not notice it. What is seen from outside are the
files `RANK.fit` in the group's folder (there while that worker trains; rank 0 touches its one at
most each second while it makes steps) and the steps that rank 0 reports. A script without the hook
has no such files: then its reported steps alone are watched, up to its last one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import inf
from typing import NamedTuple

LEAST_QUIET_S = 300.0
"""Seconds without a step after which a group is ended at the soonest: an evaluation by rank 0 alone
each tenth epoch, or the save of a large model, must not be taken for a deadlock."""

_USUAL_TIMES, _LONGEST_TIMES, _EPOCH_TIMES = 20.0, 3.0, 2.0
_MOST_PAUSES = 101  # the newest, of which the median is the usual one
_REMEDY = "all ranks must make the same steps, as many in each epoch: see the logs of the ranks"


class GroupProgress(NamedTuple):
    """The observed progress of a group's training; seconds, times on the monotonic clock.

    `training`: how many ranks train. `uneven_since_s`: since when some train and others do not.
    `progress_s`: rank 0's last sign of progress while all train; None: nothing is expected of it.
    `usual_s`, `longest_s`: the median and the longest of its pauses between two such signs.
    `epoch_s`: its longest time from one reported step to the next; None before the first such.
    """

    size: int
    training: int = 0
    uneven_since_s: float | None = None
    progress_s: float | None = None
    usual_s: float = 0.0
    longest_s: float = 0.0
    epoch_s: float | None = None


def quiet_limit_s(progress: GroupProgress, start_timeout_s: float) -> float:
    """Return how long rank 0 may go without a sign of progress.

    Before its first epoch is over, its validation for instance has not been seen yet: then it has
    `start_timeout_s`, or no limit if only its epochs can be seen. Later a pause as long as two
    epochs is allowed as well.
    """
    if progress.epoch_s is None:
        return start_timeout_s if progress.training else inf
    return max(
        LEAST_QUIET_S,
        _USUAL_TIMES * progress.usual_s,
        _LONGEST_TIMES * progress.longest_s,
        min(_EPOCH_TIMES * progress.epoch_s, start_timeout_s),
    )


def why_stuck(progress: GroupProgress, start_timeout_s: float, now_s: float) -> str | None:
    """Return why the group is to be ended; None while it may go on."""
    if progress.uneven_since_s is not None:
        uneven_s = now_s - progress.uneven_since_s
        if uneven_s < start_timeout_s:
            return None
        return (
            f"the ranks of the trial do not agree: for {uneven_s:.0f} s {progress.training} of "
            f"{progress.size} have been training and the others not: {_REMEDY}"
        )
    if progress.progress_s is None:
        return None
    quiet_s, limit_s = now_s - progress.progress_s, quiet_limit_s(progress, start_timeout_s)
    if quiet_s < limit_s:
        return None
    usual = f", where {progress.usual_s:.1f} s are usual" if progress.usual_s else ""
    return (
        f"the ranks of the trial do not agree: rank 0 has made no step for {quiet_s:.0f} s{usual}"
        f": {_REMEDY}"
    )


class GroupWatchdog:
    """Follow the progress of a group.

    `first_step`: what the trial had reported before this segment. `by_steps`: without files of the
    ranks the steps are watched.
    """

    def __init__(self, size: int, first_step: int, by_steps: bool) -> None:
        self._by_steps = by_steps
        self._step = first_step
        self._mark: int | None = None
        self._has_marks = False
        self._step_s: float | None = None  # when the last epoch ended, or the first one began
        self._pauses_s: deque[float] = deque(maxlen=_MOST_PAUSES)
        self.progress = GroupProgress(size)

    def announce(self, now_s: float) -> None:
        """Take note that rank 0 is about to train: all are to train soon.

        Its first epoch has not been seen yet: that of an earlier `fit` says nothing of it.
        """
        self._has_marks, self._step_s = True, None
        self.progress = self.progress._replace(epoch_s=None)
        if self.progress.uneven_since_s is None and self.progress.training < self.progress.size:
            self.progress = self.progress._replace(uneven_since_s=now_s)

    def withdraw(self) -> None:
        """Take note that no step is expected any more while nobody trains."""
        if not self.progress.training:
            self.progress = self.progress._replace(uneven_since_s=None)

    def observe(self, marks: Mapping[int, int], step: int, now_s: float) -> GroupProgress:
        """Take in the times of the files of the ranks that train, and rank 0's last step.

        Returns: what is known now.
        """
        self._has_marks = self._has_marks or bool(marks)
        is_further, is_touched = step > self._step, marks.get(0) != self._mark
        self._step, self._mark = max(step, self._step), marks.get(0)
        self._note_training(len(marks), now_s)
        if not self._is_watched(is_further):
            self._step_s = None
            self.progress = self.progress._replace(progress_s=None)
            return self.progress
        if self.progress.progress_s is None:
            self._step_s = now_s
            self.progress = self.progress._replace(progress_s=now_s)
        elif is_further or (is_touched and self._has_marks):
            self._note_sign(now_s, is_further)
        return self.progress

    def _is_watched(self, is_further: bool) -> bool:
        if self._has_marks:
            return self.progress.training == self.progress.size
        return self._by_steps and (is_further or self.progress.progress_s is not None)

    def _note_training(self, training: int, now_s: float) -> None:
        was = self.progress
        since_s = was.uneven_since_s
        if training == was.size or (was.training and not training):
            since_s = None
        elif training and since_s is None:
            since_s = now_s
        self.progress = was._replace(training=training, uneven_since_s=since_s)

    def _note_sign(self, now_s: float, is_step: bool) -> None:
        """Take in a sign of progress: a step that was reported, or a file that was touched."""
        last_s, epoch_s = self.progress.progress_s, self.progress.epoch_s
        pause_s = now_s - (now_s if last_s is None else last_s)
        self._pauses_s.append(pause_s)
        if is_step and self._step_s is not None:
            epoch_s = max(epoch_s or 0.0, now_s - self._step_s)
        if is_step:
            self._step_s = now_s
        self.progress = self.progress._replace(
            progress_s=now_s,
            usual_s=sorted(self._pauses_s)[len(self._pauses_s) // 2],
            longest_s=max(self.progress.longest_s, pause_s),
            epoch_s=epoch_s,
        )
