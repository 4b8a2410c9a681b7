"""`hermes-trial`: run one segment of a trial, as the parent of the user's script."""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> int:
    """Run hermes-trial; return its exit code.

    A stop ends it at once as preempted until its segment has begun, even while its code is loaded.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: os._exit(os.EX_TEMPFAIL))
    from hermes_ops.trial.segment import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    exit_code = main()
    with contextlib.suppress(OSError):  # nobody reads any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)  # at once: the next trial waits for this GPU
