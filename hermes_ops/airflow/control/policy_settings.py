"""The policy that a pool runs: its name, its options and those of its guards.

`HERMES_HOME/policy.json` (`{"policy": "fifo", "options": {}}`) holds them. Without that file the
variables HERMES_POLICY and HERMES_POLICY_OPTIONS (JSON) do.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hermes_ops.airflow.folders import home
from hermes_ops.core.model import PastTrial, Policy
from hermes_ops.core.options import GuardOptions, without_guards
from hermes_ops.core.wrapper import OneSize
from hermes_ops.errors import HermesError
from hermes_ops.policies import check_live, make_policy, sizes_jobs
from hermes_ops.trial.files import write_json

DEFAULT_POLICY = "frontrunner"


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Name the pool's policy and its options, which include those of the two guards.

    `by` and `at_s` say who set them, and when.
    """

    name: str = DEFAULT_POLICY
    options: dict[str, Any] = field(default_factory=dict)
    by: str = field(default="", compare=False)
    at_s: float = field(default=0.0, compare=False)

    @classmethod
    def load(cls, path: Path) -> PolicySettings:
        """Return the settings of the policy file, or of the environment where there is none.

        Raises HermesError for a malformed file or variable, or a file that cannot be read.
        """
        try:
            text, source = path.read_text(), str(path)
        except FileNotFoundError:
            text, source = os.environ.get("HERMES_POLICY_OPTIONS") or "{}", "HERMES_POLICY_OPTIONS"
        except (OSError, UnicodeDecodeError) as error:
            raise HermesError(f"{path} cannot be read ({error}): correct it.") from error
        value = read_object(text, source)
        if source != str(path):
            value = {"policy": os.environ.get("HERMES_POLICY"), "options": value}
        options = value.get("options") or {}
        if not isinstance(options, dict):
            raise HermesError(f"{source}: `options` is {options!r}, not an object: correct it.")
        by, at_s = str(value.get("by") or ""), value.get("at_s")
        name = str(value.get("policy") or DEFAULT_POLICY)
        return cls(name, options, by, valid_time_s(at_s))

    @staticmethod
    def file() -> Path:
        """Return the path of the policy file of this home."""
        return home() / "policy.json"

    def write(self, path: Path) -> None:
        """Write the policy file; a running controller adopts it in its next round."""
        path.parent.mkdir(parents=True, exist_ok=True)
        chosen = {"by": self.by, "at_s": self.at_s} if self.by else {}
        write_json(path, {"policy": self.name, "options": self.options, **chosen})

    def build(self, prior: tuple[PastTrial, ...] = ()) -> Policy[Any]:
        """Return the policy within its guards, with the trials of earlier sweeps as its prior.

        Raises ConfigError for an unknown name or option, and for a policy that runs in a
        simulation only.
        """
        check_live(self.name)
        given = {"prior": prior} if prior else None
        policy = make_policy(self.name, without_guards(self.options), given)
        if not sizes_jobs(self.name):
            policy = OneSize(policy)
        return self.guards.around(policy)

    @property
    def guards(self) -> GuardOptions:
        """Return the options of the guards; raises ConfigError for a bad one."""
        return GuardOptions.parse(self.options)


_LATEST_S = 1e11  # in the year 5138: a later time is not valid


def valid_time_s(at_s: object) -> float:
    """Return the Unix time that a file of settings has; 0 for a value that is not a valid time."""
    return float(at_s) if isinstance(at_s, int | float) and 0 <= at_s < _LATEST_S else 0.0


def read_object(text: str, source: str) -> dict[str, Any]:
    """Return the JSON object in a text; HermesError names its source otherwise."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a ValueError
        raise HermesError(f"{source} is not JSON ({error}): correct it.") from None
    if not isinstance(value, dict):
        raise HermesError(f"{source} is {value!r}, not a JSON object: correct it.")
    return value
