"""What happens in the user's interpreter before the script, as processes of their own."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hermes_ops.trial import hook
from hermes_ops.trial.files import trial_seeds
from hermes_ops.trial.segment import SITE


def python(code: str, trial: Path | None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": SITE}
    environment.pop("HERMES_TRIAL_DIR", None)
    if trial is not None:
        environment["HERMES_TRIAL_DIR"] = str(trial)
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )


def loaded(trial: Path | None) -> set[str]:
    code = "import sys; before = sorted(sys.modules); import json; print(json.dumps(before))"
    return set(json.loads(python(code, trial).stdout))


def test_before_the_script_nothing_is_imported_that_takes_long(tmp_path: Path) -> None:
    added = loaded(tmp_path) - loaded(None)
    assert "hermes_ops.trial.hook" in added
    allowed = {"__future__", "importlib", "importlib.machinery", "importlib._bootstrap",
               "importlib._bootstrap_external", "math", "warnings", "_warnings"}  # fmt: skip
    assert {m for m in added if not m.startswith("hermes_ops")} <= allowed


def test_a_script_that_imports_random_draws_the_same_in_each_segment(tmp_path: Path) -> None:
    mine, another = tmp_path / "mine", tmp_path / "another"
    mine.mkdir()
    another.mkdir()
    code = "import random; print(random.random())"
    first, second = python(code, mine).stdout, python(code, mine).stdout
    assert first == second != python(code, another).stdout


def test_a_module_that_loaded_random_before_the_hook_does_not_keep_it_unseeded(
    tmp_path: Path,
) -> None:
    again = "sys.meta_path.pop(0); from hermes_ops.trial.hook import install; install()"
    late = python(f"import random, sys; random.seed(); {again}; print(random.random())", tmp_path)
    assert late.stdout == python("import random; print(random.random())", tmp_path).stdout


LAZY = """\
import importlib.util, sys, types
class Lazy(types.ModuleType):
    def __getattribute__(self, name):
        if not object.__getattribute__(self, "began"):
            object.__setattr__(self, "began", True)
            object.__getattribute__(self, "__spec__").loader.exec_module(self)
            self.__class__ = types.ModuleType
        return object.__getattribute__(self, name)
module = importlib.util.module_from_spec(importlib.util.find_spec("numpy"))
module.began, module.__class__ = False, Lazy
sys.modules["numpy"] = module
"""


def test_numpy_draws_the_same_if_a_package_loads_it_at_its_first_use(tmp_path: Path) -> None:
    drawn = "import numpy; print(numpy.random.rand())"
    lazy = python(LAZY + drawn, tmp_path)
    assert (lazy.stdout, lazy.stderr) == (python(drawn, tmp_path).stdout, "")


def test_a_script_goes_on_where_its_seeds_cannot_be_kept(tmp_path: Path) -> None:
    done = python("import random; print('trained')", tmp_path / "gone")
    assert done.stdout == "trained\n"
    assert "hermes: random is imported as it is" in done.stderr


def test_the_seeds_are_there_before_the_script_starts(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    look = f"import os; assert os.path.exists({str(folder / 'entropy.json')!r})"
    command = ["--dir", str(folder), "--epoch", "1", "--", sys.executable, "-I", "-c", look]
    trial = [sys.executable, "-m", "hermes_ops.trial", *command]
    subprocess.run(trial, cwd=Path(__file__).parents[3], check=True, capture_output=True)
    assert trial_seeds(folder) == json.loads((folder / "entropy.json").read_text())


@pytest.mark.parametrize(("path", "ahead"), [("vendor", False), ("{base}/vendor", True)])
def test_an_import_from_a_path_that_depends_on_the_folder_is_not_done_ahead(
    tmp_path: Path, path: str, ahead: bool
) -> None:
    (tmp_path / "vendor").mkdir()
    (tmp_path / "vendor" / "sklearn.py").write_text("")
    (tmp_path / "train.py").write_text("import sklearn")
    variables = {
        "PYTHONPATH": f"{SITE}:{path.format(base=tmp_path)}",
        "HERMES_TRIAL_DIR": str(tmp_path),
    }
    subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env={**os.environ, **variables}, check=True
    )
    events = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert [e["ahead"] for e in events if e.get("name") == "sklearn"] == [ahead]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_that_a_script_starts_draw_different_numbers_and_the_same_in_each_segment(
    tmp_path: Path, method: str
) -> None:
    drawn = "import random, numpy; print(random.random(), numpy.random.rand())"
    code = (
        "import multiprocessing\n"
        f"method = multiprocessing.get_context({method!r})\n"
        "for _ in range(3):\n"
        f"    process = method.Process(target=exec, args=({drawn!r},), name='worker')\n"
        "    process.start(); process.join()\n"
        f"{drawn}\n"
    )
    first = python(code, tmp_path).stdout.splitlines()
    numbers = [number for line in first for number in line.split()]
    assert len(numbers) == len(set(numbers)) == 8
    assert python(code, tmp_path).stdout.splitlines() == first


def test_workers_of_joblib_are_numbered_too() -> None:
    assert "joblib.externals.loky.backend.spawn" in hook._SPAWN
    spawn = importlib.import_module("joblib.externals.loky.backend.spawn")
    assert {"get_preparation_data", "prepare"} <= set(vars(spawn))


def test_generators_without_a_seed_draw_the_same_in_each_segment_but_not_in_each_fork(
    tmp_path: Path,
) -> None:
    code = (
        "import os, numpy as np\n"
        "print(np.random.default_rng().random(), np.random.RandomState().rand(), flush=True)\n"
        "for _ in range(2):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        print(np.random.default_rng().random(), flush=True)\n"
        "        os._exit(0)\n"
        "    os.waitpid(pid, 0)\n"
    )
    own, *forks = python(code, tmp_path).stdout.splitlines()
    again, *others = python(code, tmp_path).stdout.splitlines()
    assert own == again
    assert len({*own.split(), *forks, *others}) == 6
