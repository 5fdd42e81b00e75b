"""The code of Amazon's page "Checkpointing using SMP": its calls, arguments and order.

That page's text is flat, so lines and indentation are ours. Each function is one snippet, from its
imports on. What it uses and does not bind is its argument: `model`, `optimizer`, the directory,
and in the last ones `your_s3_bucket`, `kw`, `hf_model_config` and `logger`. Imports that a snippet
lacks (`torch`, `dist`, `StateDictType`, `state`) stand at the top.
"""

# ruff: noqa: F401, I001

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import StateDictType

logger = logging.getLogger("smp_document")


def save_local(model: Any, optimizer: Any, save_dir: str) -> Any:
    import torch.sagemaker as tsm
    from torch.sagemaker import state
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.sagemaker.distributed.checkpoint.state_dict_saver import (
        async_save,
        maybe_finalize_async_calls,
    )
    from torch.sagemaker.distributed.checkpoint.state_dict_utils import (
        sm_state_dict_type,
        SMStateDictType,
    )

    global_rank = dist.get_rank()
    sub_dir = f"tp{state.tp_rank}_ep{state.ep_rank}_fsdp{model.rank}"

    # 1. Get replication ranks and group
    current_replication_group = None
    current_replication_ranks = None
    for replication_ranks in state.ranker.get_rep_groups():
        rep_group = dist.new_group(replication_ranks)
        if global_rank in replication_ranks:
            current_replication_group = rep_group
            current_replication_ranks = replication_ranks

    coordinator_rank = min(current_replication_ranks)

    # 2. Wait for the previous checkpointing done
    maybe_finalize_async_calls(blocking=True, process_group=current_replication_group)

    # 3. Get model local checkpoint
    with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        state_dict = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            # Potentially add more customized state dicts.
        }

    # 4. Save a local checkpoint
    async_save(
        state_dict,
        checkpoint_id=os.path.join(save_dir, sub_dir),
        process_group=current_replication_group,
        coordinator_rank=coordinator_rank,
    )
    return state_dict, {
        "process_group": current_replication_group,
        "coordinator_rank": coordinator_rank,
    }


def load_local(model: Any, optimizer: Any, load_dir: str) -> None:
    import torch.sagemaker as tsm
    from torch.sagemaker import state
    from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
    from torch.sagemaker.distributed.checkpoint.state_dict_utils import (
        sm_state_dict_type,
        SMStateDictType,
        init_optim_state,
    )
    from torch.sagemaker.distributed.checkpoint.filesystem import (
        DistributedFileSystemReader,
    )

    sub_dir = f"tp{state.tp_rank}_ep{state.ep_rank}_fsdp{model.rank}"
    global_rank = dist.get_rank()
    checkpoint_id = os.path.join(load_dir, sub_dir)
    storage_reader = DistributedFileSystemReader(checkpoint_id)

    # 1. Get replication ranks and group
    current_replication_group = None
    current_replication_ranks = None
    for replication_ranks in state.ranker.get_rep_groups():
        rep_group = dist.new_group(replication_ranks)
        if global_rank in replication_ranks:
            current_replication_group = rep_group
            current_replication_ranks = replication_ranks

    coordinator_rank = min(current_replication_ranks)

    # 2. Create local state_dict
    with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        state_dict = {
            "model": model.state_dict(),
            # Potentially add more customized state dicts.
        }

        # Init optimizer state_dict states by setting zero grads and step.
        init_optim_state(optimizer, skip_empty_param=True)
        state_dict["optimizer"] = optimizer.state_dict()

    # 3. Load a checkpoint
    load(
        state_dict=state_dict,
        process_group=current_replication_group,
        coordinator_rank=coordinator_rank,
        storage_reader=storage_reader,
    )


def save_and_load_in_s3(
    state_dict: Any, sub_dir: str, checkpoint_dir: str, your_s3_bucket: str, kw: dict[str, Any]
) -> None:
    from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
    from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save

    key = os.path.join(checkpoint_dir, sub_dir)
    checkpoint_id = f"s3://{your_s3_bucket}/{key}"
    async_save(state_dict, checkpoint_id=checkpoint_id, **kw)
    load(state_dict, checkpoint_id=checkpoint_id, **kw)


def save_sharded(model: Any, optimizer: Any, save_dir: str) -> None:
    import torch.sagemaker as tsm
    from torch.sagemaker import state
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType
    from torch.sagemaker.utils.process_group_utils import get_global_ranks
    from torch.sagemaker.distributed.checkpoint.state_dict_saver import (
        async_save,
        maybe_finalize_async_calls,
    )

    sub_dir = f"tp{state.tp_rank}_ep{state.ep_rank}"
    checkpoint_id = os.path.join(save_dir, sub_dir)

    # To determine whether curreto take part in checkpointing.
    global_rank = dist.get_rank()
    action_rank = state.ranker.get_rep_rank(global_rank) == 0
    process_group = model.process_group
    coordinator_rank = min(get_global_ranks(process_group))

    # 1. wait for the previous checkpointing done
    maybe_finalize_async_calls(blocking=True, process_group=process_group)

    # 2. retrieve model & optimizer sharded state_dict
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state_dict = {
            "model": model.state_dict(),
            "optimizer": FSDP.optim_state_dict(model, optimizer),
            # Potentially add more customized state dicts.
        }

    # 3. save checkpoints asynchronously using async_save
    if action_rank:
        async_save(
            state_dict,
            checkpoint_id=checkpoint_id,
            process_group=process_group,
            coordinator_rank=coordinator_rank,
        )


def load_sharded(model: Any, optimizer: Any, load_dir: str) -> None:
    from torch.sagemaker import state
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
    from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
    from torch.sagemaker.utils.process_group_utils import get_global_ranks
    from torch.sagemaker.distributed.checkpoint.filesystem import (
        DistributedFileSystemReader,
    )

    sub_dir = f"tp{state.tp_rank}_ep{state.ep_rank}"
    checkpoint_id = os.path.join(load_dir, sub_dir)
    reader = DistributedFileSystemReader(checkpoint_id)

    process_group = model.process_group
    coordinator_rank = min(get_global_ranks(process_group))

    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        # 1. Load model and everything else except the optimizer.
        state_dict = {
            "model": model.state_dict()
            # Potentially more customized state dicts.
        }
        load(
            state_dict,
            storage_reader=reader,
            process_group=process_group,
            coordinator_rank=coordinator_rank,
        )
        model.load_state_dict(state_dict["model"])

        # 2. Load optimizer.
        optim_state = load_sharded_optimizer_state_dict(
            model_state_dict=state_dict["model"],
            optimizer_key="optimizer",
            storage_reader=reader,
            process_group=process_group,
        )
        flattened_optimizer_state = FSDP.optim_state_dict_to_load(
            optim_state["optimizer"],
            model,
            optimizer,
            group=model.process_group,
        )
        optimizer.load_state_dict(flattened_optimizer_state)


def save_full(model: Any, save_dir: str, hf_model_config: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import FullStateDictConfig
    import torch.sagemaker as tsm

    # Save checkpoints.
    with FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(
            rank0_only=True,
            offload_to_cpu=True,
            # Default value is to translate back to Hugging Face Transformers format,
            # when saving full checkpoints for models trained with SMP tensor parallelism.
            # translate_on_save=True
        ),
    ):
        state_dict = model.state_dict()
        if dist.get_rank() == 0:
            logger.info("Processed state dict to save. Starting write to disk now.")
            os.makedirs(save_dir, exist_ok=True)
            # This name is needed for HF from_pretrained API to work.
            torch.save(state_dict, os.path.join(save_dir, "pytorch_model.bin"))
            hf_model_config.save_pretrained(save_dir)
        dist.barrier()


def load_full(save_dir: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(save_dir)
    return model
