"""The readers of a script's values, by the options of its segment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hermes_ops.trial import segment_records
from hermes_ops.trial.files import Folder
from hermes_ops.trial.metrics import MetricsFile
from hermes_ops.trial.output.metric_reader import MetricReader
from hermes_ops.trial.output.pattern_matcher import PatternMatcher
from hermes_ops.trial.supervisor.options import SegmentOptions

if TYPE_CHECKING:
    from hermes_ops.trial.tensorboard import TensorBoardReader

_TENSORBOARD_VARIABLE = "HERMES_TENSORBOARD_DIR"
_PARAMETER_PREFIX = "HERMES_PARAM_"


def make_metric_reader(
    options: SegmentOptions,
    status: segment_records.TrialStatus,
    first_step: int,
    metrics: MetricsFile,
) -> MetricReader:
    """Return the reader of metrics in the output.

    `first_step`: the checkpoint's; `metrics`: what earlier segments have stored.
    """
    return MetricReader(
        options.objective,
        options.metric_pattern,
        first_step,
        status.step_offset,
        dict(options.others),
        max_epochs=options.max_epochs,
        reached=metrics.reached(options.objective) if options.objective else None,
        stored={name: metrics.highest(name) for name in metrics.names()},
        is_replay=status.fits > 0,
        steps_by=status.steps_by,
        parameters=[
            name[len(_PARAMETER_PREFIX) :]
            for name in os.environ
            if name.startswith(_PARAMETER_PREFIX)
        ],
    )


def make_matcher(options: SegmentOptions, reader: MetricReader) -> PatternMatcher | None:
    """Return what searches for the sweep's patterns; None if it has none."""
    names = ["trial.metric_pattern"] if options.metric_pattern else []
    names += [f"the pattern of {name}" for name, pattern in options.others if pattern]
    patterns = [(name, reader.patterns[place]) for place, name in enumerate(names)]
    return PatternMatcher(patterns) if patterns else None


def make_tensorboard_reader(options: SegmentOptions, folder: Folder) -> TensorBoardReader | None:
    """Return the reader of the script's event files; None if the sweep names no folder."""
    root = os.environ.get(_TENSORBOARD_VARIABLE)
    if not root or options.objective is None:
        return None
    from hermes_ops.trial.tensorboard import TensorBoardReader

    place = Path(options.directory or os.getcwd(), root)
    return TensorBoardReader(place, options.objective, folder.root / "event_files.json")
