"""What a save's coordinators read and write as the ranks grow: parts, manifests, seconds of CPU.

    python benchmarks/plans.py [--ranks 8 512 16384] [--model 70b] [--kind SHARDED]
                               [--dir /dev/shm/plans]

The state is AdamW over a model of Llama 3's sizes, or of Qwen3-235B-A22B's with 128 experts a
layer, each a tensor of its own. It is HSDP, 16 × n / 16: SHARDED, all ranks are one group; LOCAL,
those that hold one shard are (16 ranks). Each part is the record that a rank writes, with its
files' names, sizes and checksums; the data files themselves are empty, since the coordinator reads
their sizes alone, which are patched in. Only the first rank's part has the table, as in a save;
`--each` gives every part its own, as before.

The columns: a part of a rank without the table; all parts of a group; its manifest; the seconds of
its coordinator; one rank's plan; all manifests of the step; the seconds of the rank that commits
several groups, and of a rank that opens the step.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smckpt.checkpoint.commits import gather
from smckpt.checkpoint.commits.commit import publish_record
from smckpt.checkpoint.commits.part import part_body, table_of, tables_digest
from smckpt.checkpoint.reading.committed import open_catalogue
from smckpt.checkpoint.records.crc import crc64, hex64
from smckpt.checkpoint.records.format import (
    FileRecord,
    GroupManifest,
    Manifest,
    crc_name,
    data_name,
    manifest_name,
    part_name,
    record_name,
)
from smckpt.checkpoint.records.rows import encode_rows
from smckpt.checkpoint.records.sealed import seal_json
from smckpt.layout.entries import Entry
from smckpt.layout.geometry import MeshGeometry
from smckpt.layout.image import compile_layout
from smckpt.layout.mesh import Mesh, Placement, runs_of
from smckpt.storage import Access

ATTEMPT = "0123456789ab-00000000"
SESSION = ATTEMPT[:12]
SIZES = {  # layers, hidden, inner, hidden of keys and values
    "8b": (32, 4096, 14336, 1024),
    "70b": (80, 8192, 28672, 1024),
    "405b": (126, 16384, 53248, 1024),
}
VOCABULARY = 128256
MOE = "qwen3-235b"


def shapes(model: str) -> dict[str, tuple[int, ...]]:
    """The parameters' names and shapes, as Hugging Face has them."""
    out: dict[str, tuple[int, ...]]
    if model == MOE:
        out = {"model.embed_tokens.weight": (151936, 4096), "lm_head.weight": (151936, 4096)}
        for n in range(94):
            at = f"model.layers.{n}."
            out |= {
                f"{at}self_attn.q_proj.weight": (8192, 4096),
                f"{at}self_attn.k_proj.weight": (512, 4096),
                f"{at}self_attn.v_proj.weight": (512, 4096),
                f"{at}self_attn.o_proj.weight": (4096, 8192),
                f"{at}self_attn.q_norm.weight": (128,),
                f"{at}self_attn.k_norm.weight": (128,),
                f"{at}mlp.gate.weight": (128, 4096),
                f"{at}input_layernorm.weight": (4096,),
                f"{at}post_attention_layernorm.weight": (4096,),
            }
            for e in range(128):
                expert = f"{at}mlp.experts.{e}."
                out |= {
                    f"{expert}gate_proj.weight": (1536, 4096),
                    f"{expert}up_proj.weight": (1536, 4096),
                    f"{expert}down_proj.weight": (4096, 1536),
                }
        return out | {"model.norm.weight": (4096,)}
    layers, hidden, inner, kv = SIZES[model]
    out = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
    for n in range(layers):
        at = f"model.layers.{n}."
        out |= {
            f"{at}self_attn.q_proj.weight": (hidden, hidden),
            f"{at}self_attn.k_proj.weight": (kv, hidden),
            f"{at}self_attn.v_proj.weight": (kv, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, hidden),
            f"{at}mlp.gate_proj.weight": (inner, hidden),
            f"{at}mlp.up_proj.weight": (inner, hidden),
            f"{at}mlp.down_proj.weight": (hidden, inner),
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
        }
    return out | {"model.norm.weight": (hidden,), "lm_head.weight": (VOCABULARY, hidden)}


def entries(model: str, mesh: Mesh) -> list[Entry]:
    placements = (Placement("replicate"), Placement("shard", 0))
    out = []
    for fqn, shape in shapes(model).items():
        rule = MeshGeometry(fqn, shape, mesh, placements)
        out.append(Entry(("model", fqn), "bfloat16", rule, ("model",), (), mesh.ranks))
        for slot in ("exp_avg", "exp_avg_sq"):
            path = ("optimizer", "state", fqn, slot)
            before = ("optimizer", "state")
            out.append(Entry(path, "float32", rule, before, (slot,), mesh.ranks))
    return out


class Step:
    """The parts of a step, written group by group, and what the coordinators make of them."""

    def __init__(self, folder: Path, model: str, kind: str, count: int, each: bool) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self.folder, self.kind, self.each = folder, kind, each
        replicas = 16 if count >= 32 else 2
        shards = count // replicas
        self.mesh = Mesh(("replicate", "shard"), (replicas, shards), tuple(range(count)))
        by_shard = [tuple(range(shard, count, shards)) for shard in range(shards)]
        self.replicas = [",".join(map(str, ranks)) for ranks in by_shard]
        self.groups = by_shard if kind == "LOCAL" else [self.mesh.ranks]
        state = entries(model, self.mesh)
        began = time.process_time()
        self.layout = compile_layout(state, rank=0, group_ranks=self.groups[0])
        rows = encode_rows(state, {})
        self.planned = time.process_time() - began
        optimizers = {"optimizer": {"form": "names", "ids": [list(shapes(model))]}}
        self.digest = tables_digest(rows, optimizers)
        self.body = part_body(
            self.layout, rows, checkpoint_id="bench", kind=kind, step=1, optimizers=optimizers,
            objects={"step": {"path": ["step"], "value": 1}},
        )  # fmt: skip
        self.top = Access().open(str(folder))
        self.record = record_name(1, 0, SESSION) if len(self.groups) > 1 else None

    def parts(self, directory: Path, ranks: Sequence[int]) -> tuple[dict[str, Any], int]:
        """Write the parts of a group; what the ranks report, and the bytes."""
        (shared,) = self.layout.classes.values()  # what the replicas of a shard write together
        runs = runs_of(ranks)
        listed, nbytes = {}, 0
        for rank in ranks:
            files = [
                {
                    "name": data_name(ATTEMPT, rank, n),
                    "size": file.size,
                    "crc64": "0" * 16,
                    "crc_name": crc_name(ATTEMPT, rank, n),
                }
                for n, file in enumerate(self.layout.files)
            ]
            whole = rank == ranks[0] or self.each
            tables = {} if whole else {"layout": table_of(ranks[0], self.digest), "optimizers": {}}
            own = {"rank": rank, "attempt": ATTEMPT, "session": SESSION, "number": 0}
            replicas = self.replicas[rank % len(self.replicas)]
            own |= {"classes": {replicas: shared}, "group_ranks": runs}
            data = seal_json({**self.body, **own, "files": files, **tables})
            (directory / part_name(ATTEMPT, rank)).write_bytes(data)
            nbytes += len(data)
            name, digest = part_name(ATTEMPT, rank), hex64(crc64(data))
            listed[str(rank)] = {"part": name, "crc64": digest, "host": "host"}
        self.part = len(data)
        return listed, nbytes

    def gather(self, directory: Path, listed: dict[str, Any], ranks: Sequence[int]) -> bytes:
        """A group's manifest, as its coordinator makes it."""
        storage = Access().open(str(directory))
        found = gather.gather_parts(storage, ATTEMPT, ranks, listed)
        manifest = Manifest(
            checkpoint_id="bench", kind=self.kind, step=1, attempt=ATTEMPT, session=SESSION,
            number=0, fencing_token=1, group_ranks=tuple(ranks), committed_at=1,
            record=self.record and f"../{self.record}", parts=found.parts, layout=found.layout,
            optimizers=found.optimizers,
        )  # fmt: skip
        return seal_json(manifest.to_json())

    def row(self) -> list[float]:
        """Make the whole step; the columns of the table."""
        name, named, total = manifest_name(1, 0, SESSION), [], 0
        for number, ranks in enumerate(self.groups):
            directory = self.folder / (f"g{number}" if self.record else "")
            directory.mkdir(parents=True)
            listed, nbytes = self.parts(directory, ranks)
            began = time.process_time()
            data = self.gather(directory, listed, ranks)
            took = time.process_time() - began
            (directory / name).write_bytes(data)
            total += len(data)
            for part in directory.glob("part-*"):
                part.unlink()
            named.append(GroupManifest(directory.name, name, hex64(crc64(data)), ranks[0]))
        began, committed = time.process_time(), 0.0
        if self.record:
            publish_record(self.top.access, self.top.url, SESSION, 0, 1, named)
            committed = time.process_time() - began
        began = time.process_time()
        catalogue = open_catalogue(self.top)
        opened = time.process_time() - began
        assert catalogue.object_ranks == self.mesh.ranks
        shutil.rmtree(self.folder)
        sizes = [self.part / 1e3, nbytes / 1e6, len(data) / 1e6]
        return [*sizes, took, self.planned, total / 1e6, committed, opened]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 512, 16384])
    parser.add_argument("--model", choices=[*SIZES, MOE], default="70b")
    parser.add_argument("--kind", choices=["SHARDED", "LOCAL"], default="SHARDED")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm/plans"))
    parser.add_argument("--each", action="store_true", help="every part has its table")
    given = parser.parse_args()
    FileRecord.sizes = {}  # the data files are not there
    print(f"{given.model}, AdamW, {given.kind}; {'a table each' if given.each else 'one table'}")
    print("  ranks, groups; kB a part; MB of parts, manifest; CPU s of coordinator, plan;")
    print("  MB of all manifests; CPU s of the commit of all groups, of opening the step")
    for count in given.ranks:
        step = Step(given.dir, given.model, given.kind, count, given.each)
        columns = " ".join(f"{value:9.2f}" for value in step.row())
        print(f"{count:7} {len(step.groups):5} {columns}", flush=True)


if __name__ == "__main__":
    main()
