"""Writes a checkpoint of its own at each epoch, and loads the newest one; endless."""

import os
import time
from pathlib import Path

folder = Path(os.environ["HERMES_CHECKPOINT_DIR"])
epoch = max((int(p.stem.partition("-")[2]) for p in folder.glob("epoch-*.txt")), default=0)
while True:
    time.sleep(0.5)
    epoch += 1
    print(f"epoch={epoch} loss={abs(epoch - 3) + 1}", flush=True)
    fresh = folder / f"epoch-{epoch}.tmp"
    fresh.write_text("weights")
    fresh.replace(folder / f"epoch-{epoch}.txt")
