"""How long jobs of one size still train: their steps, at a pace that changes as their kind's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np

from hermes_ops.core.curves import Table
from hermes_ops.core.model import Job, Snapshot
from hermes_ops.core.speed_model import Floats
from hermes_ops.policies.toolbox.job_speeds import KindKey, kind_key

PARTS = 20
"""The parts of a training, equal in steps, whose paces are compared between jobs of a kind."""

NEWEST = 5
"""The newest steps that are reported, whose pace a job has now."""


@dataclass(frozen=True, slots=True)
class Paces:
    """The paces of the jobs of one size in a snapshot, by kind.

    `profiles`: by kind the mean seconds of each of PARTS parts of a training, over those of the
    first; a part that no job has reached has the pace of the one before. `first_s`: the mean
    seconds of a step in the first part, by kind and number of GPUs.
    """

    profiles: Mapping[KindKey, Floats]
    first_s: Mapping[tuple[KindKey, int], float]

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> Paces:
        """Learn from all jobs that have begun, the ended ones too."""
        begun = [
            job for job in snapshot.jobs if job.curve and job.total_steps and has_one_size(job)
        ]
        rows = _PARTS.get(begun) if begun else np.empty((0, PARTS))
        of_kind: dict[KindKey, list[int]] = {}
        firsts: dict[tuple[KindKey, int], list[float]] = {}
        for row, job in enumerate(begun):
            if rows[row, 0] > 0:
                kind = kind_key(job)
                of_kind.setdefault(kind, []).append(row)
                step_s = float(rows[row, 0]) * PARTS / (job.total_steps or 1)
                firsts.setdefault((kind, job.min_gpus), []).append(step_s)
        return cls(
            {kind: _profile(rows[numbers]) for kind, numbers in of_kind.items()},
            {key: mean(sorted(steps)) for key, steps in firsts.items()},
        )

    def left_s(self, job: Job) -> float | None:
        """Predict the seconds that the job still trains on its GPUs; None: nothing tells them."""
        if not job.total_steps:
            return None
        step_s = newest_step_s(job)
        if step_s is None:
            step_s = job.seconds_a_step(job.min_gpus)
        if step_s is None:
            step_s = self.first_s.get((kind_key(job), job.min_gpus))
        if step_s is None:
            return None
        done = min(job.last_step / job.total_steps, 1.0)
        return step_s * job.total_steps * self._relative_left(kind_key(job), done)

    def _relative_left(self, kind: KindKey, done: float) -> float:
        """Return the time left over that of the whole training at the pace of `done`, a part."""
        profile = self.profiles.get(kind)
        if profile is None:
            return 1.0 - done
        place = done * PARTS
        now = min(int(place), PARTS - 1)
        left = float(profile[now]) * (now + 1 - place) + float(profile[now + 1 :].sum())
        before = min(max(0, int(np.ceil(place)) - 1), PARTS - 1)
        return max(0.0, left) / float(profile[before]) / PARTS


def has_one_size(job: Job) -> bool:
    """Return whether the job takes one number of GPUs alone, and no batch from a plan."""
    return job.min_gpus == job.max_gpus and job.batch_range is None


def newest_step_s(job: Job) -> float | None:
    """Return the seconds of a step over the newest steps reported; None before any."""
    if not job.curve:
        return None
    newest, since = job.curve[-1], job.curve[-NEWEST - 1] if len(job.curve) > NEWEST else None
    steps = newest.step - (since.step if since else 0)
    seconds = newest.seconds - (since.seconds if since else 0.0)
    return seconds / steps if steps > 0 and seconds > 0 else None


def _profile(rows: Floats) -> Floats:
    """Return the mean relative pace of each part, of jobs that have all reached the first."""
    relative = rows / rows[:, :1]
    reached = np.isfinite(relative)
    numbers = reached.sum(axis=0)
    sums = np.sort(np.where(reached, relative, 0.0), axis=0).sum(axis=0)
    profile = np.ones(PARTS)
    for part in range(PARTS):
        if numbers[part] and sums[part] > 0:
            profile[part] = sums[part] / numbers[part]
        elif part:
            profile[part] = profile[part - 1]
    return profile


def _part_seconds(jobs: Sequence[Job]) -> Floats:
    """Return the seconds of each part of each job's training, (jobs, PARTS); NaN: not reached."""
    rows = np.full((len(jobs), PARTS), np.nan)
    for row, job in enumerate(jobs):
        steps = [0.0, *(float(point.step) for point in job.curve)]
        seconds = [0.0, *(point.seconds for point in job.curve)]
        marks = np.linspace(0.0, 1.0, PARTS + 1) * (job.total_steps or 1)
        rows[row] = np.diff(np.interp(marks, steps, seconds, right=np.nan))
    return rows


_PARTS: Table[Job] = Table(_part_seconds, PARTS)
