"""What reads bytes that somebody else may have written: from a store, or from a peer.

A target takes any bytes. It may raise a `CheckpointError` and nothing else.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from smckpt.checkpoint.commits.contents import contents_of
from smckpt.checkpoint.commits.discover import FoundCheckpoint
from smckpt.checkpoint.commits.leases import leases_at
from smckpt.checkpoint.commits.remove import finish_removals, removal_of
from smckpt.checkpoint.reading.committed import open_catalogue
from smckpt.checkpoint.records.crc import crc64, hex64
from smckpt.checkpoint.records.format import (
    GroupManifest,
    Manifest,
    Record,
    parse_name,
    parse_temporary,
)
from smckpt.checkpoint.records.headers import read_header
from smckpt.checkpoint.records.objects import decode_object
from smckpt.checkpoint.records.rows import decode_rows
from smckpt.checkpoint.records.sealed import open_json, open_sections, read_file
from smckpt.engine.load_rounds import Choice, Common
from smckpt.engine.saving.commit import Committed, Ticket, Written
from smckpt.engine.saving.commit_groups import GroupSave
from smckpt.errors import CheckpointError, error_from_json
from smckpt.formats.names import INDEX
from smckpt.formats.pickled import read_pickle
from smckpt.formats.readers.dcp import read_metadata
from smckpt.formats.readers.rank_files import open_directory
from smckpt.formats.readers.torch_files import stored_state
from smckpt.formats.source_files import SourceFiles
from smckpt.formats.torch_archive import open_archive
from smckpt.manager.resume import Outcome, Turn
from smckpt.meeting.keys import Keys
from smckpt.meeting.round import Message, Round
from smckpt.meeting.store import OverStore
from smckpt.translate.config import read_config
from smckpt.translate.models.lora import read_lora_config
from tests.fuzz.memory import Memory, Tree

__all__ = ["MARK", "TARGETS", "finish", "mark_of", "read_everything", "sealed"]

_SESSION = "0" * 12
_MANIFEST = f"manifest-000001-00000000-{_SESSION}.json"
_RECORD = f"record-000001-00000000-{_SESSION}.json"
MARK = f"removing-00000000-{_SESSION}.json"
_PIN = f"pin-{'0' * 16}.json"
_MESSAGES = (
    GroupSave,
    Choice,
    Committed,
    Common,
    GroupManifest,
    Outcome,
    Ticket,
    Turn,
    Written,
)


def sealed(body: bytes) -> bytes:
    """A file with this body and the checksum of it: no fuzzer guesses one."""
    return b'{"crc64":"' + hex64(crc64(body)).encode() + b'","body":' + body + b"}\n"


def read_everything(tree: Tree, root: str = "/run") -> None:
    """All that a load, `ls`, `verify` and a copy read of a checkpoint, but for its tensors."""
    top = Memory(root, tree)
    leases_at(top)
    contents_of(top)
    catalogue = open_catalogue(top)
    for name in catalogue.logical:
        catalogue.pieces.all(name)
    for rank in catalogue.object_ranks:
        catalogue.objects(rank)
    for row in catalogue.rows:
        for holders in catalogue.pieces.holders(row).values():
            catalogue.slots(row, holders)


def _envelope(data: bytes) -> None:
    for file in (data, sealed(data)):
        quiet(lambda text: open_json(text, "file"))(file)
        quiet(lambda text: open_sections(text, "file"))(file)


def _manifest(data: bytes) -> None:
    manifest = read_file(Manifest, Memory("/run", {"/run": {_MANIFEST: sealed(data)}}), _MANIFEST)
    for row in decode_rows(manifest.layout, manifest.group_ranks):
        for rank in row.ranks[:2]:
            row.geometry.pieces(rank)


def _record(data: bytes) -> None:
    read_file(Record, Memory("/run", {"/run": {_RECORD: sealed(data)}}), _RECORD)


def _lease(data: bytes) -> None:
    leases_at(Memory("/run", {"/run": {"epoch-000001.json": sealed(data)}}))


def _table(data: bytes) -> None:
    for row in decode_rows(_json(data), (0, 1)):
        row.geometry.pieces(0)


def mark_of(tree: Tree, root: str) -> dict[str, Any]:
    """What the mark of a deletion of a whole checkpoint says."""
    return {"format": [1, 0], **asdict(removal_of(contents_of(Memory(root, tree))))}


def finish(tree: Tree, root: str) -> Tree:
    """Go on with a deletion in a copy of the tree, and look at what may not have gone; the copy."""
    left = {at: dict(files) for at, files in tree.items()}
    left["/private"] = dict(left[root])
    left["/"] = {_MANIFEST: b"", "notes": b""}
    left[root]["notes"] = b""
    before = {at: dict(files) for at, files in left.items()}
    try:
        finish_removals(Memory(root, left))
    except CheckpointError:
        assert left == before  # it is refused before anything goes
        raise
    finally:
        assert left["/private"].keys() == {*tree[root]}
        assert left["/"].keys() == {_MANIFEST, "notes"} and "notes" in left[root]
    return left


def _mark(data: bytes) -> None:
    finish({"/run": {MARK: sealed(data), _MANIFEST: b""}}, "/run")


def _pin(data: bytes) -> None:
    """Without a pin, this deletion goes on."""
    mark = {"format": [1, 0], "record": None, "groups": []}
    finish({"/run": {MARK: sealed(json.dumps(mark).encode()), _PIN: sealed(data)}}, "/run")


class _Told:
    """A c10d store in which one text stands under all keys. Who reads it without end fails."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._reads = 0

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes:
        self._reads += 1
        assert self._reads < 1000, f"{key} and all before it were read"
        return self._text

    def check(self, keys: list[str]) -> bool:
        return True

    def wait(self, keys: list[str], timeout: timedelta) -> None: ...

    def add(self, key: str, amount: int) -> int:
        return amount

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._text

    def delete_key(self, key: str) -> bool:
        return True

    def clone(self) -> _Told:
        return self


def _message(data: bytes) -> None:
    value, member = b'{"member":0,"value":' + data + b"}", b'{"value":0,"member":' + data + b"}"
    for text in (data, value, member):
        for kind in (None, *_MESSAGES):
            keys = Keys(_Told(text), "fuzz")
            for leader in (0, 1):  # what the leader says to others, and what others say to it
                held = Round("point", leader, 1.0, kind, kind)
                over = OverStore(keys, 1, 2, "rank {}".format)
                quiet(lambda _, o=over, h=held: _heard(o, h))(b"")


def _heard(over: OverStore, held: Round) -> None:
    arrived = list(over.collect(held, Message(1)))
    if held.leader == 0:
        over.share(held, None)
    assert all(0 <= said.member < 2 for said in arrived)


def _hub(data: bytes) -> None:
    """Files that stand beside the weights of a Hugging Face directory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / INDEX
        path.write_bytes(data)
        for read in (read_config, read_lora_config, lambda path: open_directory(path.parent)):
            quiet(lambda _, r=read: r(path))(b"")


def _archive(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank.pt"
        path.write_bytes(data)
        source = SourceFiles()
        record = source.whole(str(path))
        quiet(lambda _: open_archive(source, record))(b"")
        stored_state(source, record)


def _pickle(data: bytes) -> None:
    """The metadata of DCP, and any pickle."""
    with suppress(ValueError):
        read_pickle(data)
    read_metadata(data, ".metadata")


def _name(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    parse_name(text)
    parse_temporary(text)


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return {}


TARGETS: dict[str, Callable[[bytes], object]] = {
    "envelope": _envelope,
    "manifest": _manifest,
    "record": _record,
    "lease": _lease,
    "table": _table,
    "header": lambda data: read_header(lambda low, high: data[low:high], len(data), "file"),
    "object": lambda data: decode_object(_json(data)),
    "name": _name,
    "mark": _mark,
    "pin": _pin,
    "peer-message": _message,
    "hub": _hub,
    "archive": _archive,
    "pickle": _pickle,
    "peer-error": lambda data: error_from_json(_json(data)),
    "peer-found": lambda data: FoundCheckpoint.from_json(_json(data)),
}


def quiet(target: Callable[[bytes], object]) -> Callable[[bytes], None]:
    """The target, without what it may raise."""

    def run(data: bytes) -> None:
        try:
            target(data)
        except CheckpointError as error:
            assert error.message

    return run
