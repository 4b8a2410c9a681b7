"""Cut a script's output into lines, whatever bytes it is made of, in bounded memory."""

from __future__ import annotations

import re
from collections import deque
from typing import NamedTuple

from hermes_ops.trial.failure import is_of_one_rank
from hermes_ops.trial.redaction import Mask

LINE_LIMIT_BYTES = 65_536  # of a longer line only the beginning is read
TAIL_LINES = 50
TAIL_LINE_CHARACTERS = 2000

_ENDS = re.compile(rb"(\r*\n|\r+)")
_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # colours and the cursor
    r"|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\|$)"  # titles and links
    r"|[ -/]*[0-Z\\^-~])"
)
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """Return the text without ANSI escapes and control characters; tabs stay."""
    if text.isprintable():
        return text
    return _CONTROLS.sub("", _ESCAPES.sub("", text))


class OutputLine(NamedTuple):
    """A line's text; `rewritten`: a carriage return ended it, and what follows is in its place."""

    text: str
    rewritten: bool = False


class LineReader:
    """Cut a byte stream into lines, at line feeds and carriage returns.

    The lines are the same however the stream is cut into pieces.
    """

    def __init__(self, mask: Mask | None = None) -> None:
        self._mask = mask or Mask()
        self._line = bytearray()
        self._returned = False  # a carriage return has come, and nothing after it yet
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._rewrite = False

    def feed(self, data: bytes) -> list[OutputLine]:
        """Return the lines that `data` completes."""
        if not data:
            return []
        if self._returned:
            data = b"\r" + data
        self._returned = data.endswith(b"\r")
        if self._returned:
            data = data.rstrip(b"\r")
        lines = []
        for place, piece in enumerate(_ENDS.split(data)):
            if place % 2:
                lines.append(self._end_line(rewritten=not piece.endswith(b"\n")))
            else:
                self._line += piece[: max(0, LINE_LIMIT_BYTES - len(self._line))]
        return lines

    def close(self) -> list[OutputLine]:
        """Return the unfinished last line, if any."""
        self._returned = False
        return [self._end_line(rewritten=False)] if self._line else []

    @property
    def tail(self) -> list[str]:
        """The last lines, masked; of one that was rewritten by carriage returns the last state.

        What torchrun says of single ranks at its end is left out.
        """
        return [self._mask.text(text)[:TAIL_LINE_CHARACTERS] for text in self._tail]

    def _end_line(self, rewritten: bool) -> OutputLine:
        text = plain(self._line.decode("utf-8", errors="replace"))
        self._line.clear()
        shown = text[: TAIL_LINE_CHARACTERS + self._mask.longest]
        if self._rewrite and self._tail:
            self._tail[-1] = shown if shown.strip() else self._tail[-1]
        elif rewritten or not is_of_one_rank(shown):
            self._tail.append(shown)
        self._rewrite = rewritten
        return OutputLine(text, rewritten)
