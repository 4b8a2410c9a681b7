"""Hooks of MkDocs: the site has the repository's paths, so that links work on both.

The pages are those below `docs/` and the ones of other folders that the navigation names; every
other file that a page links to is copied. A page that would load anything from another host fails
the build.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import unquote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")
LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=[\"']?([^\"'\s>]+)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
DIRECTIVE = re.compile(r"^<!-- (::: .+) -->$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the files of the site under their paths in the repository."""
    docs = Path(config.docs_dir)
    kept = [f for f in files if not Path(f.abs_src_path or "/").is_relative_to(docs)]
    sources = [Path(f.abs_src_path or "") for f in files if f not in kept]
    sources = [path for path in sources if path.suffix not in {".py", ".pyc"}]
    pages = [p for p in sources if p.suffix == ".md"]
    pages += [ROOT / path for path in named(config.nav) if not path.startswith("docs/")]
    sources = list(dict.fromkeys([*sources, *pages, *(t for p in pages for t in linked(p))]))
    made = [
        File.generated(config, p.relative_to(ROOT).as_posix(), abs_src_path=str(p)) for p in sources
    ]
    return Files([*kept, *made])


def named(nav: str | dict[str, object] | list[object] | None) -> list[str]:
    """Return the paths that the navigation names."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [path for entry in entries or () for path in named(entry)]


def linked(page: Path) -> list[Path]:
    """Return the files that a page links to and that are no pages themselves."""
    targets = (t for t in LINK.findall(FENCE.sub("", page.read_text("utf-8"))) if "://" not in t)
    found = ((page.parent / target).resolve() for target in targets)
    return [path for path in found if path.is_file() and path.suffix != ".md"]


def on_page_markdown(markdown: str, **_: object) -> str:
    """Turn the comments that stand for reference documentation into its directives."""
    return DIRECTIVE.sub(r"\1", markdown)


def refuse_missing(page: Path, address: str, site: Path) -> None:
    """Raise PluginError for a script, style or picture that is not a file of the site."""
    name = unquote(address.partition("#")[0].partition("?")[0])
    if address.startswith("data:") or not name:
        return
    file = site / name.lstrip("/") if name.startswith("/") else page.parent / name
    if "//" in address or not file.exists():
        raise PluginError(f"{page.relative_to(site)} loads {address}, which the site has not")


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse what the site loads and does not have, and list the versions beside this one."""
    site = Path(config.site_dir)
    for page in site.rglob("*.html"):
        for address in LOADED.findall(page.read_text("utf-8")):
            refuse_missing(page, address, site)
    folders = sorted(p.parent.name for p in site.parent.glob("*/index.html"))
    versions = [{"version": name, "title": name, "aliases": []} for name in reversed(folders)]
    (site.parent / "versions.json").write_text(json.dumps(versions))
