from __future__ import annotations

import json
import math
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from hermes_ops.airflow.control.feeds import CurveFeed
from hermes_ops.airflow.control.monitoring import STALLED_S, Address, Monitor, serve
from hermes_ops.core.model import Gpu, Job, JobId, Phase, Reason, Snapshot, SweepId
from hermes_ops.core.plan import Action, Resize, Start, Stop
from hermes_ops.core.quota import Quota, TeamQuota
from hermes_ops.errors import ConfigError, Unavailable
from hermes_ops.tracking.curves import SweepCurves

ROOT = Path(__file__).parents[4]
DASHBOARD = ROOT / "helm/hermes-ops/dashboards/hermes-ops.json"
RULES = DASHBOARD.with_name("hermes-ops.rules.yaml")
WHY = Reason("it converges faster")


def job(number: int, phase: Phase, *gpus: int) -> Job:
    return Job(JobId(f"s/{number}"), SweepId("s"), 0.0, phase, gpus_held=gpus)


def pool(*jobs: Job, gpus: int = 4) -> Snapshot:
    return Snapshot(100.0, tuple(Gpu(i) for i in range(gpus)), jobs)


def value(monitor: Monitor, name: str, **labels: str) -> float | None:
    return monitor.registry.get_sample_value(name, {"pool": "gpus", **labels})


def test_trials_are_counted_by_phase_and_gpus_by_who_holds_them() -> None:
    monitor = Monitor()
    monitor.observed(
        pool(job(0, Phase.RUNNING, 0, 1), job(1, Phase.STARTING, 2), job(2, Phase.WAITING))
    )
    assert value(monitor, "hermes_trials", phase="waiting") == 1
    assert value(monitor, "hermes_trials", phase="running") == 1
    assert value(monitor, "hermes_gpus") == 4
    assert value(monitor, "hermes_gpus_held") == 3
    monitor.observed(pool())
    assert value(monitor, "hermes_trials", phase="waiting") == 0
    assert value(monitor, "hermes_gpus_held") == 0


def test_each_team_has_what_it_holds_and_its_gpu_seconds_and_goes_with_the_quota() -> None:
    monitor, quota = Monitor(), Quota((TeamQuota("vision", 1), TeamQuota("speech", 1)))
    own = [replace(job(n, Phase.RUNNING, n), virtual_cluster="vision") for n in range(3)]
    waiting = replace(job(3, Phase.WAITING), virtual_cluster="speech")
    before = pool(*own, waiting)
    monitor.observed_teams(before, quota)
    shown = [
        value(monitor, "hermes_team_gpus", team="vision", kind=kind)
        for kind in ("held", "borrowed", "guaranteed")
    ]
    assert shown == [3, 2, 1]
    assert value(monitor, "hermes_team_trials_waiting", team="speech") == 1
    monitor.observed_teams(replace(before, time_s=110.0, jobs=()), quota)
    monitor.observed_teams(replace(before, time_s=150.0), None)
    seconds = [
        value(monitor, "hermes_team_gpu_seconds_total", team="vision", kind=kind)
        for kind in ("held", "borrowed")
    ]
    assert seconds == [30, 20]
    assert value(monitor, "hermes_team_gpus", team="vision", kind="held") is None


def test_only_a_running_trial_that_is_to_resume_is_preempted() -> None:
    monitor = Monitor()
    assert value(monitor, "hermes_preemptions_total") == 0
    seen = pool(
        job(0, Phase.RUNNING, 0), job(1, Phase.RUNNING, 1), job(2, Phase.STARTING, 2),
        job(3, Phase.WAITING), job(4, Phase.RUNNING, 3),
    )  # fmt: skip
    actions: list[Action] = [
        Stop(JobId("s/0"), WHY),
        Stop(JobId("s/1"), WHY, final=True),
        Stop(JobId("s/2"), WHY),
        Start(JobId("s/3"), (0,), WHY),
        Resize(JobId("s/4"), (1, 3), WHY),
    ]
    monitor.decided(seen, actions)
    assert value(monitor, "hermes_preemptions_total") == 1
    found = {a: value(monitor, "hermes_decisions_total", action=a)
             for a in ("start", "stop", "end", "resize")}  # fmt: skip
    assert found == {"start": 1, "stop": 2, "end": 1, "resize": 1}


def test_a_round_is_timed_and_its_outcome_counted() -> None:
    monitor = Monitor()
    with monitor.round(), monitor.deciding():
        pass
    with pytest.raises(Unavailable), monitor.round():
        raise Unavailable("MLflow is away")
    with pytest.raises(ZeroDivisionError), monitor.round():
        raise ZeroDivisionError
    for outcome in ("done", "skipped", "failed"):
        assert value(monitor, "hermes_rounds_total", outcome=outcome) == 1
    assert value(monitor, "hermes_round_seconds_count") == 3
    assert value(monitor, "hermes_decision_seconds_count") == 1


def test_the_age_of_the_newest_point_grows_between_rounds() -> None:
    now, nothing = [100.0], math.nan
    monitor = Monitor(clock=lambda: now[0])
    name = "hermes_newest_curve_point_age_seconds"
    assert math.isnan(value(monitor, name) or 0.0)
    newest: list[float | None] = [None]
    monitor.follow(lambda: newest[0])
    assert math.isnan(value(monitor, name) or nothing)
    newest[0] = 97.5
    assert value(monitor, name) == 2.5
    now[0] = 160.0
    assert value(monitor, name) == 62.5


def test_the_newest_point_is_that_of_all_sweeps() -> None:
    outside: Any = None
    feed = CurveFeed(outside)
    assert feed.newest_s() is None
    feed._curves = {
        "a": SweepCurves({0: ((1, 0.5, 4_000),), 1: ()}, {}),
        "b": SweepCurves({0: ((1, 0.5, 9_500), (2, 0.4, 9_900))}, {}),
    }
    assert feed.newest_s() == 9.9


@pytest.fixture
def listening() -> Iterator[tuple[Monitor, list[float], str]]:
    now = [100.0]
    monitor = Monitor(clock=lambda: now[0])
    server = serve(monitor, Address())
    assert server is not None
    yield monitor, now, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url) as answer:
            return int(answer.status)
    except HTTPError as error:
        with error:
            return error.code


def test_metrics_are_served_on_loopback(listening: tuple[Monitor, list[float], str]) -> None:
    monitor, _, url = listening
    monitor.lead(True)
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    assert 'hermes_leading{pool="gpus"} 1.0' in text
    assert status(f"{url}/elsewhere") == 404


def test_a_loop_that_hangs_is_not_alive(listening: tuple[Monitor, list[float], str]) -> None:
    monitor, now, url = listening
    assert (status(f"{url}/livez"), status(f"{url}/readyz")) == (200, 200)
    now[0] += STALLED_S
    assert (status(f"{url}/livez"), status(f"{url}/readyz")) == (503, 503)
    monitor.beat()
    assert status(f"{url}/livez") == 200


def body(url: str) -> str:
    try:
        return str(urllib.request.urlopen(url, timeout=60).read().decode())
    except HTTPError as error:
        return str(error.read().decode())


@pytest.mark.parametrize("error", [RuntimeError("boom"), Unavailable("boom")], ids=repr)
def test_a_controller_whose_rounds_fail_is_alive_and_not_ready(
    listening: tuple[Monitor, list[float], str], error: Exception
) -> None:
    monitor, now, url = listening
    for _ in range(3):
        with pytest.raises(type(error)), monitor.round():
            raise error
        now[0] += 10.0
    assert (status(f"{url}/livez"), status(f"{url}/readyz")) == (200, 503)
    assert "(3 in a row)" in body(f"{url}/readyz")
    assert body(f"{url}/readyz").endswith("boom\n")
    assert value(monitor, "hermes_rounds_failing_seconds") == 30.0
    with monitor.round():
        pass
    assert (status(f"{url}/readyz"), body(f"{url}/readyz")) == (200, "ok\n")
    assert value(monitor, "hermes_rounds_failing_seconds") == 0.0


def test_steps_that_fail_are_counted() -> None:
    monitor = Monitor()
    assert value(monitor, "hermes_problems") == 0
    monitor.observed_problems(3)
    assert value(monitor, "hermes_problems") == 3


def test_a_port_that_is_taken_costs_the_metrics_alone(
    listening: tuple[Monitor, list[float], str], caplog: pytest.LogCaptureFixture
) -> None:
    port = int(listening[2].rpartition(":")[2])
    assert serve(Monitor(), Address(port=port)) is None
    assert "choose another with HERMES_METRICS_PORT" in caplog.text


@pytest.mark.parametrize("text", ["-1", "http", "65536", "9464.5"])
def test_a_bad_port_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_METRICS_PORT", text)
    with pytest.raises(ConfigError, match=f"HERMES_METRICS_PORT: found '{text}'"):
        Address.from_environment()


# -- the dashboard -------------------------------------------------------------------------------


def exposed() -> set[str]:
    """Every series that a controller which has done everything once shows."""
    monitor = Monitor()
    monitor.watch_disk(Path())
    monitor.observed(pool(job(0, Phase.RUNNING, 0)))
    monitor.observed_teams(pool(job(0, Phase.RUNNING, 0)), Quota((TeamQuota("vision"),)))
    monitor.decided(pool(job(0, Phase.RUNNING, 0)), [Stop(JobId("s/0"), WHY)])
    with monitor.round(), monitor.deciding():
        pass
    return {s.name for family in monitor.registry.collect() for s in family.samples}


def queries() -> list[str]:
    document = json.loads(DASHBOARD.read_text())
    return [t["expr"] for p in document["panels"] for t in p.get("targets", [])]


def test_every_metric_of_the_dashboard_exists() -> None:
    named = {name for query in queries() for name in re.findall(r"\bhermes_\w+", query)}
    assert named, "the dashboard asks for no metric at all"
    assert named - exposed() == set()


def families() -> set[str]:
    """The names of our metrics, without what Prometheus appends."""
    names = {re.sub(r"_(bucket|sum|count|created|total)$", "", n) for n in exposed()}
    return {n for n in names if n.startswith("hermes_")}


def test_every_metric_of_the_alerts_exists() -> None:
    named = set(re.findall(r"\bhermes_\w+", RULES.read_text()))
    assert named, "the alerts ask for no metric at all"
    assert named - exposed() == set()


def test_every_value_of_a_label_that_the_alerts_ask_for_exists() -> None:
    monitor = Monitor()
    monitor.observed(pool(job(0, Phase.RUNNING, 0)))
    shown = {
        (sample.name, label, value)
        for family in monitor.registry.collect()
        for sample in family.samples
        for label, value in sample.labels.items()
    }
    asked = {
        (name, label, value)
        for name, matchers in re.findall(r"\b(hermes_\w+){(.+?)}", RULES.read_text())
        for label, value in re.findall(r'(\w+)!?="(.+?)"', matchers)
    }
    assert len(asked) > 2
    assert asked - shown == set()


def test_the_dashboard_shows_every_metric_of_ours() -> None:
    assert {f for f in families() if not any(f in query for query in queries())} == set()


def test_every_metric_is_documented() -> None:
    page = (ROOT / "docs/operate.md").read_text()
    assert {f for f in families() if f"`{f}" not in page} == set()


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
