"""One table of docs/comparison.md: its command, and the figures that the command prints.

Figures are stored in bench/results/comparison as soon as a policy is done, and reused as long as
program and data are the same: an interrupted call resumes from them.
"""

from __future__ import annotations

import ast
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

from hermes_ops.cli.simulation_options import QUOTA_SUFFIX, SimulationOptions, contenders, gpus_of
from hermes_ops.policies import POLICIES
from hermes_ops.simulator.comparison import Comparison, PolicyResult, compare, workers
from hermes_ops.simulator.metrics import Metrics, TeamResult
from hermes_ops.simulator.oracle import OracleBest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
KEPT = Path(__file__).parent / "results" / "comparison"
JOBS = int(os.environ.get("HERMES_COMPARE_JOBS", "0")) or None


class Reuse(Enum):
    """Which stored figures are reused."""

    SAME = "those of this program and data; others are computed"
    KNOWN = "all that are known, of whatever program; others are computed"
    KEPT = "all that are known; `NotKept` for others"


class FiguresMissing(LookupError):
    """Figures are not stored, and are not to be computed."""


def data() -> Path:
    """Return the folder of the traces and the curves."""
    return Path(os.environ.get("HERMES_DATA", ROOT / "examples"))


@dataclass(frozen=True, slots=True)
class ComparisonCase:
    """One `hermes compare`, with the text of its command."""

    file: str  # "traces/x.csv" or "curves/x.npz"
    gpus: str
    policies: tuple[str, ...]
    options: tuple[str, ...] = ()
    seeds: int = 1
    good: int | None = None
    prior_sweeps: int | None = None
    switch_seconds: float = 0.0
    guards: bool = False
    teams: str = ""  # a quota file of examples/

    @property
    def command(self) -> str:
        """The command that prints the same figures."""
        kind = "trace" if self.file.startswith("traces/") else "curves"
        words = ["hermes compare", f"--{kind} examples/{self.file}"]
        words.append(f"--nodes {self.gpus}" if "x" in self.gpus else f"--gpus {self.gpus}")
        if self.teams:
            words.append(f"--teams examples/{self.teams}")
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

    def known(self) -> ComparisonCase:
        """Return the case without the policies that do not exist (yet)."""
        there = tuple(p for p in self.policies if _bare(p) in POLICIES or p == OracleBest.name)
        options = tuple(o for o in self.options if o.partition(".")[0] in there)
        return replace(self, policies=there, options=options)

    def results(self, reuse: Reuse) -> Comparison:
        """Return the comparison, policy by policy."""
        parts = [self._one(policy, reuse) for policy in self.policies]
        results = tuple(result for part in parts for result in part.results)
        return replace(parts[0], policies=self.policies, results=results)

    def _one(self, policy: str, reuse: Reuse) -> Comparison:
        options = tuple(o for o in self.options if o.startswith(f"{policy}."))
        alone = replace(self, policies=(policy,), options=options)
        kept = KEPT / f"{sha256(alone.command.encode()).hexdigest()[:16]}.json"
        program = version(_bare(policy), data() / self.file, self._quota_file)
        found = _read(kept, program if reuse is Reuse.SAME else None)
        if found is None and reuse is Reuse.KEPT:
            raise FiguresMissing(alone.command)
        if found is None:
            began_s = monotonic()
            found = alone._computed(policy)
            _write(kept, found, alone.command, program)
            print(f"{monotonic() - began_s:7.1f} s  {alone.command}", file=sys.stderr, flush=True)
        return found

    @property
    def _quota_file(self) -> Path | None:
        return EXAMPLES / self.teams if self.teams else None

    def _computed(self, policy: str) -> Comparison:
        path, trace = data() / self.file, self.file.startswith("traces/")
        asked = SimulationOptions(
            trace=path if trace else None,
            curves=None if trace else path,
            good=self.good,
            prior_sweeps=self.prior_sweeps,
            switch_seconds=self.switch_seconds,
            teams=self._quota_file,
        )
        wide = "x" in self.gpus
        pool = gpus_of(None if wide else int(self.gpus), self.gpus if wide else None)
        quota = None if self._quota_file is None else asked.pool_quota(len(pool)).quota()
        chosen = contenders(policy, self.options, guards=self.guards, quota=quota)
        several = _workers() if self.seeds > 1 and JOBS != 1 else None
        return compare(asked.source(), pool, chosen, range(self.seeds), jobs=JOBS, pool=several)


def _bare(policy: str) -> str:
    """Return the name in POLICIES of a policy that may decide within a quota."""
    return policy.removesuffix(QUOTA_SUFFIX)


@cache
def _workers() -> Executor:
    """Return the processes for all tables: each reads its modules and data once."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(workers(JOBS))


def _write(path: Path, found: Comparison, command: str, program: str) -> None:
    """Store the figures atomically, without curves of regret."""
    path.parent.mkdir(parents=True, exist_ok=True)
    results = [
        {
            "policy": r.policy,
            "seed": r.seed,
            "metrics": asdict(r.metrics),
            "completions_s": r.completions_s[:5],
            "teams": [asdict(team) for team in r.teams],
        }
        for r in found.results
    ]
    facts = {"command": command, "version": program, "workload": found.workload, "gpus": found.gpus,
             "seeds": found.seeds, "policies": found.policies, "results": results}  # fmt: skip
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(facts))
    whole.replace(path)


def _read(path: Path, program: str | None) -> Comparison | None:
    """Return the stored figures; None when there are none, or they are of another `program`."""
    facts = json.loads(path.read_text()) if path.exists() else {}
    if not facts or program not in (None, facts.get("version")):
        return None
    results = tuple(
        PolicyResult(
            r["policy"],
            r["seed"],
            Metrics(**r["metrics"]),
            tuple(r["completions_s"]),
            (),
            teams=tuple(TeamResult(**team) for team in r.get("teams", ())),
        )
        for r in facts["results"]
    )
    seeds, policies = tuple(facts["seeds"]), tuple(facts["policies"])
    return Comparison(facts["workload"], facts["gpus"], seeds, policies, results)


TABLE = "hermes_ops.policies"  # names every policy: what one imports says more


@cache
def version(policy: str, data: Path, quota: Path | None = None) -> str:
    """Return a digest of the data and of all modules on which a policy's figures depend.

    Comments and layout do not count, the learnt numbers beside a module do; a policy that POLICIES
    has not (a bound) is the simulator's.
    """
    digest = sha256(data.read_bytes() + (b"" if quota is None else quota.read_bytes()))
    start = [compare.__module__]
    if policy in POLICIES:
        start.append(POLICIES[policy].__module__)
    for name, code in sorted(_modules(start).items()):
        digest.update(f"{name}\n{code}\n".encode())
        path = _path(name)
        if path is not None and (learnt := path.with_suffix(".json")).is_file():
            digest.update(learnt.read_bytes())
    return digest.hexdigest()[:16]


def _modules(names: list[str]) -> dict[str, str]:
    """Return the code of these modules of ours and of all modules that they import."""
    found: dict[str, str] = {}
    names = list(names)
    while names:
        name = names.pop()
        path = _path(name)
        if path is None or name in found or name == TABLE:
            continue
        found[name], imported = _code(path)
        names += imported
    return found


@cache
def _code(path: Path) -> tuple[str, tuple[str, ...]]:
    """Return a module's code without its layout, and its imports, names in modules included."""
    tree = ast.parse(path.read_text())
    imported: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            imported += [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
        elif isinstance(node, ast.Import):
            imported += [name.name for name in node.names]
    return ast.dump(tree), tuple(imported)


def _path(name: str) -> Path | None:
    """Return the file of a module of ours; None for any other module."""
    if name.partition(".")[0] != "hermes_ops":
        return None
    place = ROOT / name.replace(".", "/")
    paths = (place.with_name(f"{place.name}.py"), place / "__init__.py")
    return next((path for path in paths if path.is_file()), None)
