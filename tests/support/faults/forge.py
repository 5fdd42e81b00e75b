"""Files of a checkpoint as somebody would forge them: changed, with checksums that are right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smckpt.checkpoint.records.crc import crc64, hex64
from smckpt.checkpoint.records.sealed import open_json, seal_json

__all__ = ["find", "reforge", "reforge_header", "reforge_step", "reseal", "seal_record"]

Change = Callable[[dict[str, Any]], object]


def find(root: Path, kind: str) -> list[Path]:
    """The files of a kind below `root`, by name."""
    return sorted(root.rglob(f"{kind}-*.json"))


def reforge(path: Path, change: Change) -> str:
    """Change the body of a sealed file in place; the checksum of the new file."""
    body = open_json(path.read_bytes(), str(path))
    change(body)
    path.write_bytes(seal_json(body))
    return hex64(crc64(path.read_bytes()))


def reforge_step(root: Path, group: str, change: Change) -> None:
    """Change a group's manifest in place, and what the record in `root` says of it."""
    (manifest,) = find(root / group, "manifest")
    crc = reforge(manifest, change)
    (record,) = root.glob("record-*")

    def told(body: dict[str, Any]) -> None:
        for one in body["groups"]:
            if one["directory"] == group:
                one["crc64"] = crc

    reforge(record, told)


def reseal(root: Path) -> None:
    """Make every checksum of a step right again, from the blocks of its data upwards: of files,
    parts, manifests and the record. A file that is named and missing keeps what is said of it."""
    for manifest in find(root, "manifest"):
        folder = manifest.parent

        def of_files(entries: Any, folder: Path = folder) -> None:
            for entry in entries:
                data, crc = folder / entry["name"], folder / entry["crc_name"]
                if data.is_file() and crc.is_file():
                    crc.write_bytes(crc64(data.read_bytes()).to_bytes(8, "little"))
                    entry.update(size=data.stat().st_size, crc64=_of_blocks(crc))

        def of_part(body: dict[str, Any], of_files: Any = of_files) -> None:
            of_files(body["files"])

        def of_manifest(
            body: dict[str, Any], folder: Path = folder, of_files: Any = of_files
        ) -> None:
            for part in body["parts"]:
                of_files(part["files"])
                part["crc64"] = hex64(crc64((folder / part["name"]).read_bytes()))

        for part in find(folder, "part"):
            reforge(part, of_part)
        reforge(manifest, of_manifest)
    seal_record(root)


def seal_record(root: Path) -> None:
    """Make the record's checksums of the manifests right again."""
    (record,) = root.glob("record-*")

    def of_record(body: dict[str, Any]) -> None:
        for group in body["groups"]:
            data = (root / group["directory"] / group["manifest"]).read_bytes()
            group["crc64"] = hex64(crc64(data))

    reforge(record, of_record)


def reforge_header(path: Path, change: Change) -> None:
    """Change the header of a data file in place. Its data begin where they began, if it fits."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def _of_blocks(crc: Path) -> str:
    """As an entry of a file has it: the number, as the file of checksums holds it."""
    return hex64(int.from_bytes(crc.read_bytes()[:8], "little"))
