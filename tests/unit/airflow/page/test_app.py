from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.airflow.control.pool_file import view_path
from hermes_ops.airflow.metadata_rows import PoolRow, RunRow
from hermes_ops.airflow.page import APP, VIEW, LazyApp
from hermes_ops.airflow.page.access import UNSEEN
from hermes_ops.tracking import LatestMetric
from tests.unit.airflow.builders import SWEEP, run_row, sweep_record
from tests.unit.airflow.page.builders import (
    HOSTILE,
    NOW_S,
    SECRET,
    Database,
    Get,
    Mlflow,
    Text,
    Users,
    decide,
    read,
    trial_run,
    view,
)

# -- who may see it ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/sweeps", "/sweep?sweep=x", "/explain?trial=x/1", "/what-if?policy=fifo", "/else"),
        *("/usage", "/usage?form=csv"),
    ],
)
def test_nobody_gets_more_than_the_way_to_the_login(get: Get, path: str) -> None:
    decide("start", "it converges")
    answer = get(path, user="")
    assert answer.status_code == (404 if path == "/else" else 401)
    assert SWEEP not in answer.text
    assert ("/auth/login?next=" in answer.text) == (path != "/else")


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/sweeps", f"/sweep?sweep={SWEEP}", f"/explain?trial={SWEEP}/0"),
        *("/what-if?policy=fifo", "/usage", "/usage?form=json"),
    ],
)
def test_a_user_who_may_read_no_dag_is_refused(get: Get, path: str) -> None:
    decide("start", "it converges")
    answer = get(path, user="bob")
    assert answer.status_code == 403
    assert SWEEP not in answer.text


def test_of_dags_that_a_user_may_not_read_only_the_load_is_shown(
    get: Get, users: Users, database: Database
) -> None:
    users.dags["eve"] = {"another"}
    view(reason=f"ahead of {SWEEP}/1", rank=1)
    decide("start", "it converges")
    seen = read(get(user="eve"))
    assert SWEEP not in seen
    assert "it converges" not in seen
    assert seen.count(UNSEEN) == 3
    assert "Sweeps that you may not see: 1" in seen
    assert get("/explain", user="eve", trial=f"{SWEEP}/0").status_code == 403
    assert get("/sweep", user="eve", sweep=SWEEP).status_code == 403
    assert SWEEP not in read(get("/sweeps", user="eve"))
    changes = read(get("/what-if", user="eve", policy="fifo"))
    assert UNSEEN in changes
    assert SWEEP not in changes


def test_a_reason_that_names_a_trial_of_an_unreadable_sweep_is_veiled(
    get: Get, users: Users, database: Database
) -> None:
    hidden = RunRow(2, "private", "run-1", "plan", "running", 60.0, run_row().sweep)
    database.runs = (*database.runs, hidden)
    view(reason=f"ahead of private:run-1/4 and {SWEEP}/1 by 1/3", runner_up="private:run-1/4")
    decide("start", "ahead of private:run-1/7")
    for path in ("/", "/sweeps", f"/sweep?sweep={SWEEP}", f"/explain?trial={SWEEP}/0"):
        answer = get(path)
        assert "private" not in answer.text
        assert path == "/sweeps" or f"ahead of {UNSEEN}" in read(answer)
    assert f"and {SWEEP}/1 by 1/3" in read(get())
    users.dags["ann"].add("private")
    assert f"ahead of private:run-1/4 and {SWEEP}/1 by 1/3" in read(get())


def test_a_trial_of_a_dag_whose_name_has_letters_beyond_ascii_is_veiled_too(
    get: Get, users: Users, database: Database
) -> None:
    hidden = RunRow(2, "prévision", "run-1", "plan", "running", 60.0, run_row().sweep)
    database.runs = (*database.runs, hidden)
    view(reason="ahead of prévision:run-1/4")
    assert f"ahead of {UNSEEN}" in read(get())
    assert "vision" not in get().text
    users.dags["ann"].add("prévision")
    assert "ahead of prévision:run-1/4" in read(get())


def test_a_pool_that_the_user_may_not_read_is_not_there(get: Get, users: Users) -> None:
    users.pools = {"other"}
    assert "no pool that you may read" in read(get())
    assert get(pool="gpus").status_code == 404
    assert get("/what-if", policy="fifo").status_code == 404


def test_a_pool_is_there_after_the_last_of_its_sweeps_has_ended(get: Get, users: Users) -> None:
    users.pools = {"gpus", "big"}
    assert "No sweep runs in this pool" not in read(get())
    for path in ("/", "/usage", "/what-if"):
        answer = get(path, pool="big", **({"policy": "fifo"} if path == "/what-if" else {}))
        assert answer.status_code == 200
        assert 'href="usage?pool=big"' in answer.text
    users.pools = {"gpus", "x" * 250, "../gpus"}
    for name in ("big", "x" * 250, "../gpus"):  # no sweep can name the last two
        assert get(pool=name).status_code == 404


# -- what it shows -------------------------------------------------------------------------------


def test_the_page_shows_who_holds_what_and_who_waits_with_score_and_rank(get: Get) -> None:
    view()
    decide("start", "it was the first")
    seen = read(get())
    assert "policy" in seen
    assert re.search(r"1 trial 0 digits-1 running 1970-01-01 00:01:40 UTC 1 min 40 s", seen), seen
    assert "3 of 20 0.5" in seen
    assert "it converges best" in seen
    assert "gain 0.25" in seen
    assert "0 held by no trial" in seen
    queue = seen.partition("Queue")[2]
    assert re.search(r"trial 1 digits-1 waiting .* trial 2 digits-1 pending", queue)
    assert "start 1 hermes it was the first" in seen.partition("Last decisions")[2]


def test_a_trial_that_was_told_to_leave_is_shown_leaving(get: Get, database: Database) -> None:
    database.rows[SWEEP][0][1]["hermes_stop"] = {"epoch": 1, "reason": "x", "at_s": 150.0}
    assert "trial 0 digits-1 stopping" in read(get())


def test_the_owner_and_what_each_team_holds_are_shown(get: Get, users: Users) -> None:
    holding = {"team": "vision", "guaranteed": 1, "limit": 3, "held": 2, "borrowed": 1}
    facts = {"user": "carla", "team": "vision", "borrows": True}
    view(**facts)
    path = view_path("gpus")
    quota = {"teams": [{**holding, "waiting": 4}], "scaling": "the guarantees are scaled"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quota": quota}))
    seen = read(get())
    assert "trial 0 digits-1 user carla, team vision, its GPUs are borrowed running" in seen
    assert "Team vision: 2 GPUs held, 1 of them borrowed; 1 guaranteed, at most 3" in seen
    assert "the guarantees are scaled" in seen
    explained = read(get("/explain", trial=f"{SWEEP}/0"))
    assert "of user carla, team vision, its GPUs are borrowed because" in explained
    users.dags["eve"] = {"another"}
    assert "carla" not in read(get(user="eve"))


def test_notices_and_used_hours_of_others_are_shown_to_those_alone_who_may_see_their_sweeps(
    get: Get, users: Users
) -> None:
    view(notice_s=300.0, reason="loses borrowed GPUs to team speech")
    path = view_path("gpus")
    used = {"user": "carla", "period": "day", "gpu_hours": 3.0, "limit_gpu_hours": 4.0}
    team = {"team": "vision", "guaranteed": 1, "limit": None, "held": 1, "borrowed": 1}
    quota = {"teams": [{**team, "waiting": 0}], "users": [used]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quota": quota}))
    seen = read(get())
    assert f"Notice: {SWEEP}/0 loses borrowed GPUs to team speech" in seen
    assert "User carla: 3 of 4 GPU-hours of this day used" in seen
    users.dags["eve"] = {"another"}
    redacted = read(get(user="eve"))
    assert "Team vision: 1 GPU held" in redacted
    assert "Notice" not in redacted
    assert "carla" not in redacted


def test_slots_of_other_tasks_count(get: Get, database: Database) -> None:
    database.pool_row = PoolRow(2, 1)
    assert "1 slots held by other tasks" in read(get())


def test_an_empty_pool_is_a_page_too(get: Get, database: Database) -> None:
    database.runs = ()
    seen = read(get())
    assert "No trial waits" in seen
    assert "No sweep runs in this pool" in seen
    assert "0 held by no trial 1 held by no trial" in seen
    assert "There is no trial to decide on" in read(get("/what-if", policy="fifo"))


def test_a_pool_that_airflow_does_not_have_is_said_with_the_remedy(
    get: Get, database: Database
) -> None:
    database.runs, database.pool_row = (), None
    assert "Airflow has no pool gpus: create it" in read(get())
    answer = get("/what-if", policy="fifo")
    assert (answer.status_code, "create it" in answer.text) == (400, True)


def test_without_a_view_or_with_an_old_one_the_page_says_what_is_missing(get: Get) -> None:
    assert "No controller of this pool has written its view here" in read(get())
    view()
    assert "it may have ended" not in read(get())
    path = view_path("gpus")
    path.write_text(json.dumps({**json.loads(path.read_text()), "time_s": NOW_S - 60}))
    assert "it may have ended" in read(get())


def test_a_database_that_is_away_is_said_without_its_address(
    get: Get, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    database.away = True
    answer = get()
    assert answer.status_code == 503
    assert "did not answer" in answer.text
    assert "db.internal" not in answer.text
    assert "db.internal" in caplog.text


# -- explain and what-if -------------------------------------------------------------------------


def test_explain_says_what_the_command_line_says(get: Get) -> None:
    view()
    decide("start", "it was the first")
    seen = read(get("/explain", trial=f"{SWEEP}/0"))
    assert "digits-1/0 is running on GPU 1, at step 3, value 0.5, 0 preemptions" in seen
    assert "because it converges best" in seen
    assert "runner-up digits-1/1" in seen
    assert "it would change with a gain of 0.3" in seen
    assert "Decisions about it (1)" in seen


def test_explain_says_what_fails_the_deadline_and_why_a_trial_cannot_be_preempted(
    get: Get,
) -> None:
    view(terms={"gain": 1 / 3})
    path = view_path("gpus")
    facts = {"deadline_s": 4e9, "not_preemptible": {"0": "it has no checkpoint"}}
    problem = {"sweep": SWEEP, "trial": 0, "step": "write its lease", "tries": 2, "since_s": 100.0}
    found = json.loads(path.read_text()) | {
        "sweeps": {SWEEP: facts},
        "problems": [{**problem, "reason": "Airflow refused it"}],
    }
    path.write_text(json.dumps(found))
    seen = read(get("/explain", trial=f"{SWEEP}/0"))
    assert "it cannot be preempted now it has no checkpoint" in seen
    assert f"Deadline of {SWEEP}: 2096-10-02 07:06:40 UTC" in seen
    assert f"Problem of trial 0 of {SWEEP}: write its lease failed 2 times" in seen
    assert "gain 0.3333 " in seen


def test_a_trial_is_explained_by_the_view_of_its_own_pool(
    get: Get, users: Users, database: Database
) -> None:
    users.pools = {"gpus", "big"}
    record = sweep_record(pool="big")
    database.runs = (
        *database.runs,
        RunRow(5, "hermes_sweep", "wide-1", "plan", "running", 60.0, record),
    )
    view(id="wide-1/0")
    view_path("gpus").rename(view_path("big"))
    view()
    for pool in ("gpus", "big"):
        assert "wide-1/0 is running on GPU 1" in read(get("/explain", trial="wide-1/0", pool=pool))


@pytest.mark.parametrize(
    ("trial", "code", "words"),
    [
        ("digits-1", 400, "write SWEEP/NUMBER"),
        ("../../etc/1", 404, "knows no sweep"),
        (f"{SWEEP}/7", 400, "nothing is known"),
        ("x" * 600, 422, "wrong trial"),
    ],
)
def test_a_trial_that_is_none_is_a_sentence(get: Get, trial: str, code: int, words: str) -> None:
    answer = get("/explain", trial=trial)
    assert (answer.status_code, words in Text(answer.text).text) == (code, True), answer.text


@pytest.mark.parametrize("path", ["/explain?trial=a%00/1", "/sweep?sweep=a%00"])
def test_a_name_that_no_database_can_hold_is_refused_before_it_is_asked(
    get: Get, path: str
) -> None:
    answer = get(path)
    assert (answer.status_code, "has a wrong" in Text(answer.text).text) == (422, True)


def test_a_what_if_shows_the_next_decision_and_applies_nothing(
    get: Get, home: Path, database: Database
) -> None:
    before = sorted(home.rglob("*"))
    seen = read(get("/what-if", policy="fifo"))
    assert "What if the policy were fifo?" in seen
    assert "digits-1/0 goes on 1 1" in seen
    assert "digits-1/1 resumes – 0" in seen
    assert re.search(r"digits-1/2 waits – –", seen)
    assert "Nothing has been applied" in seen
    assert sorted(home.rglob("*")) == before


def test_a_what_if_keeps_the_quota_of_the_pool(get: Get, home: Path) -> None:
    nobody = {"teams": [], "others": {"borrow": 0}}
    (home / "quota-gpus.json").write_text(json.dumps({"quota": nobody}))
    seen = read(get("/what-if", policy="fifo"))
    assert "the team of other users may hold 0 GPUs now, 0 of them its own" in seen


def test_a_what_if_of_the_policy_in_force_takes_its_options(get: Get, home: Path) -> None:
    (home / "policy.json").write_text('{"policy": "hermes", "options": {"threshold": 3}}')
    assert '"threshold": 3' in read(get("/what-if", policy="hermes"))
    assert "threshold" not in read(get("/what-if", policy="fifo"))


@pytest.mark.parametrize("policy", ["fastest", "gandiva", "", HOSTILE])
def test_a_policy_that_is_none_or_only_simulated_is_refused_with_those_that_are(
    get: Get, policy: str
) -> None:
    answer = get("/what-if", policy=policy)
    assert answer.status_code == 400
    assert "frontrunner" in answer.text
    assert "<script>alert" not in answer.text


def test_every_live_policy_can_be_asked(get: Get) -> None:
    from hermes_ops.policies import live_policies

    for name in live_policies():
        assert f"What if the policy were {name}?" in read(get("/what-if", policy=name))


def test_a_what_if_says_when_earlier_sweeps_could_not_be_read(
    get: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "MLflow did not tell what earlier sweeps have shown"
    assert words not in read(get("/what-if", policy="frontrunner"))
    monkeypatch.setattr(Mlflow, "away", True)
    assert words in read(get("/what-if", policy="frontrunner"))
    assert words not in read(get("/what-if", policy="fifo"))


def test_a_second_what_if_asks_mlflow_for_what_is_new_alone(get: Get, mlflow: Mlflow) -> None:
    asked: list[str] = []
    latest = {"val_loss": LatestMetric(0.5, 3, 3_000)}
    trials = tuple(
        trial_run(number, "running", 0.5, config={}, metrics=latest) for number in range(2)
    )
    monkeyed: Any = mlflow
    monkeyed.trials = lambda ref, *, open_only=False: trials

    def history(run_id: str, metric: str) -> tuple[LatestMetric, ...]:
        asked.append(run_id)
        return (LatestMetric(0.5, 3, 3_000),)

    monkeyed.history = history
    for _ in range(3):
        assert get("/what-if", policy="fifo").status_code == 200
    assert asked == ["run-0", "run-1"]


def test_one_what_if_at_a_time_so_that_nobody_keeps_the_server_busy(get: Get) -> None:
    from hermes_ops.airflow.page import what_if

    with what_if._ONE:
        answer = get("/what-if", policy="fifo")
    assert (answer.status_code, "ask again" in answer.text) == (400, True)
    assert get("/what-if", policy="fifo").status_code == 200


# -- safety --------------------------------------------------------------------------------------


def test_hostile_names_are_text(get: Get, database: Database) -> None:
    view(reason=HOSTILE, terms={HOSTILE: HOSTILE}, would_change=HOSTILE, value=HOSTILE)
    decide(HOSTILE, HOSTILE)
    evil = f"a'{HOSTILE}"
    database.runs = (RunRow(1, "hermes_sweep", evil, "plan", "running", 50.0, run_row().sweep),)
    database.rows = {evil: database.rows[SWEEP]}
    decide("start", HOSTILE, sweep=evil)
    pages = (get(), get("/sweep", sweep=evil), get("/explain", trial=f"{evil}/0"),
             get("/what-if", policy="fifo"))  # fmt: skip
    for answer in pages:
        page = Text(answer.text)
        assert page.tags.count("script") == 1
        assert HOSTILE in page.text


def test_secrets_of_a_sweep_are_nowhere(get: Get) -> None:
    view()
    decide("start", "it was the first")
    paths = ("/", "/sweeps", f"/sweep?sweep={SWEEP}", f"/explain?trial={SWEEP}/0")
    pages = [get("/what-if", policy="fifo"), *map(get, paths)]
    assert [p.status_code for p in pages] == [200] * 5
    assert not any(SECRET in p.text or "API_TOKEN" in p.text for p in pages)


def test_the_browser_may_run_and_load_nothing_but_the_page_itself(get: Get) -> None:
    import base64
    import hashlib

    answer = get()
    policy = answer.headers["content-security-policy"]
    (script,) = re.findall(r"<script>(.*?)</script>", answer.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "frame-ancestors 'self'" in policy
    assert answer.headers["cache-control"] == "no-store"
    addresses = Text(answer.text).addresses
    assert addresses
    outside = [a for a in addresses if "//" in a or (":" in a and not a.startswith("data:"))]
    links = re.findall(
        r'<a href="(http[^"]*)" target="_blank" rel="noopener noreferrer">', answer.text
    )
    assert outside == [a.replace("&amp;", "&") for a in links]  # pages of MLflow, when clicked
    assert " style=" not in answer.text
    assert not re.search(r"\son\w+=", answer.text)


def test_nothing_can_be_posted_and_the_application_describes_itself_to_nobody(get: Get) -> None:
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert get(path).status_code == 404
    assert get("/").status_code == 200
    for path in ("/", "/sweeps", f"/sweep?sweep={SWEEP}", "/what-if?policy=fifo"):
        assert get(path, method="POST").status_code == 405


# -- its place in Airflow ------------------------------------------------------------------------


def test_the_plugin_mounts_the_page_and_shows_it_in_the_navigation() -> None:
    from hermes_ops.airflow.plugin import HermesPlugin

    assert HermesPlugin.fastapi_apps == [APP]
    assert HermesPlugin.external_views == [VIEW]
    assert f"/{VIEW['href']}" == f"{APP['url_prefix']}/"


def test_loading_the_plugin_builds_no_application() -> None:
    found = LazyApp()
    assert found._app is None
