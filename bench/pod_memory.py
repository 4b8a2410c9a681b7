"""Memory of Airflow's triggerer for each pod that it holds: `python -m bench.pod_memory 1 100 300`.

As many triggers as asked for run in one process, as in a triggerer, against a stand-in for
Kubernetes' API whose pods run for ever and whose logs stay open. What is measured is the process's
proportional set size (PSS) after SETTLE_S, in MB of 10^6 bytes; pods of the first number are there
in all, so that what is loaded once is not counted for each.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

SETTLE_S = 20.0
KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{{name: a, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: a, user: {{}}}}]
contexts: [{{name: a, context: {{cluster: a, user: a}}}}]
current-context: a
"""


class ClusterHandler(BaseHTTPRequestHandler):
    """A stub of the API: every pod runs, and writes a line now and then."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer with a pod, or with its log."""
        name = self.path.partition("?")[0].split("/pods/")[1]
        if name.endswith("/log"):
            self._log()
            return
        running = {"name": "base", "state": {"running": {}}}
        labels = {"hermes-ops/try": "1", "hermes-ops/epoch": "1"}
        known = {"name": name, "uid": name, "resourceVersion": "1", "labels": labels}
        status = {"phase": "Running", "containerStatuses": [running]}
        body = json.dumps({"metadata": known, "status": status}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _log(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while True:
            line = f"{time.strftime('%Y-%m-%dT%H:%M:%S.0Z', time.gmtime())} loss=0.5\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            time.sleep(5.0)

    def log_message(self, *_: object) -> None:
        """Log no requests."""


class StubServer(ThreadingHTTPServer):
    """A server for the connections of all pods at once."""

    request_queue_size = 1_000
    daemon_threads = True


def serve(ready: Connection) -> None:
    """Serve the cluster's API on a port that is passed to `ready`."""
    server = StubServer(("127.0.0.1", 0), ClusterHandler)
    ready.send(server.server_address[1])
    server.serve_forever()


async def hold(counts: list[int]) -> None:
    """Run increasing numbers of triggers, and print their memory."""
    from hermes_ops.airflow.trial.pod_trigger import HeldPod, PodTrigger

    logging.disable(logging.INFO)
    running: list[asyncio.Task[Any]] = []
    first = 0.0
    for count in counts:
        for number in range(len(running), count):
            held = HeldPod("sweep", number, 1, f"run-{number}", f"pod-{number}", "trials", "1",
                           600.0, {"conn_id": None, "kubernetes_conn_id": None})  # fmt: skip
            held.folder.path.mkdir(parents=True)
            running.append(asyncio.ensure_future(anext(PodTrigger(**asdict(held)).run())))
        await asyncio.sleep(SETTLE_S)
        assert not any(task.done() for task in running), "a trigger has ended"
        pss_mb = psutil.Process().memory_full_info().pss / 1e6
        first = first or pss_mb
        each = (pss_mb - first) / (count - counts[0]) if count > counts[0] else float("nan")
        print(f"{count} pods: {pss_mb:.1f} MB, {threading.active_count()} threads, "
              f"{each:.2f} MB for each beyond the first {counts[0]}")  # fmt: skip


def main(counts: list[int]) -> None:
    """Measure each of these increasing numbers of pods."""
    receives, sends = multiprocessing.get_context("spawn").Pipe()
    api = multiprocessing.get_context("spawn").Process(target=serve, args=(sends,), daemon=True)
    api.start()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kubeconfig").write_text(KUBECONFIG.format(port=receives.recv()))
        os.environ |= {"KUBECONFIG": f"{folder}/kubeconfig", "HERMES_HOME": folder}
        os.environ |= {"AIRFLOW_HOME": folder, "MLFLOW_TRACKING_URI": "http://127.0.0.1:1"}
        try:
            asyncio.run(hold(counts))
        finally:
            api.terminate()


if __name__ == "__main__":
    code = 1
    try:
        main([int(argument) for argument in sys.argv[1:]] or [1, 100, 300])
        code = 0
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)  # threads that look for their pods would go on
