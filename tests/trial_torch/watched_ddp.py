"""Run examples/pytorch_ddp/train.py on small data, and write down what each process trains on.

`STOP_AT`, as in 1:40, has that rank tell hermes-trial to stop when it has made 40 steps, and wait
until hermes-trial has acted on it. `KILL_AT` has it kill itself there. With `LEAVE=die` SIGTERM is
not handled.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
import types
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch

SAMPLES = 1797
FOLDER = Path(os.environ["HERMES_TRIAL_DIR"])
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def load_digits(*, return_X_y: bool) -> tuple[Any, Any]:
    """Return learnable data whose first column is the number of the sample."""
    assert return_X_y
    generator = torch.Generator().manual_seed(7)
    images = torch.rand(SAMPLES, 64, generator=generator) * 16
    labels = (images[:, 1:] @ torch.rand(63, 10, generator=generator)).argmax(dim=1)
    images[:, 0] = torch.arange(SAMPLES) / SAMPLES * 16
    return images, labels


def load_example() -> Any:
    """Return the example as a module, with these data in the place of scikit-learn's."""
    package, datasets = types.ModuleType("sklearn"), types.ModuleType("sklearn.datasets")
    datasets.load_digits = load_digits  # type: ignore[attr-defined]
    sys.modules |= {"sklearn": package, "sklearn.datasets": datasets}
    path = Path(__file__).parents[2] / "examples" / "pytorch_ddp" / "train.py"
    spec = importlib.util.spec_from_file_location("example", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    del sys.modules["sklearn"], sys.modules["sklearn.datasets"]
    return example


def note(**values: object) -> None:
    """Write a line into this rank's file."""
    with open(FOLDER / f"notes-{RANK}.jsonl", "a") as stream:
        stream.write(json.dumps({**values, "size": SIZE, "process": os.getpid()}) + "\n")


def stop(example: Any) -> None:
    """Have hermes-trial told to stop, and wait until it has told all processes or rank 0 alone."""
    os.kill(json.loads((FOLDER / "status.json").read_text())["pid"], signal.SIGTERM)
    while not ((FOLDER / "group" / "asked").exists() or example.told_to_stop.is_set()):
        time.sleep(0.005)


def watch(example: Any) -> None:
    """Note each batch before it is trained on, and act after its step where a test asks for it."""
    batches_of, steps = example.batches_of, count(1)

    def watched(data: Any, epoch: int, *arguments: int) -> Iterator[tuple[Any, Any]]:
        for images, labels in batches_of(data, epoch, *arguments):
            numbers = (images[:, 0] * SAMPLES).round().int().tolist()
            step = next(steps)
            note(epoch=epoch, step=step, samples=numbers)
            yield images, labels
            if os.environ.get("STOP_AT") == f"{RANK}:{step}":
                stop(example)
            if os.environ.get("KILL_AT") == f"{RANK}:{step}":
                os.kill(os.getpid(), signal.SIGKILL)

    example.batches_of = watched


def main() -> None:
    """Train, and note the weights at the end."""
    example = load_example()
    watch(example)
    if os.environ.get("LEAVE") == "die":
        example.signal = types.SimpleNamespace(signal=lambda *_: None, SIGTERM=signal.SIGTERM)
    models: list[Any] = []
    make = example.DistributedDataParallel

    def made(model: Any) -> Any:
        models.append(make(model))
        return models[-1]

    example.DistributedDataParallel = made
    example.main()
    note(weights=[float(weight.abs().sum()) for weight in models[0].parameters()])


if __name__ == "__main__":
    main()
