"""A stand-in for distributed training: rank 0 trains, the others leave when it says so by a file.

A batch takes --pause seconds, divided by the number of ranks to the power of --power. A trial ends
after --epochs of --batches each, or once the file of `--while` and its number is gone. Rank 0
stamps when its script starts and when its first batch has ended.
"""

import time

started_s = time.time()

import argparse  # noqa: E402 - the stamp comes first
import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, default=1.0)
parser.add_argument("--pause", type=float, default=0.1)
parser.add_argument("--power", type=float, default=1.0)
parser.add_argument("--batches", type=int, default=1)
parser.add_argument("--epochs", type=int)
parser.add_argument("--while", dest="lasts", type=Path)
options = parser.parse_args()
rank, size = (int(os.environ.get(f"HERMES_{name}", n)) for name, n in (("RANK", 0), ("SIZE", 1)))
told: list[str] = []
signal.signal(signal.SIGTERM, lambda *_: told.append("stop"))


def leave(code: int) -> None:
    """Tell the other ranks to leave with that code, and leave."""
    if size > 1:
        left = Path(os.environ["HERMES_GROUP_DIR"]) / "left"
        left.with_suffix(".tmp").write_text(str(code))
        left.with_suffix(".tmp").replace(left)
    sys.exit(code)


if rank:
    left = Path(os.environ["HERMES_GROUP_DIR"]) / "left"
    while not left.exists():
        time.sleep(0.02)
    sys.exit(int(left.read_text()))
state = Path(os.environ["HERMES_CHECKPOINT_DIR"]) / "state.json"
number = os.environ["HERMES_TRIAL"]
lasts = options.lasts and options.lasts.with_name(f"{options.lasts.name}-{number}")
batch = json.loads(state.read_text()) if state.exists() else 0
most = None if options.epochs is None else options.epochs * options.batches
is_first = True
while (lasts is None or lasts.exists()) and (most is None or batch < most):
    time.sleep(options.pause / size**options.power)
    batch += 1
    epoch, rest = divmod(batch, options.batches)
    if rest == 0:
        print(f"epoch={epoch} loss={1000.0 - options.rate * epoch}", flush=True)
    if is_first:
        stamp = {"line_s": started_s, "first_batch_s": time.time(), "size": size}
        with (Path(os.environ["HERMES_TRIAL_DIR"]) / "stamps.jsonl").open("a") as file:
            file.write(json.dumps(stamp) + "\n")
    is_first = False
    state.with_suffix(".tmp").write_text(json.dumps(batch))
    state.with_suffix(".tmp").replace(state)
    if told:
        leave(75)
leave(0)
