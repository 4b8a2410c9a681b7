"""Pods with no lease behind them, on plain facts."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.kubernetes.api import PodView
from hermes_ops.kubernetes.life import FORCE_AFTER_S
from hermes_ops.kubernetes.orphans import ORPHAN_GRACE_S, Ending, Leased, is_orphan, judge

POD = PodView(
    name="p", uid="u", version="1", phase="Running", owner="1", epoch=2, sweep="s", trial=0
)
NONE = Leased(frozenset({"s"}), {})
THIS = Leased(frozenset({"s"}), {("s", 0): 2})


def test_a_pod_of_the_lease_in_force_is_no_orphan_and_one_of_another_lease_is() -> None:
    assert not is_orphan(POD, THIS)
    assert is_orphan(replace(POD, epoch=1), THIS)
    assert is_orphan(replace(POD, epoch=3), THIS)
    assert is_orphan(replace(POD, trial=1), THIS)


def test_a_pod_of_a_sweep_that_has_ended_is_an_orphan_and_one_of_an_unknown_sweep_is_not() -> None:
    assert is_orphan(POD, NONE)
    assert not is_orphan(replace(POD, sweep="another pool's"), NONE)
    assert not is_orphan(POD, Leased(frozenset(), {}))


def test_an_orphan_goes_when_it_has_been_one_for_its_grace_and_no_earlier() -> None:
    first = judge([POD], NONE, {}, 100.0, 30)
    assert (first.endings, first.since_s) == ((), {"u": 100.0})
    assert first.next_s == 100.0 + ORPHAN_GRACE_S
    before = judge([POD], NONE, first.since_s, 99.0 + ORPHAN_GRACE_S, 30)
    assert before.endings == ()
    then = judge([POD], NONE, before.since_s, 100.0 + ORPHAN_GRACE_S, 30)
    assert then.endings == (Ending(POD, 30),)


def test_a_pod_that_has_a_lease_meanwhile_begins_its_grace_anew() -> None:
    first = judge([POD], NONE, {}, 100.0, 30)
    leased = judge([POD], THIS, first.since_s, 110.0, 30)
    assert leased.since_s == {}
    assert leased.next_s == inf
    again = judge([POD], NONE, leased.since_s, 135.0, 30)
    assert again.endings == ()


def test_the_next_pod_of_the_same_name_has_a_grace_of_its_own() -> None:
    first = judge([POD], NONE, {}, 100.0, 30)
    assert judge([replace(POD, uid="u-2")], NONE, first.since_s, 140.0, 30).endings == ()


def test_a_pod_on_its_way_out_is_left_to_its_node_until_that_should_long_be_done() -> None:
    leaving, since = replace(POD, gone_by_s=200.0), {"u": 100.0}
    assert judge([leaving], NONE, since, 200.0 + FORCE_AFTER_S, 30).endings == ()
    late = judge([leaving], NONE, since, 201.0 + FORCE_AFTER_S, 30)
    assert late.endings == (Ending(leaving, 0),)


@given(
    epochs=st.dictionaries(st.tuples(st.just("s"), st.integers(0, 3)), st.integers(1, 3)),
    pods=st.lists(st.tuples(st.sampled_from("st"), st.integers(0, 3), st.integers(1, 3))),
)
def test_no_pod_of_a_lease_in_force_and_no_strangers_pod_ever_goes(
    epochs: dict[tuple[str, int], int], pods: list[tuple[str, int, int]]
) -> None:
    views = [
        replace(POD, uid=f"u-{n}", sweep=s, trial=t, epoch=e) for n, (s, t, e) in enumerate(pods)
    ]
    leased = Leased(frozenset({"s"}), epochs)
    found = judge(views, leased, dict.fromkeys((v.uid for v in views), 0.0), 1e6, 30)
    gone = {e.pod.uid for e in found.endings}
    wanted = {v.uid for v in views if v.sweep == "s" and epochs.get(("s", v.trial)) != v.epoch}
    assert gone == wanted
