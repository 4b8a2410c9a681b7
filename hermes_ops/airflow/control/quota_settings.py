"""The quota of a pool: its teams and limits, who set it and when.

`HERMES_HOME/quota-<pool>.json` holds it. Without that file the pool has no quota: every sweep
counts alike but for its weight. A file that says so removes a quota; one that vanishes does not.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from hermes_ops.airflow.control.policy_settings import read_object, valid_time_s
from hermes_ops.airflow.control.sweep_state import owner
from hermes_ops.airflow.dag_teams import dag_teams, is_multi_team
from hermes_ops.airflow.folders import home
from hermes_ops.airflow.metadata import Metadata
from hermes_ops.airflow.metadata_rows import RunRow
from hermes_ops.airflow.records import SegmentRecord, SweepRecord, decode
from hermes_ops.config.pool_quota import WITHOUT_TEAMS, PoolQuota, parse_quota, refuse_class
from hermes_ops.core.gpu_time import DecayedUse, GpuTime, month_start_s
from hermes_ops.core.guards import Quantum
from hermes_ops.core.model import Policy
from hermes_ops.core.options import GuardOptions
from hermes_ops.core.quota import Quota
from hermes_ops.core.reclaim_notice import Notices
from hermes_ops.core.within_quota import QuotaMemory, WithinQuota
from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.policies import compares_trials, sizes_jobs
from hermes_ops.trial.files import write_json

log = logging.getLogger("hermes.controller")

_RESTORE = "Set it again with `hermes pool quota FILE`, or remove it with --remove."

_NO_TEAMS = (
    "The pool's quota names teams of Airflow, which has none: their `airflow_team` does not count. "
    "Set `core.multi_team`, or list the users of the teams."
)


@dataclass(frozen=True, slots=True)
class QuotaSettings:
    """The quota of a pool; `by` and `at_s` say who set it, and when."""

    quota: PoolQuota
    by: str = field(default="", compare=False)
    at_s: float = field(default=0.0, compare=False)

    @classmethod
    def load(cls, path: Path) -> QuotaSettings | None:
        """Return the settings of the file, None if it is not there or says that there is no quota.

        Raise HermesError if it is malformed.

        A ConfigError names the keys that are wrong.
        """
        try:
            text = path.read_text()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise HermesError(f"{path} cannot be read ({error}): set the quota again.") from error
        value = read_object(text, str(path))
        if value.get("quota", value) is None:
            return None
        quota = parse_quota(value.get("quota"), str(path))
        return cls(quota, str(value.get("by") or ""), valid_time_s(value.get("at_s")))

    @classmethod
    def of_pool(cls, pool: str) -> QuotaSettings | None:
        """Return the settings of that pool in this home, as `load` does."""
        return cls.load(cls.file(pool))

    @staticmethod
    def file(pool: str) -> Path:
        """Return the path of the quota of that pool in this home."""
        return home() / f"quota-{pool}.json"

    def write(self, path: Path) -> None:
        """Write the file durably; a running controller adopts it in its next round."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, self.document(), durable=True)

    @staticmethod
    def remove(path: Path, by: str, at_s: float) -> None:
        """Write durably that the pool has no quota; a running controller adopts that as well."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"quota": None, "by": by, "at_s": at_s}, durable=True)

    def document(self) -> dict[str, Any]:
        """Return what the file has."""
        return {"quota": self.quota.model_dump(mode="json"), "by": self.by, "at_s": self.at_s}


def refuse_class_in_pool(pool: str, name: str | None, user: str, source: str) -> None:
    """Raise ConfigError if the quota of the pool does not let that user start such a sweep.

    Without a quota each class is allowed. While the quota is malformed nobody is refused here: the
    controller keeps the one in force.
    """
    try:
        settings = QuotaSettings.of_pool(pool)
    except HermesError:
        return
    if settings is not None:
        refuse_class(settings.quota, name, user, source)


@dataclass(slots=True)
class QuotaInForce:
    """The quota that a controller keeps, and what the teams have used.

    While its file is malformed, or if it vanishes, the quota in force stays. What the teams used
    before is read meanwhile, as that may take long, and counts once it is there.
    """

    path: Path
    past_use: Callable[[PoolQuota], Future[PastUse]] | None = None
    use: DecayedUse = field(default_factory=DecayedUse)
    time: GpuTime = field(default_factory=GpuTime)
    notices: Notices = ()
    settings: QuotaSettings | None = None
    quota: Quota | None = None
    _version: tuple[int, int, int] | None = None
    _was_read: bool = False
    _scaled_to: int | None = None
    _reading: Future[PastUse] | None = None
    _is_unanswered: bool = False

    def refresh(self) -> bool:
        """Read the file if it has changed; return whether another quota is in force from now on.

        Raise HermesError if the first file that is read is malformed: there is no quota to keep.
        """
        self._add_past_use()
        version = _version(self.path)
        if self._was_read and version == self._version:
            return False
        if version is None and self.settings is not None:
            self._version = version
            log.error("The pool's quota stays as it is: %s is gone. %s", self.path, _RESTORE)
            return False
        try:
            settings = QuotaSettings.load(self.path)
        except HermesError as error:
            if not self._was_read:
                raise
            self._version = version
            log.error("The pool's quota stays as it is: %s", error)
            return False
        self._version, self._was_read = version, True
        if settings == self.settings:
            return False
        self._adopt(settings)
        return True

    @property
    def spec(self) -> PoolQuota:
        """The quota as its file has it; one without teams where there is none."""
        return WITHOUT_TEAMS if self.settings is None else self.settings.quota

    def _adopt(self, settings: QuotaSettings | None) -> None:
        self.settings, self._scaled_to, self.notices = settings, None, ()
        if settings is None:
            self.quota, self.use, self.time = None, DecayedUse(), GpuTime()
            self._reading = None
            log.info("The pool has no quota from now on")
            return
        self.quota, self.use = settings.quota.quota(), DecayedUse()
        self._reading = None if self.past_use is None else self.past_use(settings.quota)
        self.time = GpuTime(is_known=self._reading is None)
        self._add_past_use()
        teams = ", ".join(f"{team.name} {team.guaranteed}" for team in self.quota.teams)
        if settings.quota.team_of_airflow_team and not is_multi_team():
            log.warning("%s", _NO_TEAMS)
        by = f", set by {settings.by}" if settings.by else ""
        log.info("The pool's quota guarantees GPUs to these teams: %s%s", teams or "none", by)

    def _add_past_use(self) -> None:
        """Add what the teams used before, once it has been read; nothing if it cannot be.

        While Airflow's database does not answer, it is read again.
        """
        if self._reading is None or self.quota is None or not self._reading.done():
            return
        reading, self._reading = self._reading, None
        try:
            past = reading.result()
            self.use = self.use.plus(past.teams, self.quota.half_life_s)
            self.time = self.time.plus(past.users)
        except Unavailable as error:
            self._read_again(error)
            return
        except HermesError as error:
            log.warning("What the teams used before does not count: %s", error)
        except Exception:  # a record of another release: the quota holds without it
            log.exception("What the teams used before does not count")
        self.time, self._is_unanswered = replace(self.time, is_known=True), False

    def _read_again(self, error: Unavailable) -> None:
        """Read what was used until now, and count from now on: nothing counts twice."""
        if self.past_use is None or self.settings is None:
            return
        if not self._is_unanswered:
            log.warning("What the teams used before is read again: %s", error)
        self._is_unanswered = True
        self.use, self.time = DecayedUse(), GpuTime(is_known=False)
        self._reading = self.past_use(self.settings.quota)

    def enclose(
        self,
        policy: Policy[Any],
        memory: Any,  # noqa: ANN401 - any policy's memory
        guards: GuardOptions,
    ) -> tuple[Policy[Any], Any]:
        """Return the guarded policy within the quota, and its memory; as they are without one."""
        if self.quota is None:
            return policy, memory
        quantum = Quantum(guards.k, guards.default_switch_s)
        compares, sizes = compares_trials(policy.name), sizes_jobs(policy.name)
        within = WithinQuota(policy, self.quota, quantum, compares=compares, sizes=sizes)
        return within, QuotaMemory(memory, self.use, self.time, self.notices)

    def release(self, memory: Any) -> Any:  # noqa: ANN401 - any policy's memory
        """Keep what a memory of `enclose` has of teams; return the policy's own part."""
        if not isinstance(memory, QuotaMemory):
            return memory
        self.use, self.time, self.notices = memory.use, memory.time, memory.notices
        return memory.inner

    def scaling(self, gpus: int) -> str:
        """Say that guarantees are scaled to a pool of that many GPUs; empty where they are not.

        It is logged once until another quota, or enough GPUs, are there.
        """
        quota = self.quota
        if quota is None or gpus == 0:
            return ""
        scaled = quota.scaled(gpus)
        if scaled is quota:
            self._scaled_to = None
            return ""
        teams = ", ".join(f"{team.name or 'others'} {team.guaranteed}" for team in scaled.everyone)
        promised = sum(team.guaranteed for team in quota.everyone)
        text = (
            f"The pool has {gpus} GPUs for trials, fewer than the {promised} that its quota "
            f"guarantees: the guarantees are scaled to {teams}. Add GPUs or guarantee fewer."
        )
        if self._scaled_to is None:
            log.warning("%s", text)
        self._scaled_to = gpus
        return text


def _version(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when the file is replaced; None where it is not to be seen."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


HALF_LIVES = 5
"""Sweeps that ended earlier count less than 1 / 32, and are left out."""

MOST_SWEEPS = 1_000
"""The newest sweeps whose use counts for teams; for limits of GPU-hours all of the month count."""


class PastUse(NamedTuple):
    """The decayed use of teams, and the GPU time of users on this day and in this month."""

    teams: DecayedUse
    users: GpuTime


def past_use(metadata: Metadata, pool: str, quota: PoolQuota, now_s: float) -> PastUse:
    """Return what each team and limited user of the quota has used in the pool until `now_s`.

    That is Unix time. Unavailable while Airflow's database does not answer.
    """
    core = quota.quota()
    half_life_s, budgets = core.half_life_s, core.budget_of_user
    since_s = max(0.0, now_s - HALF_LIVES * half_life_s)
    most: int | None = MOST_SWEEPS
    if core.limits_gpu_time:
        since_s, most = min(since_s, month_start_s(now_s)), None
    airflow_team_of = dag_teams(metadata, quota)
    with metadata.single_connection():
        sweeps = metadata.sweeps_since(since_s, most)
        of_runs = [
            (past.run.dag_id, list(_spans(metadata, past.run, pool, now_s))) for past in sweeps
        ]
    spans = [span for _, run_spans in of_runs for span in run_spans]
    by_team = (
        (quota.team_of(user, airflow_team_of.get(dag, "")), start, end, gpus)
        for dag, run_spans in of_runs
        for user, start, end, gpus in run_spans
    )
    return PastUse(
        DecayedUse.from_spans(by_team, half_life_s, now_s),
        GpuTime.from_spans((span for span in spans if span[0] in budgets), now_s),
    )


def _spans(
    metadata: Metadata, run: RunRow, pool: str, now_s: float
) -> Iterator[tuple[str, float, float, int]]:
    """Yield owner, start, end and GPUs of each time for which trials of the sweep held GPUs."""
    record = decode(SweepRecord, run.sweep)
    if record is None or record.config.get("pool", "gpus") != pool:
        return
    user = owner(run, record.config.get("owner"))
    for text in metadata.segments(run, record.trial_task):
        segment = decode(SegmentRecord, text)
        if segment is None:
            continue
        earlier = zip(segment.earlier_spans, segment.earlier_sizes, strict=False)
        recorded = zip(segment.held_spans, segment.sizes, strict=False)
        for (start_s, end_s), gpus in chain(earlier, recorded):
            yield user, start_s, end_s, gpus
        if segment.running and segment.began_s is not None:  # a pod that waits holds none
            yield user, segment.began_s, now_s, len(segment.gpus)
