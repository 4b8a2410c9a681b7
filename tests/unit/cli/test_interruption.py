"""Ctrl-C in a command line that has not begun its command."""

from __future__ import annotations

import pytest

from hermes_ops import cli


def test_ctrl_c_before_a_command_begins_ends_it_with_130_and_without_a_trace(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "assemble", interrupted)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == cli.INTERRUPTED == 130
    printed = capsys.readouterr()
    assert printed.out + printed.err == ""
