"""A client of an MLflow tracking server's REST API: short timeouts, our errors, MLflow's limits.

The limits are those of names of metrics and params, of filter strings and of the length of tags.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from hermes_ops.error_message import keep_bodies_out_of_logs, response_message
from hermes_ops.errors import Refused, Unavailable, Unsupported

if TYPE_CHECKING:
    import httpx

Json = Mapping[str, Any]
T = TypeVar("T")
_ATTEMPTS = 2
_TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
_MAY_BE_MISSING = 404
_ARTIFACTS = "/mlflow-artifacts/"  # of these alone MLflow answers 404 without its code
MISSING, EXISTS = "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"
"""MLflow's codes of errors."""
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class RestClient:
    """Requests to one tracking server; safe in threads, and in a child after fork.

    Log-in and TLS follow MLflow's own variables (MLFLOW_TRACKING_USERNAME, _PASSWORD, _TOKEN,
    _INSECURE_TLS, _SERVER_CERT_PATH); `variables` replace this process's log-in. Raise Unavailable
    when the server does not answer in time or answers that it cannot now, Refused when it refuses,
    Unsupported for a URL that is not http or https.
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

    def get_pages(self, path: str, query: Json, key: str) -> Iterator[dict[str, Any]]:
        """Yield the entries of every page that GET returns."""
        return _entries(lambda page: self.get(path, page), query, key)

    def post_pages(self, path: str, body: Json, key: str) -> Iterator[dict[str, Any]]:
        """Yield the entries of every page that POST returns."""
        return _entries(lambda page: self.post(path, page), body, key)

    def send(
        self,
        method: str,
        path: str,
        *,
        params: dict[str, Any] | None = None,
        content: Callable[[], Iterable[bytes]] | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        """Send one request to the server and return its successful response.

        If the server closes the connection, the request is sent again: every request of Hermes is
        safe to repeat.
        """

        def ask(client: httpx.Client) -> httpx.Response:
            body = content() if content else None
            return client.request(
                method, f"{self.uri}{path}", params=params, content=body, headers=headers
            )

        response = self._tried(ask)
        self._check(response)
        return response

    def read(self, path: str, most_bytes: int) -> bytes:
        """GET a path and return its content; Refused as soon as it has more than `most_bytes`."""

        def ask(client: httpx.Client) -> bytes:
            with client.stream("GET", f"{self.uri}{path}") as response:
                if not response.is_success:
                    response.read()
                self._check(response)
                return self._within(response, most_bytes)

        return self._tried(ask)

    def _within(self, response: httpx.Response, most_bytes: int) -> bytes:
        content = bytearray()
        for block in response.iter_bytes():
            content += block
            if len(content) > most_bytes:
                place = f"{response.request.url.path} of the MLflow server at {_shown(self.uri)}"
                raise Refused(f"{place} is not read: it has more than {most_bytes:,} bytes.")
        return bytes(content)

    def _tried(self, ask: Callable[[httpx.Client], T]) -> T:
        """Return the answer to a request, which is made again if the connection is closed."""
        import httpx

        attempt = 0
        while True:
            attempt += 1
            try:
                return ask(self._connected())
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
                if attempt == _ATTEMPTS:
                    raise self._away(error) from error
            except httpx.HTTPError as error:
                raise self._away(error) from error

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
        code, message = _error_of(response)
        where = f"The MLflow server at {_shown(self.uri)}"
        answer = f"{response.status_code} {code} {message}".strip()[:1_000]
        if response.status_code in _TRY_AGAIN:
            raise Unavailable(f"{where} cannot answer now: {answer}. Try again; see its log.")
        if response.status_code in (401, 403):
            remedy = "Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or _TOKEN)."
            raise Refused(f"{where} does not let us in: {answer}. {remedy}", "PERMISSION_DENIED")
        path = response.request.url.path
        if response.status_code == _MAY_BE_MISSING and not code and _ARTIFACTS in path:
            code = MISSING
        raise Refused(f"{where} refused {path}: {answer}", code)


def _entries(fetch: Callable[[Json], Json], request: Json, key: str) -> Iterator[dict[str, Any]]:
    page = request
    while True:
        answer = fetch(page)
        yield from answer.get(key, ())
        if not (token := answer.get("next_page_token", "")):
            return
        page = {**request, "page_token": token}


def _new_client(uri: str, timeout_s: float, env: Mapping[str, str]) -> httpx.Client:
    import httpx

    keep_bodies_out_of_logs()
    token = env.get("MLFLOW_TRACKING_TOKEN")
    user = env.get("MLFLOW_TRACKING_USERNAME")
    auth = (user, env.get("MLFLOW_TRACKING_PASSWORD", "")) if user and not token else None
    is_local = urlsplit(uri).hostname in _LOOPBACK
    return httpx.Client(
        timeout=httpx.Timeout(timeout_s, connect=min(2.0, timeout_s)),
        auth=auth,
        headers={"Authorization": f"Bearer {token}"} if token else None,
        verify=_verification(uri),
        trust_env=not is_local,  # no company proxy for a server on this machine
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
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Unavailable("The tracking address answers, but not as an MLflow server.")
    return value


def _error_of(response: httpx.Response) -> tuple[str, str]:
    """Return the code and message of an error; of an error that is not MLflow's, one line."""
    try:
        value = json.loads(response.content)
        return str(value.get("error_code", "")), str(value.get("message", ""))
    except (ValueError, AttributeError):
        return "", response_message(response.content) or response.reason_phrase


def _shown(uri: str) -> str:
    """Return the address without a password."""
    parts = urlsplit(uri)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


_ILLEGAL = re.compile(r"[^/\w.\- :]")
_NAME_LENGTH = 250
_BATCH = 100  # params or tags in one request, MLflow's limit
_BATCH_BYTES = 900_000  # of JSON; MLflow's limit is a million
_CHUNK_LENGTH = 7_900  # MLflow's limit for the value of a tag is 8,000 characters


def legal_name(name: str) -> str:
    """Return the name under which MLflow keeps a metric or param called `name`.

    Letters, digits, `_ - . : /` and the space are legal, a path must be normal (`a//b` is not), and
    250 characters at most. A legal name is kept. In any other, each illegal character becomes `_`,
    and six hexadecimal digits of the SHA-1 of the whole name follow, so that two names stay two:
    `top1%` becomes `top1_-84dadc`.
    """
    if not _ILLEGAL.search(name) and len(name) <= _NAME_LENGTH and _is_normal_path(name):
        return name
    digest = hashlib.sha1(name.encode(errors="surrogatepass"), usedforsecurity=False)
    clean = _ILLEGAL.sub("_", name).replace("/", "_").strip(".") or "_"
    return f"{clean[: _NAME_LENGTH - 7]}-{digest.hexdigest()[:6]}"


def _is_normal_path(name: str) -> bool:
    if name in ("", ".") or name.startswith(("..", "/")):
        return False
    return posixpath.normpath(name) == name


def quoted(value: str) -> str:
    """Return `value` as a string literal of MLflow's filter language; Refused if it has none."""
    for quote in ("'", '"'):
        if quote not in value and "\\" not in value:
            return f"{quote}{value}{quote}"
    raise Refused(
        f"{value!r} cannot stand in an MLflow filter: it has both kinds of quotes or a backslash. "
        "Start the sweep under another run id."
    )


def tag_filter(tags: Mapping[str, str]) -> str:
    """Return the filter that finds the runs that carry all these tags."""
    return " and ".join(f"tags.`{key}` = {quoted(value)}" for key, value in tags.items())


def chunked_tag(key: str, value: str) -> dict[str, str]:
    """Split a long JSON text over the tags `key`, `key.1`, ...; `joined_json` undoes it."""
    parts = [value[i : i + _CHUNK_LENGTH] for i in range(0, len(value), _CHUNK_LENGTH)]
    return {f"{key}.{i}" if i else key: part for i, part in enumerate(parts)}


def joined_json(key: str, tags: Mapping[str, str]) -> Any:  # noqa: ANN401 - whatever JSON holds
    """Return the JSON value that `chunked_tag` split; None when there is none, or a broken one."""
    parts = [tags.get(key, "")]
    while part := tags.get(f"{key}.{len(parts)}", ""):
        parts.append(part)
    text = "".join(parts)
    # Parts of an older, longer text may follow: the value ends where its JSON ends.
    try:
        return json.JSONDecoder().raw_decode(text)[0] if text else None
    except (ValueError, RecursionError):  # somebody has edited it
        return None


def in_batches(entries: Sequence[Mapping[str, str]]) -> Iterator[list[Mapping[str, str]]]:
    """Yield params or tags in batches within MLflow's limits of one request."""
    batch: list[Mapping[str, str]] = []
    size_bytes = 0
    for entry in entries:
        entry_bytes = len(json.dumps(entry))
        if batch and (len(batch) == _BATCH or size_bytes + entry_bytes > _BATCH_BYTES):
            yield batch
            batch, size_bytes = [], 0
        batch.append(entry)
        size_bytes += entry_bytes
    if batch:
        yield batch
