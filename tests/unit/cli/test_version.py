from __future__ import annotations

from importlib import metadata

import pytest

from hermes_ops import cli


def test_the_version_is_that_of_the_installed_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["hermes", "--version"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 0
    assert capsys.readouterr().out == f"hermes {metadata.version('hermes-ops')}\n"
