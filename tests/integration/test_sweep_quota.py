"""Quotas of a live pool: lent GPUs come back to their team, and the borrower loses nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

OWNER, BORROWER = "hermes-controller", "admin"
"""Two Airflow users that each stack has."""

PAUSE_S = 0.5  # in each epoch, as long as the trials last
TEAMS = {
    "teams": [
        {"name": "vision", "guaranteed": 2, "users": [BORROWER]},
        {"name": "speech", "guaranteed": 2, "users": [OWNER]},
    ]
}


def _explained(lab: Any, sweep: Any, number: int) -> str:
    return str(lab.hermes("explain", f"{sweep.id}/{number}", "--last", "9").stdout)


@pytest.fixture(scope="module")
def reclaimed(
    lab: Any, harness: Any, second_user: Any, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """One team holds all four GPUs; the other one comes, gets its two, and goes again."""
    folder = tmp_path_factory.mktemp("quota")
    borrower_lasts, owner_lasts = harness.slow_file(folder), harness.slow_file(folder)

    def start(name: str, trials: int, slow_while: Any, client: Any = None) -> Any:
        options = {"slow_while": slow_while}
        content = harness.stub(name, harness.alike(trials), harness.LONG, PAUSE_S, **options)
        return lab.start(content, client)

    told: dict[str, str] = {}
    # Without quanta the policy chooses freely; with them, those whose quantum is over first.
    with (
        lab.pool(4),
        lab.policy("fifo", guard_k=0),
        lab.quota(TEAMS) as told["set"],
        lab.sampled() as sampler,
    ):
        borrower = start("borrower", 4, borrower_lasts)
        borrower.await_preemptible(4, PAUSE_S)
        owner = start("owner", 2, owner_lasts, second_user)
        harness.await_(lambda: len(owner.on_gpus()) == 2)
        told["status"] = lab.hermes("status").stdout
        told["stopped"] = _explained(lab, borrower, 3)
        told["owner"] = _explained(lab, owner, 0)
        owner_lasts.unlink()
        owner.await_end()
        harness.await_(lambda: len(borrower.on_gpus()) == 4)
        told["lent"] = _explained(lab, borrower, 3)
        borrower_lasts.unlink()
        borrower.await_end()
    return borrower, owner, sampler, told


def test_a_team_that_comes_back_gets_its_gpus_within_one_switch(reclaimed: Any) -> None:
    borrower, owner, _, _ = reclaimed
    stops = [d for d in borrower.decisions() if d["action"] == "stop"]
    assert sorted(d["trial"] for d in stops) == [2, 3]
    assert all("team speech wants its guaranteed GPUs back" in d["reason"] for d in stops)
    assert [len(owner.segments(number)) for number in range(2)] == [1, 1]
    begun_s = max(owner.segments(number)[0]["start_s"] for number in range(2))
    assert begun_s - max(d["time_s"] for d in stops) < 20.0


def test_the_borrower_loses_nothing_and_goes_on_later(reclaimed: Any, harness: Any) -> None:
    borrower, owner, _, _ = reclaimed
    assert set(borrower.states().values()) == set(owner.states().values()) == {"finished"}
    outcomes = [[s["outcome"] for s in borrower.segments(number)] for number in range(4)]
    assert outcomes == [["finished"]] * 2 + [["preempted", "finished"]] * 2
    for number, rate in enumerate(harness.alike(4)):
        borrower.assert_whole(number, rate)


def test_the_pool_is_never_over_committed_by_a_reclaim(reclaimed: Any) -> None:
    _, _, sampler, _ = reclaimed
    assert sampler.most == 4
    assert sampler.doubly_held == []


def test_people_read_who_owns_what_and_for_whom_a_trial_was_stopped(reclaimed: Any) -> None:
    *_, told = reclaimed
    assert "2 teams, 4 of 4 GPUs guaranteed" in told["set"]
    assert "Team speech: 2 GPUs held, 0 of them borrowed; 2 guaranteed" in told["status"]
    assert f"of user {BORROWER}, team vision" in told["stopped"]
    assert "preempted because team speech wants its guaranteed GPUs back" in told["stopped"]
    assert f"of user {OWNER}, team speech\n" in told["owner"]
    assert f"of user {BORROWER}, team vision, its GPUs are borrowed" in told["lent"]


def test_a_user_who_may_not_edit_pools_sets_no_quota(lab: Any) -> None:
    from hermes_ops.airflow.client import AirflowClient
    from hermes_ops.airflow.credentials import AirflowCredentials
    from hermes_ops.errors import NotPermitted

    file = lab.home / "secrets" / "hermes-controller.password"
    client = AirflowClient(AirflowCredentials(lab.stack.airflow_url, OWNER, file))
    with pytest.raises(NotPermitted, match="403"):
        client.confirm_pool_edit("gpus")
    client.close()
    before = lab.airflow.get("/api/v2/pools/gpus").json()
    with lab.quota(TEAMS | {"teams": []}):
        assert lab.airflow.get("/api/v2/pools/gpus").json() == before
        shown = json.loads(lab.hermes("pool", "quota", "--json").stdout)
    assert "Airflow user admin" in shown["quota"]["by"]
