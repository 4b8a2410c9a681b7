"""The sweeps of one decision: their shares of the GPUs, the sizes of their trials, the reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hermes_ops.core.amounts import figure, short_duration
from hermes_ops.core.model import Job, JobId, PastTrial, Plan, Reason, SweepId, Term
from hermes_ops.policies.elastic_frontrunner.chances import TrialSearch, searches
from hermes_ops.policies.elastic_frontrunner.trial_speeds import SearchMemory, Stretch
from hermes_ops.policies.frontrunner import next_depth
from hermes_ops.policies.toolbox.answer import Explain
from hermes_ops.policies.toolbox.sized_grants import SizingProblem

_FALLS_BACK = "a trial ahead of it falling back, or more free GPUs"


@dataclass(frozen=True, slots=True)
class SizedSweeps:
    """The sweeps that search for a best trial, at one decision; `search_of`: that of each trial."""

    problem: SizingProblem
    sweeps: Mapping[SweepId, TrialSearch]
    search_of: Mapping[JobId, TrialSearch]

    @classmethod
    def from_problem(
        cls, problem: SizingProblem, memory: SearchMemory, prior: Sequence[PastTrial]
    ) -> SizedSweeps:
        """Forecast the trials of all sweeps that have open ones."""
        sweeps = {
            sweep: TrialSearch.from_trials(problem, jobs, memory, prior)
            for sweep, jobs in searches(problem.snapshot).items()
        }
        search_of = {job.id: search for search in sweeps.values() for job in search.jobs}
        return cls(problem, sweeps, search_of)

    def __contains__(self, job: object) -> bool:
        return job in self.search_of

    def waiting(self) -> list[Job]:
        """Return the trials without GPUs, sweep by sweep, those of the greatest value first."""
        return [
            job
            for search in self.sweeps.values()
            for job in search.ranked([j for j in search.open if not j.holds_gpus])
        ]

    def sizes(
        self, others: Sequence[Job], best_of_others: Callable[[int], dict[JobId, int]]
    ) -> dict[JobId, int]:
        """Return the sizes of all trials on the sweeps' shares, and of the other jobs on the rest.

        What a sweep leaves free goes to the other jobs, and what these leave to the sweeps in turn.
        """
        if not self.sweeps:
            return best_of_others(self.problem.gpus)
        shares = divide(self._claims(others), self.problem.gpus)
        left, sizes = self.problem.gpus, dict[JobId, int]()
        for sweep, search in self.sweeps.items():
            chosen = search.best_sizes(shares[sweep])
            left -= sum(chosen.values())
            sizes |= chosen
        found = best_of_others(left)
        left -= sum(found.values())
        for search in self.sweeps.values() if others or len(self.sweeps) > 1 else ():
            had = sum(sizes[job.id] for job in search.open)
            chosen = search.best_sizes(had + left)
            left += had - sum(chosen.values())
            sizes |= chosen
        return self._with_kept(sizes | found, left)

    def _with_kept(self, sizes: dict[JobId, int], left: int) -> dict[JobId, int]:
        """Return the sizes; jobs that would lose GPUs that nobody else takes keep them."""
        for job in self.problem.jobs if left > 0 else ():
            held = self.problem.held(job)
            if not sizes[job.id] and 0 < held <= left:
                sizes[job.id] = held
                left -= held
        return sizes

    def _claims(self, others: Sequence[Job]) -> dict[SweepId, GpuClaim]:
        fixed: dict[SweepId, int] = {}
        for grant in self.problem.fixed:
            sweep = self.problem.snapshot.index[grant.job].sweep
            fixed[sweep] = fixed.get(sweep, 0) + len(grant.gpus)
        claims = {}
        for sweep, search in self.sweeps.items():
            pinned = sum(self.problem.held(j) for j in search.open if j.id in search.pinned)
            claims[sweep] = GpuClaim(search.open, fixed.get(sweep, 0), pinned)
        plain: dict[SweepId, list[Job]] = {}
        for job in others:
            plain.setdefault(job.sweep, []).append(job)
        for sweep, jobs in plain.items():
            name = SweepId(f"{sweep}, other jobs") if sweep in claims else sweep
            claims[name] = GpuClaim(jobs, 0 if sweep in claims else fixed.get(sweep, 0))
        return claims

    def explanation(
        self, sizes: Mapping[JobId, int], waiting: Sequence[Job], others: Explain
    ) -> Explain:
        """Return the reasons of one decision; `others` has those of the other jobs."""

        def explain(job: Job, on: bool) -> Reason:
            search = self.search_of.get(job.id)
            if search is None:
                return others(job, on)
            runner_up = next((other.id for other in waiting if other.id != job.id), None)
            return _reason(search, job, sizes.get(job.id, 0) if on else 0, on, runner_up)

        return explain

    def after(self, plan: Plan, memory: SearchMemory) -> SearchMemory:
        """Return the memory with the goals and the sizes of this plan."""
        held, before = self.problem.snapshot.held, dict(memory.goals)
        stretches = {job: s for job, s in dict(memory.stretches).items() if job in self.search_of}
        goals: dict[JobId, int] = {}
        for grant in plan.grants:
            job, search = self.problem.snapshot.index[grant.job], self.search_of.get(grant.job)
            if search is None:
                continue
            goal = before.get(job.id, 0)
            if job.id not in held or (goal <= job.last_step and job.preemptible):
                goal = search.goal(job) or next_depth(job, search.jobs)
            goals[job.id] = goal
            stretches[job.id] = _extended(stretches.get(job.id, ()), job.last_step, len(grant.gpus))
        return SearchMemory(tuple(sorted(goals.items())), tuple(sorted(stretches.items())))


def _extended(stretches: tuple[Stretch, ...], step: int, gpus: int) -> tuple[Stretch, ...]:
    earlier = tuple(stretch for stretch in stretches if stretch.begin < step)
    if earlier and earlier[-1].gpus == gpus:
        return earlier
    return (*earlier, Stretch(step, gpus))


def _reason(search: TrialSearch, job: Job, size: int, on: bool, runner_up: JobId | None) -> Reason:
    verb = ("runs" if job.holds_gpus else "starts") if on else "waits"
    place = f" on {size} GPUs" if size > 1 else ""
    change = "what it shows next" if on else _FALLS_BACK
    forecast = search.forecast(job)
    if forecast is None:
        return Reason(f"{verb}{place}: not compared now", (), runner_up, change)
    chance, left_s, chance_per_s = forecast
    speed = search.speeds.speed(size or job.min_gpus)
    left_s /= speed
    terms = (
        Term("chance_to_be_best", chance),
        Term("seconds_left", left_s),
        Term("chance_per_second", chance_per_s * speed),
    )
    text = f"{verb}{place}: best with chance {figure(chance)}"
    return Reason(f"{text}, {short_duration(left_s)} from its end", terms, runner_up, change)


@dataclass(frozen=True, slots=True)
class GpuClaim:
    """What the open jobs of one sweep could use.

    `fixed` GPUs are held by jobs that must not be changed: they count, but are not shared out.
    `pinned` ones it keeps in any case.
    """

    jobs: Sequence[Job]
    fixed: int = 0
    pinned: int = 0

    @property
    def weight(self) -> float:
        """The weight of the first job."""
        return self.jobs[0].weight if self.jobs else 1.0

    def units(self) -> Iterator[int]:
        """Yield by how many GPUs it grows, in turn: by the least size of each job, then one by one.

        The least sizes that make up the pinned GPUs are left out.
        """
        covered = self.pinned
        for job in self.jobs:
            if covered >= job.min_gpus:
                covered -= job.min_gpus
            else:
                yield job.min_gpus
        more = sum(job.max_gpus - job.min_gpus for job in self.jobs)
        yield from (1 for _ in range(more - covered))


def divide(claims: Mapping[SweepId, GpuClaim], gpus: int) -> dict[SweepId, int]:
    """Return the number of GPUs of each claim, its pinned ones among them: at most `gpus` in all.

    By turns: the claim with the smallest (GPUs + 1) / weight takes its next unit, of equals the
    first one; a unit that does not fit is passed over. So `frontrunner` shares GPUs as well.
    """
    share = {sweep: claim.pinned for sweep, claim in claims.items()}
    left = gpus - sum(share.values())
    units = {sweep: claim.units() for sweep, claim in claims.items()}
    while left > 0 and units:
        sweep = min(units, key=lambda s: (share[s] + claims[s].fixed + 1) / claims[s].weight)
        unit = next(units[sweep], None)
        if unit is None:
            del units[sweep]
        elif unit <= left:
            share[sweep] += unit
            left -= unit
    return share
