"""What a visit brings into its pod, and what is made of what the pod leaves."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.cncf.kubernetes.hooks.kubernetes import KubernetesHook
from airflow.providers.cncf.kubernetes.secret import Secret
from airflow.sdk.exceptions import AirflowFailException, AirflowRescheduleException
from kubernetes.client import V1HostPathVolumeSource, V1Volume

from hermes_ops.airflow.folders import TrialFolder, write_lease
from hermes_ops.airflow.hosts import mark_home
from hermes_ops.airflow.identity import MAIN_DAG
from hermes_ops.airflow.records import LEASE_KEY, SEGMENT_KEY, SegmentRecord, decode, encode
from hermes_ops.airflow.sweep.tasks import check_pods
from hermes_ops.airflow.trial import local
from hermes_ops.airflow.trial import pods as pods_module
from hermes_ops.airflow.trial.local import LocalSegment
from hermes_ops.airflow.trial.operator import HermesTrialOperator
from hermes_ops.airflow.trial.pods import (
    HermesPodTrialOperator,
    end_pods,
    facts_of,
    gang_facts,
    prepare,
    spec_of,
    template,
)
from hermes_ops.airflow.trial.segment_run import SegmentRun, exit_code_of, exit_code_reader
from hermes_ops.config import PodSpec, RunIn, SweepConfig, leased_pod, parse
from hermes_ops.config.workers import Workers
from hermes_ops.core.summary import INCOMPLETE
from hermes_ops.errors import ConfigError, HermesError, NotAllowed
from hermes_ops.kubernetes import PodRequest, PodView, connect, manifest
from tests.unit.airflow.builders import SWEEP, DictStore, lease, segment
from tests.unit.kubernetes.pods import POD, FakePods

HOOK: Any = SimpleNamespace(get_namespace=lambda: "of-the-connection", is_in_cluster=False)
VARIABLES = {"HERMES_PARAM_RATE": "0.1", "PYTHONHOME": "/p"}
SPEC = PodSpec(image="trial:1", claim="trials", claim_folder="hermes/sweeps", user=7)


def segment_run(**changes: Any) -> SegmentRun:
    own = lease(3, (2, 3), environment=VARIABLES, pod={}, **changes)
    return SegmentRun.from_lease(DictStore(), own, TrialFolder.from_sweep(SWEEP, 4), None)


def pod_sweep(pod: dict[str, Any], gpus: int = 1) -> SweepConfig:
    space = {"rate": {"type": "uniform", "low": 0, "high": 1}}
    data = {
        "name": "pods",
        "objective": {"metric": "loss"},
        "search": {"algorithm": "random", "max_trials": 1, "space": space},
        "trial": {"command": ["x"], "run_in": "pod", "gpus": gpus, "pod": pod},
        "budget": {"max_epochs": 1},
    }
    return parse(data, "test", None)


def test_a_pod_gets_its_own_folder_of_the_claim_and_its_leases_arguments() -> None:
    facts = facts_of(segment_run(), SPEC, SWEEP, 4, 2)
    assert facts.folder == f"hermes/sweeps/{SWEEP}/trials/4"
    assert (facts.epoch, facts.attempt, facts.gpus, facts.user) == (3, 2, 2, 7)
    arguments = list(facts.arguments)
    assert arguments[arguments.index("--dir") + 1] == "/hermes/trial"
    assert arguments[arguments.index("--gpus") + 1] == "2,3"
    assert arguments[arguments.index("--") + 1 :] == ["python", "train.py"]
    assert "--directory=/" in arguments
    relative = list(facts_of(segment_run(directory="."), SPEC, SWEEP, 4, 2).arguments)
    assert not any(a.startswith("--directory") for a in relative)


def test_a_pod_sees_its_gpus_from_zero_and_nothing_of_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORKER_SECRET", "secret")
    facts = facts_of(segment_run(), SPEC, SWEEP, 4, 2)
    assert facts.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert facts.environment["HERMES_GPUS"] == "2,3"
    assert facts.environment["HERMES_PARAM_RATE"] == "0.1"
    assert facts.environment["HERMES_CHECKPOINT_DIR"] == "/hermes/trial/checkpoints"
    assert not {"WORKER_SECRET", "PYTHONHOME"} & facts.environment.keys()
    assert json.loads(facts.environment["HERMES_SCRIPT_ENVIRONMENT"]) == {"PYTHONHOME": "/p"}


def test_the_workers_of_a_trial_run_inside_its_one_pod() -> None:
    own = segment_run(workers="one_per_gpu", tf_config=True, most_gpus=4)
    facts = facts_of(own, SPEC, SWEEP, 4, 2)
    arguments = list(facts.arguments)
    assert arguments[arguments.index("--workers") + 1] == "2"
    assert "--tf-config" in arguments[: arguments.index("--")]
    assert facts.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert (facts.gpus, facts.most_gpus) == (2, 4)


SPREAD: Any = {"workers": "one_per_gpu", "gpu_nodes": ("node-b", "node-a"), "most_gpus": 4}


def gang_of(spec: PodSpec, **changes: Any) -> tuple[PodRequest, ...]:
    own = segment_run(**{**SPREAD, **changes})
    return gang_facts(facts_of(own, spec, SWEEP, 4, 2), own.lease, spec, 45.0)


def test_a_trial_on_several_nodes_has_a_pod_on_each_with_the_gpus_that_it_holds_there() -> None:
    spec = SPEC.model_copy(update={"gang_service": "gangs"})
    first, other = gang_of(spec)
    assert [(p.nodes, p.gpus, p.member) for p in (first, other)] == [
        (("node-b",), 1, 0), (("node-a",), 1, 1),
    ]  # fmt: skip
    assert other.name == f"{first.name}-1"
    hosts = f"--gang={first.name}.gangs=1,{other.name}.gangs=1"
    for number, facts in enumerate((first, other)):
        own = list(facts.arguments[: facts.arguments.index("--")])
        assert own[-3:] == [hosts, f"--gang-node={number}", "--gang-timeout=45"]
        assert own[own.index("--workers") + 1] == "2"
        assert facts.arguments[-2:] == ("python", "train.py")
        assert facts.environment["CUDA_VISIBLE_DEVICES"] == "0"
        assert "PYTHONHOME" not in facts.environment
        pod = manifest(spec, facts)
        assert pod["metadata"]["labels"]["hermes-ops/gang"] == "2"  # the lowest of its slots
        assert pod["metadata"]["labels"]["hermes-ops/gang-service"] == "gangs"
        assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == (facts.name, "gangs")


@pytest.mark.parametrize(
    ("service", "changes"),
    [
        (None, {}),
        ("gangs", {"gpu_nodes": ("node-a", "node-a")}),
        ("gangs", {"gpu_nodes": ()}),
        ("gangs", {"workers": "one_process"}),
    ],
)
def test_any_other_trial_has_one_pod(service: str | None, changes: dict[str, Any]) -> None:
    spec = SPEC.model_copy(update={"gang_service": service})
    (facts,) = gang_of(spec, **changes)
    assert (facts.gpus, facts.gang) == (2, None)
    assert not any(word.startswith("--gang") for word in facts.arguments)
    pod = manifest(spec, facts)
    assert not any(label.startswith("hermes-ops/gang") for label in pod["metadata"]["labels"])
    assert "subdomain" not in pod["spec"]


def test_the_service_of_trials_on_several_nodes_is_the_sweeps_own_from_its_plan_on(
    home: Path,
) -> None:
    (home / "pod.yaml").write_text("image: a\nclaim: trials\ngang_service: gangs\n")
    plain = pod_sweep({})
    assert check_pods(plain) is plain
    workers = plain.trial.model_copy(update={"workers": Workers.ONE_PER_GPU})
    planned = check_pods(plain.model_copy(update={"trial": workers}))
    assert planned.trial.pod == PodSpec(gang_service="gangs")


@pytest.mark.parametrize(
    ("default", "allowed"),
    [("gang_service: gangs\n", "gangs, as the installation says"), ("", "nothing")],
)
def test_another_service_than_the_installations_is_refused_at_the_plan_alone(
    home: Path, monkeypatch: pytest.MonkeyPatch, default: str, allowed: str
) -> None:
    (home / "pod.yaml").write_text(f"image: a\nclaim: trials\n{default}")
    (home / "rules.yaml").write_text("{}\n")
    own = pod_sweep({"gang_service": "mine"})
    assert check_pods(own) is own  # without rules
    monkeypatch.setenv("HERMES_POD_RULES", str(home / "rules.yaml"))
    with pytest.raises(AirflowFailException) as caught:
        check_pods(own)
    said = str(caught.value)
    assert f"trial.pod.gang_service: found mine; allowed: {allowed}" in said
    assert "Fix: remove trial.pod.gang_service" in said
    spec_of(lease(pod={"gang_service": "mine"}), HOOK)  # a sweep that was planned before goes on
    if default:
        check_pods(pod_sweep({"gang_service": "gangs"}))


def test_a_segment_whose_pods_were_not_all_there_is_told_from_other_interruptions() -> None:
    assert exit_code_of({"outcome": "interrupted", "cause": "incomplete"}) == INCOMPLETE
    assert exit_code_of({"outcome": "interrupted", "cause": ""}) == 75


@pytest.mark.parametrize(("incomplete", "failed_size"), [(True, 2), (False, None)])
def test_after_pods_that_could_not_all_start_a_trial_gets_the_gpus_of_one_node(
    incomplete: bool, failed_size: int | None
) -> None:
    own = segment_run(**SPREAD)
    own.interrupt("a node is away", incomplete=incomplete)
    assert own.record.failed_size == failed_size
    assert own.record.failures == 0


def test_the_sweep_goes_before_the_installation_and_the_connection_names_the_namespace(
    home: Path,
) -> None:
    (home / "pod.yaml").write_text("image: base:1\nclaim: trials\n")
    found = spec_of(lease(pod={"image": "mine:2"}), HOOK)
    assert (found.image, found.claim, found.namespace) == ("mine:2", "trials", "of-the-connection")
    assert spec_of(lease(pod={"namespace": "team"}), HOOK).namespace == "team"


def test_a_pod_without_image_or_claim_is_refused_when_the_sweep_is_planned() -> None:
    with pytest.raises(ConfigError, match=r"trial\.pod\.claim"):
        spec_of(lease(pod={"image": "a"}), HOOK)
    with pytest.raises(Exception, match=r"trial\.pod\.claim"):
        check_pods(pod_sweep({"image": "a"}))


CLAIMS = {"node-a": "disk-a", "node-b": "disk-b"}


def test_a_pod_gets_the_claim_of_the_node_of_its_lease() -> None:
    spec = SPEC.model_copy(update={"checkpoint_claims": CLAIMS})
    facts = facts_of(segment_run(nodes=("node-b",)), spec, SWEEP, 4, 2)
    assert (facts.checkpoint_claim, facts.inside) == ("disk-b", f"{SWEEP}/trials/4")
    assert "--checkpoints-on=node-b" in facts.arguments
    assert facts.arguments[-2:] == ("python", "train.py")
    plain = facts_of(segment_run(nodes=("node-b",)), SPEC, SWEEP, 4, 2)
    assert plain.checkpoint_claim is None
    assert not any(a.startswith("--checkpoints-on") for a in plain.arguments)


@pytest.mark.parametrize("nodes", [(), ("node-c",), ("node-a", "node-b")])
def test_a_lease_that_names_no_one_node_with_a_claim_makes_no_pod(nodes: tuple[str, ...]) -> None:
    spec = SPEC.model_copy(update={"checkpoint_claims": CLAIMS})
    with pytest.raises(HermesError, match="HERMES_NODES"):
        facts_of(segment_run(nodes=nodes), spec, SWEEP, 4, 2)


def test_claims_for_nodes_are_the_sweeps_own_from_its_plan_on(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "pod.yaml").write_text(
        "image: a\nclaim: trials\ncheckpoint_claims: {node-a: disk-a, node-c: disk-c}\n"
    )
    monkeypatch.setenv("HERMES_NODES", "node-a=2,node-b=2")
    planned = check_pods(pod_sweep({"user": 7}))
    assert planned.trial.pod == PodSpec(
        user=7, checkpoint_claims={"node-a": "disk-a", "node-c": "disk-c"}
    )
    without = pod_sweep({"checkpoint_claims": {}})
    assert check_pods(without) is without


@pytest.mark.parametrize(("nodes", "gpus"), [("", 1), ("node-b=4", 1), ("node-a=2", 3)])
def test_claims_without_a_node_of_the_pool_that_can_take_a_trial_are_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch, nodes: str, gpus: int
) -> None:
    monkeypatch.setenv("HERMES_NODES", nodes)
    pod = {"image": "a", "claim": "trials", "checkpoint_claims": {"node-a": "disk-a"}}
    with pytest.raises(Exception, match="HERMES_NODES, as in node-a=2,node-b=2") as caught:
        check_pods(pod_sweep(pod, gpus=gpus))
    assert "trial.pod.checkpoint_claims" in str(caught.value)


def test_a_lease_says_as_much_of_the_pod_as_the_sweep() -> None:
    assert leased_pod(RunIn.PROCESS, None) is None
    assert leased_pod(RunIn.POD, None) == {}
    assert leased_pod(RunIn.POD, PodSpec(image="a")) == {"image": "a"}


def test_an_operator_for_pods_refuses_a_sweep_of_processes() -> None:
    with pytest.raises(HermesError, match="run_in: pod"):
        spec_of(lease(), HOOK)


@pytest.mark.parametrize(
    ("result", "code"),
    [
        ({}, None),
        ({"outcome": "finished"}, 0),
        ({"outcome": "preempted"}, 75),
        ({"outcome": "interrupted", "exit_code": -15}, 75),
        ({"outcome": "failed", "exit_code": 3}, 3),
        ({"outcome": "failed", "exit_code": -9}, 9),
        ({"outcome": "failed", "exit_code": 0}, 1),
        ({"outcome": "failed", "exit_code": 75}, 1),
        ({"outcome": "failed", "exit_code": 70}, 1),
    ],
)
def test_a_result_stands_for_an_exit_code(result: dict[str, Any], code: int | None) -> None:
    assert exit_code_of(result) == code


def test_the_result_of_an_earlier_lease_says_nothing_of_this_one() -> None:
    own = segment_run()
    own.folder.path.mkdir(parents=True)
    file = own.folder.path / "result.json"
    file.write_text(json.dumps({"epoch": 2, "outcome": "failed", "exit_code": 1}))
    assert exit_code_reader(own.folder, own.lease.epoch)() is None
    file.write_text(json.dumps({"epoch": 3, "outcome": "preempted"}))
    assert exit_code_reader(own.folder, own.lease.epoch)() == 75
    file.write_text(json.dumps({"epoch": 2, "outcome": "finished"}))
    assert exit_code_reader(own.folder, own.lease.epoch)() == 0


def test_a_pod_that_is_deleted_outlives_its_script_so_that_the_result_is_written(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "pod.yaml").write_text("image: a\nclaim: trials\nnamespace: trials\n")
    monkeypatch.setattr(HermesPodTrialOperator, "hook", HOOK)
    monkeypatch.setattr(HermesPodTrialOperator, "client", None)
    monkeypatch.setattr(HermesPodTrialOperator, "_get_ti_pod_labels", lambda *_a, **_k: {})
    operator = HermesPodTrialOperator(task_id="trial", number=4, pool="gpus", in_cluster=False)
    own: Any = operator.segment(segment_run(), SWEEP, {"ti": SimpleNamespace(try_number=1)})
    words = own.request.spec.containers[0].args
    assert own.limits.grace_s > float(words[words.index("--grace") + 1])
    assert own.limits.grace_s == own.request.spec.termination_grace_period_seconds


def test_the_pods_user_can_write_in_the_trials_folder(tmp_path: Path) -> None:
    folder = tmp_path / "trials" / "0"
    prepare(folder, os.getuid() or 1000)
    prepare(folder, 54_321)
    facts = folder.stat()
    assert facts.st_uid == 54_321 or facts.st_mode & 0o777 == 0o777


@pytest.mark.parametrize(
    ("number", "failures"), [(errno.ENOSPC, 0), (errno.ESTALE, 0), (errno.EACCES, 1)]
)
def test_a_volume_that_is_full_or_away_before_the_pod_is_made_is_no_failure_of_the_trial(
    home: Path, monkeypatch: pytest.MonkeyPatch, number: int, failures: int
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    (home / "pod.yaml").write_text("image: a\nclaim: trials\nnamespace: trials\n")
    monkeypatch.setattr(HermesPodTrialOperator, "hook", HOOK)
    monkeypatch.setattr("hermes_ops.airflow.trial.trial_task.sweep_of", lambda *_: SWEEP)
    monkeypatch.setattr(Path, "chmod", fail)
    monkeypatch.setattr(os, "chown", fail)
    store = DictStore({LEASE_KEY: encode(lease(1, pod={"user": 54_321}, max_failures=2))})
    operator = HermesPodTrialOperator(task_id="trial", number=4, pool="gpus", in_cluster=False)
    with pytest.raises(AirflowRescheduleException):
        operator.execute({"task_state_store": store, "ti": SimpleNamespace(try_number=1)})
    record = decode(SegmentRecord, store[SEGMENT_KEY])
    assert record is not None
    assert record.failures == failures


@pytest.mark.parametrize(
    "text",
    [None, "[", "kind: Pod", "- a", "spec: {containers: {name: x}}", "spec: {containers: [x]}",
     "spec: ä"],
)  # fmt: skip
def test_a_template_that_is_none_names_the_setting(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "pod.yaml"
    if text is not None:
        file.write_bytes(text.encode("latin-1"))
    with pytest.raises(HermesError, match=r"trial\.pod\.template_file"):
        template(str(file))


def test_a_template_is_read() -> None:
    assert template(None) is None


def test_a_segment_run_that_goes_on_with_a_pod_keeps_the_segments_start() -> None:
    last = segment(3, running=True, started_s=55.0)
    folder = TrialFolder.from_sweep(SWEEP, 4)
    for pod, goes_on in (({}, True), (None, False)):
        found = SegmentRun.from_lease(DictStore(), lease(3, pod=pod), folder, last).record.started_s
        assert (found == 55.0) is goes_on


def test_the_one_operator_of_a_sweep_makes_a_pod_where_the_lease_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, int]] = []
    pod: Any = object()

    def make(self: HermesPodTrialOperator, own: SegmentRun, sweep: str, _: Any) -> Any:
        asked.append((sweep, self.number))
        return pod

    monkeypatch.setattr(HermesPodTrialOperator, "segment", make)
    operator = HermesTrialOperator(task_id="trial", number=4, pool="gpus")
    assert operator.segment(segment_run(), SWEEP, {}) is pod
    local = SegmentRun.from_lease(DictStore(), lease(), TrialFolder.from_sweep(SWEEP, 4), None)
    assert type(operator.segment(local, SWEEP, {})).__name__ == "LocalSegment"
    assert asked == [(SWEEP, 4)]


def test_the_pods_operator_keeps_the_pod_when_airflow_kills_its_task() -> None:
    operator = HermesPodTrialOperator(task_id="trial", number=4, pool="gpus")
    assert operator.on_kill_action.value == "keep_pod"
    assert (operator.deferrable, operator.random_name_suffix) == (False, False)


@pytest.mark.parametrize("config", [None, "[", "a: b", ""])
def test_a_worker_that_knows_no_cluster_says_what_to_set(
    home: Path, monkeypatch: pytest.MonkeyPatch, config: str | None
) -> None:
    (home / "pod.yaml").write_text("image: a\nclaim: trials\nnamespace: trials\n")
    if config is not None:
        (home / "config").write_text(config)
    monkeypatch.setattr(HermesPodTrialOperator, "_get_ti_pod_labels", lambda *_a, **_k: {})
    operator = HermesPodTrialOperator(
        task_id="trial", number=4, pool="gpus", in_cluster=False, kubernetes_conn_id=None,
        config_file=str(home / "config"),
    )  # fmt: skip
    with pytest.raises(HermesError, match=r"no Kubernetes cluster is known.*KUBECONFIG"):
        operator.segment(segment_run(), SWEEP, {"ti": SimpleNamespace(try_number=1)})
    monkeypatch.setenv("KUBECONFIG", str(home / "config"))
    with pytest.raises(HermesError, match=r"no Kubernetes cluster is known.*KUBECONFIG"):
        connect()


def test_a_connection_to_the_cluster_that_is_not_there_is_named() -> None:
    hook = KubernetesHook(conn_id="nowhere")
    with pytest.raises(HermesError, match=r"nowhere.*kubernetes_conn_id"):
        spec_of(lease(pod={"image": "a", "claim": "b"}), hook)


def test_a_pod_that_changes_while_its_sweep_ends_is_deleted_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Changing(FakePods):
        """Its pods change once before they can be deleted."""

        def delete(self, pod: PodView, grace_s: int) -> bool:
            if pod.version == "1":
                self.change(pod.name, version="2")
                return False
            self.change(pod.name, deletion_grace_s=30.0)
            return super().delete(pod, grace_s)

    going = replace(POD, name="p-3", uid="u-3", deletion_grace_s=30.0)
    pods = Changing({"p-1": POD, "p-2": replace(POD, name="p-2", uid="u-2"), "p-3": going})
    monkeypatch.setattr(pods_module, "cluster_pods", lambda own: (own, pods))
    assert end_pods(SWEEP, None) == 2
    assert pods.deleted == [("p-1", 45), ("p-2", 45)]


def test_a_sweeps_end_leaves_the_pods_of_another_installations_sweep_of_the_same_name(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = mark_home().home_id
    made = facts_of(segment_run(), SPEC, SWEEP, 4, 2)
    assert made.labels["hermes-ops/installation"] == ours
    theirs = replace(POD, name="p-2", uid="u-2", installation="theirs")
    pods = FakePods({"p-1": replace(POD, installation=ours), "p-2": theirs})
    monkeypatch.setattr(pods_module, "cluster_pods", lambda own: (own, pods))
    end_pods(SWEEP, None)
    assert {name for name, _ in pods.deleted} == {"p-1"}


# -- what the installation forbids ---------------------------------------------------------------

DEFAULTS = "image: a\nclaim: trials\nnamespace: trials\nservice_account: trials\n"


@pytest.fixture
def rules(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation whose sweeps may name nothing beyond its defaults."""
    (home / "pod.yaml").write_text(DEFAULTS)
    (home / "rules.yaml").write_text("secrets: [wandb]\n")
    monkeypatch.setenv("HERMES_POD_RULES", str(home / "rules.yaml"))


def test_a_lease_whose_pod_names_a_forbidden_secret_makes_no_pod(rules: None) -> None:
    with pytest.raises(NotAllowed, match=r"trial\.pod\.secrets: found db"):
        spec_of(lease(pod={"secrets": ["db"]}), HOOK)
    assert spec_of(lease(pod={"secrets": ["wandb"]}), HOOK).secrets == ("wandb",)
    with pytest.raises(NotAllowed, match=r"trial\.pod\.namespace"):
        end_pods(SWEEP, PodSpec(namespace="kube-system"))


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"namespace": "kube-system"}, "kube-system"),
        ({"service_account_name": "airflow"}, "airflow"),
        ({"image_pull_secrets": "db"}, "db"),
        ({"automount_service_account_token": True}, "token"),
        ({"secrets": [Secret("env", None, "db")]}, "db"),
        ({"secrets": [Secret("volume", "/s", "db")]}, "db"),
        ({"hostnetwork": True}, "hostNetwork"),
        ({"volumes": [V1Volume(name="h", host_path=V1HostPathVolumeSource(path="/"))]}, "hostPath"),
    ],
)  # fmt: skip
def test_an_operator_of_ones_own_dag_makes_no_pod_that_the_rules_forbid(
    rules: None, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], found: str
) -> None:
    monkeypatch.setattr(HermesPodTrialOperator, "hook", HOOK)
    monkeypatch.setattr(HermesPodTrialOperator, "_get_ti_pod_labels", lambda *_a, **_k: {})
    context = {"ti": SimpleNamespace(try_number=1)}
    operator = HermesPodTrialOperator(
        task_id="trial", number=4, pool="gpus", in_cluster=False, **arguments
    )
    with pytest.raises(NotAllowed, match=found):
        operator.segment(segment_run(), SWEEP, context)


def test_a_trial_that_is_not_allowed_ends_at_once_and_says_why(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERMES_RUN_IN", "pod")
    monkeypatch.setattr(LocalSegment, "_launch", lambda _: pytest.fail("a process was started"))
    operator = HermesTrialOperator(task_id="trial", number=4, pool="gpus")
    store = DictStore({LEASE_KEY: encode(lease(1, max_failures=2))})
    about = {"dag_id": MAIN_DAG, "run_id": SWEEP, "task_id": "trial", "map_index": 4}
    write_lease(TrialFolder.from_sweep(SWEEP, 4), lease(1))
    local.start_process(about)
    monkeypatch.setattr("hermes_ops.airflow.trial.trial_task.sweep_of", lambda *_: SWEEP)
    with pytest.raises(AirflowFailException, match=r"trial\.run_in: found process") as caught:
        operator.execute({"task_state_store": store, "ti": None})
    assert "HERMES_RUN_IN" in str(caught.value)
    record = decode(SegmentRecord, store[SEGMENT_KEY])
    assert record is not None
    assert (record.final, record.failures) == ("failed", 1)
