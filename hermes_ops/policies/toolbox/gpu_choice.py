"""Choice among the GPUs of a node, which are interchangeable: those that are usable soonest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain

from hermes_ops.core.model import Snapshot


def soonest_usable(
    snapshot: Snapshot,
    chosen: Sequence[int],
    free: Collection[int],
    own: Collection[int] = (),
) -> tuple[int, ...]:
    """Return, ascending, as many GPUs of each node as `chosen` has there, those usable soonest.

    The job's `own` GPUs are preferred: it has to leave them anyway before it can start again. Idle
    GPUs come next, then those that a stopping job still occupies. `free` are the other GPUs that
    may be taken. If all are equally soon, `chosen` is returned.
    """
    idle = snapshot.idle
    if not own and idle.issuperset(chosen):
        return tuple(chosen)
    where, mine = snapshot.node_of, frozenset(own)
    rank = {gpu: (gpu not in mine, gpu not in idle, gpu) for gpu in chain(chosen, free)}
    picked: list[int] = []
    for node, number in Counter(where[gpu] for gpu in chosen).items():
        on_node = [gpu for gpu in rank if where[gpu] == node]
        picked += sorted(on_node, key=rank.__getitem__)[:number]
    return tuple(sorted(picked))
