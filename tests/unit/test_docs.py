"""The documentation holds: links, commands, sweep files, names of tests, the policy example."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from hermes_ops.airflow import records
from hermes_ops.cli import assemble
from hermes_ops.config import load_file
from hermes_ops.core.guards import guarded
from hermes_ops.core.model import Gpu, Job, JobId, Phase, Snapshot, SweepId
from hermes_ops.core.plan import check
from hermes_ops.policies import POLICIES, live_policies, make_policy

ROOT = Path(__file__).parents[2]
FOLDERS = (".ci", ".github", "bench", "dags", "docs", "examples", "hermes_ops", "mlflow", "plugins")
TEXT = {".cfg", ".json", ".lock", ".md", ".py", ".sh", ".svg", ".toml", ".yaml", ".yml", ""}

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")
TEST_NAME = re.compile(r"`(test_\w+)`")
TASKS = ("plan", "trial", "report")
COMMAND = re.compile(r"^(?:\S*/)?hermes (?!Ops)(.+)$")


@dataclass(frozen=True)
class Fence:
    """A fenced block of a page; its text prints as the place in failures."""

    page: str
    number: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"


def files() -> Iterator[Path]:
    inside = (p for folder in (*FOLDERS, "tests") for p in (ROOT / folder).rglob("*"))
    own = (p for p in ROOT.iterdir() if p.name != ".git")  # a file in a checkout made by worktree
    for path in (*own, *inside):
        if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts:
            yield path


def pages() -> list[Path]:
    return sorted(p for p in files() if p.suffix == ".md")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def fences(*languages: str) -> list[Fence]:
    return [
        Fence(name_of(page), number, language, text)
        for page in pages()
        for number, (language, text) in enumerate(FENCE.findall(page.read_text("utf-8")), start=1)
        if language in languages
    ]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text("utf-8"))


# -- the top level -------------------------------------------------------------------------------

TOP_LEVEL = re.compile(
    r"(README|CHANGELOG|CONTRIBUTING|SECURITY)\.md|LICENSE|Makefile|mkdocs\.yml|pyproject\.toml"
    r"|requirements[\w-]*\.lock"
)


def test_no_file_at_the_top_level_is_left_over_from_a_run_of_something() -> None:
    """Files that a user has put beside them are no part of the repository."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    names = listed.stdout.splitlines() or [p.name for p in ROOT.iterdir() if p.is_file()]
    tops = [name for name in names if "/" not in name and not name.startswith(".")]
    assert [name for name in tops if not TOP_LEVEL.fullmatch(name)] == []
    assert "README.md" in tops


def test_modules_and_functions_are_as_short_as_contributing_says() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    most = re.search(r"Functions up to (\d+) lines, modules up to (\d+)", text)
    assert most is not None
    long = []
    for path in sorted((ROOT / "hermes_ops").rglob("*.py")):
        source = path.read_text("utf-8")
        long += [name_of(path)] if source.count("\n") > int(most[2]) else []
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                lines = node.end_lineno - node.lineno + 1
                long += [f"{name_of(path)}: {node.name}"] if lines > int(most[1]) else []
    assert long == []


# -- links ---------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        wrong_anchor = bool(anchor) and (to.suffix != ".md" or anchor not in anchors(to))
        if not to.exists() or wrong_anchor:
            broken.append(target)
    assert broken == []


def test_every_page_is_reached_from_the_first_one() -> None:
    seen: set[Path] = set()
    ahead = [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page in seen or page.suffix != ".md" or not page.exists():
            continue
        seen.add(page)
        targets = (t.partition("#")[0] for t in LINK.findall(prose(page)) if "://" not in t)
        ahead += [(page.parent / t).resolve() for t in targets if t]
    lost = sorted(name_of(p) for p in pages() if p not in seen)
    assert lost == [], "add a line for these pages to docs/README.md"


# -- sweep files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fence", fences("yaml", "yml"), ids=str)
def test_every_sweep_file_in_the_documentation_is_valid(fence: Fence, tmp_path: Path) -> None:
    if "search" not in (yaml.safe_load(fence.text) or {}):
        pytest.skip("a part of a file")
    file = tmp_path / "sweep.yaml"
    file.write_text(fence.text)
    assert load_file(file).trial_count > 0


# -- settings ------------------------------------------------------------------------------------


def test_an_address_of_postgresql_in_airflows_settings_names_the_driver_that_is_installed() -> None:
    """SQLAlchemy 2.1 takes another one than 2.0 where none is named."""
    addresses = [url for f in fences("ini") for url in re.findall(r"\w[\w+]*://\S+", f.text)]
    of_postgresql = [url for url in addresses if "postgresql" in url]
    assert of_postgresql
    assert [url for url in of_postgresql if "postgresql+psycopg2://" not in url] == []


# -- commands ------------------------------------------------------------------------------------


@cache
def application() -> Any:
    from typer.main import get_command

    return get_command(assemble())


def commands(group: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        full = f"{prefix}{name}"
        found[full] = command
        if hasattr(command, "commands"):
            found |= commands(command, f"{full} ")
    return found


def options_of(command: Any) -> set[str]:
    named = [p for p in command.params if p.param_type_name == "option"]
    return {"--help"} | {o for p in named for o in (*p.opts, *p.secondary_opts)}


def complaint(line: str) -> str | None:
    """What is wrong with the words after `hermes`; None when they can be typed."""
    words = shlex.split(line.replace("…", ""), comments=True)
    command = application()
    while words and hasattr(command, "commands"):
        if words[0].startswith("-"):
            break
        if words[0] not in command.commands:
            return f"there is no command {words[0]!r}"
        command = command.commands[words.pop(0)]
    given = [w.partition("=")[0] for w in words if w.startswith("--")]
    unknown = [w for w in given if w not in options_of(command)]
    return f"unknown: {', '.join(unknown)}" if unknown else None


def shell_lines(page: Path) -> Iterator[str]:
    """Every `hermes …` of a page: in shell blocks, indented blocks and code spans."""
    text = page.read_text("utf-8")
    blocks = [b for language, b in FENCE.findall(text) if language in ("sh", "bash", "console", "")]
    indented = re.findall(r"^ {4}(\S.*)$", prose(page), re.MULTILINE)
    lines = [*(line for b in blocks for line in b.splitlines()), *indented, *SPAN.findall(text)]
    for line in lines:
        for part in re.split(r"&&|;|\|", line):
            if found := COMMAND.match(part.strip().removeprefix("$ ")):
                yield found[1]


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_every_command_in_the_documentation_can_be_typed(page: Path) -> None:
    wrong = {line: said for line in shell_lines(page) if (said := complaint(line)) is not None}
    assert wrong == {}


def test_a_command_or_option_that_does_not_exist_would_be_found() -> None:
    assert complaint("sweep run sweep.yaml --follow") is None
    assert complaint("sweep rnu sweep.yaml") is not None
    assert complaint("sweep run sweep.yaml --folow") is not None


def test_every_command_that_a_message_of_the_program_names_can_be_typed() -> None:
    wrong = {}
    for path in sorted((ROOT / "hermes_ops").rglob("*.py")):
        for span in SPAN.findall(path.read_text("utf-8")):
            if (found := COMMAND.match(span)) is None or "{" in span:
                continue
            if (said := complaint(found[1])) is not None:
                wrong[f"{name_of(path)}: {span}"] = said
    assert wrong == {}


def test_the_reference_of_the_command_line_has_every_command_and_option() -> None:
    text = (ROOT / "docs/cli.md").read_text("utf-8")
    sections = {s.partition("\n")[0]: s for s in re.split(r"^## ", text, flags=re.MULTILINE)}
    missing = []
    for name, command in commands(application()).items():
        if hasattr(command, "commands"):
            continue
        titles = [t for t in sections if f"{t} ".startswith(f"hermes {name} ")]
        section = sections[titles[0]] if titles else ""
        wanted = {*options_of(command)} - {"--help"}
        missing += [f"{name} {o}" for o in wanted if f"`{o}" not in section] if titles else [name]
    assert missing == []


def test_the_architecture_names_every_record() -> None:
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    keys = [value for name, value in vars(records).items() if name.endswith("_KEY")]
    assert keys
    assert [key for key in keys if f"`{key}`" not in text] == []


def steps_of(title: str) -> list[str]:
    """Return the numbered items of the architecture's section of that title."""
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    section = re.split(r"^#+ ", text.partition(f"# {title}\n")[2], maxsplit=1, flags=re.MULTILINE)
    return re.findall(r"^\d+\. (.+)$", section[0], re.MULTILINE)


WALKS = (
    "From a sweep file to a command",
    "From a value to a decision",
    "From a decision to SIGTERM",
)


def test_six_files_are_to_be_read_first() -> None:
    assert len(steps_of("Read these six files")) == 6


@pytest.mark.parametrize("walk", ["Read these six files", *WALKS])
def test_each_step_of_the_walks_names_files_that_define_its_names(walk: str) -> None:
    steps = steps_of(walk)
    assert steps
    for step in steps:
        spans = SPAN.findall(step)
        files = [ROOT / span for span in spans if span.endswith(".py")]
        assert files, step
        assert [f for f in files if not f.is_file()] == [], step
        sources = "\n".join(f.read_text("utf-8") for f in files)
        names = {span for span in spans if re.fullmatch(r"[A-Za-z]\w+", span)} - set(TASKS)
        defined = set(re.findall(r"^(?:def|class) (\w+)", sources, re.MULTILINE))
        assert names - defined == set(), step


def test_the_layers_in_the_documentation_are_those_of_the_linter() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    layers = next(c["layers"] for c in contracts["contracts"] if c["name"] == "Imports point down")
    for page in ("CONTRIBUTING.md", "docs/architecture.md"):
        blocks = [f.text.splitlines() for f in fences("text") if f.page == page]
        assert layers in blocks, f"write the layers of pyproject.toml into {page}"


def test_the_first_page_is_short_and_counts_the_policies() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 150
    builtin = set(POLICIES.builtin)  # a package with policies may be installed
    live = len(builtin.intersection(live_policies()))
    simulated = len(builtin) - live
    assert f"{live} [policies](docs/policies.md) run live; {simulated} more" in text


def test_each_symptom_has_a_command_that_tells() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
    listed = re.findall(r"^\|[^|]+\| \[[^]]+\]\(#([\w-]+)\) \|$", text, re.MULTILINE)
    sections = {
        title.lower().replace(" ", "-").replace(",", ""): body
        for title, body in re.findall(r"^## (.+)\n((?:(?!^## ).*\n)+)", text, re.MULTILINE)
    }
    assert set(listed) == set(sections)
    assert [title for title, body in sections.items() if "```sh\nhermes " not in body] == []


def test_each_entry_of_the_changelog_is_one_line() -> None:
    entries = (ROOT / "CHANGELOG.md").read_text("utf-8").partition("\n## ")[2].splitlines()
    assert [line for line in entries if line.startswith((" ", "* ")) and len(line) > 260] == []


def test_the_navigation_of_the_site_has_every_page_of_the_documentation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"^ +- (\S+\.md)$", nav, re.MULTILINE)
    assert len(listed) == len(set(listed))
    in_docs = {name_of(p) for p in pages() if name_of(p).startswith("docs/")}
    assert in_docs - set(listed) == set(), "name these pages in mkdocs.yml"
    assert [name for name in listed if not (ROOT / name).is_file()] == []


# -- code ----------------------------------------------------------------------------------------


def test_every_test_that_the_documentation_names_exists() -> None:
    folders = (ROOT / "tests", ROOT / "hermes_ops" / "testing")
    sources = "\n".join(p.read_text("utf-8") for f in folders for p in f.rglob("*.py"))
    defined = set(re.findall(r"^(?:    )?def (test_\w+)", sources, re.MULTILINE))
    named = {(name_of(p), n) for p in pages() for n in TEST_NAME.findall(p.read_text("utf-8"))}
    assert {(page, name) for page, name in named if name not in defined} == set()


@pytest.mark.parametrize("fence", fences("python"), ids=str)
def test_python_in_the_documentation_names_what_there_is(fence: Fence) -> None:
    if not fence.text.startswith(("import", "from")):
        pytest.skip("a part of a file")
    for node in ast.walk(ast.parse(fence.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hermes_ops"):
            path = ROOT / (node.module or "").replace(".", "/")
            source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            text = source.read_text("utf-8")
            assert all(re.search(rf"\b{alias.name}\b", text) for alias in node.names)


def decorators_of(function: ast.FunctionDef) -> set[str]:
    named = (d.func if isinstance(d, ast.Call) else d for d in function.decorator_list)
    return {name.id for name in named if isinstance(name, ast.Name)}


@pytest.mark.parametrize("fence", [f for f in fences("python") if "DAG(" in f.text], ids=str)
def test_each_task_of_a_dag_in_the_documentation_is_called(fence: Fence) -> None:
    """A function that is only decorated is no task: the DAG is empty, and its runs succeed."""
    nodes = list(ast.walk(ast.parse(fence.text)))
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef)]
    tasks = {f.name for f in functions if decorators_of(f) & {"task", "sweep"}}
    calls = (n.func for n in nodes if isinstance(n, ast.Call))
    assert tasks
    assert tasks - {name.id for name in calls if isinstance(name, ast.Name)} == set()


def test_the_policy_of_the_contributors_page_takes_eight_lines_and_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    module, line = (text for language, text in FENCE.findall(page) if language == "python")
    names: dict[str, Any] = {"__name__": "hermes_ops.policies.shortest"}
    exec(compile(module, "shortest.py", "exec", dont_inherit=True), names)
    monkeypatch.setitem(POLICIES, "shortest", eval(f"{{{line}}}", names)["shortest"])
    own = [text for text in module.partition("@dataclass")[2].splitlines() if text]
    assert len([*own, line]) == 8

    facts: dict[str, Any] = {"submitted_s": 0.0, "phase": Phase.PENDING}
    long = Job(JobId("a/0"), SweepId("a"), total_steps=9, **facts)
    short = Job(JobId("a/1"), SweepId("a"), total_steps=3, **facts)
    snapshot = Snapshot(100.0, (Gpu(0),), (long, short))
    policy = guarded(make_policy("shortest", {}), k=3.0, quanta=8)
    plan, _ = policy.decide(snapshot, policy.initial())
    check(snapshot, plan)
    assert [grant.job for grant in plan.grants] == ["a/1"]


def test_the_policy_is_the_same_on_both_pages() -> None:
    found = [
        next(t for _, t in FENCE.findall((ROOT / page).read_text("utf-8")) if "class Shortest" in t)
        for page in ("CONTRIBUTING.md", "docs/policies.md")
    ]
    assert len({text.partition("@dataclass")[2].strip() for text in found}) == 1


# -- places --------------------------------------------------------------------------------------


def test_no_file_names_a_place_of_one_machine_or_a_package_index() -> None:
    # In pieces, so that this file does not hold what it looks for.
    folders = "|".join(("work", "root", "home/[a-z]+"))
    hosts = "|".join(r"\.".join(h) for h in (("pypi", "org"), ("pythonhosted", "org")))
    pattern = re.compile(rf"(?<![\w.}}])/(?:{folders})/|{hosts}|--(?:extra-)?index-url")
    found = {}
    for path in files():
        if hit := pattern.search(path.read_text("utf-8", errors="replace")):
            found[name_of(path)] = hit[0]
    assert found == {}
