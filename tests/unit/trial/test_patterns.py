"""A sweep's own patterns: searched for in another process, which may hang as long as it likes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.trial.metrics import Metric
from hermes_ops.trial.output.metric_reader import MetricReader
from hermes_ops.trial.output.output_reader import MatchedOutput, OutputReader
from hermes_ops.trial.output.pattern_matcher import MOST_SLOW_LINES, CpuAllowance, PatternMatcher
from hermes_ops.trial.output.pattern_process import GROUP_CHARACTERS, LINE_CHARACTERS, search
from tests.unit.trial.supervised import SupervisedTrial

SOUND = r"\[(?P<step>\d+)\] (?P<name>\w+): (?P<value>\S+)"
HUNG = "a" * 64 + "!"
HOSTILE = {
    "nested repeats": r"^(a+)+$",
    "any text, repeated": r"(.*)*x",
    "overlapping alternatives": r"^(a|aa)+$",
    "optional parts": r"^(a?){64}a{64}$",
    "neighbours": r"^(a*a*a*a*a*a*a*a*a*a*)*$",
    "a reference back": r"^(a*)(a*)(a*)(a*)(a*)(a*)(a*)\2\3\4\5\6\7\8b",
    "a look ahead": r"^(?=(a+)+$)",
}


class Searching:
    """A reader whose patterns are searched for in a process of their own."""

    def __init__(self, pattern: str | None, others: dict[str, str | None] | None = None) -> None:
        reader = MetricReader("loss", pattern, 0, others=others)
        names = ["trial.metric_pattern"] if pattern else []
        names += [f"the pattern of {name}" for name, text in (others or {}).items() if text]
        self.alone = OutputReader(MetricReader("loss", pattern, 0, others=others))
        self.matcher = PatternMatcher(list(zip(names, reader.patterns, strict=True)))
        self.matched = MatchedOutput(OutputReader(reader), self.matcher)

    def feed(self, data: bytes) -> None:
        self.matched.feed(data, 0.0)

    def rest(self) -> list[Metric]:
        return [m for heard in self.matched.close(0.0, lambda: False) for m in heard.metrics]


def values(metrics: list[Metric]) -> list[tuple[str, float, int]]:
    return [(m.name, m.value, m.step) for m in metrics]


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_line_on_which_a_pattern_never_ends_costs_itself_alone(hostile: str) -> None:
    searching = Searching(None, {"size": rf"(?P<value>\d+) MB|{hostile}"})
    searching.feed(f"epoch=1 loss=0.5\n7 MB\n{HUNG}\n".encode())
    searching.feed(b"epoch=2 loss=0.4\n8 MB\n")
    found = values(searching.rest())
    assert found == [("loss", 0.5, 1), ("size", 7.0, 1), ("loss", 0.4, 2), ("size", 8.0, 2)]
    said = searching.matcher.notes["slow the pattern of size"]
    assert HUNG in said
    assert "takes more than 1 s" in said


def test_a_pattern_that_hangs_again_and_again_is_switched_off_and_others_are_not() -> None:
    searching = Searching(f"{SOUND}|{HOSTILE['nested repeats']}", {"size": r"(?P<value>\d+) MB"})
    searching.feed(f"[1] loss: 0.5\n7 MB\n{HUNG}\n[2] loss: 0.4\n".encode())
    searching.feed(f"{HUNG}\n".encode() * (MOST_SLOW_LINES - 1) + b"[3] loss: 0.3\n8 MB\n")
    found = values(searching.rest())
    assert found == [("loss", 0.5, 1), ("size", 7.0, 1), ("loss", 0.4, 2), ("size", 8.0, 2)]
    said = searching.matcher.notes["off trial.metric_pattern"]
    assert "trial.metric_pattern is not used any more" in said
    assert "Change it" in said


def test_a_pattern_that_is_slow_on_every_line_is_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CpuAllowance, "BURST_S", 0.5)
    searching = Searching(None, {"size": r"(?P<value>\d+) MB|^(a+)+$"})
    searching.feed(b"7 MB\n" + (b"a" * 23 + b"!\n") * 300)
    assert values(searching.rest())[:1] in ([], [("size", 7.0, 1)])
    assert "too slow" in searching.matcher.notes["off the pattern of size"]


LINES = st.sampled_from([
    b"[1] loss: 0.5\n", b"[2] loss: 0.4 7 MB\n", b"[2] loss: 0.3\r", b"\r\n", b"text\n", b"8 MB",
    b"[3] loss: 1,5\n", b"epoch=3 loss=1\n", b"[4] a: 1 [5] b: 2\n", b"\xff\x00[6] c: 1\n", b"\n",
])  # fmt: skip


def test_any_split_of_the_output_gives_the_metrics_of_a_search_in_this_process() -> None:
    """One process for all examples: each is a stream that ends with a whole line."""
    searching = Searching(SOUND, {"size": r"(?P<value>\d+) MB"})

    @given(st.lists(LINES, max_size=12), st.lists(st.integers(0, 200), max_size=5))
    def check(lines: list[bytes], cuts: list[int]) -> None:
        data = b"".join(lines) + b"\n"
        expected = searching.alone.feed(data)
        places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
        for begin, end in pairwise(places):
            searching.feed(data[begin:end])
        found = []
        while searching.matcher.waits_since_s is not None:
            searching.matcher.wait(1.0)
        found = [m for heard in searching.matched.timed_metrics() for m in heard.metrics]
        assert found == expected

    check()
    assert searching.rest() == searching.alone.close()


def test_a_killed_process_loses_and_repeats_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes_ops.trial.output.pattern_matcher._RETRY_S", 0.0)
    searching = Searching(SOUND)
    for n in range(1, 2_001):
        searching.feed(b"[%d] loss: %d.5\n" % (n, n))
        if n % 500 == 1:
            process = searching.matcher._process
            assert process is not None
            process._process.send_signal(signal.SIGKILL)
            while searching.matcher.waits_since_s is not None:
                searching.matcher.wait(1.0)
    assert values(searching.rest()) == [("loss", n + 0.5, n) for n in range(1, 2_001)]
    assert searching.matcher.notes == {}


def test_a_line_that_ends_the_process_each_time_costs_itself_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hermes_ops.trial.output.pattern_matcher._RETRY_S", 0.0)
    searching = Searching(f"{SOUND}|{HOSTILE['nested repeats']}")
    searching.feed(f"[1] loss: 0.5\n{HUNG}\n[2] loss: 0.4\n".encode())
    for _ in range(3):
        while (process := searching.matcher._process) is None or process.marker().line != 1:
            searching.matcher.wait(0.01)
        process._process.send_signal(signal.SIGKILL)
        process._process.wait()
        searching.matcher.exchange()
    assert values(searching.rest()) == [("loss", 0.5, 1), ("loss", 0.4, 2)]
    said = searching.matcher.notes["slow trial.metric_pattern"]
    assert "ends the process that searches for it (-9) on this line" in said


def test_a_process_that_cannot_be_started_switches_patterns_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr("hermes_ops.trial.output.pattern_matcher._RETRY_S", 0.0)
    searching = Searching(SOUND)
    searching.feed(b"[1] loss: 0.5\n")
    assert searching.rest() == []
    assert "cannot be started" in searching.matcher.notes["off trial.metric_pattern"]


def test_what_is_not_searched_when_time_is_over_is_said() -> None:
    searching = Searching(f"{SOUND}|{HOSTILE['nested repeats']}")
    searching.feed(f"{HUNG}\n[1] loss: 1\n".encode())
    heard = list(searching.matched.close(0.0, lambda: True))
    assert [m for h in heard for m in h.metrics] == []
    assert "no time left" in searching.matcher.notes["given up"]
    assert searching.matcher._process is None


def test_an_allowance_is_for_bursts_and_grows_with_lines_and_time() -> None:
    allowance = CpuAllowance(0.0)
    assert allowance.spend(CpuAllowance.BURST_S, 0, 0.0)
    assert not allowance.spend(0.1, 0, 0.0)
    assert allowance.spend(0.0, 0, 1.0)  # a second has passed
    assert not allowance.spend(1.0, 100, 1.0)
    assert allowance.spend(1.0, 20_000, 1.0)


@given(st.integers(0, 300), st.floats(0, 1e-4))
def test_ordinary_output_never_uses_an_allowance_up(batches: int, line_s: float) -> None:
    allowance = CpuAllowance(0.0)
    assert all(allowance.spend(1_000 * line_s, 1_000, 0.0) for _ in range(batches))


def test_what_overlapping_matches_hold_is_bounded() -> None:
    import re

    found = search(re.compile(r"(?=(?P<value>.{900}))"), "x" * 8_192)
    assert 0 < sum(len(match.value) for match in found) <= LINE_CHARACTERS
    assert search(re.compile("(?P<value>.+)"), "x" * (GROUP_CHARACTERS + 1)) == []


# -- beside a script -------------------------------------------------------------------------------


class Trial(SupervisedTrial):
    def start(self, script: str, *options: str, pattern: str = SOUND) -> subprocess.Popen[bytes]:
        self.script.write_text("import os, signal, sys, time\n" + script)
        self.epoch += 1
        own = ["--objective", "loss", f"--metric-pattern={pattern}", "--directory", str(self.base)]
        return self.supervise([*own, *options], [sys.executable, "train.py"])

    @property
    def metrics(self) -> list[tuple[float, int]]:
        return [(m["value"], m["step"]) for m in self.lines("metrics.jsonl")]


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    trial = Trial(tmp_path)
    yield trial
    trial.close()


def wait_for(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)


def says(process: subprocess.Popen[bytes], word: bytes) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if word in line:
            return
    raise AssertionError(f"{word!r} was never printed")


FLOOD = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: print('a' * 64 + '!')\n"
ENDLESS = f"{SOUND}|{HOSTILE['nested repeats']}"


def test_a_stop_ends_a_trial_whose_pattern_never_ends_and_whose_script_ignores_it(
    trial: Trial,
) -> None:
    process = trial.start(FLOOD, "--grace", "0.2", pattern=ENDLESS)
    says(process, b"aaa")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert (process.returncode, trial.result["outcome"]) == (75, "interrupted")


def test_a_time_limit_ends_a_trial_whose_pattern_never_ends(trial: Trial) -> None:
    process = trial.start(FLOOD, "--time-limit", "0.5", pattern=ENDLESS)
    process.communicate(timeout=60)
    assert trial.result["outcome"] == "failed"
    assert trial.result["reason"].startswith("time limit")


def test_the_process_that_hangs_ends_with_a_killed_supervisor(trial: Trial) -> None:
    process = trial.start(FLOOD, pattern=ENDLESS)
    says(process, b"aaa")
    family = psutil.Process(process.pid)

    def matchers() -> list[psutil.Process]:
        return [p for p in family.children(recursive=True) if "pattern_process" in _command(p)]

    wait_for(matchers)
    found = matchers()
    process.kill()
    process.wait()
    wait_for(lambda: not any(_command(one) for one in found))


def _command(process: psutil.Process) -> str:
    """Return the command line; empty for a process that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


RESUMED = """
path = os.path.join(os.environ["HERMES_CHECKPOINT_DIR"], "state")
done = int(open(path).read()) if os.path.exists(path) else 0
for epoch in range(done + 1, 6):
    if not done:
        print("a" * 64 + "!")
    print(f"loss: {epoch}.5", flush=True)
    with open(path + ".tmp", "w") as stream:
        stream.write(str(epoch))
    os.replace(path + ".tmp", path)
    if epoch == 2 and not done:
        print("pausing", flush=True)
        time.sleep(60)
"""


def test_a_trial_goes_on_exactly_where_its_values_were_still_being_searched(trial: Trial) -> None:
    pattern = r"(?P<name>loss): (?P<value>\S+)|^(a+)+$"
    process = trial.start(RESUMED, pattern=pattern)
    says(process, b"pausing")
    wait_for(lambda: trial.status["checkpoint_step"] == 2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert (process.returncode, trial.result["checkpoint_step"]) == (75, 2)
    process = trial.start(RESUMED, pattern=pattern)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert trial.metrics == [(n + 0.5, n) for n in range(1, 6)]


def test_a_script_without_patterns_has_no_process_for_them(tmp_path: Path) -> None:
    from hermes_ops.trial.supervisor.options import SegmentOptions
    from hermes_ops.trial.supervisor.readers import make_matcher

    options = SegmentOptions(tmp_path, 1, ("x",), objective="loss", others=(("size", None),))
    assert make_matcher(options, MetricReader("loss", None, 0, others={"size": None})) is None
