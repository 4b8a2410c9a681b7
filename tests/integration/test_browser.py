"""What people look at, in a real Chromium: the page in Airflow, and a report that lies on disk.

HERMES_SCREENSHOT names a file for a picture of the page; the one in docs/page.md was made so.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from selenium import webdriver
from selenium.common.exceptions import (
    StaleElementReferenceException,
    TimeoutException,
    WebDriverException,
)
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

import hermes_ops
from hermes_ops.core.summary import SweepSummary, TrialSummary
from hermes_ops.report import Background
from hermes_ops.report.page import page
from hermes_ops.tracking import Tracker

pytestmark = [
    pytest.mark.integration,
    pytest.mark.browser,
    pytest.mark.heavy,
    pytest.mark.timeout(900),
]

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-color-profile=srgb",
    "--window-size=1440,1000",
)
PATIENCE_S = 120
START_S = 240


@pytest.fixture
def chromium(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    """A browser with an empty profile; skipped without one, but for CI."""
    programs = shutil.which("chromium"), shutil.which("chromedriver")
    if None in programs:
        if os.environ.get("CI"):
            pytest.fail("there is no Chromium (.ci/run installs it)")
        pytest.skip("there is no Chromium: install the packages chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = str(programs[0])
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(str(programs[1])))
    driver.set_script_timeout(PATIENCE_S)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def sweep(lab: Any, harness: Any) -> Iterator[Any]:
    """Four trials that are as good as each other, for two slots; it ends when the tests have."""
    found = lab.start(harness.stub("looked-at", harness.alike(4), epochs=1000, pause=0.5))
    harness.await_(lambda: sum(found.lines(number) > 0 for number in range(4)) >= 2, START_S)
    yield found
    lab.hermes("sweep", "stop", found.id)
    found.await_end()


def _until(driver: Any, condition: Any) -> Any:
    """Return what the condition returns once it holds; a failure tells what the page shows."""
    try:
        return WebDriverWait(driver, PATIENCE_S, 0.2, [WebDriverException]).until(condition)
    except TimeoutException as error:
        error.add_note(f"{driver.current_url} shows: {_text(driver, 'body')}")
        raise


def _text(driver: Any, selector: str) -> str:
    try:
        return re.sub(r"\s+", " ", driver.find_element(By.CSS_SELECTOR, selector).text)
    except StaleElementReferenceException:  # it has just been refreshed
        return ""


def _has(selector: str, pattern: str) -> Any:
    return lambda driver: re.search(pattern, _text(driver, selector))


def _requests(driver: Any) -> list[tuple[str, str]]:
    """(document, address) of everything that was asked for since the last call."""
    found = []
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            asked = message["params"]
            found.append((asked.get("documentURL", ""), asked["request"]["url"]))
    return found


def _log_in(driver: Any, lab: Any) -> None:
    driver.get(lab.stack.airflow_url)
    _until(driver, lambda d: d.find_element(By.NAME, "username")).send_keys("admin")
    password = (lab.home / "secrets" / "admin.password").read_text().strip()
    driver.find_element(By.NAME, "password").send_keys(password)
    driver.find_element(By.CSS_SELECTOR, "button[type=submit]").click()


def _open_page(driver: Any) -> None:
    """From Airflow's navigation into the page's frame."""
    link = _until(driver, lambda d: d.find_element(By.CSS_SELECTOR, "a[href$='plugin/hermes']"))
    link.click()
    frame = _until(driver, lambda d: d.find_element(By.CSS_SELECTOR, "iframe[title=Hermes]"))
    driver.switch_to.frame(frame)


def test_nobody_sees_the_page_without_a_login(lab: Any) -> None:
    answer = httpx.get(f"{lab.stack.airflow_url}/hermes/", trust_env=False, timeout=PATIENCE_S)
    assert (answer.status_code, "Log in to Airflow" in answer.text) == (401, True)
    for path in ("sweeps", "sweep?sweep=x", "what-if?policy=fifo", "explain?trial=x/1"):
        address = f"{lab.stack.airflow_url}/hermes/{path}"
        answer = httpx.get(address, trust_env=False, timeout=PATIENCE_S)
        assert answer.status_code == 401


def test_a_person_sees_who_trains_and_why_and_what_another_policy_would_do(
    chromium: Any, lab: Any, sweep: Any
) -> None:
    _log_in(chromium, lab)
    _open_page(chromium)
    running = _until(chromium, _has("#holders", rf"trial (\d) {sweep.id} user admin running"))
    trial = f"{sweep.id}/{running[1]}"
    _until(chromium, _has("#queue", rf"trial \d {sweep.id} user admin (pending|waiting)"))
    _until(chromium, _has("#decisions", r"start"))
    form = chromium.find_element(By.NAME, "trial")
    form.send_keys(trial)
    before = _text(chromium, "#holders")
    _until(chromium, lambda d: _text(d, "#holders") not in (before, ""))
    assert form.get_attribute("value") == trial  # the refresh has left it alone
    if picture := os.environ.get("HERMES_SCREENSHOT"):
        chromium.switch_to.default_content()
        assert chromium.save_screenshot(picture)
        chromium.switch_to.frame(chromium.find_element(By.CSS_SELECTOR, "iframe[title=Hermes]"))
    chromium.find_element(By.CSS_SELECTOR, "form[action=explain] button").click()
    _until(chromium, _has("#standing", rf"{trial} is \w+( on GPU \d)?, at step"))
    assert "because" in _text(chromium, "#standing")
    chromium.find_element(By.LINK_TEXT, "Pool").click()
    _until(chromium, _has("#holders", "running"))
    Select(chromium.find_element(By.NAME, "policy")).select_by_visible_text("fifo")
    chromium.find_element(By.CSS_SELECTOR, "form[action=what-if] button").click()
    _until(chromium, _has("h1", r"What if the policy were fifo\?"))
    assert re.search(rf"{sweep.id}/\d goes on \d \d", _text(chromium, "#outcome"))
    chromium.find_element(By.LINK_TEXT, "Sweeps").click()
    _until(chromium, _has("#sweeps", rf"{sweep.id} running .* \d of 4 .* compare trials"))
    chromium.find_element(By.LINK_TEXT, sweep.id).click()
    _sees_a_sweep_grow(chromium, sweep)
    _looks_only_at_airflow(chromium, lab)


def _sees_a_sweep_grow(driver: Any, sweep: Any) -> None:
    """Its trials, its decisions and both pictures, of which the curves are drawn again."""
    _until(driver, _has("#trials", r"trial \d (running|stopping)"))
    _until(driver, _has("#decisions", rf"{sweep.id}/\d start"))
    pictures = "return [...document.querySelectorAll('figure img')].map(i => i.naturalWidth > 100)"
    _until(driver, lambda d: d.execute_script(pictures) == [True, True])

    def curves() -> str:
        return str(driver.find_element(By.CSS_SELECTOR, "#curves img").get_attribute("src"))

    before = curves()
    _until(driver, lambda _: curves() != before)


def _looks_only_at_airflow(driver: Any, lab: Any) -> None:
    """No script was refused or failed in the frame, and it asked nobody but this Airflow."""
    page = f"{lab.stack.airflow_url}/hermes/"
    errors = [e["message"] for e in driver.get_log("browser") if e["level"] == "SEVERE"]
    assert [e for e in errors if "/hermes/" in e or "Content Security" in e] == []
    asked = [url for document, url in _requests(driver) if document.startswith(page)]
    assert len(asked) > 3
    assert [u for u in asked if not u.startswith((page, "data:"))] == []


def test_the_page_wears_the_theme_that_was_chosen_in_airflow(
    chromium: Any, lab: Any, sweep: Any
) -> None:
    _log_in(chromium, lab)
    _open_page(chromium)
    _until(chromium, lambda d: d.find_element(By.ID, "pool"))
    seen = {}
    for theme in ("light", "dark"):
        chromium.execute_script("localStorage.setItem('theme', arguments[0])", theme)
        chromium.execute_script("location.reload()")
        _until(chromium, lambda d, t=theme: d.execute_script(
            "return document.documentElement.dataset.theme") == t)  # fmt: skip
        body = chromium.find_element(By.TAG_NAME, "body")
        seen[theme] = body.value_of_css_property("background-color")
    assert seen == {"light": "rgba(255, 255, 255, 1)", "dark": "rgba(17, 20, 24, 1)"}


PAGE_SCRIPT = Path(hermes_ops.__file__).parent / "airflow" / "page" / "assets" / "page.js"


@pytest.fixture
def served(chromium: Any) -> Iterator[dict[str, str]]:
    """The parts of a page that the browser shows, which refreshes itself, by name."""
    parts = {"pool": "pool", "queue": "queue"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            sections = "".join(
                f"<section id={name} data-live>{part}</section>" for name, part in parts.items()
            )
            head = "<body data-refresh-s=0.1><p id=stale></p>"
            body = f"{head}<main>{sections}</main><script>{PAGE_SCRIPT.read_text()}</script>"
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        chromium.get(f"http://127.0.0.1:{server.server_port}/")
        yield parts
        chromium.get("about:blank")
        server.shutdown()


def test_a_page_shows_parts_that_have_come_and_removes_those_that_have_gone(
    chromium: Any, served: dict[str, str]
) -> None:
    def show(*names: str) -> None:
        served.clear()
        served.update({name: name for name in names})
        _until(chromium, lambda d: _text(d, "main") == " ".join(names))

    _until(chromium, lambda d: _text(d, "main") == "pool queue")
    show("holders", "pool", "teams", "queue", "decisions")
    show("queue")
    assert _text(chromium, "main") == "queue"


def _queue(*trials: str, after: str) -> str:
    """A table that is wider than its box: of each trial a link and how long it waits."""
    rows = "".join(
        f"<tr><td><a href='#{trial}'>{trial}</a><td>after {after}</tr>" for trial in trials
    )
    table = f"<table style='width: 50em'>{rows}</table>"
    return f"<div style='width: 5em; overflow: auto'>{table}</div>"


FOCUSED = "return document.activeElement.textContent"
SCROLLED = "return document.querySelector('div').scrollLeft"


def test_a_refresh_leaves_the_focus_and_where_a_table_is_scrolled_to(
    chromium: Any, served: dict[str, str]
) -> None:
    served["queue"] = _queue("a", "b", "c", after="1 s")
    _until(chromium, _has("#queue", "after 1 s"))
    chromium.execute_script("document.querySelector('a[href=\"#b\"]').focus()")
    chromium.execute_script("document.querySelector('div').scrollLeft = 120")
    for trials in (("c", "a", "b"), ("b", "d"), ("e", "f", "g", "b", "b", "h"), ("b",)):
        after = f"{len(trials)} s, then {trials[0]}"
        served["queue"] = _queue(*trials, after=after)
        _until(chromium, _has("#queue", after))
        assert _text(chromium, "#queue") == " ".join(f"{t} after {after}" for t in trials)
        assert chromium.execute_script(FOCUSED) == "b"
        assert chromium.execute_script(SCROLLED) == 120


def test_a_link_with_the_focus_never_becomes_the_link_to_another_trial(
    chromium: Any, served: dict[str, str]
) -> None:
    served["queue"] = _queue("a", "b", after="1 s")
    _until(chromium, _has("#queue", "after 1 s"))
    chromium.execute_script("document.querySelector('a[href=\"#a\"]').focus()")
    served["queue"] = _queue("b", "c", after="2 s")
    _until(chromium, _has("#queue", "c after 2 s"))
    assert chromium.switch_to.active_element.tag_name == "body"


def test_a_page_says_that_a_part_with_selected_text_is_not_refreshed(
    chromium: Any, served: dict[str, str]
) -> None:
    select = "getSelection().selectAllChildren(document.getElementById('queue'))"
    chromium.execute_script(select)
    served.update(pool="newer", queue="newer")
    _until(chromium, _has("#stale", "text is selected"))
    assert _text(chromium, "main") == "newer queue"
    chromium.execute_script("getSelection().removeAllRanges()")
    _until(chromium, lambda d: _text(d, "main") == "newer newer")
    _until(chromium, lambda d: _text(d, "#stale") == "")


@pytest.mark.parametrize("width", [375, 1000])
def test_the_page_fits_a_narrow_window_whatever_the_names_and_cuts_no_time_to_pieces(
    chromium: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("HERMES_HOME", str(tmp_path))
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path))  # the first import of Airflow writes there
    from tests.unit.airflow.page.builders import Mlflow, Users, decide, page_of, planned

    monkeypatch.setattr("airflow.api_fastapi.app._AuthManagerState.instance", Users())
    decide("start", "it converges best")
    with page_of(planned(), Mlflow()) as get:
        text = get("/").text.replace("digits-1<", f"{'long-name-' * 20}<")
    (tmp_path / "page.html").write_text(text.replace("digits-1/0<", f"{'s' * 200}/0<"))
    window = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", window)
    chromium.get((tmp_path / "page.html").as_uri())
    whole, seen, least, cut = chromium.execute_script(
        "const cells = [...document.querySelectorAll('td')];"
        "const texts = cells.filter((cell) => cell.classList.contains('text'));"
        "return [document.documentElement.scrollWidth, innerWidth,"
        " Math.min(...texts.map((cell) => cell.offsetWidth)),"
        " cells.filter((cell) => cell.scrollWidth > cell.clientWidth).map((c) => c.innerText)]"
    )
    assert whole <= seen
    assert least > 60
    assert cut == []


def test_a_report_draws_all_its_pictures_without_a_network(
    chromium: Any, lab: Any, sweep: Any, tmp_path: Path
) -> None:
    said = lab.hermes("sweep", "report", sweep.id, "--out", str(tmp_path / "report"))
    assert said.returncode == 0, said.stderr
    chromium.execute_cdp_cmd("Network.enable", {})
    chromium.execute_cdp_cmd(
        "Network.emulateNetworkConditions",
        {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0},
    )
    _requests(chromium)
    chromium.get_log("browser")
    chromium.get((tmp_path / "report" / "report.html").as_uri())
    drawn = chromium.execute_script(
        "return [...document.images].map((i) => [i.alt, i.complete && i.naturalWidth > 100])"
    )
    assert len(drawn) >= 3
    assert [alt for alt, is_drawn in drawn if not is_drawn] == []
    for section in chromium.find_elements(By.CSS_SELECTOR, "main > section"):
        assert section.find_elements(By.CSS_SELECTOR, "img, .missing, table, .story, pre")
    chromium.find_element(By.CSS_SELECTOR, "table.sortable th button").click()
    assert chromium.find_elements(By.CSS_SELECTOR, "th[aria-sort]")
    assert [e["message"] for e in chromium.get_log("browser")] == []
    outside = [url for _, url in _requests(chromium) if not url.startswith(("file:", "data:"))]
    assert outside == []


def test_a_report_with_long_names_is_no_wider_than_its_window(
    chromium: Any, tmp_path: Path
) -> None:
    trial = TrialSummary(0, "finished", {"k" * 60: "q" * 200}, final=0.5, best=0.5, steps=5)
    summary = SweepSummary("s" * 250, "finished", (trial,), "m" * 250, "minimize", 60.0)
    path = tmp_path / "report.html"
    path.write_text(page(summary, {}, (), Background()))
    chromium.get(path.as_uri())
    whole, seen = chromium.execute_script(
        "return [document.documentElement.scrollWidth, innerWidth]"
    )
    assert whole <= seen


def test_one_address_opens_a_sweeps_trials_in_mlflow_as_a_table_and_as_curves(
    chromium: Any, lab: Any, sweep: Any
) -> None:
    with closing(Tracker(lab.stack.mlflow_url)) as tracker:
        ref = _until(chromium, lambda _: tracker.find_sweep(sweep.id))
        address = tracker.comparison_url(ref)
    chromium.set_window_size(2400, 1000)  # columns beyond its edge are not in the page
    chromium.get(address)
    headings = r"(?=.*\bhermes\.state\b)(?=.*\bloss\b)(?=.*\brate\b)"
    _until(chromium, _has("main", headings))
    page = _text(chromium, "main")
    assert "trial-001" in page
    assert re.search(r"\b[2-4] matching runs", page)  # its trials alone, those that have begun
    chromium.get(f"{address}&compareRunsMode=CHART")
    _until(chromium, _has("main", "Learning curves"))
    curves = (
        ".js-plotly-plot .scatterlayer .trace .lines path, .js-plotly-plot .gl-container canvas"
    )
    _until(chromium, lambda d: d.find_elements(By.CSS_SELECTOR, curves))
