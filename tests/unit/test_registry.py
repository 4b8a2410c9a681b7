"""Names of built-in entries and of installed packages: which wins, and what a broken one says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes_ops import registry
from hermes_ops.errors import ConfigError
from hermes_ops.policies import POLICIES, live_policies, make_policy
from hermes_ops.registry import FactoryRegistry


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path; what is installed there is seen in this test alone."""
    monkeypatch.syspath_prepend(tmp_path)
    registry._offered.cache_clear()
    yield tmp_path
    registry._offered.cache_clear()


def install(site: Path, package: str, group: str, **points: str) -> None:
    """Install a package that has no code but entry points."""
    folder = site / f"{package}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (folder / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")


def test_a_package_s_entry_is_listed_after_the_built_in_ones_and_imported_when_asked_for(
    site: Path,
) -> None:
    install(site, "theirs", "letters", upper="string:ascii_uppercase", broken="nowhere:gone")
    letters: FactoryRegistry[str] = FactoryRegistry("letters", {"lower": "abc"})
    assert list(letters) == ["lower", "broken", "upper"]
    assert len(letters) == 3
    assert "upper" in letters
    assert letters["upper"].startswith("ABC")
    assert "other" not in letters
    with pytest.raises(KeyError):
        letters["other"]


def test_a_built_in_entry_wins(site: Path) -> None:
    install(site, "theirs", "letters", lower="string:ascii_uppercase")
    letters: FactoryRegistry[str] = FactoryRegistry("letters", {"lower": "abc"})
    assert list(letters) == ["lower"]
    assert letters["lower"] == "abc"


def test_two_packages_that_offer_one_name_are_both_named(site: Path) -> None:
    install(site, "one", "letters", upper="string:ascii_uppercase")
    install(site, "two", "letters", upper="string:ascii_letters")
    letters: FactoryRegistry[str] = FactoryRegistry("letters", {})
    with pytest.raises(ConfigError, match=r"\(two\), .*\(one\).*uninstall"):
        letters["upper"]


def test_a_policy_that_cannot_be_imported_is_left_out_and_says_why_when_it_is_chosen(
    site: Path,
) -> None:
    install(site, "theirs", "hermes_ops.policies", broken="nowhere:Policy")
    assert "broken" in POLICIES
    assert "broken" not in POLICIES.builtin
    assert "broken" not in live_policies()
    assert "fifo" in live_policies()
    with pytest.raises(ConfigError, match=r"nowhere:Policy of theirs: ModuleNotFoundError"):
        make_policy("broken", {})
