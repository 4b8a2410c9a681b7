from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.airflow.control.decisions import (
    Decision,
    DecisionLog,
    decision,
    read_before,
    read_of_trial,
    read_tail,
)
from hermes_ops.core.model import JobId, Reason, Term
from tests.unit.airflow.builders import SWEEP, Journal


def choice(number: int, sweep: str = SWEEP) -> Decision:
    reason = Reason("it converges", (Term("gain", 0.5),), JobId(f"{sweep}/9"), "a gain of 0.6")
    return decision(
        JobId(f"{sweep}/{number}"),
        "start",
        (0, 1),
        reason,
        time_s=1.0,
        policy="hermes",
        options={"k": 2},
        curve_age_s=0.4,
    )


def log_of(mlflow: Journal) -> DecisionLog:
    outside: Any = mlflow
    return DecisionLog(outside)


def sent(mlflow: Journal) -> list[tuple[int, list[int]]]:
    return [
        (chunk, [json.loads(line)["trial"] for line in lines])
        for _, chunk, lines in mlflow.of("decisions")
    ]


def test_a_decision_says_what_was_chosen_by_which_policy_and_why() -> None:
    found = json.loads(choice(3).line())
    assert (found["sweep"], found["trial"], found["gpus"]) == (SWEEP, 3, [0, 1])
    assert (found["policy"], found["options"], found["terms"]) == (
        "hermes",
        {"k": 2},
        {"gain": 0.5},
    )
    assert (found["runner_up"], found["would_change"]) == (f"{SWEEP}/9", "a gain of 0.6")


def test_decisions_lie_on_disk_before_anything_is_sent() -> None:
    log_of(Journal()).append([choice(1), choice(2, "other"), choice(3)])
    assert [d["trial"] for d in read_tail(SWEEP)] == [1, 3]
    assert [d["trial"] for d in read_tail("other")] == [2]
    assert read_tail("unknown") == []


def test_an_upload_writes_the_newest_chunk_anew_until_it_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hermes_ops.airflow.control.decisions.CHUNK_LINES", 3)
    mlflow = Journal()
    log = log_of(mlflow)
    log.append([choice(1), choice(2)])
    log.upload(SWEEP, "parent", force=True)
    log.upload(SWEEP, "parent", force=True)
    log.append([choice(3)])
    log.upload(SWEEP, "parent", force=True)
    log.upload(SWEEP, "parent", force=True)
    log.append([choice(4)])
    log.upload(SWEEP, "parent", force=True)
    log.append([choice(5)])
    log_of(mlflow).upload(SWEEP, "parent", force=True)
    assert sent(mlflow) == [(1, [1, 2]), (1, [1, 2, 3]), (2, [4]), (2, [4, 5])]


def test_a_sweep_of_weeks_has_few_chunks_and_each_decision_once() -> None:
    mlflow = Journal()
    log = log_of(mlflow)
    for number in range(1_000):
        log.append([choice(number)])
        log.upload(SWEEP, "parent", force=True)
    last = dict(sent(mlflow))
    assert [number for chunk in sorted(last) for number in last[chunk]] == list(range(1_000))
    assert len(last) < 10


def test_what_an_earlier_version_has_sent_is_followed_by_a_new_chunk(home: Path) -> None:
    mlflow = Journal()
    log = log_of(mlflow)
    log.append([choice(1)])
    log.upload(SWEEP, "parent", force=True)
    note = home / "sweeps" / SWEEP / "decisions.sent.json"
    state = json.loads(note.read_text())
    note.write_text(json.dumps({"bytes": state["bytes"], "chunk": state["chunk"]}))
    log.append([choice(2)])
    log.upload(SWEEP, "parent", force=True)
    assert sent(mlflow) == [(1, [1]), (2, [2])]


def test_an_upload_that_comes_too_soon_waits_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_000.0]
    monkeypatch.setattr("hermes_ops.airflow.control.decisions.time.monotonic", lambda: now[0])
    mlflow = Journal()
    log = log_of(mlflow)
    log.append([choice(1)])
    log.upload(SWEEP, "parent")
    log.append([choice(2)])
    log.upload(SWEEP, "parent")
    assert sent(mlflow) == [(1, [1])]
    now[0] += 5.0
    log.upload(SWEEP, "parent")
    assert sent(mlflow) == [(1, [1]), (1, [1, 2])]


def test_many_decisions_go_in_several_chunks_and_none_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hermes_ops.airflow.control.decisions.CHUNK_LINES", 2)
    mlflow = Journal()
    log = log_of(mlflow)
    log.append(choice(n) for n in range(5))
    log.upload(SWEEP, "parent", force=True)
    assert sent(mlflow) == [(1, [0, 1]), (2, [2, 3]), (3, [4])]


def test_what_a_killed_controller_had_not_sent_the_next_one_sends() -> None:
    first = Journal()
    log = log_of(first)
    log.append([choice(1)])
    log.upload(SWEEP, "parent", force=True)
    log.append([choice(2)])
    second = Journal()
    log_of(second).upload(SWEEP, "parent", force=True)
    assert (sent(first), sent(second)) == ([(1, [1])], [(1, [1, 2])])


def test_decisions_stay_on_disk_while_mlflow_is_away() -> None:
    mlflow = Journal(mlflow_away=True)
    log = log_of(mlflow)
    log.append([choice(1)])
    log.upload(SWEEP, "parent", force=True)
    mlflow.mlflow_away = False
    log.upload(SWEEP, "parent", force=True)
    assert sent(mlflow) == [(1, [1])]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"bytes": "many", "chunk": 1}',
        '{"bytes": 5, "chunk": 1, "begin": 9}',
        "\0" * 30,
    ],
)
def test_a_damaged_note_of_what_was_sent_has_all_sent_again_and_ends_nothing(
    home: Path, text: str
) -> None:
    mlflow = Journal()
    log = log_of(mlflow)
    log.append([choice(1)])
    log.upload(SWEEP, "parent", force=True)
    (home / "sweeps" / SWEEP / "decisions.sent.json").write_text(text)
    log.append([choice(2)])
    log.upload(SWEEP, "parent", force=True)
    log.upload(SWEEP, "parent", force=True)
    assert sent(mlflow) == [(1, [1]), (1, [1, 2])]


def test_a_volume_that_is_full_delays_the_upload_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    mlflow = Journal()
    log = log_of(mlflow)
    log.append([choice(1)])
    with monkeypatch.context() as patch:
        patch.setattr("hermes_ops.trial.files.os.replace", full)
        log.upload(SWEEP, "parent", force=True)
    log.append([choice(2)])
    log.upload(SWEEP, "parent", force=True)
    assert sent(mlflow)[-1] == (1, [1, 2])  # the same chunk once more, whole


def test_decisions_that_a_full_disk_takes_in_part_are_none(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def part(file: Any, data: Any) -> None:
        file.write(bytes(data)[: len(data) * 2 // 3])
        raise OSError(28, "No space left on device")

    log = log_of(Journal())
    log.append([choice(1)])
    before = (home / "sweeps" / SWEEP / "decisions.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("hermes_ops.airflow.control.decisions._write_all", part)
        with pytest.raises(OSError, match="No space"):
            log.append([choice(2), choice(3)])
    assert (home / "sweeps" / SWEEP / "decisions.jsonl").read_bytes() == before
    log.append([choice(4)])
    assert [d["trial"] for d in read_tail(SWEEP)] == [1, 4]


def test_a_line_torn_by_a_kill_costs_no_other_decision(home: Path) -> None:
    log_of(Journal()).append([choice(1)])
    path = home / "sweeps" / SWEEP / "decisions.jsonl"
    with path.open("a") as file:
        file.write('{"time_s": 1.0, "sw')
    mlflow = Journal()
    log_of(mlflow).upload(SWEEP, "parent", force=True)
    assert sent(mlflow) == [(1, [1])]
    log_of(Journal()).append([choice(2)])
    assert [d["trial"] for d in read_tail(SWEEP)] == [1, 2]


def test_the_tail_of_a_long_log_is_its_newest_lines_and_no_torn_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log_of(Journal()).append(choice(n) for n in range(50))
    whole = read_tail(SWEEP)
    assert [d["trial"] for d in whole] == list(range(50))
    monkeypatch.setattr("hermes_ops.airflow.control.decisions.TAIL_BYTES", 1_000)
    found = read_tail(SWEEP)
    assert 0 < len(found) < 50
    assert found == whole[-len(found) :]
    assert read_tail("unknown") == []


def test_of_a_long_log_the_decisions_about_one_trial_are_parsed_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log_of(Journal()).append(choice(n % 120) for n in range(600))
    parse, parsed = json.loads, list[bytes]()

    def counted(line: bytes) -> Any:
        parsed.append(line)
        return parse(line)

    monkeypatch.setattr("hermes_ops.airflow.control.decisions.json.loads", counted)
    assert [d["trial"] for d in read_of_trial(SWEEP, 1) or ()] == [1] * 5
    assert len(parsed) == 5
    assert read_of_trial(SWEEP, 7_000) == []
    assert read_of_trial("unknown", 1) is None


def test_decisions_can_be_read_backwards_in_parts_each_of_them_once() -> None:
    log_of(Journal()).append([choice(n) for n in range(1_000)])
    found: list[int] = []
    parts, end = 0, None
    while end != 0:
        part, end = read_before(SWEEP, end)
        found = [*(d["trial"] for d in part), *found]
        parts += 1
    assert found == list(range(1_000))
    assert 1 < parts < 10
    assert read_before(SWEEP, 10**12) == read_before(SWEEP)
    assert read_before("nothing", 5) == ([], 0)
