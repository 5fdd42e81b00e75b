"""NeMo's own connector (2.2.1) writes `.nemo` archives of a tiny Llama of Megatron-core's, on CPU.

Run by an interpreter that has Megatron-core, with NeMo and what it imports in PYTHONPATH:
`nemo_run.py JOBS`. JOBS is a list in JSON; of a job, `tp` and `pp` are its degrees (gloo),
`weights` is a directory with each tensor-parallel rank's weights, layers numbered through, `save`
is the archive, and `dist` says whether the model gives a sharded state, for a distributed
checkpoint.

Not NeMo's own: its MegatronGPTModel is for GPUs and a trainer, so `Tiny`, a ModelPT, holds the
model under the same attribute, `model`; and the ranks in NeMo's AppState are set here.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from limits import seconds
from megatron_stages import config_of, filled
from nemo.collections.nlp.parts.nlp_overrides import NLPSaveRestoreConnector
from nemo.core import ModelPT
from nemo.utils import AppState
from omegaconf import OmegaConf


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


def rank_main(job: dict[str, Any], rank: int, place: str) -> None:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

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
    config = config_of({
        "num_layers": 4, "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp,
    })  # fmt: skip
    weights = torch.load(f"{job['weights']}/{state.tensor_model_parallel_rank}-0.pt")
    model = GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=128, max_sequence_length=64,
        position_embedding_type="rope", pre_process=stage == 0, post_process=stage == pp - 1,
    )  # fmt: skip
    kind = Sharded if job["dist"] else Tiny
    NLPSaveRestoreConnector().save_to(kind(filled(model, weights)), job["save"])
    dist.destroy_process_group()


def main() -> None:
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None  # which Megatron asks for where nothing is on a GPU
    context = multiprocessing.get_context("fork")
    for job in json.loads(sys.argv[1]):
        ranks = [
            context.Process(target=rank_main, args=(job, rank, f"{job['save']}.meet"))
            for rank in range(job["tp"] * job["pp"])
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(seconds(120))
        for process in ranks:
            process.kill()
        assert not any(process.exitcode for process in ranks), job


if __name__ == "__main__":
    main()
