"""A stand-in for training that says when it starts and can be stopped and resumed."""

import time

started_s = time.time()

import argparse  # noqa: E402 - the stamp comes first
import json  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402

folder = Path(os.environ["HERMES_TRIAL_DIR"])
parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, default=1.0)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--pause", type=float, default=0.2)
parser.add_argument("--no-checkpoint", action="store_true")
options = parser.parse_args()


def stamp(**moments: float) -> None:
    with (folder / "stamps.jsonl").open("a") as file:
        file.write(json.dumps(moments) + "\n")


stamp(line_s=started_s, process_s=float(os.environ["HERMES_STARTED_S"]))
state = Path(os.environ["HERMES_CHECKPOINT_DIR"]) / "state.json"
epoch = json.loads(state.read_text()) if state.exists() else 0
while epoch < options.epochs:
    time.sleep(options.pause)
    epoch += 1
    print(f"epoch={epoch} loss={1000.0 - options.rate * epoch}", flush=True)
    if not options.no_checkpoint:
        fresh = state.with_suffix(".tmp")
        fresh.write_text(json.dumps(epoch))
        fresh.replace(state)
stamp(end_s=time.time(), ran_s=time.time() - started_s)
