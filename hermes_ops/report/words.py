"""What the policy did, in plain sentences: figures that were counted or replayed, nothing else."""

from __future__ import annotations

from collections.abc import Iterator

from hermes_ops.core.amounts import duration
from hermes_ops.core.summary import SweepSummary
from hermes_ops.report.background import Alternative, Background, Range


def story(summary: SweepSummary, background: Background, switching: Range) -> tuple[str, ...]:
    """Return the paragraph, a sentence an entry; `switching` as `switching_gpu_s` counts it."""
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
    slots = "" if summary.pool_slots is None else f" on {count(summary.pool_slots, 'slot')}"
    text = f"{who} gave GPUs to {begun} of {count(len(summary.trials), 'trial')}{slots}"
    stopped = [t for t in summary.trials if t.preemptions]
    if not stopped:
        yield f"{text} and stopped none of them for another."
        return
    times = sum(t.preemptions for t in stopped)
    yield (
        f"{text}. It stopped {count(len(stopped), 'trial')} {count(times, 'time')} in all, so that "
        "others could train, to go on later from a checkpoint."
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
    text = f"{count(len(ended), 'trial')} {were} ended early, by early stopping or by the policy"
    if background.config is None:
        yield f"{text}."
        return
    planned = background.config.budget.max_epochs * len(ended)
    spared = max(0, planned - sum(t.steps for t in ended))
    yield f"{text}: {spared} of {_their(len(ended))} {count(planned, 'step')} were not trained."


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
    """How much sooner or later than the sweep itself the replay had its best trial."""
    text = f"Replayed under {alternative.policy}, the best trial ends"
    found = alternative.time_to_best_s
    if found is None:
        return f"Replayed under {alternative.policy}, no trial comes to its end."
    low, high = found[0] - best_s, found[1] - best_s
    when = " to ".join(dict.fromkeys(duration(s) for s in found))
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
    what = f"{count(len(cut), 'trial')} did not come to the end of {_their(len(cut))} curve"
    if needed:
        yield f"{text}; {what}, and where a replay needs the rest its figures are bounds."
    else:
        yield f"{text}; {what}, and no replay needs the rest."


def count(number: int, noun: str) -> str:
    """Return `1 trial`, `2 trials`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def number_range(found: Range | None) -> str:
    """Return `12`, `12 to 15`, or `never`."""
    if found is None:
        return "never"
    return " to ".join(dict.fromkeys(_number(value) for value in found))


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.1f}"
