"""Requests to stop a trial: when its script is killed."""

from __future__ import annotations

from hermes_ops.trial.supervisor.stop_requests import StopRequests


def obeyed(requests: int = 1) -> StopRequests:
    """Requests that the script has been told of at second 100, with a grace of 30 s."""
    stops = StopRequests(30.0)
    for _ in range(requests):
        stops.request()
    stops.begin_grace(100.0)
    stops.obey()
    return stops


def test_the_grace_lasts_from_the_first_request_and_no_longer() -> None:
    stops = obeyed()
    assert (stops.is_grace_over(129.0), stops.is_grace_over(130.0)) == (False, True)
    assert stops.left_s(110.0) == 20.0
    assert StopRequests(30.0).left_s(110.0) == 30.0  # nobody has requested a stop


def test_a_further_request_ends_the_grace_and_one_before_it_began_does_not() -> None:
    stops = obeyed(2)
    assert not stops.is_hurried
    stops.request()
    assert stops.is_hurried


def test_a_stop_of_this_node_after_that_of_another_one_is_the_same_request() -> None:
    stops = StopRequests(30.0)
    stops.leave_node()
    stops.request()
    assert stops.count == 1
    stops.request()
    assert stops.count == 2


def test_a_node_that_is_left_adds_nothing_to_a_request() -> None:
    stops = obeyed()
    stops.leave_node()
    assert stops.count == 1
    assert not stops.is_hurried


def test_a_grace_may_be_shortened_and_never_lengthened() -> None:
    stops = obeyed()
    stops.end_grace_soon(100.0, 3.0)
    stops.end_grace_soon(101.0, 20.0)
    assert stops.is_grace_over(103.0)
    short = StopRequests(30.0)
    short.begin_grace(100.0, 3.0)
    assert short.is_grace_over(103.0)
