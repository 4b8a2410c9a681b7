"""A lower bound for all policies on the equal jobs of Capes et al., and fluid sharing of them.

Arrivals are in seconds, ascending; results are mean completions in hours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import ceil, inf
from statistics import fmean

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import block_array, csr_array, eye_array, kron, sparray

from hermes_ops.core.speed_model import Floats
from hermes_ops.simulator.capes_workload import HOURS

BUCKET_H = 0.1
TANGENTS = 41  # at each square


def lower_bound_h(arrivals_s: Sequence[float], gpus: int, bucket_h: float = BUCKET_H) -> float:
    """Return a lower bound of the mean completion of the jobs, by a linear program.

    It decides how much progress all jobs together make in each bucket of time on each size. A
    bucket has a fixed number of GPU-hours, and by its end no job can have done more than alone on
    the largest size. A job's completion is its mean instant of progress, plus the mean time from
    there to its end. With the shares f of its progress by size that time is at least [(T1 - T2) f1²
    + (T2 - T4) (f1 + f2)² + (T4 - T8) (f1 + f2 + f4)² + T8] / 2: slow sizes first, no pause. It is
    convex, so the mean over jobs is at least the value for the mean shares (Jensen); tangents keep
    it linear. Progress counts at the begin of its bucket: with a smaller `bucket_h` the bound is
    higher.

    Raise ArithmeticError if the program has no solution.
    """
    starts_h = np.array(arrivals_s) / 3_600
    widths, hours = np.array([gpus for gpus, _ in HOURS]), np.array([hours for _, hours in HOURS])
    fastest_h, number, sizes = float(hours.min()), len(starts_h), len(hours)
    end_h = starts_h[-1] + number * (widths * hours).min() / gpus + hours.max()
    ends_h = np.arange(1, ceil(end_h / bucket_h) + 1) * bucket_h
    buckets, squares = len(ends_h), sizes - 1
    done = np.clip((ends_h[:, None] - starts_h) / fastest_h, 0.0, 1.0).sum(axis=1)
    done[-1] = number
    # Variables: progress by bucket and size, progress by the end of each bucket, the shares of
    # progress on the smallest size, the two smallest and so on, and the square of each share.
    each, fewer = np.ones((1, sizes)), np.tri(squares, sizes) / number
    equal = block_array(
        [
            [kron(eye_array(buckets), each), _sums(buckets), None, csr_array((buckets, squares))],
            [kron(np.ones((1, buckets)), fewer), None, -eye_array(squares), None],
        ]
    )
    at = np.linspace(0.0, 1.0, TANGENTS)[:, None]
    solved = linprog(
        np.concatenate(
            [
                np.repeat(ends_h - bucket_h, sizes) / number,
                np.zeros(buckets + squares),
                -np.diff(hours) / 2,
            ]
        ),
        A_ub=block_array(
            [
                [kron(eye_array(buckets), (widths * hours)[None]), _none(buckets), None, None],
                [None, None, kron(eye_array(squares), 2 * at), kron(-eye_array(squares), at**0)],
            ]
        ),
        b_ub=np.concatenate([np.full(buckets, gpus * bucket_h), np.tile(at[:, 0] ** 2, squares)]),
        A_eq=equal,
        b_eq=np.zeros(buckets + squares),
        bounds=_bounds(done, sizes, squares),
    )
    if not solved.success:
        raise ArithmeticError(f"no lower bound: {solved.message}")
    return max(fastest_h, float(solved.fun) - float(starts_h.mean()) + fastest_h / 2)


def _sums(buckets: int) -> sparray:
    """Return the rows that make each value the sum of the progress up to its bucket."""
    return eye_array(buckets, k=-1) - eye_array(buckets)


def _none(buckets: int) -> sparray:
    return csr_array((buckets, buckets))


def _bounds(done: Floats, sizes: int, squares: int) -> Floats:
    """Return the least and greatest value of each variable; by the last bucket all is done."""
    low, high = np.zeros_like(done), done.copy()
    low[-1] = done[-1]
    least = [np.zeros(len(done) * sizes), low, np.zeros(2 * squares)]
    most = [np.full(len(done) * sizes, inf), high, np.full(2 * squares, inf)]
    return np.stack([np.concatenate(least), np.concatenate(most)], axis=1)


def shared_h(arrivals_s: Sequence[float], gpus: int, requested: int) -> float:
    """Return the mean completion if all jobs share the GPUs as a fluid, at no cost.

    Each job trains on `requested` GPUs; with more jobs than fit each has an equal part of the time.
    """
    slots, alone_s = gpus // requested, 3_600 * dict(HOURS)[requested]
    served_s, now_s = 0.0, 0.0  # training of a job that is there from the begin
    pending, present = deque(arrivals_s), deque[tuple[float, float]]()
    completions = []
    while pending or present:
        rate = min(1.0, slots / len(present)) if present else 1.0
        end_s = now_s + (present[0][0] - served_s) / rate if present else inf
        arrival_s = pending[0] if pending else inf
        at_s = min(end_s, arrival_s)
        served_s, now_s = served_s + (at_s - now_s) * rate, at_s
        if end_s <= arrival_s:
            completions.append(now_s - present.popleft()[1])
        else:
            present.append((served_s + alone_s, pending.popleft()))
    return fmean(completions) / 3_600
