"""Folders that have moved since sweeps recorded their paths.

`hermes restore` writes them to `moved.json` in the state folder. The records themselves stay as
they are; a trial's process reads its paths through here when it starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

FILE = "moved.json"


@dataclass(frozen=True, slots=True)
class MovedPaths:
    """Pairs of folders: where each was, and where it is now."""

    pairs: tuple[tuple[str, str], ...] = ()

    @classmethod
    def load(cls, home: Path) -> MovedPaths:
        """Return the moves that the state folder records; no pairs if it records none."""
        try:
            pairs = json.loads((home / FILE).read_text())
        except (OSError, ValueError):
            return cls()
        return cls(tuple(pairs.items())) if isinstance(pairs, dict) else cls()

    def then(self, later: Iterable[tuple[str, str]]) -> MovedPaths:
        """Return these moves followed by `later` ones; folders that have moved back are omitted."""
        after = MovedPaths(tuple(later))
        pairs = {old: after.apply(new) for old, new in self.pairs}
        pairs.update(after.pairs)
        return MovedPaths(tuple((old, new) for old, new in pairs.items() if old != new))

    def apply(self, text: str) -> str:
        """Return `text` with each moved path in it as it is now.

        A path counts at the start of the text and behind `=`, `:`, `,` or `"`, so that
        `--data=/old/set`, `/old/a:/old/b` and JSON are understood; of nested folders the inner one.
        """
        if not self.pairs:
            return text
        moves = dict(self.pairs)
        longest_first = sorted(moves, key=len, reverse=True)
        any_of_them = "|".join(re.escape(old) for old in longest_first)
        pattern = rf"(?:^|(?<=[=:,\"]))({any_of_them})(?=$|[/:,\"])"
        return re.sub(pattern, lambda match: moves[match[1]], text)

    def apply_to(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Return the mapping with `apply` applied to each value."""
        return {name: self.apply(value) for name, value in texts.items()}

    def text(self) -> str:
        """Return the content of the file."""
        return json.dumps(dict(self.pairs), indent=2) + "\n"
