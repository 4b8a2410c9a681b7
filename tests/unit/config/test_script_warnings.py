"""What a sweep's script lacks where it would run: found without running it, and no false alarm."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from hermes_ops.config import parse
from hermes_ops.config.preview import warnings_of
from hermes_ops.config.script import entry_point_of

X = {"x": {"type": "uniform", "low": 0, "high": 1}}


def said(
    folder: Path, script: str | None = "import os\n", command: Any = None, **trial: Any
) -> list[str]:
    """The warnings of a sweep of this script, which is written to train.py."""
    if script is not None:
        (folder / "train.py").write_text(script)
    given = {"command": command or ["python", "train.py", "{x}"], "directory": str(folder)}
    data = {
        "name": "digits",
        "objective": {"metric": "val_loss"},
        "search": {"algorithm": "random", "max_trials": 2, "space": trial.pop("space", X)},
        "trial": {**given, **trial},
        "budget": {"max_epochs": 2},
    }
    config = parse(data, "test", None)
    return [str(w) for w in warnings_of(config, pool_slots=None, environ=os.environ)]


def test_a_script_that_is_there_and_finds_its_packages_has_no_warning(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import numpy\n")
    script = (
        "import json, model\nfrom hermes_ops.trial import report\nimport sklearn.linear_model\n"
    )
    assert said(tmp_path, script) == []


def test_a_script_that_is_not_there_is_said(tmp_path: Path) -> None:
    (line,) = said(tmp_path, None)
    assert line.startswith(f"trial.command[1]: train.py, which is not in {tmp_path}")


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    (line,) = said(tmp_path, directory=str(tmp_path / "gone"))
    assert line.startswith("trial.directory: ")
    assert "no folder on this machine" in line


def test_a_folder_that_cannot_be_is_said(tmp_path: Path) -> None:
    (line,) = said(tmp_path, directory=str(tmp_path / ("a" * 300)))
    assert line.startswith("trial.directory: ")


def test_a_script_that_cannot_be_is_said(tmp_path: Path) -> None:
    (line,) = said(tmp_path, None, ["python", "a" * 300 + ".py", "{x}"])
    assert line.startswith("trial.command[1]: ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look into every folder")
def test_a_script_in_a_folder_of_others_is_said(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0)
    (line,) = said(tmp_path, None, directory=str(locked))
    assert line.startswith("trial.command[1]: train.py, which is not in ")


@pytest.mark.parametrize("python", ["gone/bin/python", "/gone/python", "python-that-is-not-there"])
def test_an_interpreter_that_is_not_there_is_said(tmp_path: Path, python: str) -> None:
    (line,) = said(tmp_path, python=python)
    assert line.startswith("trial.python: ")
    assert "no program on this machine; no trial can start" in line


def test_a_program_that_is_not_there_is_said(tmp_path: Path) -> None:
    (line,) = said(tmp_path, command=["torchrun-that-is-not-there", "train.py", "{x}"])
    assert line.startswith("trial.command[0]: torchrun-that-is-not-there, which is no program")
    assert said(tmp_path, command=["sh", "run.sh", "{x}"]) == []


def test_a_package_that_the_interpreter_lacks_is_said_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("# the network\nfrom not_there_either import Net\n")
    lines = said(tmp_path, "import os\nimport cv2_not_there.sub\nimport model\n")
    assert len(lines) == 2
    assert "the import of cv2_not_there (train.py:2)" in lines[0]
    assert sys.executable in lines[0]
    assert "the import of not_there_either (model.py:2)" in lines[1]


@pytest.mark.parametrize(
    "script",
    [
        "try:\n    import gone\nexcept ImportError:\n    gone = None\n",
        "import contextlib\nwith contextlib.suppress(ImportError):\n    import gone\n",
        "def main():\n    import gone\n",
        "import sys\nif len(sys.argv) > 9:\n    import gone\n",
        "import sys\nsys.path.insert(0, '/elsewhere')\nimport gone\n",
        "import sys\nsys.modules['gone'] = sys\nimport gone\n",
        "import subprocess\nsubprocess.run(['pip', 'install', 'gone'])\nimport gone\n",
        "from . import gone\n",
        "TYPE_CHECKING = False\nif TYPE_CHECKING:\n    import gone\n",
    ],
)
def test_an_import_that_may_not_happen_is_no_warning(tmp_path: Path, script: str) -> None:
    assert said(tmp_path, script) == []


@pytest.mark.parametrize(
    "script",
    [
        "import warnings\nwith warnings.catch_warnings():\n    import gone\n",
        "if __name__ == '__main__':\n    import gone\n",
        '"""Run pip install gone first."""\nimport gone\n',
    ],
)
def test_an_import_that_surely_happens_is_a_warning(tmp_path: Path, script: str) -> None:
    assert len(said(tmp_path, script)) == 1


def test_packages_are_found_where_the_scripts_own_environment_says(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "helper_of_mine.py").write_text("")
    assert len(said(tmp_path, "import helper_of_mine\n")) == 1
    environment = {"PYTHONPATH": str(tmp_path / "lib")}
    assert said(tmp_path, "import helper_of_mine\n", environment=environment) == []


def test_a_syntax_error_is_said_with_its_line(tmp_path: Path) -> None:
    (line,) = said(tmp_path, "import os\nx = = 1\n")
    assert "a script that is no Python (train.py:2: " in line


def test_an_archive_that_python_runs_is_no_syntax_error(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "train.pyz", "w") as archive:
        archive.writestr("__main__.py", "import os\n")
    assert said(tmp_path, command=["python", "train.pyz", "{x}"]) == []


def test_a_module_is_looked_for_as_python_does(tmp_path: Path) -> None:
    command = ["python", "-u", "-m", "mine.train", "{x}"]
    (line,) = said(tmp_path, command=command)
    assert "the module mine, which" in line
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text("import gone\n")
    (line,) = said(tmp_path, command=command)
    assert "the import of gone (train.py:1)" in line


def test_nothing_of_the_script_runs(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert said(tmp_path, "import model\nraise SystemExit(1)\n") == []
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "__pycache__").exists()


PLAIN = ["python", "train.py"]


def test_a_parameter_that_nothing_uses_is_said(tmp_path: Path) -> None:
    (line,) = said(tmp_path, command=PLAIN)
    assert line.startswith("search.space.x: a parameter that neither the command passes on nor")
    assert "read HERMES_PARAM_X in the script" in line


def test_several_unused_parameters_are_one_warning(tmp_path: Path) -> None:
    space = {f"p{n}": X["x"] for n in range(1000)}
    (line,) = said(tmp_path, command=PLAIN, space=space)
    assert line.startswith("search.space: p0, p1, ")
    assert "and 980 more" in line


@pytest.mark.parametrize(
    "script",
    [
        "import os\nx = os.environ['HERMES_PARAM_X']\n",
        "import os\nx = os.environ['HERMES_PARAM_' + 'x'.upper()]\n",
        "import os\nx = os.environ[f'HERMES_PARAM_{1}']\n",
        "import os\nx = {k: v for k, v in os.environ.items() if k[0] == 'H'}\n",
        "import settings\n",
    ],
)
def test_a_parameter_that_the_script_may_read_is_no_warning(tmp_path: Path, script: str) -> None:
    (tmp_path / "settings.py").write_text("prefix = 'HERMES_PARAM_X'\n" * ("settings" in script))
    assert said(tmp_path, script, command=PLAIN) == []


def test_a_parameter_that_a_file_beside_the_script_names_is_no_warning(tmp_path: Path) -> None:
    (tmp_path / "conf.yaml").write_text("x: ${oc.env:HERMES_PARAM_X}\n")
    assert said(tmp_path, command=PLAIN) == []


def test_a_program_whose_text_is_not_known_may_read_any_parameter(tmp_path: Path) -> None:
    assert said(tmp_path, command=["true"]) == []


def test_a_parameter_under_a_choice_is_looked_for_too(tmp_path: Path) -> None:
    space = {"kind": {"type": "choice", "values": ["a", {"value": "b", "space": X}]}}
    (line,) = said(tmp_path, command=[*PLAIN, "{kind}"], space=space)
    assert line.startswith("search.space.kind.values[1].space.x: ")


def test_nothing_is_looked_for_where_trials_run_elsewhere(tmp_path: Path) -> None:
    pods = {"run_in": "pod", "pod": {"image": "mine:1"}}
    assert said(tmp_path, None, directory="/gone", **pods) == []


@pytest.mark.parametrize(
    ("command", "kind", "name"),
    [
        (["python", "train.py"], "file", "train.py"),
        (["/opt/venv/bin/python3.11", "-X", "dev", "-W", "ignore", "-u", "a.py"], "file", "a.py"),
        (["python", "-m", "mine.train"], "module", "mine.train"),
        (["python", "-c", "print(1)"], "", ""),
        (["python", "-"], "", ""),
        (["python", "{script}"], "", ""),
        (["python"], "", ""),
        (["torchrun", "train.py"], "", ""),
        (["{program}", "train.py"], "", ""),
    ],
)
def test_what_a_command_starts(command: list[str], kind: str, name: str) -> None:
    found = entry_point_of(command)
    assert (found.kind, found.name) == (kind, name)
