from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.airflow.control.decisions import DecisionLog, decision
from hermes_ops.airflow.control.pool_file import view_path
from hermes_ops.airflow.explanation import deadline_lines
from hermes_ops.airflow.folders import sweep_folder
from hermes_ops.cli import inspection_commands
from hermes_ops.cli.inspection_commands import explanation, place_lines
from hermes_ops.cli.sweep_location import SweepLocation
from hermes_ops.core.model import JobId, Reason, Term
from hermes_ops.errors import HermesError, Unavailable
from tests.unit.airflow.builders import sweep_file

TRIAL = "digits-1/3"


class Mlflow:
    """MLflow's record of the decisions; `away` when it does not answer."""

    uri = "http://mlflow"

    def __init__(self, *decisions: dict[str, Any], known: bool = True, away: bool = False) -> None:
        self.decisions, self.known, self.away = decisions, known, away
        self.runs: list[Any] = []
        self.state = "running"
        self.tags: dict[str, str] = {}
        self.artifacts = self

    def fetch(self, run_id: str, path: str) -> bytes:
        assert (run_id, path) == ("parent", "sweep.yaml")
        return json.dumps(sweep_file()).encode()

    def find_sweep(self, sweep: str, experiment: str | None = None) -> Any:
        if self.away:
            raise Unavailable("MLflow did not answer: try again")
        ref = SimpleNamespace(parent_run_id="parent", sweep_id=sweep)
        return ref if self.known else None

    def read_decisions(self, parent: str) -> Any:
        return self.decisions

    def trials(self, ref: Any) -> Any:
        return self.runs

    def sweep(self, ref: Any) -> Any:
        return SimpleNamespace(state=self.state, tags=self.tags)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HERMES_HOME", str(tmp_path))
    return tmp_path


def connection(mlflow: Mlflow | None = None) -> Any:
    return SimpleNamespace(pool="gpus", tracker=mlflow or Mlflow(known=False))


def standing(**changes: Any) -> None:
    job: dict[str, Any] = {
        "id": TRIAL, "phase": "running", "gpus": [1], "step": 3, "value": 0.5, "preemptions": 2,
        "reason": "it converges best", "terms": {"convergence": 0.25}, "runner_up": "digits-1/4",
        "would_change": "a convergence of 0.3", **changes,
    }  # fmt: skip
    view_path("gpus").write_text(json.dumps({"jobs": [job], "time_s": 0.0, "policy": "hermes"}))


def decide(*actions: str) -> None:
    outside: Any = None
    for action in actions:
        entry = decision(JobId(TRIAL), action, (1,), Reason(f"why {action}", (Term("g", 0.12345),)),
                         time_s=0.0, policy="hermes", options={}, curve_age_s=None)  # fmt: skip
        DecisionLog(outside).append([entry])


def test_a_trial_that_is_bound_to_its_node_is_said_to_be(home: Path) -> None:
    standing(nodes=["node-a"])
    bound = explanation(connection(), TRIAL, 5)
    assert "it may run on node-a only, where its checkpoints are or will be" in bound
    standing(nodes=[])
    assert "only" not in explanation(connection(), TRIAL, 5)


@pytest.mark.parametrize(
    ("value", "words"), [(None, "no value yet"), (1 / 3, "value 0.3333"), ("nan", "value nan")]
)
def test_the_value_of_a_trial_is_in_four_digits_or_said_to_be_missing(
    value: object, words: str
) -> None:
    standing(value=value)
    assert f"at step 3, {words}, 2 preemptions" in explanation(connection(), TRIAL, 5)


def test_a_running_trial_is_explained_with_terms_and_runner_up() -> None:
    standing()
    text = explanation(connection(), TRIAL, 5)
    assert "digits-1/3 is running on GPU 1, at step 3, value 0.5, 2 preemptions" in text
    assert "because: it converges best" in text
    assert "convergence = 0.25" in text
    assert "runner-up: digits-1/4" in text
    assert "it would change with: a convergence of 0.3" in text
    assert "none yet" in text


def test_a_trial_that_cannot_be_preempted_is_explained_with_the_reason() -> None:
    standing()
    assert "preempted now" not in explanation(connection(), TRIAL, 5)
    view = json.loads(view_path("gpus").read_text())
    view["sweeps"] = {"digits-1": {"not_preemptible": {"3": "it writes no checkpoint"}}}
    view_path("gpus").write_text(json.dumps(view))
    text = explanation(connection(), TRIAL, 5)
    assert "  it cannot be preempted now: it writes no checkpoint" in text.splitlines()


def test_a_trial_that_gets_fewer_gpus_after_a_failure_is_explained_with_their_number() -> None:
    standing()
    assert "at most" not in explanation(connection(), TRIAL, 5)
    view = json.loads(view_path("gpus").read_text())
    view["sweeps"] = {"digits-1": {"limited": {"3": "1 GPU, as on 2 it has failed"}}}
    view_path("gpus").write_text(json.dumps(view))
    text = explanation(connection(), TRIAL, 5)
    assert "  it gets at most 1 GPU, as on 2 it has failed" in text.splitlines()


def test_the_deadline_of_its_sweep_is_said() -> None:
    standing()
    view = json.loads(view_path("gpus").read_text())
    view["sweeps"] = {"digits-1": {"deadline_s": 60.0}}
    view_path("gpus").write_text(json.dumps(view))
    text = explanation(connection(), TRIAL, 5)
    said = "Deadline of digits-1: 1970-01-01 00:01:00 UTC, which has passed"
    assert f"  {said}" in text.splitlines()
    assert deadline_lines(view, 0.0) == [said.replace("which has passed", "in 1 min 00 s")]
    assert deadline_lines({"sweeps": {"digits-1": {}}}, 0.0) == []


def test_a_trial_about_which_nothing_was_decided_says_so() -> None:
    standing(reason="", terms={}, gpus=[])
    assert "nothing was decided about it yet" in explanation(connection(), TRIAL, 5)


def test_the_last_decisions_come_newest_first_and_no_more_than_asked() -> None:
    decide("start", "stop", "resize")
    assert "What digits-1/3 does now is not known here: no controller" in explanation(
        connection(), TRIAL, 2
    )
    standing(id="digits-1/4")
    text = explanation(connection(), TRIAL, 2)
    assert "is not in the pool now" in text
    assert "(of 3)" in text
    assert text.index("why resize") < text.index("why stop")
    assert "why start" not in text
    assert "[g=0.1235]" in text


def test_decisions_come_from_mlflow_where_this_machine_has_none() -> None:
    entry = {"trial": 3, "time_s": 0.0, "action": "start", "gpus": [], "reason": "r", "terms": {}}
    text = explanation(connection(Mlflow(entry, {**entry, "trial": 4})), TRIAL, 5)
    assert "(of 1)" in text
    assert "start: r" in text


def test_an_unknown_trial_is_said_to_be_unknown() -> None:
    with pytest.raises(HermesError, match="nothing is known of trial 'digits-1/3', as no contr"):
        explanation(connection(), TRIAL, 5)
    standing(id="digits-1/4")
    with pytest.raises(HermesError, match="nothing is known of trial 'digits-1/3': "):
        explanation(connection(), TRIAL, 5)


def test_an_mlflow_that_is_away_is_not_taken_for_an_unknown_trial() -> None:
    with pytest.raises(Unavailable, match="did not answer"):
        explanation(connection(Mlflow(away=True)), TRIAL, 5)


def test_the_standing_is_shown_though_mlflow_is_away() -> None:
    standing()
    assert "is running" in explanation(connection(Mlflow(away=True)), TRIAL, 5)


def ended(state: str, **tags: str) -> Mlflow:
    mlflow = Mlflow()
    named = {f"hermes.{name}": value for name, value in tags.items()}
    mlflow.runs = [SimpleNamespace(number=3, state=state, tags=named)]
    return mlflow


@pytest.mark.parametrize("in_pool", [True, False])
def test_a_trial_that_has_ended_is_explained_by_its_state_and_reason(in_pool: bool) -> None:
    if in_pool:
        standing(phase="ended", reason="")
    mlflow = ended("failed", reason="no package foo", steps="0")
    text = explanation(connection(mlflow), TRIAL, 5)
    assert text.splitlines()[0] == "digits-1/3 has ended: failed, because: no package foo."
    assert "not in the pool" not in text
    assert "because: nothing was decided" not in text


def test_a_trial_that_was_tried_again_is_explained_with_its_first_failure() -> None:
    mlflow = ended("failed", reason="no disk", steps="4", first_failure="no data\nread: gone")
    assert explanation(connection(mlflow), TRIAL, 5).splitlines()[:4] == [
        "digits-1/3 has ended after step 4: failed, because: no disk",
        "  it was tried more than once; its first failure was:",
        "    no data",
        "    read: gone",
    ]


def test_a_trial_that_goes_on_is_not_said_to_have_ended() -> None:
    standing()
    assert "has ended" not in explanation(connection(ended("running")), TRIAL, 5)


def test_a_trial_that_never_began_is_said_to_have_ended_with_its_sweep() -> None:
    mlflow = ended("finished")
    mlflow.state = "failed"
    text = explanation(connection(mlflow), "digits-1/7", 5)
    assert text.startswith(
        "digits-1/7 has ended: cancelled, because: its sweep had ended before it began (failed)."
    )
    mlflow.state, mlflow.tags = "cancelled", {"hermes.closed": "stopped by ann"}
    why = "its sweep had ended before it began (cancelled: stopped by ann)"
    assert why in explanation(connection(mlflow), "digits-1/7", 5)


def test_a_trial_that_has_not_begun_as_its_sweep_ends_is_explained_by_that() -> None:
    standing()
    view = json.loads(view_path("gpus").read_text())
    view["sweeps"] = {"digits-1": {"trials": 8, "closing": "stopped by ann"}}
    view_path("gpus").write_text(json.dumps(view))
    text = explanation(connection(Mlflow()), "digits-1/7", 5)
    assert text.startswith(
        "digits-1/7 has ended: cancelled, because: its sweep ends before it began (stopped by ann)."
    )
    with pytest.raises(HermesError, match="nothing is known of trial 'digits-1/8'"):
        explanation(connection(Mlflow()), "digits-1/8", 5)


def test_a_trial_beyond_the_last_one_of_an_ended_sweep_is_refused() -> None:
    mlflow = ended("finished")
    mlflow.state = "finished"
    words = "has no trial 8: its 8 trials have the numbers 0 to 7"
    with pytest.raises(HermesError, match=words):
        explanation(connection(mlflow), "digits-1/8", 5)


def test_no_decision_is_listed_where_none_is_asked_for() -> None:
    decide("start")
    lines = explanation(connection(), TRIAL, 0).splitlines()
    assert lines[-1] == "Last decisions (of 1):"


def test_the_owner_and_the_team_are_said_and_that_its_gpus_are_borrowed() -> None:
    standing(user="ann", team="vision", borrows=True)
    assert "  of user ann, team vision, its GPUs are borrowed\n" in explanation(
        connection(), TRIAL, 5
    )
    standing()
    assert "  of user" not in explanation(connection(), TRIAL, 5)


def test_no_escape_that_somebody_has_left_in_a_reason_reaches_the_terminal() -> None:
    window, screen, c1 = "\x1b]0;all is well\x07", "\x1b[2J", "\x9b31m"
    standing(reason=f"it{window} con{screen}verges{c1} best\r")
    assert "  because: it converges31m best" in explanation(connection(), TRIAL, 5).splitlines()


def test_where_the_output_and_the_files_of_a_trial_are_is_said(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = SweepLocation("mine:search:a b", "mine", "a b", "search")
    monkeypatch.setattr(inspection_commands, "locate", lambda *_: place)
    asked: Any = SimpleNamespace(airflow=None, airflow_url="http://a:8080")
    page = "http://a:8080/dags/mine/runs/a%20b/tasks/search.trial/mapped/3"
    assert place_lines(asked, "mine:search:a b/3") == [f"Log      {page}"]
    folder = sweep_folder(place.sweep) / "trials" / "3"
    folder.mkdir(parents=True)
    assert place_lines(asked, "mine:search:a b/3")[1:] == [f"Files    {folder}"]


def test_of_a_sweep_that_airflow_has_lost_no_page_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> SweepLocation:
        raise HermesError("there is no sweep")

    monkeypatch.setattr(inspection_commands, "locate", lost)
    asked: Any = SimpleNamespace(airflow=None, airflow_url="http://a")
    assert place_lines(asked, "digits-1/3") == []
