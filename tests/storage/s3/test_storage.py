"""What the S3 store promises, on a real server; where it makes sense, POSIX promises the same."""

from __future__ import annotations

import base64
import io
import math
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from smckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    UsageError,
)
from smckpt.storage import FileInfo, Storage, open_storage
from smckpt.storage.budget import part_size
from smckpt.storage.s3 import client
from smckpt.storage.s3.bodies import Body, Filling
from smckpt.storage.s3.config import StoreOptions
from smckpt.storage.s3.faults import BadBody
from smckpt.storage.s3.storage import S3Storage
from smckpt.storage.urls import parse_s3_url
from tests.support import child
from tests.support.limits import seconds
from tests.support.s3 import BUCKET, Server

MIB = 1 << 20


@pytest.fixture(params=["posix", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """A directory of each kind, which does not exist yet."""
    if request.param == "posix":
        return open_storage(str(tmp_path / "deep" / "new"))
    return open_storage(f"{request.getfixturevalue('s3_root')}/deep/new")


def s3(url: str, **options: Any) -> S3Storage:
    base = StoreOptions.from_environment()
    return S3Storage(url, StoreOptions.from_mapping({"chunk_size_MB": 5, **options}, base))


def write(store: Storage, name: str, data: bytes, piece: int = 0, threads: int = 4) -> None:
    writer = store.create_file(name, len(data))
    view, step = memoryview(data), piece or writer.piece or MIB
    with ThreadPoolExecutor(threads) as pool:
        list(
            pool.map(
                lambda at: writer.write_at(at, view[at : at + step]), range(0, len(data), step)
            )
        )
    writer.finish()


# -- the same on every store ----------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 4097, 3 * MIB + 77])
def test_a_file_written_in_pieces_by_threads_holds_exactly_its_bytes(
    store: Storage, size: int
) -> None:
    data = os.urandom(size)
    write(store, "data", data, piece=MIB)
    assert store.read("data") == data
    assert store.size("data") == size
    assert store.list() == [FileInfo("data", size)]


def test_of_many_that_create_a_name_exclusively_one_succeeds(store: Storage) -> None:
    start = threading.Barrier(6)

    def create(i: int) -> bool:
        start.wait(seconds(30))
        return store.put_exclusive("manifest", b"%d" % i * 5000)

    with ThreadPoolExecutor(6) as pool:
        won = list(pool.map(create, range(6)))
    assert sorted(won) == [False] * 5 + [True]
    assert store.read("manifest") == b"%d" % won.index(True) * 5000
    assert store.put_exclusive("manifest", b"late") is False


def test_an_existing_name_is_never_written_to(store: Storage) -> None:
    store.put("name", b"first")
    with pytest.raises(StorageError, match="exists already"):
        store.put("name", b"second")
    with pytest.raises(StorageError, match="exists already"):
        write(store, "name", b"third")
    assert store.read("name") == b"first"


def test_ranges_are_read_into_several_buffers_and_a_short_file_is_corrupt(store: Storage) -> None:
    data = os.urandom(10_000)
    store.put("data", data)
    first, second = bytearray(100), bytearray(900)
    store.read_into("data", 50, [memoryview(first), memoryview(b""), memoryview(second)])
    assert first + second == data[50:1050]
    assert store.read("data", 9_990) == data[9_990:]
    for offset in (9_999, 10_000, 20_000):
        with pytest.raises(CorruptCheckpointError, match="ends at byte"):
            store.read("data", offset, 2)


def test_an_object_that_is_too_long_is_not_read(s3_root: str) -> None:
    store = s3(s3_root)
    store.put("data", bytes(6 * MIB))
    with pytest.raises(CorruptCheckpointError, match="has 6291456 bytes.*at most 4096") as told:
        store.read("data", most=4096)
    assert told.value.path == f"{s3_root}/data"
    assert len(store.read("data", most=6 * MIB)) == 6 * MIB


def test_what_is_missing_is_not_found_and_may_be_deleted(store: Storage) -> None:
    for look in (store.read, store.size):
        with pytest.raises(CheckpointNotFoundError):
            look("nothing")
    store.delete("nothing")
    assert store.list() == []
    assert store.list_dirs() == []


def test_listing_tells_files_and_directories_apart(store: Storage) -> None:
    store.put("b", b"22")
    store.put("a", b"1")
    store.join("sub/deeper").put("c", b"")
    assert store.list() == [FileInfo("a", 1), FileInfo("b", 2)]
    assert store.list("b") == [FileInfo("b", 2)]
    assert store.list_dirs() == ["sub"]
    assert store.join("sub").list_dirs() == ["deeper"]
    store.delete("a")
    assert store.list() == [FileInfo("b", 2)]


def test_an_aborted_file_is_gone_and_abort_may_be_repeated(store: Storage) -> None:
    writer = store.create_file("data", 8192)
    writer.write_at(0, memoryview(bytes(4096)))
    writer.abort()
    writer.abort()
    assert store.list() == []
    write(store, "data", b"x")
    assert store.list() == [FileInfo("data", 1)]


def test_a_missing_piece_is_noticed_before_the_file_counts(store: Storage) -> None:
    writer = store.create_file("data", 8192)
    writer.write_at(4096, memoryview(bytes(4096)))
    with pytest.raises(StorageError, match="of 8192 bytes"):
        writer.finish()
    writer.abort()


@pytest.mark.parametrize("name", ["", "a/b", "..", ".", "a\0"])
def test_a_name_that_leads_elsewhere_is_refused(store: Storage, name: str) -> None:
    with pytest.raises(UsageError):
        store.read(name)


# -- S3 alone -------------------------------------------------------------------------------------


def key_of(store: S3Storage, name: str) -> str:
    return parse_s3_url(store.url)[1] + name


def uploads(store: S3Storage) -> list[Any]:
    answer = store.run("list", store.url, lambda c: c.list_multipart_uploads(Bucket=BUCKET))
    prefix = key_of(store, "")
    return [each for each in answer.get("Uploads", ()) if each["Key"].startswith(prefix)]


@pytest.mark.parametrize("checksum", ["crc64nvme", "crc32", "none"])
@pytest.mark.parametrize("piece", [0, 3 * MIB])  # whole parts as they stand; smaller ones gathered
def test_a_file_of_several_parts_arrives_whole_with_the_checksum_kept_by_the_store(
    s3_root: str, checksum: str, piece: int
) -> None:
    store = s3(s3_root, checksum=checksum)
    data = os.urandom(12 * MIB + 5)
    write(store, "data", data, piece)
    assert store.read("data", 0, len(data)) == data
    head = store.run(
        "look",
        s3_root,
        lambda c: c.head_object(Bucket=BUCKET, Key=key_of(store, "data"), ChecksumMode="ENABLED"),
    )
    assert head is not None
    if checksum == "crc64nvme":
        from smckpt.checkpoint.records.crc import crc64

        kept = int.from_bytes(base64.b64decode(head["ChecksumCRC64NVME"]), "big")
        assert kept == crc64(data)
    assert uploads(store) == []


def test_a_wrong_checksum_is_refused_by_the_store(s3_root: str) -> None:
    store = s3(s3_root, retries=0)
    writer = store.create_file("data", 100)
    with pytest.raises(StorageError):
        writer.write_at(0, memoryview(bytes(100)), crc64=1)
    assert store.list() == []


def test_an_aborted_upload_leaves_no_parts_behind(s3_root: str) -> None:
    store = s3(s3_root)
    writer = store.create_file("data", 11 * MIB)
    writer.write_at(0, memoryview(bytes(5 * MIB)))
    assert len(uploads(store)) == 1
    writer.abort()
    writer.abort()
    assert uploads(store) == []
    assert store.list() == []


def test_an_upload_never_replaces_an_object_that_appeared_meanwhile(s3_root: str) -> None:
    store = s3(s3_root)
    writer = store.create_file("data", 6 * MIB)
    writer.write_at(0, memoryview(bytes(6 * MIB)))
    store.put("data", b"first")
    with pytest.raises(StorageError, match="exists already"):
        writer.finish()
    writer.abort()
    assert store.read("data") == b"first"


def test_without_checksums_too_an_object_of_the_same_size_is_not_taken_for_ours(
    s3_root: str,
) -> None:
    store = s3(s3_root, checksum="none")
    for name in ("ours", "theirs"):
        writer = store.create_file(name, 6 * MIB)
        for at in range(0, 6 * MIB, writer.piece):
            writer.write_at(at, memoryview(bytes(min(writer.piece, 6 * MIB - at))))
        if name == "ours":
            writer.finish()
            writer.finish()  # the first answer was lost
    store.put("theirs", b"x" * (6 * MIB))
    with pytest.raises(StorageError, match="exists already"):
        writer.finish()
    writer.abort()
    assert store.read("theirs") == b"x" * (6 * MIB)


def test_an_upload_that_others_gave_up_says_so(s3_root: str) -> None:
    store = s3(s3_root)
    writer = store.create_file("data", 6 * MIB)
    store.discard_unfinished(["data"])
    with pytest.raises(StorageError, match="the upload was aborted meanwhile.*another copy"):
        writer.write_at(0, memoryview(bytes(5 * MIB)))


@pytest.mark.parametrize("checksum", ["crc64nvme", "none"])
def test_of_two_that_create_a_name_with_equal_bytes_one_succeeds(
    s3_root: str, checksum: str
) -> None:
    store = s3(s3_root, checksum=checksum)
    assert store.put_exclusive("manifest", b"same")
    assert not store.put_exclusive("manifest", b"same")
    assert not store.put_exclusive("manifest", b"them")


def test_completing_again_after_a_lost_answer_succeeds(s3_root: str) -> None:
    store = s3(s3_root)
    data = memoryview(os.urandom(6 * MIB))
    writer = store.create_file("data", len(data))
    writer.write_at(0, data)
    writer.finish()
    writer.finish()
    assert store.read("data") == data


def test_bodies_give_the_callers_own_memory_and_rewind() -> None:
    memory = memoryview(bytearray(5 * MIB))
    body = Body(memory, 60)
    piece = body.read(16)
    assert isinstance(piece, memoryview)
    assert piece.obj is memory.obj, "a copy was made"
    assert len(body) == 5 * MIB
    assert len(piece) == body.tell() == 2 * MIB
    body.seek(0)
    assert sum(len(part) for part in iter(body.read, b"")) == 5 * MIB


def test_parts_grow_with_the_object_so_that_ten_thousand_suffice() -> None:
    for size in (1, 640 * 1000 * MIB, 5 << 40):
        part = part_size(size, 64 * MIB)
        assert -(-size // part) <= 10_000
        assert part % MIB == 0
        assert part == 64 * MIB or part - MIB < size / 10_000


def test_keys_are_kept_byte_for_byte(s3_root: str) -> None:
    asked: list[str] = []
    store = s3(f"s3://{BUCKET}//opt/ml/{secrets.token_hex(4)} ü+%41")
    events = store.run("look", s3_root, lambda client: client.meta.events)

    def note(request: Any, **_: Any) -> None:
        asked.append(request.url)

    events.register("before-send.s3", note)
    try:
        store.put("a b", b"x")
        assert store.read("a b") == b"x"
        with pytest.raises(StorageError):  # this server refuses such keys; S3 takes them
            s3(f"s3://{BUCKET}//opt/./ml/../x").put("a", b"x")
    finally:
        events.unregister("before-send.s3", note)
    assert all("//opt/ml/" in url and "%20%C3%BC%2B%2541/a%20b" in url for url in asked[:-1])
    assert asked[-1].endswith("//opt/./ml/../x/a")


class PublicOnly:
    """A body of which nothing but the public methods can be used, and those of old."""

    def __init__(self, body: Any) -> None:
        self.read, self.close = body.read, body.close


def test_a_body_is_read_without_its_private_parts_too(s3_root: str) -> None:
    store, data = s3(s3_root), os.urandom(MIB)
    store.put("data", data)
    for _ in range(2):  # the connection is fit for another request
        answer = store.run(
            "get",
            s3_root,
            lambda c: c.get_object(Bucket=BUCKET, Key=key_of(store, "data")),
        )
        target = memoryview(bytearray(MIB))
        Filling([target[:10], target[10:]], 60).take(PublicOnly(answer["Body"]))
        assert target == data


# -- errors ---------------------------------------------------------------------------------------


def test_a_missing_bucket_is_named_by_every_verb(s3_root: str) -> None:
    store = s3("s3://no-such-bucket/x")
    for verb in (
        lambda: store.put("a", b"x"),
        lambda: store.read("a"),
        lambda: store.size("a"),
        store.list,
        lambda: store.create_file("a", 6 * MIB),
    ):
        with pytest.raises(StorageError, match="no such bucket"):
            verb()


def test_wrong_keys_and_no_keys_are_told_at_once(
    s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Clients are kept by their options, so other keys want other options.
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StorageError, match="secret key does not belong"):
        s3(s3_root, retries=1).put("a", b"x")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StorageError, match="no credentials"):
        s3(s3_root, retries=2).put("a", b"x")


def test_a_server_that_is_not_there_is_reported_with_what_was_tried(s3_root: str) -> None:
    store = s3(s3_root, endpoint="http://127.0.0.1:9", retries=1)
    with pytest.raises(StorageError, match=r"cannot be reached.*tried 2 times"):
        store.list()


def test_a_key_that_is_too_long_is_refused_before_anything_is_sent(s3_root: str) -> None:
    with pytest.raises(UsageError, match="S3 takes at most 1,024"):
        s3(f"{s3_root}/{'x' * 1100}").put("a", b"x")


@pytest.mark.parametrize(
    "options",
    [
        {"chunk_size_MB": 4},
        {"max_read_concurrency": 0},
        {"checksum": "md5"},
        {"endpoint": "host:1"},
        {"retries": -1},
        {"timeout_s": math.nan},
        {"read_timeout_s": math.inf},
        {"client": "crt"},
        {"colour": 1},
        {"chunk_size_MB": "64"},  # as a file of settings may have it
        {"chunk_size_MB": 64.5},
        {"max_write_concurrency": True},
        {"preflight": "0"},
        {"region": 5},
        {"tags": "team"},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        StoreOptions.from_mapping(options)


def test_options_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMCKPT_S3_CHUNK_SIZE_MB", "16")
    monkeypatch.setenv("SMCKPT_S3_REQUESTER_PAYS", "true")
    monkeypatch.setenv("SMCKPT_S3_TAGS", "team=a,run=7")
    config = StoreOptions.from_environment()
    assert (config.chunk_size_MB, config.requester_pays) == (16, True)
    assert config.tags == (("team", "a"), ("run", "7"))
    assert StoreOptions(tags={"team": "a", "run": 7}) == StoreOptions(tags=config.tags)  # type: ignore[arg-type]
    assert hash(StoreOptions(tags=[("team", "a")])) == hash(StoreOptions(tags=(("team", "a"),)))  # type: ignore[arg-type]
    monkeypatch.setenv("SMCKPT_S3_RETRIES", "many")
    with pytest.raises(UsageError, match="SMCKPT_S3_RETRIES"):
        StoreOptions.from_environment()
    monkeypatch.delenv("SMCKPT_S3_RETRIES")
    monkeypatch.setenv("SMCKPT_S3_TAGS", "team")  # no pair
    with pytest.raises(UsageError, match="SMCKPT_S3_TAGS"):
        StoreOptions.from_environment()
    monkeypatch.delenv("SMCKPT_S3_TAGS")
    monkeypatch.setenv("SMCKPT_S3_CHUNK_SIZE", "16")
    with pytest.raises(UsageError, match="unknown variables: SMCKPT_S3_CHUNK_SIZE"):
        StoreOptions.from_environment()


# -- processes ------------------------------------------------------------------------------------


def test_importing_smckpt_and_saving_to_a_disk_import_no_boto3(tmp_path: Path) -> None:
    loaded = child.run(
        """
        import sys, smckpt
        from smckpt.storage import open_storage
        smckpt.is_s3_url("s3://b/k"), smckpt.StoreOptions
        open_storage(sys.argv[1]).put("a", b"x")
        print([name for name in ("boto3", "botocore", "urllib3") if name in sys.modules])
        """,
        str(tmp_path),
    )
    assert loaded == "[]"


def test_a_forked_child_makes_a_client_of_its_own(s3_root: str, s3_server: Server) -> None:
    printed = child.run(
        """
        import os, sys
        from smckpt.storage import open_storage
        store = open_storage(sys.argv[1])
        store.put("parent", b"1" * (20 << 20))
        store.read("parent", 0, 20 << 20)
        mine = store.run("look", "", lambda client: client.meta)
        pid = os.fork()
        if pid == 0:
            assert store.run("look", "", lambda client: client.meta) is not mine
            assert len(store.read("parent", 0, 20 << 20)) == 20 << 20
            store.put("child", b"2")
            os._exit(0)
        print(os.waitpid(pid, 0)[1], len(store.list()))
        """,
        s3_root,
        **s3_server.environment,
    )
    assert printed == "0 2"


def test_a_pause_between_two_bodies_of_one_read_is_no_part_of_its_time() -> None:
    target = memoryview(bytearray(4))
    filling = Filling([target[:2], target[2:]], 1)
    with pytest.raises(BadBody, match="ended early"):
        filling.take(io.BytesIO(b"ab"))
    threading.Event().wait(1.2)  # the pace of requests may have a try wait longer than that
    filling.take(io.BytesIO(b"cd"))
    assert target == b"abcd"


def test_a_body_that_is_reset_is_one_to_ask_for_again() -> None:
    class Reset:
        def read(self, size: int) -> bytes:
            raise ConnectionResetError("reset by peer")

        def close(self) -> None: ...

    with pytest.raises(BadBody, match="broke off: reset by peer"):
        Filling([memoryview(bytearray(4))], 5).take(Reset())


# -- a far end that is slow ------------------------------------------------------------------------


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)  # always full
        yield made


def at(listening: socket.socket, **options: Any) -> S3Storage:
    port = listening.getsockname()[1]
    return s3(f"s3://{BUCKET}/x", endpoint=f"http://127.0.0.1:{port}", retries=0, **options)


def test_a_body_arrives_whole_whatever_its_address_and_however_slow_the_far_end(
    listening: socket.socket, s3_root: str
) -> None:
    data = memoryview(os.urandom((5 << 20) + 4321))[1:]
    found: list[bytes] = []

    def receive() -> None:
        far, _ = listening.accept()
        with far, far.makefile("rb") as stream:
            while stream.readline() != b"\r\n":
                pass
            far.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            found.append(stream.read(len(data)))
            far.sendall(b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 0\r\n\r\n')

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    at(listening).put("data", data)  # type: ignore[arg-type]
    thread.join(seconds(60))
    assert found == [data]


def test_a_far_end_that_stops_reading_is_given_up(
    listening: socket.socket, s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_CONNECT_SECONDS", 0.5)  # until its body is sent
    with pytest.raises(StorageError, match="cannot write: .*did not carry out.*tried 1"):
        at(listening, read_timeout_s=0.5).put("data", bytes(16 << 20))
