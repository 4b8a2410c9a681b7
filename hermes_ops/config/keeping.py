"""The sections `checkpoints` and `model` of a sweep file: what stays on disk and in MLflow."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from hermes_ops.config.fields import Model, refusal

WEEK_S = 604_800.0
BYTES_OF_GIGABYTE = 1e9
REGISTERED_NAME = r"^[A-Za-z0-9_][A-Za-z0-9 ._\-]{0,127}$"
ALIAS = r"^[A-Za-z][A-Za-z0-9_\-]{0,127}$"
STORE = r"[a-z][a-z0-9+.\-]*://[A-Za-z0-9._~%@:/+,=\-]+"


def _store(value: str) -> str:
    example = "for example s3://bucket/prefix"
    allowed = "the URL of a folder as fsspec reads it, without blanks, wildcards and options"
    if not re.fullmatch(STORE, value) or "/.." in value:
        raise refusal(allowed, example, "another text")
    try:
        place = urlsplit(value)
        secret = place.password is not None
    except ValueError:
        raise refusal(allowed, example, "another text") from None
    if secret:
        fix = "remove it; give it to trials as environment variables, such as AWS_ACCESS_KEY_ID"
        raise refusal("a URL without user:password@", fix, "a URL with a password in it")
    if place.scheme == "memory" or not (place.netloc + place.path).strip("/"):
        raise refusal("a folder that outlives its trials", example)
    return value


Store = Annotated[str, Field(max_length=1_000), AfterValidator(_store)]


class Checkpoints(Model):
    """How many checkpoints are kept, and for how long."""

    keep_seconds: Annotated[float, Field(ge=0, le=1e9, examples=[86400])] = WEEK_S
    """How long trials that `hermes sweep resume` can take up keep theirs after the sweep's end."""
    keep_last: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """How many a trial keeps beside the best; null: Keras 2, of other scripts all that they
    leave. Each file or folder directly in $HERMES_CHECKPOINT_DIR is one."""
    max_gigabytes: Annotated[float, Field(gt=0, le=1e9, examples=[100])] | None = None
    """Size of all checkpoints of the sweep above which those of ended trials go; null: no limit."""
    store: Annotated[Store | None, Field(examples=["s3://bucket/prefix"])] = None
    """Folder of an object store, by fsspec's URL, to which checkpoints are copied and from which a
    trial takes the newest wherever it goes on; null: only the trial's folder has them."""

    @property
    def max_bytes(self) -> float | None:
        """The limit in bytes."""
        return None if self.max_gigabytes is None else self.max_gigabytes * BYTES_OF_GIGABYTE


class BestModel(Model):
    """What becomes of the best trial's model in MLflow's registry."""

    register_as: Annotated[str, Field(pattern=REGISTERED_NAME, examples=["digits"])] | None = None
    """Name of the registered model of which it becomes a version; null: it is not registered."""
    alias: Annotated[str, Field(pattern=ALIAS, examples=["champion"])] | None = None
    """Alias that points to the new version from then on."""

    @model_validator(mode="after")
    def _registered(self) -> BestModel:
        if self.alias is not None and self.register_as is None:
            fix = "write register_as: with the registered model's name"
            raise refusal("an alias with register_as only", fix, f"alias {self.alias}")
        if self.alias is not None and _is_reserved(self.alias):
            allowed = "an alias that is neither `latest` nor a version such as v1"
            raise refusal(allowed, "write another one", self.alias)
        return self


def _is_reserved(alias: str) -> bool:
    """MLflow's own rule for aliases."""
    return alias.lower() == "latest" or (alias[:1].lower() == "v" and alias[1:].isdigit())
