"""docs/format.md suffices: a reader written from it alone, without smckpt, reads the fixtures."""

from __future__ import annotations

import itertools
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "complex128": 16, "uint8": 1, "int64": 8}


def crc64(data: bytes) -> int:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x9A6C9329AC4BC9B5 if byte & 1 else 0)
        table.append(byte)
    crc = (1 << 64) - 1
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ (crc >> 8)
    return crc ^ ((1 << 64) - 1)


def read_json(path: Path, crc: str | None = None) -> dict[str, Any]:
    data = path.read_bytes()
    assert crc in (None, f"{crc64(data):016x}")
    assert data[:10] == b'{"crc64":"' and data[26:35] == b'","body":' and data[-2:] == b"}\n"
    assert int(data[10:26], 16) == crc64(data[35:-2])
    body: dict[str, Any] = json.loads(data)["body"]
    assert body["format"][0] == (2 if "spread" in body else 1)
    return body


def place(directory: Path, manifest: dict[str, Any], rank: int) -> Path:
    """Where the files of a rank lie."""
    spread = manifest.get("spread")
    if spread is None:
        return directory
    root = directory
    for _ in range(spread["up"]):
        root = root.parent
    turn = int(f"{rank % spread['prefixes']:08b}"[::-1], 2)
    return root / f"{turn:02x}-smckpt" / directory.relative_to(root)


def newest_record(root: Path) -> dict[str, Any]:
    def order(path: Path) -> tuple[int, int]:
        _, epoch, number, _ = path.name.split("-")
        return int(epoch), int(number)

    return read_json(max(root.glob("record-*.json"), key=order))


def expand(runs: list[list[int]]) -> list[int]:
    return [first + i * stride for first, count, stride in runs for i in range(count)]


def cut(indices: list[int], count: int, at: int) -> list[int]:
    size = -(-len(indices) // count)
    return indices[at * size : (at + 1) * size]


class Group:
    """A manifest with the arrays of its ranks."""

    def __init__(self, directory: Path, manifest: dict[str, Any]) -> None:
        self.table = manifest["layout"]
        self.ranks = manifest["group_ranks"]
        self.stored: dict[str, list[tuple[int, int | None, int | None, bytes]]] = {}
        for part in manifest["parts"]:
            there = place(directory, manifest, part["rank"])
            body = read_json(there / part["name"], part["crc64"])
            assert body["files"] == part["files"]
            for file in part["files"]:
                self._open(there, file, part["rank"])

    def _open(self, directory: Path, file: dict[str, Any], rank: int) -> None:
        data = (directory / file["name"]).read_bytes()
        assert len(data) == file["size"] and f"{crc64(data):016x}" == file["crc64"]
        blocks = (directory / file["crc_name"]).read_bytes()
        assert blocks == struct.pack("<Q", crc64(data))  # files of one block, here
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        slices = json.loads(header.pop("__metadata__")["smckpt.slices"])
        for key, entry in header.items():
            low, high = (8 + length + offset for offset in entry["data_offsets"])
            start, stop = slices.get(key, (None, None))
            self.stored.setdefault(key, []).append((rank, start, stop, data[low:high]))

    def coordinate(self, row: dict[str, Any], rank: int) -> object:
        rule = row["geometry"]
        if "kept" in rule:
            return rank
        if "boxes" in rule:
            return 0
        mesh = self.table["meshes"][rule["mesh"]]
        at = np.unravel_index(expand(mesh["ranks"]).index(rank), mesh["shape"])
        if "unit" in rule:
            return int(at[1])
        pairs = zip(at, rule["placements"], mesh["shape"], strict=True)
        return tuple(int(i) for i, placement, n in pairs if placement != "R" and n > 1)

    def array(self, row: dict[str, Any], rank: int) -> np.ndarray:
        """What `rank` holds of a row: elements as rows of bytes."""
        size = SIZES[row["dtype"]]
        key = ".".join(map(str, row["path"]))
        mine = self.coordinate(row, rank)
        ranks = expand(row["ranks"]) if "ranks" in row else self.ranks
        pieces = []
        for other, start, _, data in self.stored[key]:
            if other in ranks and self.coordinate(row, other) == mine:
                pieces.append((start or 0, data))
        joined = b"".join(data for _, data in sorted(pieces, key=lambda piece: piece[0]))
        return np.frombuffer(joined, np.uint8).reshape(-1, size)

    def placed(self, row: dict[str, Any], rank: int) -> list[tuple[str, list[int], list[int]]]:
        """Of each fqn: its global shape, and the flat index that each local element has in it
        (-1: not of this fqn)."""
        rule = row["geometry"]
        if "unit" in rule:
            return self._flat(rule, int(str(self.coordinate(row, rank))))
        shape = rule["shape"]
        numbers = np.arange(math.prod(shape)).reshape(shape)
        if "boxes" in rule:
            boxes = [
                numbers[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].ravel()
                for box in rule["boxes"]
            ]
            return [(rule["fqn"], shape, np.concatenate(boxes).tolist())]
        mesh = self.table["meshes"][rule["mesh"]]
        at = np.unravel_index(expand(mesh["ranks"]).index(rank), mesh["shape"])
        held = [list(range(n)) for n in shape]
        for i, n, placement in zip(at, mesh["shape"], rule["placements"], strict=True):
            assert placement == "R" or (placement[0] == "S" and placement[1:].isdigit())
            if placement != "R":
                held[int(placement[1:])] = cut(held[int(placement[1:])], n, int(i))
        return [(rule["fqn"], shape, [int(numbers[i]) for i in itertools.product(*held)])]

    def _flat(self, rule: dict[str, Any], shard: int) -> list[tuple[str, list[int], list[int]]]:
        unit = self.table["units"][rule["unit"]]
        segments = unit["segments"]
        elements: list[tuple[int, int]] = []
        for number, (_, _, numel) in enumerate(segments):
            elements += [(number, i) for i in range(numel)]
        low = shard * unit["shard_numel"]
        run = elements[low : low + unit["shard_numel"]]
        if rule["member"] is not None:
            run = [element for element in run if element[0] == rule["member"]]
        return [
            (fqn, shape, [i if number == of else -1 for of, i in run])
            for number, (fqn, shape, _) in enumerate(segments)
            if fqn is not None and rule["member"] in (None, number)
        ]


@pytest.mark.parametrize("fixture", sorted(p.name for p in FIXTURES.glob("format-*")))
def test_a_reader_written_from_the_document_reads_every_logical_tensor(fixture):
    root = FIXTURES / fixture / "checkpoint"
    wholes: dict[str, np.ndarray] = {}
    seen: dict[str, np.ndarray] = {}
    for named in newest_record(root)["groups"]:
        directory = root / named["directory"]
        manifest = read_json(directory / named["manifest"], named["crc64"])
        group = Group(directory, manifest)
        for row in group.table["rows"]:
            if "kept" in row["geometry"]:
                continue
            for rank in group.ranks:
                array = group.array(row, rank)
                for fqn, shape, indices in group.placed(row, rank):
                    name = ".".join(map(str, [*row["before"], fqn, *row["after"]]))
                    size = SIZES[row["dtype"]]
                    whole = wholes.setdefault(name, np.zeros((math.prod(shape), size), np.uint8))
                    held = seen.setdefault(name, np.zeros(math.prod(shape), bool))
                    for local, index in enumerate(indices):
                        if index >= 0:
                            whole[index], held[index] = array[local], True
    expected = json.loads((FIXTURES / fixture / "expected.json").read_text())
    assert set(wholes) == set(expected)
    for name, text in expected.items():
        assert seen[name].all(), name
        assert wholes[name].tobytes() == bytes.fromhex(text), name
