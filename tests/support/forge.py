"""Files of a checkpoint as somebody would forge them: changed, with checksums that are right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from smckpt.checkpoint.records.crc import crc64, hex64
from smckpt.checkpoint.records.sealed import open_json, seal_json

__all__ = ["find", "reforge", "reforge_step"]

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
