"""Builders of sweeps, and a reader of pages."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

from hermes_ops.core.summary import CurvePoints, Segment, SweepSummary, TrialSummary
from hermes_ops.report import Background
from hermes_ops.report.page import page

BEGIN_S = 1_000.0
SECTIONS = ("curves", "regret", "gpus", "parallel", "importance", "slices")
EVIL = "<script>alert('x')</script>\"&$a_b^{ 日本 =1+1"


@dataclass(frozen=True)
class Sweep:
    """What a page is made of."""

    summary: SweepSummary
    curves: Mapping[int, CurvePoints] = field(default_factory=dict)
    segments: Sequence[Segment] = ()
    background: Background = field(default_factory=Background)

    @property
    def html(self) -> str:
        return page(self.summary, self.curves, self.segments, self.background)


def trial(number: int, best: float | None, **changes: Any) -> TrialSummary:
    facts = {"state": "finished", "config": {"rate": number / 10}, "final": best, "segments": 1}
    return TrialSummary(number, best=best, **{**facts, **changes})


def summary(*trials: TrialSummary, **changes: Any) -> SweepSummary:
    facts = {"metric": "val_loss", "direction": "minimize", "wall_seconds": 60.0, "pool_slots": 2}
    return SweepSummary("digits-1", "finished", trials, **{**facts, **changes})


def curve(*values: float, begin_s: float = 1.0) -> CurvePoints:
    """Values of the steps 1, 2, ..., one a second, the first `begin_s` after the sweep's start."""
    return tuple(
        (step, value, round(1_000 * (BEGIN_S + begin_s + step - 1)))
        for step, value in enumerate(values, start=1)
    )


def piece(
    trial: int, begin_s: float, end_s: float | None, outcome: str = "finished", **changes: Any
) -> Segment:
    """A segment on GPU 0, in seconds since the sweep's start."""
    facts = {"gpus": (0,), **changes}
    end = None if end_s is None else BEGIN_S + end_s
    return Segment(trial, 1, start_s=BEGIN_S + begin_s, end_s=end, outcome=outcome, **facts)


def conditional(number: int) -> TrialSummary:
    """Every other trial has a momentum, and none of the parameters has one type alone."""
    config: dict[str, Any] = {"rate": 10.0 ** -(number % 5), "layers": [number, "wide"]}
    config |= {"momentum": 0.1 * number} if number % 2 else {"warm": number % 4 == 0}
    config["mixed"] = number if number % 3 else "auto"
    return trial(number, 1.0 / (number + 1), config=config)


class Page(HTMLParser):
    """The parts of a page that tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.texts: dict[str, str] = {}
        self.images: dict[str, dict[str, str]] = {}
        self.rows: dict[str, list[str]] = {}
        self._section = self._row = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.append((tag, given))
        if tag == "section":
            self._section = given["id"]
        if tag in ("th", "td", "span"):
            self.handle_data(" ")
        if tag == "img":
            self.images[self._section] = given
        if tag == "tr":
            self._row = given.get("id", "")
        if tag == "td" and self._row:
            self.rows.setdefault(self._row, []).append("")
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.texts[self._section] = self.texts.get(self._section, "") + data
        if "td" in self.open and self._row:
            self.rows[self._row][-1] += data.strip()

    def addresses(self) -> list[str]:
        """Everything that the page would load or link to."""
        names = ("src", "href", "srcset", "action", "data", "poster", "xlink:href")
        return [given[n] for _, given in self.tags for n in names if n in given]

    def drawing(self, section: str) -> str:
        """All text of a section's picture, which must be well-formed."""
        head, _, data = self.images[section]["src"].partition(",")
        assert head == "data:image/svg+xml;base64"
        return " ".join(ElementTree.fromstring(b64decode(data)).itertext())
