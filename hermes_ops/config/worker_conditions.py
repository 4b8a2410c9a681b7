"""Conditions between the keys of `trial` that say how a trial uses several GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from hermes_ops.config.files import printable
from hermes_ops.config.model import SweepConfig, TrialSpec
from hermes_ops.config.parameters import PlacedParameter
from hermes_ops.config.problems import Violation, comma_separated, nearest, violation
from hermes_ops.config.render import own_batch
from hermes_ops.config.workers import BatchSpec, LearningRateScale, ResizePoint, Workers
from hermes_ops.core.amounts import counted
from hermes_ops.search.space import (
    ChoiceParameter,
    Integer,
    Quantised,
    SearchParameter,
    Value,
    text,
)

LAUNCHER_VARIABLES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    | {f"HOROVOD_{name}{kind}" for name in ("", "LOCAL_", "CROSS_") for kind in ("RANK", "SIZE")}
    | {"HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_HOSTNAME"}
    | {"HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"}
    | {"JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS", "JAX_LOCAL_DEVICE_IDS"}
)
"""Variables by which a worker knows its place among the others."""

LAUNCHERS = frozenset(
    {"horovodrun", "torchrun", "mpirun", "mpiexec", "srun", "accelerate", "deepspeed"}
)
"""Programs that start the workers of a training themselves."""

LAUNCHER_MODULES = frozenset(
    {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}
)
"""The modules of such programs, as they stand after `python -m`."""


def worker_violations(trial: TrialSpec) -> Iterator[Violation]:
    """Yield settings for several workers of trials that have one process, and the reverse."""
    if trial.workers is Workers.ONE_PER_GPU:
        yield from _several_workers(trial)
    else:
        yield from _one_process(trial)
    gpus = trial.gpu_range
    if trial.resize is ResizePoint.EPOCH and gpus.least == gpus.most:
        found = f"epoch, for trials that always have {gpus.least} GPUs"
        fix = "write gpus: {min: 1, max: 4}, or remove resize"
        yield violation(("trial", "resize"), found, "a range of GPUs", fix)


def _one_process(trial: TrialSpec) -> Iterator[Violation]:
    allowed = "workers: one_per_gpu with it"
    if trial.tf_config:
        fix = "write workers: one_per_gpu, or remove tf_config"
        found = "true, for trials of one process"
        yield violation(("trial", "tf_config"), found, allowed, fix)
    if trial.scale_learning_rate is not LearningRateScale.SCRIPT:
        fix = "write workers: one_per_gpu, or remove scale_learning_rate"
        found = f"{trial.scale_learning_rate.value}, for trials of one process"
        yield violation(("trial", "scale_learning_rate"), found, allowed, fix)


def _several_workers(trial: TrialSpec) -> Iterator[Violation]:
    taken = LAUNCHER_VARIABLES | {"TF_CONFIG"} if trial.tf_config else LAUNCHER_VARIABLES
    for name in trial.environment:
        if name in taken:
            found = "a variable that each worker gets with its own value"
            fix = "remove it, or write workers: one_process"
            path = ("trial", "environment", name)
            yield violation(path, found, "other variables with workers: one_per_gpu", fix)
    place = _launcher(trial.command)
    if place is not None:
        program = PurePath(trial.command[place]).name
        found = f"{program} with workers: one_per_gpu, which starts the command once for each GPU"
        fix = f"remove {program} and its options, or write workers: one_process"
        yield violation(("trial", "command", place), found, "the command of one worker", fix)


def _launcher(command: Sequence[str]) -> int | None:
    """Return the place in the command of a program that starts workers; None without one."""
    if PurePath(command[0]).name in LAUNCHERS:
        return 0
    place = command.index("-m") + 1 if "-m" in command else len(command)
    is_launcher = place < len(command) and command[place] in LAUNCHER_MODULES
    return place if is_launcher else None


def batch_violations(
    config: SweepConfig,
    placed: Sequence[PlacedParameter],
    parameters: Mapping[str, SearchParameter],
) -> Iterator[Violation]:
    """Yield why a policy cannot choose the batch: its parameter, or a range that is empty."""
    spec = config.trial.batch
    if spec is None:
        return
    yield from _batch_limits(spec, config.trial)
    where, names = ("trial", "batch", "parameter"), [*parameters]
    parameter = parameters.get(spec.parameter)
    if parameter is None:
        meant = nearest(spec.parameter, names)
        add = f"add {printable(spec.parameter)} to search.space, for example as "
        fix = f"did you mean {meant}?" if meant else add + _one_value(spec, config.trial)
        found = f"{printable(spec.parameter)}, which is no parameter of the search"
        yield violation(where, found, comma_separated(names), fix)
    elif any(p.is_conditional for p in placed if p.name == spec.parameter):
        found = f"{printable(spec.parameter)}, which not every configuration has"
        fix = "name another one, or move it up to search.space"
        yield violation(where, found, "a parameter of every configuration", fix)
    else:
        yield from _batch_values(spec, config.trial, parameter)


def _one_value(spec: BatchSpec, trial: TrialSpec) -> str:
    value = -(-spec.min // trial.processes(trial.gpu_range.least))
    return f"{{type: choice, values: [{value}]}}"


def _batch_limits(spec: BatchSpec, trial: TrialSpec) -> Iterator[Violation]:
    least = trial.gpu_range.least
    gpus = counted(least, "GPU")
    if spec.per_gpu_max is not None and spec.per_gpu_max * least < spec.min:
        found = f"{spec.per_gpu_max}, so at most {spec.per_gpu_max * least} on {gpus}"
        fix = f"write {-(-spec.min // least)} or more, lower trial.batch.min, or raise gpus.min"
        allowed = f"enough for the least batch, {spec.min}"
        yield violation(("trial", "batch", "per_gpu_max"), found, allowed, fix)
    most = trial.processes(trial.gpu_range.most)
    if spec.max < most:
        found = f"{spec.max}, for {most} workers"
        fix = f"write {most} or more, or fewer GPUs"
        yield violation(("trial", "batch", "max"), found, "a sample for each worker", fix)


def _batch_values(
    spec: BatchSpec, trial: TrialSpec, parameter: SearchParameter
) -> Iterator[Violation]:
    """Yield a value of the parameter that is no batch, or one outside the range."""
    where, least = ("trial", "batch", "parameter"), trial.gpu_range.least
    processes, gpus = trial.processes(least), counted(least, "GPU")
    for value in _extremes(parameter):
        samples = own_batch(value, processes)
        name = printable(spec.parameter)
        if samples is None:
            found = f"{name}, which may be {text(value) or 'null'}"
            fix = "use integer, log_integer, or a choice or quantised of whole numbers"
            yield violation(where, found, "whole numbers, at least 1", fix)
            return
        if not spec.min <= samples <= spec.max:
            found = f"{name}, which may be {text(value)}: {samples} samples on {gpus}"
            fix = "widen trial.batch.min and max, or narrow the parameter"
            yield violation(where, found, f"batches of {spec.min} to {spec.max}", fix)
            return


def _extremes(parameter: SearchParameter) -> Sequence[Value]:
    """Return the values that decide whether all are allowed: all of a choice, else the ends."""
    match parameter:
        case ChoiceParameter():
            return parameter.values
        case Integer():
            return (parameter.low, parameter.high)
        case Quantised():
            return (parameter.at(0), parameter.at(parameter.cardinality - 1))
    return (parameter.from_unit(0.0),)
