"""Ranks that pass different things when the full state of a tensor-parallel model is taken."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import smckpt
from smckpt import FULL, FullStateDictConfig, sm_state_dict_type
from smckpt.translate import get_layout
from tests.support.models import references as ref
from tests.support.models.live_job import ON_RANK0, Job, differences, raised, taken
from tests.support.models.parallel_models import Named

__all__ = ["EXPECTED", "disagreements", "padding_that_is_said"]

EXPECTED = {  # case → what is said of it
    "layout": "rank 3] layout='te_fused_interleaved' on rank 3, and 'te_fused' on rank 0",
    "padding": "padded_vocab_size=None on rank 1, and 128 on rank 0",
    "translation": "translate_on_save=False on rank 2, and True on rank 0",
    "degrees": "parallel_state=None on rank 1, and {",
    "one says nothing": "parallel_state=None on rank 1, and {",
    "given back": "parallel_state=None on rank 1, and {",
    "optimizer": "does not gather optimizer state over tensor-parallel",
}


def disagreements(job: Job) -> dict[str, tuple[str, str]]:
    rank, state = dist.get_rank(), {"parallel_state": job.degrees}
    fused = Named(job.cut(ref.te, fused="per_rank"), job.config)
    ours = get_layout("te_split", "llama").renamed(
        "ours", ("layernorm_qkv.", "ln_qkv."), ("layernorm_mlp.", "ln_mlp.")
    )  # its names tell nothing
    own = {
        n.replace("layernorm_qkv", "ln_qkv").replace("layernorm_mlp", "ln_mlp"): tensor
        for n, tensor in job.cut(ref.te).items()
        if not n.endswith("_extra_state")
    }
    model = Named(own, job.config)
    fully_shard(model, mesh=job.mesh["shard"])
    asked = {"layout": ours, **state}

    def back(**given: Any) -> None:
        with sm_state_dict_type(model, FULL, **given):
            model.load_state_dict({})

    def optimizer(**given: Any) -> None:
        stepped = torch.optim.AdamW(model.parameters())
        smckpt.init_optim_state(stepped)
        with sm_state_dict_type(model, FULL, **given):
            stepped.state_dict()

    odd = FullStateDictConfig(rank0_only=True, translate_on_save=False)
    out = {
        "layout": raised(lambda: taken(
            fused, layout="te_fused_interleaved" if rank == 3 else "te_fused", **state)),
        "padding": raised(lambda: taken(
            fused, layout="te_fused", padded_vocab_size=128 if rank == 0 else None, **state)),
        "translation": raised(lambda: taken(
            fused, odd if rank == 2 else ON_RANK0, layout="te_fused", **state)),
        "degrees": raised(lambda: taken(
            fused, layout="te_fused", **(state if rank != 1 else {}))),
        "one says nothing": raised(lambda: taken(model, **(asked if rank != 1 else {}))),
        "given back": raised(lambda: back(**(asked if rank != 1 else {}))),
        "optimizer": raised(lambda: optimizer(**(asked if rank != 1 else {}))),
    }  # fmt: skip
    out["afterwards"] = "", str(differences(taken(model, **asked), job.llama if rank == 0 else {}))
    return out


def padding_that_is_said(job: Job) -> Any:
    model = Named(job.cut(ref.te, rows=184), job.config)
    state, first = {"parallel_state": job.degrees}, dist.get_rank() == 0
    refused = raised(lambda: taken(model, **state))
    wrong = raised(lambda: taken(model, padded_vocab_size=192, **state))
    found = taken(model, padded_vocab_size=184, **state)
    plain = Named(job.llama, job.config)
    local = raised(
        lambda: sm_state_dict_type(plain, smckpt.LOCAL, padded_vocab_size=128).__enter__()
    )
    kept = taken(model, FullStateDictConfig(translate_on_save=False), **state)
    rows = {len(kept[name]) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    return refused, wrong, local, differences(found, job.llama if first else {}), rows
