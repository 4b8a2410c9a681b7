"""examples/digits/train.py as it is, with a note of when its first batch began and ended."""

import json
import os
import runpy
import time
from pathlib import Path
from typing import Any

DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "train.py"
STANDBY_SERVER = b"hermes_ops.trial.standby"


def from_standby() -> bool:
    """True when the standby server is this process's parent."""
    return STANDBY_SERVER in Path(f"/proc/{os.getppid()}/cmdline").read_bytes()


def watch_first_batch() -> None:
    """Let the first `fit` write stamps.jsonl when its first batch is done."""
    import keras

    moments: dict[str, float] = {}

    class Stamp(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: object = None) -> None:  # noqa: ARG002
            moments.setdefault("first_batch_begin_s", time.time())

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:  # noqa: ARG002
            if "first_batch_end_s" not in moments:
                moments["first_batch_end_s"] = time.time()
                moments["process_s"] = float(os.environ["HERMES_STARTED_S"])
                line = json.dumps({**moments, "standby": from_standby()})
                with (Path(os.environ["HERMES_TRIAL_DIR"]) / "stamps.jsonl").open("a") as file:
                    file.write(line + "\n")

    fit = keras.Model.fit

    def stamped(self: object, *arguments: object, **named: object) -> Any:  # noqa: ANN401 - Keras
        return fit(self, *arguments, callbacks=[Stamp()], **named)

    keras.Model.fit = stamped


watch_first_batch()
runpy.run_path(str(DIGITS), run_name="__main__")
