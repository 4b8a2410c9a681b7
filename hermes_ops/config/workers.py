"""How many GPUs a trial may hold, and how it uses several: processes, learning rate, batch."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from hermes_ops.config.fields import Model, ParameterName, refusal
from hermes_ops.core.sizes import powers_of_two

MOST_GPUS = 1_024

GpuNumber = Annotated[int, Field(ge=1, le=MOST_GPUS)]


def _sizes_form(value: Any) -> str:  # noqa: ANN401 - whatever the file holds
    return "list" if isinstance(value, list | tuple) else "word"


Sizes = Annotated[
    Annotated[Literal["any", "powers_of_two"], Tag("word")]
    | Annotated[tuple[GpuNumber, ...], Field(strict=False, max_length=MOST_GPUS), Tag("list")],
    Discriminator(_sizes_form),
]


class GpuRange(Model):
    """The numbers of GPUs that a trial may hold; a policy that sizes jobs chooses among them."""

    min: Annotated[GpuNumber, Field(examples=[1])] = 1
    """The least number; what a policy gives that does not size jobs."""
    max: Annotated[GpuNumber, Field(examples=[4])]
    """The largest number."""
    sizes: Sizes = "any"
    """Which numbers of the range: any, powers_of_two, or a list of them."""

    @model_validator(mode="after")
    def _has_sizes(self) -> GpuRange:
        if self.min > self.max:
            found = f"min {self.min} and max {self.max}"
            raise refusal("a min that is at most max", "exchange them", found)
        if isinstance(self.sizes, tuple):
            self._check_list(self.sizes)
        elif not self.numbers and self.sizes != "any":
            found = f"no power of two from {self.min} to {self.max}"
            raise refusal(
                "a range with one of 1, 2, 4, ...", "widen it, or write sizes: any", found
            )
        return self

    def _check_list(self, sizes: tuple[int, ...]) -> None:
        outside = [size for size in sizes if not self.min <= size <= self.max]
        if not sizes or outside:
            found = f"sizes {', '.join(map(str, outside))}" if outside else "an empty list of sizes"
            raise refusal(
                f"numbers from {self.min} to {self.max}", "correct sizes, min or max", found
            )

    @property
    def numbers(self) -> tuple[int, ...]:
        """The allowed numbers, ascending; empty: the whole range."""
        if self.sizes == "any":
            return ()
        if self.sizes == "powers_of_two":
            return powers_of_two(self.min, self.max)
        return tuple(sorted(set(self.sizes)))

    @property
    def least(self) -> int:
        """The least allowed number."""
        return min(self.numbers, default=self.min)

    @property
    def most(self) -> int:
        """The largest allowed number."""
        return max(self.numbers, default=self.max)


NUMBER, RANGE = "number", "range"
"""The two forms of `trial.gpus`, as pydantic names them in the location of an error."""


def _form(value: Any) -> str:  # noqa: ANN401 - whatever the file holds
    return RANGE if isinstance(value, Mapping | GpuRange) else NUMBER


Gpus = Annotated[
    Annotated[GpuNumber, Tag(NUMBER)] | Annotated[GpuRange, Tag(RANGE)], Discriminator(_form)
]


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
