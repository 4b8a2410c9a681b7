"""Of equal GPUs the ones that can be used soonest: GPUs of one node are interchangeable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain

from hermes_ops.core.model import Snapshot


def soonest(
    snapshot: Snapshot,
    chosen: Sequence[int],
    free: Collection[int],
    own: Collection[int] = (),
) -> tuple[int, ...]:
    """Return as many GPUs of the same nodes as `chosen`, ascending, those usable soonest first.

    First come the job's `own` GPUs, which it leaves anyhow before it can use any; then idle ones,
    for which it waits for nobody; then those that another job has yet to leave. `free` are the
    other GPUs that may be taken. Where all are alike, `chosen` stays as it is.
    """
    idle = snapshot.idle
    if not own and idle.issuperset(chosen):
        return tuple(chosen)
    where, mine = snapshot.node_of, frozenset(own)
    able = {gpu: (gpu not in mine, gpu not in idle, gpu) for gpu in chain(chosen, free)}
    picked: list[int] = []
    for node, number in Counter(where[gpu] for gpu in chosen).items():
        here = [gpu for gpu in able if where[gpu] == node]
        picked += sorted(here, key=able.__getitem__)[:number]
    return tuple(sorted(picked))
