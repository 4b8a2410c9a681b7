"""What a long output leaves in the log of its task."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.trial.output.relay import LimitedLog

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
