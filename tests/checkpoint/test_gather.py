"""Parts of ranks that have equal tables: one has the table, the others name that rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import smckpt
from smckpt.checkpoint.commits.part import table_of, tables_digest
from smckpt.checkpoint.reading.committed import open_catalogue
from smckpt.checkpoint.records import sealed
from smckpt.checkpoint.records.format import PACKED_VERSION, PART_VERSION
from smckpt.checkpoint.records.rows import encode_rows
from smckpt.errors import CheckpointError, FormatVersionError, StateError
from smckpt.layout.entries import Entry
from smckpt.layout.geometry import PerRankGeometry
from smckpt.layout.image import compile_layout
from smckpt.storage import Access
from tests.support.launch import run_ranks
from tests.support.saves import Group, State, hybrid, state_of
from tests.support.tools import make_fixture

RANKS = (0, 1, 2, 3)
OPTIMIZERS = {"optimizer": {"form": "id", "ids": [["w0", "w1"]]}}


def table(rank: int, state: State | None = None) -> dict[str, Any]:
    entries, _ = (state or state_of(hybrid(RANKS, 1)))(rank)
    return encode_rows(compile_layout(entries, rank=rank, group_ranks=RANKS).entries, {})


def named(owner: int) -> dict[str, Any]:
    """Fields of the parts: the owner's has the tables, the others name it."""
    digest = tables_digest(table(owner), OPTIMIZERS)
    return {
        "layout": lambda rank: table(rank) if rank == owner else table_of(owner, digest),
        "optimizers": lambda rank: OPTIMIZERS if rank == owner else {},
    }


def manifest_of(folder: Path) -> dict[str, Any]:
    (found,) = folder.glob("manifest-*.json")
    body: dict[str, Any] = json.loads(found.read_bytes())["body"]
    return body


@pytest.mark.parametrize("owner", [0, 2, 3])
def test_the_manifest_is_that_of_parts_with_a_table_each(tmp_path: Path, owner: int) -> None:
    Group(tmp_path / "each", RANKS).save(optimizers=OPTIMIZERS)
    Group(tmp_path / "one", RANKS).save(**named(owner))
    each, one = manifest_of(tmp_path / "each"), manifest_of(tmp_path / "one")
    assert one["layout"] == each["layout"]
    assert one["optimizers"] == each["optimizers"] == OPTIMIZERS
    sizes = {path.name[-6]: path.stat().st_size for path in (tmp_path / "one").glob("part-*")}
    assert all(size < sizes[str(owner)] for rank, size in sizes.items() if rank != str(owner))


def test_a_rank_has_the_optimizers_of_the_rank_whose_table_it_names(tmp_path: Path) -> None:
    """Pipeline stages number other parameters under one path; the manifest has the first's."""
    last = {"optimizer": {"form": "id", "ids": [["w1"]]}}
    wanted = {0: OPTIMIZERS, 1: OPTIMIZERS, 2: last, 3: last}
    owners = {0: 1, 1: 1, 2: 3, 3: 3}

    def layout(rank: int) -> dict[str, Any]:
        digest = tables_digest(table(rank), wanted[rank])
        return table(rank) if owners[rank] == rank else table_of(owners[rank], digest)

    Group(tmp_path, RANKS).save(
        layout=layout, optimizers=lambda rank: wanted[rank] if owners[rank] == rank else {}
    )
    catalogue = open_catalogue(Access().open(str(tmp_path)))
    assert {rank: catalogue.optimizers_of(rank) for rank in RANKS} == wanted


def with_one_more(rank: int) -> tuple[list[Entry], dict[str, bytes]]:
    """Odd ranks have a tensor that the others lack."""
    entries, data = state_of(hybrid(RANKS, 1))(rank)
    if rank % 2:
        kept = PerRankGeometry(("own",), (), (rank,))
        entries.append(Entry(("own",), "int64", kept, (), (), (rank,)))
        data["own"] = rank.to_bytes(8, "little")
    return entries, data


def test_rows_that_some_ranks_lack_name_the_ranks_that_have_them(tmp_path: Path) -> None:
    owners = {0: 2, 1: 1, 2: 2, 3: 1}

    def layout(rank: int) -> dict[str, Any]:
        owned = table(owners[rank], with_one_more)
        return owned if owners[rank] == rank else table_of(owners[rank], tables_digest(owned, {}))

    Group(tmp_path / "each", RANKS, state=with_one_more).save()
    Group(tmp_path / "one", RANKS, state=with_one_more).save(layout=layout)
    each, one = (
        {json.dumps(row["path"]): row for row in manifest_of(tmp_path / name)["layout"]["rows"]}
        for name in ("each", "one")
    )
    assert one == each
    assert one['["own"]']["ranks"] == [[1, 2, 2]]


WRONG: dict[str, Callable[[str], dict[str, Any]]] = {
    "a rank that names another": lambda digest: table_of(1, digest),
    "a rank that is in no part": lambda digest: table_of(9, digest),
    "itself": lambda digest: table_of(3, digest),
    "another table": lambda _: table_of(0, "0" * 32),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_part_that_names_no_rank_with_this_table_is_refused(tmp_path: Path, wrong: str) -> None:
    digest = tables_digest(table(0), {})

    def layout(rank: int) -> dict[str, Any]:
        if rank == 0:
            return table(0)
        return WRONG[wrong](digest) if rank == 3 else table_of(0, digest)

    with pytest.raises(StateError, match="the part of rank 3 names the table of rank"):
        Group(tmp_path, RANKS).save(layout=layout)
    assert not list(tmp_path.glob("manifest-*"))


def saves(folder: str) -> list[dict[str, int]]:
    """Ranks whose state has other tensors from the third save on; rank 1's keeps one of its own."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    state: dict[str, Any] = {
        f"w{i}": distribute_tensor(torch.arange(8.0) + i, mesh, [Shard(0)]) for i in range(20)
    }
    out = []
    for step in range(4):
        if step == 2:
            state["more"] = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        if step == 3 and dist.get_rank() == 1:
            state["own"] = torch.arange(3.0)
        smckpt.save(state, checkpoint_id=f"{folder}/{step}", step=step)
        again = {key: torch.zeros_like(value) for key, value in state.items()}
        smckpt.load(again, checkpoint_id=f"{folder}/{step}")
        for key, value in state.items():
            ours, saved = (getattr(one, "_local_tensor", one) for one in (again[key], value))
            assert torch.equal(ours, saved), key
        dist.barrier()
        bodies = [
            json.loads(p.read_bytes())["body"] for p in Path(folder, str(step)).glob("part-*")
        ]
        out.append({str(body["rank"]): len(body["layout"].get("rows", ())) for body in bodies})
    return out


def test_a_save_writes_a_table_once_for_all_ranks_that_have_it(tmp_path: Path) -> None:
    found = run_ranks(saves, 2, str(tmp_path))
    assert found[0] == found[1]
    rows = [sorted(each.values()) for each in found[0]]
    assert rows == [[0, 20], [0, 20], [0, 21], [21, 22]]


@pytest.mark.parametrize("folder", sorted(make_fixture.ROOT.glob("parts-*")), ids=lambda p: p.name)
def test_parts_of_version_3_load_and_are_verified(folder: Path) -> None:
    """Made by `tests.support.tools.make_fixture`; one of the two parts names the other's table."""
    import torch

    bodies = [json.loads(path.read_bytes())["body"] for path in folder.glob("part-*")]
    assert sorted("digest" in body["layout"] for body in bodies) == [False, True]
    loaded = smckpt.load(checkpoint_id=folder)
    assert loaded is not None and loaded["step"] == 7
    assert torch.equal(loaded["model"]["w"], torch.arange(12.0).view(4, 3))
    assert torch.equal(loaded["optimizer"]["state"][0]["momentum_buffer"], torch.ones(4, 3))
    assert smckpt.verify_checkpoint(folder).ok


def test_there_are_fixtures_of_the_versions_of_now() -> None:
    kinds = {"parts": PART_VERSION, "packed": PACKED_VERSION}
    now = {f"{kind}-{version[0]}.{version[1]}" for kind, version in kinds.items()}
    assert now <= {path.name for path in make_fixture.ROOT.iterdir()}


def test_packed_tables_load_and_are_verified() -> None:
    folder = make_fixture.ROOT / "packed-4.0"
    for path in (*folder.glob("part-*"), *folder.glob("manifest-*")):
        body = json.loads(path.read_bytes())["body"]
        assert body["format"] == [4, 0] and "layout" in body["packed"]
    loaded = smckpt.load(checkpoint_id=folder)
    assert loaded is not None and loaded["step"] == 7
    assert [int(each) for each in loaded["model"].values()] == [*range(400)]
    assert smckpt.verify_checkpoint(folder).ok


def test_an_older_reader_refuses_such_a_part_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed, "PACKED_VERSION", (2, 1))  # the highest that it knows
    with pytest.raises(FormatVersionError, match="install a newer smckpt"):
        smckpt.load(checkpoint_id=make_fixture.ROOT / "parts-3.0")


def test_the_manifest_does_not_show_which_rank_wrote_a_table(tmp_path: Path) -> None:
    """Ranks 0 and 2 have one table, ranks 1 and 3 another, and their optimizers differ."""
    of = {rank: {"optimizer": {"form": "id", "ids": [[f"w{rank % 2}"]]}} for rank in RANKS}

    def saved(name: str, owners: dict[int, int]) -> tuple[Any, Any]:
        def layout(rank: int) -> dict[str, Any]:
            own = table(rank, with_one_more)
            if owners[rank] == rank:
                return own
            owned = table(owners[rank], with_one_more)
            return table_of(owners[rank], tables_digest(owned, of[owners[rank]]))

        Group(tmp_path / name, RANKS, state=with_one_more).save(
            layout=layout, optimizers=lambda rank: of[rank] if owners[rank] == rank else {}
        )
        body = manifest_of(tmp_path / name)
        return body["layout"], body["optimizers"]

    first = saved("first", {0: 0, 1: 1, 2: 0, 3: 1})
    assert first[1] == of[0]
    assert saved("late", {0: 2, 1: 1, 2: 2, 3: 1}) == first
    assert saved("later", {0: 2, 1: 3, 2: 2, 3: 3}) == first


def saves_unlike(folder: str) -> list[str]:
    """What each of several saves said; in each rank 1 has other shards than rank 0."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))

    def cut(*shape: int, dtype: torch.dtype = torch.float32, dim: int = 0) -> Any:
        return distribute_tensor(torch.ones(*shape, dtype=dtype), mesh, [Shard(dim)])

    whole, more = {"w": cut(4, 4)}, {"w": cut(4, 4), "x": cut(4, 2)}
    moment = {"state": {0: {"exp_avg": cut(4, 4)}}, "param_groups": [{"params": [0]}]}
    none = {"state": {}, "param_groups": [{"params": [0]}]}
    pairs = {
        "one more": (whole, more),
        "one less": (more, whole),
        "nothing": (whole, {}),
        "dtype": (whole, {"w": cut(4, 4, dtype=torch.bfloat16)}),
        "shape": (whole, {"w": cut(6, 4)}),
        "dimension": (whole, {"w": cut(4, 4, dim=1)}),
        "optimizer": ({**whole, "o": moment}, {**whole, "o": none}),
        "no elements": ({"w": cut(1, 4)}, {}),
    }
    said = []
    for name, both in pairs.items():
        try:
            smckpt.save(both[rank], checkpoint_id=f"{folder}/{name}")
            smckpt.load(checkpoint_id=f"{folder}/{name}", no_dist=True)
            said.append("fine")
        except CheckpointError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_a_shard_that_a_rank_of_the_mesh_lacks_is_refused_at_the_save(tmp_path: Path) -> None:
    """It was committed, and the load found that elements are missing."""
    for said in run_ranks(saves_unlike, 2, str(tmp_path)):
        *refused, last = said
        assert all("SaveFailedError" in one and "no load could fill it" in one for one in refused)
        assert last == "fine"
