"""Stands in for a training script: walks down to the point (x, y) of a bowl that moves by day."""

import argparse
import time
from datetime import date

parser = argparse.ArgumentParser()
parser.add_argument("--x", type=float, required=True)
parser.add_argument("--y", type=float, required=True)
parser.add_argument("--day", type=date.fromisoformat, default=date(2026, 1, 1))
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--pause", type=float, default=0.2)
options = parser.parse_args()
middle = (options.day.toordinal() % 7 - 3) / 4
height = (options.x - middle) ** 2 + (options.y + middle) ** 2
for epoch in range(1, options.epochs + 1):
    time.sleep(options.pause)
    print(f"epoch={epoch} loss={height + 10 / epoch:.6f}", flush=True)  # noqa: T201 - the metrics
