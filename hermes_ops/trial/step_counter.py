"""Numbers the values of a curve in the order in which a script has logged them to MLflow."""

from __future__ import annotations

from typing import NamedTuple

MOST_STEPS = 1_000_000


class LoggedValue(NamedTuple):
    """A value that a script has logged; `run` is 0 for the trial's own run, other runs follow."""

    name: str
    value: float
    step: int | None  # as the script says it, None if it does not
    run: int


class StepCounter:
    """Turn the script's steps (epochs, batches, none at all) into 1, 2, 3 and so on.

    Only a first step 0 stays 0, unless `zero_is_none`: then step 0 stands for no step. A step that
    a resumed segment logs again keeps its number. Steps that begin again from a lower one, or in
    another run, are further training: their values are counted on. The same step twice in a row
    counts once. A value without a step is not counted in a run that has said steps. Once the
    trial's own run has a value, those of other runs are not counted.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}  # by (phase, the script's step)
        self._phases: dict[int, int] = {}  # by number; a phase is a stretch of rising steps
        self.zero_is_none = False
        self.highest: int | None = None
        self.begin(0)

    def begin(self, first_step: int) -> None:
        """Begin a segment; its checkpoint holds the first `first_step` steps."""
        self._first_step = first_step
        self._last: tuple[int, int, float] | None = None  # run, step and value
        self._phase = 0
        self._stepped: set[int] = set()  # runs in which the script has said steps
        self._unstepped = 0
        self._own = False

    def number(self, logged: LoggedValue) -> int | None:
        """Return the step of a value, None if it does not count."""
        if logged.run and self._own:
            return None
        self._own = self._own or logged.run == 0
        step = logged.step
        if step is None or (step == 0 and self.zero_is_none):
            return self._without_step(logged)
        if self._is_repeated(logged.run, step, logged.value):
            return None
        self._phase = self._phase_of(logged.run, step)
        self._last = (logged.run, step, logged.value)
        self._stepped.add(logged.run)
        return self._known_or_next(self._phase, step)

    def _without_step(self, logged: LoggedValue) -> int | None:
        if logged.run in self._stepped:
            return None
        self._unstepped += 1
        number = self._first_step + self._unstepped
        if self._stepped:  # other runs have said steps: this is the sum of them
            number = (self.highest or 0) + 1
        self.highest = max(self.highest or 0, number)
        return number

    def _is_repeated(self, run: int, step: int, value: float) -> bool:
        if self._last is None:
            return False
        last_run, last_step, last_value = self._last
        return step == last_step and (run == last_run or value == last_value)

    def _phase_of(self, run: int, step: int) -> int:
        if self._last is None:
            return self._phase_at_checkpoint(step)
        last_run, last_step, _ = self._last
        begins_again = step < last_step or (run != last_run and step == last_step)
        return self._phase + 1 if begins_again else self._phase

    def _phase_at_checkpoint(self, step: int) -> int:
        """The phase in which a segment goes on: the checkpoint's, or the next one."""
        phase = self._phases.get(self._first_step, 0)
        known = self._numbers.get((phase, step))
        begins_next = known is not None and known < self._first_step
        return phase + 1 if begins_next else phase

    def _known_or_next(self, phase: int, step: int) -> int:
        is_zero = self.highest is None and step == 0
        following = 0 if is_zero else (self.highest or 0) + 1
        number = self._numbers.get((phase, step), following)
        self.highest = max(self.highest or 0, number)
        if len(self._numbers) < MOST_STEPS:
            self._numbers[phase, step] = number
            self._phases.setdefault(number, phase)
        return number
