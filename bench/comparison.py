"""docs/comparison.md: every policy on public data, each table with the command that prints it.

`python -m bench.comparison` computes what is not known of this program and data, and writes the
page. With names of sections it computes those alone; the others are written from figures that are
kept, of whatever program, or stay on the page as they are where some are missing. `--reuse`
computes only what is not known at all. Kept figures, with their times of decisions, are in
bench/results/comparison.
HERMES_DATA names another folder with `traces/` and `curves/` than examples/, HERMES_COMPARE_JOBS
a number of processes (default: cores).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from bench.comparison_case import ROOT, FiguresMissing, Reuse
from bench.comparison_sections import SECTIONS

PAGE = ROOT / "docs" / "comparison.md"
MARK = "<!-- {} -->"
HEAD = """# Comparison

Written by `make compare`. Above each table stands the command that prints its figures; seeds,
data and policies are the same on every machine, so the figures are, but for `decision ms` (CPU
time). Policies run bare, without the guards of a live pool, but where it says so. Means over seeds
have 95 % bootstrap intervals in brackets; speed-ups are geometric means of the seeds' ratios.
[Simulate](simulate.md) explains the columns. Data: [traces](../examples/traces/README.md),
[learning curves](../examples/curves/README.md).
"""


def main(arguments: Sequence[str]) -> int:
    """Compute, then write the page; return 2 for a name that is no section."""
    names = [a for a in arguments if a != "--reuse"]
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are: {', '.join(SECTIONS)}", file=sys.stderr)
        return 2
    wanted = Reuse.KNOWN if "--reuse" in arguments else Reuse.SAME
    written = sections(PAGE.read_text() if PAGE.exists() else "")
    for name, write in SECTIONS.items():
        try:
            written[name] = write(wanted if not names or name in names else Reuse.KEPT)
        except FiguresMissing as missing:
            stays = "stays as it is" if name in written else "is left out"
            print(f"{name} {stays}, without figures of: {missing}", file=sys.stderr)
    texts = [f"{MARK.format(name)}\n{written[name]}" for name in SECTIONS if name in written]
    PAGE.write_text("\n".join([HEAD, *texts]))
    return 0


def sections(page: str) -> dict[str, str]:
    """Return the sections, by name, of a page that `main` has written."""
    parts = re.split(MARK.format(r"(\w+)") + "\n", page)
    return dict(zip(parts[1::2], (text.rstrip("\n") + "\n" for text in parts[2::2]), strict=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
