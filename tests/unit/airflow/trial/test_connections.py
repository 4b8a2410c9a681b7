from __future__ import annotations

import json
import os
from typing import Any

import pytest
from airflow.sdk import Connection

from hermes_ops.airflow.trial.connections import (
    Connections,
    mlflow_environment,
    storage_environment,
)
from hermes_ops.errors import HermesError
from hermes_ops.trial.environment import InheritanceRule


def connection(**facts: Any) -> Connection:
    return Connection(conn_id="c", **facts)


@pytest.mark.parametrize(
    ("facts", "address"),
    [
        ({"host": "mlflow", "port": 5000}, "http://mlflow:5000"),
        ({"host": "mlflow", "schema": "https"}, "https://mlflow"),
        ({"host": "https://mlflow/base/", "port": 8443}, "https://mlflow:8443/base"),
        ({"host": "http://mlflow:5000", "port": 1}, "http://mlflow:5000"),
    ],
)
def test_an_mlflow_connection_gives_the_servers_address(facts: Any, address: str) -> None:
    found = mlflow_environment(connection(conn_type="http", **facts))
    assert found == {"MLFLOW_TRACKING_URI": address}


def test_a_login_goes_with_its_password_and_a_password_alone_is_a_token() -> None:
    both = mlflow_environment(connection(conn_type="http", host="m", login="me", password="pw"))
    assert (both["MLFLOW_TRACKING_USERNAME"], both["MLFLOW_TRACKING_PASSWORD"]) == ("me", "pw")
    token = mlflow_environment(connection(conn_type="http", host="m", password="pw"))
    assert token == {"MLFLOW_TRACKING_URI": "http://m", "MLFLOW_TRACKING_TOKEN": "pw"}


def test_a_connection_without_a_host_is_refused() -> None:
    with pytest.raises(HermesError, match="has no host"):
        mlflow_environment(connection(conn_type="http"))


def test_an_s3_connection_gives_what_its_clients_read() -> None:
    extra = json.dumps({"endpoint_url": "http://minio:9000", "region_name": "eu"})
    facts = {"conn_type": "aws", "login": "key", "password": "secret", "extra": extra}
    assert storage_environment(connection(**facts)) == {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "eu",
        "AWS_ENDPOINT_URL": "http://minio:9000",
        "MLFLOW_S3_ENDPOINT_URL": "http://minio:9000",
    }


def test_google_and_azure_have_variables_of_their_own_and_other_types_none() -> None:
    google = connection(conn_type="google_cloud_platform", extra='{"key_path": "/k.json"}')
    assert storage_environment(google) == {"GOOGLE_APPLICATION_CREDENTIALS": "/k.json"}
    azure = connection(conn_type="wasb", extra='{"connection_string": "x=y"}')
    assert storage_environment(azure) == {"AZURE_STORAGE_CONNECTION_STRING": "x=y"}
    with pytest.raises(HermesError, match="of the type 'ftp'"):
        storage_environment(connection(conn_type="ftp"))


@pytest.mark.parametrize(
    "facts",
    [
        {"conn_type": "wasb", "login": "account", "password": "key"},
        {"conn_type": "google_cloud_platform", "extra": '{"keyfile_dict": "{}"}'},
        {"conn_type": "aws", "extra": '{"role_arn": "arn:aws:iam::1:role/x"}'},
    ],
)
def test_a_storage_connection_none_of_whose_fields_is_read_is_refused(facts: Any) -> None:
    with pytest.raises(HermesError, match="gives scripts no access"):
        storage_environment(connection(**facts))
    empty = {"conn_type": facts["conn_type"], "extra": '{"num_retries": 5}'}
    assert storage_environment(connection(**empty)) == {}  # access comes with the machine


@pytest.mark.parametrize("host", ["::1", "mlflow:http", "mlflow:99999"])
def test_a_host_of_mlflow_that_is_no_address_is_named(host: str) -> None:
    with pytest.raises(HermesError, match=f"its host '{host}' is not an address"):
        mlflow_environment(connection(conn_type="http", host=host, port=5000))


def test_a_connection_takes_the_place_of_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_OUR_MLFLOW", "http://me:pw@mlflow:5000")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://old")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "old")
    Connections("our_mlflow").enter()
    assert os.environ["MLFLOW_TRACKING_URI"] == "http://mlflow:5000"
    assert os.environ["MLFLOW_TRACKING_PASSWORD"] == "pw"
    assert "MLFLOW_TRACKING_TOKEN" not in os.environ
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.delenv(name)


def test_a_script_inherits_the_variables_of_the_storage_connection_without_being_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_BUCKET", "aws://key:its-secret@")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "HERMES_TRIAL_ENVIRONMENT"):
        monkeypatch.setenv(name, "")
    Connections(storage="bucket").enter()
    found = InheritanceRule.from_environment(os.environ).inherited(os.environ)
    assert (found["AWS_ACCESS_KEY_ID"], found["AWS_SECRET_ACCESS_KEY"]) == ("key", "its-secret")


def test_without_connections_the_environment_stays_and_an_unknown_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = dict(os.environ)
    Connections().enter()
    assert dict(os.environ) == before
    with pytest.raises(HermesError, match="no connection 'nowhere'"):
        Connections("nowhere").enter()
