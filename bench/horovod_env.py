"""The interpreter that `make horovod-env` builds, for benchmarks and for tests."""

from __future__ import annotations

import os
from pathlib import Path

from bench.measure import ROOT, NotMeasuredError

PYTHON = Path(os.environ.get("HERMES_TEST_HOROVOD_PYTHON", ROOT / ".venvs/horovod/bin/python"))
VARIABLES = {  # a core a worker: several share the machine
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_USE_LEGACY_KERAS": "1",
}


def interpreter() -> Path:
    """Return the interpreter with Horovod; raise NotMeasuredError where it has not been built."""
    if not PYTHON.exists():
        raise NotMeasuredError(f"no interpreter with Horovod at {PYTHON}: run make horovod-env")
    return PYTHON
