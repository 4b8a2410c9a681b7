"""What scripts of several processes share here: their options, and a file for each process.

Each writes what it is into the folder of the variable WORKERS_LOG, and beside that how many batches
it has trained.
"""

import argparse
import json
import os
import pathlib
import time


def parse_options() -> argparse.Namespace:
    """Return the options; a script pauses after each epoch while the file `slow_while` exists."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--slow-while", type=pathlib.Path, required=True)
    parser.add_argument("--pause", type=float, default=4.0)
    return parser.parse_args()


def listed(rank: int, size: int) -> pathlib.Path:
    """Write down what the process is, and return the file for the number of its batches."""
    log = pathlib.Path(os.environ["WORKERS_LOG"], f"{os.getpid()}-{rank}.json")
    facts = {
        "pid": os.getpid(),
        "trial": os.environ["HERMES_TRIAL"],
        "sweep": os.environ["HERMES_SWEEP"],
        "rank": rank,
        "size": size,
        "time_s": time.time(),
    }
    written = log.with_suffix(".new")
    written.write_text(json.dumps(facts))
    written.rename(log)
    return log.with_suffix(".batches")
