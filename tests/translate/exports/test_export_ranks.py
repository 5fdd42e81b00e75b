"""Export of what real ranks saved: a directory for each shard, a record above, FULL on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

import smckpt
from tests.support.launch import run_ranks


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=101, rope_theta=5e5,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(40).reshape(2, 20)).logits


def saved_by_two(folder: str) -> list[torch.Tensor]:
    """Each rank is a group of its own (no replicas), so a record commits the two."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    rank, out = dist.get_rank(), []
    for how in ("fsdp1", "fsdp2"):
        model: Any = llama()
        out.append(logits(model))
        if how == "fsdp1":
            model = FSDP(model, device_id=torch.device("cpu"))
        else:
            mesh = init_device_mesh("cpu", (2,))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.arange(12)[None]).logits.sum().backward()
        optimizer.step()
        for kind in (smckpt.LOCAL, smckpt.SHARDED, smckpt.FULL):
            with smckpt.sm_state_dict_type(model, kind):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            where = f"{folder}/{how}/{kind.name}"
            if kind is smckpt.LOCAL:
                smckpt.save(state, checkpoint_id=f"{where}/shard{rank}", process_group=groups[rank])
            elif kind is smckpt.SHARDED:
                smckpt.save(state, checkpoint_id=where)
            elif rank == 0:
                smckpt.save(
                    state,
                    checkpoint_id=where,
                    process_group=groups[0],
                    options=smckpt.SaveOptions(queue="full"),
                )
        dist.barrier()
        if rank == 0:
            full = {k: v.clone() for k, v in state["model"].items()}
            again = llama()
            again.load_state_dict(full)
            out.append(logits(again))
    return out


def test_what_fsdp_saved_under_each_kind_exports_with_equal_logits(tmp_path: Path) -> None:
    seen = run_ranks(saved_by_two, 2, str(tmp_path))[0]
    config = llama().config
    for number, how in enumerate(("fsdp1", "fsdp2")):
        expected = seen[2 * number + 1]
        assert not torch.equal(expected, seen[2 * number])  # a step was taken
        for kind in ("LOCAL", "SHARDED", "FULL"):
            out = tmp_path / "hf" / how / kind
            report = smckpt.export_hf(tmp_path / how / kind, out, config=config)
            assert report.notes == ()
            model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
            assert not any(info.values())
            assert torch.equal(logits(model), expected), (how, kind)
