"""How a trial uses several GPUs: its processes, its learning rate, its batch."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from hermes_ops.config.fields import Model, ParameterName, refusal

Samples = Annotated[int, Field(ge=1, le=10**9)]


class Workers(StrEnum):
    """How many processes train a trial."""

    ONE_PROCESS = "one_process"
    ONE_PER_GPU = "one_per_gpu"


class LearningRateScale(StrEnum):
    """Who multiplies the learning rate by the number of workers."""

    SCRIPT = "script"
    HERMES = "hermes"
    OFF = "off"


class ResizePoint(StrEnum):
    """Where a trial may be stopped."""

    BATCH = "batch"
    EPOCH = "epoch"


class BatchSpec(Model):
    """The batches among which a policy chooses that chooses them, in samples.

    A batch is the samples of one step over all GPUs of the trial; the parameter is those of one
    process.
    """

    parameter: Annotated[ParameterName, Field(examples=["batch_size"])]
    """The parameter of search.space that is the batch of one process. A policy's choice replaces
    its value at each start; without one its own value holds."""
    min: Annotated[Samples, Field(examples=[32])]
    """The least batch of a step, over all GPUs."""
    max: Annotated[Samples, Field(examples=[512])]
    """The largest batch of a step, over all GPUs."""
    per_gpu_max: Annotated[Samples | None, Field(examples=[128])] = None
    """The most samples that one GPU has memory for; null: no limit."""

    @model_validator(mode="after")
    def _ascending(self) -> BatchSpec:
        if self.min > self.max:
            found = f"min {self.min} and max {self.max}"
            raise refusal("a min that is at most max", "exchange them", found)
        return self

    def of_process(self, batch: int, gpus: int, processes: int) -> int:
        """Return the samples of one process, at least 1, for a batch over all `gpus`.

        It is rounded to whole samples; together they are at most `max`, and on each GPU at most
        `per_gpu_max`.
        """
        samples = min((batch + processes // 2) // processes, self.max // processes)
        if self.per_gpu_max is not None:
            samples = min(samples, self.per_gpu_max * (gpus // processes))
        return max(1, samples)
