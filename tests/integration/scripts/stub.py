"""A stand-in for training: a loss that falls by `--rate` an epoch, and noise out of saved state.

With `--slow-while FILE` it pauses in each epoch only while that file is there: it trains for as
long as a test needs it, and no longer.
"""

import argparse
import json
import os
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--pause", type=float, default=0.1)
parser.add_argument("--slow-while", type=Path)
options = parser.parse_args()
file = Path(os.environ["HERMES_CHECKPOINT_DIR"]) / "state.json"
epoch, loss, noise = json.loads(file.read_text()) if file.exists() else (0, 100.0, 7)
while epoch < options.epochs:
    if options.slow_while is None or options.slow_while.exists():
        time.sleep(options.pause)
    noise = (noise * 1103515245 + 12345) % 2**31
    epoch, loss = epoch + 1, loss - options.rate * (1 + 0.2 * noise / 2**31)
    print(f"epoch={epoch} loss={loss:.9f}", flush=True)
    fresh = file.with_suffix(".tmp")
    fresh.write_text(json.dumps([epoch, loss, noise]))
    fresh.replace(file)
