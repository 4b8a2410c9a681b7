"""Configurations as large as a sweep file may have them, beside a sweep of the usual kind."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

PROMPTS = ["語" * 10_000, "😀" * 9_999 + '"']
PARAMETERS = 1_000


def test_a_thousand_parameters_and_long_texts_are_trained_beside_other_sweeps(
    lab: Any, harness: Any
) -> None:
    space = {f"p{n}": {"type": "uniform", "low": 0, "high": 1} for n in range(PARAMETERS)}
    tpe = {"algorithm": "tpe", "max_trials": 4, "startup_trials": 2, "space": space}
    wide = harness.config("wide", {}, "large.py", search=tpe)
    texts = harness.config("texts", {"prompt": PROMPTS}, "large.py", "{prompt}")
    plain = harness.stub("plain", harness.alike(2), 3, 0.1)
    sweeps = [lab.start(content) for content in (wide, texts, plain)]
    assert [sweep.await_end() for sweep in sweeps] == ["success"] * 3
    largest, longest, _ = sweeps
    for number, (run,) in longest.runs().items():
        digest = hashlib.sha256(PROMPTS[number].encode()).hexdigest()
        assert longest.curve(number) == [(1, float(int(digest[:8], 16)))], run["info"]
    assert len(largest.states()) == 4
    for number in range(4):
        ((_, total),) = largest.curve(number)
        params = {k: float(v) for k, v in largest.runs()[number][0]["params"].items()}
        assert len(params) == PARAMETERS
        assert total == sum(params[name] for name in sorted(params, key=str.upper))
