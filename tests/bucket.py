"""A bucket of a server that speaks S3 by HTTP and refuses whoever has not the right keys."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import boto3
import fsspec
import s3fs
from moto import settings
from moto.server import ThreadedMotoServer

LOOPBACK = "127.0.0.1"
_MAY_ALL = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}],
}


@dataclass
class Bucket:
    """Where it is, and the keys that open it; `host` is how its clients reach this machine."""

    server: ThreadedMotoServer
    address: str
    host: str
    port: int
    key: str
    secret: str
    url: str

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a client."""
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def files(self) -> Any:
        """Its file system, as it is now, for who asks from here."""
        s3fs.S3FileSystem.clear_instance_cache()
        here = f"http://{LOOPBACK}:{self.port}"
        return fsspec.filesystem("s3", key=self.key, secret=self.secret, endpoint_url=here)

    def held(self, folder: str) -> list[str]:
        """The names of all that lies below a folder of `url`, as seen from there."""
        files, place = self.files(), f"{self.url.removeprefix('s3://')}/{folder}/"
        return [str(path).removeprefix(place) for path in files.find(place)]

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Nobody listens there for a while; what it holds is kept."""
        self.server.stop()
        try:
            yield
        finally:
            self.server = _listening(self.address, self.port)


@contextlib.contextmanager
def bucket(host: str = LOOPBACK) -> Iterator[Bucket]:
    """A bucket that ends with the block; with another `host` it listens on every address."""
    address = LOOPBACK if host == LOOPBACK else "0.0.0.0"
    server = _listening(address, 0)
    port = server.get_host_and_port()[1]
    keys = {"aws_access_key_id": "first", "aws_secret_access_key": "first"}
    place = {"endpoint_url": f"http://{LOOPBACK}:{port}", "region_name": "us-east-1"}
    settings.INITIAL_NO_AUTH_ACTION_COUNT = float("inf")
    people, name = boto3.client("iam", **keys, **place), f"checkpoints-{uuid.uuid4().hex[:8]}"
    people.create_user(UserName=name)
    people.put_user_policy(UserName=name, PolicyName="all", PolicyDocument=json.dumps(_MAY_ALL))
    made = people.create_access_key(UserName=name)["AccessKey"]
    boto3.client("s3", **keys, **place).create_bucket(Bucket=name)
    settings.INITIAL_NO_AUTH_ACTION_COUNT = 0  # from now on each request must be signed
    opened = made["AccessKeyId"], made["SecretAccessKey"]
    found = Bucket(server, address, host, port, *opened, f"s3://{name}/prefix")
    try:
        yield found
    finally:
        found.server.stop()


def _listening(address: str, port: int) -> ThreadedMotoServer:
    server = ThreadedMotoServer(ip_address=address, port=port, verbose=False)
    server.start()
    return server
