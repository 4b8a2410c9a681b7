"""One table of docs/comparison.md: its command, and the figures that the command prints.

Figures are kept in bench/results/comparison as soon as a policy is done, and are taken from there
as long as program and data are the same: a call that was interrupted goes on where it was.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import cache
from hashlib import sha256
from pathlib import Path
from time import monotonic

from bench.comparison_version import version
from hermes_ops.cli.simulating import Asked, contenders, gpus_of
from hermes_ops.policies import POLICIES
from hermes_ops.simulator.bounds import OracleBest
from hermes_ops.simulator.compare import Comparison, Result, compare, workers
from hermes_ops.simulator.metrics import Metrics

ROOT = Path(__file__).resolve().parents[1]
KEPT = Path(__file__).parent / "results" / "comparison"
JOBS = int(os.environ.get("HERMES_COMPARE_JOBS", "0")) or None


class Take(Enum):
    """Which kept figures are taken."""

    SAME = "those of this program and data; others are computed"
    KNOWN = "all that are known, of whatever program; others are computed"
    KEPT = "all that are known; `NotKept` for others"


class NotKept(LookupError):
    """Figures that are not known, and are not to be computed."""


def data() -> Path:
    """Where the traces and the curves are."""
    return Path(os.environ.get("HERMES_DATA", ROOT / "examples"))


@dataclass(frozen=True, slots=True)
class Case:
    """One `hermes compare`, and the text of its command."""

    file: str  # "traces/x.csv" or "curves/x.npz"
    gpus: str
    policies: tuple[str, ...]
    options: tuple[str, ...] = ()
    seeds: int = 1
    good: int | None = None
    prior_sweeps: int | None = None
    switch_seconds: float = 0.0
    guards: bool = False

    @property
    def command(self) -> str:
        """What prints the same figures."""
        kind = "trace" if self.file.startswith("traces/") else "curves"
        words = ["hermes compare", f"--{kind} examples/{self.file}"]
        words.append(f"--nodes {self.gpus}" if "x" in self.gpus else f"--gpus {self.gpus}")
        words.append(f"--policies {','.join(self.policies)}")
        words += [f"--policy-option {option}" for option in self.options]
        if kind == "curves":
            words.append(f"--seeds {self.seeds}")
        for name in ("good", "prior_sweeps"):
            if getattr(self, name) is not None:
                words.append(f"--{name.replace('_', '-')} {getattr(self, name)}")
        if self.switch_seconds:
            words.append(f"--switch-seconds {self.switch_seconds:g}")
        if self.guards:
            words.append("--guards")
        return " ".join(words)

    def known(self) -> Case:
        """The case without the policies that there are not (yet)."""
        there = tuple(p for p in self.policies if p in POLICIES or p == OracleBest.name)
        options = tuple(o for o in self.options if o.partition(".")[0] in there)
        return replace(self, policies=there, options=options)

    def results(self, take: Take) -> Comparison:
        """The comparison, policy by policy."""
        parts = [self._one(policy, take) for policy in self.policies]
        results = tuple(result for part in parts for result in part.results)
        return replace(parts[0], policies=self.policies, results=results)

    def _one(self, policy: str, take: Take) -> Comparison:
        options = tuple(o for o in self.options if o.startswith(f"{policy}."))
        alone = replace(self, policies=(policy,), options=options)
        kept = KEPT / f"{sha256(alone.command.encode()).hexdigest()[:16]}.json"
        program = version(policy, data() / self.file)
        found = _read(kept, program if take is Take.SAME else None)
        if found is None and take is Take.KEPT:
            raise NotKept(alone.command)
        if found is None:
            began_s = monotonic()
            found = alone._computed(policy)
            _write(kept, found, alone.command, program)
            print(f"{monotonic() - began_s:7.1f} s  {alone.command}", file=sys.stderr, flush=True)
        return found

    def _computed(self, policy: str) -> Comparison:
        path, trace = data() / self.file, self.file.startswith("traces/")
        asked = Asked(
            trace=path if trace else None,
            curves=None if trace else path,
            good=self.good,
            prior_sweeps=self.prior_sweeps,
            switch_seconds=self.switch_seconds,
        )
        wide = "x" in self.gpus
        pool = gpus_of(None if wide else int(self.gpus), self.gpus if wide else None)
        chosen = contenders(policy, self.options, guards=self.guards)
        several = _workers() if self.seeds > 1 and JOBS != 1 else None
        return compare(asked.task(), pool, chosen, range(self.seeds), jobs=JOBS, pool=several)


@cache
def _workers() -> Executor:
    """The same processes for all tables: each has read its modules and data once."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(workers(JOBS))


def _write(path: Path, found: Comparison, command: str, program: str) -> None:
    """Keep the figures, whole or not at all; curves of regret are not kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    results = [
        {
            "policy": r.policy,
            "seed": r.seed,
            "metrics": asdict(r.metrics),
            "completions_s": r.completions_s[:5],
        }
        for r in found.results
    ]
    facts = {"command": command, "version": program, "workload": found.workload, "gpus": found.gpus,
             "seeds": found.seeds, "policies": found.policies, "results": results}  # fmt: skip
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(facts))
    whole.replace(path)


def _read(path: Path, program: str | None) -> Comparison | None:
    """The kept figures; None when there are none, or they are not of this `program`."""
    facts = json.loads(path.read_text()) if path.exists() else {}
    if not facts or program not in (None, facts.get("version")):
        return None
    results = tuple(
        Result(r["policy"], r["seed"], Metrics(**r["metrics"]), tuple(r["completions_s"]), ())
        for r in facts["results"]
    )
    seeds, policies = tuple(facts["seeds"]), tuple(facts["policies"])
    return Comparison(facts["workload"], facts["gpus"], seeds, policies, results)
