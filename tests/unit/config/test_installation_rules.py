"""What an installation forbids sweeps: processes on its workers, and objects of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.config import (
    PodRules,
    PodSpec,
    RunIn,
    check_installation,
    check_pod,
    parse,
    pod_rules,
    pod_spec,
    required_run_in,
)
from hermes_ops.errors import ConfigError, HermesError, NotAllowed
from tests.unit.config.pod_sweeps import data

DEFAULTS = pod_spec(
    {
        "image": "trial:1", "namespace": "trials", "claim": "home", "claim_folder": "sweeps",
        "service_account": "trials", "template_file": "/etc/pod.yaml", "secrets": ["bucket"],
        "pull_secrets": ["registry"], "checkpoint_claims": {"node-a": "disk-a"},
        "volumes": [{"mount": "/data", "claim": "data"}, {"mount": "/k", "secret": "keys"}],
    },
    "pod.yaml",
)  # fmt: skip
RULES = PodRules(reserved_config_maps=("release-airflow",), secrets=("wandb",), claims=("cache",))


def refused(own: dict[str, Any], rules: PodRules = RULES) -> dict[str, str]:
    """What is found at each place of a section that is refused."""
    with pytest.raises(NotAllowed) as caught:
        check_pod(pod_spec(own, "sweep"), DEFAULTS, rules, "sweep")
    return {problem.where: problem.found for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("own", "where", "found"),
    [
        ({"secrets": ["bucket", "release-airflow"]}, "secrets", "release-airflow"),
        ({"pull_secrets": ["wandb"]}, "pull_secrets", "wandb"),
        ({"secrets": ["registry"]}, "secrets", "registry"),
        ({"volumes": [{"mount": "/s", "secret": "db"}]}, "volumes.0.secret", "db"),
        ({"volumes": [{"mount": "/s", "claim": "home"}]}, "volumes.0.claim", "home"),
        ({"volumes": [{"mount": "/s", "claim": "data", "read_only": False}]},
         "volumes.0.claim", "data"),
        ({"volumes": [{"mount": "/s", "config_map": "release-airflow"}]},
         "volumes.0.config_map", "release-airflow"),
        ({"checkpoint_claims": {"node-a": "postgresql"}}, "checkpoint_claims.node-a", "postgresql"),
        ({"namespace": "kube-system"}, "namespace", "kube-system"),
        ({"service_account": "release-airflow"}, "service_account", "release-airflow"),
        ({"priority_class": "system-node-critical"}, "priority_class", "system-node-critical"),
        ({"claim": "artifacts"}, "claim", "artifacts"),
        ({"claim_folder": "airflow-logs"}, "claim_folder", "airflow-logs"),
        ({"template_file": "/hermes/sweeps/x/pod.yaml"}, "template_file",
         "/hermes/sweeps/x/pod.yaml"),
    ],
)  # fmt: skip
def test_what_the_installation_does_not_allow_is_refused_where_it_stands(
    own: dict[str, Any], where: str, found: str
) -> None:
    assert refused(own) == {f"trial.pod.{where}": found}


@pytest.mark.parametrize(
    "own",
    [
        {},
        DEFAULTS.model_dump(mode="json", exclude_none=True),
        {"secrets": ["wandb", "bucket"], "pull_secrets": ["registry"]},
        {"volumes": [{"mount": "/elsewhere", "claim": "data"}, {"mount": "/w", "secret": "keys"}]},
        {"volumes": [{"mount": "/c", "claim": "cache", "read_only": False}]},
        {"volumes": [{"mount": "/scripts", "config_map": "my-script"}]},
        {"checkpoint_claims": {"node-b": "disk-a", "node-c": "cache"}},
    ],
)
def test_what_the_defaults_name_and_the_rules_allow_may_be_named(own: dict[str, Any]) -> None:
    check_pod(pod_spec(own, "sweep"), DEFAULTS, RULES, "sweep")


def test_every_key_of_a_pod_that_names_an_object_is_held_against_the_rules() -> None:
    """A key that is new must be told apart here: it names an object, or it does not."""
    harmless = {
        "image", "pull_policy", "requests", "limits", "gpu_resource", "node_selector",
        "tolerations", "environment", "user", "read_only_root", "start_timeout_seconds",
        "deferrable",
    }  # fmt: skip
    at_the_plan = {"gang_service"}  # by check_gang_service
    naming = {
        "claim", "claim_folder", "template_file", "namespace", "service_account",
        "priority_class", "secrets", "pull_secrets", "checkpoint_claims", "volumes",
    }  # fmt: skip
    assert set(PodSpec.model_fields) == harmless | at_the_plan | naming


def test_rules_of_null_allow_anything_and_no_rules_forbid_nothing() -> None:
    own = {"secrets": ["any"], "volumes": [{"mount": "/s", "claim": "any"}]}
    check_pod(pod_spec(own, "sweep"), DEFAULTS, PodRules(secrets=None, claims=None), "sweep")
    check_pod(pod_spec({**own, "claim": "x"}, "sweep"), DEFAULTS, None, "sweep")


def test_the_remedy_says_what_is_allowed_and_who_can_allow_more() -> None:
    with pytest.raises(NotAllowed) as caught:
        check_pod(pod_spec({"secrets": ["db"]}, "s"), DEFAULTS, RULES, "my-sweep")
    said = str(caught.value)
    assert "trial.pod.secrets: found db; allowed: bucket or wandb. Fix:" in said
    assert "HERMES_POD_RULES" in said
    assert "trials.allowed" in said


# -- the environment -----------------------------------------------------------------------------


def test_where_pods_are_required_a_sweep_that_says_nothing_has_pods(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HERMES_RUN_IN", "pod")
    config = parse(data(pod={"image": "trial:1"}), "test", None)
    assert config.trial.run_in is RunIn.POD
    check_installation(config, tmp_path / "pod.yaml")
    assert json.loads(config.to_json())["trial"]["run_in"] == "pod"


@pytest.mark.parametrize(("required", "said"), [("pod", "process"), ("process", "pod")])
def test_a_sweep_whose_trials_would_run_elsewhere_is_refused_with_the_one_line_to_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, required: str, said: str
) -> None:
    monkeypatch.setenv("HERMES_RUN_IN", required)
    config = parse(data(run_in=said), "test", None)
    with pytest.raises(NotAllowed) as caught:
        check_installation(config, tmp_path / "pod.yaml")
    (problem,) = caught.value.problems
    assert (problem.where, problem.found) == ("trial.run_in", said)
    assert problem.fix.startswith(f"write trial.run_in: {required}")
    assert "HERMES_RUN_IN" in problem.allowed


def test_a_wrong_setting_of_the_installation_lets_nothing_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="HERMES_RUN_IN: found 'pods'; allowed: process or pod"):
        required_run_in({"HERMES_RUN_IN": "pods"})
    monkeypatch.setenv("HERMES_RUN_IN", "pods")
    with pytest.raises(ConfigError, match="HERMES_RUN_IN"):
        check_installation(parse(data(), "test", None), tmp_path / "pod.yaml")
    assert required_run_in({}) is None
    assert pod_rules({}) is None


@pytest.mark.parametrize("text", [None, "secret: [a]", "- a", "secrets: a"])
def test_a_file_of_rules_that_is_missing_or_wrong_forbids_all(
    tmp_path: Path, text: str | None
) -> None:
    file = tmp_path / "rules.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(HermesError, match=r"rules\.yaml"):
        pod_rules({"HERMES_POD_RULES": str(file)})


def test_an_empty_file_of_rules_allows_what_the_defaults_name_alone(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text("")
    rules = pod_rules({"HERMES_POD_RULES": str(file)})
    assert rules == PodRules()
    assert refused({"secrets": ["wandb"]}, PodRules()) == {"trial.pod.secrets": "wandb"}
