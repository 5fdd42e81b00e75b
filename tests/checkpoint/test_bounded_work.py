"""What a reader does is bounded by what it reads. The work is counted, not timed."""

from __future__ import annotations

import io
import pickle
import random
import tracemalloc
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import smckpt
from smckpt.checkpoint.reading.catalogue import SavedPieces
from smckpt.checkpoint.records.sealed import read_json, strict_json
from smckpt.errors import CheckpointError, StateError
from smckpt.formats.pickled import read_pickle
from smckpt.formats.readers.torch_files import load_inert
from smckpt.formats.source_files import SourceFiles
from smckpt.formats.torch_archive import plain_load, read_value
from smckpt.layout.entries import Entry
from smckpt.layout.flat_geometry import FlatGeometry, FlatUnit, Segment
from smckpt.layout.mesh import Mesh
from smckpt.layout.strided import Box
from smckpt.translate.beside import code_files
from smckpt.translate.exports.sidecars import tokenizer_of, write_sidecars
from tests.support.limits import seconds, within

SPARSE = 6 << 30
MIB = 1 << 20


class Name(str):
    """A name that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def peak_of(act: Callable[[], Any], refused: type[BaseException] | tuple[Any, ...]) -> int:
    """The bytes that Python took at most until it refused."""
    tracemalloc.start()
    try:
        with pytest.raises(refused):
            act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_names_of_a_flat_unit_are_looked_up_and_not_searched_for() -> None:
    count = 2000
    segments = tuple(Segment(Name(f"n{at}"), (2,), 2) for at in range(count))
    mesh = Mesh(("replicate", "shard"), (1, 1), (0,))
    rule = FlatGeometry(FlatUnit(segments, 2 * count), mesh, None)
    row = Entry(("flat",), "float32", rule, (), (), (0,))
    Name.compared = 0
    pieces = SavedPieces([row], [(0,)])
    for name in pieces.by_name:
        assert len(pieces.all(name)) == 1
    assert Name.compared < 30 * count


def test_boxes_that_all_cut_each_other_are_refused_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, intersect = [0], Box.intersect

    def counted(one: Box, other: Box) -> Box | None:
        steps[0] += 1
        return intersect(one, other)

    monkeypatch.setattr(Box, "intersect", counted)
    boxes = [Box(((7 * n) % 12_000, (7 * n + 3) % 12_000), (6000 + n,) * 2) for n in range(3000)]
    whole = Box.whole((24_000, 24_000))
    for act in (lambda: whole.shared(boxes), lambda: whole.subtract(*boxes)):
        steps[0] = 0
        with pytest.raises(CheckpointError, match="3000 parts of a tensor overlap in too many"):
            act()
        assert steps[0] < 250_000


def test_boxes_that_do_not_overlap_may_come_in_any_order() -> None:
    tiles = [Box((3 * a, 5 * b), (3, 5)) for a in range(32) for b in range(32)]
    random.Random(1).shuffle(tiles)
    whole, cut = Box.whole((96, 160)), Box((1, 2), (90, 151))
    assert sorted(number for number, _ in whole.shared(tiles)) == [*range(1024)]
    assert sum(part.numel for _, part in cut.shared(tiles)) == cut.numel
    assert whole.subtract(*tiles) == []


def test_a_key_that_stands_twice_is_named() -> None:
    with pytest.raises(ValueError, match="'b' occurs twice"):
        strict_json('{"a": 1, "b": 2, "c": 3, "b": 4, "a": 5}')


def sparse(path: Path) -> Path:
    with path.open("wb") as file:
        file.truncate(SPARSE)
    return path


def test_a_config_of_gigabytes_is_refused_unread(tmp_path: Path) -> None:
    path = sparse(tmp_path / "config.json")
    assert peak_of(lambda: read_json(path), ValueError) < MIB


def test_code_of_gigabytes_is_not_searched_for_imports(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoConfig": "large.Config"}}')
    large = sparse(tmp_path / "large.py")
    tracemalloc.start()
    try:
        assert code_files(tmp_path) == [large]  # a copy refuses it by its size
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


def test_empty_lines_of_code_are_passed_over(tmp_path: Path) -> None:
    """The search took time by the square of their number: hours for a megabyte."""
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoConfig": "long.Config"}}')
    (tmp_path / "long.py").write_text("\n" * MIB + "if True:\n\tfrom .more import x\n")
    (tmp_path / "more.py").write_text("")
    with within(60):
        assert [path.name for path in code_files(tmp_path)] == ["long.py", "more.py"]


def test_a_tokenizers_file_of_gigabytes_is_refused_unread(tmp_path: Path) -> None:
    from smckpt.storage import open_storage
    from smckpt.translate.files import Output

    folder = tmp_path / "in"
    folder.mkdir()
    sparse(folder / "tokenizer.json")
    output = Output(open_storage(str(tmp_path / "out")), ())
    chosen = tokenizer_of(folder, None)
    peak = peak_of(lambda: write_sidecars(output, None, chosen, None, (), None), CheckpointError)
    assert peak < MIB


@pytest.mark.parametrize("member", ["archive/data/0", "archive/data.pkl", "archive/more"])
def test_an_archive_that_inflates_is_refused_unread(tmp_path: Path, member: str) -> None:
    plain = io.BytesIO()
    torch.save({"w": torch.ones(4)}, plain)
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(path, "w") as new:
        for info in old.infolist():
            name = f"archive/{info.filename.partition('/')[2]}"
            if name != member:
                new.writestr(name, old.read(info))
        new.writestr(member, bytes(64 * MIB), zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < MIB
    assert peak_of(lambda: load_inert(path), CheckpointError) < 8 * MIB
    assert peak_of(lambda: plain_load(path), ValueError) < 8 * MIB
    data = io.BytesIO(path.read_bytes())
    assert peak_of(lambda: plain_load(data), ValueError) < 8 * MIB


def test_a_pickle_that_copies_one_list_again_and_again_is_refused() -> None:
    items = list(range(10_000))
    make = b"cbuiltins\nset\nh\x00\x85R0"  # set(the list that the memo has), and drop it
    head = pickle.dumps(items, protocol=2)
    body = b"\x80\x02" + head[2:-1] + make * 10_000 + b"."
    assert len(body) < MIB
    assert peak_of(lambda: read_pickle(body), ValueError) < 64 * MIB


def lists_of_lists(inner: Any) -> list[Any]:
    """As many items as twice its depth, which a walk meets 2 ** 24 times."""
    held = [inner]
    for _ in range(24):
        held = [held, held]
    return held


def holds_itself() -> dict[str, Any]:
    held: dict[str, Any] = {"model": torch.ones(2)}
    held["self"] = [held]
    return held


@pytest.mark.parametrize(
    "steps", [lists_of_lists(1), lists_of_lists(torch.ones(1)), holds_itself()]
)
@pytest.mark.parametrize("form", ["file", "file of old torch", "value of DCP"])
def test_a_state_in_which_a_walk_does_not_end_is_refused(
    tmp_path: Path, steps: Any, form: str
) -> None:
    path = str(tmp_path / "state")
    torch.save({"steps": steps}, path, _use_new_zipfile_serialization=form != "file of old torch")
    with within(seconds(60)), pytest.raises(StateError, match="again and again|holds itself"):
        if form == "value of DCP":
            with closing(SourceFiles()) as source:
                read_value(source, source.whole(path), "steps")
        smckpt.load(checkpoint_id=path)
