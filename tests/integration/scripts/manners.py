"""Manners of real scripts: `python manners.py NAME`; the loss of epoch n of five is 1 / (n + 1)."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

EPOCHS = 5


def loss(epoch: int) -> float:
    return 1.0 / (epoch + 1)


def say(line: str) -> None:
    print(line, flush=True)


def epochs() -> Iterator[int]:
    for epoch in range(1, EPOCHS + 1):
        time.sleep(0.2)
        yield epoch


def batch_lines() -> None:
    """A line for each ten batches, one for each epoch."""
    for epoch in epochs():
        for batch in range(10, 101, 10):
            say(f"step={(epoch - 1) * 100 + batch} train_loss={loss(epoch):.4f}")
        say(f"epoch={epoch} val_loss={loss(epoch):.4f}")


def global_step() -> None:
    """One JSON line an epoch, which begins with a counter of batches."""
    for epoch in epochs():
        say(json.dumps({"global_step": epoch * 100, "epoch": epoch, "val_loss": loss(epoch)}))


def baseline() -> None:
    """An evaluation before training, as epoch 0."""
    say("epoch=0 val_loss=2.3")
    for epoch in epochs():
        say(f"epoch={epoch} val_loss={loss(epoch):.4f}")
    say("reached the end")


def improved() -> None:
    """A line without an epoch that names the objective twice."""
    best = 1.5
    for epoch in epochs():
        say(f"epoch={epoch} val_loss={loss(epoch):.4f}")
        say(f"improved: val_loss={best:.4f} --> val_loss={loss(epoch):.4f}, saving")
        best = loss(epoch)


def numpy_scalar() -> None:
    """A dictionary with NumPy 2's spelling of a scalar."""
    for epoch in epochs():
        say(f"{{'epoch': {epoch}, 'val_loss': np.float64({loss(epoch)!r})}}")


def thousands() -> None:
    """Values with separators."""
    for epoch in epochs():
        say(f"epoch={epoch} val_loss={9000 / epoch + 500:,.2f}")


def saves_after() -> None:
    """The model is saved after the line of the last epoch."""
    for epoch in epochs():
        say(f"epoch={epoch} val_loss={loss(epoch):.4f}")
    time.sleep(1.5)
    Path(os.environ["HERMES_TRIAL_DIR"], "saved").write_text("yes")


def beyond() -> None:
    """It trains on, however many epochs it was told."""
    for epoch in range(1, 10_000):
        time.sleep(0.1)
        say(f"epoch={epoch} val_loss={loss(epoch):.4f}")


def mlflow_alone() -> None:
    """Nothing but MLflow's own calls; its arguments as params."""
    import mlflow

    parser = argparse.ArgumentParser()
    parser.add_argument("--x", type=float)
    parser.add_argument("--flag")
    arguments = parser.parse_args(sys.argv[2:])
    with mlflow.start_run():
        mlflow.log_params({"x": arguments.x, "flag": arguments.flag == "true"})
        for epoch in epochs():
            mlflow.log_metric("val_loss", loss(epoch), step=epoch)


def daemon() -> None:
    """A helper in a session of its own that goes on."""
    if os.fork() == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for handle in (0, 1, 2):
            os.dup2(null, handle)
        Path(os.environ["HERMES_TRIAL_DIR"], "daemon").write_text(str(os.getpid()))
        time.sleep(900)
        os._exit(0)
    saying()


def wrong_name() -> None:
    """Another metric than the sweep file asks for."""
    for epoch in epochs():
        say(f"epoch={epoch} val_acc={1 - loss(epoch):.4f}")


def saying() -> None:
    """As the documentation has it."""
    for epoch in epochs():
        say(f"epoch={epoch} val_loss={loss(epoch):.4f}")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
