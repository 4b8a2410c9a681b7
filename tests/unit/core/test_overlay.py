"""Reasons laid over reasons, none of them made before somebody reads it."""

from __future__ import annotations

import pytest

from hermes_ops.core.model import JobId, Reason
from hermes_ops.core.plan import LazyReasons, overlay

A, B, C = JobId("s/1"), JobId("s/2"), JobId("s/3")


def never(job: JobId) -> Reason:
    raise AssertionError(f"{job} was asked for")


def test_what_lies_above_is_read_and_what_lies_below_is_not_made() -> None:
    found = overlay(LazyReasons({A: None, B: None}, never), {B: Reason("above"), C: Reason("new")})
    assert (found[B].text, found[C].text) == ("above", "new")
    assert list(found) == [A, B, C]
    assert len(found) == 3


def test_what_is_not_covered_is_read_from_below() -> None:
    below = LazyReasons({A: None}, lambda job: Reason(f"below {job}"))
    assert overlay(below, {B: Reason("above")}).get(A) == Reason("below s/1")


def test_a_job_in_neither_has_no_reason() -> None:
    found = overlay(LazyReasons({A: None}, never), {})
    assert found.get(B) is None
    assert found.get(B, Reason("none")) == Reason("none")
    with pytest.raises(KeyError):
        found[B]
