"""The alerts: each fires in its failure and in nothing else, and its page says what to do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "helm/hermes-ops"
RULES = CHART / "dashboards/hermes-ops.rules.yaml"
SITUATIONS = Path(__file__).parent / "hermes-ops.rules.test.yaml"
PAGE = (ROOT / "docs/alerts.md").read_text()


def alerts() -> dict[str, dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None and "CI" in os.environ:
        pytest.fail("promtool is not installed: .ci/run takes it from the package prometheus")
    if found is None:
        pytest.skip("promtool is not installed; Debian has it in the package prometheus")
    return found


def test_prometheus_takes_the_rules(promtool: str) -> None:
    subprocess.run([promtool, "check", "rules", "--lint-fatal", str(RULES)], check=True)


def test_alerts_fire_in_their_failure_and_in_no_healthy_pool(promtool: str) -> None:
    done = subprocess.run(
        [promtool, "test", "rules", str(SITUATIONS)], check=False, capture_output=True
    )
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()


def test_every_alert_is_shown_to_fire() -> None:
    shown = set()
    for situation in yaml.safe_load(SITUATIONS.read_text())["tests"]:
        for test in situation.get("alert_rule_test", ()):
            shown |= {test["alertname"]} if test["exp_alerts"] else set()
        for test in situation.get("promql_expr_test", ()):
            labels = (sample["labels"] for sample in test["exp_samples"])
            shown |= {name for text in labels for name in re.findall('alertname="(.+?)"', text)}
    assert shown == set(alerts())


@pytest.mark.parametrize("name", alerts())
def test_an_alert_says_what_is_wrong_and_where_to_read_on(name: str) -> None:
    rule = alerts()[name]
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert {"summary", "description"} < rule["annotations"].keys()
    assert rule["annotations"]["runbook_url"] == f"docs/alerts.md#{name.lower()}"


@pytest.mark.parametrize("name", alerts())
def test_the_page_says_of_an_alert_what_it_is_where_to_look_and_what_to_do(name: str) -> None:
    rule = alerts()[name]
    (row,) = re.findall(rf"^\| \[{name}\]\(#{name.lower()}\) \|(.+)\|$", PAGE, re.MULTILINE)
    severity, _, after = (cell.strip() for cell in row.split("|"))
    assert (severity, after) == (rule["labels"]["severity"], rule["for"])
    (section,) = re.findall(rf"^## {name}\n(.+?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert "* Look: " in section
    assert "* Do: " in section


def test_the_page_has_no_alert_that_is_none() -> None:
    assert re.findall(r"^## (.+)$", PAGE, re.MULTILINE) == list(alerts())


def test_the_chart_takes_the_same_file_and_may_name_another_page() -> None:
    template = (CHART / "templates/monitoring.yaml").read_text()
    (path,) = re.findall(r'\.Files\.Get "(dashboards/.+?)"', template)
    assert (CHART / path) == RULES
    (replaced,) = re.findall(r'\| replace "(.+?)"', template)
    assert RULES.read_text().count(replaced) == len(alerts())
