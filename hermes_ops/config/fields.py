"""The kinds of values in a sweep file, and the base of its models."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from hermes_ops.core.deadline import Deadline
from hermes_ops.references import mistake_in, names_in
from hermes_ops.search.expression import ConstraintError, parse
from hermes_ops.search.space import Value

GREATEST_INTEGER = 2**53  # beyond it a JSON reader may lose digits
GREATEST_BOUND = 1e100  # beyond it the squares that TPE forms overflow
SMALLEST_LOG_BOUND = 1e-100
NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._\-]{0,63}$"
MOST_DEADLINE = 100
PARAMETER_PATTERN = r"^[A-Za-z_][A-Za-z0-9_.\-]{0,63}$"

_GPUS = "remove it: a trial sees the GPUs of its lease; trial.gpus says how many"
_RUN = "remove it: what the script logs goes to the trial's own run"
_SERVER = (
    "remove it: the script finds the MLflow of its sweep; a pod's address of it is "
    "set in trial.pod.environment"
)
OF_ONE_TRIAL: dict[str, str] = {
    "CUDA_VISIBLE_DEVICES": _GPUS,
    "NVIDIA_VISIBLE_DEVICES": _GPUS,
    "HIP_VISIBLE_DEVICES": _GPUS,
    "ROCR_VISIBLE_DEVICES": _GPUS,
    "GPU_DEVICE_ORDINAL": _GPUS,
    "MLFLOW_RUN_ID": _RUN,
    "MLFLOW_EXPERIMENT_ID": _RUN,
    "MLFLOW_EXPERIMENT_NAME": _RUN,
}
"""Variables that neither a sweep file nor its pod section may set, each with the remedy: Hermes
sets them for each trial, or their value would undo what it sets."""
OF_THE_STACK: dict[str, str] = dict.fromkeys(
    (
        "MLFLOW_TRACKING_URI",
        "MLFLOW_TRACKING_USERNAME",
        "MLFLOW_TRACKING_PASSWORD",
        "MLFLOW_TRACKING_TOKEN",
    ),
    _SERVER,
)
"""Variables by which a script finds the MLflow server that has its run."""


def refusal(allowed: str, fix: str, found: str = "") -> PydanticCustomError:
    """Return the error that `problems` turns into a Problem; without `found` it shows the input."""
    parts = {"allowed": allowed, "fix": fix, "found": found}
    return PydanticCustomError("refused", "{found} is not allowed: {allowed}", parts)


def _text(value: str) -> str:
    if "\0" in value or not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise refusal("text without lone surrogates", "write the character itself") from None
        if "\0" in value:
            raise refusal("text without a NUL character", "remove the NUL character")
    return value


def _environment_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise refusal("a name of letters, digits and _, no digit first", "rename the variable")
    if value.upper().startswith("HERMES_"):
        raise refusal("a name that does not begin with HERMES_", "rename the variable")
    return value


def _pod_variable(value: str) -> str:
    return _not_owned(_environment_name(value), OF_ONE_TRIAL)


def _script_variable(value: str) -> str:
    return _not_owned(_environment_name(value), OF_ONE_TRIAL | OF_THE_STACK)


def _not_owned(value: str, owned: Mapping[str, str]) -> str:
    if value in owned:
        raise refusal("a name that Hermes does not set itself", owned[value], value)
    return value


def _environment_value(value: str) -> str:
    mistake = mistake_in(value)
    if mistake is not None:
        found, allowed, fix = mistake
        raise refusal(allowed, fix, found)
    return value


def _pod_value(value: str) -> str:
    names = names_in(value)
    if names:
        fix = "move the variable to trial.environment"
        raise refusal("no reference: a pod's variables are texts", fix, f"{{env:{names[0]}}}")
    return value


def _metric_pattern(value: str) -> str:
    example = r"for example '(?P<name>\w+): (?P<value>\S+)' or 'latency: (?P<value>\S+) ms'"
    try:
        groups = re.compile(value).groupindex
    except (re.error, OverflowError, RecursionError) as error:
        raise refusal("a regular expression of Python", f"{error}; {example}") from None
    if "value" not in groups:
        raise refusal("a regular expression with the group value", example)
    return value


_BY_CHANCE = re.compile(r"(?<![a-z])[rh](?![a-z])", re.IGNORECASE)
"""The random parts of a cron expression: R is drawn at each evaluation."""


def _cron(value: str) -> str:
    from croniter import croniter

    if not value.startswith("@") and _BY_CHANCE.search(value):
        raise refusal(
            "fixed times: R and H are drawn by chance at each evaluation",
            "write a number, for example '17 2 * * *' for 17 minutes past two",
        )
    try:
        if not value.isascii() or (len(value.split()) != 5 and not value.startswith("@")):
            raise ValueError("not five fields")
        if value != "@quarterly":  # croniter does not know it, Airflow does
            croniter(value, datetime(2000, 1, 1, tzinfo=UTC)).get_next()
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, AttributeError):
        raise refusal(
            "five fields (minute, hour, day, month, weekday) that come round, or @daily and the"
            " like",
            "for example '0 2 * * *', each night at two",
        ) from None
    return value


def _deadline(value: object) -> str:
    allowed = "a time with its offset from UTC, or a duration with its units (d, h, m, s)"
    fix = "write for example 2026-12-01T08:00:00+01:00, or a duration such as 8h or 1d 12h"
    if not isinstance(value, str) or len(value) > MOST_DEADLINE:
        raise refusal(allowed, fix)
    try:
        Deadline.from_text(_text(value))
    except ValueError as error:
        raise refusal(allowed, fix, f"{value!r} ({error})") from None
    return value


def _constraint(value: str) -> str:
    try:
        parse(value)
    except ConstraintError as error:
        raise refusal(error.allowed, error.fix, error.found) from None
    return value


def _value(value: object) -> Value:
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, bool):
        return value
    return _number(value, "text, a number, true, false or null")


def _real(value: float) -> float:
    if abs(value) > GREATEST_BOUND:
        raise refusal(
            f"a number from -{GREATEST_BOUND:g} to {GREATEST_BOUND:g}", "write such a one"
        )
    return value


def _log_bound(value: float) -> float:
    if not SMALLEST_LOG_BOUND <= value <= GREATEST_BOUND:
        allowed = f"a number above 0, from {SMALLEST_LOG_BOUND:g} to {GREATEST_BOUND:g}"
        raise refusal(allowed, "write a positive bound, or the type uniform")
    return value


def _bound(value: object) -> int | float:
    return _number(value, "a number")


def _number(value: object, allowed: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refusal(allowed, "write a value of that type")
    if isinstance(value, float) and not math.isfinite(value):
        raise refusal(f"{allowed}; numbers are finite", "write a finite number")
    most = GREATEST_INTEGER if isinstance(value, int) else GREATEST_BOUND
    if abs(value) > most:
        raise refusal(f"{allowed}; numbers up to {most:g}", "write a smaller number")
    return value


Text = Annotated[str, Field(max_length=10_000), AfterValidator(_text)]
Whole = Annotated[int, Field(ge=-GREATEST_INTEGER, le=GREATEST_INTEGER)]
Real = Annotated[float, AfterValidator(_real)]
LogBound = Annotated[
    float, AfterValidator(_log_bound), WithJsonSchema({"type": "number", "exclusiveMinimum": 0})
]
Number = Annotated[int | float, PlainValidator(_bound), WithJsonSchema({"type": "number"})]
Cron = Annotated[Text, Field(max_length=100), AfterValidator(_cron)]
DeadlineText = Annotated[
    str, PlainValidator(_deadline), WithJsonSchema({"type": "string", "maxLength": MOST_DEADLINE})
]
MetricPattern = Annotated[Text, Field(max_length=1_000), AfterValidator(_metric_pattern)]
ConstraintText = Annotated[Text, AfterValidator(_constraint)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
ParameterName = Annotated[str, Field(pattern=PARAMETER_PATTERN)]
EnvironmentName = Annotated[Text, AfterValidator(_environment_name)]
ScriptVariable = Annotated[Text, AfterValidator(_script_variable)]
EnvironmentValue = Annotated[Text, AfterValidator(_environment_value)]
PodValue = Annotated[Text, AfterValidator(_pod_value)]
PodVariable = Annotated[Text, AfterValidator(_pod_variable)]
ValueField = Annotated[
    Value, PlainValidator(_value), WithJsonSchema({"type": ["string", "number", "boolean", "null"]})
]


class Model(BaseModel):
    """Frozen, strict about types, closed to unknown keys, free of NaN and infinity."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        serialize_by_alias=True,
        hide_input_in_errors=True,
    )
