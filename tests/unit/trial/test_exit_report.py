"""The exit code of a script, from the process that waits for it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.trial.standby.client import LOST, ExitReport, exit_report

NamedValue = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[NamedValue]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@given(st.integers(-64, 255), st.integers(0, 20))
def test_a_code_arrives_whole_however_it_is_cut(code: int, cut: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        found, data = ExitReport(ours), exit_report(code)
        theirs.sendall(data[:cut])
        assert found.poll() == (None if cut < len(data) else code)
        theirs.sendall(data[cut:])
        theirs.close()
        assert (found.poll(), found.poll(), found.is_lost) == (code, code, False)


def test_one_that_goes_without_a_report_has_lost_the_code(pair: NamedValue) -> None:
    ours, theirs = pair
    found = ExitReport(ours)
    assert (found.poll(), found.is_lost) == (None, False)
    theirs.sendall(exit_report(7)[:-1])
    theirs.close()
    assert (found.poll(), found.is_lost) == (LOST, True)


def test_a_closed_socket_has_lost_the_code(pair: NamedValue) -> None:
    found = ExitReport(pair[0])
    pair[0].close()
    assert (found.poll(), found.is_lost) == (LOST, True)


def test_a_report_that_comes_in_the_place_of_an_answer_counts(pair: NamedValue) -> None:
    found = ExitReport(pair[0])
    found.set_report({"exit": 3})
    assert found.poll() == 3


@given(st.dictionaries(st.integers(1, 9), st.integers(-64, 255), min_size=1), st.data())
def test_of_several_scripts_each_code_arrives_whenever_it_is_asked_for(
    codes: dict[int, int], data: st.DataObject
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        found = ExitReport(ours)
        sent: dict[int, int] = {}
        for place, (pid, code) in enumerate(codes.items()):
            theirs.sendall(exit_report(code, pid, ended_s=1.0 + place))
            sent[pid] = code
            asked = data.draw(st.sampled_from(sorted(codes)))
            assert found.poll(asked) == sent.get(asked)
        theirs.close()
        assert {pid: found.poll(pid) for pid in codes} == codes
        assert sorted(codes, key=found.ended_s) == list(codes)
        assert not found.is_lost
        assert (found.poll(10), found.is_lost) == (LOST, True)
