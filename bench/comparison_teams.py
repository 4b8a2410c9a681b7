"""The section of docs/comparison.md on the teams of a shared cluster and their quotas."""

from __future__ import annotations

from bench.comparison_case import ComparisonCase, Reuse
from hermes_ops.simulator.comparison import Comparison, PolicyResult
from hermes_ops.simulator.metrics import jain_index
from hermes_ops.simulator.tables import markdown, number, team_rows

PHILLY = ComparisonCase(
    "traces/philly_82k.csv.gz",
    "400",
    ("fifo", "yarn-cs", "themis", "2d-las", "fifo+quota", "2d-las+quota"),
    teams="philly_teams.yaml",
)
BASE, OURS = "yarn-cs", ("fifo+quota", "2d-las+quota")


def teams(reuse: Reuse) -> str:
    """Compare how long the teams of a public trace wait, and how fairly they are served."""
    found = PHILLY.results(reuse)
    by_policy = {policy: found.results_of(policy)[0] for policy in found.policies}
    header, rows = team_rows(found)
    shown = ("team", "jobs", *(policy for policy in found.policies))
    assert len(shown) == len(header)
    waiting = rows[: len(by_policy[found.policies[0]].teams)]
    verdicts = "\n".join(_verdict(found, name) for name in OURS)
    return f"""## Teams of a shared cluster

The 15 virtual clusters of Microsoft Philly (82,247 jobs in 109 days) as teams that share 400 GPUs.
The trace does not name their sizes: each is guaranteed one GPU, and the rest by the GPU time of its
jobs ([the quota file](../examples/philly_teams.yaml)). `yarn-cs` guarantees its queues the same.
`+quota`: the policy [within the quotas](quotas.md). `themis` knows how long each job still trains.
The jobs have no learning curves, so `hermes` has nothing to compare them by. No switch cost.

Waiting: without GPUs between submission and end. rho: finish-time fairness of a job, its time over
that on its share of the GPUs; 1 is fair, less is better. Jain's index: of the teams' mean rho, 1 if
all are alike.

```sh
{PHILLY.command}
```

{markdown(_HEADER, [_row(policy, result) for policy, result in by_policy.items()])}
Mean waiting by team, s:

{markdown(shown, waiting)}
{verdicts}"""


_HEADER = (
    "policy", "mean waiting, s", "mean completion, s", "rho, median", "rho, p99", "Jain's index",
    "utilisation", "makespan, s", "preemptions", "decision, ms",
)  # fmt: skip


def _row(policy: str, result: PolicyResult) -> tuple[str, ...]:
    metrics = result.metrics
    return (
        policy,
        number(metrics.mean_queueing_seconds),
        _number(metrics.mean_completion_seconds),
        _number(metrics.fairness_median),
        _number(metrics.fairness_p99),
        _number(_jain(result)),
        f"{100 * metrics.utilisation:.2f} %",
        number(metrics.makespan_seconds),
        number(metrics.preemptions),
        _number(metrics.decision_ms),
    )


def _number(value: float | None) -> str:
    return "–" if value is None else number(value)


def _jain(result: PolicyResult) -> float | None:
    return jain_index([t.fairness_mean for t in result.teams if t.fairness_mean is not None])


def _verdict(found: Comparison, name: str) -> str:
    """Return what a policy within quotas costs or gains against the capacity queues."""
    (base,), (ours,) = found.results_of(BASE), found.results_of(name)
    spread = [_jain(result) for result in (base, ours)]
    points = 100 * (ours.metrics.utilisation - base.metrics.utilisation)
    p99 = [result.metrics.fairness_p99 for result in (base, ours)]
    return (
        f"`{name}` against `{BASE}`: Jain's index {_number(spread[1])} against "
        f"{_number(spread[0])}, rho at p99 {_number(p99[1])} against {_number(p99[0])}, "
        f"utilisation {points:+.2f} points, mean waiting "
        f"{number(ours.metrics.mean_queueing_seconds)} s against "
        f"{number(base.metrics.mean_queueing_seconds)} s.\n"
    )
