"""Forged checkpoints, each with checksums that are right all the way up, before every reader.

A reader refuses one by a typed error, or gives what was saved. What `verify` calls good loads.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import smckpt
from smckpt import ExportOptions, export_hf
from smckpt.checkpoint.commits.choose import choose_commit
from smckpt.checkpoint.commits.contents import contents_of
from smckpt.checkpoint.reading.committed import open_catalogue
from smckpt.checkpoint.upkeep.compare import compare_checkpoints
from smckpt.checkpoint.upkeep.transfer import copy_checkpoint
from smckpt.checkpoint.upkeep.verify import verify_checkpoint
from smckpt.errors import CheckpointError
from smckpt.storage import open_storage
from tests.support.faults.forge import Change, find, reforge, reforge_header, reseal, seal_record
from tests.support.limits import seconds
from tests.support.saves import hybrid, state_of
from tests.support.synthetic import Step

GROUPS = {"part0": (0, 2), "part1": (1, 3)}
HUGE = 1 << 62
WEIGHT, SLICED = "model.layers.0.weight", "model.layers.1.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """Two groups, one save; and what it holds."""
    root = tmp_path_factory.mktemp("good") / "run"
    Step(root, GROUPS, state_of(hybrid((0, 1, 2, 3), 2))).save()
    return root


# -- forgeries -------------------------------------------------------------------------------------


def header(change: Change) -> Callable[[Path], None]:
    def forge(root: Path) -> None:
        reforge_header(sorted((root / "part0").glob("data-*r00000-0.safetensors"))[0], change)
        reseal(root)

    return forge


def tables(change: Change) -> Callable[[Path], None]:
    """The same in every table of tensors, of parts and manifests."""

    def forge(root: Path) -> None:
        for kind in ("part", "manifest"):
            for path in find(root, kind):
                reforge(path, lambda body: change(body["layout"]))
        reseal(root)

    return forge


def part(change: Change) -> Callable[[Path], None]:
    def forge(root: Path) -> None:
        reforge(find(root / "part0", "part")[0], change)
        reseal_above(root)

    return forge


def manifest(change: Change) -> Callable[[Path], None]:
    def forge(root: Path) -> None:
        reforge(find(root / "part0", "manifest")[0], change)
        seal_record(root)

    return forge


def record(change: Change) -> Callable[[Path], None]:
    return lambda root: reforge(find(root, "record")[0], change) and None


def checksums(data: bytes) -> Callable[[Path], None]:
    """In place of a data file's checksums, and known as they are to its part and manifest."""

    def forge(root: Path) -> None:
        path = sorted((root / "part0").glob("data-*r00000-0.crc"))[0]
        path.write_bytes(data)

    return forge


def reseal_above(root: Path) -> None:
    """Of the parts on: what is said of files stays as it was forged."""
    from smckpt.checkpoint.records.crc import crc64, hex64

    for path in find(root, "manifest"):

        def told(body: dict[str, Any], folder: Path = path.parent) -> None:
            for one in body["parts"]:
                one["crc64"] = hex64(crc64((folder / one["name"]).read_bytes()))

        reforge(path, told)
    seal_record(root)


def put(**values: Any) -> Change:
    return lambda body: body.update(values)


def tensor(name: str = WEIGHT, **values: Any) -> Change:
    return lambda h: h[name].update(values)


def row(number: int = 1, **values: Any) -> Change:
    return lambda layout: layout["rows"][number].update(values)


def geometry(number: int = 1, **values: Any) -> Change:
    return lambda layout: layout["rows"][number]["geometry"].update(values)


def mesh(**values: Any) -> Change:
    return lambda layout: layout["meshes"][0].update(values)


def file(**values: Any) -> Change:
    return lambda body: body["files"][0].update(values)


def entry(**values: Any) -> Change:
    return lambda body: body["parts"][0].update(values)


def group(**values: Any) -> Change:
    return lambda body: body["groups"][0].update(values)


def slices(*bounds: int) -> str:
    return json.dumps({SLICED: bounds})


FORGERIES: dict[str, Callable[[Path], None]] = {
    # the header of a data file
    "header: an offset before the data": header(tensor(data_offsets=[-8, 112])),
    "header: an offset behind the file": header(tensor(data_offsets=[HUGE, HUGE + 120])),
    "header: offsets that cross": header(tensor(data_offsets=[128, 8])),
    "header: two tensors at one place": header(tensor(data_offsets=[0, 120])),
    "header: a shape of more bytes": header(tensor(shape=[5, 7])),
    "header: a shape that is negative": header(tensor(shape=[-5, -6])),
    "header: a shape that overflows": header(tensor(shape=[1 << 32, 1 << 32])),
    "header: a shape with a fraction": header(tensor(shape=[5.0, 6])),
    "header: a shape of words": header(tensor(shape=["5", 6])),
    "header: an unknown dtype": header(tensor(dtype="F4_E9")),
    "header: another dtype of the size": header(tensor(dtype="I32")),
    "header: a dtype that is a list": header(tensor(dtype=["F32"])),
    "header: a tensor is missing": header(lambda h: h.pop(WEIGHT)),
    "header: another tensor": header(lambda h: h.update({"x": h.pop(WEIGHT)})),
    "header: no slices": header(lambda h: h["__metadata__"].pop("smckpt.slices")),
    "header: slices that are no JSON": header(
        lambda h: h["__metadata__"].update({"smckpt.slices": "{"})
    ),
    "header: a slice of another place": header(
        lambda h: h["__metadata__"].update({"smckpt.slices": slices(4, 6)})
    ),
    "header: a slice that is negative": header(
        lambda h: h["__metadata__"].update({"smckpt.slices": slices(-2, 0)})
    ),
    "header: a huge slice": header(
        lambda h: h["__metadata__"].update({"smckpt.slices": slices(0, HUGE)})
    ),
    "header: metadata that is a list": header(put(__metadata__=[])),
    # tables of tensors
    "table: a shape that is larger": tables(geometry(shape=[12, 6])),
    "table: a shape that is smaller": tables(geometry(shape=[8, 6])),
    "table: the shape turned round": tables(geometry(shape=[6, 10])),
    "table: a huge shape": tables(geometry(shape=[HUGE, HUGE])),
    "table: a shape that is negative": tables(geometry(shape=[-10, -6])),
    "table: a shape of too many dimensions": tables(geometry(shape=[1] * 300)),
    "table: cut along another dimension": tables(geometry(placements=["R", "S1"])),
    "table: cut along a dimension that is not there": tables(geometry(placements=["R", "S7"])),
    "table: not cut": tables(geometry(placements=["R", "R"])),
    "table: cut twice": tables(geometry(placements=["S0", "S0"])),
    "table: an unknown placement": tables(geometry(placements=["R", "Q0"])),
    "table: too few placements": tables(geometry(placements=["R"])),
    "table: a mesh that is not there": tables(geometry(mesh=7)),
    "table: a mesh by a negative number": tables(geometry(mesh=-1)),
    "table: another fqn": tables(geometry(fqn="layers.1.weight")),
    "table: a path with a dict": tables(row(path=["model", {"a": 1}])),
    "table: an empty path": tables(row(path=[])),
    "table: the path of another row": tables(row(path=["model", "layers.1.weight"])),
    "table: another dtype": tables(row(dtype="float64")),
    "table: an unknown dtype": tables(row(dtype="float3")),
    "table: an item of a dict that is a number": tables(row(before=7)),
    "table: a row is missing": tables(lambda layout: layout["rows"].pop(1)),
    "table: a row twice": tables(lambda layout: layout["rows"].append(layout["rows"][1])),
    "table: no meshes": tables(put(meshes=[])),
    "table: a mesh of other ranks": tables(mesh(ranks=[[4, 4, 1]])),
    "table: a mesh of a rank twice": tables(mesh(ranks=[[0, 2, 1], [0, 2, 1]])),
    "table: a mesh of endless ranks": tables(mesh(ranks=[[0, HUGE, 1]])),
    "table: a mesh with a step of nothing": tables(mesh(ranks=[[0, 4, 0]])),
    "table: a mesh of another shape": tables(mesh(shape=[4, 1])),
    "table: a huge mesh": tables(mesh(shape=[1 << 31, 1 << 31])),
    # parts
    "part: a size that is larger": part(file(size=1 << 40)),
    "part: a size that is smaller": part(file(size=8)),
    "part: a size below nothing": part(file(size=-1)),
    "part: a file above": part(
        file(name="../part1/data-000000000001-00000000-r00001-0.safetensors")
    ),
    "part: checksums above": part(file(crc_name="../x.crc")),
    "part: values of another form": part(put(objects=[])),
    "part: a value without a path": part(put(objects={"rank": {"path": [], "value": 0}})),
    "part: a value in a tensor's place": part(
        put(objects={WEIGHT: {"path": ["model", "layers.0.weight"], "value": 0}})
    ),
    "part: a value of an unknown kind": part(
        put(objects={"rank": {"path": ["rank"], "value": {"~": "os.system", "v": "true"}}})
    ),
    "part: another format": part(put(format=[99, 0])),
    "part: no fingerprint": part(lambda body: body.pop("fingerprint")),
    "part: optimizers of another form": part(put(optimizers={"optimizer": 7})),
    # manifests
    "manifest: a rank below nothing": manifest(entry(rank=-1)),
    "manifest: a rank that is huge": manifest(entry(rank=HUGE)),
    "manifest: a part above": manifest(
        entry(name="../part1/part-000000000001-00000000-r00001.json")
    ),
    "manifest: a part that is missing": manifest(
        entry(name="part-000000000000-00000009-r00000.json")
    ),
    "manifest: a part without files": manifest(entry(files=[])),
    "manifest: a topology of words": manifest(put(topology={"tp": "two"})),
    "manifest: a topology of a huge world": manifest(put(topology={"world_size": HUGE})),
    "manifest: metadata that is a list": manifest(put(metadata=[1])),
    "manifest: ranks of nobody": manifest(put(group_ranks=[])),
    "manifest: a time that is no number": manifest(put(committed_at="now")),
    "manifest: a time beyond all clocks": manifest(put(committed_at=1 << 80)),
    "manifest: a table that is none": manifest(put(layout=None)),
    # records
    "record: a manifest above": record(group(manifest="../part1/manifest-000001-00000000-0.json")),
    "record: a coordinator of another group": record(group(coordinator=3)),
    "record: a huge size": record(put(nbytes=1 << 70)),
    "record: a size below nothing": record(put(nbytes=-1)),
    "record: a step that is text": record(put(step="0")),
    "record: a checksum of no digits": record(group(crc64="x" * 16)),
    # checksums of blocks
    "checksums: none": checksums(b""),
    "checksums: of half a block": checksums(b"1234"),
    "checksums: of many blocks": checksums(bytes(8 * 1000)),
    "checksums: zeros": checksums(bytes(8)),
}


# -- readers ---------------------------------------------------------------------------------------


def loaded(root: Path) -> dict[str, Any]:
    found = smckpt.load(None, checkpoint_id=root, no_dist=True)
    assert isinstance(found, dict)
    return dict(found)


def exported(root: Path) -> dict[str, torch.Tensor]:
    out = root.parent / "exported"
    shutil.rmtree(out, ignore_errors=True)
    options = ExportOptions(against_model=False, naming="module", allow_nonfinite=True)
    export_hf(root, out, prefix="model", options=options)
    return {f"model.{name}": one for name, one in load_file(out / "model.safetensors").items()}


def copied(root: Path) -> dict[str, Any]:
    shutil.rmtree(root.parent / "copied", ignore_errors=True)
    copy_checkpoint(root, root.parent / "copied")
    return loaded(root.parent / "copied")


def catalogued(root: Path) -> None:
    catalogue = open_catalogue(open_storage(str(root)))
    for name, piece in catalogue.pieces.by_name.items():
        assert name and piece
    for rank in sorted(catalogue.object_ranks):
        catalogue.objects(rank)


def compared(good: Path, root: Path) -> bool:
    return compare_checkpoints(good, root).equal


def equal(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return found.keys() <= wanted.keys() and all(equal(found[k], wanted[k]) for k in found)
    if isinstance(wanted, torch.Tensor):
        return isinstance(found, torch.Tensor) and torch.equal(found, wanted)
    return bool(found == wanted)


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {f"model.{name}": tensor for name, tensor in state["model"].items()}


@pytest.mark.parametrize("what", FORGERIES)
def test_no_reader_takes_a_forgery_for_what_it_is_not(
    tmp_path: Path, good: Path, what: str
) -> None:
    root = tmp_path / "run"
    shutil.copytree(good, root)
    FORGERIES[what](root)
    assert {p.name: p.read_bytes() for p in root.rglob("*.*")} != {
        p.name: p.read_bytes() for p in good.rglob("*.*")
    }, "nothing was forged"
    wanted = loaded(good)
    readers: dict[str, Callable[[Path], Any]] = {
        "choose": lambda at: choose_commit(open_storage(str(at))),
        "contents": lambda at: contents_of(open_storage(str(at))),
        "ls": lambda at: smckpt.find_checkpoints(at),
        "catalogue": catalogued, "load": loaded, "export": exported, "cp": copied,
        "diff": partial(compared, good),
    }  # fmt: skip
    began = time.monotonic()
    taken = {}
    for name, read in readers.items():
        try:
            taken[name] = read(root)
        except CheckpointError as error:
            assert str(error) and error.remedy, name
    assert time.monotonic() - began < seconds(20)
    for name in ("load", "cp"):
        assert name not in taken or equal(taken[name], wanted), f"{name} gives what was not saved"
    assert not taken.get("diff") or "load" in taken, "diff finds it equal, and it does not load"
    assert "export" not in taken or equal(taken["export"], flat(wanted))
    if verify_checkpoint(str(root)).ok:
        assert {"load", "cp", "catalogue", "choose", "contents"} <= taken.keys()
        assert taken["ls"]


def test_the_readers_read_what_is_not_forged(tmp_path: Path, good: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(good, root)
    before = {path: path.read_bytes() for path in sorted(root.rglob("*.*"))}
    reseal(root)
    assert {path: path.read_bytes() for path in sorted(root.rglob("*.*"))} == before
    wanted = loaded(good)
    assert equal(loaded(root), wanted) and equal(copied(root), wanted)
    assert equal(exported(root), flat(wanted)) and exported(root).keys() == flat(wanted).keys()
    catalogued(root)
    assert compared(good, root)
    assert verify_checkpoint(str(root)).ok


def test_there_are_as_many_forgeries_as_the_first_examination_had() -> None:
    assert len(FORGERIES) >= 69
