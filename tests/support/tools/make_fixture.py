"""Make tests/fixtures/format-1.0 and -2.0: a small checkpoint of every kind of row and value.

Run it once for a new version of the format (`python -m tests.support.tools.make_fixture`), into a
new directory: fixtures of versions that landed are never made anew, since they show that what old
releases wrote still loads. Four ranks, hybrid sharding 2 × 2: two groups that commit together. That
of the version with prefix sharding (2.0) shows the keys of a bucket as a file system does.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from smckpt.checkpoint.commits.commit import publish_record, take_lease
from smckpt.checkpoint.records.format import (
    FORMAT_VERSION,
    PACKED_VERSION,
    PART_VERSION,
    PREFIX_SHARDING_VERSION,
    GroupManifest,
    record_name,
)
from smckpt.checkpoint.records.objects import encode_object
from smckpt.layout.entries import DTYPES, Entry
from smckpt.layout.flat_geometry import FlatGeometry, FlatUnit, Segment
from smckpt.layout.geometry import BoxGeometry, Geometry, MeshGeometry, PerRankGeometry
from smckpt.layout.mesh import Mesh, Placement
from smckpt.layout.strided import Box
from smckpt.storage import Access
from smckpt.storage.budget import Spread
from tests.support.launch import run_ranks
from tests.support.saves import Group, pattern

ROOT = Path(__file__).resolve().parents[2] / "fixtures"
MESH = Mesh(("replicate", "shard"), (2, 2), (0, 1, 2, 3))
GROUPS = ((0, 2), (1, 3))  # the same shard, so the same arrays
CUT = (Placement("replicate"), Placement("shard", 0))
FLAT = FlatUnit(
    (Segment("a.weight", (3, 4), 12), Segment(None, (), 2), Segment("a.bias", (3,), 3)), 9
)
# Logical name → dtype and shape. Only these are sharded; what is kept per rank is below.
LOGICAL: dict[str, tuple[str, tuple[int, ...]]] = {
    "model.layers.0.weight": ("bfloat16", (5, 3)),
    "model.layers.1.weight": ("float32", (4, 6)),
    "model.phase": ("complex128", (2,)),
    "model.empty": ("float32", (0, 4)),
    "model.experts": ("float16", (4, 2)),
    "model.a.weight": ("float32", (3, 4)),
    "model.a.bias": ("float32", (3,)),
    "optimizer.state.a.weight.exp_avg": ("float32", (3, 4)),
    "optimizer.state.a.bias.exp_avg": ("float32", (3,)),
    "optimizer.state.layers.1.weight.exp_avg": ("float32", (4, 6)),
}


def wholes() -> dict[str, bytes]:
    """The logical tensors' bytes."""
    return {
        name: pattern(math.prod(shape) * DTYPES[dtype].itemsize, number)
        for number, (name, (dtype, shape)) in enumerate(LOGICAL.items())
    }


def entries_of(rank: int) -> list[Entry]:
    shard = rank % 2
    holders = GROUPS[shard]

    def sharded(fqn: str, shape: tuple[int, ...], cut: tuple[Placement, ...] = CUT) -> MeshGeometry:
        return MeshGeometry(fqn, shape, MESH, cut)

    def entry(path: tuple[str | int, ...], dtype: str, rule: Geometry, *after: str) -> Entry:
        before = tuple(map(str, path[:2])) if after else path[:-1]
        return Entry(path, dtype, rule, before, after, (rank,))

    same = (Placement("replicate"),) * 2
    boxes = (Box((2 * shard, 0), (1, 2)), Box((2 * shard + 1, 0), (1, 2)))
    return [
        entry(("model", "layers.0.weight"), "bfloat16", sharded("layers.0.weight", (5, 3))),
        entry(("model", "layers.1.weight"), "float32", sharded("layers.1.weight", (4, 6))),
        entry(("model", "phase"), "complex128", sharded("phase", (2,), same)),
        entry(("model", "empty"), "float32", sharded("empty", (0, 4))),
        entry(("model", "experts"), "float16", BoxGeometry("experts", (4, 2), boxes, holders)),
        entry(("model", "a._flat_param"), "float32", FlatGeometry(FLAT, MESH)),
        entry(
            ("optimizer", "state", 0, "exp_avg"), "float32", FlatGeometry(FLAT, MESH, 0), "exp_avg"
        ),
        entry(
            ("optimizer", "state", 1, "exp_avg"), "float32", FlatGeometry(FLAT, MESH, 2), "exp_avg"
        ),
        entry(
            ("optimizer", "state", 2, "exp_avg"),
            "float32",
            sharded("layers.1.weight", (4, 6)),
            "exp_avg",
        ),
        entry(
            ("optimizer", "state", 0, "step"),
            "float32",
            PerRankGeometry(("a.weight", "a.bias"), (), (rank,)),
            "step",
        ),
        entry(("rng",), "uint8", PerRankGeometry(("rng",), (5,), (rank,))),
        *([entry(("odd",), "int64", PerRankGeometry(("odd",), (2,), (rank,)))] if shard else []),
    ]


def bytes_of(entry: Entry, rank: int) -> bytes:
    """The local array that `rank` holds of an entry."""
    if entry.geometry.per_rank:
        return pattern(entry.nbytes, 50 + rank)
    size = entry.itemsize
    local = np.zeros((entry.numel, size), np.uint8)
    known = wholes()
    for piece in entry.geometry.pieces(rank):
        whole = np.frombuffer(known[entry.logical_name(piece.name)], np.uint8)
        box = whole.reshape(*piece.shape, size)[
            tuple(slice(o, o + n) for o, n in zip(piece.box.offsets, piece.box.sizes, strict=True))
        ]
        strides = [s * size for s in piece.strides]
        np.lib.stride_tricks.as_strided(
            local.reshape(-1)[piece.start * size :], (*piece.box.sizes, size), (*strides, 1)
        )[...] = box
    return local.tobytes()


def objects_of(rank: int) -> dict[str, tuple[list[str | int], Any]]:
    """Key → path and value: one of every tag that needs no torch to write."""
    return {
        "step": (["step"], 7),
        "rank": (["rank"], rank),
        "optimizer.param_groups": (
            ["optimizer", "param_groups"],
            [{"lr": 0.1, "betas": (0.9, 0.999), "initial_lr": 0.1, "params": [0, 1, 2]}],
        ),
        "mixed": (
            ["mixed"],
            {
                1: "int key",
                "~": [float("inf"), -0.0, complex(1, -2), None, True],
                "sets": ({1, 2}, frozenset({"x"})),
                "bytes": b"\x00\xff",
                "big": 1 << 100,
                "ordered": OrderedDict([("b", 1), ("a", 2)]),
                "array": np.arange(6, dtype="<i2").reshape(2, 3),
                "scalar": np.float32(1.5),
            },
        ),
    }


def make(root: Path, spread: Spread | None) -> None:
    groups = [
        Group(
            root / f"shard{number}",
            ranks,
            spread=spread,
            session=f"{number}{number}1122334455",
            state=lambda rank: (
                entries_of(rank),
                {e.key: bytes_of(e, rank) for e in entries_of(rank)},
            ),
        )
        for number, ranks in enumerate(GROUPS)
    ]
    lead = "99aabbccddee"
    urls = [str(group.directory) for group in groups]
    fencing_token = take_lease(Access(), str(root), lead, "host", urls)["fencing_token"]
    named = []
    for group in groups:
        group.fencing_token = fencing_token
        group.save(
            record=f"../{record_name(fencing_token, 0, lead)}", **common(group, 0)
        )  # superseded
        published = group.save(
            record=f"../{record_name(fencing_token, 1, lead)}", **common(group, 1)
        )
        named.append(
            GroupManifest(
                group.directory.name, published["manifest"], published["crc64"], group.ranks[0]
            )
        )
    for path in (*root.rglob("*-00000000-*"), *root.rglob("*-00000000.json")):
        path.unlink()
    publish_record(Access(), str(root), lead, 1, fencing_token, named)


def common(group: Group, number: int) -> dict[str, Any]:
    return {
        "checkpoint_id": f"/checkpoints/{group.directory.name}",
        "step": 70 * number,
        "topology": {"world_size": 4, "hybrid_shard_degree": 2},
        "metadata": {"note": "spread" if group.spread else "in one place", "loss": 0.125},
        "optimizers": {"optimizer": {"form": "id", "ids": [["a.weight"], ["a.bias"]]}},
        "objects": encoded_objects,
    }


def encoded_objects(rank: int) -> dict[str, Any]:
    return {
        key: {"path": path, "value": encode_object(value)}
        for key, (path, value) in objects_of(rank).items()
    }


def expected() -> dict[str, str]:
    return {name: data.hex() for name, data in wholes().items()}


def save_parts(folder: str) -> None:
    """A save of two ranks with equal tables, so that one part has the table."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import smckpt

    mesh = init_device_mesh("cpu", (2,))
    weight = torch.nn.Parameter(distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([weight], lr=0.0, momentum=0.5)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = {"model": {"w": weight.detach()}, "optimizer": optimizer.state_dict(), "step": 7}
    smckpt.save(state, checkpoint_id=folder, step=7)


def save_packed(folder: str) -> None:
    """A save whose table is long enough to be packed."""
    import torch

    import smckpt

    names = [f"layers.{n}.self_attention.projection.weight" for n in range(400)]
    smckpt.save({"model": {n: torch.full((1,), i) for i, n in enumerate(names)}, "step": 7},
                checkpoint_id=folder, step=7)  # fmt: skip


if __name__ == "__main__":
    for kind, version, save, ranks in (
        ("parts", PART_VERSION, save_parts, 2),
        ("packed", PACKED_VERSION, save_packed, 1),
    ):
        folder = ROOT / f"{kind}-{version[0]}.{version[1]}"
        if not folder.exists():
            run_ranks(save, ranks, "/tmp/checkpoints/run")  # the path is in the files
            shutil.move("/tmp/checkpoints/run", folder)
    # Beside the groups' directories, so that all lies in the checkpoint's.
    for version, spread in (
        (FORMAT_VERSION, None),
        (PREFIX_SHARDING_VERSION, Spread(1, 4)),
    ):
        directory = ROOT / f"format-{version[0]}.{version[1]}"
        if directory.exists():
            print(f"{directory} exists: fixtures of a version that landed are kept as they are")
            continue
        make(directory / "checkpoint", spread)
        (directory / "expected.json").write_text(json.dumps(expected(), indent=1) + "\n")
        total = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        print(f"{directory}: {total} bytes")
