"""A stand-in for distributed training: rank 0 trains, the others wait for its word.

The loss and its noise are those of `stub.py`. An epoch takes `--pause` divided by the number of
workers. As long as it pauses it saves an epoch once its value has been read: a value that has only
been printed is lost if its reader is killed as well. Told to stop, rank 0 saves the epoch, tells
the others by a file, and leaves with 75. Each worker lists itself in the folder of the variable
WORKERS_LOG: a line when it starts.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--pause", type=float, default=0.1)
parser.add_argument("--slow-while", type=Path)
parser.add_argument("--batch-size", type=int, default=0)
options = parser.parse_args()
rank, size = (int(os.environ.get(f"HERMES_{name}", n)) for name, n in (("RANK", 0), ("SIZE", 1)))
told: list[str] = []
signal.signal(signal.SIGTERM, lambda *_: told.append("stop"))
facts = {
    "pid": os.getpid(), "trial": os.environ["HERMES_TRIAL"], "sweep": os.environ["HERMES_SWEEP"],
    "rank": rank, "size": size, "gpus": os.environ["CUDA_VISIBLE_DEVICES"],
    "batch": options.batch_size, "time_s": time.time(),
}  # fmt: skip
log = Path(os.environ["WORKERS_LOG"])
with (log / f"{os.getpid()}-{time.time_ns()}.json").open("x") as listed:
    json.dump(facts, listed)


def word(name: str) -> Path:
    """Return the file in the folder of the group by which rank 0 tells the others to leave."""
    return Path(os.environ["HERMES_GROUP_DIR"]) / name


def tell(name: str) -> None:
    """Write that file, of which no other worker sees a part."""
    if size > 1:
        fresh = word(f"{name}.tmp")
        fresh.write_text(json.dumps({"step": epoch}))
        fresh.replace(word(name))


if rank:
    while not (word("stop.json").exists() or word("ended.json").exists()):
        print(f"epoch=1 loss={-rank}", flush=True)  # what nobody may take for a value
        time.sleep(0.05)
    sys.exit(75 if word("stop.json").exists() else 0)
metrics = Path(os.environ["HERMES_METRICS_FILE"])


def await_read() -> None:
    """Wait until the value of this epoch is on the disk."""
    while not (metrics.exists() and f'"step": {epoch},' in metrics.read_text()):
        time.sleep(0.01)


file = Path(os.environ["HERMES_CHECKPOINT_DIR"]) / "state.json"
epoch, loss, noise = json.loads(file.read_text()) if file.exists() else (0, 100.0, 7)
while epoch < options.epochs:
    pauses = options.slow_while is None or options.slow_while.exists()
    if pauses:
        time.sleep(options.pause / size)
    noise = (noise * 1103515245 + 12345) % 2**31
    epoch, loss = epoch + 1, loss - options.rate * (1 + 0.2 * noise / 2**31)
    print(f"epoch={epoch} loss={loss:.9f}", flush=True)
    if pauses:
        await_read()
    fresh = file.with_suffix(".tmp")
    fresh.write_text(json.dumps([epoch, loss, noise]))
    fresh.replace(file)
    if told:
        tell("stop.json")
        sys.exit(75)
tell("ended.json")
