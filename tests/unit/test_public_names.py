"""The public names: few, short, listed on one page, and free until they are used."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import hermes_ops.airflow
import hermes_ops.testing
import hermes_ops.trial

ROOT = Path(__file__).parents[2]
PUBLIC = {
    "hermes_ops.airflow": set(hermes_ops.airflow.__all__),
    "hermes_ops.trial": set(hermes_ops.trial.__all__),
    # For packages with a policy or a sampler.
    "hermes_ops.core.model": {"Gpu", "Grant", "Job", "Phase", "Plan", "Point", "Policy", "Reason",
                              "Snapshot", "Term"},
    "hermes_ops.policies.priority": {"PriorityPolicy"},
    "hermes_ops.search": {"SearchSettings"},
    "hermes_ops.search.interface": {"Observation", "Sampler"},
    "hermes_ops.search.space": {"Config"},
    "hermes_ops.search.tree": {"axes", "from_units"},
    "hermes_ops.testing": set(hermes_ops.testing.__all__),
}  # fmt: skip
FENCE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
FOR_CONTRIBUTORS = ("CONTRIBUTING.md", "docs/policies.md")


def loaded(code: str) -> set[str]:
    """The top-level modules that a new interpreter has loaded after this code."""
    shown = f"{code}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize(
    "code", ["import hermes_ops.airflow", "from hermes_ops.airflow import sweep"]
)
def test_importing_the_package_loads_no_airflow(code: str) -> None:
    assert not {"airflow", "mlflow", "numpy", "pydantic"} & loaded(code)


@pytest.mark.parametrize("command", ["status", "explain a/0", "sweep list"])
def test_a_command_that_looks_at_a_stack_loads_no_policy_and_no_database(command: str) -> None:
    code = f"""
import contextlib, sys
from hermes_ops.cli import main
sys.argv = ["hermes", *{command.split()}, "--home", "/nowhere"]
with contextlib.suppress(SystemExit):
    main()
"""
    assert not {"airflow", "mlflow", "scipy", "sklearn", "sqlalchemy"} & loaded(code)


@pytest.mark.parametrize("before", ["", "import hermes_ops.airflow.sweep.dag\n"])
def test_every_public_name_is_what_it_was_whatever_has_been_imported(before: str) -> None:
    code = before + "\n".join([
        "from hermes_ops.airflow import HermesPlugin, SweepTaskGroup, nightly_dags, refuse_broken",
        "from hermes_ops.airflow import sweep, sweep_asset, sweep_dag",
        "from hermes_ops.airflow.sweep import dag, nightly_dags as nightly",
        "assert SweepTaskGroup is dag.SweepTaskGroup and sweep_dag is dag.sweep_dag",
        "assert sweep_asset is dag.sweep_asset and nightly_dags is nightly.nightly_dags",
        "@sweep(pool='mine')",
        "def found(): ...",
        "@sweep",
        "def other(): ...",
        "assert (found.__name__, other.__name__) == ('found', 'other')",
    ])  # fmt: skip
    assert "airflow" in loaded(code)


def test_every_public_name_of_the_modules_for_packages_exists() -> None:
    for module, names in PUBLIC.items():
        assert not {name for name in names if not hasattr(import_module(module), name)}


def test_a_name_that_is_not_there_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="sweeps"):
        hermes_ops.airflow.sweeps  # noqa: B018 - looked up for its error


def test_one_page_lists_every_public_name_and_no_other() -> None:
    page = (ROOT / "docs/api.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == set().union(*PUBLIC.values())


def sources() -> dict[str, str]:
    """Python that users read or copy, by its place."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = {
        f"{page.relative_to(ROOT)}-{number}": text
        for page in pages
        for number, text in enumerate(FENCE.findall(page.read_text("utf-8")))
        if str(page.relative_to(ROOT)) not in FOR_CONTRIBUTORS
    }
    files = (f for folder in ("dags", "examples", "plugins") for f in (ROOT / folder).rglob("*.py"))
    return {**found, **{str(f.relative_to(ROOT)): f.read_text("utf-8") for f in files}}


def test_documentation_and_examples_use_public_names_alone() -> None:
    internal = {}
    for place, text in sources().items():
        try:
            tree = ast.parse(text)
        except SyntaxError:  # a part of a file
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hermes_ops"):
                names = {alias.name for alias in node.names}
                if not names <= PUBLIC.get(node.module or "", set()):
                    internal[place] = f"{node.module}: {', '.join(sorted(names))}"
    assert internal == {}
