"""Trials as pods in a sweep file, and an installation's defaults for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hermes_ops.config import (
    PodSpec,
    RunIn,
    SweepConfig,
    load_file,
    parse,
    pod_defaults,
    pod_spec,
    render_command,
    require_image_and_claim,
)
from hermes_ops.errors import ConfigError, Problem
from tests.unit.config.pod_sweeps import data


def sweep(**trial: Any) -> SweepConfig:
    return parse(data(**trial), "test", Path("/sweeps"))


def problems(**trial: Any) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        sweep(**trial)
    return {problem.where: problem for problem in caught.value.problems}


def test_trials_are_processes_unless_the_file_says_pod() -> None:
    assert sweep().trial.run_in is RunIn.PROCESS
    assert sweep(run_in="pod").trial.run_in is RunIn.POD


def test_a_pod_for_processes_is_refused_with_the_one_line_that_is_missing() -> None:
    found = problems(pod={"image": "trial:1"})
    assert found["trial.pod"].fix == "write trial.run_in: pod, or remove trial.pod"


def test_a_pod_may_have_devices_that_are_no_gpus() -> None:
    amounts = {"memory": "8Gi", "nvidia.com/hostdev": "1", "rdma/hca": "1"}
    spec = sweep(run_in="pod", pod={"limits": amounts, "requests": amounts}).trial.pod
    assert spec is not None
    assert (spec.limits, spec.requests) == (amounts, amounts)


def test_the_command_and_folder_of_a_pod_are_those_of_its_image() -> None:
    config = sweep(run_in="pod", python="bin/python", directory="code")
    assert (config.trial.python, config.trial.directory) == ("bin/python", "code")
    assert render_command(sweep(run_in="pod"), {"rate": 0.5})[0] == "python"
    assert sweep(directory="code").trial.directory == "/sweeps/code"


@pytest.mark.parametrize(
    ("pod", "where"),
    [
        ({"imge": "a"}, "trial.pod.imge"),
        ({"claim": "Trials"}, "trial.pod.claim"),
        ({"limits": {"memory": "4 GB"}}, "trial.pod.limits.memory"),
        ({"limits": {"nvidia.com/gpu": "8"}}, "trial.pod.limits"),
        ({"limits": {"nvidia.com/gpu.shared": "1"}}, "trial.pod.limits"),
        ({"requests": {"nvidia.com/mig-1g.5gb": "1"}}, "trial.pod.requests"),
        ({"limits": {"gpu.intel.com/i915": "1"}}, "trial.pod.limits"),
        ({"limits": {"aws.amazon.com/neuroncore": "2"}}, "trial.pod.limits"),
        ({"limits": {"huawei.com/Ascend910": "1"}}, "trial.pod.limits"),
        ({"limits": {"volcano.sh/vgpu-number": "1"}}, "trial.pod.limits"),
        ({"user": 0}, "trial.pod.user"),
        ({"node_selector": {"gpu": "a 100"}}, "trial.pod.node_selector.gpu"),
        ({"gang_service": "a.b"}, "trial.pod.gang_service"),
        ({"gang_service": "a" * 64}, "trial.pod.gang_service"),
        ({"pull_policy": "Sometimes"}, "trial.pod.pull_policy"),
        ({"tolerations": [{"value": "x"}]}, "trial.pod.tolerations[0].key"),
        ({"tolerations": [{"key": "gpu", "efect": "x"}]}, "trial.pod.tolerations[0].efect"),
        ({"volumes": [{"mount": "data", "claim": "data"}]}, "trial.pod.volumes[0].mount"),
        ({"volumes": [{"mount": "/data"}]}, "trial.pod.volumes[0]"),
        ({"volumes": [{"mount": "/d", "claim": "a", "secret": "b"}]}, "trial.pod.volumes[0]"),
        ({"volumes": [{"mount": "/hermes/trial/", "claim": "a"}]}, "trial.pod.volumes[0].mount"),
        ({"volumes": [{"mount": "/hermes", "claim": "a"}]}, "trial.pod.volumes[0].mount"),
        ({"volumes": [{"mount": "/", "claim": "a"}]}, "trial.pod.volumes[0].mount"),
        (
            {"volumes": [{"mount": "/hermes/trial/checkpoints", "claim": "a"}]},
            "trial.pod.volumes[0]",
        ),
        (
            {"volumes": [{"mount": "/d", "claim": "a"}, {"mount": "/d/", "claim": "b"}]},
            "trial.pod.volumes",
        ),
        ({"environment": {"HERMES_HOME": "/"}}, "trial.pod.environment.HERMES_HOME"),
    ],
)
def test_mistakes_in_a_pod_are_told_with_their_place(pod: dict[str, Any], where: str) -> None:
    found = problems(run_in="pod", pod=pod)
    assert set(found) == {where}
    assert found[where].found
    assert found[where].allowed
    assert found[where].fix


def test_volumes_may_be_mounted_anywhere_else() -> None:
    paths = ["/d", "/d/e", "/hermes/data", "/hermes/trials", "/tmp", "/dev/shm"]
    volumes = [{"mount": path, "claim": "a"} for path in paths]
    found = sweep(run_in="pod", pod={"volumes": volumes}).trial.pod
    assert found is not None
    assert [volume.mount for volume in found.volumes or ()] == paths


def test_checkpoints_may_be_in_memory_where_a_bucket_has_them_too() -> None:
    volumes = [{"mount": "/hermes/trial/checkpoints", "memory": "16Mi"}]
    found = sweep(run_in="pod", pod={"volumes": volumes}).trial.pod
    assert found is not None
    assert [volume.memory for volume in found.volumes or ()] == ["16Mi"]


def test_a_key_with_a_slip_is_recognised_and_a_secret_value_is_not_shown() -> None:
    assert problems(run_in="pod", pod={"imge": "a"})["trial.pod.imge"].fix == (
        "did you mean image?"
    )
    shown = problems(run_in="pod", pod={"environment": {"TOKEN": 12345}})
    assert "12345" not in str(shown["trial.pod.environment.TOKEN"])


def test_what_the_sweep_leaves_open_comes_from_the_installation(tmp_path: Path) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text("image: base:1\nclaim: trials\nlimits: {memory: 1Gi}\n")
    own = pod_spec({"image": "mine:2", "limits": {"cpu": "2"}}, "sweep")
    assert own.with_defaults(pod_defaults(file)) == PodSpec(
        image="mine:2", claim="trials", limits={"cpu": "2"}
    )
    assert pod_defaults(tmp_path / "absent.yaml") == PodSpec()


def test_mistakes_in_the_installations_defaults_name_its_file(tmp_path: Path) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text("imge: base:1\n")
    with pytest.raises(ConfigError, match=r"pod\.yaml") as caught:
        pod_defaults(file)
    assert [p.where for p in caught.value.problems] == ["trial.pod.imge"]


def test_without_image_or_claim_no_pod_can_be_made() -> None:
    with pytest.raises(ConfigError) as caught:
        require_image_and_claim(PodSpec(image="a"), "sweep")
    assert [p.where for p in caught.value.problems] == ["trial.pod.claim"]
    whole = PodSpec(image="a", claim="b")
    assert require_image_and_claim(whole, "sweep") is whole


def test_a_sweep_with_pods_survives_its_own_file(tmp_path: Path) -> None:
    pod = {
        "image": "trial:1",
        "tolerations": [{"key": "gpu", "effect": "NoSchedule"}],
        "volumes": [{"mount": "/data", "claim": "data"}, {"mount": "/dev/shm", "memory": "1Gi"}],
        "secrets": ["licence"],
    }
    config = sweep(run_in="pod", pod=pod)
    path = tmp_path / "again.yaml"
    path.write_text(config.to_yaml())
    assert load_file(path) == config
