"""The first and the last task of a sweep: `plan` before the trials, `report` after them."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from jinja2 import TemplateError

from hermes_ops.airflow import open_secrets
from hermes_ops.airflow.control.cleanup.janitor import check_store
from hermes_ops.airflow.folders import pod_file, sweep_folder
from hermes_ops.airflow.hosts import (
    NODES_VARIABLE,
    REMEDY,
    node_names,
    process_refusal,
    remote_executor,
)
from hermes_ops.airflow.identity import (
    MAIN_DAG,
    group_of,
    may_be_of_another_dag,
    may_have_folder_of_another,
    sweep_of,
)
from hermes_ops.airflow.machines import MACHINES_VARIABLE, WITH_QUEUES, MachineSlots
from hermes_ops.airflow.open_secrets import redact
from hermes_ops.airflow.records import (
    CLOSE_KEY,
    CONFIG_XCOM,
    END_TAGS,
    OUTCOMES,
    REPLACED,
    SWEEP_KEY,
    CloseRecord,
    SweepRecord,
    decode,
    encode,
)
from hermes_ops.airflow.state_store import (
    KeyValues,
    LastingStore,
    read_record,
    refused_setting,
    write_record,
)
from hermes_ops.airflow.sweep.ended_sweep import deadline_tag, with_trials
from hermes_ops.airflow.sweep.source import SweepSource
from hermes_ops.airflow.sweep.warm_start import NightlySweeps, add_warm_start, is_backfill
from hermes_ops.airflow.trial.connections import Connections
from hermes_ops.airflow.trial.links import (
    REPORT_XCOM,
    SWEEP_XCOM,
    TRIALS_XCOM,
    CompareTrialsLink,
    SweepReportLink,
    SweepRunLink,
    comparison_address,
    report_address,
    run_address,
)
from hermes_ops.airflow.trial.metrics import tracking_uri
from hermes_ops.config import (
    PodSpec,
    RunIn,
    SweepConfig,
    check_gang_service,
    check_installation,
    parse,
    pod_defaults,
    pod_rules,
    refuse_passed_deadline,
    require_image_and_claim,
    warnings_of,
)
from hermes_ops.config.sweep_warnings import as_tag
from hermes_ops.config.workers import Workers
from hermes_ops.core.secondary_metrics import why_no_best
from hermes_ops.errors import ConfigError, HermesError, Problem, Unavailable
from hermes_ops.references import names_in, refers
from hermes_ops.tracking import SweepRef, Tracker
from hermes_ops.tracking.comparison import ComparedSweep
from hermes_ops.tracking.runs import NAME, RUN_STATUS
from hermes_ops.trial.environment import InheritanceRule, why_missing


def refuse_class(config: SweepConfig, context: Mapping[str, Any]) -> None:
    """Raise ConfigError if the user who has triggered the run may not use the sweep's class.

    A scheduled run is judged by the controller, which knows its owner.
    """
    from hermes_ops.airflow.control.quota_settings import refuse_class_in_pool

    user = getattr(context.get("dag_run"), "triggering_user_name", None)
    if user:
        refuse_class_in_pool(config.pool, config.priority_class, user, str(context["run_id"]))


class PlanOperator(BaseOperator):
    """Validates the sweep, opens it in MLflow, returns the trial numbers.

    :param trial_task: the id of the mapped task that runs the trials
    :param source: the source of the sweep; by default the configuration of the DAG run
    :param connections: the connection that leads to MLflow, instead of its variables
    :param nights: the nightly sweeps that this one belongs to
    """

    operator_extra_links = (SweepRunLink(), CompareTrialsLink())

    def __init__(
        self,
        *,
        trial_task: str,
        source: SweepSource | None = None,
        connections: Connections | None = None,
        nights: NightlySweeps | None = None,
        **kwargs: Any,  # noqa: ANN401 - Airflow's own
    ) -> None:
        super().__init__(**kwargs)
        self.trial_task = trial_task
        self.source = source or SweepSource()
        self.connections = connections or Connections()
        self.nights = nights

    def execute(self, context: Mapping[str, Any]) -> list[int]:
        """Plan the sweep, or refuse a bad configuration before anything starts; safe to repeat.

        A sweep that is stopped while its plan waits for MLflow is skipped here: it has no record
        yet, so the controller cannot end it.
        """
        store = LastingStore(context["task_state_store"])
        before = decode(SweepRecord, read_record(store.get, SWEEP_KEY))
        try:
            return self._plan(context, store, before)
        except Unavailable:
            close = decode(CloseRecord, store.get(CLOSE_KEY))
            if before is not None or close is None:
                raise
            store.set(CLOSE_KEY, {})  # a person who clears the plan starts the sweep
            reason = f"the sweep was ended before it was planned: {close.reason}"
            raise AirflowSkipException(reason) from None

    def _plan(
        self, context: Mapping[str, Any], store: LastingStore, before: SweepRecord | None
    ) -> list[int]:
        if (refused := refused_setting()) is not None:
            raise AirflowFailException(refused)
        self._check_run_id(str(context["run_id"]))
        config = self._read(context) if before is None else _planned_config(before, context)
        self._check_executor(config)
        self.connections.enter()
        refuse_missing(config, os.environ)
        tracker, sweep = Tracker(tracking_uri()), sweep_of(self, context)
        if before is None:
            config = self._begin(config, tracker, sweep, context)
        planned_s = before.planned_s if before is not None else time.time()
        deadline = deadline_tag(config, _began_s(context, planned_s))
        tags = {**self._tags(config), **deadline}
        tags |= self._warn(config) if before is None else {}
        ref = tracker.find_sweep(sweep, config.name) if before is not None else None
        if ref is None:
            ref = tracker.ensure_sweep(config.name, sweep, redact(config).to_yaml(), tags)
        now_ms = int(time.time() * 1_000)
        tracker.views.save(ref, ComparedSweep.from_config(config), now_ms)
        record = SweepRecord(
            config=json.loads(config.to_json()),
            trials=config.trial_count,
            trial_task=self.trial_task,
            parent_run_id=ref.parent_run_id,
            experiment_id=ref.experiment_id,
            experiment=config.name,
            touched=before.touched if before is not None else (),
            planned_s=planned_s,
            nightly=self.nights is not None and not is_backfill(context.get("dag_run")),
            templated=self._templated(context, before),
            clears=_clears(context),
            due_s=_due_s(context),
        )
        if before is not None:
            self._continue(before, context, tracker, ref, deadline)
        write_record(KeyValues(store.get, store.set, store.delete), SWEEP_KEY, encode(record))
        context["ti"].xcom_push(CONFIG_XCOM, json.loads(redact(config).to_json()))
        _push_addresses(context["ti"], ref)
        self.log.info("Sweep %s: %s trials", sweep, record.trials)
        return list(range(record.trials))

    def _check_run_id(self, run_id: str) -> None:
        """Refuse a run of the main DAG that would have the id or the folder of another's sweep."""
        dag = self.get_dag()
        is_whole_run = not group_of(str(self.task_id))
        if dag is None or dag.dag_id != MAIN_DAG or not is_whole_run:
            return
        if may_be_of_another_dag(run_id):
            raise AirflowFailException(
                f"the run's id: found {run_id!r}, which may be the id of a sweep of the DAG "
                f"{run_id.partition(':')[0]}; allowed: an id without colons. Fix: start it with "
                "another id."
            )
        if may_have_folder_of_another(run_id):
            raise AirflowFailException(
                f"the run's id: found {run_id!r}, which may be the folder of a sweep with another "
                "id; allowed: an id with _ does not end in - and eight digits of 0-9a-f. Fix: "
                "start it with another id."
            )

    def _begin(
        self, config: SweepConfig, tracker: Tracker, sweep: str, context: Mapping[str, Any]
    ) -> SweepConfig:
        """Return a new sweep with the configurations that it tries first.

        A night is skipped if it was missed, or while another one runs, if that is its rule; a taken
        id is refused.
        """
        if self.nights is not None:
            run = context.get("dag_run")
            config = self.nights.begin(config, tracker, context["ti"], self.log.info, run)
        refuse_taken_id(sweep, tracker)
        return add_warm_start(config, tracker, sweep, self.log.info)

    def _read(self, context: Mapping[str, Any]) -> SweepConfig:
        def render(text: str) -> str:
            return str(self.render_template(text, context))  # type: ignore[arg-type]

        try:
            if self.nights is not None:
                self.source.refuse_unread_keys(context)
            config = self.source.config(context, render)
            open_secrets.refuse(
                json.loads(config.to_json()),
                str(context["run_id"]),
                self.source.connection_variables(context),
            )
            check_installation(config, pod_file())
            refuse_passed_deadline(config, time.time(), str(context["run_id"]))
            refuse_class(config, context)
        except ConfigError as error:
            raise AirflowFailException(str(error)) from None
        except TemplateError as error:
            raise AirflowFailException(f"a template of the sweep is wrong: {error}") from None
        try:
            check_store(config.checkpoints.store)
        except HermesError as error:
            raise AirflowFailException(str(error)) from None
        if config.trial.run_in is RunIn.POD:
            return check_pods(config)
        if not Path(config.trial.directory).is_absolute():
            raise AirflowFailException(
                f"trial.directory: found {config.trial.directory!r}; allowed: an absolute path "
                "if the sweep is triggered from Airflow. Fix: write the whole path, or start the "
                "sweep with `hermes sweep run FILE`, which takes it from the file's folder."
            )
        return config

    def _check_executor(self, config: SweepConfig) -> None:
        """Fail the plan of trials that its executor, or Airflow, cannot run.

        Such as processes on machines without the pool's GPUs.
        """
        is_pod = config.trial.run_in is not RunIn.PROCESS
        dag = self.get_dag()
        trial = dag.get_task(self.trial_task) if dag is not None else None
        executors = getattr(trial, "executor", None), self.executor
        refuse_length(config.trial_count, is_alone=not remote_executor(*executors))
        if MachineSlots.from_environment().of_slot:
            self._check_machines(remote_executor(*executors), is_pod=is_pod)
        elif not is_pod and (refusal := process_refusal(*executors)):
            raise AirflowFailException(
                f"trial.run_in: found process, and {refusal}; allowed: pod, or process with "
                f"LocalExecutor on one machine. Fix: {REMEDY}."
            )

    def _check_machines(self, executor: str, *, is_pod: bool) -> None:
        """Fail the plan of trials that no worker of the pool's machines would take."""
        if is_pod:
            raise AirflowFailException(
                f"trial.run_in: found pod; allowed: process, as {MACHINES_VARIABLE} is set. "
                "Fix: write `run_in: process`."
            )
        if executor not in WITH_QUEUES:
            raise AirflowFailException(
                f"{MACHINES_VARIABLE} is set, and the trials' tasks are run by "
                f"{executor or 'an executor that stays on its machine'}; allowed: "
                f"{' or '.join(WITH_QUEUES)}. Fix: set [core] executor."
            )

    def _templated(self, context: Mapping[str, Any], before: SweepRecord | None) -> tuple[str, ...]:
        """Return the variables that trials render: those of the DAG's file as it was planned."""
        if before is not None:
            return before.templated
        return self.source.connection_variables(context)

    def _continue(
        self,
        before: SweepRecord,
        context: Mapping[str, Any],
        tracker: Tracker,
        ref: SweepRef,
        renewed: Mapping[str, str],
    ) -> None:
        """Reopen the sweep's run; remove the sweep's end if a person has cleared the plan since.

        Nothing is removed if the plan is merely retried, or after `hermes sweep extend`, which has
        removed the old end itself: an end that is there then is a new one.
        """
        dropped: list[str] = []
        if before.clears != _clears(context) and not before.touched:
            LastingStore(context["task_state_store"]).set(CLOSE_KEY, {})
            dropped = [tag for tag in END_TAGS if tag in tracker.sweep(ref).tags]
        tracker.reopen(ref.parent_run_id, dropped, renewed)

    def _warn(self, config: SweepConfig) -> dict[str, str]:
        """Log the sweep's warnings; return the tag that shows them to those who follow it."""
        warnings = warnings_of(config, pool_slots=None, environ=os.environ)
        for warning in warnings:
            self.log.warning("%s", warning)
        return as_tag(warnings)

    def _tags(self, config: SweepConfig) -> dict[str, str]:
        tags = {
            "hermes.sampler": config.search.algorithm.value,
            NAME: config.name,
            "hermes.pool": config.pool,
        }
        return {**tags, **self.nights.tags} if self.nights is not None else tags


def _push_addresses(ti: Any, ref: SweepRef) -> None:  # noqa: ANN401 - Airflow's own
    """Push the addresses of the links of the sweep's tasks."""
    ti.xcom_push(SWEEP_XCOM, run_address(tracking_uri(), ref.experiment_id, ref.parent_run_id))
    ti.xcom_push(TRIALS_XCOM, comparison_address(tracking_uri(), ref))


def _clears(context: Mapping[str, Any]) -> int:
    """Return how often the DAG run has been cleared; retries of a task do not count."""
    return int(getattr(context.get("dag_run"), "clear_number", None) or 0)


def _due_s(context: Mapping[str, Any]) -> float:
    """Return when the DAG run was due, in Unix seconds; 0 where Airflow does not say."""
    due = getattr(context.get("dag_run"), "run_after", None)
    return 0.0 if due is None else float(due.timestamp())


def _began_s(context: Mapping[str, Any], planned_s: float) -> float:
    """Return when the sweep has begun: when it was planned, or its run was started again since."""
    started = getattr(context.get("dag_run"), "start_date", None)
    return planned_s if started is None else max(planned_s, started.timestamp())


def _planned_config(before: SweepRecord, context: Mapping[str, Any]) -> SweepConfig:
    """Return the sweep of an earlier try, or one that has been extended."""
    config = parse(before.config, source=str(context["run_id"]), base=None)
    try:
        check_installation(config, pod_file())
    except ConfigError as error:
        raise AirflowFailException(str(error)) from None
    return config


class ReportOperator(BaseOperator):
    """Closes the sweep in MLflow and writes its report, whatever became of the trials.

    :param plan_task: the id of the task that planned the sweep
    :param trial_task: the id of the mapped task that ran the trials
    :param connections: the connection that leads to MLflow, instead of its variables
    """

    operator_extra_links = (SweepRunLink(), CompareTrialsLink(), SweepReportLink())

    def __init__(
        self,
        *,
        plan_task: str,
        trial_task: str,
        connections: Connections | None = None,
        **kwargs: Any,  # noqa: ANN401 - Airflow's own
    ) -> None:
        super().__init__(**kwargs)
        self.plan_task = plan_task
        self.trial_task = trial_task
        self.connections = connections or Connections()

    def execute(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """Return the best trial; fail when the sweep was never planned or has no best trial.

        Of a night that was replaced before it had one, the task is skipped.
        """
        from hermes_ops.airflow.sweep.sweep_report import (
            best_of,
            clear_left_disks,
            close_sweep,
            end_left_pods,
        )

        ti = context["ti"]
        numbers = ti.xcom_pull(task_ids=self.plan_task)
        if numbers is None:
            self._leave_unplanned(ti)
        planned = ti.xcom_pull(task_ids=self.plan_task, key=CONFIG_XCOM)
        config = with_trials(parse(planned, str(context["run_id"]), None), len(numbers))
        self.connections.enter()
        tracker = Tracker(tracking_uri())
        sweep = sweep_of(self, context)
        end_left_pods(config, sweep)
        document = close_sweep(tracker, sweep, config, self._finals(ti))
        clear_left_disks(config, sweep, document)
        if document["best"] is None:
            self._leave_without_best(document, config.objective.metric)
        ref, best = best_of(tracker, config.name, document)
        page = report_address(tracking_uri(), ref.experiment_id, ref.parent_run_id)
        _push_addresses(ti, ref)
        ti.xcom_push(REPORT_XCOM, page)
        for asset in self.outlets:
            context["outlet_events"][asset].extra = {**best, "report": page}
        return best

    def _leave_without_best(self, document: Mapping[str, Any], metric: str) -> NoReturn:
        """Fail; skip the report of a night that was replaced, which is no failure of the sweep."""
        why = why_no_best(document, metric)
        if document.get("reason") == REPLACED:
            raise AirflowSkipException(f"{REPLACED}, before it had a best trial. {why}")
        raise AirflowFailException(why)

    def _leave_unplanned(self, ti: Any) -> None:  # noqa: ANN401 - Airflow's own
        """Skip the report of a sweep that was skipped; fail for one whose plan failed."""
        state = self._states(ti, self.plan_task).get(self.plan_task)
        if state == "skipped":
            raise AirflowSkipException("the sweep was skipped; see the log of its plan task")
        if state == "upstream_failed":  # the plan task has not run: it has no log
            raise AirflowFailException("the sweep was not planned: a task before it has failed")
        raise AirflowFailException("the sweep was not planned; see the log of its plan task")

    def _finals(self, ti: Any) -> dict[int, str]:  # noqa: ANN401 - Airflow's own
        """Return the final state of each trial's task."""
        return {
            int(name.rpartition("_")[2]): OUTCOMES.get(str(state), "failed")
            for name, state in self._states(ti, self.trial_task).items()
            if name.rpartition("_")[2].isdigit()
        }

    def _states(self, ti: Any, task_id: str) -> Mapping[str, str]:  # noqa: ANN401 - Airflow's own
        by_run = ti.get_task_states(dag_id=ti.dag_id, task_ids=[task_id], run_ids=[ti.run_id])
        states: Mapping[str, str] = by_run.get(ti.run_id) or {}
        return states


def refuse_taken_id(sweep: str, tracker: Tracker) -> None:
    """Fail the plan of a new sweep if an earlier sweep had its id, and has left results.

    The DAG run of that sweep was deleted in Airflow, but its folder or its runs in MLflow are still
    there. A plan that is retried has left no trial yet.
    """
    ref = tracker.find_sweep(sweep)
    has_runs = ref is not None and (tracker.sweep(ref).state in RUN_STATUS or tracker.trials(ref))
    if has_runs or any(sweep_folder(sweep).glob("trials/*/segments.jsonl")):
        raise AirflowFailException(
            f"the run's id: found that of an earlier sweep {sweep!r}, whose results are still "
            "there; allowed: an id without any. Fix: start it with another id, or remove the "
            f"earlier one with `hermes prune --older-than 0h --sweep {shlex.quote(sweep)}`."
        )


def refuse_missing(config: SweepConfig, environment: Mapping[str, str]) -> None:
    """Fail the plan of a sweep that refers to variables which trials of this worker lack.

    The variables of a pod are known only inside it.
    """
    if config.trial.run_in is RunIn.POD:
        return
    inherited_names = InheritanceRule.from_environment(environment).inherited(environment)
    environment_of_sweep = config.trial.environment
    plain = {key for key, value in environment_of_sweep.items() if not refers(value)}
    missing = [
        why_missing(key, name, in_pod=False)
        for key, value in environment_of_sweep.items()
        for name in names_in(value)
        if name not in inherited_names and name not in plain
    ]
    if missing:
        raise AirflowFailException("\n".join(missing))


def refuse_length(trials: int, *, is_alone: bool) -> None:
    """Fail the plan of more trials than a mapped task may have, which Airflow says less clearly.

    Airflow's API server decides it. Where tasks run on other machines (not `is_alone`), a default
    value here says nothing about the setting there.
    """
    from airflow.configuration import conf

    most = conf.getint("core", "max_map_length", fallback=1024)
    if trials <= most:
        return
    setting = conf.as_dict(display_source=True).get("core", {}).get("max_map_length")
    if is_alone or (isinstance(setting, tuple) and setting[1] != "default"):
        raise AirflowFailException(
            f"search.max_trials: found a sweep of {trials} trials; allowed: at most {most}, which "
            "is [core] max_map_length of Airflow. Fix: set that to the number of trials or more, "
            "for the API server, the scheduler and the workers, then clear this task; or start a "
            "sweep with fewer trials."
        )


def check_pods(config: SweepConfig) -> SweepConfig:
    """Return the sweep with its checkpoint claims; fail its plan if its pods could never be made.

    Claims from the installation's defaults become part of the sweep: the place of its checkpoints
    does not change while it runs. So does the Service of trials on several nodes, as the controller
    knows no defaults.
    """
    requested = config.trial.pod or PodSpec()
    try:
        defaults = pod_defaults(pod_file())
        check_gang_service(requested, defaults, pod_rules(), config.name)
        whole = require_image_and_claim(requested.with_defaults(defaults), config.name)
        kept: dict[str, Any] = {}
        if whole.checkpoint_claims:
            _check_nodes(config, whole.checkpoint_claims)
            kept["checkpoint_claims"] = whole.checkpoint_claims
        if whole.gang_service is not None and config.trial.workers is Workers.ONE_PER_GPU:
            kept["gang_service"] = whole.gang_service
    except HermesError as error:
        raise AirflowFailException(str(error)) from None
    if not kept:
        return config
    pod = requested.model_copy(update=kept)
    trial = config.trial.model_copy(update={"pod": pod})
    return config.model_copy(update={"trial": trial})


def _check_nodes(config: SweepConfig, claims: Mapping[str, str]) -> None:
    """Raise ConfigError unless some node with a claim has GPUs enough for a trial."""
    gpus = Counter(node_names())
    if max((gpus[node] for node in claims), default=0) >= config.trial.gpu_range.least:
        return
    nodes = ", ".join(f"{node}={n}" for node, n in gpus.items())
    problem = Problem(
        "trial.pod.checkpoint_claims",
        f"claims for {', '.join(sorted(claims))}, and "
        + (f"a pool on {nodes}" if nodes else "a pool whose nodes are not known"),
        f"a claim for a node of the pool with at least {config.trial.gpu_range.least} GPUs",
        f"set {NODES_VARIABLE}, as in node-a=2,node-b=2, for the controller and the Airflow "
        "workers (pool.nodes of the chart), or correct the names",
    )
    raise ConfigError(config.name, (problem,))
