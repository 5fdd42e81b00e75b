"""A checkpoint of each version that landed still loads, to the last bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import smckpt
from smckpt.checkpoint.reading.catalogue import Catalogue
from smckpt.checkpoint.reading.committed import open_catalogue
from smckpt.checkpoint.reading.loading_rank import LoadingRank
from smckpt.checkpoint.reading.plan import plan_local, plan_logical
from smckpt.checkpoint.reading.read import execute
from smckpt.checkpoint.records.format import (
    FORMAT_VERSION,
    PREFIX_SHARDING_VERSION,
    Manifest,
    Part,
    Record,
)
from smckpt.checkpoint.records.rows import decode_rows
from smckpt.checkpoint.records.sealed import decode_body, open_json
from smckpt.checkpoint.upkeep.verify import verify_checkpoint
from smckpt.errors import CheckpointNotFoundError
from smckpt.layout.entries import Entry
from smckpt.layout.geometry import MeshGeometry
from smckpt.layout.mesh import Mesh, Placement
from smckpt.storage import open_storage
from tests.support.faults.copies import contents
from tests.support.saves import pattern
from tests.support.tools import make_fixture

FIXTURES = sorted(make_fixture.ROOT.glob("format-*"))


@pytest.fixture(params=FIXTURES, ids=lambda path: path.name)
def fixture(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture
def catalogue(fixture: Path) -> Catalogue:
    return open_catalogue(open_storage(str(fixture / "checkpoint")))


def read(catalogue: Catalogue, entries: list[Entry], rank: int, *, local: bool) -> list[bytes]:
    plan = plan_local if local else plan_logical
    found = plan(LoadingRank(catalogue, rank, make_fixture.GROUPS[rank % 2]), entries)
    buffers = [bytearray(entry.nbytes) for entry in entries]
    execute(found.copies, [memoryview(buffer) for buffer in buffers], threads=2)
    return [bytes(buffer) for buffer in buffers]


@pytest.mark.parametrize("version", [FORMAT_VERSION, PREFIX_SHARDING_VERSION])
def test_there_is_a_fixture_of_this_version(version):
    assert f"format-{version[0]}.{version[1]}" in {path.name for path in FIXTURES}


def test_every_json_file_of_it_reads_back(fixture):
    kinds = {"record": Record, "manifest": Manifest, "part": Part}
    seen = set()
    for path in (fixture / "checkpoint").rglob("*.json"):
        body = open_json(path.read_bytes(), str(path))
        kind = path.name.split("-")[0]
        if kind in kinds:
            read_back = decode_body(kinds[kind], body, str(path))
            if kind != "record":
                assert decode_rows(read_back.layout, read_back.group_ranks)
            seen.add(kind)
            if kind == "manifest":
                assert f"format-{body['format'][0]}.{body['format'][1]}" == fixture.name
    assert seen == set(kinds)


def test_every_logical_tensor_of_it_is_what_was_saved(fixture, catalogue):
    expected = json.loads((fixture / "expected.json").read_text())
    assert set(expected) <= set(catalogue.logical)
    mesh = Mesh(("r", "s"), (1, 1), (0,))
    for name, text in expected.items():
        tensor = catalogue.logical[name]
        rule = MeshGeometry(name, tensor.shape, mesh, (Placement("replicate"),) * 2)
        entry = Entry((name,), tensor.dtype, rule, (), (), (0,))
        assert read(catalogue, [entry], 0, local=False) == [bytes.fromhex(text)]


def test_it_is_read_in_a_bucket_too_as_it_lies_there(fixture, s3_root):
    for way, data in contents(fixture / "checkpoint").items():
        directory, _, name = way.rpartition("/")
        open_storage(f"{s3_root}/{directory}").put(name, data)
    report = verify_checkpoint(s3_root)
    assert report.ok and report.files == 4


@pytest.mark.parametrize("rank", range(4))
def test_every_rank_gets_its_own_arrays_back(fixture, rank):
    catalogue = open_catalogue(open_storage(str(fixture / "checkpoint" / f"shard{rank % 2}")))
    entries = make_fixture.entries_of(rank)
    for entry, data in zip(entries, read(catalogue, entries, rank, local=True), strict=True):
        if entry.geometry.per_rank:
            assert data == pattern(entry.nbytes, 50 + rank)
        else:
            assert data == make_fixture.bytes_of(entry, rank), entry.key


@pytest.mark.parametrize("rank", range(4))
def test_every_rank_gets_its_own_values_back(catalogue, rank):
    found = catalogue.objects(rank)
    expected = make_fixture.objects_of(rank)
    assert repr({key: value for key, (_, value) in found.items()}) == repr(
        {key: value for key, (_, value) in expected.items()}
    )
    assert {key: path for key, (path, _) in found.items()} == {
        key: tuple(path) for key, (path, _) in expected.items()
    }


def test_it_says_what_it_is(catalogue):
    assert (catalogue.kind, catalogue.step, len(catalogue.manifests)) == ("LOCAL", 70, 2)
    assert catalogue.topology == {"world_size": 4, "hybrid_shard_degree": 2}
    assert catalogue.metadata["loss"] == 0.125


def test_verify_finds_nothing_wrong_with_it_and_a_changed_byte_at_once(fixture, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(fixture / "checkpoint", copy)
    assert verify_checkpoint(str(copy)).ok
    victim = max(copy.rglob("*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-3] ^= 4
    victim.write_bytes(data)
    report = verify_checkpoint(str(copy))
    assert not report.ok and victim.name in str(report)


def test_without_its_record_it_does_not_exist(fixture, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(fixture / "checkpoint", copy)
    for path in copy.glob("record-*"):
        path.unlink()
    for place in (copy, copy / "shard0"):
        with pytest.raises(CheckpointNotFoundError):
            open_catalogue(open_storage(str(place)))


def test_numbers_of_an_optimizer_outside_a_block_are_no_names_of_an_earlier_block() -> None:
    """Written by the smckpt of 28 November 2026, in a process that had opened a block."""
    import torch

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    smckpt.load(
        {"model": model, "optimizer": optimizer},
        checkpoint_id=make_fixture.ROOT / "numbered-1.1",
    )
    assert [*optimizer.state] == [*model.parameters()]
    for state in optimizer.state.values():
        assert state["step"] == 1 and torch.allclose(state["exp_avg"], torch.tensor(0.1))


def test_parts_of_flat_parameters_keep_the_names_of_that_block() -> None:
    """Written by the same smckpt, of an FSDP1 model on two ranks: they have no other names."""
    loaded = smckpt.load(checkpoint_id=make_fixture.ROOT / "numbered-flat-1.1")
    assert loaded is not None
    shapes = {n: tuple(s["exp_avg"].shape) for n, s in loaded["optimizer"]["state"].items()}
    assert shapes == {"0.weight": (6, 4), "0.bias": (6,), "2.weight": (2, 6), "2.bias": (2,)}
