"""Search a script's output for a user's regular expressions without waiting for any of them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hermes_ops.trial.output.line_reader import OutputLine
from hermes_ops.trial.output.pairs import TEXT_LIMIT_CHARACTERS
from hermes_ops.trial.output.pattern_process import LINE_LIMIT_S, MARKER, Match, SearchMarker

MOST_SLOW_LINES = 3
"""The number of lines on which a pattern may not end; then it is switched off."""

_MOST_DEATHS = 3  # of the process on end, for another reason than its limit
_STUCK_S = 60.0  # without an answer, however busy the machine is
_RETRY_S = 1.0
_WAITING_BYTES = 1_048_576  # of lines that are not searched yet; then the script waits
_LINE_BYTES = 100  # what a line costs beside its text
_BLOCK_BYTES = 65_536
_START = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from hermes_ops.trial.output.pattern_process import main; sys.exit(main(sys.argv[2:]))"
)
_ROOT = os.path.abspath(os.path.join(__file__, *[os.pardir] * 4))  # of `hermes_ops`
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH")
_FIX = "give it fixed text to begin with, and repeat nothing that holds a repeat, as (a+)+ does"


class SearchedLines(NamedTuple):
    """Lines with what the patterns have found on each; `received_s`: when they came."""

    lines: list[OutputLine]
    matches: Mapping[int, list[tuple[int, Match]]]
    received_s: float


class _Batch:
    """Lines that are not searched yet.

    `off`: patterns that are not searched for; `skipped`: (line, pattern) that do not end.
    """

    def __init__(self, lines: list[OutputLine], received_s: float, off: Iterable[int]) -> None:
        self.lines = lines
        self.received_s = received_s
        self.off = set(off)
        self.skipped: set[tuple[int, int]] = set()
        self.size_bytes = sum(len(line.text) + _LINE_BYTES for line in lines)

    def document(self) -> bytes:
        """Return what is sent of it."""
        texts = [line.text[:TEXT_LIMIT_CHARACTERS] for line in self.lines]
        skipped = sorted(self.skipped)
        document = {"lines": texts, "off": sorted(self.off), "skipped": skipped}
        return json.dumps(document).encode() + b"\n"

    def split(self, line: int) -> tuple[_Batch, _Batch]:
        """Return what comes before a line, and that line with the rest."""
        before = _Batch(self.lines[:line], self.received_s, self.off)
        rest = _Batch(self.lines[line:], self.received_s, self.off)
        before.skipped = {(n, pattern) for n, pattern in self.skipped if n < line}
        rest.skipped = {(n - line, pattern) for n, pattern in self.skipped if n >= line}
        return before, rest


class CpuAllowance:
    """Processor time that a pattern may take beyond what ordinary output needs.

    Without it a pattern that stays just below the limit of a line could keep the script waiting
    for ever, in its own `print`.
    """

    BURST_S = 10.0
    LINE_S = 0.0002
    SHARE = 0.1  # of the time that passes

    def __init__(self, now_s: float) -> None:
        self._spent_s = 0.0
        self._now_s = now_s

    def spend(self, cpu_s: float, lines: int, now_s: float) -> bool:
        """Note what a batch of lines has taken; False once it is too much."""
        earned_s = lines * self.LINE_S + (now_s - self._now_s) * self.SHARE
        self._now_s = now_s
        self._spent_s = max(0.0, self._spent_s + cpu_s - earned_s)
        return self._spent_s <= self.BURST_S


class PatternMatcher:
    """Search batches of lines in a child process, which is replaced when it hangs.

    Batches come back in their order, each once. `patterns`: what a sweep file calls each pattern,
    and the pattern. `notes` has a text for each kind of trouble.
    """

    def __init__(self, patterns: Sequence[tuple[str, str]]) -> None:
        self._names = [name for name, _ in patterns]
        self._patterns = [pattern for _, pattern in patterns]
        self._off: set[int] = set()
        self._slow_lines = [0] * len(patterns)
        self._allowances = [CpuAllowance(time.monotonic()) for _ in patterns]
        self._waiting: deque[_Batch] = deque()
        self._waiting_bytes = 0
        self._searched: deque[SearchedLines] = deque()
        self._process: _Process | None = None
        self._deaths = 0
        self._start_at_s = self._answered_at_s = time.monotonic()
        self.notes: dict[str, str] = {}

    def submit(self, lines: list[OutputLine], received_s: float) -> None:
        """Have lines searched; they come back in `searched`."""
        if not lines:
            return
        batch = _Batch(lines, received_s, self._off)
        if not self._waiting:
            self._answered_at_s = time.monotonic()
        self._waiting.append(batch)
        self._waiting_bytes += batch.size_bytes
        if self._process is not None:
            self._process.send(batch.document())
        self.exchange()

    def searched(self) -> list[SearchedLines]:
        """Return the batches that have been searched since the last call."""
        batches = list(self._searched)
        self._searched.clear()
        return batches

    @property
    def is_full(self) -> bool:
        """Tell whether so much waits that no more should be read from the script."""
        return self._waiting_bytes >= _WAITING_BYTES

    @property
    def waits_since_s(self) -> float | None:
        """When the oldest lines came that are not searched yet; None without any."""
        return self._waiting[0].received_s if self._waiting else None

    def handles(self) -> tuple[list[int], list[int]]:
        """Return the handles to select for reading and for writing before `exchange`."""
        process = self._process
        if process is None:
            return [], []
        return [process.output], [process.input] if process.unsent else []

    def exchange(self) -> None:
        """Send and receive what can be; replace a process that has ended or hangs."""
        if self._process is not None:
            self._receive(self._process)
        if self._has_no_pattern_left():  # so are all after it
            self.close()
            self._pass_on_unsearched()
        if self._process is None:
            self._start()

    def wait(self, seconds: float) -> None:
        """Wait at most that long for something to exchange, and exchange it."""
        readers, writers = self.handles()
        select.select(readers, writers, [], seconds)
        self.exchange()

    def give_up(self) -> None:
        """Pass on what waits, as lines on which nothing was found: there is no time left."""
        if self._waiting:
            lines = sum(len(batch.lines) for batch in self._waiting)
            self.notes["given up"] = (
                f"the last {lines} lines of output have not been searched for the patterns of the "
                "sweep file: there was no time left"
            )
        self._pass_on_unsearched()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.end()
            self._process = None

    # -- the process -----------------------------------------------------------------------------

    def _has_no_pattern_left(self) -> bool:
        """Tell whether no pattern is searched for in the oldest lines."""
        return bool(self._waiting) and len(self._waiting[0].off) == len(self._patterns)

    def _start(self) -> None:
        if not self._waiting or time.monotonic() < self._start_at_s:
            return
        try:
            self._process = _Process(self._patterns)
        except OSError as error:
            self._note_death(f"the process that searches for it cannot be started: {error}")
            return
        self._answered_at_s = time.monotonic()
        for batch in self._waiting:
            self._process.send(batch.document())

    def _receive(self, process: _Process) -> None:
        answers, has_ended = process.exchange()
        for answer in answers:
            self._take(answer)
        if answers:
            self._deaths, self._answered_at_s = 0, time.monotonic()
        if self._process is not process:  # a pattern was switched off
            return
        is_stuck = self._waiting and time.monotonic() - self._answered_at_s >= _STUCK_S
        if has_ended or is_stuck:
            self._process = None
            self._handle_process_end(process)

    def _handle_process_end(self, process: _Process) -> None:
        """Go on after the end of a process: without the line on which it had no end."""
        place, code = process.marker(), process.end()
        is_known = place.batch == process.answered + 1 and bool(self._waiting)
        if code == -signal.SIGPROF and is_known:
            self._skip(place, f"takes more than {LINE_LIMIT_S:g} s")
        elif is_known and self._deaths + 1 >= _MOST_DEATHS:
            self._deaths = 0
            self._skip(place, f"ends the process that searches for it ({code})")
        else:
            self._note_death(f"the process that searches for it has ended ({code})")

    def _skip(self, place: SearchMarker, why: str) -> None:
        """Go on without a line; what comes before it is still searched as it would have been."""
        name = self._names[place.pattern]
        before, rest = self._waiting.popleft().split(place.line)
        rest.skipped.add((0, place.pattern))
        text = rest.lines[0].text.strip()[:160]
        note = f'not read: "{text}": {name} {why} on this line: {_FIX}'
        self.notes.setdefault(f"slow {name}", note)
        self._waiting.appendleft(rest)
        self._slow_lines[place.pattern] += 1
        if self._slow_lines[place.pattern] >= MOST_SLOW_LINES:
            self._switch_off(place.pattern, f"on {MOST_SLOW_LINES} lines it {why}")
        if before.lines:
            self._waiting.appendleft(before)

    def _note_death(self, why: str) -> None:
        self._deaths += 1
        self._start_at_s = time.monotonic() + _RETRY_S
        if self._deaths >= _MOST_DEATHS:
            for pattern in range(len(self._patterns)):
                self._switch_off(pattern, why)

    def _switch_off(self, pattern: int, why: str) -> None:
        """Stop searching for a pattern, in queued lines too."""
        if pattern in self._off:
            return
        name = self._names[pattern]
        self._off.add(pattern)
        for batch in self._waiting:
            batch.off.add(pattern)
        self.notes[f"off {name}"] = (
            f"{name} is not used any more, so values that it would find are missing: {why}. "
            f"Change it: {_FIX}"
        )
        self.close()

    def _take(self, answer: Mapping[str, Any]) -> None:
        """Note what a process has done; with the matches of the oldest batch, that is searched."""
        lines = 0
        if "found" in answer:
            lines = self._pass_on(answer["found"])
        now_s = time.monotonic()
        for pattern, cpu_s in enumerate(answer["cpu_s"]):
            if not self._allowances[pattern].spend(cpu_s, lines, now_s):
                self._switch_off(pattern, "it is too slow for the output of this script")

    def _pass_on(self, found_texts: Sequence[Any]) -> int:
        """Give the oldest batch back with its matches; return how many lines it has."""
        batch = self._waiting.popleft()
        self._waiting_bytes -= batch.size_bytes
        matches: dict[int, list[tuple[int, Match]]] = {}
        for line, pattern, texts in found_texts:
            matches.setdefault(line, []).append((pattern, Match(*texts)))
        self._searched.append(SearchedLines(batch.lines, matches, batch.received_s))
        return len(batch.lines)

    def _pass_on_unsearched(self) -> None:
        while self._waiting:
            self._pass_on(())


class _Process:
    """One process with its pipes; nothing here waits for it."""

    def __init__(self, patterns: Sequence[str]) -> None:
        import mmap  # only here: a trial without patterns starts without it

        memory = os.memfd_create("hermes-marker")
        try:
            os.ftruncate(memory, MARKER.size)
            self._marker = mmap.mmap(memory, MARKER.size)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, _ROOT, str(os.getpid()), str(memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                pass_fds=[memory],
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                start_new_session=True,
            )
        finally:
            os.close(memory)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.input, self.output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self.input, False)
        os.set_blocking(self.output, False)
        self.unsent = bytearray(json.dumps(patterns).encode() + b"\n")
        self.answered = 0
        self._received = bytearray()

    def send(self, data: bytes) -> None:
        """Have data sent, as far as it is taken now."""
        self.unsent += data
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # its output says the end
            while self.unsent:
                del self.unsent[: os.write(self.input, self.unsent[:_BLOCK_BYTES])]

    def exchange(self) -> tuple[list[dict[str, Any]], bool]:
        """Send and receive what can be; the answers, and whether the process has ended."""
        self.send(b"")
        has_ended = False
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.output, _BLOCK_BYTES):
                self._received += data
            has_ended = True
        *lines, rest = self._received.split(b"\n")
        self._received = rest
        answers = [json.loads(line) for line in lines]
        self.answered += sum("found" in answer for answer in answers)
        return answers, has_ended

    def marker(self) -> SearchMarker:
        """Return what the process searches, or searched last."""
        return SearchMarker(*MARKER.unpack_from(self._marker))

    def end(self) -> int:
        """Kill it, unless it has ended, and return its exit code."""
        self._process.kill()
        code = self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        return code
