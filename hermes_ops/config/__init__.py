"""The sweep file: its model, its validation, and the command and environment of each trial."""

from hermes_ops.config.conditions import refuse_passed_deadline
from hermes_ops.config.installation import (
    PodRules,
    check_gang_service,
    check_installation,
    check_pod,
    check_run_in,
    pod_defaults,
    pod_rules,
    pod_spec,
    require_image_and_claim,
    required_run_in,
)
from hermes_ops.config.model import (
    Algorithm,
    Budget,
    EarlyStopRule,
    Objective,
    Search,
    SweepConfig,
    TrialSpec,
    dag_params_schema,
    json_schema,
)
from hermes_ops.config.parse import load_file, parse
from hermes_ops.config.pod import PodSpec, RunIn, leased_pod
from hermes_ops.config.preview import Preview, check_preview, warnings_of
from hermes_ops.config.render import render_command, render_environment
from hermes_ops.config.sections import Direction
from hermes_ops.config.sweep_warnings import SweepWarning, never_fits

__all__ = [
    "Algorithm",
    "Budget",
    "Direction",
    "EarlyStopRule",
    "Objective",
    "PodRules",
    "PodSpec",
    "Preview",
    "RunIn",
    "Search",
    "SweepConfig",
    "SweepWarning",
    "TrialSpec",
    "check_gang_service",
    "check_installation",
    "check_pod",
    "check_preview",
    "check_run_in",
    "dag_params_schema",
    "json_schema",
    "leased_pod",
    "load_file",
    "never_fits",
    "parse",
    "pod_defaults",
    "pod_rules",
    "pod_spec",
    "refuse_passed_deadline",
    "render_command",
    "render_environment",
    "require_image_and_claim",
    "required_run_in",
    "warnings_of",
]
