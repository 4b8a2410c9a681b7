"""Records by which the controller and a trial's task communicate, in Airflow's task state store.

Each record has one writer and one key. A record is a frozen dataclass here and a JSON object there.

* `hermes_sweep`, on the plan task, by the plan task: the resolved config, its MLflow parent run
  (by the command line when a sweep that has ended is extended or resumed, then by the
  controller);
* `hermes_close`, on the plan task, by the command line and the controller: the sweep is to end;
* `hermes_lease`, on a trial's task, by the controller: configuration, GPUs, epoch of the grant;
* `hermes_stop`, on a trial's task, by the controller: stop the segment of that epoch, and why;
* `hermes_segment`, on a trial's task, by that task (by the controller once the task has ended,
  by the command line when the sweep is resumed): the segment that runs or ran last, and the
  trial's accounts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from pydantic import ConfigDict, TypeAdapter

SWEEP_KEY = "hermes_sweep"
CLOSE_KEY = "hermes_close"
LEASE_KEY = "hermes_lease"
STOP_KEY = "hermes_stop"
SEGMENT_KEY = "hermes_segment"

CONFIG_XCOM = "hermes_config"
"""XCom key of the sweep as it was planned, for its report; secrets are stars in it."""

OUTCOMES = {"success": "finished", "skipped": "cancelled"}
"""The final state of a trial that recorded none, by that of its task; else it has failed."""

TASK_STATES = {"finished": "success", "failed": "failed"}
"""Airflow's state of a trial's task, by the trial's final state; for other states: skipped."""

AIRFLOW_TAG = "hermes.airflow_url"
"""Tag of an MLflow run: the page of its task, or of a sweep's DAG run, in Airflow."""

CLOSED_TAG = "hermes.closed"
"""Tag of a sweep's MLflow run: why it ended before its last trial."""

REPLACED = "replaced by the next night's sweep"
"""Why a nightly sweep with `overlap: replace` ended."""

CONTINUED_TAG = "hermes.continued"
"""Tag of a resumed or extended sweep: the end of the DAG run before it was continued."""

REACHED_TAG = "hermes.reached"
"""Tag of a sweep's MLflow run: which trial reached the objective's target."""

FAILED_TAG = "hermes.failed"
"""Tag of a sweep's MLflow run: why it has failed."""

FAILURES_TAG = "hermes.failures"
"""Tag of a sweep's MLflow run: a line for each way in which trials failed."""

END_TAGS = (CLOSED_TAG, REACHED_TAG, FAILED_TAG, FAILURES_TAG)
"""Tags of a sweep's MLflow run that describe its end: they are removed when it is continued."""

HELD_POOL_SLOTS = 10_000
"""Slots that a trial without a lease asks for: more than a pool has, so Airflow passes it over."""

ONE_PER_GPU = "one_per_gpu"
"""The value of a lease's `workers` if each GPU has a process, as in `trial.workers`."""

MOST_MACHINE_CHARACTERS = 200
"""The most in the name of a machine: Airflow's column for a queue has 256 characters."""

R = TypeVar("R")


class StoredRecord:
    """A record in the state store: `decode` checks the types of its fields."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = {"allow_inf_nan": False}


@dataclass(frozen=True, slots=True)
class SweepRecord(StoredRecord):
    """A planned sweep: `config` is the resolved sweep file, `trial_task` the mapped task's id.

    `touched` are ended trials whose tasks were cleared so that Airflow adds those that are missing.
    `templated` are the script's variables that each trial renders out of Airflow's connections.
    `clears` is how often tasks of its DAG run had been cleared when it was planned. `due_s` is when
    that run was due, 0 where it is not known.
    """

    config: dict[str, Any]
    trials: int
    trial_task: str
    parent_run_id: str
    experiment_id: str
    experiment: str
    touched: tuple[int, ...] = ()
    planned_s: float = 0.0
    nightly: bool = False
    templated: tuple[str, ...] = ()
    clears: int = 0
    due_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CloseRecord(StoredRecord):
    """The sweep ends now: `state` is what its open trials become, `reason` what users read.

    `tag` is the tag of its MLflow run that says so: CLOSED_TAG, REACHED_TAG where its end is a
    success, FAILED_TAG where it is a failure.
    """

    reason: str
    state: str = "cancelled"
    at_s: float = 0.0
    tag: str = CLOSED_TAG


@dataclass(frozen=True, slots=True)
class Lease(StoredRecord):
    """The grant of GPUs to a trial. `epoch` counts the grants of the trial, from 1.

    `pod` has the keys that the sweep's section `trial.pod` sets; None for a process.
    `nodes` are those that the policy chose, empty if the pool has one machine; `gpu_nodes` names
    the node of each of `gpus`.
    `pool` is the pool of the GPUs; empty in a lease of an earlier version.
    `anew` is the epoch from which the trial restarts from scratch: earlier files are deleted.
    `templated` are the variables of `environment` that the trial's task renders.
    `workspace`: "shared", or "copy" if the trial has its own copy of the directory.
    `host` is the machine and the state folder that it is given for, `host_name` the machine's name.
    `machine` is one of HERMES_MACHINES, which has a state folder of its own, and `local_gpus` are
    the GPUs by their place there; empty in a pool without machines.
    `workers`: "one_process", or "one_per_gpu" for a process on each GPU, then with TF_CONFIG if
    `tf_config`. `most_gpus` is the largest number of GPUs that the trial may hold. `batch` are the
    samples of a step that the policy chose, None if it chose none; `samples` those that the trial
    trains with, None if they are not known.
    """

    epoch: int
    gpus: tuple[int, ...]
    granted_s: float
    run_id: str
    config: dict[str, Any]
    command: tuple[str, ...]
    directory: str
    environment: dict[str, str] = field(default_factory=dict)
    python: str | None = None
    objective: str = "loss"
    direction: str = "minimize"
    metric_pattern: str | None = None
    time_limit_s: float | None = None
    max_epochs: int | None = None
    finish_s: float | None = None
    max_failures: int = 0
    experiment: str = ""
    experiment_id: str = ""
    revoked: bool = False
    pod: dict[str, Any] | None = None
    nodes: tuple[str, ...] = ()
    anew: int = 0
    pool: str = ""
    workspace: str = "shared"
    host: str = ""
    host_name: str = ""
    templated: tuple[str, ...] = ()
    workers: str = "one_process"
    tf_config: bool = False
    most_gpus: int = 1
    batch: int | None = None
    samples: int | None = None
    gpu_nodes: tuple[str, ...] = ()
    machine: str = ""
    local_gpus: tuple[int, ...] = ()

    @property
    def gpus_by_node(self) -> dict[str, tuple[int, ...]]:
        """Return the GPUs on each node, lowest first; empty where the nodes are not known."""
        by_node: dict[str, tuple[int, ...]] = {}
        for gpu, node in sorted(zip(self.gpus, self.gpu_nodes, strict=False)):
            by_node[node] = (*by_node.get(node, ()), gpu)
        return by_node

    @property
    def worker_count(self) -> int:
        """Return the number of processes that train the trial, at least 1."""
        return max(1, len(self.gpus)) if self.workers == ONE_PER_GPU else 1


@dataclass(frozen=True, slots=True)
class StopFlag(StoredRecord):
    """Stop the segment of lease `epoch`; `final` is the state that the trial ends in.

    `resize`: the trial continues with other GPUs at once, so its task keeps its slots and waits for
    the next lease. Without it the task gives its slots back.
    """

    epoch: int
    reason: str
    at_s: float
    final: str | None = None
    resize: bool = False


@dataclass(frozen=True, slots=True)
class Notice(StoredRecord):
    """The segment of lease `epoch` loses its GPUs at `at_s`, for the `reason`."""

    epoch: int
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True)
class CorrectedStart(StoredRecord):
    """When the segment of lease `epoch` began, in Unix seconds.

    `recorded_s` is what its task has recorded, `started_s` the same by the clock as it is set now.
    `began_s` is the start of its container as the triggerer has observed it, and `ran_s` the run
    time of the container in seconds, once that has ended. `gpus` are those of the lease.
    """

    epoch: int
    recorded_s: float
    started_s: float
    ran_s: float | None = None
    began_s: float | None = None
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedUse(StoredRecord):
    """`held_spans` and `sizes` of a trial's record, up to its segment of lease `epoch`."""

    epoch: int
    held: tuple[tuple[float, float], ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ending(StoredRecord):
    """The final state of a trial, and the tags of its MLflow run that describe its end."""

    state: str
    tags: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SegmentRecord(StoredRecord):
    """The newest segment of a trial, and totals over all of its segments.

    `running` is False once the segment has ended. `spans` are (start, end) of the training in all
    ended segments, in Unix seconds; `held` are those of the time for which they held their GPUs,
    their start-up included (empty: not known, in a record of an earlier version). `sizes` are the
    GPUs that it held in each, and `batches` the samples of a step (empty: not known); `batch` is
    that of the newest segment. `final` is the final state of the trial, None before its end. `task`
    is the id of the task instance with which the controller ended the trial.
    `reason` is why the newest segment failed or was interrupted, or why the trial ended; `cause` is
    one of `hermes_ops.trial.failure.Cause` of a failure. `first_failure` is the reason of the
    trial's first failure and its last lines, kept while it is tried again. `host` is where its task
    was when that was not where its lease is for; the outcome is then `hosts.WRONG_HOST`.
    `without_space` is how often in a row a full disk has ended its segment before a new step, and
    `interruptions` how often in a row anything except its script has.
    `failed_size` is the smallest number of workers, if more than one, with which it has failed.
    `waited_s` are the seconds from `started_s` until the trial's own program began, None before
    that: a pod may wait long for a node or its image, and uses no GPU then.
    `resizing` is True while its task holds its slots after the segment's end, for the next lease.
    `earlier_spans`, `earlier_sizes` and `earlier_gpu_s` are its use before it restarted from
    scratch, the spans those of held GPUs. Only the limits of sweeps, users and teams count them.
    """

    epoch: int
    running: bool
    started_s: float
    step: int = 0
    steps_at_start: int = 0
    preemptible: bool = True
    preemptible_reason: str = ""
    checkpointed_s: float | None = None
    checkpoint_s: float | None = None
    restore_s: float | None = None
    startup_s: float | None = None
    repeat_s: float | None = None
    tensor_skew: float | None = None
    spans: tuple[tuple[float, float], ...] = ()
    sizes: tuple[int, ...] = ()
    held: tuple[tuple[float, float], ...] = ()
    batches: tuple[int | None, ...] = ()
    batch: int | None = None
    service_gpu_s: float = 0.0
    segments: int = 1
    preemptions: int = 0
    failures: int = 0
    outcome: str = ""
    ended_s: float | None = None
    final: str | None = None
    gpus: tuple[int, ...] = ()
    task: str = ""
    advice: str = ""
    reason: str = ""
    cause: str = ""
    first_failure: tuple[str, ...] = ()
    host: str = ""
    without_space: int = 0
    interruptions: int = 0
    failed_size: int | None = None
    resizing: bool = False
    earlier_spans: tuple[tuple[float, float], ...] = ()
    earlier_sizes: tuple[int, ...] = ()
    earlier_gpu_s: float = 0.0
    waited_s: float | None = 0.0

    @property
    def began_s(self) -> float | None:
        """Return when the trial's own program began in the newest segment; None before."""
        return None if self.waited_s is None else self.started_s + self.waited_s

    @property
    def held_spans(self) -> tuple[tuple[float, float], ...]:
        """Return (start, end) of the time for which each ended segment held its GPUs."""
        return self.held if len(self.held) == len(self.spans) else self.spans

    @property
    def trains_since_s(self) -> float:
        """Return when the newest segment began to train, as far as its start has been measured.

        Until it has, it takes as long as that of the segment before.
        """
        restore_s = self.restore_s if self.segments > 1 else None
        lead_s = (self.waited_s or 0.0) + (self.startup_s or 0.0) + (restore_s or 0.0)
        return self.started_s + lead_s

    def continued(self) -> SegmentRecord:
        """Return the record of a trial that has ended and continues, as a person has asked.

        Its failures count from 0. If it had failed for good, it may have as many workers as before:
        the cause may have been removed.
        """
        failed_size = None if self.final == "failed" else self.failed_size
        return replace(self, running=False, final=None, failures=0, failed_size=failed_size)


def encode(record: Any) -> dict[str, Any]:  # noqa: ANN401 - any of the records above
    """Return the record as a JSON object (Airflow's store takes lists, not tuples)."""
    return {name: _lists(value) for name, value in asdict(record).items()}


def decode(kind: type[R], value: object) -> R | None:
    """Return the record in a stored value or its JSON; None where it is absent or malformed.

    Unknown keys are ignored, so that records of a newer release can be read. Anyone who may edit a
    task in Airflow can write its records: a value of another type, a number that is not finite, and
    a lease of GPUs that no pool has are malformed.
    """
    try:
        document = json.loads(value) if isinstance(value, str) else value
        if not isinstance(document, Mapping):
            return None
        declared: Any = kind
        record: R = _adapter(declared).validate_python(dict(document))
    except (ValueError, RecursionError):
        return None
    return None if isinstance(record, Lease) and _is_impossible(record) else record


def _is_impossible(lease: Lease) -> bool:
    """Tell whether no pool has these GPUs, or no machine that name: its queue is written."""
    has_no_gpus = min(lease.gpus, default=0) < 0 or len(set(lease.gpus)) < len(lease.gpus)
    return has_no_gpus or len(lease.machine) > MOST_MACHINE_CHARACTERS


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:  # noqa: ANN401 - the class of a record
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _lists(value: object) -> object:
    if isinstance(value, tuple | list):
        return [_lists(v) for v in value]
    return value


def is_active(lease: Lease | None, segment: SegmentRecord | None) -> bool:
    """Return whether the lease is neither revoked nor used up by a segment that has ended."""
    if lease is None or lease.revoked:
        return False
    if segment is None or segment.epoch < lease.epoch:
        return True
    return segment.epoch == lease.epoch and segment.running
