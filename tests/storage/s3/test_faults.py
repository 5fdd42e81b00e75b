"""S3 behind a proxy that spoils requests: what passes is tried again, what does not is told."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import botocore.auth
import pytest

from smckpt.checkpoint.reading.committed import open_catalogue
from smckpt.errors import CorruptCheckpointError, StorageError
from smckpt.storage import open_storage
from smckpt.storage.s3 import storage as s3
from smckpt.storage.s3.config import StoreOptions
from smckpt.storage.s3.storage import S3Storage
from tests.support.faults.proxy import FaultyProxy, faulty_proxy
from tests.support.limits import seconds
from tests.support.s3 import KEY, SECRET, Server

MIB = 1 << 20
SEVERAL = 4  # faults, one after the other


@pytest.fixture
def proxy(s3_root: str, s3_server: Server) -> Iterator[FaultyProxy]:
    with faulty_proxy(s3_server.endpoint) as made:
        yield made


def through(proxy: FaultyProxy, url: str, **options: Any) -> S3Storage:
    fields = {"endpoint": proxy.endpoint, "chunk_size_MB": 5, **options}
    return S3Storage(url, StoreOptions.from_mapping(fields, StoreOptions.from_environment()))


def write(store: S3Storage, name: str, data: bytes) -> None:
    writer = store.create_file(name, len(data))
    view = memoryview(data)
    for at in range(0, len(data), writer.piece):
        writer.write_at(at, view[at : at + writer.piece])
    writer.finish()


@pytest.mark.parametrize("fault", ["503", "500", "before", "after", "wrong"])
def test_parts_that_fail_in_passing_are_sent_again_from_their_first_byte(
    proxy: FaultyProxy, s3_root: str, fault: str
) -> None:
    store, data = through(proxy, s3_root), os.urandom(6 * MIB)
    proxy.spoil("PUT", fault, SEVERAL, path="partNumber=1")
    write(store, "data", data)
    assert proxy.left == 0
    assert store.read("data", 0, len(data)) == data


@pytest.mark.parametrize("fault", ["503", "after"])
def test_an_upload_is_completed_once_though_the_answer_is_lost(
    proxy: FaultyProxy, s3_root: str, fault: str
) -> None:
    store, data = through(proxy, s3_root), os.urandom(6 * MIB)
    proxy.spoil("POST", fault, SEVERAL, path="uploadId=")
    write(store, "data", data)
    assert proxy.left == 0
    assert store.read("data", 0, len(data)) == data


@pytest.mark.parametrize(("times", "checksum"), [(1, "none"), (SEVERAL, "crc64nvme")])
def test_who_created_a_name_hears_so_though_the_answer_is_lost(
    proxy: FaultyProxy, s3_root: str, times: int, checksum: str
) -> None:
    store = through(proxy, s3_root, checksum=checksum)
    proxy.spoil("PUT", "after", times)
    assert store.put_exclusive("manifest", b"ours") is True
    assert proxy.left == 0
    assert store.put_exclusive("manifest", b"late") is False


@pytest.mark.parametrize("fault", ["503", "before", "half"])
def test_reads_that_break_off_are_done_again(proxy: FaultyProxy, s3_root: str, fault: str) -> None:
    store, data = through(proxy, s3_root), os.urandom(3 * MIB)
    store.put("data", data)
    proxy.spoil("GET", fault, SEVERAL)
    assert store.read("data", 0, len(data)) == data
    proxy.spoil("GET", fault, SEVERAL)
    assert store.read("data") == data
    assert proxy.left == 0


def test_a_read_that_breaks_off_goes_on_where_it_ended_and_shows_each_byte_once(
    proxy: FaultyProxy, s3_root: str
) -> None:
    store, data = through(proxy, s3_root), os.urandom(4 * MIB)
    store.put("data", data)
    target, shown = bytearray(len(data)), []
    proxy.spoil("GET", "half", 2)
    store.read_into("data", 0, [memoryview(target)], lambda stretch: shown.append(bytes(stretch)))
    assert target == data == b"".join(shown)
    starts = [int(asked.removeprefix("bytes=").partition("-")[0]) for asked in proxy.ranges]
    assert starts == [0, 2 * MIB, 3 * MIB]


def test_a_store_that_stays_overloaded_is_reported_with_what_was_tried(
    proxy: FaultyProxy, s3_root: str
) -> None:
    store = through(proxy, s3_root, retries=1)
    proxy.spoil("PUT", "503", 1000)
    with pytest.raises(StorageError, match=r"SlowDown.*tried 2 times in"):
        store.put("data", b"x")


def test_the_deadline_ends_the_tries(proxy: FaultyProxy, s3_root: str) -> None:
    store = through(proxy, s3_root, retries=1000, timeout_s=1)
    proxy.spoil("PUT", "500", 1000)
    with pytest.raises(StorageError, match=r"tried \d+ times in"):
        store.put("data", b"x")


def test_an_answer_that_is_not_the_range_that_was_asked_for_is_not_taken_for_it(
    proxy: FaultyProxy, s3_root: str
) -> None:
    store, data = through(proxy, s3_root, retries=1), os.urandom(1000)
    store.put("data", data)
    proxy.spoil("GET", "whole")
    assert store.read("data", 10, 90) == data[10:100]
    proxy.spoil("GET", "whole", 2)
    with pytest.raises(StorageError, match="not the requested range.*tried 2 times"):
        store.read("data", 10, 90)


def test_what_fails_in_one_of_several_ranges_is_told_when_no_other_writes_into_the_memory(
    proxy: FaultyProxy, s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_READ", MIB)
    store, data = through(proxy, s3_root), os.urandom(4 * MIB)
    store.put("data", data)
    proxy.spoil("GET", "403 AccessDenied")
    proxy.spoil("GET", "late 1", 3)
    target = bytearray(len(data))
    with pytest.raises(StorageError, match="access denied"):
        store.read_into("data", 0, [memoryview(target)])
    then = bytes(target)
    proxy.ended.wait(1.5)
    assert target == then


def test_answers_of_gateways_are_tried_again(proxy: FaultyProxy, s3_root: str) -> None:
    for fault in ("408 RequestTimeTooLong", "520 Unknown"):  # botocore gives them up at once
        proxy.spoil("PUT", fault)
    through(proxy, s3_root).put("data", b"x")
    assert proxy.left == 0


def test_a_store_that_tells_of_a_missing_object_at_its_deletion_is_understood(
    proxy: FaultyProxy, s3_root: str
) -> None:
    store = through(proxy, s3_root)
    proxy.spoil("DELETE", "404 NoSuchKey")
    store.delete("nothing")
    proxy.spoil("DELETE", "404 NoSuchBucket")
    with pytest.raises(StorageError, match="no such bucket"):
        store.delete("nothing")


def test_a_page_is_not_taken_for_the_deletion_of_an_object(
    proxy: FaultyProxy, s3_root: str
) -> None:
    store = through(proxy, s3_root)
    store.put("a", b"x")
    proxy.spoil("DELETE", "page")
    store.delete("a")
    assert proxy.left == 0 and store.list() == []


MANY = [f"data-{n:04d}" for n in range(1203)]  # of more than one request


def some_of(store: S3Storage) -> None:
    """The first, the last and one in the second batch are there; the others are no error."""
    for name in (MANY[0], MANY[1001], MANY[-1], "kept"):
        store.put(name, b"x")


def sent(proxy: FaultyProxy) -> list[str]:
    return [line for line in proxy.seen if line.startswith("DELETE") or "?delete" in line]


def test_objects_are_deleted_a_thousand_at_a_time(proxy: FaultyProxy, s3_root: str) -> None:
    store = through(proxy, s3_root)
    some_of(store)
    store.delete_many(MANY)
    assert [info.name for info in store.list()] == ["kept"]
    assert len(sent(proxy)) == 2


_REFUSED = "<Error><Key>k</Key><Code>{}</Code><Message>m</Message></Error>"


@pytest.mark.parametrize(
    "fault",
    ["503", "after", "says </DeleteResult> => " + _REFUSED.format("SlowDown") + "</DeleteResult>"],
)
def test_a_batch_that_fails_in_passing_is_sent_again(
    proxy: FaultyProxy, s3_root: str, fault: str
) -> None:
    store = through(proxy, s3_root)
    some_of(store)
    proxy.spoil("POST", fault, path="?delete")
    store.delete_many(MANY)
    assert [info.name for info in store.list()] == ["kept"]
    assert proxy.left == 0 and len(sent(proxy)) == 3


@pytest.mark.parametrize(
    "fault",
    [
        "501 NotImplemented",
        "400 InvalidRequest",
        "page",
        "says </DeleteResult> => " + _REFUSED.format("AccessDenied") + "</DeleteResult>",
    ],
)
def test_a_store_that_refuses_a_batch_is_asked_for_one_object_after_the_other(
    proxy: FaultyProxy, s3_root: str, fault: str
) -> None:
    store, few = through(proxy, s3_root), ["a", "b", "c"]
    for name in few:
        store.put(name, b"x")
    proxy.spoil("POST", fault, path="?delete")
    proxy.spoil("DELETE", "403 AccessDenied")
    with pytest.raises(StorageError, match="access denied"):
        store.delete_many(few)
    proxy.spoil("POST", fault, path="?delete")
    store.delete_many(few)
    assert store.list() == [] and proxy.left == 0


# -- time -----------------------------------------------------------------------------------------


def test_a_slow_answer_is_waited_for_and_one_that_is_too_slow_is_asked_for_again(
    proxy: FaultyProxy, s3_root: str
) -> None:
    store = through(proxy, s3_root, read_timeout_s=seconds(0.5))
    proxy.spoil("PUT", "late 0.2")
    store.put("slow", b"x" * 1000)
    assert len(proxy.seen) == 1
    proxy.spoil("PUT", f"late {seconds(2)}")
    store.put("too slow", b"y" * 1000)
    assert len(proxy.seen) > 2
    assert store.read("slow") + store.read("too slow") == b"x" * 1000 + b"y" * 1000
    proxy.spoil("GET", "late 5", 100)
    with pytest.raises(StorageError, match=r"ReadTimeoutError.*tried 2 times"):
        through(proxy, s3_root, read_timeout_s=0.1, retries=1).read("slow")


def test_a_body_that_trickles_either_way_ends_at_the_deadline_of_its_request(
    proxy: FaultyProxy, s3_root: str
) -> None:
    data = os.urandom(16 * MIB)
    whole = through(proxy, s3_root, chunk_size_MB=64)
    whole.put("data", data)
    store = through(proxy, s3_root, chunk_size_MB=64, timeout_s=0.5)
    proxy.spoil("PUT", "trickle")
    with pytest.raises(StorageError, match=r"body was not sent within 0\.5 s.*tried 1 times in"):
        store.put("data", data)
    proxy.spoil("GET", "trickle")
    with pytest.raises(StorageError, match=r"did not arrive within 0\.5 s.*tried 1 times in"):
        store.read("data", 0, MIB)
    assert proxy.left == 0
    store = through(proxy, s3_root, chunk_size_MB=64)  # that limit is none for a busy machine
    assert store.read("data", 0, MIB) == data[:MIB]


def test_a_server_that_is_paused_is_waited_for_and_everything_is_written_once(
    proxy: FaultyProxy, s3_root: str, s3_server: Server
) -> None:
    store, data = through(proxy, s3_root, read_timeout_s=seconds(0.5)), os.urandom(6 * MIB)
    os.kill(s3_server.pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(2) as pool:
            writing = pool.submit(write, store, "data", data)
            creating = pool.submit(store.put_exclusive, "manifest", b"ours")
            proxy.wait_for(4)  # both have tried again
            os.kill(s3_server.pid, signal.SIGCONT)
            writing.result(seconds(60))
            assert creating.result(seconds(60)) is True
    finally:
        os.kill(s3_server.pid, signal.SIGCONT)
    assert store.read("data", 0, len(data)) == data
    assert store.read("manifest") == b"ours"


# -- wrong bytes ----------------------------------------------------------------------------------


def test_bytes_of_a_block_that_change_on_the_way_are_read_again_and_then_named(
    proxy: FaultyProxy, s3_root: str
) -> None:
    from tests.support.saves import Group, hybrid, state_of

    group = Group(s3_root, range(1), state=state_of(hybrid(range(1), 1)))  # type: ignore[arg-type]
    group.save()
    config = StoreOptions.from_mapping(
        {"endpoint": proxy.endpoint}, StoreOptions.from_environment()
    )
    store = open_storage(s3_root, storage=config)
    [file] = open_catalogue(store).files
    proxy.spoil("GET", "wrong answer", 2, path=file.record.name)
    whole = file.read(0, file.record.size)
    assert proxy.left == 0
    assert whole == store.read(file.record.name)
    proxy.spoil("GET", "wrong answer", 3, path=file.record.name)
    with pytest.raises(CorruptCheckpointError) as caught:
        file.read(0, file.record.size)
    assert f"bytes 0 to {file.record.size} of {file.record.name}" in str(caught.value)


def test_a_small_file_or_a_listing_that_changes_on_the_way_is_read_again(
    proxy: FaultyProxy, s3_root: str
) -> None:
    store = through(proxy, s3_root)
    store.put("manifest", b"{}" * 100)
    proxy.spoil("GET", "wrong answer", SEVERAL)
    assert store.read("manifest") == b"{}" * 100
    proxy.spoil("GET", "wrong answer", SEVERAL, path="list-type")
    assert [info.name for info in store.list()] == ["manifest"]
    assert proxy.left == 0


def test_folders_without_a_name_are_led_to_and_those_that_lead_out_are_not_ours(
    proxy: FaultyProxy, s3_root: str
) -> None:
    store = through(proxy, s3_root)
    store.join("ok").put("a", b"x")
    prefix = store.url.split("/", 3)[3]
    folders = "".join(
        f"<CommonPrefixes><Prefix>{each}</Prefix></CommonPrefixes>"
        for each in (f"{prefix}/", f"{prefix}../", f"{prefix}./")
    )
    end = "</ListBucketResult>"
    proxy.spoil("GET", f"says {end} => {folders}{end}", path="list-type")
    dirs = store.list_dirs()
    assert dirs == [".", "/", "ok"]
    assert [store.join(name).url for name in dirs] == [f"{s3_root}/{n}/" for n in (".", "", "ok")]


def test_answers_that_lack_what_is_needed_are_told_and_end_nothing_endlessly(
    proxy: FaultyProxy, s3_root: str
) -> None:
    store = through(proxy, s3_root, retries=0)
    store.put("data", bytes(100))
    more = "says <IsTruncated>false => <IsTruncated>true"
    proxy.spoil("GET", more, path="list-type")
    with pytest.raises(StorageError, match="not where they begin"):
        store.list()
    again = "<NextContinuationToken>x</NextContinuationToken><IsTruncated>true"
    proxy.spoil("GET", f"says <IsTruncated>false => {again}", 2, path="list-type")
    with pytest.raises(StorageError, match="names itself as the next one"):
        store.list()
    # it says that it is the last, and names a next one
    again = again.replace("true", "false")
    proxy.spoil("GET", f"says <IsTruncated>false => {again}", path="list-type")
    assert [info.name for info in store.list()] == ["data"]
    assert "continuation-token=x" in proxy.seen[-1]
    # of uploads: the last page may name its last key as the marker of a next one
    names = "<NextKeyMarker>x</NextKeyMarker><IsTruncated>"
    proxy.spoil("GET", f"says <IsTruncated> => {names}", path="uploads")
    asked = len(proxy.seen)
    assert store.list_unfinished() == [] and len(proxy.seen) == asked + 1 and proxy.left == 0
    # and the store may list those of the whole bucket
    prefix = store.url.split("/", 3)[3]
    elsewhere = f"<Upload><Key>{'x' * len(prefix)}y</Key><UploadId>u</UploadId></Upload>"
    proxy.spoil("GET", f"says <Prefix>{prefix}</Prefix> => {elsewhere}", path="uploads")
    assert store.list_unfinished() == [] and proxy.left == 0
    for read in (lambda: store.read("data"), lambda: store.read("data", 1, 9)):
        proxy.spoil("GET", "without Content-Length", path="/data")
        with pytest.raises(StorageError, match="lacks Content-Length.*tried 1 times"):
            read()
    proxy.spoil("PUT", "without ETag", path="partNumber=1")
    with pytest.raises(StorageError, match="UploadPart.*lacks ETag"):
        write(store, "parts", bytes(6 * MIB))


def test_a_page_is_no_listing_and_a_write_that_it_answers_is_not_done(
    proxy: FaultyProxy, s3_root: str
) -> None:
    store = through(proxy, s3_root)
    proxy.spoil("PUT", "page")
    store.put("data", b"xyz")
    assert store.read("data") == b"xyz"
    proxy.spoil("GET", "page", path="list-type")
    assert [each.name for each in store.list()] == ["data"]
    for method in ("POST", "PUT", "POST"):
        proxy.spoil(method, "page", path="/parts")
    written = os.urandom(11 * MIB)
    write(store, "parts", written)
    assert store.read("parts") == written
    assert proxy.left == 0
    stubborn = through(proxy, s3_root, retries=0)
    proxy.spoil("GET", "page", 5, path="list-type")
    with pytest.raises(StorageError, match="does not come from S3.*check the endpoint"):
        stubborn.list()


def test_an_answer_that_is_packed_on_its_way_is_asked_for_again_and_no_damage(
    proxy: FaultyProxy, s3_root: str
) -> None:
    store = through(proxy, s3_root)
    store.put("data", bytes(range(200)))
    for read in (lambda: store.read("data"), lambda: store.read("data", 1, 199), fetched(store)):
        proxy.spoil("GET", "packed", path="/data")
        assert read() == bytes(range(200))[-len(read()) :]
    proxy.spoil("GET", "packed", 5, path="/data")
    with pytest.raises(StorageError, match=r"compressed the answer.*proxies"):
        through(proxy, s3_root, retries=0).read("data", 1, 9)


def fetched(store: S3Storage) -> Callable[[], bytes]:
    def fetch() -> bytes:
        target = bytearray(200)
        store.fetch("data", memoryview(target))
        return bytes(target)

    return fetch


def test_what_answers_without_being_s3_is_told_as_such(proxy: FaultyProxy, s3_root: str) -> None:
    store = through(proxy, s3_root)
    proxy.spoil("GET", "404 404", path="list-type")
    with pytest.raises(StorageError, match="does not come from S3.*check the endpoint"):
        store.list()
    proxy.spoil("GET", "moved", path="list-type")
    with pytest.raises(StorageError, match="redirects requests to https://elsewhere.example/"):
        store.list()
    proxy.spoil("PUT", "417 417")
    with pytest.raises(StorageError, match="Expect: 100-continue"):
        store.put("data", b"x")


# -- who and where --------------------------------------------------------------------------------


def test_a_clock_that_is_wrong_is_named_by_the_real_server(
    s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = botocore.auth.get_current_datetime
    for module in ("botocore.auth", "botocore.crt.auth"):
        monkeypatch.setattr(
            f"{module}.get_current_datetime", lambda *a, **k: real(*a, **k) - timedelta(hours=1)
        )
    store = S3Storage(s3_root, StoreOptions.from_environment())
    for verb in (lambda: store.put("data", b"x"), lambda: store.read("data")):
        with pytest.raises(StorageError, match="clock differs.*set the clock"):
            verb()


def test_credentials_that_expire_are_fetched_again_and_expired_ones_fail_at_once(
    proxy: FaultyProxy, s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, program = tmp_path / "calls", tmp_path / "credentials"
    said = {"Version": 1, "AccessKeyId": KEY, "SecretAccessKey": SECRET}
    # So near its end that botocore fetches it anew for each request.
    said["Expiration"] = (datetime.now(timezone.utc) + timedelta(minutes=2)).isoformat()
    program.write_text(f"#!/bin/sh\necho x >> {calls}\ncat <<'END'\n{json.dumps(said)}\nEND\n")
    program.chmod(0o700)
    (tmp_path / "config").write_text(f"[profile job]\ncredential_process = {program}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = through(proxy, s3_root, profile="job")
    store.put("first", b"x")
    fetched = len(calls.read_text())
    store.put("second", b"x")
    assert len(calls.read_text()) > fetched
    proxy.spoil("PUT", "400 ExpiredToken", 100)
    with pytest.raises(StorageError, match="credentials have expired.*refresh themselves"):
        store.put("third", b"x")
    assert proxy.left == 98, "once more, with credentials that are read anew"


def test_a_name_that_no_resolver_knows_is_told_with_what_was_tried(
    s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo

    def resolve(host: Any, *rest: Any, **more: Any) -> Any:
        if host == "s3.example":  # asking the network's resolvers would leave this host
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    config = StoreOptions.from_mapping(
        {"endpoint": "http://s3.example:8333", "retries": 1}, StoreOptions.from_environment()
    )
    with pytest.raises(StorageError, match=r"cannot be reached.*tried 2 times.*the endpoint"):
        S3Storage(s3_root, config).put("data", b"x")
