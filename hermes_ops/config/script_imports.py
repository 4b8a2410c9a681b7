"""Lists the packages that a script imports and its interpreter lacks.

It runs in that interpreter, by `python -c`, in the script's working directory: the standard library
of Python 3.7 only. The output is one JSON object.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import json
import os
import sys

TYPE_CHECKING = False  # checkers of types know this name
if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.machinery import ModuleSpec
    from typing import Any

MOST_FILES = 200
GIVEN = ("__main__", "hermes_ops")  # the second is made importable for every script
FINDERS = ("path", "meta_path", "path_hooks", "modules")  # of sys: who touches them finds more


class UnknownError(Exception):
    """The imports of the script depend on its execution: nothing can be told."""


def list_imports(kind: str, name: str) -> dict[str, Any]:
    """Return what `python NAME` (kind "file") or `python -m NAME` (kind "module") lacks.

    `missing`: names with the file and line that import them; `error`: a file that is no Python;
    `unknown`: nothing can be told; `files`: the sources that were read; `origins`: where other
    packages lie.
    """
    if kind == "file":
        sys.path[0:1] = [os.path.dirname(os.path.abspath(name))]
        return _follow([os.path.abspath(name)])
    top = name.partition(".")[0]
    spec = _spec(top)
    if spec is None:
        return {"missing": [{"name": top, "file": None, "line": 0}]}
    return _follow(_sources(spec, name))


def _follow(scripts: list[str]) -> dict[str, Any]:
    roots = {os.path.realpath(sys.path[0] or os.getcwd()), os.path.realpath(os.getcwd())}
    pending = list(scripts)
    read: list[str] = []
    origins: set[str] = set()
    missing: dict[str, dict[str, Any]] = {}
    while pending and len(read) < MOST_FILES:
        path = pending.pop()
        if path in read:
            continue
        read.append(path)
        try:
            imported = list(_imports(_parse(path).body, is_script=path in scripts))
        except SyntaxError as error:
            return {"error": {"file": path, "line": error.lineno or 0, "text": error.msg}}
        except UnknownError:
            return {"unknown": True}
        for name, line in imported:
            top = name.partition(".")[0]
            spec = _spec(top)
            if spec is None:
                missing.setdefault(top, {"name": top, "file": path, "line": line})
                continue
            local = [source for source in _sources(spec, name) if _is_below(source, roots)]
            pending += local
            origins.update(() if local else _places(spec))
    return {"missing": list(missing.values()), "files": read, "origins": sorted(origins)}


def _parse(path: str) -> ast.Module:
    """Return the tree of a file; UnknownError for one that changes what can be imported."""
    try:
        with open(path, "rb") as stream:
            source = stream.read()
        if b"\0" in source:  # an archive or bytecode, which Python runs too
            raise UnknownError
        tree = ast.parse(source, path)
    except (OSError, ValueError, RecursionError):
        raise UnknownError from None
    if any(_changes_imports(node) for node in ast.walk(tree)):
        raise UnknownError
    return tree


def _changes_imports(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        of_sys = isinstance(node.value, ast.Name) and node.value.id == "sys"
        return (of_sys and node.attr in FINDERS) or node.attr == "addsitedir"
    if isinstance(node, ast.ImportFrom):
        return node.module in {"sys", "site"}
    if isinstance(node, ast.Call):  # pip install, by whatever call
        words = (getattr(n, "value", getattr(n, "s", "")) for n in ast.walk(node))
        return any(isinstance(w, str) and "pip" in w.split() for w in words)
    return False


def _imports(body: list[ast.stmt], *, is_script: bool) -> Iterator[tuple[str, int]]:
    """Yield the names that the statements import whatever happens, with their lines."""
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module, node.lineno
            for alias in node.names:
                yield node.module + "." + alias.name, node.lineno
        elif (isinstance(node, ast.With) and "suppress" not in ast.dump(node.items[0])) or (
            isinstance(node, ast.If) and is_script and "__main__" in ast.dump(node.test)
        ):
            yield from _imports(node.body, is_script=is_script)


def _spec(name: str) -> ModuleSpec | None:
    """Return where a top-level module is found; None where it is not."""
    if name not in GIVEN:
        try:
            return importlib.util.find_spec(name)
        except (ImportError, ValueError, AttributeError):  # one without a spec is there
            pass
    return importlib.machinery.ModuleSpec(name, None)


def _sources(spec: ModuleSpec, name: str) -> list[str]:
    """Return the source files that importing this name of a top-level module would run."""
    files = [spec.origin] if spec.origin and spec.origin.endswith(".py") else []
    for folder in list(spec.submodule_search_locations or ()):
        inside = folder
        for part in name.split(".")[1:]:
            inside = os.path.join(inside, part)
            files += [inside + ".py", os.path.join(inside, "__init__.py")]
        files.append(os.path.join(inside, "__main__.py"))
    return [path for path in files if os.path.isfile(path)]


def _places(spec: ModuleSpec) -> list[str]:
    """Return where a module lies that is not of the standard library."""
    places = list(spec.submodule_search_locations or ()) or [spec.origin or ""]
    library = os.path.dirname(os.path.abspath(os.__file__))
    return [p for p in places if os.path.exists(p) and os.path.dirname(p) != library]


def _is_below(path: str, roots: set[str]) -> bool:
    real = os.path.realpath(path)
    installed = {"site-packages", "dist-packages"}.intersection(real.split(os.sep))
    return not installed and any(real.startswith(root + os.sep) for root in roots)


if __name__ == "__main__":
    print(json.dumps(list_imports(sys.argv[1], sys.argv[2])))  # noqa: T201 - the answer
