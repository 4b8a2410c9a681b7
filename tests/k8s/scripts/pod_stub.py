"""The stub of training, in a pod: it also says what it is, and may take too much memory once.

With `--lying` it says in the end that it has begun just now.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path

trial = Path(os.environ["HERMES_CHECKPOINT_DIR"]).parent
facts = {
    "started_s": time.time(),
    "devices": os.environ.get("NVIDIA_VISIBLE_DEVICES", ""),
    "cuda": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
    "user": os.getuid(),
    "token": Path("/var/run/secrets/kubernetes.io").exists(),
    "root_writable": os.access("/opt", os.W_OK),
    "seen": os.listdir(trial.parent),
}
with (trial / "pods.jsonl").open("a") as stream:
    stream.write(json.dumps(facts) + "\n")
print("devices", facts["devices"], flush=True)
if "--greedy" in sys.argv:
    sys.argv.remove("--greedy")
    Path("/tmp/greedy").write_bytes(bytes(100 * 2**20))
once = trial / "hungry"
if "--hungry" in sys.argv:
    sys.argv.remove("--hungry")
    if not once.exists():
        once.touch()
        hoard = [bytearray(2**20) for _ in range(4_096)]
lies = "--lying" in sys.argv
if lies:
    sys.argv.remove("--lying")
runpy.run_path(str(Path(__file__).with_name("stub.py")), run_name="__main__")
if lies:
    segment = json.loads((trial / "segments.jsonl").read_text().splitlines()[-1])
    told = {**segment, "start_s": time.time(), "uptime_s": time.monotonic(), "gpus": []}
    (trial / "segments.jsonl").write_text(json.dumps(told) + "\n")
