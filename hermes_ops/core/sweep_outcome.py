"""The outcome of a sweep: its state, as all views of it say it, and which trials failed alike."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FINISHED, FAILED, CANCELLED, SKIPPED = "finished", "failed", "cancelled", "skipped"
ENDED_STATES = (FINISHED, FAILED, CANCELLED, SKIPPED)
_OF_AIRFLOW = {"success": FINISHED, "failed": FAILED, "skipped": SKIPPED}


def final_state(*, closed: bool, failed: bool, has_best: bool) -> str:
    """Return the state of a sweep that has ended.

    `closed`: it was ended before its last trial, by a person or a budget. `failed`: because its
    first trials failed alike. `has_best`: a trial can be its best one.
    """
    if closed:
        return CANCELLED
    return FINISHED if has_best and not failed else FAILED


def sweep_state(airflow: str | None, recorded: str | None) -> str:
    """Return the state of a sweep from Airflow's state of its run and from MLflow's tag.

    Airflow knows whether it has ended, and MLflow as what: a sweep that was cancelled with a best
    trial is a success for Airflow, as the tasks behind it may run.
    """
    if airflow not in _OF_AIRFLOW:
        return airflow or "running"
    if airflow != "skipped" and recorded in ENDED_STATES:
        return recorded
    return _OF_AIRFLOW[airflow]


_CHANGING = re.compile(
    r"0x[0-9a-fA-F]+"  # addresses
    r"|\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b"  # ids
    r"|(?:(?<!\w)[-+])?\d+(?:[.,:]\d+)*(?:[eE][-+]?\d+)?"  # numbers, times
)
_MOST_NUMBERS = 12


@dataclass(frozen=True, slots=True)
class FailedAlike:
    """Trials that failed in the same way, by number, and the reason of the first of them."""

    numbers: tuple[int, ...]
    reason: str

    def words(self, *, all_of_them: bool) -> str:
        """Return it as a sentence; the numbers are left out where these are all failed trials."""
        if len(self.numbers) == 1:
            return f"Trial {self.numbers[0]} failed: {self.reason}"
        which = "" if all_of_them else f" ({_listed(self.numbers)})"
        return f"{len(self.numbers)} trials failed alike{which}: {self.reason}"


def normalised(reason: str) -> str:
    """Return the reason without numbers, ids and addresses, on one line."""
    return " ".join(_CHANGING.sub("#", reason).split())


def alike(failures: Iterable[tuple[int, str]]) -> tuple[FailedAlike, ...]:
    """Group failed trials (number, reason), the largest group first, then by number."""
    groups: dict[str, list[tuple[int, str]]] = {}
    for number, reason in sorted(failures):
        groups.setdefault(normalised(reason), []).append((number, reason))
    same_reason = [
        FailedAlike(tuple(n for n, _ in group), group[0][1]) for group in groups.values()
    ]
    return tuple(sorted(same_reason, key=lambda g: (-len(g.numbers), g.numbers)))


def failure_lines(failures: Iterable[tuple[int, str]], most: int = 5) -> list[str]:
    """Return a line for each kind of failure, the most frequent first, at most so many."""
    groups = alike(failures)
    lines = [g.words(all_of_them=len(groups) == 1) for g in groups[:most]]
    rest = sum(len(g.numbers) for g in groups[most:])
    if rest:
        lines.append(f"{rest} more {'trial' if rest == 1 else 'trials'} failed in other ways")
    return lines


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MOST_NUMBERS]))
    return f"{shown}, …" if len(numbers) > _MOST_NUMBERS else shown
