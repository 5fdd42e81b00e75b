"""Names and JSON files: what is written is read, and what was changed is refused."""

from __future__ import annotations

import base64
import json
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from smckpt.checkpoint.records import sealed as sealing
from smckpt.checkpoint.records.crc import crc64, hex64
from smckpt.checkpoint.records.format import (
    FORMAT_VERSION,
    KEYS,
    PACKED_VERSION,
    FileRecord,
    GroupManifest,
    Manifest,
    Part,
    PartRecord,
    Record,
    crc_name,
    data_name,
    fence_name,
    lease_name,
    manifest_name,
    parse_name,
    parse_temporary,
    part_name,
    probe_name,
    record_name,
)
from smckpt.checkpoint.records.sealed import Known, decode_body, open_json, open_sections, seal_json
from smckpt.errors import CorruptCheckpointError, FormatVersionError

SESSION = "0123456789ab"
ATTEMPT = f"{SESSION}-00000007"

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)  # fmt: skip


def file_record(rank: int) -> FileRecord:
    return FileRecord(
        data_name(ATTEMPT, rank, 0), 4096, "00000000000000ff", crc_name(ATTEMPT, rank, 0)
    )


def manifest(**changed: object) -> Manifest:
    ranks = (0, 2)
    fields: dict[str, object] = {
        "checkpoint_id": "/ckpt/tp0",
        "kind": "LOCAL",
        "step": 120,
        "attempt": ATTEMPT,
        "session": SESSION,
        "number": 7,
        "fencing_token": 3,
        "group_ranks": ranks,
        "committed_at": 1,
        "record": f"../{record_name(3, 7, SESSION)}",
        "parts": tuple(
            PartRecord(r, "host", part_name(ATTEMPT, r), "0" * 16, (file_record(r),)) for r in ranks
        ),
        "layout": {"meshes": [], "units": [], "rows": []},
        "metadata": {"loss": 1.25},
    }
    return Manifest(**{**fields, **changed})  # type: ignore[arg-type]


def part(**changed: object) -> Part:
    fields: dict[str, object] = {
        "checkpoint_id": "/ckpt/tp0",
        "kind": None,
        "step": None,
        "attempt": ATTEMPT,
        "session": SESSION,
        "number": 7,
        "rank": 2,
        "host": "a",
        "rank_runs": (0, 2),
        "fingerprint": "f",
        "classes": {"0,2": "d"},
        "layout": {"meshes": [], "units": [], "rows": []},
        "objects": {"step": {"path": ["step"], "value": 3}},
        "files": (file_record(2),),
    }
    return Part(**{**fields, **changed})  # type: ignore[arg-type]


def record(**changed: object) -> Record:
    fields: dict[str, object] = {
        "session": SESSION,
        "number": 7,
        "fencing_token": 3,
        "kind": "LOCAL",
        "step": 120,
        "committed_at": 1,
        "nbytes": 8192,
        "groups": (GroupManifest("tp0", manifest_name(3, 7, SESSION), "0" * 16, 0),),
    }
    return Record(**{**fields, **changed})  # type: ignore[arg-type]


@given(st.integers(0, 10**9), st.integers(0, 10**10), st.integers(0, 10**6), st.integers(0, 10**4))
def test_every_name_is_parsed_back(fencing_token, number, rank, file):
    attempt = f"{SESSION}-{number:08d}"
    made = {
        "data": data_name(attempt, rank, file),
        "crc": crc_name(attempt, rank, file),
        "part": part_name(attempt, rank),
        "manifest": manifest_name(fencing_token, number, SESSION),
        "record": record_name(fencing_token, number, SESSION),
        "lease": lease_name(fencing_token),
        "fence": fence_name(attempt),
        "probe": probe_name(SESSION),
    }
    said = {
        "session": SESSION,
        "number": number,
        "fencing_token": fencing_token,
        "rank": rank,
        "file": file,
    }
    for kind, name in made.items():
        parsed = parse_name(name)
        assert parsed is not None and parsed.kind == kind
        for field, value in said.items():
            assert getattr(parsed, field) in (value, -1, "")
    assert parse_name(made["data"]).file == file  # type: ignore[union-attr]
    assert parse_name(made["manifest"]).fencing_token == fencing_token  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "data-0123456789ab-00000007-r00000-0.safetensors.tmp",
        "xdata-0123456789ab-00000007-r00000-0.safetensors",
        "data-0123456789AB-00000007-r00000-0.safetensors",
        "data-0123456789ab-٠٠٠٠٠٠٠٧-r00000-0.safetensors",
        "../part-0123456789ab-00000007-r00000.json",
        "part-0123456789ab-00000007-r00000.json\n",
        "epoch-1.json",
        "",
    ],
)
def test_a_foreign_name_is_not_ours(name):
    assert parse_name(name) is None


def test_what_a_cut_short_creation_leaves_is_recognised():
    name = manifest_name(1, 2, SESSION)
    assert parse_temporary(f".{name}.0123456789abcdef.tmp") == parse_name(name)
    assert parse_temporary(".other.0123456789abcdef.tmp") is None
    assert parse_temporary(name) is None


@given(st.dictionaries(st.text(), json_values))
@example({"format": None})
@example({"packed": ["layout"]})
def test_a_sealed_file_is_plain_json_and_reads_back(body):
    body = {**body, "format": [1, 0]}  # a body may be anything that says its format
    sealed = seal_json(body)
    outer = json.loads(sealed)
    assert set(outer) == {"crc64", "body"}
    assert outer["body"] == open_json(sealed, "x") == body


def test_long_tables_have_a_row_per_line():
    row = {"path": ["model", "layers.0.weight"], "dtype": "float32", "after": ["x" * 100]}
    body = {"format": [1, 0], "layout": {"meshes": [], "rows": [row] * 50}}
    lines = seal_json(body).decode().splitlines()
    assert sum(line.strip().startswith('{"path"') for line in lines) == 50
    assert any(line.startswith('"layout":') for line in lines)


LONG = {"rows": [{"path": ["model", f"layers.{n}.weight"], "shape": [n]} for n in range(5000)]}


def test_a_long_table_is_packed_and_is_what_it_was_for_every_reader(
    monkeypatch: pytest.MonkeyPatch,
):
    body = {"format": [1, 1], "step": 5, "layout": LONG, "optimizers": {"o": LONG}}
    sealed = seal_json(body)
    assert len(sealed) < len(json.dumps(body)) / 4
    there = json.loads(sealed)["body"]
    assert (there["format"], there["packed"]) == ([4, 0], ["layout", "optimizers"])
    body["format"] = [4, 0]
    assert open_json(sealed, "m") == body
    assert {key: json.loads(text) for key, text in open_sections(sealed, "m").items()} == body
    assert seal_json(body) == sealed

    calls: list[bytes] = []
    another, unpack, known = threading.Event(), sealing._unpacked, Known()

    def unpacked(text: bytes, path: str) -> bytes:
        calls.append(text)
        if len(calls) > 2:
            another.set()
        another.wait(0.2)
        return unpack(text, path)

    monkeypatch.setattr(sealing, "_unpacked", unpacked)
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(lambda _: open_json(sealed, "m", known), range(4))] == [body] * 4
    assert len(calls) == 2  # once each, though four threads read at once


@pytest.mark.parametrize(
    "wrong",
    [
        {"packed": ["format"]}, {"packed": ["layout", "optimizers"]}, {"packed": "layout"},
        {"layout": {}}, {"layout": "#"}, {"layout": "QUJD"},
        {"layout": base64.b64encode(zlib.compress(b"{}" * 99)[:-5]).decode()},
        {"layout": base64.b64encode(zlib.compress(b"{}") + b"more").decode()},
        {"layout": base64.b64encode(zlib.compress(b"[" + b" " * (1 << 24) + b"]")).decode()},
        {"layout": base64.b64encode(zlib.compress(f"[{','.join('0' * 999)}]".encode())).decode()},
        {"layout": base64.b64encode(zlib.compress(f"[{','.join('0' * 999)}]".encode())).decode()},
    ],
)  # fmt: skip
def test_a_packed_table_that_is_forged_is_refused_with_its_path(wrong: dict[str, Any]):
    text = json.dumps({"format": [4, 0], "packed": ["layout"], "layout": "", **wrong}).encode()
    sealed = b'{"crc64":"%s","body":%s}\n' % (hex64(crc64(text)).encode(), text)
    for read in (open_json, open_sections):
        with pytest.raises(CorruptCheckpointError) as caught:
            read(sealed, "/ckpt/m.json")
        assert caught.value.path == "/ckpt/m.json"


@given(st.data())
def test_no_changed_byte_of_a_json_file_goes_unnoticed(data):
    sealed = bytearray(seal_json(manifest().to_json()))
    at = data.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptCheckpointError) as caught:
        open_json(bytes(sealed), "/ckpt/m.json")
    assert caught.value.path == "/ckpt/m.json"


@given(st.data())
def test_no_cut_of_a_json_file_goes_unnoticed(data):
    sealed = seal_json(manifest().to_json())
    stop = data.draw(st.integers(0, len(sealed) - 1))
    with pytest.raises(CorruptCheckpointError):
        open_json(sealed[:stop], "m")


def test_a_newer_major_version_is_refused_by_number():
    sealed = seal_json({"format": [PACKED_VERSION[0] + 1, 3]})
    with pytest.raises(FormatVersionError, match=r"5\.3.*newer smckpt"):
        open_json(sealed, "m")


def test_a_newer_minor_version_with_unknown_fields_is_read():
    body = manifest().to_json()
    body["format"] = [FORMAT_VERSION[0], 9]
    body["hints"] = {"unheard": "of"}
    read = decode_body(Manifest, open_json(seal_json(body), "m"), "m")
    assert read.format == (FORMAT_VERSION[0], 9)
    assert read.parts == manifest().parts


@pytest.mark.parametrize("version", [None, 1, [1], ["1", 0], [True, 0]])
def test_a_file_without_a_version_is_refused(version):
    with pytest.raises(CorruptCheckpointError, match="version"):
        open_json(seal_json({"format": version}), "m")


@pytest.mark.parametrize("text", [b"", b"{", b"nul", b"\xff", b"[" * 100_000, b"[]"])
def test_what_is_sealed_and_is_no_json_object_is_refused_with_its_path(text):
    sealed = b'{"crc64":"%s","body":%s}\n' % (hex64(crc64(text)).encode(), text)
    for read in (open_json, open_sections):
        with pytest.raises(CorruptCheckpointError) as caught:
            read(sealed, "/ckpt/m.json")
        assert caught.value.path == "/ckpt/m.json"


def written(body: Any) -> dict[str, Any]:
    return {KEYS.get(key, key): value for key, value in asdict(body).items()}


@pytest.mark.parametrize("body", [manifest(), part(), record()])
def test_part_manifest_and_record_come_back_equal(body):
    assert decode_body(type(body), open_json(seal_json(written(body)), "m"), "m") == body


@pytest.mark.parametrize("body", [manifest(), record()])
def test_a_manifest_and_a_record_are_written_as_they_are_read(body):
    assert decode_body(type(body), open_json(seal_json(body.to_json()), "m"), "m") == body


def broken(body: Any, **changed: object) -> None:
    data = json.loads(json.dumps(written(body)))
    with pytest.raises(CorruptCheckpointError, match="cannot be decoded"):
        decode_body(type(body), {**data, **changed}, "m")


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "WHOLE"},
        {"step": "120"},
        {"step": 1.5},
        {"step": 1 << 63},
        {"number": -1},
        {"committed_at": 1 << 63},
        {"epoch": None},
        {"committed_at": "today"},
        {"group_ranks": [2, 0]},
        {"group_ranks": [0, 0, 2]},
        {"group_ranks": [0]},
        {"group_ranks": []},
        {"layout": []},
        {"record": 3},
        {"record": "../elsewhere.json"},
        {"parts": [{}, {}]},
        {"checkpoint_id": None},
    ],
)
def test_a_wrong_field_of_a_manifest_is_refused(changed):
    broken(manifest(), **changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"attempt": "0123456789ab-00000008"},
        {"rank": None},
        {"objects": None},
        {"classes": []},
        {"layout": {"rank": 9, "digest": ""}},
        {"layout": {"digest": ""}},
        {"host": 1},
        {"files": [{"name": "x"}]},
    ],
)
def test_a_wrong_field_of_a_part_is_refused(changed):
    broken(part(), **changed)


@pytest.mark.parametrize(
    "changed",
    [{"groups": [{"directory": "tp0"}]}, {"nbytes": -1}, {"step": True}],
)
def test_a_wrong_field_of_a_record_is_refused(changed):
    broken(record(), **changed)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../data-0123456789ab-00000007-r00000-0.safetensors", "x.safetensors"]
)
def test_a_manifest_cannot_lead_a_reader_to_a_foreign_file(name):
    with pytest.raises(ValueError, match="is not the name"):
        FileRecord(name, 1, "0" * 16, crc_name(ATTEMPT, 0, 0))
    broken(manifest(), parts=[{**asdict(each), "name": name} for each in manifest().parts])


def test_a_checksum_must_have_sixteen_digits():
    for digits in ("0x12", "0" * 17, "0" * 16 + "\n", "A" * 16):
        broken(part(), files=[{**asdict(file_record(2)), "crc64": digits}])


def test_the_checksum_is_of_the_body_s_bytes_as_they_stand():
    sealed = seal_json({"format": [1, 0], "a": "ü"})
    body = sealed[sealed.index(b'"body":') + 7 : -2]
    assert json.loads(sealed)["crc64"] == hex64(crc64(body))


@given(
    st.dictionaries(
        st.sampled_from(["layout", "rank", "files", 'od"d": key']) | st.text(), json_values
    ),
    st.integers(0, 200),
)
def test_sections_are_the_values_as_they_stand(body, padding):
    body = {"format": [1, 0], "pad": "x" * padding, **body}
    sections = open_sections(seal_json(body), "p")
    assert {key: json.loads(value) for key, value in sections.items()} == body


def test_sections_of_a_newer_or_damaged_file_are_refused():
    with pytest.raises(FormatVersionError):
        open_sections(seal_json({"format": [9, 0], "pad": "x" * 200}), "p")
    sealed = seal_json({"format": [1, 0], "pad": "x" * 200})
    with pytest.raises(CorruptCheckpointError):
        open_sections(sealed.replace(b"xx", b"xy", 1), "p")
