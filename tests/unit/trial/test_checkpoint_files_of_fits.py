"""Which states after completed fits are kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.trial.keras.checkpoint_files import (
    ALWAYS_KEPT,
    exceeds,
    final_states,
    is_complete,
    retained,
)

KINDS = st.lists(st.sampled_from(["epoch", "best", "final"]), max_size=60)


def headers(kinds: list[str]) -> dict[int, dict[str, object]]:
    found: dict[int, dict[str, object]] = {}
    fit = 0
    for serial, kind in enumerate(kinds, 1):
        found[serial] = {"fit": fit, "final": kind == "final", "best": kind == "best"}
        fit += kind == "final"
    return found


@given(KINDS)
def test_the_state_after_every_fit_stays_and_the_rest_is_bounded(kinds: list[str]) -> None:
    kept = retained(headers(kinds), 2)
    completed = kinds.count("final")
    assert is_complete({k: v for k, v in headers(kinds).items() if k in kept}, [{}] * completed)
    assert len(kept) <= completed + 3


def test_of_two_ends_of_one_fit_the_newer_one_counts() -> None:
    twice = {1: {"fit": 0, "final": True}, 2: {"fit": 0, "final": True}}
    assert final_states(twice) == {0: 2}


def test_a_checkpoint_is_not_gone_on_from_without_the_states_of_the_fits_before_it() -> None:
    found = headers(["final", "final", "epoch"])
    assert is_complete(found, [{}, {}])
    del found[1]
    assert not is_complete(found, [{}, {}])


def test_a_large_model_is_fit_a_few_times_whatever_its_size() -> None:
    sizes = dict.fromkeys(range(ALWAYS_KEPT), 1 << 40)
    assert not exceeds(sizes, 1 << 30)
    assert exceeds({**sizes, ALWAYS_KEPT: 1}, 1 << 30)
    assert not exceeds(dict.fromkeys(range(5_000), 100_000), 1 << 30)
