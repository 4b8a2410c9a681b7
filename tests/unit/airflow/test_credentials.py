"""Log-in to Airflow: a user and password, or a token, which may expire and be written anew."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from hermes_ops.airflow.client import AirflowClient
from hermes_ops.airflow.credentials import AirflowCredentials, LogInRefused, claims, expiry_s
from hermes_ops.errors import HermesError, Unavailable

URL = "http://airflow"
VARIABLES = ("URL", "USER", "PASSWORD_FILE", "TOKEN", "TOKEN_FILE")
Handler = Callable[[httpx.Request], httpx.Response]


def token(**content: object) -> str:
    """A JSON web token without a signature."""
    body = base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")
    return f"h.{body}.s"


def client_of(credentials: AirflowCredentials, handler: Handler) -> AirflowClient:
    client = AirflowClient(credentials, sleep=lambda _: None)
    client._http = httpx.Client(base_url=credentials.url, transport=httpx.MockTransport(handler))
    return client


class Airflow:
    """Takes one token, and knows no `/auth/token`."""

    def __init__(self, valid: str, refusal: tuple[int, str] = (401, "Token Expired")) -> None:
        self.valid = valid
        self.refusal = refusal
        self.used: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.used.append(request.headers.get("authorization", ""))
        if self.used[-1] != f"Bearer {self.valid}":
            return httpx.Response(self.refusal[0], json={"detail": self.refusal[1]})
        return httpx.Response(200, json={"dag_id": "d"})


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AirflowCredentials]:
    def credentials(**values: str) -> AirflowCredentials:
        for name in VARIABLES:
            monkeypatch.delenv(f"HERMES_AIRFLOW_{name}", raising=False)
        for name, value in values.items():
            monkeypatch.setenv(f"HERMES_AIRFLOW_{name}", value)
        return AirflowCredentials.from_environment()

    return credentials


def test_a_token_goes_before_a_user_and_its_file_before_a_token(
    environment: Callable[..., AirflowCredentials], tmp_path: Path
) -> None:
    user = {"URL": URL, "USER": "me", "PASSWORD_FILE": "p"}
    assert not environment(**user).has_token
    assert environment(**user, TOKEN="t").current_token() == "t"
    file = tmp_path / "token"
    file.write_text(" u\n")
    assert environment(**user, TOKEN="t", TOKEN_FILE=str(file)).current_token() == "u"
    assert environment(**user, TOKEN="", TOKEN_FILE="") == AirflowCredentials(URL, "me", Path("p"))


def test_a_token_needs_no_user(environment: Callable[..., AirflowCredentials]) -> None:
    assert environment(URL=URL, TOKEN="t") == AirflowCredentials(URL, token="t")


@pytest.mark.parametrize("missing", ["URL", "USER", "PASSWORD_FILE"])
def test_what_is_missing_is_named(
    environment: Callable[..., AirflowCredentials], missing: str
) -> None:
    user = {"URL": URL, "USER": "me", "PASSWORD_FILE": "p"}
    del user[missing]
    with pytest.raises(HermesError, match=f"^HERMES_AIRFLOW_{missing} is not set: set it"):
        environment(**user)


def test_a_token_is_shown_nowhere() -> None:
    assert "secret" not in repr(AirflowCredentials(URL, token="secret"))


def test_a_token_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one")
    airflow = Airflow("one")
    client = client_of(AirflowCredentials(URL, token_file=file), airflow)
    client.dag("d")
    airflow.valid = "two"
    file.write_text("two")
    client.dag("d")
    assert airflow.used == ["Bearer one", "Bearer two"]


def test_a_token_that_is_written_anew_during_a_request_is_used(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one")
    airflow = Airflow("two")

    def renew(request: httpx.Request) -> httpx.Response:
        file.write_text("two")
        return airflow(request)

    assert client_of(AirflowCredentials(URL, token_file=file), renew).dag("d") == {"dag_id": "d"}
    assert airflow.used == ["Bearer one", "Bearer two"]


def test_a_token_that_has_expired_is_said_with_its_time_and_place(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(token(exp=0))
    with pytest.raises(LogInRefused) as refused:
        client_of(AirflowCredentials(URL, token_file=file), Airflow("another")).dag("d")
    text = str(refused.value)
    assert f"the token of {file} is refused: it expired at 1970-01-01 00:00:00 UTC." in text
    assert "write a new one into that file" in text
    assert file.read_text() not in text


def test_a_token_that_is_refused_for_another_reason_is_not_called_expired() -> None:
    own = AirflowCredentials(URL, token=token(exp=32_503_680_000))
    airflow = Airflow("another", (403, "Invalid JWT token"))
    with pytest.raises(LogInRefused, match="HERMES_AIRFLOW_TOKEN is refused: Airflow does not"):
        client_of(own, airflow).dag("d")
    assert len(airflow.used) == 1


@pytest.mark.parametrize("text", ["", "\n", "two words", "line\nline", "ü"])
def test_a_file_without_a_token_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(LogInRefused, match=f"{file} holds no token"):
        AirflowCredentials(URL, token_file=file).current_token()


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LogInRefused, match="cannot be read"):
        AirflowCredentials(URL, token_file=tmp_path / "none").current_token()


@pytest.mark.parametrize("text", ["", "abc", "a.b.c", "a.!!.c", token()])
def test_a_token_that_says_nothing_has_no_expiry(text: str) -> None:
    assert expiry_s(text) is None
    assert claims(text) == {}


def test_a_right_that_is_missing_is_no_refused_token() -> None:
    airflow = Airflow("another", (403, "Forbidden"))
    with pytest.raises(HermesError, match=r"\(403\): Forbidden") as refused:
        client_of(AirflowCredentials(URL, token="t"), airflow).dag("d")
    assert not isinstance(refused.value, LogInRefused)


def test_the_name_of_a_token_is_asked_of_airflow() -> None:
    answer = httpx.Response(200, json={"id": "7", "username": "anna"})
    assert client_of(AirflowCredentials(URL, token="t"), lambda _: answer).user_name() == "anna"


# -- a user and a password -----------------------------------------------------------------------


def password(folder: Path, text: str = "hidden") -> AirflowCredentials:
    file = folder / "password"
    file.write_text(text)
    return AirflowCredentials(URL, "anna", file)


def test_a_wrong_password_is_said_with_its_file(tmp_path: Path) -> None:
    own = password(tmp_path)
    with pytest.raises(LogInRefused, match="refuses the log-in of 'anna'") as refused:
        client_of(own, lambda _: httpx.Response(401, text="Invalid credentials")).dag("d")
    assert str(own.password_file) in str(refused.value)
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize("code", [302, 404, 405, 422])
def test_an_auth_manager_without_passwords_is_said_with_the_way(code: int, tmp_path: Path) -> None:
    with pytest.raises(LogInRefused, match=f"{code} at /auth/token.*HERMES_AIRFLOW_TOKEN_FILE"):
        client_of(password(tmp_path), lambda _: httpx.Response(code)).dag("d")


def test_a_refused_log_in_fails_no_trial() -> None:
    """As `Unavailable` it delays a round; any other error is counted against single trials."""
    assert issubclass(LogInRefused, Unavailable)


def test_a_start_with_a_refused_token_is_not_tried_again_and_again() -> None:
    airflow = Airflow("another")
    with pytest.raises(LogInRefused):
        client_of(AirflowCredentials(URL, token="t"), airflow).trigger("d", "r", {})
    assert len(airflow.used) == 1


@pytest.mark.parametrize(
    "refusal", [(401, "Token Expired"), (403, "Invalid JWT token")], ids=["expired", "new key"]
)
def test_a_token_that_holds_no_more_is_asked_for_again(
    refusal: tuple[int, str], tmp_path: Path
) -> None:
    """The API server signs with another key after a restart, unless `jwt_secret` is set."""
    valid, log_ins = ["one"], []

    def airflow(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/auth/token":
            log_ins.append(valid[0])
            return httpx.Response(201, json={"access_token": valid[0]})
        if request.headers["authorization"] != f"Bearer {valid[0]}":
            return httpx.Response(refusal[0], json={"detail": refusal[1]})
        return httpx.Response(200, json={"dag_id": "d"})

    client = client_of(password(tmp_path), airflow)
    client.dag("d")
    valid[0] = "two"
    assert client.dag("d") == {"dag_id": "d"}
    assert log_ins == ["one", "two"]
