"""What a sweep whose trials are pods needs of its plan and of its report."""

from __future__ import annotations

import logging

from airflow.sdk.exceptions import AirflowFailException

from hermes_ops.airflow.folders import pod_file
from hermes_ops.config import PodSpec, RunIn, SweepConfig, complete, pod_defaults
from hermes_ops.errors import ConfigError, HermesError

log = logging.getLogger(__name__)


def check_pods(config: SweepConfig) -> None:
    """Fail the plan of a sweep whose pods could never be made."""
    own = config.trial.pod or PodSpec()
    try:
        complete(own.over(pod_defaults(pod_file())), config.name)
    except ConfigError as error:
        raise AirflowFailException(str(error)) from None


def end_left_pods(config: SweepConfig, sweep: str) -> None:
    """After the last trial: delete pods whose tasks were killed and never came again."""
    if config.trial.run_in is not RunIn.POD:
        return
    from hermes_ops.airflow.trial.pods import end_pods

    try:
        ended = end_pods(sweep, config.trial.pod)
    except HermesError as error:
        log.warning("Pods of %s may be left: %s", sweep, error)
        return
    if ended:
        log.info("%s pods of %s were left and are deleted", ended, sweep)
