"""The sections of docs/comparison.md: their simulations, and the published figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from bench.comparison_case import ComparisonCase, Reuse
from bench.comparison_sizes import sizes
from bench.comparison_teams import teams
from bench.search_race import search
from hermes_ops.simulator.comparison import Comparison, Interval, ratio_interval
from hermes_ops.simulator.tables import cell, markdown

FILES = ("lcbench_fashion_mnist", "nb301", "lcbench_adult", "lcbench_sylvine")
RAW = ("mlp_digits", "mlp_synthetic", "mlp_noisy", "mlp_friedman")
SEEDS = 20
BEST, GOOD = "time_to_best_seconds", "time_to_good_seconds"
ROUND_ROBIN = "fair.quantum_steps=1"
PAPER = ("fifo", "fair", "slaq", "hermes", "asha", "frontrunner")
LEARNERS = ("fifo", "hermes", "asha", "frontrunner")
SWITCHES_S = (0.0, 3.0, 30.0)
GUARDED_S = 3.0
FEW, MANY = 1, 16
EXACT = ("2d-las.placement=count", "2d-las.demotion=exact")
LATE = ("2d-las.placement=count", "2d-las.demotion=late")


def traces(reuse: Reuse) -> str:
    """Compare mean completion and makespan on the public traces with the published ones."""
    text = """## Traces

FIFO (strict), SRTF, SRSF and 2D-LAS, GPUs counted only, no switch cost. FIFO, SRTF and SRSF were
published twice, by the Tiresias simulator (SymbioticLab/Tiresias 959f9b0) and by an independent
program, equal to the last digit; 2D-LAS is that simulator's `dlas-gpu` (limits 3250 and 7200
GPU-s). It demotes wide jobs that were preempted a little late, by an integer division:
`demotion=late` (the default) does the same, `exact` does not. Published figures are compared to
as many digits as they have.
"""
    rows = []
    commands = []
    for (name, nodes), published in PUBLISHED.items():
        case = ComparisonCase(f"traces/{name}.csv", nodes, tuple(published), LATE).known()
        exact = ComparisonCase(f"traces/{name}.csv", nodes, ("2d-las",), EXACT).known()
        commands += [case.command, exact.command]
        found = case.results(reuse)
        for policy in case.policies:
            label = "2d-las, late" if policy == "2d-las" else policy
            rows.append(_trace_row(f"{name}, {nodes}", label, found, policy, published))
        alone = exact.results(reuse)
        rows.append(_trace_row(f"{name}, {nodes}", "2d-las, exact", alone, "2d-las", published))
    header = ("trace, nodes", "policy", "mean completion, s", "published", "off",
              "makespan, s", "published", "off")  # fmt: skip
    return f"{text}\n{_commands(commands)}\n{markdown(header, rows)}"


def _trace_row(
    where: str,
    label: str,
    found: Comparison,
    policy: str,
    published: Mapping[str, tuple[float, float]],
) -> tuple[str, ...]:
    (result,) = found.results_of(policy)
    metrics = result.metrics
    cells = [where, label]
    ours = (metrics.mean_completion_seconds or 0.0, metrics.makespan_seconds)
    for value, wanted in zip(ours, published[policy], strict=True):
        decimals = 2 if isinstance(wanted, float) else 0
        cells += [
            f"{value:,.{decimals}f}",
            f"{wanted:,.{decimals}f}",
            _off(value, wanted, decimals),
        ]
    return tuple(cells)


def _off(value: float, wanted: float, decimals: int) -> str:
    """Return the deviation from a published value; "equal" to the digits that it has."""
    if abs(value - wanted) <= 0.5001 * 10.0**-decimals:
        return "equal"
    return f"{100 * (value / wanted - 1):+.2f} %"


def three_jobs(reuse: Reuse) -> str:
    """Simulate Tiresias' example of three jobs on two GPUs."""
    options = ("2d-gittins.limits_gpu_s=[4,8]", "2d-gittins.sizes_gpu_s=[4,8,12]",
               "2d-las.quantum_s=1")  # fmt: skip
    case = ComparisonCase("traces/three_jobs.csv", "2", tuple(THREE_JOBS), options).known()
    found = case.results(reuse)
    rows = []
    for policy in case.policies:
        (result,) = found.results_of(policy)
        each = ", ".join(f"{c:g}" for c in result.completions_s)
        mean = f"{result.metrics.mean_completion_seconds:.2f}"
        rows.append((policy, each, THREE_JOBS[policy], mean))
    header = ("policy", "completions", "published", "mean")
    return f"""## Tiresias' three jobs

Two GPUs; jobs of 2 GPUs x 2, 1 x 8 and 2 x 6 units of time (Gu et al., "Tiresias", NSDI 2019:
9.33, 10.00, 11.67).

{_commands([case.command])}
{markdown(header, rows)}"""


def limits(reuse: Reuse) -> str:
    """Simulate 2D-LAS with queue limits so low that jobs of the 60-job trace are demoted."""
    rows, commands = [], []
    for (queues, knob), (mean_s, preempted) in LIMITS.items():
        options = [*LATE, f"2d-las.limits_gpu_s={queues}"]
        options += [f"2d-las.promote_knob={knob}"] if knob is not None else []
        case = ComparisonCase(
            "traces/tiresias_60_job.csv", "2x4", ("2d-las",), tuple(options)
        ).known()
        if not case.policies:
            return ""
        (result,) = case.results(reuse).results
        commands.append(case.command)
        ours = result.metrics.mean_completion_seconds or 0.0
        rows.append((queues, str(knob or "off"), f"{ours:.1f}", f"{mean_s:.1f}",
                     str(result.metrics.preemptions), str(preempted)))  # fmt: skip
    header = ("queue limits, GPU-s", "promote knob", "mean completion, s", "published",
              "preemptions", "published")  # fmt: skip
    return f"""## Lower queue limits

With the default limits no job of the 60-job trace is ever demoted. Published: runs of the
Tiresias simulator with other limits and promotion; its 2D-Gittins, with its table of 1,001 sizes,
is in `test_2d_gittins_gives_the_public_simulators_figures_with_its_table_of_sizes`.

{_commands(commands)}
{markdown(header, rows)}"""


# -- sweeps --------------------------------------------------------------------------------------


def best(reuse: Reuse) -> str:
    """Compare the times until the best trial has finished, by file and over all files."""
    case = ComparisonCase("", "4", (*PAPER, "oracle-best"), (ROUND_ROBIN,), SEEDS)
    every = _files(case, reuse)
    parts = [
        f"""## The best of 64 configurations, soonest

64 configurations, 4 GPUs, {SEEDS} seeds, pause and resume at epoch ends without cost. `fair` with
a quantum of one epoch is the papers' round robin (RR). `best finished`: the trial with the lowest
loss of all has run all its epochs. `within 1 %`: any trial has shown a loss that near to it.
`oracle-best` is the bound. The Hermes paper (Electronics 2021, 10(3), 350) reports up to 4.04
times shorter times than FIFO, RR and SLAQ on its own testbed. `frontrunner` has learnt from
configurations of these four files; its figures on tasks that it has not seen are
[elsewhere](frontrunner-measured.md#how-good-it-is).
"""
    ]
    for name, (command, found) in every.items():
        rows = [
            (
                policy,
                cell(found.interval(policy, BEST)),
                cell(found.speed_up(policy, BEST)),
                cell(found.interval(policy, GOOD)),
                cell(found.speed_up(policy, GOOD)),
                cell(found.interval(policy, "decision_ms")),
            )
            for policy in found.policies
        ]
        header = ("policy", "best finished, s", "speed-up over FIFO", "within 1 %, s",
                  "speed-up over FIFO", "decision, ms")  # fmt: skip
        parts.append(f"### {name}\n\n{_commands([command])}\n{markdown(header, rows)}")
    parts.append(f"### All {len(every)} files\n\n{_over_all([f for _, f in every.values()])}")
    return "\n".join(parts)


def _over_all(found: Sequence[Comparison]) -> str:
    """Return geometric means over all files and seeds."""
    bases = [base for base in ("fifo", "asha") if base in found[0].policies]
    header = ["policy"]
    header += [f"{what} over {base}" for base in bases for what in ("best finished", "within 1 %")]
    rows = [
        (p, *(cell(pooled(found, p, metric, base)) for base in bases for metric in (BEST, GOOD)))
        for p in found[0].policies
    ]
    return markdown(header, rows)


def pooled(found: Sequence[Comparison], policy: str, metric: str, base: str) -> Interval | None:
    """Return the geometric mean of the paired ratios of several comparisons together."""
    pairs = [
        (ours.metrics.document()[metric], theirs.metrics.document()[metric])
        for one in found
        for ours, theirs in zip(one.results_of(policy), one.results_of(base), strict=True)
    ]
    known = [(v, b) for v, b in pairs if v is not None and b is not None]
    return ratio_interval(*zip(*known, strict=True)) if len(known) == len(pairs) else None


def raw(reuse: Reuse) -> str:
    """Compare the same on curves that are not smooth."""
    every = _files(ComparisonCase("", "4", LEARNERS, seeds=SEEDS), reuse, RAW)
    found = {name: one for name, (_, one) in every.items()}
    return f"""## Raw curves

As above on the recorded curves of small networks, noisy as they are, trained on four data sets.
`frontrunner` has learnt nothing from them, as it has from the files above. Time until the best
trial has finished, speed-up over FIFO.

{_commands([command for command, _ in every.values()])}
{_by_file(found, BEST)}
The same, speed-up over ASHA:

{_by_file(found, BEST, "asha")}"""


def _files(
    case: ComparisonCase, reuse: Reuse, names: Sequence[str] = FILES
) -> dict[str, tuple[str, Comparison]]:
    cases = {name: replace(case, file=f"curves/{name}.npz").known() for name in names}
    return {name: (one.command, one.results(reuse)) for name, one in cases.items()}


def good(reuse: Reuse) -> str:
    """Compare the same with few and with many good configurations in the set."""
    text = f"""## Few and many good configurations

As above, but the sets have exactly {FEW} or exactly {MANY} of 64 configurations whose lowest loss
is within 1 % of the set's best. The best one is drawn from the best 5 % of a file's
configurations that have enough others that near and enough worse ones, so sets with many good
ones have a worse best. Speed-up over FIFO, file by file, and the geometric mean.
"""
    parts = [text]
    for number_good in (FEW, MANY):
        case = ComparisonCase("", "4", PAPER, (ROUND_ROBIN,), SEEDS, good=number_good)
        every = _files(case, reuse)
        for what, metric in (("best finished", BEST), ("within 1 %", GOOD)):
            parts.append(f"### {number_good} good of 64: {what}\n")
            parts.append(_commands([command for command, _ in every.values()]))
            parts.append(_by_file({name: found for name, (_, found) in every.items()}, metric))
    return "\n".join(parts)


def _by_file(every: Mapping[str, Comparison], metric: str, base: str = "fifo") -> str:
    found = list(every.values())
    header = ("policy", *every, "all")
    rows = [
        (
            policy,
            *(cell(one.speed_up(policy, metric, base)) for one in found),
            cell(pooled(found, policy, metric, base)),
        )
        for policy in found[0].policies
    ]
    return markdown(header, rows)


def switches(reuse: Reuse) -> str:
    """Compare several switch costs."""
    parts = [
        """## Switch costs

As the first table of sweeps, but every segment begins with so many seconds of start-up, the first
of a trial too. Time until the best trial has finished, speed-up over FIFO at the same cost, and
what was lost.
"""
    ]
    for switch_s in SWITCHES_S:
        case = ComparisonCase("", "4", LEARNERS, seeds=SEEDS, switch_seconds=switch_s)
        every = _files(case, reuse)
        found = {name: one for name, (_, one) in every.items()}
        parts.append(f"### {switch_s:g} s\n")
        parts.append(_commands([command for command, _ in every.values()]))
        parts.append(_by_file(found, BEST))
        lost = {p: [one.interval(p, "lost_gpu_seconds") for one in found.values()]
                for p in next(iter(found.values())).policies}  # fmt: skip
        parts.append("Lost GPU-seconds:\n")
        rows = [(policy, *(cell(one) for one in each)) for policy, each in lost.items()]
        parts.append(markdown(("policy", *found), rows))
    return "\n".join(parts)


def guards(reuse: Reuse) -> str:
    """Compare the same policies within the guards of a live pool."""
    case = ComparisonCase(
        "", "4", PAPER, (ROUND_ROBIN,), SEEDS, switch_seconds=GUARDED_S, guards=True
    )
    every = _files(case, reuse)
    found = {name: one for name, (_, one) in every.items()}
    return f"""## Within the guards of a live pool

As above with {GUARDED_S:g} s for a switch, each policy within [the guards](policies.md#the-guards)
at their defaults. Time until the best trial has finished, speed-up over FIFO.

{_commands([command for command, _ in every.values()])}
{_by_file(found, BEST)}"""


def priors(reuse: Reuse) -> str:
    """Compare with one earlier sweep; empty without a policy that learns from it."""
    case = ComparisonCase("", "4", ("fifo", "frontrunner"), seeds=SEEDS, prior_sweeps=1)
    if "frontrunner" not in case.known().policies:
        return ""
    every = _files(case, reuse)
    table = _by_file({name: found for name, (_, found) in every.items()}, BEST)
    return f"""## With one earlier sweep

As above without a switch cost; `frontrunner` knows the whole curves of 64 other configurations of
the same file. Time until the best trial has finished, speed-up over FIFO.

{_commands([command for command, _ in every.values()])}
{table}"""


def reached(reuse: Reuse) -> str:
    """Compare published or targeted figures with those of the sections before."""
    every = {
        name: found
        for name, (_, found) in _files(
            ComparisonCase("", "4", (*PAPER, "oracle-best"), (ROUND_ROBIN,), SEEDS), reuse
        ).items()
    }
    rows = [
        _largest(every, "hermes", base, label, "up to 4.04 (own testbed)")
        for base, label in (("fifo", "FIFO"), ("fair", "RR"), ("slaq", "SLAQ"))
        if base in next(iter(every.values())).policies
    ]
    rows += _frontrunner(every, reuse)
    return f"""## Reached and not

Time until the best trial has finished, geometric means. Where the tables above say how far a figure
is off, it was not reproduced to the digit; the paper's testbed, models and search spaces are not
public, so its 4.04 can be compared but not reproduced.

{markdown(("what", "published or wanted", "here"), rows)}"""


def _largest(
    every: Mapping[str, Comparison], policy: str, base: str, label: str, wanted: str
) -> tuple[str, str, str]:
    """Return the file on which a policy gains most over another."""
    found = {name: one.speed_up(policy, BEST, base) for name, one in every.items()}
    name, most = max(found.items(), key=lambda item: item[1].mean if item[1] else 0.0)
    return (f"{policy} over {label}, most on a file", wanted, f"{cell(most)} on {name}")


def _frontrunner(every: Mapping[str, Comparison], reuse: Reuse) -> list[tuple[str, str, str]]:
    """Return the targets of our own policy."""
    policy = "frontrunner"
    found = list(every.values())
    if policy not in found[0].policies:
        return []
    worst = min(
        (one.speed_up(policy, BEST, "asha") for one in found), key=lambda i: i.mean if i else 0.0
    )
    taught = ComparisonCase("", "4", ("fifo", policy), seeds=SEEDS, prior_sweeps=1)
    with_prior = [one for _, one in _files(taught, reuse).values()]
    return [
        (f"{policy} over FIFO", "at least 2.4", cell(pooled(found, policy, BEST, "fifo"))),
        (f"{policy} over ASHA", "at least 1.25", cell(pooled(found, policy, BEST, "asha"))),
        (f"{policy} over ASHA, least on a file", "at least 0.95", cell(worst)),
        (
            f"{policy} with one earlier sweep over FIFO",
            "at least 3",
            cell(pooled(with_prior, policy, BEST, "fifo")),
        ),
    ]


def _commands(lines: Sequence[str]) -> str:
    body = "\n".join(_quoted(line) for line in lines)
    return f"```sh\n{body}\n```\n"


def _quoted(line: str) -> str:
    """Quote the line for a shell, in which brackets are patterns."""
    return " ".join(f"'{word}'" if "[" in word else word for word in line.split(" "))


SECTIONS: Mapping[str, Callable[[Reuse], str]] = {
    "traces": traces,
    "teams": teams,
    "three_jobs": three_jobs,
    "limits": limits,
    "best": best,
    "raw": raw,
    "good": good,
    "switches": switches,
    "guards": guards,
    "priors": priors,
    "search": search,
    "sizes": sizes,
    "reached": reached,
}


PUBLISHED: Mapping[tuple[str, str], Mapping[str, tuple[float, float]]] = {  # mean, makespan; s
    ("tiresias_60_job", "2x4"): {
        "fifo": (1556.48, 5747), "srtf": (519.87, 4901),
        "srsf": (563.38, 4962), "2d-las": (715.27, 4806),
    },
    ("tiresias_60_job", "4x4"): {
        "fifo": (200.82, 3335), "srtf": (192.12, 3271),
        "srsf": (195.90, 3315), "2d-las": (190.68, 3271),
    },
    ("philly_480", "16x4"): {
        "fifo": (225_904, 2_190_718), "srtf": (107_758, 2_092_937),
        "srsf": (105_160, 1_941_867), "2d-las": (120_269, 1_951_666),
    },
    ("muri_philly_trace3", "16x4"): {
        "fifo": (991_167, 8_171_961), "srtf": (180_116, 8_171_961),
        "srsf": (172_684, 8_171_961), "2d-las": (312_870, 8_171_961),
    },
}  # fmt: skip
THREE_JOBS = {"srsf": "2, 10, 16", "2d-gittins": "2, 12, 16", "2d-las": "5, 14, 16"}
LIMITS = {  # (queue limits, promote knob): mean completion, preemptions
    ("[300,1200]", None): (790.2, 26),
    ("[300,1200]", 1): (728.7, 41),
    ("[300,1200]", 8): (730.0, 39),
    ("[1000,2500]", None): (730.2, 7),
    ("[1000,2500]", 1): (673.7, 7),
    ("[1000,2500]", 8): (674.8, 10),
}
