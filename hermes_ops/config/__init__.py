"""The sweep file: its model, the refusal of anything else, and what a trial gets of it."""

from hermes_ops.config.metrics import Direction
from hermes_ops.config.model import (
    Algorithm,
    Budget,
    EarlyStop,
    Objective,
    Search,
    SweepConfig,
    TrialSpec,
)
from hermes_ops.config.parse import load_file, parse
from hermes_ops.config.pod import PodSpec, RunIn, complete, leased_pod, pod_defaults, pod_spec
from hermes_ops.config.preview import Preview, check_preview, warnings_of
from hermes_ops.config.render import render_command, render_environment
from hermes_ops.config.schema import dag_params_schema, json_schema
from hermes_ops.config.sweep_warnings import SweepWarning, never_fits

__all__ = [
    "Algorithm",
    "Budget",
    "Direction",
    "EarlyStop",
    "Objective",
    "PodSpec",
    "Preview",
    "RunIn",
    "Search",
    "SweepConfig",
    "SweepWarning",
    "TrialSpec",
    "check_preview",
    "complete",
    "dag_params_schema",
    "json_schema",
    "leased_pod",
    "load_file",
    "never_fits",
    "parse",
    "pod_defaults",
    "pod_spec",
    "render_command",
    "render_environment",
    "warnings_of",
]
