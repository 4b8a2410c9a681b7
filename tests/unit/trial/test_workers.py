"""Several workers as one child: whose end counts, who failed first, when the others are ended."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.trial.failure import is_peer_loss
from hermes_ops.trial.processes.workers import (
    FAILED_WAIT_S,
    LEFT_WAIT_S,
    WorkerEnd,
    WorkerProcesses,
    first_failure,
    group_code,
    others_end_by_s,
)


def ends(*codes: int) -> list[WorkerEnd]:
    """Ends of all ranks, one second after the other."""
    return [WorkerEnd(rank, code, float(rank)) for rank, code in enumerate(codes)]


def nobody(rank: int) -> bool:
    return False


def code_of(found: Sequence[WorkerEnd]) -> int:
    return group_code(found, first_failure(found, nobody))


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ((0, 0, 0), 0),
        ((75, 75), 75),
        ((0, 75), 75),
        ((75, 0), 75),
        ((0, 3, 75), 3),
        ((-9, 1), -9),
        ((1, -9), 1),
    ],
)
def test_the_code_of_a_group_is_that_of_its_first_failure_or_else_the_least_final(
    codes: tuple[int, ...], code: int
) -> None:
    assert code_of(ends(*codes)) == code


@given(st.lists(st.sampled_from([0, 75, 1, 2, -9, -15]), min_size=1, max_size=8))
def test_a_group_has_finished_only_if_every_worker_has(codes: list[int]) -> None:
    assert (code_of(ends(*codes)) == 0) == (set(codes) == {0})
    failed = [c for c in codes if c not in (0, 75)]
    assert (code_of(ends(*codes)) in (0, 75)) == (not failed)


def test_workers_that_we_have_killed_do_not_count_beside_those_that_ended_by_themselves() -> None:
    killed = WorkerEnd(1, -9, 2.0, was_killed=True)
    assert code_of([*ends(0), killed]) == 0
    assert code_of([*ends(75), killed]) == 75
    assert code_of([*ends(4), killed]) == 4
    assert code_of([killed]) == -9


def test_workers_that_lose_others_at_a_stop_have_not_failed() -> None:
    def stopped(*codes: int) -> int:
        found = [end._replace(told_to_stop=True) for end in ends(*codes)]
        return group_code(found, first_failure(found, lambda rank: rank > 0))

    assert stopped(75, 1) == 75
    assert stopped(-15, 1, -6) == -15
    assert stopped(0, 1) == 0
    assert stopped(3, 1) == 3, "its own error"
    early = [WorkerEnd(1, 1, 0.5), WorkerEnd(0, -15, 1.0, told_to_stop=True)]
    assert first_failure(early, lambda rank: rank > 0) == early[0], "before the stop"


def test_workers_that_lose_a_first_one_that_has_finished_have_not_failed() -> None:
    def left(*codes: int) -> int:
        found = ends(*codes)
        return group_code(found, first_failure(found, lambda rank: rank == 1))

    assert left(0, 1) == 0
    assert left(0, 1, 75) == 75
    assert left(0, 1, 3) == 3, "its own error"
    assert left(75, 1) == 1, "nobody has told it to leave"


def test_workers_that_die_of_the_stop_have_not_failed() -> None:
    def stopped(*codes: int) -> int:
        return code_of([end._replace(told_to_stop=True) for end in ends(*codes)])

    assert stopped(-15, -15) == -15
    assert stopped(-15, 75) == 75
    assert stopped(0, -15) == -15
    assert stopped(-15, 1) == 1
    assert code_of(ends(-15, 1)) == -15, "nobody has stopped it"


def test_the_first_failure_in_time_is_named_unless_it_is_the_loss_of_another() -> None:
    found = [WorkerEnd(0, 1, 5.0), WorkerEnd(1, 1, 5.2), WorkerEnd(2, 0, 1.0)]
    assert first_failure(found, nobody) == found[0]
    assert first_failure(found, lambda rank: rank == 0) == found[1]
    assert first_failure(found, lambda rank: True) == found[0]
    assert first_failure(ends(0, 75), nobody) is None


@pytest.mark.parametrize(
    ("found", "by_s"),
    [
        ([], None),
        ([WorkerEnd(1, 0, 7.0)], None),
        ([WorkerEnd(0, 0, 7.0)], 7.0 + LEFT_WAIT_S),
        ([WorkerEnd(1, 75, 7.0)], 7.0 + LEFT_WAIT_S),
        ([WorkerEnd(1, 1, 7.0), WorkerEnd(0, 0, 6.0)], 7.0 + FAILED_WAIT_S),
        ([WorkerEnd(1, -15, 7.0, told_to_stop=True)], None),
        ([WorkerEnd(0, 75, 7.0, told_to_stop=True)], None),
    ],
)
def test_the_others_have_a_stated_time_unless_they_have_a_grace(
    found: list[WorkerEnd], by_s: float | None
) -> None:
    assert others_end_by_s(found) == by_s


@pytest.mark.parametrize(
    "last",
    [
        "horovod.common.exceptions.HorovodInternalError: Horovod has been shut down. This was",
        "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer",
        "torch.distributed.DistBackendError: remote process exited or there was a network error",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
    ],
)
def test_the_loss_of_a_peer_is_told_from_an_error_of_its_own(last: str) -> None:
    traceback = ["Traceback (most recent call last):", '  File "t.py", line 3, in <module>', last]
    assert is_peer_loss(["loss=1", *traceback])
    own = ["Traceback (most recent call last):", '  File "t.py", line 3, in f', "ValueError: oh"]
    assert not is_peer_loss([last, *own])
    assert not is_peer_loss([])


class FakeProcess:
    """A worker's process as a test wants it."""

    def __init__(self, rank: int, dies_of: Sequence[int] = (signal.SIGKILL,)) -> None:
        self.pid, self.output, self.ended_s = 100 + rank, 200 + rank, -1e6
        self.code: int | None = None
        self.received: list[int] = []
        self.follows_stop = False
        self.dies_of = dies_of

    def poll(self) -> int | None:
        return self.code

    def stop(self) -> None:
        self._receive(signal.SIGTERM)

    def expect_stop(self) -> None:
        self.follows_stop = True

    def _receive(self, number: int) -> None:
        self.received.append(number)
        if number in self.dies_of and self.code is None:
            self.code = -number

    def kill(self) -> None:
        self._receive(signal.SIGKILL)


@pytest.fixture
def pair() -> tuple[FakeProcess, FakeProcess]:
    return FakeProcess(0), FakeProcess(1)


def group_of(pair: tuple[FakeProcess, FakeProcess]) -> WorkerProcesses:
    return WorkerProcesses(pair, [], nobody)


def test_the_group_has_the_output_and_the_process_of_the_first_worker(
    pair: tuple[FakeProcess, FakeProcess],
) -> None:
    group = group_of(pair)
    assert (group.pid, group.output, group.size) == (100, 200, 2)


def test_a_group_lives_as_long_as_one_worker_does(pair: tuple[FakeProcess, FakeProcess]) -> None:
    group = group_of(pair)
    pair[1].code, pair[1].ended_s = 0, 1.0
    assert group.poll() is None
    pair[0].code, pair[0].ended_s = 0, 2.0
    assert group.poll() == 0


def test_a_signal_reaches_every_worker_that_lives_and_starts_the_grace(
    pair: tuple[FakeProcess, FakeProcess],
) -> None:
    group = group_of(pair)
    group.stop()
    assert [p.received for p in pair] == [[signal.SIGTERM], [signal.SIGTERM]]
    pair[1].code = -15
    assert group.poll() is None
    assert pair[0].received == [signal.SIGTERM], "it has its grace"
    group.kill()
    assert group.poll() == -15


def test_the_others_of_a_worker_that_has_failed_are_killed(
    pair: tuple[FakeProcess, FakeProcess],
) -> None:
    group = group_of(pair)
    pair[1].code = 3
    assert group.poll() is None
    assert group.poll() == 3
    assert pair[0].received == [signal.SIGKILL]
    failure = group.failure
    assert failure is not None
    assert failure.rank == 1


def test_followers_that_stay_behind_a_leader_that_has_finished_are_killed_and_it_has(
    pair: tuple[FakeProcess, FakeProcess],
) -> None:
    group = group_of(pair)
    pair[0].code = 0
    assert group.poll() is None
    assert group.poll() == 0
