"""Credentials that end, change, fail or hang while a job runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from smckpt.errors import CheckpointError, StorageError
from smckpt.storage.s3.config import StoreOptions
from smckpt.storage.s3.storage import S3Storage
from tests.support.faults.proxy import FaultyProxy, faulty_proxy
from tests.support.limits import seconds
from tests.support.s3 import KEY, SECRET, Server


@pytest.fixture
def proxy(s3_server: Server) -> Iterator[FaultyProxy]:
    with faulty_proxy(s3_server.endpoint) as proxy:
        yield proxy


def through(proxy: FaultyProxy, root: str, **options: Any) -> S3Storage:
    fields = {"endpoint": proxy.endpoint, **options}
    return S3Storage(root, StoreOptions.from_mapping(fields, StoreOptions.from_environment()))


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What profile "job" has for its credential_process; a test writes it."""
    program = tmp_path / "credentials"
    (tmp_path / "config").write_text(f"[profile job]\ncredential_process = {program}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    says(program)
    return program


def says(program: Path, first: str = "") -> None:
    """It does `first`, and tells credentials that botocore fetches anew for each request."""
    soon = (datetime.now(timezone.utc) + timedelta(minutes=2)).isoformat()
    said = {"Version": 1, "AccessKeyId": KEY, "SecretAccessKey": SECRET, "Expiration": soon}
    other = program.with_name("new")
    other.write_text(f"#!/bin/sh\n{first}\ncat <<'END'\n{json.dumps(said)}\nEND\n")
    other.chmod(0o700)
    other.replace(program)


@pytest.mark.parametrize("code", ["400 ExpiredToken", "403 InvalidAccessKeyId"])
def test_credentials_that_end_are_read_anew_from_the_file_that_was_rewritten(
    proxy: FaultyProxy, s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    file = tmp_path / "credentials"
    keys = "[default]\naws_access_key_id = {}\naws_secret_access_key = {}\n"
    file.write_text(keys.format(KEY, SECRET))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = through(proxy, s3_root)
    store.put("first", b"x")
    proxy.spoil("PUT", code)
    store.put("second", b"x")
    assert store.read("second") == b"x"
    file.write_text(keys.format("other", SECRET))
    store.put("third", b"x")  # those at hand hold until they are refused
    proxy.spoil("PUT", code)
    with pytest.raises(StorageError, match="not know the access key"):  # the real server says so
        store.put("fourth", b"x")


def test_a_look_at_an_object_has_no_words_for_its_refusal_and_is_tried_again_all_the_same(
    proxy: FaultyProxy, s3_root: str
) -> None:
    store = through(proxy, s3_root)
    store.put("data", b"xyz")
    proxy.spoil("HEAD", "400 ExpiredToken")
    assert store.size("data") == 3
    proxy.spoil("HEAD", "400 ExpiredToken", 100)
    with pytest.raises(StorageError, match="does not say why.*have expired"):
        store.size("data")
    assert proxy.left >= 96, "botocore asks for the region, too, each time"


def test_a_program_that_fails_for_a_moment_is_asked_again(
    proxy: FaultyProxy, s3_root: str, program: Path, tmp_path: Path
) -> None:
    store = through(proxy, s3_root, profile="job")
    store.put("first", b"x")
    fails_twice = "echo x >> {0}; [ $(wc -l < {0}) -gt 2 ] || exit 1"
    says(program, fails_twice.format(tmp_path / "calls"))
    store.put("second", b"x")
    says(program, "exit 1")
    patient = through(proxy, s3_root, profile="job", retries=1)
    with pytest.raises(StorageError, match="could not get credentials"):
        patient.put("third", b"x")


def test_a_program_that_hangs_is_given_up_and_started_again_by_the_next_request(
    proxy: FaultyProxy, s3_root: str, program: Path, tmp_path: Path
) -> None:
    limit = seconds(1)
    making = max(limit, 5)
    store = through(proxy, s3_root, profile="job", timeout_s=limit)
    store.put("first", b"x")
    lasts = tmp_path / "lasts"
    lasts.touch()
    says(program, f"while [ -e {lasts} ]; do sleep 0.1; done")
    try:
        with pytest.raises(StorageError, match=f"no answer within {limit:g} s.*credential_process"):
            store.put("second", b"x")
        with pytest.raises(
            StorageError, match=f"cannot make a client.*no answer within {making:g} s"
        ):
            store.put("second", b"x")
    finally:
        lasts.unlink()
    store.put("second", b"x")


FACTORY = """
import threading
asked, let_go = threading.Event(), threading.Event()

def hangs(**settings):
    asked.set()
    let_go.wait()
    raise ValueError("it was let go")
"""


@pytest.mark.long
def test_a_function_that_hangs_holds_up_its_own_requests_alone_and_not_for_ever(
    proxy: FaultyProxy, s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    (tmp_path / "hanging_clients.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    sound = through(proxy, s3_root)
    sound.put("first", b"x")
    hung = through(proxy, s3_root, client_factory="hanging_clients:hangs", timeout_s=2.0)
    said: list[BaseException] = []

    def ask(store: S3Storage) -> None:
        try:
            store.put("second", b"x")
        except CheckpointError as error:
            said.append(error)

    def asking(store: S3Storage, count: int = 1) -> list[threading.Thread]:
        threads = [threading.Thread(target=ask, args=(store,)) for _ in range(count)]
        for each in threads:
            each.start()
        return threads

    try:
        threads = asking(hung, 3)
        sound.put("third", b"x")
        assert said == []  # the third file was not held up until those gave up
        for each in threads:
            each.join(seconds(30))
        assert len(said) == 3
        for error in said:
            assert "no answer within 5 s" in str(error) and "client_factory" in str(error)
        # another client waits for its own time, and not for that of the one that is being made
        factory = importlib.import_module("hanging_clients")
        factory.asked.clear()
        hung = through(proxy, s3_root, client_factory="hanging_clients:hangs", timeout_s=300.0)
        (first,) = asking(hung)
        assert factory.asked.wait(seconds(30))
        (second,) = asking(through(proxy, s3_root, timeout_s=3.0))
        second.join(seconds(30))
        assert first.is_alive() and len(said) == 4 and "no answer within 5 s" in str(said[3])
    finally:
        importlib.import_module("hanging_clients").let_go.set()
