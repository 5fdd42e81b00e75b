"""What a save's coordinator reads and writes as the ranks grow: parts, manifest, seconds of CPU.

    python benchmarks/plans.py [--ranks 8 512 16384] [--model 70b] [--dir /dev/shm/plans]

The state is AdamW over a model of Llama 3's sizes, SHARDED over all ranks in one group (HSDP 16 ×
n / 16). Each part is the record that a rank writes, with its files' names, sizes and checksums;
the data files themselves are empty, since the coordinator reads their sizes alone, which are
patched in. Only the first rank's part has the table, as in a save; `--each` gives every part its
own, as before.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

from smckpt.checkpoint.commits import gather
from smckpt.checkpoint.commits.part import part_body, table_of, tables_digest
from smckpt.checkpoint.records.crc import crc64, hex64
from smckpt.checkpoint.records.format import Manifest, crc_name, data_name, part_name
from smckpt.checkpoint.records.rows import encode_rows
from smckpt.checkpoint.records.sealed import seal_json
from smckpt.layout.entries import Entry
from smckpt.layout.geometry import MeshGeometry
from smckpt.layout.image import compile_layout
from smckpt.layout.mesh import Mesh, Placement
from smckpt.storage import Access

ATTEMPT = "0123456789ab-00000000"
SIZES = {  # layers, hidden, inner, hidden of keys and values
    "8b": (32, 4096, 14336, 1024),
    "70b": (80, 8192, 28672, 1024),
    "405b": (126, 16384, 53248, 1024),
}
VOCABULARY = 128256


def shapes(model: str) -> dict[str, tuple[int, ...]]:
    """The parameters' names and shapes, as Llama's in Hugging Face have them."""
    layers, hidden, inner, kv = SIZES[model]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
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


def parts(folder: Path, model: str, count: int, each: bool) -> tuple[dict[str, Any], int, float]:
    """Write the parts of all ranks; what the ranks report, the bytes, and how long one rank's plan
    takes."""
    replicas = 16 if count >= 32 else 2
    mesh = Mesh(("replicate", "shard"), (replicas, count // replicas), tuple(range(count)))
    state = entries(model, mesh)
    began = time.process_time()
    layout = compile_layout(state, rank=0, group_ranks=mesh.ranks)
    rows = encode_rows(state, {})
    planned = time.process_time() - began
    optimizers = {"optimizer": {"form": "names", "ids": [list(shapes(model))]}}
    digest = tables_digest(rows, optimizers)
    body = part_body(
        layout, rows, checkpoint_id="bench", kind="SHARDED", step=1, optimizers=optimizers,
        objects={"step": {"path": ["step"], "value": 1}},
    )  # fmt: skip
    listed, nbytes = {}, 0
    for rank in range(count):
        files = [
            {
                "name": data_name(ATTEMPT, rank, n),
                "size": file.size,
                "crc64": "0" * 16,
                "crc_name": crc_name(ATTEMPT, rank, n),
            }
            for n, file in enumerate(layout.files)
        ]
        tables = {} if rank == 0 or each else {"layout": table_of(0, digest), "optimizers": {}}
        session, _, number = ATTEMPT.partition("-")
        own = {"rank": rank, "attempt": ATTEMPT, "session": session, "number": int(number)}
        data = seal_json({**body, **own, "files": files, **tables})
        (folder / part_name(ATTEMPT, rank)).write_bytes(data)
        nbytes += len(data)
        name, digest_of_part = part_name(ATTEMPT, rank), hex64(crc64(data))
        listed[str(rank)] = {"part": name, "crc64": digest_of_part, "host": "host"}
    return listed, nbytes, planned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 512, 16384])
    parser.add_argument("--model", choices=SIZES, default="70b")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm/plans"))
    parser.add_argument("--each", action="store_true", help="every part has its table")
    given = parser.parse_args()
    gather._check_size = lambda *_: None  # the data files are not there
    print(
        f"{given.model}, AdamW, one SHARDED group; {'a table each' if given.each else 'one table'}"
    )
    print("  ranks    a part, kB    parts, MB    manifest, MB    gather, CPU s    plan, CPU s")
    for count in given.ranks:
        shutil.rmtree(given.dir, ignore_errors=True)
        given.dir.mkdir(parents=True)
        listed, nbytes, planned = parts(given.dir, given.model, count, given.each)
        storage = Access().open(str(given.dir))
        began = time.process_time()
        found = gather.gather_parts(storage, ATTEMPT, range(count), listed)
        manifest = Manifest(
            checkpoint_id="bench", kind="SHARDED", step=1, attempt=ATTEMPT, session=ATTEMPT[:12],
            number=0, fencing_token=1, group_ranks=tuple(range(count)), committed_at=1, record=None,
            parts=found.parts, layout=found.layout, optimizers=found.optimizers,
        )  # fmt: skip
        data = seal_json(manifest.to_json())
        took = time.process_time() - began
        last = given.dir / part_name(ATTEMPT, count - 1)
        print(
            f"{count:7} {last.stat().st_size / 1e3:13.1f} {nbytes / 1e6:12.1f} "
            f"{len(data) / 1e6:15.1f} {took:16.2f} {planned:14.2f}"
        )
        assert len(json.loads(data)["body"]["parts"]) == count
    shutil.rmtree(given.dir, ignore_errors=True)


if __name__ == "__main__":
    main()
