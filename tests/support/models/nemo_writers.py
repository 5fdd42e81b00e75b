"""NeMo's own connectors (2.2.1) write a tiny Llama of Megatron-core's, on CPU.

Run by an interpreter that has Megatron-core, with NeMo and what it imports in PYTHONPATH:
`nemo_writers.py JOBS`. (The name `nemo_run` is that of a package which NeMo imports.) JOBS is a
list in JSON; of a job, `tp` and `pp` are its degrees (gloo), `weights` is a directory with each
tensor-parallel rank's weights, layers numbered through, and `save` is what is written, of a `kind`:

- "ranks", a `.nemo` archive with each rank's weights; "sharded", one with a distributed checkpoint.
  Not NeMo's own: its MegatronGPTModel is for GPUs and a trainer, so `Tiny`, a ModelPT, holds the
  model under the same attribute, `model`.
- "directory", NeMo 2's with `weights` and `context`. NeMo's own are the model, the trainer with its
  strategy and checkpoint IO, and the connector that saves, as all its importers do. Not its own:
  the trainer neither trains nor has an optimizer.

Not NeMo's own in all: the process groups, and the ranks in its AppState. Its set-up of them is for
Megatron-core 0.11, and what it calls is gone from 0.15.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron_stages import config_of, filled, on_forked_ranks
from nemo.collections.llm.gpt.model.llama import Llama3Config, LlamaModel
from nemo.collections.nlp.parts.nlp_overrides import NLPSaveRestoreConnector
from nemo.core import ModelPT
from nemo.lightning import MegatronStrategy, Trainer
from nemo.lightning.io import ModelConnector
from nemo.utils import AppState
from omegaconf import OmegaConf

FUSIONS = (  # which take kernels for a GPU
    "apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion",
    "gradient_accumulation_fusion", "masked_softmax_fusion", "persist_layer_norm",
)  # fmt: skip


class Tiny(ModelPT):  # type: ignore[misc]
    def __init__(self, model: Any) -> None:
        super().__init__(OmegaConf.create({"hidden_size": 64}))
        self.model = model

    def setup_training_data(self, train_data_config: Any) -> None: ...

    def setup_validation_data(self, val_data_config: Any) -> None: ...

    @classmethod
    def list_available_models(cls) -> None: ...


class Sharded(Tiny):
    def sharded_state_dict(self) -> Any:
        return self.model.sharded_state_dict(prefix="model.")


def write_archive(job: dict[str, Any], weights: Any, stage: int) -> None:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    tp, pp = job["tp"], job["pp"]
    config = config_of({
        "num_layers": 4, "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp,
    })  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=128, max_sequence_length=64,
        position_embedding_type="rope", pre_process=stage == 0, post_process=stage == pp - 1,
    )  # fmt: skip
    kind = Sharded if job["kind"] == "sharded" else Tiny
    NLPSaveRestoreConnector().save_to(kind(filled(model, weights)), job["save"])


def write_directory(job: dict[str, Any], weights: Any, rank: int) -> None:
    """As NeMo's importer of a Llama does (HFLlamaImporter.apply), with weights that are here."""
    ranks = job["tp"] * job["pp"]
    os.environ |= {  # what lightning asks, which would start ranks of its own elsewhere
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "job", "MASTER_ADDR": "", "MASTER_PORT": "",
    }  # fmt: skip
    config = Llama3Config(
        num_layers=4, hidden_size=64, ffn_hidden_size=160, num_attention_heads=8,
        num_query_groups=4, kv_channels=16, seq_length=64,
        **dict.fromkeys(FUSIONS, False),
    )  # fmt: skip
    config.vocab_size = 128
    strategy = MegatronStrategy(
        tensor_model_parallel_size=job["tp"], pipeline_model_parallel_size=job["pp"],
        pipeline_dtype=torch.float32, ckpt_save_optimizer=False,
    )  # fmt: skip
    strategy.setup_distributed = lambda: None  # what rank_main has done
    trainer = Trainer(devices=ranks, accelerator="cpu", strategy=strategy)
    connector, model = ModelConnector(""), LlamaModel(config)
    connector.nemo_setup(model, trainer)
    filled(model.module, weights)
    connector.nemo_save(job["save"], trainer)


def rank_main(job: dict[str, Any], rank: int, place: str) -> None:
    from megatron.core import parallel_state

    os.environ["RANK"] = str(rank)  # which NeMo asks
    tp, pp = job["tp"], job["pp"]
    dist.init_process_group("gloo", f"file://{place}", rank=rank, world_size=tp * pp)
    parallel_state.initialize_model_parallel(tp, pp)
    state = AppState()
    state.global_rank, state.data_parallel_rank = rank, 0
    state.model_parallel_size = tp * pp
    state.tensor_model_parallel_size, state.pipeline_model_parallel_size = tp, pp
    state.tensor_model_parallel_rank = parallel_state.get_tensor_model_parallel_rank()
    state.pipeline_model_parallel_rank = stage = parallel_state.get_pipeline_model_parallel_rank()
    weights = torch.load(f"{job['weights']}/{state.tensor_model_parallel_rank}-0.pt")
    if job["kind"] == "directory":
        write_directory(job, weights, rank)
    else:
        write_archive(job, weights, stage)
    dist.destroy_process_group()


def main() -> None:
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None  # which Megatron asks for where nothing is on a GPU
    numpy.product = numpy.prod  # type: ignore[attr-defined]  # its name in numpy 1, for 0.15
    sys.modules["__main__"].__file__ = None  # which a process that Megatron spawns would import
    for job in json.loads(sys.argv[1]):
        on_forked_ranks(rank_main, job, job["tp"] * job["pp"])


if __name__ == "__main__":
    main()
