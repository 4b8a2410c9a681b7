"""What a round takes over from the one before: never anything else than what it would make anew."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.airflow.control.pool import Trial, curve
from hermes_ops.airflow.control.recall import Recall
from hermes_ops.airflow.records import encode
from tests.unit.airflow.worlds import flag, lease, pending, row, segment

POINTS = ((1, 0.5, 101_000), (2, 0.4, 102_000))
RECORDS = {
    "hermes_lease": [encode(lease(1)), encode(lease(2)), encode(lease(2, (1, 3)))],
    "hermes_segment": [encode(segment(1)), encode(segment(2, running=False)), {"epoch": 2}],
    "hermes_stop": [encode(flag(1)), encode(flag(2))],
}
rows = st.builds(row, st.integers(0, 1), st.sampled_from(["scheduled", "running", "success"]))
records = st.fixed_dictionaries(
    {}, optional={key: st.sampled_from(list(map(json.dumps, v))) for key, v in RECORDS.items()}
)


@given(st.lists(st.tuples(rows, records), max_size=8))
def test_a_trial_that_is_recalled_is_what_its_rows_and_records_say(rounds: list) -> None:
    recall = Recall()
    for now, said in rounds:
        found, anew = recall.trial(now, said), Trial.of(now, said)
        assert found == anew
        assert found.phase is anew.phase


def test_a_trial_of_which_nothing_has_changed_is_not_made_again() -> None:
    recall, said = Recall(), {"hermes_lease": json.dumps(encode(lease()))}
    first = recall.trial(row(0, "running"), said)
    assert recall.trial(row(0, "running"), dict(said)) is first
    assert recall.trial(row(0, "success"), said).lease is first.lease


spans = st.lists(st.tuples(st.floats(90, 100), st.floats(100, 101)), max_size=2).map(tuple)
points = st.lists(st.sampled_from(POINTS), max_size=2, unique=True).map(tuple)
begun = st.none() | st.floats(100, 102)


def trained(number: int, spans: tuple, since_s: float | None) -> Trial:
    """A trial that has had these segments and runs since then, if at all."""
    last = segment(running=since_s is not None, spans=spans, started_s=since_s or 0.0)
    return Trial(row(number, "running"), lease(), None, last)


@given(st.lists(st.tuples(st.integers(0, 1), points, spans, begun), max_size=6))
def test_a_curve_that_is_recalled_is_what_its_points_and_segments_say(rounds: list) -> None:
    recall = Recall()
    for number, seen, ended, since_s in rounds:
        found = recall.curve(trained(number, ended, since_s), seen, 1.0)
        assert found == curve(seen, 1.0, ended, since_s)


def test_a_curve_of_which_nothing_has_changed_is_the_same_object() -> None:
    recall, runs = Recall(), trained(0, (), 100.0)
    first = recall.curve(runs, POINTS, 1.0)
    assert recall.curve(trained(0, (), 100.0), POINTS, 1.0) is first
    assert recall.curve(trained(1, (), 100.0), POINTS, 1.0) is not first


def test_a_trial_without_a_segment_has_a_curve_of_what_is_known() -> None:
    assert Recall().curve(pending(0), POINTS, -1.0) == curve(POINTS, -1.0, (), None)
