"""The process in which a user's regular expressions run: a match may never end.

On standard input comes one JSON document a line: first the patterns, then batches of lines. Each
batch is answered on standard output, by a document once it is done and by others meanwhile. The
kernel ends this process once one pattern has had `LINE_LIMIT_S` of processor time on one line; a
marker in shared memory then says on which. Whoever has started it goes on without that line.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hermes_ops.trial.processes.tree import die_with_parent

if TYPE_CHECKING:
    import mmap

LINE_LIMIT_S = 1.0
"""Processor time that a pattern may take on one line."""

GROUP_CHARACTERS = 1_000
"""A name, number or step that is longer is none."""

LINE_CHARACTERS = 100_000
"""The most characters in the groups of all matches on a line; overlapping groups have no bound."""

_PROGRESS_S = 0.25
_MOST_BYTES = 1 << 30  # of memory


class Match(NamedTuple):
    """The texts of a match's groups, empty where the pattern has none of that name."""

    name: str
    value: str
    step: str


class SearchMarker(NamedTuple):
    """The position of the search: number of the batch, from 1, and line and pattern in it."""

    batch: int
    line: int
    pattern: int


MARKER = struct.Struct("=III")


def search(pattern: re.Pattern[str], text: str) -> list[Match]:
    """Return all matches of the pattern in a text."""
    matches = []
    left = LINE_CHARACTERS
    for match in pattern.finditer(text):
        groups = match.groupdict()
        texts = Match(*(groups.get(name) or "" for name in Match._fields))
        left -= sum(map(len, texts))
        if left < 0:
            break
        if max(map(len, texts)) <= GROUP_CHARACTERS:
            matches.append(texts)
    return matches


def main(arguments: Sequence[str]) -> int:
    """Answer batches until standard input ends; the parent's id and the marker's handle."""
    import mmap
    import resource

    parent, handle = map(int, arguments)
    die_with_parent(parent)
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):  # a lower limit is in force
        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    marker = mmap.mmap(handle, MARKER.size)
    patterns = [re.compile(text) for text in json.loads(sys.stdin.buffer.readline())]
    for number, line in enumerate(sys.stdin.buffer, start=1):
        for document in _answers(json.loads(line), number, patterns, marker):
            sys.stdout.buffer.write(json.dumps(document).encode() + b"\n")
            sys.stdout.buffer.flush()
    return 0


def _answers(
    batch: dict[str, Any], number: int, patterns: Sequence[re.Pattern[str]], marker: mmap.mmap
) -> Iterator[dict[str, Any]]:
    """Yield the processor time of each pattern since the last document, at last with the matches.

    A match is a line, a pattern and the texts of its groups.
    """
    skipped = {tuple(place) for place in batch["skipped"]}
    matches: list[Any] = []
    cpu_s, told_s = [0.0] * len(patterns), time.monotonic()
    for place, pattern in enumerate(patterns):
        if place in batch["off"]:
            continue
        begun_s = time.process_time()
        for line, text in enumerate(batch["lines"]):
            if (line, place) in skipped:
                continue
            MARKER.pack_into(marker, 0, number, line, place)
            signal.setitimer(signal.ITIMER_PROF, LINE_LIMIT_S)
            matches += [(line, place, match) for match in search(pattern, text)]
            if time.monotonic() - told_s >= _PROGRESS_S:
                signal.setitimer(signal.ITIMER_PROF, 0)
                cpu_s[place] += time.process_time() - begun_s
                yield {"cpu_s": cpu_s}
                cpu_s, told_s = [0.0] * len(patterns), time.monotonic()
                begun_s = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, 0)
        cpu_s[place] += time.process_time() - begun_s
    yield {"cpu_s": cpu_s, "found": matches}
