"""The report's paragraph on the policy, from figures that were counted or replayed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from hermes_ops.core.amounts import counted, duration
from hermes_ops.core.summary import CurvePoints, Segment, SweepSummary
from hermes_ops.core.training import STOPPED, training
from hermes_ops.report.background import Alternative, Background, Range


def story(summary: SweepSummary, background: Background, switching: Range) -> tuple[str, ...]:
    """Return the paragraph, a sentence an entry; `switching`: from `switching_gpu_s`."""
    return (
        *_what_it_did(summary, background),
        *_switching(summary, switching),
        *_stopped_early(summary, background),
        *_time_to_best(summary, background),
        *_replays(background),
    )


def _what_it_did(summary: SweepSummary, background: Background) -> Iterator[str]:
    begun = sum(t.segments > 0 for t in summary.trials)
    who = f"The policy {background.policy}" if background.policy else "The policy"
    slots = "" if summary.pool_slots is None else f" on {counted(summary.pool_slots, 'slot')}"
    text = f"{who} gave GPUs to {begun} of {counted(len(summary.trials), 'trial')}{slots}"
    stopped = [t for t in summary.trials if t.preemptions]
    if not stopped:
        yield f"{text} and stopped none of them for another."
        return
    times = sum(t.preemptions for t in stopped)
    yield (
        f"{text}. It stopped {counted(len(stopped), 'trial')} {counted(times, 'time')} in all, so "
        "that others could train, to go on later from a checkpoint."
    )


def _switching(summary: SweepSummary, switching: Range) -> Iterator[str]:
    whole = sum(t.gpu_seconds for t in summary.trials)
    if not any(t.preemptions for t in summary.trials) or whole <= 0:
        return
    part = " to ".join(dict.fromkeys(f"{100 * s / whole:.1f}" for s in switching))
    yield (
        f"Stopping and resuming cost {number_range(switching)} GPU-seconds, {part} % of the "
        f"{_number(whole)} that the trials held."
    )


def _stopped_early(summary: SweepSummary, background: Background) -> Iterator[str]:
    ended = [t for t in summary.trials if t.state == "stopped_early"]
    if not ended:
        return
    were = "was" if len(ended) == 1 else "were"
    text = f"{counted(len(ended), 'trial')} {were} ended early, by early stopping or by the policy"
    if background.config is None:
        yield f"{text}."
        return
    planned = background.config.budget.max_epochs * len(ended)
    spared = max(0, planned - sum(t.steps for t in ended))
    yield f"{text}: {spared} of {_their(len(ended))} {counted(planned, 'step')} were not trained."


def _their(number: int) -> str:
    return "its" if number == 1 else "their"


def _time_to_best(summary: SweepSummary, background: Background) -> Iterator[str]:
    best_s = background.time_to_best_s
    if background.best_finished is None or best_s is None:
        if not any(t.state == "finished" and t.best is not None for t in summary.trials):
            yield "No trial has finished with a value, so there is no time to the best one."
        return
    yield (
        f"The best of the finished trials, {background.best_finished}, had ended "
        f"{duration(best_s)} after the sweep's start."
    )
    for alternative in background.alternatives:
        yield _compared(alternative, best_s)


def _compared(alternative: Alternative, best_s: float) -> str:
    """Return how much sooner or later than the sweep the replay had its best trial."""
    text = f"Replayed under {alternative.policy}, the best trial ends"
    bounds_s = alternative.time_to_best_s
    if bounds_s is None:
        return f"Replayed under {alternative.policy}, no trial comes to its end."
    low, high = bounds_s[0] - best_s, bounds_s[1] - best_s
    when = " to ".join(dict.fromkeys(duration(s) for s in bounds_s))
    return f"{text} after {when}: {_difference(low, high)}."


def _difference(low_s: float, high_s: float) -> str:
    if max(abs(low_s), abs(high_s)) < 0.5:
        return "as soon as in this sweep"
    if low_s < 0 < high_s:
        return f"between {duration(-low_s)} sooner and {duration(high_s)} later than in this sweep"
    ends = sorted((abs(low_s), abs(high_s)))
    span = " to ".join(dict.fromkeys(duration(s) for s in ends))
    return f"{span} {'later' if high_s > 0 else 'sooner'} than in this sweep"


def _replays(background: Background) -> Iterator[str]:
    if background.no_alternatives:
        yield f"No replay: {background.no_alternatives}"
    if not background.alternatives:
        return
    text = "Replays are simulations of the recorded curves, not runs"
    cut = background.alternatives[0].cut_short
    needed = {number for a in background.alternatives for number in a.needed}
    if not cut:
        yield f"{text}."
        return
    what = f"{counted(len(cut), 'trial')} did not come to the end of {_their(len(cut))} curve"
    if needed:
        yield f"{text}; {what}, and where a replay needs the rest its figures are bounds."
    else:
        yield f"{text}; {what}, and no replay needs the rest."


def number_range(bounds: Range | None) -> str:
    """Return `12`, `12 to 15`, or `never`."""
    if bounds is None:
        return "never"
    return " to ".join(dict.fromkeys(_number(value) for value in bounds))


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.1f}"


def switching_gpu_s(
    curves: Mapping[int, CurvePoints], segments: Sequence[Segment], background: Background
) -> Range:
    """Return the minimum and maximum GPU-seconds that stopping and resuming trials have cost.

    The cost of a stopped segment is its leaving: at least a checkpoint of the trial, at most the
    time since the decision or its last value. The cost of a resuming segment is the time before it
    trained again, by `core.training`; where that is unknown, at least its measured start, at most
    all until its first value. A segment without a checkpoint counts whole. Time in which a GPU was
    free between two trials does not count.
    """
    low = high = 0.0
    for trial in sorted({s.trial for s in segments}):
        ordered = sorted((s for s in segments if s.trial == trial), key=lambda s: s.start_s)
        costs = (
            *_resumes(curves.get(trial, ()), ordered),
            *_leaves(trial, curves, ordered, background),
        )
        low += sum(least for least, _ in costs)
        high += sum(most for _, most in costs)
    return low, high


def _resumes(points: CurvePoints, segments: Sequence[Segment]) -> Iterator[Range]:
    """Yield the GPU-seconds before training of each segment after a stopped one."""
    leads_s = training(points, segments).leads_s
    for (earlier, later), lead_s in zip(pairwise(segments), leads_s[1:], strict=True):
        if earlier.outcome not in STOPPED or later.outcome == "interrupted":
            continue
        inside = _values_s(points, later)
        until_s = min(inside, default=later.end_s if later.end_s is not None else later.start_s)
        most_s = max(0.0, until_s - later.start_s)
        least_s = min(most_s, (later.startup_s or 0.0) + (later.restore_s or 0.0))
        if lead_s is not None:
            least_s = most_s = min(lead_s, most_s)
        yield least_s * len(later.gpus), most_s * len(later.gpus)


def _leaves(
    trial: int,
    curves: Mapping[int, CurvePoints],
    segments: Sequence[Segment],
    background: Background,
) -> Iterator[Range]:
    """Yield the GPU-seconds of leaving of each stopped segment; all of one without checkpoint."""
    checkpoint_s = background.checkpoint_s.get(trial, 0.0)
    stops_s = [at_s for number, at_s in background.stops if number == trial]
    for segment in segments:
        if segment.outcome not in STOPPED or segment.end_s is None:
            continue
        length_s = max(0.0, segment.end_s - segment.start_s)
        if segment.outcome == "interrupted":
            yield length_s * len(segment.gpus), length_s * len(segment.gpus)
            continue
        values_s = _values_s(curves.get(trial, ()), segment)
        before_s = [at for at in (*values_s, *stops_s) if segment.start_s <= at <= segment.end_s]
        most_s = segment.end_s - max(before_s, default=segment.start_s)
        yield min(checkpoint_s, most_s) * len(segment.gpus), most_s * len(segment.gpus)


def _values_s(points: CurvePoints, segment: Segment) -> list[float]:
    """Return the times in Unix seconds at which the segment reported values."""
    end_s = float("inf") if segment.end_s is None else segment.end_s
    return [ms / 1_000 for _, _, ms in points if segment.start_s <= ms / 1_000 <= end_s]
