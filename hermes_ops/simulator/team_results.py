"""The GPU time of each team of a pool in a simulation, and its fairness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hermes_ops.core.model import JobId
from hermes_ops.simulator.metrics import fairness, percentile
from hermes_ops.simulator.workload import JobOutcome, SimulationRun


@dataclass(frozen=True, slots=True)
class TeamResult:
    """The figures of one team's jobs, with the names of their JSON.

    Waiting: seconds without GPUs between submission and end. `fairness_*`: finish-time fairness of
    its finished jobs (`metrics.fairness`; 1 is fair, less is better), None without any.
    """

    team: str
    jobs: int
    mean_waiting_seconds: float
    p99_waiting_seconds: float
    gpu_seconds: float
    fairness_mean: float | None
    fairness_median: float | None
    fairness_p99: float | None

    def document(self) -> dict[str, float | int | None]:
        """Return the figures by name."""
        return {name: value for name, value in asdict(self).items() if name != "team"}


def team_results(run: SimulationRun) -> tuple[TeamResult, ...]:
    """Return the results of all teams by name; none where no job has a team."""
    by_team: dict[str, list[JobOutcome]] = {}
    for outcome in run.outcomes:
        by_team.setdefault(outcome.work.virtual_cluster, []).append(outcome)
    if set(by_team) <= {""}:
        return ()
    rho = fairness(run)
    return tuple(_result(team, by_team[team], rho) for team in sorted(by_team))


def _result(
    team: str, outcomes: Sequence[JobOutcome], fairness_of: dict[JobId, float]
) -> TeamResult:
    waited = [outcome.waited_s for outcome in outcomes]
    rho = [fairness_of[o.work.id] for o in outcomes if o.work.id in fairness_of]
    return TeamResult(
        team=team,
        jobs=len(outcomes),
        mean_waiting_seconds=sum(waited) / len(waited),
        p99_waiting_seconds=percentile(waited, 99) or 0.0,
        gpu_seconds=sum(outcome.service_gpu_s for outcome in outcomes),
        fairness_mean=sum(rho) / len(rho) if rho else None,
        fairness_median=percentile(rho, 50),
        fairness_p99=percentile(rho, 99),
    )


def jain_index(values: Sequence[float]) -> float | None:
    """Return Jain's fairness index, (sum x)^2 / (n sum x^2), in [1 / n, 1]; None without values.

    1: all are equal. Source: Jain, Chiu, Hawe, DEC-TR-301, 1984.
    """
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares > 0 else None
