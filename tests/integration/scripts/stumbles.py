"""Fails after its third epoch the first time it comes there; goes on from its checkpoint."""

import os
import sys
from pathlib import Path

folder = Path(os.environ["HERMES_CHECKPOINT_DIR"])
file, stumbled = folder / "epoch.txt", folder.parent / "stumbled"
epoch = int(file.read_text()) if file.exists() else 0
while epoch < 6:
    epoch += 1
    print(f"begin {epoch}", flush=True)
    print(f"epoch={epoch} loss={10 - epoch}", flush=True)
    fresh = file.with_suffix(".tmp")
    fresh.write_text(str(epoch))
    fresh.replace(file)
    if epoch == 3 and not stumbled.exists():
        stumbled.touch()
        sys.exit("the disk of the data went away")
