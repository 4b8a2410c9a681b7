"""`docker build` and `docker push` for a test cluster that no registry reaches.

buildah builds; a push puts the image on the cluster's nodes by the command in HERMES_TEST_CLUSTER.
An image whose Dockerfile and copied files are those of its last build comes from the cache.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import subprocess
from pathlib import Path
from urllib.parse import quote

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hermes-ops/images"
BASE = "localhost/python:3.11-slim-bookworm"
BUILD = ["buildah", "build", "--isolation", "chroot", "--network", "host", "--layers"]


def digest(dockerfile: Path, context: Path) -> str:
    """Of all that goes in: the Dockerfile, and the files that it copies from the context."""
    text = dockerfile.read_text()
    whole = hashlib.sha256(text.encode())
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        sources = [word for word in line.split()[:-1] if not word.startswith("--")]
        for source in sources:
            for path in sorted(context.glob(source)):
                for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                    if file.is_file() and "__pycache__" not in file.parts:
                        whole.update(str(file.relative_to(context)).encode() + file.read_bytes())
    return whole.hexdigest()[:24]


def build(dockerfile: Path, tag: str, context: Path) -> None:
    archive = CACHE / f"{digest(dockerfile, context)}-{quote(tag, safe='')}.tar"
    CACHE.mkdir(parents=True, exist_ok=True)
    if not archive.exists():
        with_pip = "pip install" in dockerfile.read_text()
        shared = ["/etc/ssl/certs", "/etc/pip.conf"] if with_pip else []
        seen = [f"--volume={p}:{p}:ro" for p in shared if Path(p).exists()]
        arguments = ["--build-arg", f"PYTHON_IMAGE={BASE}", "-f", str(dockerfile), "-t", tag]
        subprocess.run([*BUILD, *seen, *arguments, str(context)], check=True)
        fresh = archive.with_suffix(".part")
        fresh.unlink(missing_ok=True)
        subprocess.run(["buildah", "push", tag, f"docker-archive:{fresh}:{tag}"], check=True)
        fresh.rename(archive)
        for older in CACHE.glob(f"*-{quote(tag, safe='')}.tar"):
            if older != archive:
                older.unlink()
    pointer = CACHE / f"{quote(tag, safe='')}.newest"
    pointer.write_text(archive.name)


def push(tag: str) -> None:
    archive = CACHE / (CACHE / f"{quote(tag, safe='')}.newest").read_text()
    command = shlex.split(os.environ["HERMES_TEST_CLUSTER"])
    subprocess.run([*command, "load", str(archive)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="docker")
    commands = parser.add_subparsers(dest="what", required=True)
    building = commands.add_parser("build")
    building.add_argument("-f", dest="dockerfile", type=Path, required=True)
    building.add_argument("-t", dest="tag", required=True)
    building.add_argument("context", type=Path)
    commands.add_parser("push").add_argument("tag")
    given = parser.parse_args()
    if given.what == "build":
        build(given.dockerfile, given.tag, given.context)
    else:
        push(given.tag)


if __name__ == "__main__":
    main()
