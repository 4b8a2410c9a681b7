"""Warnings on a sweep's training script on this machine: missing files, packages, parameters.

Only for trials that are processes. The script is not run: its interpreter lists what it cannot
import.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from hermes_ops.config.files import KeyPath, printable
from hermes_ops.config.model import SweepConfig
from hermes_ops.config.parameters import placed_parameters
from hermes_ops.config.pod import RunIn
from hermes_ops.config.problems import comma_separated
from hermes_ops.config.render import INTERPRETERS, pieces, variable
from hermes_ops.config.sweep_warnings import SweepWarning
from hermes_ops.references import refers

TIMEOUT_S = 20.0
MOST_FILES = 2_000
MOST_ENTRIES = 20_000  # of a folder, whatever they are
MOST_BYTES = 512 * 1024
MOST_OF_A_PACKAGE = 300
"""Files of a package that is looked through for variables; one of more is a library."""

TEXTS = re.compile(
    r".*\.(py|sh|bash|ya?ml|json|toml|cfg|ini|env|gin|ipynb|r|jl|lua|[jt]s|rs|go|cc?|cpp|h|java"
    r"|scala|p[lm]|rb|txt|j2|conf)",
    re.IGNORECASE,
)
"""Names of files that may read an environment variable."""

READS_ALL = ("environ.items", "environ.keys", "dict(os.environ", "BaseSettings", "env_prefix",
             "envvar_prefix", "data.params")  # fmt: skip
"""Texts in a script that reads parameters without naming their variables."""

PACKAGES = {"cv2": "opencv-python", "PIL": "Pillow", "sklearn": "scikit-learn", "yaml": "PyYAML",
            "skimage": "scikit-image", "dotenv": "python-dotenv"}  # fmt: skip
"""Distributions whose name differs from the module that they install."""


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """The target of a training command: a Python file or module, or (kind "") something else."""

    kind: str
    name: str
    place: int


def script_warnings(config: SweepConfig, environ: Mapping[str, str]) -> Iterator[SweepWarning]:
    """Yield what the command needs and this machine lacks, then the parameters without a use."""
    trial = config.trial
    folder = Path(trial.directory)
    if trial.run_in is not RunIn.PROCESS or not folder.is_absolute():
        return
    if not os.path.isdir(folder):
        found = f"{printable(trial.directory)}, which is no folder on this machine"
        yield SweepWarning(("trial", "directory"), found, "no trial can start", "correct the path")
        return
    plain = {k: v for k, v in trial.environment.items() if not refers(v)}
    environment = {**environ, **plain}
    executable, path = _interpreter(config, environment)
    if executable is None:
        yield _no_program(config, path)
        return
    program = entry_point_of(trial.command)
    if program.kind == "file" and not os.path.exists(folder / program.name):
        found = f"{printable(program.name)}, which is not in {printable(trial.directory)}"
        fix = "correct the name, or trial.directory"
        path = ("trial", "command", program.place)
        yield SweepWarning(path, found, "every trial fails before it begins", fix)
        return
    facts = _ask(executable, program, folder, environment)
    yield from _from_facts(facts, program, executable)
    yield from _unused(config, facts, folder)


def entry_point_of(command: Iterable[str]) -> EntryPoint:
    """Return what the command starts, as far as the sweep file itself tells."""
    arguments = [_fixed_text(argument) for argument in command]
    if not re.fullmatch(r"python[\d.]*", os.path.basename(arguments[0] or "")):
        return EntryPoint("", "", 0)
    place = 1
    while place < len(arguments):
        argument = arguments[place]
        if argument in {"-X", "-W"}:
            place += 2
        elif argument == "-m" and place + 1 < len(arguments):
            name = arguments[place + 1]
            return EntryPoint("module" if name else "", name or "", place + 1)
        elif argument is None or argument.startswith("-c") or argument == "-":
            break
        elif argument.startswith("-"):
            place += 1
        else:
            return EntryPoint("file", argument, place)
    return EntryPoint("", "", 0)


def _fixed_text(argument: str) -> str | None:
    """Return the argument that all trials have; None where it differs from trial to trial."""
    parts = list(pieces(argument))
    return None if any(p.name is not None for p in parts) else "".join(p.text for p in parts)


def _interpreter(config: SweepConfig, environment: Mapping[str, str]) -> tuple[str | None, KeyPath]:
    """Return the program that would be started, None if there is none, and the key that names it.

    The program is an empty text if it differs from trial to trial.
    """
    trial = config.trial
    name = _fixed_text(trial.command[0])
    path: KeyPath = ("trial", "command", 0)
    if name in INTERPRETERS:
        if trial.python is None:
            return sys.executable, path
        name, path = trial.python, ("trial", "python")
    if name is None:
        return "", path
    if "/" in name:
        name = os.path.join(trial.directory, os.path.expanduser(name))
    return shutil.which(name, path=environment.get("PATH")), path


def _no_program(config: SweepConfig, path: KeyPath) -> SweepWarning:
    trial = config.trial
    name = trial.python if path[-1] == "python" else trial.command[0]
    found = f"{printable(name or '')}, which is no program on this machine"
    return SweepWarning(path, found, "no trial can start", "correct the name, or install it")


def _ask(
    executable: str, program: EntryPoint, folder: Path, environment: Mapping[str, str]
) -> Mapping[str, Any]:
    """Return the interpreter's response (`script_imports.list_imports`); empty if it gave none."""
    if not executable or not program.kind:
        return {}
    code = (Path(__file__).parent / "script_imports.py").read_text("utf-8")
    try:
        completed = subprocess.run(
            [executable, "-c", code, program.kind, program.name],
            cwd=folder,
            env={**environment, "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        facts = json.loads(completed.stdout or b"{}")
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}
    return facts if isinstance(facts, Mapping) else {}


def _from_facts(
    facts: Mapping[str, Any], program: EntryPoint, executable: str
) -> Iterator[SweepWarning]:
    path: KeyPath = ("trial", "command", program.place)
    leads_to = "every trial fails before it begins"
    if error := facts.get("error"):
        where = f"{os.path.basename(error['file'])}:{error['line']}"
        found = f"a script that is no Python ({where}: {error['text']})"
        yield SweepWarning(path, found, leads_to, "correct the script")
    for missing in facts.get("missing", ()):
        name = missing["name"]
        if missing["file"] is None:
            found = f"the module {name}, which {executable} does not have"
        else:
            where = f"{os.path.basename(missing['file'])}:{missing['line']}"
            found = f"the import of {name} ({where}), which {executable} does not have"
        fix = f"install {PACKAGES.get(name, name)} there, or name another one as trial.python"
        yield SweepWarning(path, found, leads_to, fix)


def _unused(config: SweepConfig, facts: Mapping[str, Any], folder: Path) -> Iterator[SweepWarning]:
    """Yield the parameters that neither the command passes on nor a text here reads.

    Nothing where the script's own text is not known.
    """
    command = config.trial.command
    passed = {piece.name for argument in command for piece in pieces(argument)}
    parameters = list(placed_parameters(config.search.space))
    left = [parameter for parameter in parameters if parameter.name not in passed]
    if not left or not facts.get("files"):
        return
    used = _variables({variable(p.name) for p in parameters}, facts, folder)
    unused = [p for p in left if used is not None and variable(p.name) not in used]
    if not unused:
        return
    path: KeyPath = ("search", "space", *(unused[0].path if len(unused) == 1 else ()))
    names = "a parameter" if len(unused) == 1 else comma_separated(p.name for p in unused)
    found = f"{names} that neither the command passes on nor the script reads"
    name = printable(unused[0].name)
    fix = f"add {{{name}}} to the command, read {variable(name)} in the script, or remove it"
    yield SweepWarning(path, found, "trials that differ in nothing else are the same", fix)


def _variables(variables: set[str], facts: Mapping[str, Any], folder: Path) -> set[str] | None:
    """Return the variables of parameters that any text names; None if one may read all of them.

    A text may name the beginning and add the rest.
    """
    used: set[str] = set()
    packages = (list(islice(_below(p), MOST_OF_A_PACKAGE + 1)) for p in facts.get("origins", ()))
    small = (files for files in packages if len(files) <= MOST_OF_A_PACKAGE)
    mine = islice(_below(folder), MOST_FILES)
    for text in _texts(chain(map(Path, facts["files"]), mine, *small)):
        if any(words in text for words in READS_ALL):
            return None
        for begin in set(re.findall(r"HERMES_PARAM\w*", text)):
            used |= {name for name in variables if name.startswith(begin)}
    return used


def _texts(files: Iterable[Path]) -> Iterator[str]:
    for file in files:
        try:
            if file.stat().st_size <= MOST_BYTES:
                yield file.read_text("utf-8", errors="replace")
        except OSError:
            continue


def _below(place: str | Path) -> Iterator[Path]:
    """Yield the file, or the texts below the folder that may read a variable."""
    if os.path.isfile(place):
        yield Path(place)
    seen = 0
    for parent, folders, names in os.walk(place):
        folders[:] = sorted(
            f for f in folders if not f.startswith(".") and f not in {"__pycache__", "mlruns"}
        )
        for name in sorted(names):
            if TEXTS.fullmatch(name):
                yield Path(parent, name)
        seen += len(names) + len(folders)
        if seen > MOST_ENTRIES:
            return
