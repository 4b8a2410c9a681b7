"""The controller's HTTP server: `/metrics` for Prometheus, `/livez` and `/readyz` for probes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from hermes_ops.airflow.control.monitoring import Monitor
from hermes_ops.errors import ConfigError, Problem

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

log = logging.getLogger("hermes.controller")

LOOPBACK = "127.0.0.1"
HIGHEST_PORT = 65_535


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen; port 0 takes a free one."""

    host: str = LOOPBACK
    port: int = 0

    @classmethod
    def from_environment(cls) -> Address:
        """From HERMES_METRICS_HOST and HERMES_METRICS_PORT; ConfigError for a bad port."""
        text = os.environ.get("HERMES_METRICS_PORT") or "0"
        if not text.isdecimal() or int(text) > HIGHEST_PORT:
            problem = Problem(
                "HERMES_METRICS_PORT", repr(text), f"0 to {HIGHEST_PORT}", "correct or unset it"
            )
            raise ConfigError("The controller's environment", (problem,))
        return cls(os.environ.get("HERMES_METRICS_HOST") or LOOPBACK, int(text))


class _Quiet(WSGIRequestHandler):
    """Writes no line a scrape."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: ANN401 - its base's
        pass


def application(monitor: Monitor) -> Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]]:
    """The WSGI application of one controller."""
    metrics = make_wsgi_app(monitor.registry)

    def serve(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if path == "/metrics":
            return list(metrics(environ, start))
        if path in ("/livez", "/readyz"):
            hangs = "" if monitor.alive else monitor.unready
            why = monitor.unready if path == "/readyz" else hangs
            start("503 Service Unavailable" if why else "200 OK", [("Content-Type", "text/plain")])
            return [f"{why or 'ok'}\n".encode()]
        start("404 Not Found", [("Content-Type", "text/plain")])
        return [b"/metrics, /livez, /readyz\n"]

    return serve


def serve(monitor: Monitor, address: Address) -> WSGIServer | None:
    """Listen in the background; None, with a line in the log, where the port is taken.

    A controller without its metrics still schedules.
    """
    try:
        server = make_server(
            address.host, address.port, application(monitor), ThreadingWSGIServer, _Quiet
        )
    except OSError as error:
        log.error(
            "No metrics: %s:%s cannot be used (%s): choose another with HERMES_METRICS_PORT",
            address.host, address.port, error.strerror or error,
        )  # fmt: skip
        return None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    log.info("Metrics at http://%s:%s/metrics", address.host, server.server_port)
    return server
