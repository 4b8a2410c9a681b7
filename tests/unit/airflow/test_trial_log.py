from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hermes_ops.airflow.client import TaskKey
from hermes_ops.airflow.trial_log import (
    LogCursor,
    LogExcerpt,
    LoggedSegment,
    log_segment_start,
    parse_messages,
    recent_lines,
)

OPERATOR = "airflow.task.operators.hermes_ops.airflow.trial.operator.HermesTrialOperator"
TASK = TaskKey("hermes_sweep", "digits-1", "trial", 3)


def line(text: str, **fields: Any) -> dict[str, Any]:
    """A message of the trial's task."""
    return {"event": text, "level": "info", "logger": OPERATOR, **fields}


def segment(number: int, *gpus: int, epoch: int | None = None) -> dict[str, Any]:
    """The message with which a segment begins, as the task writes it."""
    written: list[dict[str, Any]] = []

    class Log:
        def info(self, event: str, *arguments: object, **fields: Any) -> None:
            written.append(line(event % arguments, **fields))

    log_segment_start(Log(), number, number if epoch is None else epoch, gpus)
    return written[0]


def parsed(messages: Iterable[dict[str, Any]]) -> list[LoggedSegment | str]:
    return list(parse_messages(messages, recent_lines()))


def excerpt(
    messages: Iterable[dict[str, Any]], segments: int | None = None, lines: int | None = None
) -> list[str]:
    kept = LogExcerpt(segments, lines)
    kept.extend(parsed(messages))
    return list(kept.rendered())


def test_what_airflow_itself_writes_is_left_out() -> None:
    messages = [
        {"event": "::group::Log message source details"},
        {"event": "/logs/attempt=1.log"},
        {"event": "Filling up the DagBag", "logger": "task"},
        line("loss=1"),
        {"event": "waits", "logger": "hermes_ops.airflow.trial.pod_trigger.PodTrigger"},
        {"event": "early", "logger": "task.stdout"},
        {"event": "Pushing xcom", "logger": "task"},
    ]
    assert parsed(messages) == ["loss=1", "waits", "early"]


def test_no_escape_and_no_control_character_of_a_script_is_left() -> None:
    messages = [line("\x1b[31mred\x1b[0m\x1b]0;title\x07 \x9b1mbell\x07\ttab")]
    assert parsed(messages) == ["red 1mbell\ttab"]


def test_of_a_progress_bar_the_last_state_is_shown() -> None:
    assert parsed([line("\r 10%\r 50%\r100%\r")]) == ["100%"]


def test_of_an_error_the_lines_that_the_script_has_written_before_are_not_repeated() -> None:
    failed = line("Trial 3 failed (failure 1): exit code 1\nloss=1\nTraceback", level="error")
    assert parsed([line("loss=1"), line("Traceback"), failed]) == [
        "loss=1", "Traceback", "Trial 3 failed (failure 1): exit code 1",
    ]  # fmt: skip


def test_an_error_shows_the_last_lines_where_the_log_lacks_them() -> None:
    failed = line("Trial 3 failed (failure 1): exit code 1\nloss=1\nTraceback", level="error")
    assert parsed([line("loss=1"), failed]) == [
        "loss=1", "Trial 3 failed (failure 1): exit code 1", "loss=1", "Traceback",
    ]  # fmt: skip


def test_a_segment_is_known_by_its_fields_and_not_by_a_line_that_looks_like_one() -> None:
    messages = [line("Segment 7 begins on GPU 0"), segment(2, 0, 1)]
    assert parsed(messages) == [
        "Segment 7 begins on GPU 0", LoggedSegment(2, 2, (0, 1)),
    ]  # fmt: skip


def test_each_segment_has_a_head_with_its_gpus_and_its_time() -> None:
    first = {**segment(1, 0), "timestamp": "2026-11-29T08:15:00.5Z"}
    messages = [line("before"), first, line("a"), segment(2, 0, 1), line("b")]
    assert excerpt(messages) == [
        "before", "==> segment 1 on GPU 0, 2026-11-29 08:15:00 UTC <==", "a",
        "==> segment 2 on GPU 0, 1 <==", "b",
    ]  # fmt: skip


def test_a_segment_that_a_later_run_of_the_task_goes_on_has_one_head() -> None:
    messages = [segment(1, 0, epoch=4), line("a"), segment(1, 0, epoch=4), line("b")]
    assert excerpt(messages) == ["==> segment 1 on GPU 0 <==", "a", "b"]
    messages = [segment(1, 0, epoch=4), line("a"), segment(1, 0, epoch=5), line("b")]
    assert len(excerpt(messages)) == 4


def test_the_last_segments_and_the_last_lines_are_kept() -> None:
    messages = [segment(1), line("a"), line("b"), segment(2), line("c"), line("d"), segment(3)]
    assert excerpt(messages, segments=2) == [
        "==> segment 2 <==", "c", "d", "==> segment 3 <==",
    ]  # fmt: skip
    assert excerpt(messages, lines=3) == [
        "==> segment 1 <==", "b", "==> segment 2 <==", "c", "d",
    ]  # fmt: skip
    assert excerpt(messages, segments=2, lines=3) == ["==> segment 2 <==", "c", "d"]
    assert excerpt(messages, lines=0) == []


class Airflow:
    """Airflow's log of one try: while the task runs each answer has a token for what follows."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.is_running = True

    def task_log_since(
        self, task: TaskKey, attempt: int, token: str | None
    ) -> tuple[list[dict[str, Any]], str | None]:
        assert (task, attempt) == (TASK, 1)
        begin = int(token or 0)
        return self.messages[begin:], str(len(self.messages)) if self.is_running else None


def test_each_message_is_fetched_once_while_the_task_runs_waits_and_runs_again() -> None:
    airflow: Any = Airflow()
    cursor = LogCursor(airflow, TASK, 1)
    fetched = []
    for is_running in (True, True, False, False, True, False):
        airflow.is_running = is_running
        airflow.messages.append(line(str(len(airflow.messages))))
        fetched.append([message["event"] for message in cursor.fetch()])
    assert fetched == [["0"], ["1"], ["2"], ["3"], ["4"], ["5"]]
    assert cursor.fetch() == []
