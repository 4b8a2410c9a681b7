"""Training that fails in epoch 4 as long as the file FIX is not there; it keeps its checkpoint."""

import argparse
import os
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--fails", required=True)
parser.add_argument("--epochs", type=int, default=8)
options = parser.parse_args()
file = Path(os.environ["HERMES_CHECKPOINT_DIR"]) / "epoch"
epoch = int(file.read_text()) if file.exists() else 0
while epoch < options.epochs:
    time.sleep(0.1)
    if epoch == 3 and options.fails == "yes" and not Path(os.environ["FIX"]).exists():
        sys.exit("the third epoch was the last one")
    epoch += 1
    print(f"epoch={epoch} loss={10 - epoch}", flush=True)
    file.write_text(str(epoch))
