"""Priority classes and a notice in a live pool of two teams: who leaves, what people are told."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

OWNER, BORROWER = "hermes-controller", "admin"
"""Two Airflow users that each stack has."""

NOTICE_S = 6.0
PAUSE_S = 0.5  # in each epoch, as long as the trials last
QUOTA = {
    "teams": [
        {"name": "vision", "guaranteed": 1, "users": [BORROWER]},
        {"name": "speech", "guaranteed": 1, "users": [OWNER]},
    ],
    "classes": [{"name": "interactive", "teams": ["vision"]}],
    "reclaim_notice_seconds": NOTICE_S,
}


@pytest.fixture(scope="module")
def shared(
    lab: Any, harness: Any, second_user: Any, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """A night's sweep holds both GPUs; an interactive one of its team comes, then the other team.

    The other team may not use the class interactive, and tries.
    """
    lasts = harness.slow_file(tmp_path_factory.mktemp("classes"))

    def start(name: str, trials: int, of_class: str | None, client: Any = None) -> Any:
        content = harness.stub(name, harness.alike(trials), harness.LONG, PAUSE_S, slow_while=lasts)
        return lab.start(content | {"class": of_class}, client)

    told: dict[str, str] = {}
    # Without quanta a trial that has just begun may be stopped.
    with lab.policy("fifo", guard_k=0), lab.quota(QUOTA):
        night = start("night", 2, "nightly")
        night.await_preemptible(2, PAUSE_S)
        live = start("live", 1, "interactive")
        harness.await_(lambda: live.on_gpus() == {0})
        refused = start("refused", 1, "interactive", second_user)
        assert refused.await_end() == "failed"
        told["status"] = harness.await_(lambda: _status(lab, night))
        own = start("own", 1, None, second_user)
        harness.await_(lambda: own.on_gpus() == {0})
        told["stopped"] = lab.hermes("explain", f"{night.id}/0", "--last", "9").stdout
        lasts.unlink()
        for sweep in (own, live, night):
            sweep.await_end()
        told["usage"] = harness.await_(lambda: _usage(lab))
    return night, live, own, refused, told


def _status(lab: Any, night: Any) -> str:
    """`hermes status` once the preempted trial waits, which is stopping a few seconds before."""
    status = str(lab.hermes("status").stdout)
    return status if f"{night.id}/1 waiting" in status else ""


def _usage(lab: Any) -> str:
    """The page's usage by team as CSV; empty while it is being read."""
    query = {"by": "team", "days": 2, "form": "csv"}
    answer = lab.airflow.get("/hermes/usage", params=query)
    return str(answer.text) if answer.status_code == 200 else ""


def _decided(sweep: Any, action: str, trial: int) -> dict[str, Any]:
    found = [d for d in sweep.decisions() if (d["action"], d["trial"]) == (action, trial)]
    assert len(found) == 1, found
    return dict(found[0])


def test_a_higher_class_preempts_a_lower_one_of_its_team(shared: Any) -> None:
    night, live, *_ = shared
    stop = _decided(night, "stop", 1)
    assert stop["reason"] == f"preempted because {live.id}/0 of team vision is of a higher class"
    assert not [d for d in night.decisions() if (d["action"], d["trial"]) == ("notice", 1)]


def test_the_other_team_gets_its_gpu_after_the_notice_and_from_the_lower_class(
    shared: Any,
) -> None:
    night, live, own, _, _ = shared
    notice, stop = _decided(night, "notice", 0), _decided(night, "stop", 0)
    assert "then is preempted: team speech wants its guaranteed GPUs back" in notice["reason"]
    assert "preempted because team speech wants its guaranteed GPUs back" in stop["reason"]
    assert stop["time_s"] - notice["time_s"] >= NOTICE_S
    assert [s["outcome"] for s in live.segments(0)] == ["finished"]
    assert own.segments(0)[0]["start_s"] >= stop["time_s"]


def test_the_trial_and_people_are_told_of_the_notice(shared: Any) -> None:
    night, _, _, _, told = shared
    assert "Notice: it keeps its GPUs until" in night.log("trial", 0)
    assert "notice on GPU" in told["stopped"]
    assert f"of user {BORROWER}, team vision, class nightly" in told["stopped"]
    assert (
        f"{night.id}/1 waiting at rank 1: user {BORROWER}, team vision, class nightly"
        in (told["status"])
    )
    assert "user admin, team vision, class interactive, own" in told["status"]


def test_a_class_that_a_user_may_not_use_fails_the_run_with_what_is_allowed(shared: Any) -> None:
    *_, refused, _ = shared
    assert refused.live() == []
    log = refused.log("plan")
    assert f"class: found user {OWNER} of team speech may not use the class 'interactive'" in log
    assert "allowed: one of normal, nightly" in log


def test_nothing_is_lost_and_all_trials_end(shared: Any) -> None:
    night, live, own, _, _ = shared
    outcomes = [[s["outcome"] for s in night.segments(number)] for number in range(2)]
    assert outcomes == [["preempted", "finished"]] * 2
    for sweep in (night, live, own):
        assert set(sweep.states().values()) == {"finished"}


def test_the_page_counts_the_use_of_each_team(shared: Any) -> None:
    head, *rows = shared[-1]["usage"].splitlines()
    assert head.startswith("team,trials,gpu_seconds,")
    of_team = {row.partition(",")[0]: row.split(",") for row in rows}
    assert int(of_team["vision"][1]) >= 3  # other tests of this stack may have used it as well
    assert float(of_team["speech"][2]) > 0
