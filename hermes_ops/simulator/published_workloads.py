"""The workloads of published evaluations by name, each with the GPUs that it was published for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hermes_ops.errors import ConfigError, Problem
from hermes_ops.simulator import capes_workload, saxena_workload, shockwave_workload
from hermes_ops.simulator.capes_workload import CapesSource
from hermes_ops.simulator.pollux_workload import (
    PUBLISHED_POLLUX,
    PUBLISHED_TIRESIAS,
    PolluxSource,
    workload_numbers,
)
from hermes_ops.simulator.saxena_workload import ARRIVALS, SaxenaSource
from hermes_ops.simulator.shockwave_workload import ShockwaveSource
from hermes_ops.simulator.workload_source import WorkloadSource

EXAMPLES = Path("examples/elastic")
"""Where a checkout has the public data of these workloads."""


@dataclass(frozen=True, slots=True)
class PublishedWorkload:
    """A published evaluation: `make(data, load)` returns its workloads, by seed or by number.

    `layout` is its number of nodes x GPUs. `loads` are those that were published; empty: it has no
    load. `numbers(data, load)` returns the numbers of its workloads if these are recorded; None if
    they are drawn. `needs_data`: it reads files from a folder. `parameters` are the published
    parameters by policy; a user's own take precedence.
    """

    make: Callable[[Path, float], WorkloadSource]
    layout: str
    loads: tuple[float, ...] = ()
    numbers: Callable[[Path, float], tuple[int, ...]] | None = None
    needs_data: bool = False
    parameters: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


def _saxena(pattern: str, *, drops: bool) -> PublishedWorkload:
    return PublishedWorkload(
        lambda _data, _load: SaxenaSource(pattern, drops), saxena_workload.LAYOUT
    )


def _capes(source: CapesSource) -> PublishedWorkload:
    return PublishedWorkload(lambda _data, _load: source, capes_workload.LAYOUT)


WORKLOADS: Mapping[str, PublishedWorkload] = {
    **{source.name: _capes(source) for source in capes_workload.sources()},
    **{f"saxena-{pattern}-queue": _saxena(pattern, drops=False) for pattern in ARRIVALS},
    **{f"saxena-{pattern}-drop": _saxena(pattern, drops=True) for pattern in ARRIVALS},
    "pollux": PublishedWorkload(
        PolluxSource,
        "16x4",
        loads=(0.5, 1.0, 1.5, 2.0),
        numbers=workload_numbers,
        needs_data=True,
        parameters={"2d-las": PUBLISHED_TIRESIAS, "pollux": PUBLISHED_POLLUX},
    ),
    "shockwave": PublishedWorkload(
        lambda data, _load: ShockwaveSource(data), shockwave_workload.LAYOUT, needs_data=True
    ),
}


def published_workload(name: str) -> PublishedWorkload:
    """Return the workload of that name; raise ConfigError for an unknown one."""
    if name not in WORKLOADS:
        names = ", ".join(sorted(WORKLOADS))
        problem = Problem("--workload", repr(name), names, "name one of these")
        raise ConfigError("the command line", (problem,))
    return WORKLOADS[name]
