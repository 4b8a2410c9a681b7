from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.references import (
    RESERVED_PREFIXES,
    MissingVariableError,
    mistake_in,
    names_in,
    resolved,
)
from hermes_ops.trial.environment import (
    guard_supervisor,
    resolve_references,
    restore_script_variables,
)
from hermes_ops.trial.redaction import Mask, secret_names, secret_values

ROOT = Path(__file__).parents[3]
SHOWS = """
import os
print("token", os.environ["API_TOKEN"], "in", os.environ["URL"], flush=True)
print("left", [n for n in os.environ if n == "HERMES_REFERENCES"], flush=True)
print("epoch=1 loss=0.5", flush=True)
raise SystemExit(f"no access with {os.environ['API_TOKEN']}")
"""


def test_a_reference_is_replaced_wherever_it_stands_and_one_in_double_braces_is_text() -> None:
    value = "https://me:{env:PW}@host/{env:DB}?{{env:PW}}"
    assert resolved(value, {"PW": "hush", "DB": "x"}) == "https://me:hush@host/x?{env:PW}"
    assert names_in(value) == ("PW", "DB")


def test_what_a_reference_brings_is_no_reference_again() -> None:
    assert resolved("{env:A}", {"A": "{env:B}", "B": "hush"}) == "{env:B}"


@given(st.text(alphabet="{}env:AB_ ", max_size=20), st.sampled_from(RESERVED_PREFIXES))
def test_no_value_reads_a_variable_of_the_services(text: str, prefix: str) -> None:
    services = {f"{prefix}{rest}": "hush" for rest in ("", "A", "_B")}
    value = text + "{env:" + prefix + "A}"
    assert mistake_in(value) is not None
    with contextlib.suppress(MissingVariableError):
        assert "hush" not in resolved(value, services)


@pytest.mark.parametrize(
    "value",
    ["{env:}", "{env:9}", "{env: A}", "{ENV:A}", "${env:A}", "{env.A}", "{env:A-B}",
     "{env:hermes_x}", "{env:AIRFLOW__CORE__FERNET_KEY}", "{ env:A }"],
)  # fmt: skip
def test_a_reference_that_cannot_be_meant_is_refused(value: str) -> None:
    assert mistake_in(f"before {value} after") is not None


@pytest.mark.parametrize(
    "value", ["", "{}", '{"env": "A"}', "{env:A}", "x{env:a_1}y", "{{env:A}}", "{e}"]
)
def test_other_values_and_references_are_not_refused(value: str) -> None:
    assert mistake_in(value) is None


def test_resolved_values_and_those_that_they_are_made_of_are_secrets() -> None:
    references = {"LOGIN": "me:{env:MINE}", "FOLDER": "{env:SOMEWHERE}"}
    environment = {
        "HERMES_REFERENCES": json.dumps(references),
        "MINE": "hush-hush",
        "SOMEWHERE": os.sep,
    }
    assert resolve_references(environment) is None
    assert environment["LOGIN"] == "me:hush-hush"
    assert "HERMES_REFERENCES" not in environment
    assert Mask(secret_values(environment)).text("me:hush-hush hush-hush /") == "*** *** /"
    assert secret_names(environment) >= {"LOGIN", "MINE"}


def test_a_missing_variable_is_named_with_its_key_and_nothing_is_changed() -> None:
    environment = {"HERMES_REFERENCES": '{"A": "{env:PATH_TO}", "B": "{env:HERE}"}', "HERE": "x"}
    before = dict(environment)
    reason = resolve_references(environment)
    assert reason is not None
    assert "trial.environment.A" in reason
    assert "{env:PATH_TO}" in reason
    assert "trial.pod.secrets" in reason
    assert environment == before
    own = resolve_references({**environment, "HERMES_HOME": "/h"})
    assert own is not None
    assert "--trial-environment PATH_TO" in own


def run(
    folder: Path, references: dict[str, str], **variables: str
) -> tuple[int, str, dict[str, Any]]:
    script = folder / "train.py"
    script.write_text(SHOWS)
    given_ = {"HERMES_REFERENCES": json.dumps(references), "HERMES_HOME": str(folder), **variables}
    done = subprocess.run(
        [sys.executable, "-m", "hermes_ops.trial", "--dir", str(folder / "trial"), "--epoch", "1",
         "--objective", "loss", "--", sys.executable, str(script)],
        env={**os.environ, **given_}, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    result = json.loads((folder / "trial" / "result.json").read_text())
    return done.returncode, done.stdout + done.stderr, result


def test_a_script_has_the_value_and_its_log_its_last_lines_and_its_reason_have_stars(
    tmp_path: Path,
) -> None:
    references = {"API_TOKEN": "{env:API_TOKEN}", "URL": "http://u:{env:PART}@host"}
    _, output, result = run(tmp_path, references, API_TOKEN="hush-1234", PART="part-1234")
    assert "token *** in ***" in output
    assert "left []" in output
    everything = output + json.dumps(result)
    assert not [secret for secret in ("hush-1234", "part-1234") if secret in everything]
    assert "no access with ***" in json.dumps(result)


def test_the_script_does_not_start_without_the_variable_and_is_not_tried_again(
    tmp_path: Path,
) -> None:
    code, output, result = run(tmp_path, {"API_TOKEN": "{env:NOT_THERE}"})
    assert code != 0
    assert "trial.environment.API_TOKEN" in output
    assert "NOT_THERE" in result["reason"]
    assert (result["outcome"], result["retryable"]) == ("failed", False)
    assert "token" not in output.replace("API_TOKEN", "")


def test_hermes_trial_is_started_without_the_variables_for_the_interpreter_of_the_script() -> None:
    own = {"PYTHONHOME": "/p", "LD_LIBRARY_PATH": "/l", "A": "1"}
    environment = guard_supervisor(own)
    assert set(environment) == {"HERMES_SCRIPT_ENVIRONMENT", "A"}
    restore_script_variables(environment)
    assert environment == own
    assert guard_supervisor({"A": "1"}) == {"A": "1"}
