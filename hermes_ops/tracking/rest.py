"""One client of an MLflow tracking server's REST API, with short timeouts and our errors."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hermes_ops.errors import Refused, Unavailable, Unsupported

if TYPE_CHECKING:
    import httpx

Json = Mapping[str, Any]
_TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
_MAY_BE_MISSING = 404
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class RestClient:
    """Requests to one tracking server; safe in threads, and in a child after fork.

    Log-in and TLS follow MLflow's own variables (MLFLOW_TRACKING_USERNAME, _PASSWORD, _TOKEN,
    _INSECURE_TLS, _SERVER_CERT_PATH); `variables` are a log-in in the place of this process's.
    Raises Unavailable when the server does not answer in
    time or says that it cannot now; Refused when it says no; Unsupported for an address that is
    not http or https.
    """

    def __init__(
        self, uri: str, timeout_s: float = 10.0, variables: Mapping[str, str] | None = None
    ) -> None:
        if urlsplit(uri).scheme not in ("http", "https"):
            raise Unsupported(
                f"The MLflow tracking address {_shown(uri)!r} is not that of a server; give one "
                "that begins with http:// or https:// (start it with `mlflow server`)."
            )
        self.uri = uri.rstrip("/")
        self._timeout_s = timeout_s
        self._variables = variables
        self._client: httpx.Client | None = None
        self._pid = 0

    def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        if self._client is not None and self._pid == os.getpid():
            self._client.close()
        self._client = None

    def get(self, path: str, query: Json) -> dict[str, Any]:
        """GET `/api/2.0/mlflow/{path}` and return the answer's JSON object."""
        response = self.send("GET", f"/api/2.0/mlflow/{path}", params=dict(query))
        return _object(response.content)

    def post(self, path: str, body: Json) -> dict[str, Any]:
        """POST a JSON object to `/api/2.0/mlflow/{path}` and return the answer's."""
        content = json.dumps(body, ensure_ascii=False).encode(errors="replace")
        response = self.send(
            "POST",
            f"/api/2.0/mlflow/{path}",
            content=lambda: [content],
            headers={"Content-Type": "application/json", "Content-Length": str(len(content))},
        )
        return _object(response.content)

    def pages(self, path: str, body: Json, key: str) -> Iterator[dict[str, Any]]:
        """Yield the entries of every page of a search (POST)."""
        token = ""
        while True:
            answer = self.post(path, {**body, "page_token": token} if token else body)
            yield from answer.get(key, ())
            token = answer.get("next_page_token", "")
            if not token:
                return

    def send(
        self,
        method: str,
        path: str,
        *,
        params: dict[str, Any] | None = None,
        content: Callable[[], Iterable[bytes]] | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        """Send one request to the server and return its answer, which says success.

        A connection that the server closed under the request is tried once more: everything
        that Hermes sends may be repeated.
        """
        import httpx

        for attempt in (1, 2):
            try:
                body = content() if content else None
                response = self._connected().request(
                    method, f"{self.uri}{path}", params=params, content=body, headers=headers
                )
                break
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
                if attempt == 2:
                    raise self._away(error) from error
            except httpx.HTTPError as error:
                raise self._away(error) from error
        self._check(response)
        return response

    def _connected(self) -> httpx.Client:
        if self._client is None or self._pid != os.getpid():
            log_in = os.environ if self._variables is None else self._variables
            self._client = _new_client(self.uri, self._timeout_s, log_in)
            self._pid = os.getpid()
        return self._client

    def _away(self, error: Exception) -> Unavailable:
        fact = f"The MLflow server at {_shown(self.uri)} does not answer"
        return Unavailable(f"{fact} ({type(error).__name__}: {error}). Is it running?")

    def _check(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        code, message = _error_of(response.content)
        where = f"The MLflow server at {_shown(self.uri)}"
        said = f"{response.status_code} {code} {message}".strip()[:1_000]
        if response.status_code in _TRY_AGAIN:
            raise Unavailable(f"{where} cannot answer now: {said}. Try again; see its log.")
        if response.status_code in (401, 403):
            remedy = "Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or _TOKEN)."
            raise Refused(f"{where} does not let us in: {said}. {remedy}", "PERMISSION_DENIED")
        if response.status_code == _MAY_BE_MISSING and not code:
            code = "RESOURCE_DOES_NOT_EXIST"
        raise Refused(f"{where} refused {response.request.url.path}: {said}", code)


def _new_client(uri: str, timeout_s: float, env: Mapping[str, str]) -> httpx.Client:
    import httpx

    token = env.get("MLFLOW_TRACKING_TOKEN")
    user = env.get("MLFLOW_TRACKING_USERNAME")
    auth = (user, env.get("MLFLOW_TRACKING_PASSWORD", "")) if user and not token else None
    is_local = urlsplit(uri).hostname in _LOOPBACK
    return httpx.Client(
        timeout=httpx.Timeout(timeout_s, connect=min(2.0, timeout_s)),
        auth=auth,
        headers={"Authorization": f"Bearer {token}"} if token else None,
        verify=_verification(uri),
        trust_env=not is_local,  # a company proxy is of no use for a server on this machine
    )


def _verification(uri: str) -> ssl.SSLContext | bool:
    """Return httpx's `verify`; the certificates are only loaded for an https address."""
    if not uri.startswith("https"):
        return False  # plain http: nothing to verify, and loading the bundle takes 20 ms
    if os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("true", "1"):
        return False
    bundle = os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH")
    return ssl.create_default_context(cafile=bundle) if bundle else True


def _object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content or b"{}")
    except ValueError as error:
        raise Unavailable("The tracking address answers, but not as an MLflow server.") from error
    return value if isinstance(value, dict) else {}


def _error_of(content: bytes) -> tuple[str, str]:
    try:
        value = json.loads(content)
        return str(value.get("error_code", "")), str(value.get("message", ""))
    except (ValueError, AttributeError):
        return "", content[:200].decode(errors="replace")


def _shown(uri: str) -> str:
    """Return the address without a password."""
    parts = urlsplit(uri)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
