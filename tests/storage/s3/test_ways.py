"""The ways to a store: TLS that is held against a CA, and HTTP proxies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples import loopback_s3
from smckpt.checkpoint.upkeep.transfer import copy_checkpoint
from smckpt.checkpoint.upkeep.verify import verify_checkpoint
from smckpt.errors import StorageError
from smckpt.storage import access_to
from smckpt.storage.s3.config import StoreOptions
from smckpt.storage.s3.storage import S3Storage
from tests.support.faults.copies import contents
from tests.support.faults.proxy import FaultyProxy, faulty_proxy, secure_proxy
from tests.support.s3 import BUCKET, Server
from tests.support.saves import Group, hybrid, state_of

MIB = 1 << 20
AWAY = "http://store.example:8333"  # a name that no resolver knows


@pytest.fixture
def secure(s3_root: str, s3_server: Server, tmp_path: Path) -> Iterator[FaultyProxy]:
    with secure_proxy(s3_server.endpoint, tmp_path / "ca.pem") as made:
        yield made


@pytest.fixture
def trusted(secure: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.pem"))


@pytest.fixture
def proxy(
    s3_root: str, s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultyProxy]:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with faulty_proxy(s3_server.endpoint) as made:
        yield made


def options(endpoint: str, **fields: Any) -> StoreOptions:
    fields = {"endpoint": endpoint, "chunk_size_MB": 5, **fields}
    return StoreOptions.from_mapping(fields, StoreOptions.from_environment())


def everything(root: str, config: StoreOptions, folder: Path) -> None:
    """A checkpoint is saved, verified, copied; a file goes and comes in parts."""
    access = access_to(root, storage=config)
    state = state_of(hybrid(range(1), 1))
    Group(root, range(1), state=state, access=access).save()  # type: ignore[arg-type]
    assert verify_checkpoint(root, storage=config).ok
    copy_checkpoint(root, str(folder), storage=config)
    assert contents(folder) == contents(access.open(root)) != {}
    store, data = S3Storage(f"{root}/big", config), memoryview(os.urandom(6 * MIB + 1))
    writer = store.create_file("data", len(data))
    for at in range(0, len(data), writer.piece):
        writer.write_at(at, data[at : at + writer.piece])
    writer.finish()
    assert store.read("data", 0, len(data)) == data


# -- TLS -------------------------------------------------------------------------------------------


def test_a_store_behind_tls_is_used_where_its_authority_is_trusted(
    secure: FaultyProxy, trusted: None, s3_root: str, tmp_path: Path
) -> None:
    everything(s3_root, options(secure.endpoint), tmp_path / "copy")
    assert len(secure.seen) > 20


def test_a_certificate_that_nobody_vouches_for_is_told_at_once_and_nothing_is_sent(
    secure: FaultyProxy, s3_root: str
) -> None:
    store = S3Storage(s3_root, options(secure.endpoint, retries=50))
    with pytest.raises(StorageError, match="certificate is not trusted.*AWS_CA_BUNDLE"):
        store.put("data", b"x")
    assert secure.seen == []


@pytest.mark.parametrize("what", ["missing", "no certificate", "another name"])
def test_what_is_wrong_with_certificates_is_told_at_once(
    secure: FaultyProxy,
    trusted: None,
    s3_root: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    endpoint, said = secure.endpoint, "TLS cannot be set up.*AWS_CA_BUNDLE"
    if what == "another name":
        endpoint = endpoint.replace("127.0.0.1", "localhost")
        said = "certificate is not trusted.*localhost.*a host name that the store's certificate has"
    elif what == "missing":
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "none.pem"))
    else:
        (tmp_path / "ca.pem").write_text("nothing of that kind")
    with pytest.raises(StorageError, match=said):
        S3Storage(s3_root, options(endpoint, retries=50)).put("data", b"x")
    assert secure.seen == []


def test_a_port_that_speaks_no_tls_is_told_at_once(s3_root: str, s3_server: Server) -> None:
    plain = s3_server.endpoint.replace("http:", "https:")
    with pytest.raises(StorageError, match="does not speak TLS.*the endpoint"):
        S3Storage(s3_root, options(plain, retries=50)).put("data", b"x")


@pytest.mark.parametrize("fault", ["handshake", "half"])
def test_tls_that_breaks_off_is_begun_again(
    secure: FaultyProxy, trusted: None, s3_root: str, fault: str
) -> None:
    store, data = S3Storage(s3_root, options(secure.endpoint)), os.urandom(MIB)
    if fault == "handshake":
        secure.cut_handshakes = 4
    store.put("data", data)
    if fault == "half":
        secure.spoil("GET", "half")
    assert store.read("data", 0, MIB) == data
    assert (secure.left, secure.cut_handshakes) == (0, 0)


@pytest.mark.parametrize("way", ["PUT", "GET"])
def test_a_body_that_trickles_over_tls_ends_at_the_deadline_of_its_request(
    secure: FaultyProxy, trusted: None, s3_root: str, way: str
) -> None:
    data = os.urandom(16 * MIB)
    S3Storage(s3_root, options(secure.endpoint, chunk_size_MB=64)).put("data", data)
    store = S3Storage(s3_root, options(secure.endpoint, chunk_size_MB=64, timeout_s=0.5))
    secure.spoil(way, "trickle")
    with pytest.raises(StorageError, match=r"within 0\.5 s.*tried 1 times in"):
        store.put("other", data) if way == "PUT" else store.read("data", 0, MIB)
    assert secure.left == 0
    store = S3Storage(s3_root, options(secure.endpoint, chunk_size_MB=64))
    assert store.read("data", 0, MIB) == data[:MIB]


# -- HTTP proxies ----------------------------------------------------------------------------------


def test_a_store_is_reached_through_the_proxy_that_the_environment_names(
    proxy: FaultyProxy, s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy.endpoint)
    # Bodies are signed too: this is plain HTTP to another host.
    config = options(AWAY, retries=3)
    everything(s3_root, config, tmp_path / "copy")
    assert len(proxy.seen) > 20
    assert all(AWAY in line for line in proxy.seen)


def test_the_loopback_server_is_reached_whatever_proxy_the_environment_names(
    s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("no_proxy", "corp.example")
    loopback_s3._wait(s3_server, BUCKET, None, None)  # type: ignore[arg-type]
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    S3Storage(f"s3://{BUCKET}/proxies", StoreOptions.from_environment()).put("data", b"x")
    assert os.environ["no_proxy"] == "corp.example,127.0.0.1"


def test_a_store_behind_tls_is_reached_through_a_tunnel(
    proxy: FaultyProxy,
    secure: FaultyProxy,
    trusted: None,
    s3_root: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy.endpoint)
    store = S3Storage(s3_root, options(secure.endpoint, retries=4))
    proxy.spoil("CONNECT", "before", 4)
    store.put("data", b"x" * MIB)
    assert proxy.left == 0
    assert store.read("data") == b"x" * MIB
    assert {line.partition(" ")[0] for line in proxy.seen} == {"CONNECT"}


@pytest.mark.parametrize("how", ["tunnel", "answer", "away"])
def test_a_proxy_that_refuses_is_told_at_once_and_one_that_is_away_is_tried_again(
    proxy: FaultyProxy, s3_root: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    endpoint, said = AWAY, "the HTTP proxy refuses.*HTTP_PROXY"
    monkeypatch.setenv("HTTP_PROXY", proxy.endpoint)
    if how == "tunnel":
        monkeypatch.setenv("HTTPS_PROXY", proxy.endpoint)
        proxy.spoil("CONNECT", "407", 100)
        endpoint = AWAY.replace("http:", "https:")
    elif how == "answer":
        proxy.spoil("PUT", "407 ProxyAuthenticationRequired", 100)
    else:  # nothing listens there
        said = "the HTTP proxy cannot be reached.*tried 2 times.*NO_PROXY"
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    store = S3Storage(s3_root, options(endpoint, retries=1, read_timeout_s=51 + len(how)))
    with pytest.raises(StorageError, match=said):
        store.put("data", b"x")
    assert len(proxy.seen) <= 1


@pytest.mark.parametrize(
    ("endpoint", "signed"),
    [("http://store.example:80", True), ("https://store.example", False), (None, False)],
)
def test_bodies_are_signed_on_plain_http_to_other_hosts_wherever_the_endpoint_is_named(
    s3_root: str, monkeypatch: pytest.MonkeyPatch, endpoint: str | None, signed: bool
) -> None:
    monkeypatch.delenv("SMCKPT_S3_ENDPOINT")
    if endpoint is not None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    config = StoreOptions(region="eu-west-1", read_timeout_s=71 + len(str(endpoint)))
    client = S3Storage(s3_root, config).run("look", s3_root, lambda client: client)
    assert client.meta.config.s3["payload_signing_enabled"] is signed


@pytest.mark.parametrize(
    ("style", "place"),
    [("", f"{AWAY}/bucket"), ("virtual", AWAY.replace("//", "//bucket.")), ("path", "")],
)
def test_how_the_bucket_is_named_is_what_the_users_aws_settings_say(
    s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, style: str, place: str
) -> None:
    (tmp_path / "config").write_text(f"[default]\ns3 =\n  addressing_style = {style or 'auto'}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    if not place:  # of AWS itself
        monkeypatch.delenv("SMCKPT_S3_ENDPOINT")
        place = "https://s3.eu-west-1.amazonaws.com/bucket"
        config = StoreOptions(region="eu-west-1", read_timeout_s=81)
    else:
        config = options(AWAY, read_timeout_s=82 + len(style))
    client = S3Storage(s3_root, config).run("look", s3_root, lambda client: client)
    named = {"Bucket": "bucket", "Key": "key"}
    assert client.generate_presigned_url("get_object", named).startswith(f"{place}/key?")
