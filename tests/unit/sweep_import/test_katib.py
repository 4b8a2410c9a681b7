"""Katib experiments as sweep files."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from hermes_ops.config import parse
from hermes_ops.errors import ConfigError
from hermes_ops.sweep_import.draft import Draft, DraftOptions
from hermes_ops.sweep_import.katib import convert

NOTHING = DraftOptions()
OBJECTIVE = {"type": "minimize", "objectiveMetricName": "loss"}
EXPERIMENT: dict[str, Any] = {
    "apiVersion": "kubeflow.org/v1beta1",
    "kind": "Experiment",
    "metadata": {"name": "mnist", "namespace": "kubeflow"},
    "spec": {
        "objective": {
            "type": "minimize",
            "goal": 0.01,
            "objectiveMetricName": "loss",
            "additionalMetricNames": ["accuracy"],
        },
        "algorithm": {"algorithmName": "tpe"},
        "parallelTrialCount": 3,
        "maxTrialCount": 12,
        "maxFailedTrialCount": 4,
        "parameters": [
            {
                "name": "lr",
                "parameterType": "double",
                "feasibleSpace": {"min": "0.001", "max": "0.1", "distribution": "logUniform"},
            },
            {
                "name": "layers",
                "parameterType": "int",
                "feasibleSpace": {"min": "1", "max": "4"},
            },
            {
                "name": "optimizer",
                "parameterType": "categorical",
                "feasibleSpace": {"list": ["sgd", "adam"]},
            },
        ],
        "trialTemplate": {
            "primaryContainerName": "training",
            "trialParameters": [
                {"name": "learningRate", "reference": "lr"},
                {"name": "numberLayers", "reference": "layers"},
                {"name": "how", "reference": "optimizer"},
            ],
            "trialSpec": {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "spec": {
                    "template": {
                        "spec": {
                            "containers": [
                                {"name": "sidecar", "image": "proxy:1"},
                                {
                                    "name": "training",
                                    "image": "registry/mnist:1",
                                    "command": [
                                        "python3",
                                        "/opt/mnist.py",
                                        "--lr=${trialParameters.learningRate}",
                                        "--layers=${trialParameters.numberLayers}",
                                        "--{x}=${trialParameters.how}",
                                    ],
                                    "env": [{"name": "DATA", "value": "/data"}],
                                    "resources": {
                                        "limits": {"nvidia.com/gpu": 2, "memory": "8Gi"},
                                        "requests": {"cpu": 2},
                                    },
                                },
                            ]
                        }
                    }
                },
            },
        },
    },
}


def converted(options: DraftOptions = NOTHING, **spec: Any) -> Draft:
    experiment = deepcopy(EXPERIMENT)
    experiment["spec"].update(spec)
    draft = convert(experiment, "experiment.yaml", options)
    draft.check()
    return draft


def container(**changes: Any) -> dict[str, Any]:
    template: dict[str, Any] = deepcopy(EXPERIMENT["spec"]["trialTemplate"])
    template["trialSpec"]["spec"]["template"]["spec"]["containers"][1].update(changes)
    return template


def training_job(replicas: object) -> dict[str, Any]:
    template: dict[str, Any] = deepcopy(EXPERIMENT["spec"]["trialTemplate"])
    pod = template["trialSpec"]["spec"]["template"]
    template["trialSpec"] = {
        "kind": "PyTorchJob",
        "spec": {
            "pytorchReplicaSpecs": {
                "Master": {"replicas": 1, "template": pod},
                "Worker": {"replicas": replicas, "template": pod},
            }
        },
    }
    return template


def categorical(listed: object) -> dict[str, Any]:
    return {"name": "p", "parameterType": "categorical", "feasibleSpace": {"list": listed}}


def double(name: str, low: str, high: str, distribution: str = "uniform") -> dict[str, Any]:
    feasible = {"min": low, "max": high, "distribution": distribution}
    return {"name": name, "parameterType": "double", "feasibleSpace": feasible}


def gpus(number: object) -> dict[str, Any]:
    return {"limits": {"nvidia.com/gpu": number}}


def told(draft: Draft) -> str:
    return "\n".join(map(str, draft.notes))


def test_what_an_experiment_says_is_what_the_sweep_file_says() -> None:
    config = parse(converted().sweep, "x", None)
    assert (config.name, config.objective.metric, config.objective.target) == (
        "mnist",
        "loss",
        0.01,
    )
    assert [metric.name for metric in config.metrics] == ["accuracy"]
    assert (config.search.algorithm.value, config.search.max_trials) == ("tpe", 12)
    assert (config.budget.max_parallel, config.budget.failed_trials) == (3, 4)
    trial = config.trial
    assert trial.command == (
        "python3",
        "/opt/mnist.py",
        "--lr={lr}",
        "--layers={layers}",
        "--{{x}}={optimizer}",
    )
    assert (trial.run_in.value, trial.gpus) == ("pod", 2)
    assert trial.pod is not None
    assert trial.pod.image == "registry/mnist:1"
    assert (trial.pod.limits, trial.pod.requests) == ({"memory": "8Gi"}, {"cpu": "2"})
    assert trial.pod.environment == {"DATA": "/data"}


def test_a_logarithmic_range_of_whole_numbers_with_a_step_has_whole_numbers() -> None:
    feasible = {"min": "16", "max": "256", "step": "16", "distribution": "logUniform"}
    batch_size = {"name": "lr", "parameterType": "int", "feasibleSpace": feasible}
    draft = converted(parameters=[batch_size])
    quantised = {"type": "quantised", "low": 16, "high": 256, "step": 16}
    assert draft.sweep["search"]["space"] == {"lr": quantised}
    assert "was logarithmic with a step of 16; all steps are equally likely" in told(draft)


def test_a_grid_of_more_combinations_than_trials_becomes_a_random_choice_of_them() -> None:
    layers = {"name": "lr", "parameterType": "int", "feasibleSpace": {"min": "1", "max": "25"}}
    draft = converted(algorithm={"algorithmName": "grid"}, parameters=[layers])
    assert draft.sweep["search"]["algorithm"] == "random"
    assert "`random` tries 12 of them, each once. For all: `grid`, `max_trials: 25`" in told(draft)


@pytest.mark.parametrize("high", ["1" + "0" * 400, "inf", "nan"])
@pytest.mark.parametrize("step", ["0", "-1", "1", "2", "nan"])
@pytest.mark.parametrize("kind", ["int", "double"])
def test_a_grid_whose_values_cannot_be_counted_is_refused_by_its_place(
    kind: str, high: str, step: str
) -> None:
    feasible = {"min": "1", "max": high, "step": step}
    parameter = {"name": "lr", "parameterType": kind, "feasibleSpace": feasible}
    with pytest.raises(ConfigError, match=r"lr|feasibleSpace"):
        converted(algorithm={"algorithmName": "grid"}, parameters=[parameter])


def test_an_additional_metric_can_become_the_objective_which_is_then_an_additional_metric() -> None:
    draft = converted(DraftOptions(metric="accuracy"))
    assert draft.sweep["metrics"] == [{"name": "loss"}]
    assert draft.sweep["objective"] == {"metric": "accuracy", "direction": "minimize"}
    assert "objective.direction: is that of 'loss': check it" in told(draft)
    assert "objective.target" not in told(draft)


def test_another_name_for_the_objective_keeps_its_goal_and_the_additional_metrics() -> None:
    sweep = converted(DraftOptions(metric="val_loss")).sweep
    assert sweep["objective"] == {"metric": "val_loss", "direction": "minimize", "target": 0.01}
    assert sweep["metrics"] == [{"name": "accuracy"}]


def test_an_experiment_that_tolerates_no_failed_trial_becomes_a_sweep_that_the_first_one_ends() -> (
    None
):
    assert converted(maxFailedTrialCount=0).sweep["budget"]["failed_trials"] == 1
    assert "failed_trials" not in converted(maxFailedTrialCount=None).sweep["budget"]


@pytest.mark.parametrize(
    ("kind", "feasible", "expected"),
    [
        ("double", {"min": "0", "max": "1"}, {"type": "uniform", "low": 0.0, "high": 1.0}),
        (
            "double",
            {"min": "0", "max": "1", "step": "0.25"},
            {"type": "quantised", "low": 0.0, "high": 1.0, "step": 0.25},
        ),
        (
            "int",
            {"min": "16", "max": "64", "step": "16"},
            {"type": "quantised", "low": 16, "high": 64, "step": 16},
        ),
        (
            "int",
            {"min": "1", "max": "64", "distribution": "logUniform"},
            {"type": "log_integer", "low": 1, "high": 64},
        ),
        ("discrete", {"list": ["32", "64", "0.5"]}, {"type": "choice", "values": [32, 64, 0.5]}),
        ("categorical", {"list": ["1", "a"]}, {"type": "choice", "values": ["1", "a"]}),
    ],
)
def test_each_feasible_space_becomes_the_parameter_that_draws_the_same_values(
    kind: str, feasible: dict[str, Any], expected: dict[str, Any]
) -> None:
    given = [{"name": "p", "parameterType": kind, "feasibleSpace": feasible}]
    template = container(command=["python", "x.py"])
    draft = converted(parameters=given, trialTemplate=template)
    assert draft.sweep["search"]["space"]["p"] == expected
    assert draft.sweep["trial"]["command"] == ["python", "x.py", "--p={p}"]


@pytest.mark.parametrize(
    ("algorithm", "expected", "stop"),
    [
        ("random", "random", None),
        ("bayesianoptimization", "tpe", None),
        ("cmaes", "tpe", None),
        ("hyperband", "tpe", "asha"),
    ],
)
def test_an_algorithm_without_a_counterpart_becomes_the_nearest_and_is_noted(
    algorithm: str, expected: str, stop: str | None
) -> None:
    draft = converted(algorithm={"algorithmName": algorithm})
    assert draft.sweep["search"]["algorithm"] == expected
    assert draft.sweep.get("early_stop") == stop
    assert ("search.algorithm" in told(draft)) == (algorithm != expected)


def test_median_stopping_is_median_stopping() -> None:
    draft = converted(earlyStopping={"algorithmName": "medianstop"})
    assert draft.sweep["early_stop"] == "median"


def test_the_best_trial_so_far_is_the_first_point() -> None:
    experiment = deepcopy(EXPERIMENT)
    experiment["status"] = {
        "currentOptimalTrial": {
            "parameterAssignments": [
                {"name": "lr", "value": "0.02"},
                {"name": "layers", "value": "3"},
                {"name": "optimizer", "value": "adam"},
            ]
        }
    }
    draft = convert(experiment, "x", NOTHING)
    draft.check()
    point = {"lr": 0.02, "layers": 3, "optimizer": "adam"}
    assert draft.sweep["search"]["points_to_evaluate"] == [point]
    none = convert(experiment, "x", DraftOptions(points=0))
    assert "points_to_evaluate" not in none.sweep["search"]


def test_a_secret_in_the_environment_is_left_out_and_its_value_is_nowhere() -> None:
    env = [
        {"name": "API_TOKEN", "value": "sw0rdfish-9f2c-77aa"},
        {"name": "FROM", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        {"name": "DATA", "value": "/data"},
    ]
    draft = converted(trialTemplate=container(env=env))
    assert draft.sweep["trial"]["pod"]["environment"] == {"DATA": "/data"}
    assert "API_TOKEN is left out" in told(draft)
    assert "FROM is left out" in told(draft)
    assert "sw0rdfish" not in draft.to_yaml()


@pytest.mark.parametrize(
    "env",
    [
        {"API_TOKEN": "sw0rdfish-9f2c"},
        ["API_TOKEN=sw0rdfish-9f2c"],
        [{"name": "API_TOKEN", "value": {"is": "sw0rdfish-9f2c"}}],
    ],
)
def test_an_environment_of_a_wrong_kind_is_refused_without_its_values(env: object) -> None:
    with pytest.raises(ConfigError, match="env") as raised:
        converted(trialTemplate=container(env=env))
    assert "sw0rdfish" not in str(raised.value)


def test_a_placeholder_of_something_else_stays_text_and_is_noted() -> None:
    command = ["python", "x.py", "${trialParameters.learningRate}", "${trialSpec.Name}"]
    draft = converted(trialTemplate=container(command=command))
    assert draft.sweep["trial"]["command"][2:] == ["{lr}", "${{trialSpec.Name}}"]
    assert "'${trialSpec.Name}' is no parameter" in told(draft)


def test_the_first_replica_of_a_training_job_is_converted_and_the_others_are_noted() -> None:
    draft = converted(trialTemplate=training_job(replicas=2))
    assert draft.sweep["trial"]["pod"]["image"] == "registry/mnist:1"
    assert "was 3 replicas; one process is run, as Master was" in told(draft)


def test_event_files_are_read_as_event_files() -> None:
    collector = {
        "collector": {"kind": "TensorFlowEvent"},
        "source": {"fileSystemPath": {"path": "runs", "kind": "Directory"}},
    }
    assert converted(metricsCollectorSpec=collector).sweep["trial"]["tensorboard"] == "runs"


def test_a_pattern_of_its_own_is_noted_with_what_it_needs() -> None:
    collector = {"source": {"filter": {"metricsFormat": ["{metric: ([a-z]+), value: (.*)}"]}}}
    assert "name its groups `name` and `value`" in told(converted(metricsCollectorSpec=collector))


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        ({"nasConfig": {}}, "spec.nasConfig"),
        ({"parameters": []}, "spec.parameters"),
        ({"objective": {"type": "minimize"}}, "objectiveMetricName"),
        ({"objective": {"objectiveMetricName": "x", "type": "up"}}, "spec.objective.type"),
        ({"objective": OBJECTIVE | {"objectiveMetricName": ["loss"]}}, "objective.metric"),
        ({"algorithm": {"algorithmName": "enas"}}, "algorithmName"),
        ({"parameters": [{"name": "p", "parameterType": "double"}]}, "[0].feasibleSpace"),
        ({"parameters": [{"name": "p", "parameterType": "tree"}]}, "[0].parameterType"),
        ({"trialTemplate": {}}, "trialSpec"),
        ({"trialTemplate": {"trialSpec": {"kind": "Pipeline", "spec": {}}}}, "trialSpec"),
        ({"parameters": "lr"}, "spec.parameters"),
        ({"parameters": ["lr"]}, "spec.parameters[0]"),
        ({"parameters": [{"parameterType": "double"}]}, "spec.parameters[0].name"),
        ({"parameters": [double("p", "1", "2", "logunifrom")]}, "feasibleSpace.distribution"),
        ({"parameters": [categorical("sgd")]}, "[0].feasibleSpace.list"),
        ({"parameters": [categorical(["sgd", None])]}, "[0].feasibleSpace.list[1]"),
        ({"objective": OBJECTIVE | {"additionalMetricNames": "loss"}}, "additionalMetricNames"),
        ({"trialTemplate": container(command="python train.py")}, "containers[1].command"),
        ({"trialTemplate": container(args="--lr=1")}, "containers[1].args"),
        ({"trialTemplate": container(env={"A": "b"})}, "containers[1].env"),
        ({"trialTemplate": container(env=[{"value": "x"}])}, "containers[1].env[0].name"),
        ({"trialTemplate": container(env=[{"name": "A", "value": {}}])}, "env[0].value"),
        ({"trialTemplate": container(resources=gpus("all"))}, "nvidia.com/gpu"),
        ({"trialTemplate": container() | {"trialParameters": ["lr"]}}, "trialParameters[0]"),
        ({"trialTemplate": training_job(replicas="two")}, "Worker.replicas"),
        ({"objective": "loss"}, "spec.objective"),
        ({"algorithm": "tpe"}, "spec.algorithm"),
        ({"earlyStopping": "medianstop"}, "spec.earlyStopping"),
        ({"metricsCollectorSpec": "StdOut"}, "spec.metricsCollectorSpec"),
        ({"metricsCollectorSpec": {"source": ["x"]}}, "spec.metricsCollectorSpec.source"),
        ({"parameters": [{"name": "p", "feasibleSpace": [1, 2]}]}, "[0].feasibleSpace"),
        ({"trialTemplate": "job"}, "spec.trialTemplate"),
        ({"trialTemplate": {"trialSpec": {"spec": "x"}}}, "trialSpec.spec"),
        ({"trialTemplate": {"trialSpec": {"spec": {"template": "x"}}}}, "trialSpec.spec.template"),
        ({"trialTemplate": container(resources=5)}, "containers[1].resources"),
        ({"trialTemplate": container(resources={"limits": "8Gi"})}, "resources.limits"),
    ],
)
def test_what_cannot_be_converted_is_one_error_that_names_its_place(
    spec: dict[str, Any], place: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        converted(**spec)
    assert raised.value.problems[0].where.endswith(place)
    assert raised.value.problems[0].fix not in ("", "none")


def test_reversed_bounds_are_refused_and_become_no_constant() -> None:
    with pytest.raises(ConfigError, match=r"search\.space\.lr.*low below high.*swap them"):
        converted(parameters=[double("lr", "0.05", "0.01")])


@pytest.mark.parametrize(("one", "other"), [("lr", "lr"), ("l r", "l_r"), ("学習率", "層")])
def test_two_parameters_whose_names_become_the_same_are_refused_by_both_names(
    one: str, other: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        converted(parameters=[double(one, "0", "1"), double(other, "0", "2")])
    problem = raised.value.problems[0]
    assert problem.where == "spec.parameters[1]"
    assert f"'{other}'" in problem.found
    assert f"'{one}' (spec.parameters[0])" in problem.found
    assert "rename one of them" in problem.fix


@pytest.mark.parametrize(("name", "value"), [("lr", "0.5"), ("layers", "2.5"), ("optimizer", "x")])
def test_a_best_trial_outside_the_space_is_left_out_with_a_note(name: str, value: str) -> None:
    best = {"lr": "0.01", "layers": "2", "optimizer": "adam"} | {name: value}
    experiment = deepcopy(EXPERIMENT)
    assignments = [{"name": key, "value": text} for key, text in best.items()]
    experiment["status"] = {"currentOptimalTrial": {"parameterAssignments": assignments}}
    draft = convert(experiment, "x", NOTHING)
    draft.check()
    assert "points_to_evaluate" not in draft.sweep["search"]
    assert f"the best trial does not fit the space as it is ({name}: " in told(draft)


def test_assignments_that_are_no_mappings_are_refused_by_their_place() -> None:
    experiment = deepcopy(EXPERIMENT)
    experiment["status"] = {"currentOptimalTrial": {"parameterAssignments": ["lr"]}}
    with pytest.raises(ConfigError, match=r"parameterAssignments\[0\]"):
        convert(experiment, "x", NOTHING)


def test_a_resource_without_a_pod_is_to_be_converted_by_hand() -> None:
    template = {"trialSpec": {"kind": "Pipeline", "spec": {}}}
    with pytest.raises(ConfigError, match="Fix: convert its container by hand"):
        converted(trialTemplate=template)
