from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.errors import Refused
from hermes_ops.tracking.rest import chunked_tag, in_batches, joined_json, legal_name, quoted


@pytest.mark.parametrize("name", ["loss", "val_loss", "a/b c.d-e:f", "größe", "x" * 250])
def test_a_legal_name_is_kept(name: str) -> None:
    assert legal_name(name) == name


def test_two_illegal_names_stay_two() -> None:
    assert legal_name("top1%") == "top1_-84dadc"
    names = ["top1%", "top1?", "", ".", "..", "/a", "a/", "a//b", "x" * 251, "x" * 252, "\ud800"]
    assert len({legal_name(n) for n in names}) == len(names)


@given(st.text(max_size=300))
def test_any_name_becomes_one_that_mlflow_allows(name: str) -> None:
    legal = legal_name(name)
    assert legal_name(legal) == legal
    assert 0 < len(legal) <= 250


def test_a_quote_in_a_filter_value_cannot_end_it() -> None:
    assert quoted("it's") == '"it\'s"'
    assert quoted('a"b') == "'a\"b'"
    for value in ("'\"", "\\"):
        with pytest.raises(Refused):
            quoted(value)


@given(st.lists(st.text(min_size=1), max_size=20), st.lists(st.integers(), max_size=3_000))
def test_a_long_json_text_survives_its_chunks_and_leftovers(
    words: list[str], numbers: list[int]
) -> None:
    value = {"words": words, "numbers": numbers}
    older = chunked_tag("t", json.dumps(["x" * 20_000]))
    tags = chunked_tag("t", json.dumps(value))
    assert all(len(part) <= 8_000 for part in tags.values())
    assert joined_json("t", {**older, **tags}) == value


def test_a_tag_that_is_not_there_is_none() -> None:
    assert joined_json("t", {}) is None


@pytest.mark.parametrize(("length", "count"), [(1, 1_000), (6_000, 1_000), (8_000, 3), (1, 0)])
@pytest.mark.parametrize("sign", ["a", "語", "😀", "\x01"])
def test_batches_of_params_keep_order_and_mlflow_s_limits(
    length: int, count: int, sign: str
) -> None:
    entries = [{"key": f"p{n}", "value": sign * length} for n in range(count)]
    batches = list(in_batches(entries))
    assert [entry for batch in batches for entry in batch] == entries
    assert all(0 < len(batch) <= 100 for batch in batches)
    assert all(len(json.dumps(batch)) < 1_000_000 for batch in batches)


def test_importing_tracking_imports_neither_mlflow_nor_httpx() -> None:
    code = (
        "import sys, hermes_ops.tracking, hermes_ops.tracking.summary, hermes_ops.report;"
        "sys.exit(any(m in sys.modules for m in ('mlflow', 'httpx', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
