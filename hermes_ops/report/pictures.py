"""The pictures of the page, drawn independently: one that fails leaves the others."""

from __future__ import annotations

import logging
from base64 import b64encode
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hermes_ops.core.summary import CurvePoints, Segment, SweepSummary
from hermes_ops.report.background import Background
from hermes_ops.report.canvas import NothingToDrawError, svg
from hermes_ops.report.figures import gpu_timeline, learning_curves, measured_course, regret_curves
from hermes_ops.report.parameter_plots import (
    MOST_AXES,
    MOST_SLICES,
    importance_bars,
    importances,
    parallel_coordinates,
    slices,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

Drawn = tuple["Figure", str]  # the picture, and a remark for its caption


@dataclass(frozen=True, slots=True)
class Picture:
    """A section of the page.

    `image` is the picture as a data URL, empty when there is none: then `reason` says why.
    """

    id: str
    title: str
    alt: str
    caption: str
    image: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Subject:
    """The data of all pictures."""

    summary: SweepSummary
    curves: Mapping[int, CurvePoints]
    segments: Sequence[Segment]
    background: Background

    def learning(self) -> Drawn:
        return learning_curves(self.summary, self.curves, self.segments), ""

    def coordinates(self) -> Drawn:
        return parallel_coordinates(self.summary), ""

    def importance(self) -> Drawn:
        importance = importances(self.summary)
        return importance_bars(importance), importance.remark

    def slices(self) -> Drawn:
        return slices(self.summary), ""

    def timeline(self) -> Drawn:
        return gpu_timeline(self.summary, self.segments), ""

    def regret(self) -> Drawn:
        origin_s = self.background.started_s
        if origin_s is None:
            origin_s = min((s.start_s for s in self.segments), default=0.0)
        course = measured_course(self.summary, self.curves, self.segments, origin_s)
        figure = regret_curves(course, self.background, direction=self.summary.direction)
        missing = self.background.no_alternatives
        return figure, f"No replay: {missing}" if missing else ""


@dataclass(frozen=True, slots=True)
class _Section:
    """The fixed texts of a section, and the function that draws its picture."""

    id: str
    title: str
    caption: str
    draw: Callable[[_Subject], Drawn]


SECTIONS = (
    _Section(
        "curves",
        "Learning curves",
        "Left by step, right by time. A ring stands where a trial was stopped and resumed "
        "later; by time a dotted line leads over its wait. The best trial is thick.",
        _Subject.learning,
    ),
    _Section(
        "regret",
        "Regret",
        "How far the best value so far was from the sweep's best, over time and over the GPU "
        "time held by then; at the bottom it is reached. Of a replay in which curves that were "
        "cut short go on, the band holds the simulated extremes.",
        _Subject.regret,
    ),
    _Section(
        "gpus",
        "Who held which GPU",
        "A bar is a stretch of training, in the colour of its trial; a red edge ends one that "
        "was stopped for others; the best trial has a dark frame.",
        _Subject.timeline,
    ),
    _Section(
        "parallel",
        "Parallel coordinates",
        "A line is a trial, from its hyper-parameters to its best value; the darker, the "
        "better. A trial that lacks a parameter crosses its axis at “not set”. At most "
        f"{MOST_AXES} parameters, those that vary. Failed trials are left out.",
        _Subject.coordinates,
    ),
    _Section(
        "importance",
        "Importance of hyper-parameters",
        "By how much a random forest predicts the order of unseen trials worse when a "
        "parameter is shuffled: the mean of ten forests, the whisker from the least to the "
        "most. Parameters that vary together share their importance.",
        _Subject.importance,
    ),
    _Section(
        "slices",
        "Slices",
        "The best value of each trial against each hyper-parameter. Dot: finished; ring: not "
        "finished, so a value of fewer steps; red diamond: the best. At most "
        f"{MOST_SLICES} parameters.",
        _Subject.slices,
    ),
)


def pictures(
    summary: SweepSummary,
    curves: Mapping[int, CurvePoints],
    segments: Sequence[Segment],
    background: Background,
    only: Collection[str] = (),
) -> tuple[Picture, ...]:
    """Return the sections in the order of the page; a picture that fails has a reason instead.

    `only`: the ids of the sections to draw, by default all.
    """
    subject = _Subject(summary, curves, segments, background)
    best = "none" if summary.best is None else f"trial {summary.best.number}"
    who = f"{summary.metric} of {len(summary.trials)} trials, best {best}"
    return tuple(
        _drawn(section, subject, who) for section in SECTIONS if not only or section.id in only
    )


def _drawn(section: _Section, subject: _Subject, who: str) -> Picture:
    """Return the section with its picture or the reason for none; `who` is in the alt text."""
    name, title, caption = section.id, section.title, section.caption
    alt = f"{title}: {who}. {caption}"
    try:
        figure, remark = section.draw(subject)
        image = f"data:image/svg+xml;base64,{b64encode(svg(figure)).decode()}"
    except NothingToDrawError as nothing:
        return Picture(name, title, alt, caption, reason=str(nothing))
    except Exception as error:  # a report without a picture is better than none
        log.warning("The picture %s could not be drawn.", name, exc_info=True)
        return Picture(name, title, alt, caption, reason=_one_line(error))
    return Picture(name, title, alt, f"{caption} {remark}".strip(), image)


def _one_line(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"This picture could not be drawn ({text[:200]})."
