"""The code of NeMo's page "S3 Checkpointing", in its order, behind a prelude for what it leaves
unbound: the configuration, the data and model, and `NLPDDPStrategy`, of which only the arguments
concern Lightning.

Its arguments: DIRPATH WHAT. WHAT: "die" (SIGKILL to itself in step 5), "resume" (go on, then train
in DIRPATH-straight without a stop; print both as JSON). Run by `smckpt.run --for nemo`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

import yaml
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy

from tests.support.frameworks.lightning_run import STEPS, Batches, Model, Seen, ended

CONFIG = """
s3_checkpointing:
    # write_concurrency * tp * pp * 1.15 (buffer) should be within 3500 S3 TPS limit per partition
    max_write_concurrency: 10
    # read_concurrency * tp * pp * 1.15 (buffer) should be within 5500 S3 TPS limit per partition
    max_read_concurrency: 15
    chunk_size_MB: 64
    # enables asynchronous checkpoint writing to S3
    enable_async_checkpointing: False
"""


# Lightning takes these variables away when a Trainer ends
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Settings(dict[str, Any]):
    """In the place of OmegaConf's DictConfig."""

    def __getattr__(self, name: str) -> Any:
        value = self[name]
        return Settings(value) if isinstance(value, dict) else value


class NLPDDPStrategy(DDPStrategy):
    """Megatron's communication hooks and NCCL settings are not of this page."""

    def __init__(
        self,
        no_ddp_communication_hook: bool = False,
        nccl_communicator_config_path: str | None = None,
        sharp: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)


class Job:
    def __init__(self, cfg: Settings) -> None:
        self.cfg = cfg

    def strategy(self) -> Any:
        from nemo.utils.callbacks.s3_checkpoint_io import S3CheckpointIO

        # fmt: off
        async_checkpointing = self.cfg.s3_checkpointing.get('enable_async_checkpointing', False)
        chunk_size_MB = self.cfg.s3_checkpointing.get('chunk_size_MB')
        max_read_concurrency = self.cfg.s3_checkpointing.get('max_read_concurrency')
        max_write_concurrency = self.cfg.s3_checkpointing.get('max_write_concurrency')
        dirpath = self.cfg.exp_manager.checkpoint_callback_params.get('dirpath')

        s3_checkpoint_io = S3CheckpointIO(dirpath=dirpath, chunk_size_MB=chunk_size_MB, max_read_concurrency=max_read_concurrency, max_write_concurrency=max_write_concurrency, async_checkpointing=async_checkpointing)  # noqa: E501

        strategy = NLPDDPStrategy(
            no_ddp_communication_hook=True,
            checkpoint_io=s3_checkpoint_io,
            gradient_as_bucket_view=self.cfg.model.gradient_as_bucket_view,
            find_unused_parameters=False,
            nccl_communicator_config_path=self.cfg.model.get('nccl_communicator_config_path', None),
            sharp=self.cfg.model.get('sharp', False),
        )
        # fmt: on
        return strategy


def train(dirpath: str, *, resume: bool, dies: int = 0) -> dict[str, Any]:
    from nemo.utils.callbacks.nemo_model_checkpoint import NeMoModelCheckpoint
    from nemo.utils.exp_manager import NeMoCheckpointConnector
    from nemo.utils.s3_utils import S3Utils

    cfg = Settings(yaml.safe_load(CONFIG))
    cfg["exp_manager"] = {"checkpoint_callback_params": {"dirpath": dirpath}}
    cfg["model"] = {"gradient_as_bucket_view": True}
    seed_everything(7 if resume else 0, verbose=False)
    saved = NeMoModelCheckpoint(
        dirpath=dirpath, filename="{step}", monitor="loss", save_top_k=2, save_last=True,
        every_n_train_steps=2,
    )  # fmt: skip
    trainer = Trainer(
        accelerator="cpu", devices=RANKS, strategy=Job(cfg).strategy(),
        max_steps=STEPS, callbacks=[Seen(dies), saved], logger=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        default_root_dir=tempfile.gettempdir(),
    )  # fmt: skip
    trainer._checkpoint_connector = NeMoCheckpointConnector(trainer)
    if resume and RANK == 0:  # as `exp_manager` does
        (last,) = S3Utils.find_files_with_suffix(dirpath, "last.ckpt", return_key_only=False)
        trainer.ckpt_path = last
    model = Model()
    trainer.fit(model, Batches())
    return ended(trainer, model)


def main() -> None:
    dirpath, what = sys.argv[1:]
    if what == "die":
        train(dirpath, resume=False, dies=5)
        raise AssertionError("it lives")
    resumed = train(dirpath, resume=True)
    straight = train(f"{dirpath}-straight", resume=False)
    print(f"told {json.dumps({'resumed': resumed, 'straight': straight})}", flush=True)


if __name__ == "__main__":
    main()
