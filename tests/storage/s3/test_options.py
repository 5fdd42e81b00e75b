"""Options of S3 reach every request that they concern."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import smckpt
from smckpt.errors import StorageError, UsageError
from smckpt.storage.s3.config import StoreOptions
from smckpt.storage.s3.storage import S3Storage
from tests.support.launch import ROOT
from tests.support.limits import seconds

MIB = 1 << 20
WHOSE = {"x-amz-request-payer": "requester"}
NEW = {
    "x-amz-server-side-encryption": "aws:kms",
    "x-amz-server-side-encryption-aws-kms-key-id": "key-1",
    "x-amz-storage-class": "STANDARD_IA",
    "x-amz-tagging": "team=a+b&run=7",
}
MAKING = {"PutObject", "CreateMultipartUpload"}


def everything(url: str, config: StoreOptions) -> dict[str, list[dict[str, str]]]:
    """Every verb once; the headers of each request that went out, by operation."""
    store = S3Storage(url, config)
    sent: dict[str, list[dict[str, str]]] = defaultdict(list)
    events = store.run("look", url, lambda client: client.meta.events)

    def note(model: Any, params: dict[str, Any], **_: Any) -> None:
        sent[model.name].append({k.lower(): v for k, v in params["headers"].items()})
        for name in [k for k in params["headers"] if "encryption" in k.lower()]:
            del params["headers"][name]  # the tests' server has no KMS

    events.register("before-call.s3", note)
    try:
        store.put("small", b"x")
        writer = store.create_file("large", 6 * MIB)
        writer.write_at(0, memoryview(bytes(6 * MIB)))
        writer.finish()
        store.create_file("given-up", 6 * MIB).abort()
        whole = store.create_file("whole", 1, replace=True)
        whole.write_at(0, memoryview(b"x"))
        whole.finish()
        store.fetch("whole", memoryview(bytearray(1)))
        store.read("small")
        store.read("large", 5, 10)
        store.size("small")
        store.list()
        store.list_unfinished()
        store.delete("small")
    finally:
        events.unregister("before-call.s3", note)
    return sent


def test_who_pays_how_it_is_encrypted_and_kept_and_marked_stands_in_each_request(
    s3_root: str,
) -> None:
    fields = {"chunk_size_MB": 5, "requester_pays": True, "storage_class": "STANDARD_IA"}
    fields |= {"sse_kms_key": "key-1", "tags": {"team": "a b", "run": 7}}
    config = StoreOptions.from_mapping(fields, StoreOptions.from_environment())
    sent = everything(s3_root, config)
    assert set(sent) == {
        "PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload",
        "AbortMultipartUpload", "GetObject", "HeadObject", "ListObjectsV2",
        "ListMultipartUploads", "DeleteObject",
    }  # fmt: skip
    for operation, requests in sent.items():
        for headers in requests:
            expected = {**WHOSE, **(NEW if operation in MAKING else {})}
            named = {k: v for k, v in headers.items() if k in WHOSE or k in NEW}
            assert named == expected, operation


def test_the_stores_logs_show_who_asked_and_nothing_that_is_not_asked_for(
    s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SDK_UA_APP_ID", "team-7")
    fields = {"chunk_size_MB": 5, "retries": 7}  # a client of its own
    config = StoreOptions.from_mapping(fields, StoreOptions.from_environment())
    for requests in everything(s3_root, config).values():
        for headers in requests:
            agent = headers["user-agent"]
            assert agent.startswith("Boto3/") and agent.count("Botocore/") == 1
            assert {f"smckpt/{smckpt.__version__}", "app/team-7"} <= set(agent.split())
            assert not {*WHOSE, *NEW} & headers.keys()  # what is not asked for


# -- a client of the user's own ----------------------------------------------------------------


FACTORY = """
import boto3

def make(**settings):
    session = boto3.Session(aws_access_key_id={key!r}, aws_secret_access_key={secret!r})
    return session.client("s3", **settings)

def nothing(**settings):
    return None

def fails(**settings):
    raise RuntimeError("the vault is closed")

def late(**settings):
    raise TimeoutError("no token yet")

def takes(nothing):
    pass
"""


def test_a_client_is_made_by_the_function_that_the_options_name(
    s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.s3 import KEY, SECRET

    (tmp_path / "my_clients.py").write_text(FACTORY.format(key=KEY, secret=SECRET))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")

    def store(factory: str) -> S3Storage:
        base = StoreOptions.from_environment()
        return S3Storage(
            s3_root, StoreOptions.from_mapping({"client_factory": factory, "retries": 1}, base)
        )

    made = store("my_clients:make")
    made.put("a", b"x")
    assert made.read("a") == b"x"
    config = made.run("look", s3_root, lambda client: client.meta.config)
    assert config.request_checksum_calculation == "when_required", "our settings reach it"
    for wrong, said in (("my_clients:none", "cannot import"),
                        ("no_such:make", "cannot import"),
                        ("my_clients:nothing", "not an S3 client"),
                        ("my_clients:fails", "RuntimeError: the vault is closed"),
                        ("my_clients:takes", "TypeError: .*region_name")):  # fmt: skip
        with pytest.raises(UsageError, match=said):
            store(wrong).list()
    with pytest.raises(StorageError, match="no token yet.*tried 2 times"):
        store("my_clients:late").list()
    with pytest.raises(UsageError, match="module:function"):
        store("my_clients")
    with pytest.raises(UsageError, match="profile"):
        StoreOptions(client_factory="a:b", profile="c")


# -- memory ------------------------------------------------------------------------------------


TRANSFER = """
import mmap, resource, sys
from smckpt.storage.s3.storage import S3Storage
from smckpt.storage.s3.config import StoreOptions
store = S3Storage(sys.argv[1], StoreOptions.from_environment())
store.put("first", b"x")  # boto3 is imported, the client made
size = 160 << 20
memory = memoryview(mmap.mmap(-1, size))
for at in range(0, size, 4096):
    memory[at] = 1
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before = peak()
writer = store.create_file("data", size)
for at in range(0, size, writer.piece):
    writer.write_at(at, memory[at : at + writer.piece])
writer.finish()
print(peak() - before)
store.read_into("data", 0, [memory])
print(peak() - before)
"""


def test_uploads_and_downloads_need_no_second_copy_in_memory(s3_root: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRANSFER, s3_root],
        cwd=ROOT, capture_output=True, text=True, timeout=seconds(120),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    uploading, both = map(int, done.stdout.split())
    assert uploading < 20  # MiB, of 160
    assert both < 40  # eight readers have a buffer each
