"""Which node a slot of the pool stands for, where the pool spans several.

HERMES_NODES names the nodes and how many of the pool's slots each has, in the order of the slots:
`node-a=2,node-b=2`. Policies then see the nodes, and a trial's lease names those of its GPUs.
"""

from __future__ import annotations

import os
import re

from hermes_ops.core.model import Gpu, Snapshot
from hermes_ops.errors import HermesError

VARIABLE = "HERMES_NODES"
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*")
ONE_MACHINE = Gpu(0).node


def node_names() -> tuple[str, ...]:
    """The node of each slot by index, empty where nothing is said; HermesError for another form."""
    names: list[str] = []
    for part in filter(None, os.environ.get(VARIABLE, "").split(",")):
        name, _, count = part.strip().rpartition("=")
        if not NODE_NAME.fullmatch(name) or not count.isdigit():
            raise HermesError(f"{VARIABLE}: {part!r} is not NODE=GPUS, as in node-a=2: correct it.")
        names += [name] * int(count)
    return tuple(names)


def leased_nodes(snapshot: Snapshot, gpus: tuple[int, ...]) -> tuple[str, ...]:
    """The nodes of these GPUs, each once; none where the pool is one machine."""
    nodes = {gpu.node for gpu in snapshot.gpus if gpu.index in gpus}
    return tuple(sorted(nodes - {ONE_MACHINE}))
