"""Small files that ask for much: a typed error, in a moment, and before memory is taken."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import resource
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from smckpt.checkpoint.commits.choose import choose_commit
from smckpt.checkpoint.commits.discover import find_checkpoints
from smckpt.checkpoint.commits.leases import take_lease
from smckpt.checkpoint.reading.committed import open_catalogue
from smckpt.checkpoint.records.format import FileRecord
from smckpt.checkpoint.records.objects import decode_object
from smckpt.checkpoint.records.rows import decode_rows
from smckpt.checkpoint.upkeep.transfer import copy_checkpoint
from smckpt.checkpoint.upkeep.verify import verify_checkpoint
from smckpt.decoding import decode
from smckpt.errors import CheckpointError, CorruptCheckpointError
from smckpt.storage import Access, open_storage
from smckpt.storage.budget import Spread
from tests.support.faults.forge import Change, find, reforge
from tests.support.limits import seconds, within
from tests.support.saves import Group

MIB = 1 << 20


@contextmanager
def bounded(limit: float = 20, memory: int = 300 * MIB) -> Iterator[None]:
    """Within seconds and bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with within(seconds(limit)):
        yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    assert grown < memory, f"{grown >> 20} MiB"


def a_row(**geometry: Any) -> dict[str, Any]:
    rule = {"mesh": 0, "placements": ["S0"], "fqn": "w", "shape": [4], **geometry}
    return {"path": ["w"], "dtype": "float32", "before": [], "after": [], "geometry": rule}


def mesh(size: int, first: int = 0) -> dict[str, Any]:
    return {"names": ["shard"], "shape": [size], "ranks": [[first, size, 1]]}


def table(**fields: Any) -> dict[str, Any]:
    return {"meshes": [mesh(1)], "units": [], "rows": [a_row()], **fields}


MANY = 1 << 24
TABLES: dict[str, dict[str, Any]] = {
    "a mesh of many ranks, twice": table(meshes=[mesh(MANY), mesh(MANY, 1)]),
    "many meshes": table(meshes=[mesh(1 << 18, first) for first in range(40)]),
    "many dimensions of a mesh": table(
        meshes=[{"names": ["x"] * 200_000, "shape": [1] * 200_000, "ranks": [[0, 1, 1]]}]
    ),
    "many dimensions of a tensor": table(rows=[a_row(shape=[1] * 100_000)]),
    "many chunks": table(rows=[a_row(placements=["SS0/1000000000"], shape=[1 << 40])]),
    "chunks of chunks": table(
        meshes=[{"names": ["a", "b"], "shape": [1, 1], "ranks": [[0, 1, 1]]}],
        rows=[a_row(placements=["SS0/4096", "SS0/4096"], shape=[1 << 40])],
    ),
    "many holders": table(
        rows=[
            {
                **a_row(),
                "geometry": {
                    "boxes": [[[0], [4]]],
                    "holders": [[0, MANY, 1]],
                    "fqn": "w",
                    "shape": [4],
                },
            }
        ]
    ),
    "a row of many ranks": table(rows=[{**a_row(), "ranks": [[0, MANY, 1]]}]),
}


def unit(member: Any = None, numel: Any = 3, shard: Any = 3, fqn: Any = "a") -> dict[str, Any]:
    rule = {"unit": 0, "mesh": 0, "member": member}
    return table(
        meshes=[{"names": ["r", "s"], "shape": [1, 1], "ranks": [[0, 1, 1]]}],
        units=[{"segments": [[fqn, [3], 3], [None, [], numel]], "shard_numel": shard}],
        rows=[{**a_row(), "geometry": rule}],
    )


TABLES |= {
    "a member that is none": unit(member=2),
    "a member from the end": unit(member=-1),
    "a member between two": unit(member=1.0),
    "padding below nothing": unit(numel=-9),
    "a shard below nothing": unit(shard=-3),
    "a number for a segment's name": unit(fqn=7),
}


@pytest.mark.parametrize("what", TABLES)
def test_a_table_of_tensors_that_stands_for_too_much_is_refused(what: str) -> None:
    decode_rows(table(), (0,))
    decode_rows(unit(member=1), (0,))
    with bounded(), pytest.raises(CorruptCheckpointError, match="cannot be decoded"):
        rows = decode_rows(TABLES[what], (0,))
        [row.geometry.pieces(0) for row in rows]


def whole(root: Path) -> Path:
    Group(root, (0,)).save(
        objects={"lr": {"path": ["lr"], "value": 0.1}, "t": {"path": ["t"], "value": [1, 2]}}
    )
    return root


MANIFESTS: dict[str, Change] = {
    "a huge size": lambda body: body["parts"][0]["files"][0].update(size=10**13),
    "a size that no store takes": lambda body: body["parts"][0]["files"][0].update(size=10**30),
    "prefixes far above": lambda body: body.update(spread={"up": 10**12, "prefixes": 2}),
    "a date that is none": lambda body: body.update(committed_at=10**30),
    "a text for a date": lambda body: body.update(committed_at="tomorrow"),
    "a list for a table": lambda body: body.update(layout=[]),
    "texts for parts": lambda body: body.update(parts=["part"]),
    "null for files": lambda body: body["parts"][0].update(files=None),
    "a number for a topology": lambda body: body.update(topology=7),
    "rows that are none": lambda body: body["layout"].update(rows=[None]),
    "nested meshes": lambda body: body["layout"].update(meshes=nested(200)),
}


def nested(depth: int) -> list[Any]:
    out: list[Any] = []
    for _ in range(depth):
        out = [out]
    return out


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_manifest_that_says_too_much_or_the_wrong_type_is_a_typed_error(
    tmp_path: Path, what: str
) -> None:
    Group(tmp_path / "fine", (0,)).save()
    reforge(find(whole(tmp_path / "bad"), "manifest")[0], MANIFESTS[what])
    with bounded():
        report = verify_checkpoint(str(tmp_path / "bad"))
        assert report.problems
        with pytest.raises(CheckpointError):
            catalogue = open_catalogue(open_storage(str(tmp_path / "bad")))
            catalogue.header(catalogue.files[0])
    with bounded():  # one bad entry hides no other
        assert str(tmp_path / "fine") in [str(found) for found in find_checkpoints(str(tmp_path))]


UNHASHABLE = {"~": "dict", "v": [[[], 1]]}
PARTS: dict[str, Change] = {
    "a list of objects": lambda body: body["objects"].update(lr=[1]),
    "an object without a value": lambda body: body["objects"]["lr"].pop("value"),
    "a number for a path": lambda body: body["objects"]["lr"].update(path=7),
    "an unknown tag": lambda body: body["objects"]["lr"].update(value={"~": "x", "v": 1}),
    "an unhashable key": lambda body: body["objects"]["lr"].update(value=UNHASHABLE),
}


@pytest.mark.parametrize("what", PARTS)
def test_verify_decodes_what_a_load_would_decode(tmp_path: Path, what: str) -> None:
    whole(tmp_path)
    (part,) = find(tmp_path, "part")
    if what == "a list of objects":
        assert verify_checkpoint(str(tmp_path)).ok
    crc = reforge(part, PARTS[what])
    reforge(find(tmp_path, "manifest")[0], lambda body: body["parts"][0].update(crc64=crc))
    report = verify_checkpoint(str(tmp_path))
    assert [problem.path for problem in report.problems] == [str(part)]
    with pytest.raises(CorruptCheckpointError):
        open_catalogue(open_storage(str(tmp_path))).objects(0)


@pytest.mark.parametrize("depth", [400, 5_000, 1_000_000])
def test_json_nested_deeply_is_a_typed_error_wherever_it_is_met(tmp_path: Path, depth: int) -> None:
    deep = '{"~":"tuple","v":[' * depth + "]}" * depth
    text = json.dumps({"format": [1, 0]})[:-1] + f', "x": {deep}}}'
    path = tmp_path / f"manifest-000001-00000000-{'a' * 12}.json"
    path.write_text(text)
    with bounded():
        assert find_checkpoints(str(tmp_path)) == []
        with pytest.raises(CorruptCheckpointError):
            choose_commit(open_storage(str(tmp_path)))
        value: Any = 1
        for _ in range(depth):
            value = {"~": "tuple", "v": [value]}
        with pytest.raises(CorruptCheckpointError, match="nested"):
            decode_object(value)
        while isinstance(value, dict):  # taken apart here: its own end would be as deep
            value = value["v"].pop()


@pytest.mark.parametrize("kind", ["manifest", "part", "crc"])
def test_a_sparse_giant_under_the_name_of_a_small_file_is_not_read(
    tmp_path: Path, kind: str
) -> None:
    whole(tmp_path)
    path = next(tmp_path.glob(f"{kind}-*" if kind != "crc" else "*.crc"))
    os.truncate(path, 1 << 40)
    with bounded():
        report = verify_checkpoint(str(tmp_path))
        assert [problem.path for problem in report.problems] == [str(path)]
        assert find_checkpoints(str(tmp_path)) == [] or kind != "manifest"


def test_a_sparse_giant_in_the_place_of_a_claim_or_where_a_copy_goes_is_not_read(
    tmp_path: Path,
) -> None:
    whole(tmp_path / "run")
    take_lease(Access(), str(tmp_path / "run"), "a" * 12, "host", ranks=[0])
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for path in (find(tmp_path / "run", "epoch")[-1], *find(tmp_path / "copy", "manifest")):
        os.truncate(path, 1 << 40)
        with bounded(), pytest.raises(CorruptCheckpointError, match="should have at most") as told:
            if path.parent.name == "run":
                take_lease(Access(), str(path.parent), "b" * 12, "host", ranks=[1])
            else:
                copy_checkpoint(str(tmp_path / "run"), str(path.parent))
        assert told.value.path == str(path)


def archive(size: int, compression: int) -> str:
    """What torch.save writes of a uint8 tensor of `size` zeros, its storage packed so."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as packed:
        packed.writestr("archive/data.pkl", pickle.dumps({"a": 1}, protocol=2))
        packed.writestr("archive/data/0", bytes(size))
        packed.writestr("archive/version", b"3\n")
    return base64.b64encode(out.getvalue()).decode()


def test_an_archive_that_inflates_is_refused_before_it_does() -> None:
    stored = decode_object({"~": "torch.save", "v": archive(1000, zipfile.ZIP_STORED)})
    assert stored == {"a": 1}
    bomb = archive(1 << 28, zipfile.ZIP_DEFLATED)
    assert len(bomb) < MIB
    with bounded(memory=200 * MIB), pytest.raises(CorruptCheckpointError, match="compressed"):
        decode_object({"~": "torch.save", "v": bomb})


def test_a_torch_payload_that_is_no_archive_is_refused() -> None:
    legacy = base64.b64encode(pickle.dumps({"a": 1})).decode()
    with pytest.raises(CorruptCheckpointError):
        decode_object({"~": "torch.save", "v": legacy})


def test_prefixes_lie_at_most_so_far_above() -> None:
    assert decode(Spread, {"up": 256, "prefixes": 2}) == Spread(256, 2)
    with pytest.raises(ValueError, match=r"\$\.up"):
        decode(Spread, {"up": 257, "prefixes": 2})


def test_a_file_has_at_most_so_many_bytes() -> None:
    """A size stands for a list of its blocks, which is made before the file is looked at."""
    name = f"data-{'a' * 12}-00000000-r00000-0"
    most = FileRecord(f"{name}.safetensors", 1 << 46, "0" * 16, f"{name}.crc")
    assert decode(FileRecord, asdict(most)) == most
    with pytest.raises(ValueError, match=r"\$\.size"):
        decode(FileRecord, {**asdict(most), "size": most.size + 1})
