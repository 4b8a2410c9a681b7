from __future__ import annotations

import json
import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.airflow.control.faults import rejected
from hermes_ops.airflow.control.policy_settings import PolicySettings
from hermes_ops.airflow.control.quota_settings import PastUse, QuotaInForce, QuotaSettings
from hermes_ops.config.pool_quota import parse_quota
from hermes_ops.core.gpu_time import DecayedUse, GpuTime
from hermes_ops.core.options import GuardOptions
from hermes_ops.core.within_quota import QuotaMemory, WithinQuota
from hermes_ops.errors import ConfigError, HermesError, Refused, Unavailable
from hermes_ops.policies import make_policy
from tests.unit.airflow.control.controllers import Database, controller_of

VISION = {"teams": [{"name": "vision", "guaranteed": 2, "users": ["ann"]}]}
BOTH = {"teams": [*VISION["teams"], {"name": "speech", "guaranteed": 2}]}


def settings(data: dict[str, Any] = VISION) -> QuotaSettings:
    return QuotaSettings(parse_quota(data, "test"), "an@laptop", 100.0)


@pytest.fixture
def in_force(tmp_path: Path) -> QuotaInForce:
    return QuotaInForce(tmp_path / "quota-gpus.json")


def teams(quota: QuotaInForce) -> list[str]:
    return [] if quota.quota is None else [team.name for team in quota.quota.teams]


def test_a_quota_comes_back_as_it_was_written_and_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "home" / "quota-gpus.json"
    assert QuotaSettings.load(path) is None
    settings().write(path)
    found = QuotaSettings.load(path)
    assert found is not None
    assert (found.quota, found.by, found.at_s) == (settings().quota, "an@laptop", 100.0)
    assert [file.name for file in path.parent.iterdir()] == ["quota-gpus.json"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "correct it"),
        ('{"quota": ' + "9" * 5_000 + "}", "correct it"),
        ("[]", "correct it"),
        ("{}", "quota-gpus.json"),
        ('{"quota": {"teams": [{"name": "a", "guaranteed": -1}]}}', r"teams\[0\].guaranteed"),
    ],
)
def test_a_malformed_file_is_refused_by_its_name(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "quota-gpus.json"
    path.write_text(text)
    with pytest.raises(HermesError, match=words):
        QuotaSettings.load(path)
    with pytest.raises(HermesError, match=words):
        QuotaInForce(path).refresh()


def test_a_file_that_cannot_be_read_leaves_the_quota_in_force(in_force: QuotaInForce) -> None:
    settings().write(in_force.path)
    in_force.refresh()
    in_force.path.write_bytes(b"\xff\xfe{")
    assert (in_force.refresh(), teams(in_force)) == (False, ["vision"])
    in_force.path.unlink()
    in_force.path.mkdir()
    assert (in_force.refresh(), teams(in_force)) == (False, ["vision"])


@pytest.mark.parametrize("at_s", ["Infinity", "NaN", "1e30", "1" + "0" * 400, "-1", '"x"'])
def test_a_time_that_is_none_is_left_out(tmp_path: Path, at_s: str) -> None:
    path = tmp_path / "quota-gpus.json"
    path.write_text(json.dumps({"quota": VISION})[:-1] + f', "at_s": {at_s}}}')
    found = QuotaSettings.load(path)
    assert found is not None
    assert found.at_s == 0.0


def test_another_quota_is_in_force_from_the_next_look_on(in_force: QuotaInForce) -> None:
    assert (in_force.refresh(), teams(in_force)) == (False, [])
    settings().write(in_force.path)
    assert (in_force.refresh(), teams(in_force)) == (True, ["vision"])
    assert not in_force.refresh()
    settings(BOTH).write(in_force.path)
    assert (in_force.refresh(), teams(in_force)) == (True, ["vision", "speech"])
    QuotaSettings.remove(in_force.path, "an@laptop", 200.0)
    assert (in_force.refresh(), teams(in_force)) == (True, [])
    assert not in_force.refresh()


def test_a_quota_whose_file_vanishes_stays_in_force_and_that_is_said_once(
    in_force: QuotaInForce, caplog: pytest.LogCaptureFixture
) -> None:
    settings().write(in_force.path)
    in_force.refresh()
    in_force.path.unlink()
    for _ in range(3):
        assert (in_force.refresh(), teams(in_force)) == (False, ["vision"])
    assert sum("is gone" in record.message for record in caplog.records) == 1
    settings(BOTH).write(in_force.path)
    assert (in_force.refresh(), teams(in_force)) == (True, ["vision", "speech"])


def test_a_policy_that_compares_trials_goes_on_to_see_those_that_wait_for_their_team(
    in_force: QuotaInForce,
) -> None:
    settings().write(in_force.path)
    in_force.refresh()
    for name, compares in (("asha", True), ("fifo", False)):
        policy, _ = in_force.enclose(make_policy(name, {}), None, GuardOptions())
        assert isinstance(policy, WithinQuota)
        assert policy.compares == compares


def test_a_malformed_file_leaves_the_quota_in_force_and_is_said_once(
    in_force: QuotaInForce, caplog: pytest.LogCaptureFixture
) -> None:
    settings().write(in_force.path)
    in_force.refresh()
    in_force.path.write_text('{"quota": {"teams": 3}}')
    for _ in range(3):
        assert (in_force.refresh(), teams(in_force)) == (False, ["vision"])
    assert sum("stays as it is" in record.message for record in caplog.records) == 1
    settings(BOTH).write(in_force.path)
    assert in_force.refresh()


def test_without_a_quota_the_policy_and_its_memory_are_untouched(in_force: QuotaInForce) -> None:
    policy = make_policy("fifo", {})
    assert in_force.enclose(policy, "memory", GuardOptions()) == (policy, "memory")
    assert in_force.release("memory") == "memory"


def test_the_policy_keeps_the_quota_with_the_quantum_of_its_guards(in_force: QuotaInForce) -> None:
    settings().write(in_force.path)
    in_force.refresh()
    policy, memory = in_force.enclose(make_policy("fifo", {}), "memory", GuardOptions(k=7.0))
    assert isinstance(policy, WithinQuota)
    assert policy.quantum.k == 7.0
    assert in_force.release(memory) == "memory"


def test_a_pool_smaller_than_its_guarantees_scales_them_and_says_so_once(
    in_force: QuotaInForce, caplog: pytest.LogCaptureFixture
) -> None:
    settings(BOTH).write(in_force.path)
    in_force.refresh()
    caplog.set_level(logging.WARNING)
    assert in_force.scaling(4) == ""
    for _ in range(3):
        assert "scaled to vision 1, speech 1" in in_force.scaling(2)
    assert sum("scaled to" in record.message for record in caplog.records) == 1
    assert in_force.scaling(0) == ""  # while it drains


def test_a_controller_adopts_a_quota_while_it_runs(home: Path) -> None:
    controller = controller_of(Database(), PolicySettings.file())
    controller._round()
    assert teams(controller.quota) == []
    settings().write(QuotaSettings.file("gpus"))
    controller._round()
    assert controller.cluster.quota is controller.quota
    assert teams(controller.quota) == ["vision"]
    written = json.loads((home / "quota-gpus.json").read_text())
    assert written["quota"]["teams"][0]["guaranteed"] == 2


def test_a_controller_does_not_begin_with_a_malformed_quota(home: Path) -> None:
    (home / "quota-gpus.json").write_text('{"quota": {"teams": 3}}')
    with pytest.raises(ConfigError, match=r"quota-gpus\.json"):
        controller_of(Database(), PolicySettings.file())._round()


def test_what_teams_have_used_before_counts_once_it_has_been_read(tmp_path: Path) -> None:
    """Reading it holds up no round: until then, or where it is unknown, they begin with nothing."""
    path = tmp_path / "quota-gpus.json"
    settings().write(path)
    reading: Future[PastUse] = Future()
    in_force = QuotaInForce(path, lambda _: reading)
    assert (in_force.refresh(), in_force.use) == (True, DecayedUse())
    assert not in_force.time.is_known
    half_life_s = settings().quota.half_life_hours * 3_600.0
    now = DecayedUse((("vision", 1.0),), (("vision", 2),), 100.0 + half_life_s)
    in_force.release(QuotaMemory("memory", now))
    teams_used = DecayedUse((("vision", 8.0), ("speech", 2.0)), (), 100.0)
    reading.set_result(PastUse(teams_used, GpuTime((("ann", 3.0),), (("ann", 4.0),), (), 100.0)))
    assert not in_force.refresh()
    assert in_force.use.gpu_s == (("speech", 1.0), ("vision", 5.0))
    assert (in_force.use.held, in_force.use.at_s) == (now.held, now.at_s)
    assert in_force.time.month == (("ann", 4.0),)
    assert in_force.time.is_known


def test_what_was_used_before_is_read_again_while_the_database_does_not_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings().write(tmp_path / "quota-gpus.json")
    away = rejected(Unavailable("the database did not answer"))
    reading: Future[PastUse] = Future()
    answers = iter((away, away, away, reading))
    in_force = QuotaInForce(tmp_path / "quota-gpus.json", lambda _: next(answers))
    in_force.refresh()
    for _ in range(2):
        assert not in_force.time.is_known
        own = DecayedUse((("vision", 1.0),), (("vision", 2),), 100.0)
        counted = GpuTime((("ann", 1.0),), (("ann", 1.0),), (), 100.0, is_known=False)
        in_force.release(QuotaMemory("memory", own, counted))
        in_force.refresh()
        assert (in_force.use, in_force.time) == (DecayedUse(), GpuTime(is_known=False))
    used = GpuTime((("ann", 3.0),), (("ann", 4.0),), (), 100.0)
    reading.set_result(PastUse(DecayedUse((("vision", 8.0),), (), 100.0), used))
    in_force.refresh()
    assert (in_force.time.month, in_force.time.is_known) == ((("ann", 4.0),), True)
    assert in_force.use.gpu_s == (("vision", 8.0),)
    assert sum("read again" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    "error",
    [
        Refused("the record is not as expected"),
        AttributeError("'str' object has no attribute 'get'"),
    ],
)
def test_a_quota_is_in_force_though_the_records_of_earlier_sweeps_cannot_be_read(
    tmp_path: Path, error: Exception
) -> None:
    settings().write(tmp_path / "quota-gpus.json")
    in_force = QuotaInForce(tmp_path / "quota-gpus.json", lambda _: rejected(error))
    assert (in_force.refresh(), teams(in_force), in_force.use) == (True, ["vision"], DecayedUse())
    assert in_force.time.is_known
