"""Secrets of the environment stay out of what is passed on."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.trial.redaction import Mask, looks_secret, secret_values


@pytest.mark.parametrize(
    "name",
    [
        *("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password", "githubToken"),
        *("GITHUBTOKEN", "MYSQL_PWD", "SSH_PASSPHRASE", "apikey", "STRIPE_KEYS", "GITLAB_PAT"),
    ],
)
def test_names_that_say_secret_are_secret(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "TOKENIZERS_PARALLELISM",
        "KEYBOARD",
        "MONKEY",
        "PWD",
        "OLDPWD",
        "TOKEN_FILE",
        "KEY_PATH",
        "HERMES_PARAM_KEY",
        "COMPASS",
        "HOME",
    ],
)
def test_other_names_are_not(name: str) -> None:
    assert not looks_secret(name)


def test_values_are_secret_by_name_by_list_and_as_passwords_in_addresses(tmp_path: Path) -> None:
    (tmp_path / "key").touch()
    values = secret_values(
        {
            "API_KEY": "abcdefgh",
            "PLAIN": "listed",
            "HOME": "/home/someone",
            "HERMES_SECRETS": "PLAIN,ABSENT",
            "URI": "https://user:open:sesame@host/path",
            "SSH_KEY": str(tmp_path / "key"),
            "USE_TOKEN": "false",
            "TOKEN": "abc",
            "PRIVATE_KEY": "-----BEGIN KEY-----\nfirst line\nsecond line\n-----END KEY-----\n",
        }
    )
    assert set(values) == {"abcdefgh", "listed", "open:sesame", "first line", "second line"}


def test_the_longest_of_the_secrets_at_a_place_is_masked() -> None:
    mask = Mask(["abc", "abcdef", "x+y"])
    assert mask.text("abcdef abcde x+y xxy") == "*** ***de *** xxy"
    assert Mask().text("abc") == "abc"


def test_a_line_waits_for_nothing() -> None:
    stream = Mask(["abc"]).stream()
    assert stream.feed(b"of ab") == b"of "
    assert stream.feed(b"b\n") == b"abb\n"


secrets = st.lists(st.text("ab.", min_size=1, max_size=5), max_size=4)


@settings(deadline=None, max_examples=60)
@given(secrets, st.lists(st.text("ab.c", max_size=6)))
def test_a_stream_is_masked_as_a_whole_however_it_is_cut(
    values: list[str], pieces: list[str]
) -> None:
    mask = Mask(values)
    stream = mask.stream()
    masked = b"".join(stream.feed(piece.encode()) for piece in pieces) + stream.close()
    assert masked.decode() == mask.text("".join(pieces))
