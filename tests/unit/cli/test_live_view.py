from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from hermes_ops.cli.live_view import OutageNotice, live_table, new_lines, progress_line
from hermes_ops.cli.outcome import (
    end_reason_lines,
    missed_bound_lines,
    outcome_table,
)
from hermes_ops.report.table import settings_line
from tests.unit.cli.views import facts, job, view


def shown(document: dict[str, Any]) -> str:
    out = io.StringIO()
    Console(file=out, width=160, color_system=None).print(live_table(document, "digits-1"))
    return out.getvalue()


def test_the_line_counts_this_sweep_alone() -> None:
    other = job(7, id="other/7", preemptions=50)
    line = progress_line(view(job(0), job(1, "waiting", value=None), other), "digits-1")
    assert line == (
        "3/9 trials ended, 2 open, training: 0, preemptions: 4, values: 1"
    )  # fmt: skip


def test_nobody_trains() -> None:
    assert "training: none" in progress_line(view(), "digits-1")


def test_the_table_shows_begun_trials_with_their_numbers() -> None:
    text = shown(view(job(0), job(1, "waiting", gpus=[], total_steps=None, value="nan")))
    assert "3/20" in text
    assert "0.5124" in text
    assert "nan" in text
    assert "it leads" in text


def test_trials_that_have_not_begun_are_counted_and_not_listed() -> None:
    text = shown(view(job(0), job(1), job(5, "pending", reason="not yet")))
    assert "not yet" not in text
    assert "3/9 trials ended, 4 not begun" in text


def test_the_reason_of_the_end_is_shown() -> None:
    assert "ending: stopped by its user" in shown(view(closing="stopped by its user"))


def test_brackets_in_a_reason_are_text() -> None:
    assert "[/bold] leads [red]" in shown(view(job(0, reason="[/bold] leads [red]")))


def test_an_airflow_that_is_silent_is_told_once_with_the_way_out() -> None:
    silence = OutageNotice("hermes sweep watch digits-1", since_s=100.0)
    assert silence.after_response(129.0, "unknown") is None
    words = silence.after_response(130.0, "unknown")
    assert words is not None
    assert "30 s" in words
    assert "hermes up" in words
    assert "Ctrl-C" in words
    assert silence.after_response(200.0, "unknown") is None
    assert silence.after_response(201.0, "running") is None
    assert silence.after_response(230.0, "unknown") is None
    assert silence.after_response(231.0, "unknown") is not None


def ended(*trials: dict[str, Any], best: int | None = None) -> str:
    found = {"state": "finished", "trials": trials, "best": None if best is None else trials[best]}
    out = io.StringIO()
    Console(file=out, width=200, color_system=None).print(outcome_table("digits-1", found))
    return out.getvalue()


def test_the_table_at_the_end_has_the_last_values_of_other_metrics() -> None:
    missed = facts(0, metrics={"latency_ms": {"last": 31.5, "best": 30.0}},
                   violates=["latency_ms is 31.5, at most 20 is allowed"])  # fmt: skip
    kept = facts(1, metrics={"latency_ms": {"last": 12.25, "best": 12.0}}, violates=[])
    text = ended(missed, kept, best=1)
    assert "latency_ms" in text
    assert "31.5" in text
    assert "12.25" in text


def test_the_table_at_the_end_has_the_parameters_of_each_trial_that_was_opened() -> None:
    opened = facts(0, config={"learning_rate": 0.012345, "optimizer": "adam"})
    text = ended(opened, facts(1, config=None), best=0)
    assert "learning_rate=0.01235, optimizer=adam" in text


def test_the_first_ten_trials_that_miss_a_bound_are_named_and_the_others_counted() -> None:
    trials = [facts(n, violates=["too slow"] if n else []) for n in range(13)]
    lines = missed_bound_lines({"trials": trials})
    assert lines[0] == "Trial 1 misses a bound: too slow"
    assert lines[9:] == ["Trial 10 misses a bound: too slow", "2 more trials miss a bound"]
    assert (
        missed_bound_lines({"trials": trials[:1]})
        == missed_bound_lines({"trials": [facts(0)]})
        == []
    )


def test_without_other_metrics_the_table_at_the_end_has_no_column_of_them() -> None:
    assert ended(facts(0), best=0).count("0.5") == 1


def test_why_trials_failed_is_under_the_table() -> None:
    text = shown(view(job(0, "ended", final="failed"), failures=["Trial 0 failed: no data"]))
    assert text.rstrip().splitlines()[-1].strip() == "Trial 0 failed: no data"
    assert "failed" in next(line for line in text.splitlines() if "3/20" in line)


def test_a_log_says_each_way_of_failing_once() -> None:
    said: dict[str, str] = {}
    one, two = ["Trial 0 failed: no data"], ["2 trials failed alike: no data"]
    assert new_lines(view(job(0), failures=one), "digits-1", said)[1:] == one
    assert new_lines(view(job(0), failures=one), "digits-1", said) == []
    assert new_lines(view(job(0), failures=two), "digits-1", said) == two
    more = new_lines(view(job(0), failures=["3 trials failed alike: no data"]), "digits-1", said)
    assert more == []
    assert len(new_lines(view(job(1)), "digits-1", said)) == 1


def test_the_end_of_a_sweep_says_why_once_if_all_trials_failed_alike() -> None:
    trials = [{"number": n, "state": "failed", "reason": f"NaN at step {n}"} for n in range(8)]
    found = {"state": "failed", "reason": "8 trials failed alike: NaN at step 0", "trials": trials}
    assert end_reason_lines(found) == ["Failed: 8 trials failed alike: NaN at step 0"]
    found["reason"] = "the first 3 trials failed alike: no package"
    assert end_reason_lines(found) == [
        "Failed: the first 3 trials failed alike: no package",
        "8 trials failed alike: NaN at step 0",
    ]
    finished = {"state": "finished", "trials": [{"number": 0, "state": "finished"}]}
    assert end_reason_lines(finished) == []


def test_a_large_configuration_is_shown_in_part() -> None:
    line = settings_line({f"p{n}": n for n in range(1_000)})
    assert line.startswith("p0=0, p1=1, ")
    assert line.endswith("p19=19, and 980 more")
    assert settings_line({"prompt": "語" * 4_000}) == f"prompt={'語' * 80}…"
    assert settings_line({"rate": 0.5}) == "rate=0.5"
