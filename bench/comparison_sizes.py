"""The section of docs/comparison.md on policies that size jobs, on published elastic workloads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any

from bench import comparison_case
from bench.comparison_case import ROOT, FiguresMissing, Reuse, version
from hermes_ops.simulator.tables import markdown

DATA = ROOT / "examples" / "elastic"
HERMES = Path(sys.executable).with_name("hermes")
FASHION = "examples/curves/lcbench_fashion_mnist.npz"

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ElasticCase:
    """One `hermes compare` of elastic jobs: its arguments but for the policies, and these."""

    name: str
    arguments: str
    policies: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command that prints the same figures."""
        return f"hermes compare {self.arguments} --policies {','.join(self.policies)}"

    def document(self, reuse: Reuse) -> Document:
        """Return what the command prints with `--json`; figures are kept as those of curves are."""
        path = comparison_case.KEPT / f"{sha256(self.command.encode()).hexdigest()[:16]}.json"
        program = self._program()
        kept = json.loads(path.read_text()) if path.exists() else {}
        if kept and (reuse is not Reuse.SAME or kept["version"] == program):
            return dict(kept["document"])
        if reuse is Reuse.KEPT:
            raise FiguresMissing(self.command)
        began_s = monotonic()
        words = [str(HERMES), *self.command.split()[1:], "--json"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        document = json.loads(done.stdout)
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = {"command": self.command, "version": program, "document": document}
        whole = path.with_suffix(".part")
        whole.write_text(json.dumps(facts))
        whole.replace(path)
        print(f"{monotonic() - began_s:7.1f} s  {self.command}", file=sys.stderr, flush=True)
        return dict(document)

    def _program(self) -> str:
        files = (DATA / name for name in ("pollux_workloads.csv", "shockwave_jobs.csv"))
        parts = sorted(version(policy, file) for policy in self.policies for file in files)
        return sha256("".join(parts).encode()).hexdigest()[:16]


OURS = "elastic-frontrunner"
POLLUX = ElasticCase(
    "Pollux, load 1.0",
    "--workload pollux --load 1.0 --numbers 1,2,3,4",
    ("2d-las", "optimus", "ones", "afs", "pollux", OURS),
)
CAPES = ElasticCase(
    "Capes, moderate", "--workload capes-moderate --seeds 5",
    ("fifo", "doubling", "throughput", OURS),
)  # fmt: skip
SAXENA = ElasticCase(
    "Saxena, low, queue", "--workload saxena-low-queue --seeds 3",
    ("elastic-fifo", "doubling", "saxena", OURS),
)  # fmt: skip
SHOCKWAVE = ElasticCase(
    "Shockwave", "--workload shockwave", ("2d-las", "fifo", "srsf", "themis", OURS)
)
SWEEP = ElasticCase(
    "a sweep, 1 to 4 GPUs a trial", f"--curves {FASHION} --gpus 16 --trial-gpus 1-4 --seeds 5",
    ("fair", "slaq", "slaq-sized", OURS),
)  # fmt: skip
CASES = (POLLUX, CAPES, SAXENA, SHOCKWAVE, SWEEP)
COLUMNS = {
    "mean completion, s": "mean_completion_seconds",
    "makespan, s": "makespan_seconds",
    "worst rho": "worst_finish_time_fairness",
    "best finished, s": "time_to_best_seconds",
    "resizes": "resizes",
    "decision, ms": "decision_ms",
}


ONLY_OF = {"worst_finish_time_fairness": SHOCKWAVE, "time_to_best_seconds": SWEEP}
"""Metrics that are looked at for one case alone."""


def sizes(reuse: Reuse) -> str:
    """Compare the policies that size jobs on the workloads that they were published with."""
    documents = {case.name: case.document(reuse) for case in CASES}
    rows = [
        (
            case.name,
            policy,
            *(_cell(case, documents[case.name], policy, m) for m in COLUMNS.values()),
        )
        for case in CASES
        for policy in case.policies
    ]
    commands = "\n".join(case.command for case in CASES)
    return f"""## Jobs that change their size

Policies that size jobs, next to policies of one size, on the workloads that they were published
with ([elastic](elastic.md) has more of each, with seeds and loads). `optimus`, `pollux`, `afs`,
`doubling`, `throughput`, `srsf` and `themis` know the speeds or the work that is left where a
workload tells them; `ones`, `saxena` and `{OURS}` measure and predict.

```sh
{commands}
```

{markdown(("workload", "policy", *COLUMNS), rows)}
### Headline claims

None of these papers' testbeds, jobs and speeds are public: the ratios are of other workloads.

{markdown(("paper", "claimed", "ours", "same workload"), list(_claims(documents)))}"""


def _cell(case: ElasticCase, document: Document, policy: str, metric: str) -> str:
    if ONLY_OF.get(metric, case) is not case:
        return "-"
    mean = document["policies"][policy].get(metric, {}).get("mean")
    if mean is None:
        return "-"
    return f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}"


def _claims(documents: Mapping[str, Document]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each headline claim: paper, claimed, ours, and whether it is comparable."""
    completion, makespan = "mean_completion_seconds", "makespan_seconds"
    pollux, shockwave = documents[POLLUX.name], documents[SHOCKWAVE.name]
    sweep = documents[SWEEP.name]
    jct, span = (_ratio(pollux, "2d-las", "optimus", metric) for metric in (completion, makespan))
    yield (
        "Optimus, EuroSys 2018", "139 % better mean completion and 63 % better makespan than "
        "cluster schedulers", f"`2d-las` over `optimus` on {POLLUX.name}: {jct:.2f} and {span:.2f}",
        "no",
    )  # fmt: skip
    ones = [_ratio(pollux, other, "ones", completion) for other in ("2d-las", "optimus")]
    yield (
        "ONES, SC 2021", "Tiresias 2.34 and Optimus 2.12 times its mean completion",
        f"`2d-las` {ones[0]:.2f} and `optimus`, with an oracle, {ones[1]:.2f} times on "
        f"{POLLUX.name}",
        "no",
    )  # fmt: skip
    fair, span = (
        _ratio(shockwave, "2d-las", "themis", m) for m in ("worst_finish_time_fairness", makespan)
    )
    yield (
        "Themis, NSDI 2020", "2.25 times fairer, 5 to 250 % more efficient than others",
        f"worst rho of `2d-las` {fair:.2f} times that of `themis` on {SHOCKWAVE.name}'s jobs, "
        f"makespan {span:.2f} times",
        "no",
    )  # fmt: skip
    slaq = [_ratio(sweep, "fair", name, "time_to_best_seconds") for name in ("slaq", "slaq-sized")]
    yield (
        "SLAQ, SoCC 2017", "up to 73 % better average quality, 44 % shorter delays than fair "
        "sharing", f"the best trial {slaq[0]:.2f} (`slaq`) and {slaq[1]:.2f} (`slaq-sized`) times "
        f"as soon as under `fair`: {SWEEP.name}",
        "no",
    )  # fmt: skip


def _ratio(document: Document, one: str, other: str, metric: str) -> float:
    """Return the mean of a metric under the first policy over that under the second."""
    first, second = (document["policies"][p][metric]["mean"] for p in (one, other))
    return float(first) / float(second)
