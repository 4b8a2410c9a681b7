"""Ignores SIGTERM, as a script does that is busy in a library; `(a+)+$` never ends on its lines."""

import signal
import time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
for epoch in range(1, 10_000):
    print(f"epoch={epoch} loss={1 / epoch}", flush=True)
    if epoch > 1:
        print("a" * 64 + "!", flush=True)
    time.sleep(0.2)
