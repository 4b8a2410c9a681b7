"""Katib experiments: the custom resource `Experiment` of `kubeflow.org/v1beta1`.

Source: Katib's API types, `pkg/apis/controller/experiments/v1beta1` and `common/v1beta1`. The
container of a `batch/v1` Job, or of the first replica of a Kubeflow training job, is converted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hermes_ops.config import parse
from hermes_ops.errors import ConfigError
from hermes_ops.sweep_import.draft import (
    DEFAULT_MAX_EPOCHS,
    DEFAULT_MAX_TRIALS,
    Conversion,
    Draft,
    DraftOptions,
    choice_parameter,
    literal,
    option_arguments,
    quoted,
    range_parameter,
    valid_name,
    valid_parameter,
)
from hermes_ops.trial.redaction import open_secrets

_ALGORITHMS = {
    "random": "random",
    "sobol": "random",
    "grid": "grid",
    "tpe": "tpe",
    "multivariate-tpe": "tpe",
    "bayesianoptimization": "tpe",
    "cmaes": "tpe",
    "hyperband": "tpe",
}
_SAME = frozenset({"random", "grid", "tpe", "multivariate-tpe"})
_DISTRIBUTIONS = {name.lower(): name for name in ("uniform", "logUniform", "normal", "logNormal")}
_LOG = frozenset({"loguniform", "lognormal"})


def convert(data: Mapping[str, Any], source: str, options: DraftOptions) -> Draft:
    """Convert a Katib experiment; its best trial so far becomes a point to evaluate."""
    return _KatibConversion(source, options, data).draft()


@dataclass(slots=True)
class _KatibConversion(Conversion):
    """One experiment on its way; `notes` grows as keys are converted."""

    data: Mapping[str, Any]

    @property
    def spec(self) -> Mapping[str, Any]:
        return self.inside(self.data, "", "spec")

    def of_spec(self, *keys: str) -> Mapping[str, Any]:
        return self.inside(self.spec, "spec", *keys)

    def draft(self) -> Draft:
        if "nasConfig" in self.spec:
            fix = "run it in Katib, or write the choices of the architecture as parameters"
            raise self.refused("spec.nasConfig", "an architecture search", "parameters", fix)
        space = dict(self._space())
        if not space:
            raise self.refused("spec.parameters", "none", "at least one", "add them")
        template = self.of_spec("trialTemplate")
        conversion = _Trial(self.source, self.options, template, list(space))
        trial = conversion.section()
        metadata = self.inside(self.data, "", "metadata")
        name = self.options.name or metadata.get("name") or metadata.get("generateName") or ""
        sweep: dict[str, Any] = {
            "name": valid_name(str(name), "katib"),
            "objective": self._objective(),
            **self._metrics(),
            "search": {**self._search(space), "space": space},
            "trial": trial | self._pattern(),
            "budget": self._budget(),
            **self._early_stop(),
        }
        self.notes += conversion.notes
        self._add_known_point(sweep)
        return Draft(self.source, "a Katib experiment", sweep, tuple(self.notes))

    def _objective(self) -> dict[str, Any]:
        given = self.of_spec("objective")
        metric = self.options.metric or given.get("objectiveMetricName")
        where = "spec.objective"
        if not metric:
            allowed = "the metric's name"
            raise self.refused(f"{where}.objectiveMetricName", "none", allowed, "use --metric")
        if given.get("type") not in ("minimize", "maximize"):
            found = quoted(given.get("type"))
            raise self.refused(f"{where}.type", found, "minimize or maximize", "correct it")
        former = given.get("objectiveMetricName")
        objective = {"direction": given["type"]}
        if given.get("goal") is not None and metric not in self._additional():
            objective["target"] = given["goal"]
        if former and metric != former:
            self.renamed_objective(former, objective)
        return {"metric": metric, **objective}

    def _metrics(self) -> dict[str, Any]:
        """Return the additional metrics; the new objective is replaced by the former one."""
        names = self._additional()
        if self.options.metric in names:
            former = self.of_spec("objective").get("objectiveMetricName")
            names = [str(former), *(name for name in names if name != self.options.metric)]
        return {"metrics": [{"name": name} for name in names]} if names else {}

    def _additional(self) -> list[str]:
        given = self.of_spec("objective").get("additionalMetricNames")
        return list(map(str, self.scalars(given, "spec.objective.additionalMetricNames")))

    def _search(self, space: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        algorithm = str(self.of_spec("algorithm").get("algorithmName"))
        if algorithm not in _ALGORITHMS:
            allowed = ", ".join(_ALGORITHMS)
            where = "spec.algorithm.algorithmName"
            raise self.refused(where, quoted(algorithm), allowed, "choose one of them")
        if algorithm not in _SAME:
            text = f"`{algorithm}` has no counterpart; `{_ALGORITHMS[algorithm]}` is the nearest"
            self.note("search.algorithm", text)
        trials = self.options.max_trials or self.spec.get("maxTrialCount")
        if trials is None:
            trials = DEFAULT_MAX_TRIALS
            self.note("search.max_trials", "no `maxTrialCount`; set it, or use --max-trials")
        if self.of_spec("algorithm").get("algorithmSettings"):
            self.note("search", "the algorithm's settings are left out")
        algorithm_name = self.affordable(_ALGORITHMS[algorithm], trials, space)
        return {"algorithm": algorithm_name, "max_trials": trials}

    def _budget(self) -> dict[str, Any]:
        epochs = self.options.max_epochs
        if epochs is None:
            self.note("budget.max_epochs", "not in the experiment; set it, or use --max-epochs")
        budget: dict[str, Any] = {"max_epochs": epochs or DEFAULT_MAX_EPOCHS}
        if parallel := self.spec.get("parallelTrialCount"):
            budget["max_parallel"] = parallel
        failed = self.spec.get("maxFailedTrialCount")
        if failed is not None:
            budget["failed_trials"] = failed or 1  # 0: the first failed trial ends an experiment
        return budget

    def _early_stop(self) -> dict[str, Any]:
        name = self.of_spec("earlyStopping").get("algorithmName")
        if name is None:
            hyperband = self.of_spec("algorithm").get("algorithmName") == "hyperband"
            return {"early_stop": "asha"} if hyperband else {}
        if name != "medianstop":
            self.note("early_stop", f"{quoted(name)} has no counterpart; none is used")
            return {}
        return {"early_stop": "median"}

    def _pattern(self) -> dict[str, Any]:
        """Note how the metrics were collected; the default format is what Hermes reads."""
        collector = "metricsCollectorSpec"
        kind = self.of_spec(collector, "collector").get("kind", "StdOut")
        path = self.of_spec(collector, "source", "fileSystemPath").get("path")
        if kind == "TensorFlowEvent":
            self.note("trial.tensorboard", "the folder of the event files, below trial.directory")
            return {"tensorboard": str(path or "logs")}
        if kind != "StdOut":
            text = f"metrics were collected by {quoted(kind)}; the script must print them"
            self.note("trial.metric_pattern", text)
        formats = self.of_spec(collector, "source", "filter").get("metricsFormat")
        if formats:
            text = "the collector had its own pattern; name its groups `name` and `value`"
            self.note("trial.metric_pattern", f"{text}: {quoted(formats)}")
        return {}

    def _space(self) -> Iterator[tuple[str, dict[str, Any]]]:
        parameters = self.mappings(self.spec.get("parameters"), "spec.parameters")
        for index, parameter in enumerate(parameters):
            where = f"spec.parameters[{index}]"
            given = parameter.get("name")
            if given in (None, ""):
                raise self.refused(f"{where}.name", "none", "the parameter's name", "add it")
            name = self.parameter_name(str(given), where)
            if name != given:
                self.note(f"search.space.{name}", f"was named {quoted(given)}")
            yield name, self._parameter(parameter, where, f"search.space.{name}")

    def _parameter(self, given: Mapping[str, Any], where: str, place: str) -> dict[str, Any]:
        feasible = self.inside(given, where, "feasibleSpace")
        kind = given.get("parameterType")
        if kind in ("categorical", "discrete"):
            listed = self.scalars(feasible.get("list"), f"{where}.feasibleSpace.list")
            return choice_parameter(_value(v) if kind == "discrete" else str(v) for v in listed)
        if kind not in ("int", "double"):
            allowed = "int, double, discrete or categorical"
            raise self.refused(f"{where}.parameterType", quoted(kind), allowed, "correct it")
        try:
            number = int if kind == "int" else float
            low, high = number(str(feasible["min"])), number(str(feasible["max"]))
            step = None if feasible.get("step") is None else number(str(feasible["step"]))
        except (KeyError, ValueError) as error:
            found = quoted(dict(feasible))
            allowed = "min, max and perhaps step, numbers in quotes"
            raise self.refused(f"{where}.feasibleSpace", found, allowed, "correct it") from error
        log = self._is_log(feasible, where, place)
        if log and step is not None and kind == "double":
            self.note(place, f"had the step {step:g}, which a logarithmic range has not")
        elif log and step not in (None, 1):
            self.note(place, f"was logarithmic with a step of {step}; all steps are equally likely")
        return range_parameter(low, high, log=log, step=step)

    def _is_log(self, feasible: Mapping[str, Any], where: str, place: str) -> bool:
        """Say whether a range is logarithmic; note what its distribution was."""
        distribution = str(feasible.get("distribution") or "uniform").lower()
        if distribution not in _DISTRIBUTIONS:
            found, allowed = quoted(feasible["distribution"]), ", ".join(_DISTRIBUTIONS.values())
            where = f"{where}.feasibleSpace.distribution"
            raise self.refused(where, found, allowed, "choose one of them")
        if distribution in ("normal", "lognormal"):
            self.note(place, f"was {distribution}; is uniform over its range")
        return distribution in _LOG

    def _add_known_point(self, sweep: dict[str, Any]) -> None:
        """Add the best trial so far, which a running or finished experiment names."""
        optimal = self.inside(self.data, "", "status", "currentOptimalTrial")
        where = "status.currentOptimalTrial.parameterAssignments"
        assignments = self.mappings(optimal.get("parameterAssignments"), where)
        values = {valid_parameter(str(a.get("name"))): a.get("value") for a in assignments}
        space: Mapping[str, Mapping[str, Any]] = sweep["search"]["space"]
        if not self.options.points or set(values) != set(space):
            return
        point = {name: _assigned(spec, values[name]) for name, spec in space.items()}
        tried = {**sweep, "search": {**sweep["search"], "points_to_evaluate": [point]}}
        if refused := _point_refusals(tried):
            text = f"the best trial does not fit the space as it is ({refused[0]})"
            self.note("search.points_to_evaluate", text)
        else:
            sweep["search"]["points_to_evaluate"] = [point]


def _point_refusals(sweep: Mapping[str, Any]) -> list[str]:
    """Return the problems that the check of a sweep file finds in its points to evaluate."""
    try:
        parse(sweep, "", None)
    except ConfigError as error:
        problems = [p for p in error.problems if p.where.startswith("search.points_to_evaluate")]
        return [f"{p.where.rpartition('.')[2]}: {p.found}; allowed: {p.allowed}" for p in problems]
    return []


def _value(text: object) -> int | float | str:
    """Return a listed value as the number that it is, else as its text."""
    for number in (int, float):
        try:
            return number(str(text))
        except ValueError:
            continue
    return str(text)


def _assigned(parameter: Mapping[str, Any], text: object) -> object:
    """Return an assignment, which Katib writes as text, in the type of its parameter."""
    if parameter["type"] == "choice":
        same = [value for value in parameter["values"] if str(value) == str(text)]
        return same[0] if same else str(text)
    return _value(text)


GPU_RESOURCE = "nvidia.com/gpu"
_TRIAL_SPEC = "spec.trialTemplate.trialSpec"
_TRIAL_PARAMETERS = "spec.trialTemplate.trialParameters"
_PLACEHOLDER = re.compile(r"\$\{trial(Parameters|Spec)\.([^}]+)\}")


@dataclass(slots=True)
class _Trial(Conversion):
    """The trial template of an experiment, for the parameters `names` of its space."""

    template: Mapping[str, Any]
    names: Sequence[str]

    def section(self) -> dict[str, Any]:
        spec = self.template.get("trialSpec")
        if not isinstance(spec, Mapping):
            fix = "put the resource of the ConfigMap there"
            raise self.refused(_TRIAL_SPEC, quoted(spec), "a resource, such as a Job", fix)
        pod_place, pod = self._pod(spec)
        where, container = self._container(pod, pod_place)
        limits = dict(self.inside(container, where, "resources", "limits"))
        requests = dict(self.inside(container, where, "resources", "requests"))
        gpus = limits.pop(GPU_RESOURCE, requests.pop(GPU_RESOURCE, None))
        requests.pop(GPU_RESOURCE, None)
        section: dict[str, Any] = {"command": self._command(container, where), "run_in": "pod"}
        if gpus is not None:
            place = f"{where}.resources, {GPU_RESOURCE}"
            section["gpus"] = self.whole_number(gpus, place, "write how many GPUs a trial has")
        pod_keys: dict[str, Any] = {
            "image": container.get("image"),
            "requests": {k: str(v) for k, v in requests.items()} or None,
            "limits": {k: str(v) for k, v in limits.items()} or None,
            "node_selector": dict(self.inside(pod, pod_place, "nodeSelector")) or None,
            "environment": self._environment(container, where) or None,
        }
        section["pod"] = {key: value for key, value in pod_keys.items() if value is not None}
        self._note_rest(pod, container)
        return section

    def _pod(self, resource: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Return the pod of a Job, or of the first replica of a training job, with its place."""
        place = f"{_TRIAL_SPEC}.spec"
        spec = self.inside(resource, _TRIAL_SPEC, "spec")
        if "template" in spec:
            return f"{place}.template.spec", self.inside(spec, place, "template", "spec")
        replicas = [
            (name, f"{place}.{key}.{name}", self.inside(spec, place, key, name))
            for key in spec
            if str(key).endswith("ReplicaSpecs")
            for name in self.inside(spec, place, key)
        ]
        if not replicas:
            found = quoted(resource.get("kind"))
            allowed = "a Job, or a training job with replica specs"
            raise self.refused(_TRIAL_SPEC, found, allowed, "convert its container by hand")
        wanted = self.template.get("primaryReplicaType") or replicas[0][0]
        name, where, replica = next((r for r in replicas if r[0] == wanted), replicas[0])
        fix = "write how many replicas there are"
        count = sum(
            self.whole_number(kind.get("replicas") or 1, f"{place}.replicas", fix)
            for _, place, kind in replicas
        )
        if count > 1:
            self.note("trial", f"was {count} replicas; one process is run, as {name} was")
        return f"{where}.template.spec", self.inside(replica, where, "template", "spec")

    def _container(self, pod: Mapping[str, Any], where: str) -> tuple[str, Mapping[str, Any]]:
        """Return the container that trains, with its place."""
        containers = self.mappings(pod.get("containers"), f"{where}.containers")
        if not containers:
            raise self.refused(f"{where}.containers", "none", "one with a command", "add it")
        if len(containers) > 1:
            self.note("trial.pod", f"one of {len(containers)} containers is converted")
        wanted = self.template.get("primaryContainerName")
        names = [one.get("name") for one in containers]
        index = names.index(wanted) if wanted in names else 0
        return f"{where}.containers[{index}]", containers[index]

    def _command(self, container: Mapping[str, Any], where: str) -> list[str]:
        words = [
            str(word)
            for key in ("command", "args")
            for word in self.scalars(container.get(key), f"{where}.{key}")
        ]
        if not container.get("command"):
            script = self.options.script
            self.note("trial.command", "the image's entry point is not used: check the command")
            if script or not words:
                words = ["python", script or "train.py", *words]
        references = {
            str(p.get("name")): valid_parameter(str(p.get("reference")))
            for p in self.mappings(self.template.get("trialParameters"), _TRIAL_PARAMETERS)
        }
        if not any(_PLACEHOLDER.search(word) for word in words):
            self.note("trial.command", "named no parameter: one argument for each was added")
            return [*map(literal, words), *option_arguments(self.names)]
        return [self._filled(word, references) for word in words]

    def _filled(self, word: str, references: Mapping[str, str]) -> str:
        """Return an argument with Katib's placeholders replaced by those of Hermes."""
        parts: list[str] = []
        end = 0
        for match in _PLACEHOLDER.finditer(word):
            parts += [literal(word[end : match.start()]), self._reference(match, references)]
            end = match.end()
        return "".join([*parts, literal(word[end:])])

    def _reference(self, match: re.Match[str], references: Mapping[str, str]) -> str:
        name = references.get(match[2], "") if match[1] == "Parameters" else ""
        if name in self.names:
            return f"{{{name}}}"
        self.note("trial.command", f"{quoted(match[0])} is no parameter: replace it")
        return literal(match[0])

    def _environment(self, container: Mapping[str, Any], where: str) -> dict[str, str]:
        """Return the variables with plain values that hold no secret."""
        given = self.mappings(container.get("env"), f"{where}.env")
        for index, one in enumerate(given):
            place = f"{where}.env[{index}]"
            if one.get("name") in (None, ""):
                raise self.refused(f"{place}.name", "none", "the variable's name", "add it")
            if not isinstance(one.get("value", ""), str | int | float):
                fix = "write it as a text in quotes"
                raise self.refused(f"{place}.value", "no text", "a text", fix)
        plain = {str(one["name"]): str(one["value"]) for one in given if "value" in one}
        left_out = [str(one["name"]) for one in given if "value" not in one]
        left_out += open_secrets(plain)
        for name in left_out:
            text = f"{name} is left out: name a Secret with that key in trial.pod.secrets"
            self.note("trial.pod.environment", text)
        return {name: value for name, value in plain.items() if name not in left_out}

    def _note_rest(self, pod: Mapping[str, Any], container: Mapping[str, Any]) -> None:
        self.note("trial.pod.image", "the image needs hermes-trial, see docs/kubernetes.md")
        for key, place in _left_out(pod, container):
            self.note(place, f"`{key}` is left out")


def _left_out(pod: Mapping[str, Any], container: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys of the pod that are not converted, and where they would belong."""
    for key, place in (
        ("volumes", "trial.pod.volumes"),
        ("tolerations", "trial.pod.tolerations"),
        ("imagePullSecrets", "trial.pod.pull_secrets"),
        ("serviceAccountName", "trial.pod.service_account"),
        ("affinity", "trial.pod.template_file"),
        ("initContainers", "trial.pod.template_file"),
    ):
        if pod.get(key):
            yield key, place
    if container.get("envFrom"):
        yield "envFrom", "trial.pod.secrets"
    if container.get("workingDir"):
        yield "workingDir", "trial.directory"
