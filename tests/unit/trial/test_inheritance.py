from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.references import RESERVED_PREFIXES
from hermes_ops.trial.environment import (
    SETTING,
    InheritanceRule,
    add_names,
    split_names,
)

COMMON = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "SHELL", "TERM", "CUDA_HOME",
    "NVIDIA_DRIVER_CAPABILITIES", "NCCL_DEBUG", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    "LD_LIBRARY_PATH", "http_proxy", "HTTPS_PROXY", "no_proxy", "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONHASHSEED",
    "TF_CPP_MIN_LOG_LEVEL", "XLA_FLAGS", "KERAS_BACKEND", "TORCH_HOME", "HF_HOME", "HF_HUB_OFFLINE",
    "TOKENIZERS_PARALLELISM", "WANDB_MODE", "MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_PASSWORD",
    "HERMES_HOME",
)  # fmt: skip
LEFT_BEHIND = (
    "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "HF_TOKEN", "WANDB_API_KEY",
    "GITHUB_TOKEN", "DATABASE_URL", "PGPASSWORD", "SSH_AUTH_SOCK", "KUBECONFIG", "CONDA_TOKEN",
    "GOOGLE_APPLICATION_CREDENTIALS", "MLFLOW_BACKEND_STORE_URI", "MLFLOW_FLASK_SERVER_SECRET_KEY",
    "ANYTHING", "KEYS", "PATHS", "HERMES_POLICY", "AIRFLOW__CORE__FERNET_KEY",
)  # fmt: skip


@pytest.mark.parametrize("name", COMMON)
def test_a_trial_inherits_what_scripts_commonly_need(name: str) -> None:
    assert InheritanceRule().inherited({name: "x"}) == {name: "x"}


@pytest.mark.parametrize("name", LEFT_BEHIND)
def test_a_trial_does_not_inherit_what_is_not_listed(name: str) -> None:
    assert InheritanceRule().inherited({name: "x"}) == {}


def test_a_name_in_the_setting_is_inherited_and_its_like_is_not() -> None:
    rule = InheritanceRule.from_environment({SETTING: "HF_TOKEN, AWS_*  DATA, *"})
    given_ = dict.fromkeys(("HF_TOKEN", "HF_TOKEN_2", "AWS_REGION", "DATA", "DATA_DIR"), "x")
    assert rule.inherited(given_).keys() == {"HF_TOKEN", "AWS_REGION", "DATA"}


@given(st.sampled_from(RESERVED_PREFIXES), st.text("ABCxyz_09", max_size=12), st.booleans())
def test_no_setting_passes_a_variable_of_the_services_on(
    prefix: str, rest: str, is_beginning: bool
) -> None:
    name = prefix + rest
    rule = InheritanceRule([f"{prefix[:3]}*" if is_beginning else name])
    assert rule.inherited({name: "x"}) == {}


def test_the_variables_of_a_connection_are_added_to_the_setting_once() -> None:
    environment = {SETTING: "DATA"}
    add_names(environment, ["AWS_ACCESS_KEY_ID", "DATA"])
    add_names(environment, ["AWS_ACCESS_KEY_ID"])
    assert split_names(environment[SETTING]) == ("DATA", "AWS_ACCESS_KEY_ID")


def test_what_scripts_often_need_and_do_not_inherit_is_named_unless_it_is_empty() -> None:
    shell = {
        "HF_TOKEN": "x",
        "AWS_PROFILE": "x",
        "DATA_DIR": "/d",
        "WANDB_API_KEY": "",
        "EDITOR": "vi",
    }
    assert InheritanceRule(["DATA_DIR"]).missed(shell) == ("AWS_PROFILE", "HF_TOKEN")
