"""The DAG that prunes each night: one task that runs `hermes prune`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, BaseOperator, Param
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from hermes_ops.airflow.credentials import AirflowCredentials
from hermes_ops.errors import HermesError

PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "NO_PROXY", "no_proxy", "KUBECONFIG")
PASSED_ON_PREFIXES = (
    "HERMES_", "MLFLOW_", "AWS_", "GOOGLE_", "AZURE_", "FSSPEC_", "KUBERNETES_SERVICE_",
)  # fmt: skip
"""Prefixes of the task's variables that the command gets: of the services and of stores only."""

SHOWN_LINES = 20

AGE_VARIABLE = "hermes_prune_older_than"
"""Airflow's Variable that names the age for every night."""


class PruneOperator(BaseOperator):
    """Removes sweeps that ended long ago, with the rights of the controller's user in Airflow.

    :param older_than: how long ago, as in `90d`
    :param keep_best: "True" leaves the best trial's run of each sweep in MLflow
    """

    template_fields = ("older_than", "keep_best")

    def __init__(
        self,
        *,
        older_than: str,
        keep_best: str = "False",
        **kwargs: Any,  # noqa: ANN401 - Airflow's own
    ) -> None:
        super().__init__(**kwargs)
        self.older_than = older_than
        self.keep_best = keep_best

    def execute(self, context: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - Airflow's own
        """Return what was removed; fail if something is left, which the next run completes."""
        try:
            given = AirflowCredentials.from_environment()
            if not given.has_token:
                given.password()
        except HermesError as error:
            raise AirflowFailException(f"this task cannot log in to Airflow: {error}") from None
        done = subprocess.run(
            self.command(),
            env=passed_on(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        last = "\n".join(done.stderr.splitlines()[-SHOWN_LINES:])
        try:
            document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            raise AirflowException(f"hermes prune failed: {last}") from None
        for row in document["removed"]:
            self.log.info("Removed %s, %s bytes", row["sweep"], row["bytes"])
        for sweep, reason in document["kept"].items():
            self.log.info("Kept %s: %s", sweep, reason)
        if done.returncode:
            raise AirflowException(f"something is left: {document['left'] or last}")
        return {"removed": [row["sweep"] for row in document["removed"]]}

    def command(self) -> list[str]:
        """Return the command line of this pruning."""
        start = [sys.executable, "-P", "-c", "from hermes_ops.cli import main; main()"]
        options = ["prune", "--older-than", str(self.older_than), "--yes", "--json"]
        return [*start, *options, *(["--keep-best"] if str(self.keep_best) == "True" else [])]


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the command."""
    return {k: v for k, v in environ.items() if k in PASSED_ON or k.startswith(PASSED_ON_PREFIXES)}


def prune_dag(
    dag_id: str = "hermes_prune",
    *,
    older_than: str = "90d",
    schedule: Any = "30 3 * * *",  # noqa: ANN401 - whatever Airflow takes
    **dag_arguments: Any,  # noqa: ANN401 - Airflow's own
) -> DAG:
    """Return a DAG that removes sweeps which ended that long ago; paused until it is switched on.

    :param older_than: the age where neither the run's form nor Airflow's Variable
        `hermes_prune_older_than` names one
    """
    age = Param(
        None, type=["null", "string"], pattern=r"^\d+(\.\d+)?\s*[hdw]$",
        description=f"How long ago a sweep must have ended: 12h, 90d, 8w. Empty: what the Variable "
        f"{AGE_VARIABLE} says, else {older_than}",
    )  # fmt: skip
    keep = Param(False, type="boolean", description="Keep the best trial's run in MLflow")
    arguments = {
        "doc_md": __doc__,
        "catchup": False,
        "max_active_runs": 1,
        "is_paused_upon_creation": True,
        "tags": ["hermes"],
        "params": {"older_than": age, "keep_best": keep},
        **dag_arguments,
    }
    every_night = f"var.value.get({AGE_VARIABLE!r}, {older_than!r})"
    with DAG(dag_id, schedule=schedule, **arguments) as dag:
        PruneOperator(
            task_id="prune",
            older_than="{{ params.older_than or " + every_night + " }}",
            keep_best="{{ params.keep_best }}",
            retries=2,
            retry_delay=timedelta(minutes=10),
        )
    return dag
