"""One table of docs/comparison.md: its command, and the figures that the command prints.

Figures are kept in bench/results/comparison, policy by policy, so that a section can be written
again without its simulations.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from time import monotonic

from hermes_ops.cli.simulating import Asked, contenders, gpus_of
from hermes_ops.policies import POLICIES
from hermes_ops.simulator.bounds import OracleBest
from hermes_ops.simulator.compare import Comparison, Result, compare
from hermes_ops.simulator.metrics import Metrics

ROOT = Path(__file__).resolve().parents[1]
KEPT = Path(__file__).parent / "results" / "comparison"
JOBS = int(os.environ.get("HERMES_COMPARE_JOBS", "0")) or None


_FRESH: set[str] = set()  # computed by this process: several tables may show the same figures


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
        return " ".join(words)

    def known(self) -> Case:
        """The case without the policies that there are not (yet)."""
        there = tuple(p for p in self.policies if p in POLICIES or p == OracleBest.name)
        options = tuple(o for o in self.options if o.partition(".")[0] in there)
        return replace(self, policies=there, options=options)

    def results(self, *, reuse: bool) -> Comparison:
        """The comparison; with `reuse` each policy from an earlier call where there is one."""
        parts = [self._one(policy, reuse) for policy in self.policies]
        results = tuple(result for part in parts for result in part.results)
        return replace(parts[0], policies=self.policies, results=results)

    def _one(self, policy: str, reuse: bool) -> Comparison:
        options = tuple(o for o in self.options if o.startswith(f"{policy}."))
        alone = replace(self, policies=(policy,), options=options)
        kept = KEPT / f"{sha256(alone.command.encode()).hexdigest()[:16]}.json"
        if kept.exists() and (reuse or kept.name in _FRESH):
            return _read(kept)
        began_s = monotonic()
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
        chosen = contenders(policy, options, guards=False)
        found = compare(asked.task(), pool, chosen, range(self.seeds), jobs=JOBS)
        _write(kept, found, alone.command)
        _FRESH.add(kept.name)
        print(f"{monotonic() - began_s:7.1f} s  {alone.command}", file=sys.stderr, flush=True)
        return found


def _write(path: Path, found: Comparison, command: str) -> None:
    """Keep the figures, and which seeds they are of; curves of regret are not kept."""
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
    facts = {"command": command, "workload": found.workload, "gpus": found.gpus,
             "seeds": found.seeds, "policies": found.policies, "results": results}  # fmt: skip
    path.write_text(json.dumps(facts))


def _read(path: Path) -> Comparison:
    facts = json.loads(path.read_text())
    results = tuple(
        Result(r["policy"], r["seed"], Metrics(**r["metrics"]), tuple(r["completions_s"]), ())
        for r in facts["results"]
    )
    seeds, policies = tuple(facts["seeds"]), tuple(facts["policies"])
    return Comparison(facts["workload"], facts["gpus"], seeds, policies, results)
