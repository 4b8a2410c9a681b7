"""Read the script's output as it passes by: its lines, their metrics, the last of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hermes_ops.trial.metrics import Metric
from hermes_ops.trial.output.line_reader import LineReader, OutputLine
from hermes_ops.trial.output.metric_reader import MetricReader
from hermes_ops.trial.output.pairs import FoundValue
from hermes_ops.trial.output.pattern_matcher import PatternMatcher, SearchedLines
from hermes_ops.trial.output.pattern_process import Match
from hermes_ops.trial.redaction import Mask


class OutputReader:
    """The metrics in a byte stream, the same however it is cut into pieces, and its last lines.

    Of a progress line, which carriage returns rewrite, the newest state counts, once for each step
    that its states say.
    """

    def __init__(self, metrics: MetricReader, mask: Mask | None = None) -> None:
        self.metrics = metrics
        self._lines = LineReader(mask)
        self._shown: dict[str, FoundValue] = {}  # on the progress line that is being rewritten

    def feed(self, data: bytes) -> list[Metric]:
        """Return the metrics that `data` completes."""
        return [metric for line in self.cut(data) for metric in self.read(line)]

    def close(self) -> list[Metric]:
        """Return what an unfinished last line holds."""
        metrics = [metric for line in self.rest() for metric in self.read(line)]
        self.metrics.close()
        return metrics

    def cut(self, data: bytes) -> list[OutputLine]:
        """Return the lines that `data` completes, to be read in their order."""
        return self._lines.feed(data)

    def rest(self) -> list[OutputLine]:
        """Return the last lines, once nothing more comes."""
        return self._lines.close() or [OutputLine("")]

    def read(
        self, line: OutputLine, matches: Sequence[tuple[int, Match]] | None = None
    ) -> list[Metric]:
        """Return the metrics that a line completes; `matches`: what patterns have found on it."""
        if matches is None:
            values = self.metrics.find(line.text)
        else:
            values = self.metrics.values_of(line.text, matches)
        return self.metrics.metrics(self._newest(line, values))

    @property
    def tail(self) -> list[str]:
        """The last lines, without secrets and control characters."""
        return self._lines.tail

    def _newest(self, line: OutputLine, values: list[FoundValue]) -> list[FoundValue]:
        """Return what counts now of a line's values and of the progress line's earlier states."""
        if not line.rewritten and not self._shown:
            return values
        past = []
        for new in values:
            old = self._shown.pop(new.name, None)
            if old is not None and old.step != new.step:
                past.append(old)
            self._shown[new.name] = new
        if not line.rewritten:
            past += self._shown.values()
            self._shown = {}
        return past


class TimedMetrics(NamedTuple):
    """Metrics, and when their lines came (in Unix seconds)."""

    metrics: list[Metric]
    received_s: float


class MatchedOutput:
    """Output in which patterns are searched for by another process: its lines wait for that.

    They are read in their order, so that the metrics are those of an `OutputReader` alone.
    """

    def __init__(self, output: OutputReader, matcher: PatternMatcher) -> None:
        self._output = output
        self._matcher = matcher

    def feed(self, data: bytes, now_s: float) -> None:
        """Take output in that has just come."""
        self._matcher.submit(self._output.cut(data), now_s)

    def timed_metrics(self) -> list[TimedMetrics]:
        """Return what has been searched since the last call."""
        return [
            TimedMetrics(self._metrics(searched), searched.received_s)
            for searched in self._matcher.searched()
        ]

    def close(self, now_s: float, is_late: Callable[[], bool]) -> Iterator[TimedMetrics]:
        """Yield the rest, once nothing more comes; without what is not searched when it is late."""
        self._matcher.submit(self._output.rest(), now_s)
        while self._matcher.waits_since_s is not None and not is_late():
            yield from self.timed_metrics()
            self._matcher.wait(0.05)
        self._matcher.give_up()
        yield from self.timed_metrics()
        self._output.metrics.close()
        self._matcher.close()

    def _metrics(self, searched: SearchedLines) -> list[Metric]:
        metrics: list[Metric] = []
        for place, line in enumerate(searched.lines):
            metrics += self._output.read(line, searched.matches.get(place, ()))
        return metrics
