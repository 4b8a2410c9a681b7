"""What Keras prints at the end of an epoch does not count: the hook reports it with all digits."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.trial import event_channel
from hermes_ops.trial.keras.output_order import announce_before_printing


def test_a_value_that_a_callback_adds_to_the_logs_is_announced_before_keras_prints_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERMES_TRIAL_DIR", str(tmp_path))
    monkeypatch.setattr(event_channel, "announced", {"loss"})
    announced_at_print: list[list[str]] = []

    class LearningRateScheduler:
        def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
            logs["learning_rate"] = 0.0009

    class ProgbarLogger:
        def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
            lines = (tmp_path / "events.jsonl").read_text().splitlines()
            announced_at_print.extend(json.loads(line)["names"] for line in lines)

    callbacks: list[Any] = [LearningRateScheduler(), ProgbarLogger()]
    announce_before_printing(SimpleNamespace(callbacks=callbacks))
    logs = {"loss": 2.0}
    for callback in callbacks:
        callback.on_epoch_end(0, logs)
    assert announced_at_print == [["learning_rate"]]
