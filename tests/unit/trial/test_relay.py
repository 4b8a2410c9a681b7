"""The way of a script's output past its supervisor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.trial.output.relay import LimitedLog, Relay
from hermes_ops.trial.redaction import Mask

MOST_WAITING_BYTES = 1_048_576 + 3 * 65_536  # ours, and what the two pipes and a block hold


@dataclass
class Pipes:
    """A script that writes all it can and a reader that reads when it is asked to."""

    heard: bytearray = field(default_factory=bytearray)
    read: bytearray = field(default_factory=bytearray)
    written: int = 0
    mask: Mask | None = None
    log: LimitedLog | None = None

    def __post_init__(self) -> None:
        self.source, self.script = os.pipe2(os.O_NONBLOCK)
        self.reader, self.target = os.pipe2(os.O_NONBLOCK)
        self.relay = Relay(self.source, self.heard.extend, self.target, self.mask, log=self.log)

    def write(self, data: bytes) -> None:
        try:
            self.written += os.write(self.script, data)
        except BlockingIOError:
            return

    def take(self) -> None:
        try:
            self.read += os.read(self.reader, 1 << 20)
        except BlockingIOError:
            return

    def close(self) -> None:
        for handle in (self.source, self.script, self.reader, self.target):
            try:
                os.close(handle)
            except OSError:
                continue


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    pipes = Pipes()
    yield pipes
    pipes.close()


def test_a_script_can_write_no_more_than_a_little_ahead_of_its_reader(pipes: Pipes) -> None:
    for _ in range(200):
        pipes.write(b"x" * 65_536)
        pipes.relay.pump(0.0)
    assert 1_048_576 < pipes.written <= MOST_WAITING_BYTES
    os.close(pipes.script)
    while len(pipes.read) < pipes.written:
        pipes.relay.pump(0.0)
        pipes.take()
    assert len(pipes.heard) == pipes.written
    pipes.relay.drain(1.0)


def test_what_a_script_has_written_is_heard_when_its_reader_sleeps(pipes: Pipes) -> None:
    for _ in range(200):
        pipes.write(b"x" * 65_536)
        pipes.relay.pump(0.0)
    pipes.relay.drain(0.0)
    assert len(pipes.heard) == pipes.written


def test_a_reader_that_is_too_slow_for_all_gets_the_end_and_is_told_how_much_is_missing(
    pipes: Pipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end says why a script has failed."""
    for _ in range(14):
        pipes.write(b"a line of the script\n" * 3_000)
        pipes.relay.pump(0.0)
    pipes.write(b"ValueError: the last line\n")
    os.close(pipes.script)
    ticks, most_s = count(), 0.001

    def monotonic() -> float:
        if (now_s := next(ticks) * most_s / 100) > 1.1 * most_s:  # it wakes up after the first wait
            pipes.take()
        return now_s

    monkeypatch.setattr("hermes_ops.trial.output.relay.time.monotonic", monotonic)
    pipes.relay.drain(most_s)
    pipes.take()
    lines = pipes.read.decode().splitlines()
    cut = next(number for number, line in enumerate(lines) if line.startswith("hermes-trial: "))
    assert lines[cut].endswith(" KiB of output are left out here")
    assert lines[-1] == "ValueError: the last line"
    assert {*lines[: cut - 1], *lines[cut + 1 : -1]} == {"a line of the script"}
    assert len(lines) - cut > 3_000
    assert len(pipes.heard) == pipes.written


def test_a_reader_that_has_gone_does_not_stop_the_script(pipes: Pipes) -> None:
    os.close(pipes.reader)
    for _ in range(200):
        pipes.write(b"x" * 65_536)
        pipes.relay.pump(0.0)
    assert pipes.written > 2 * MOST_WAITING_BYTES
    os.close(pipes.script)
    pipes.relay.drain(1.0)


def test_secrets_are_masked_on_the_way_and_heard_as_they_are() -> None:
    pipes = Pipes(mask=Mask(["swordfish"]))
    for piece in (b"say sword", b"fish, or sword"):
        pipes.write(piece)
        pipes.relay.pump(0.0)
    os.close(pipes.script)
    pipes.relay.drain(1.0)
    pipes.take()
    assert pipes.read == b"say ***, or sword"
    assert pipes.heard == b"say swordfish, or sword"
    pipes.close()


def test_a_long_output_is_heard_as_a_whole_and_our_own_lines_are_passed_on_beyond_the_limit() -> (
    None
):
    pipes = Pipes(log=LimitedLog(40, 20))
    for number in range(100):
        pipes.write(b"line %02d\n" % number)
        pipes.relay.pump(0.0)
        if number == 50:
            pipes.relay.say("a line of ours")
    os.close(pipes.script)
    pipes.relay.drain(1.0)
    pipes.take()
    lines = pipes.read.decode().splitlines()
    assert lines[:5] == [f"line {number:02d}" for number in range(5)]
    assert lines[6:] == [
        "a line of ours",
        "hermes-trial: 744 B of output are left out here",
        "line 98",
        "line 99",
    ]
    assert len(pipes.heard) == pipes.written == 800
    pipes.close()


FULL = (
    b"hermes-trial: the output of this segment is longer than 40 B: the rest is read for "
    b"values, and its last 20 B will be shown at the end\n"
)


def shown(pieces: list[bytes]) -> bytes:
    log = LimitedLog(40, 20)
    return b"".join([log.feed(piece) for piece in pieces]) + log.close()


def test_a_long_output_keeps_its_first_and_its_last_lines_and_says_how_much_is_missing() -> None:
    lines = [b"line %02d\n" % number for number in range(100)]
    left_out = b"hermes-trial: 744 B of output are left out here\n"
    expected = b"".join(lines[:5]) + FULL + left_out + b"".join(lines[98:])
    assert shown(lines) == shown([b"".join(lines)]) == expected


def test_a_line_that_is_longer_than_the_limit_is_cut_and_ends() -> None:
    assert shown([b"x" * 1000]) == (
        b"x" * 40 + b"\n" + FULL + b"hermes-trial: 940 B of output are left out here\n" + b"x" * 20
    )


def test_an_output_that_is_a_little_too_long_is_shown_as_a_whole() -> None:
    lines = b"a line of 20 bytes.\n"
    assert shown([lines] * 3) == lines * 2 + FULL + lines


@given(st.lists(st.binary(max_size=15), max_size=30).filter(lambda p: len(b"".join(p)) <= 40))
def test_a_short_output_is_passed_on_byte_for_byte_at_once(pieces: list[bytes]) -> None:
    log = LimitedLog(40, 20)
    assert [log.feed(piece) for piece in pieces] == pieces
    assert log.close() == b""


@given(st.lists(st.binary(max_size=100), max_size=30))
def test_the_log_of_any_output_is_bounded(pieces: list[bytes]) -> None:
    assert len(shown(pieces)) <= 40 + 1 + len(FULL) + 60 + 40
