"""The page in Airflow: what the pool does now, why, and what another policy would do.

`APP` is what the plugin mounts and `VIEW` its place in Airflow's navigation. The page reads
Airflow's database, the files of the controller and MLflow; it writes nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

URL_PREFIX = "/hermes"

Message = MutableMapping[str, Any]


class LazyApp:
    """The page as an ASGI application that is built at its first request.

    Plugins are loaded by every process of Airflow, at each start of a task too; only the API
    server has a use for the page and pays for its imports.
    """

    def __init__(self) -> None:
        self._app: Any = None

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Answer one request."""
        if self._app is None:
            from hermes_ops.airflow.page.app import create_app

            self._app = create_app()
        await self._app(scope, receive, send)


APP = {"app": LazyApp(), "url_prefix": URL_PREFIX, "name": "Hermes Ops"}

VIEW = {
    "name": "Hermes",
    "href": f"{URL_PREFIX.lstrip('/')}/",  # relative, for an Airflow that lives under a path
    "url_route": "hermes",
    "destination": "nav",
    "nav_top_level": True,
}
