"""What the HyperPod adapter imports beside SMP, where it is absent: the smallest names that let its
code run on CPUs. No checkpoint code is among them (docs/evidence/suites.md lists them).

`put()` adds only packages that cannot be imported, so an installed one is used.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch

__all__ = ["put"]


def put() -> list[str]:
    """Make the absent packages importable; their names."""
    absent = []
    for package, modules in _PACKAGES.items():
        if importlib.util.find_spec(package) is not None:
            continue
        absent.append(package)
        for name in modules:
            module = sys.modules[name] = ModuleType(name, "a stand-in for the tests")
            module.__path__ = []  # each may have modules below it
            module.__spec__ = ModuleSpec(name, None)  # peft and transformers look for it
            above, _, last = name.rpartition(".")
            if above:
                setattr(sys.modules[above], last, module)
        for name, fill in modules.items():
            if fill is not None:
                vars(sys.modules[name]).update(fill())
    return absent


# -- NeMo ------------------------------------------------------------------------------------------


class _Singleton(type):
    _made: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in cls._made:
            cls._made[cls] = super().__call__(*args, **kwargs)
        return cls._made[cls]


class AppState(metaclass=_Singleton):
    """One object of each class in a process, with any attributes."""

    world_size = global_rank = local_rank = None
    data_parallel_size = data_parallel_rank = None
    exp_dir = log_dir = None


class _Log(logging.LoggerAdapter):  # type: ignore[type-arg]
    """NeMo's `logging` object."""

    rank = 0

    @property
    def _logger(self) -> logging.Logger:
        return self.logger

    def add_file_handler(self, path: Any) -> None:
        """No files: the tests remove their directories."""

    add_err_file_handler = add_file_handler


def _utils() -> dict[str, Any]:
    return {"AppState": AppState, "logging": _Log(logging.getLogger("nemo"), {})}


def _environment() -> dict[str, Any]:
    def get_envint(name: str, default: int | None = None) -> int | None:
        return int(os.environ[name]) if name in os.environ else default

    return {"get_envint": get_envint}


@dataclasses.dataclass
class CallbackParams:
    every_n_train_steps: int | None = None
    save_last: bool | None = True
    save_top_k: int | None = 3
    monitor: str | None = "step"
    mode: str | None = "max"


@dataclasses.dataclass
class _Ema:
    enable: bool | None = False


@dataclasses.dataclass
class ExpManagerConfig:
    """The fields that the adapter reads or its examples set."""

    exp_dir: str | None = None
    explicit_log_dir: str | None = None
    name: str | None = None
    version: str | None = None
    use_datetime_version: bool | None = False
    resume_if_exists: bool | None = False
    resume_from_checkpoint: str | None = None
    create_tensorboard_logger: bool | None = False
    create_wandb_logger: bool | None = False
    create_mlflow_logger: bool | None = False
    create_dllogger_logger: bool | None = False
    create_clearml_logger: bool | None = False
    create_neptune_logger: bool | None = False
    create_checkpoint_callback: bool | None = True
    create_early_stopping_callback: bool | None = False
    checkpoint_callback_params: CallbackParams | None = dataclasses.field(
        default_factory=CallbackParams
    )
    summary_writer_kwargs: dict[Any, Any] = dataclasses.field(default_factory=dict)
    mlflow_logger_kwargs: dict[Any, Any] = dataclasses.field(default_factory=dict)
    wandb_logger_kwargs: dict[Any, Any] = dataclasses.field(default_factory=dict)
    dllogger_logger_kwargs: dict[Any, Any] = dataclasses.field(default_factory=dict)
    clearml_logger_kwargs: dict[Any, Any] = dataclasses.field(default_factory=dict)
    neptune_logger_kwargs: dict[Any, Any] = dataclasses.field(default_factory=dict)
    log_local_rank_0_only: bool | None = False
    log_global_rank_0_only: bool | None = False
    disable_validation_on_resume: bool | None = False
    max_time_per_run: str | None = None
    files_to_copy: list[str] | None = None
    seconds_to_sleep: float = 0
    ema: _Ema | None = dataclasses.field(default_factory=_Ema)


def _exp_manager() -> dict[str, Any]:
    from pytorch_lightning.callbacks import EarlyStopping, Timer

    def get_log_dir(*, exp_dir: Any, name: Any, **_: Any) -> tuple[Any, ...]:
        return Path(exp_dir) / (name or "default"), str(exp_dir), name, ""

    def nothing(*_: Any, **__: Any) -> None:
        pass

    return {
        "CallbackParams": CallbackParams,
        "EarlyStopping": EarlyStopping,
        "ExpManagerConfig": ExpManagerConfig,
        "StatelessTimer": Timer,
        "Timer": Timer,
        "TimingCallback": _Unused,
        "configure_loggers": nothing,
        "configure_no_restart_validation_training_loop": nothing,
        "get_git_diff": lambda: "",
        "get_git_hash": lambda: (False, ""),
        "get_log_dir": get_log_dir,
    }


def _overrides() -> dict[str, Any]:
    from pytorch_lightning.strategies import FSDPStrategy

    # The adapter calls Lightning's methods past this class.
    return {"NLPFSDPStrategy": type("NLPFSDPStrategy", (FSDPStrategy,), {})}


def _model() -> dict[str, Any]:
    from pytorch_lightning import LightningModule

    class ModelPT(LightningModule):  # type: ignore[misc]
        """A LightningModule whose optimizer and schedule come from its configuration."""

        def __init__(self, cfg: Any = None, trainer: Any = None) -> None:
            super().__init__()
            self._cfg, self._optimizer, self._scheduler = cfg, None, None
            if trainer is not None:
                self._trainer = trainer

        @property
        def cfg(self) -> Any:
            return self._cfg

        def _optim_config_copy(self, optim_config: Any) -> Any:
            return self._cfg.optim.copy() if optim_config is None else optim_config

        def setup_optimization(self, optim_config: Any = None, optim_kwargs: Any = None) -> None:
            parameters = [p for p in self.parameters() if p.requires_grad]
            self._optimizer = torch.optim.AdamW(
                parameters,
                lr=optim_config.lr,
                betas=tuple(optim_config.betas),
                weight_decay=optim_config.weight_decay,
            )
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
                self._optimizer, max(optim_config.sched.max_steps, 1), optim_config.sched.min_lr
            )
            self._scheduler = {"scheduler": schedule, "interval": "step", "frequency": 1}

    return {"ModelPT": ModelPT}


class _Unused:
    """Imported, not used on this way."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} is a stand-in without a function")


def _unused(*names: str) -> Any:
    return lambda: {name: type(name, (_Unused,), {}) for name in names}


def _precisions() -> dict[str, Any]:
    return {"torch_dtype_from_precision": lambda precision, _: getattr(torch, str(precision))}


def _nothing() -> dict[str, Any]:
    return {"add_filehandlers_to_pl_logger": lambda *_: None}


def _client() -> dict[str, Any]:
    return {"S3Exception": type("S3Exception", (Exception,), {})}


def _credentials() -> dict[str, Any]:
    return {"logger": logging.getLogger("aiobotocore")}


_PACKAGES: dict[str, dict[str, Any]] = {
    "nemo": {
        "nemo": None,
        "nemo.utils": _utils,
        "nemo.utils.env_var_parsing": _environment,
        "nemo.utils.exp_manager": _exp_manager,
        "nemo.utils.lightning_logger_patch": _nothing,
        "nemo.collections": None,
        "nemo.collections.common": None,
        "nemo.collections.common.callbacks": _unused("EMA"),
        "nemo.collections.nlp": None,
        "nemo.collections.nlp.parts": None,
        "nemo.collections.nlp.parts.nlp_overrides": _overrides,
        "nemo.collections.nlp.parts.utils_funcs": _precisions,
        "nemo.core": None,
        "nemo.core.classes": None,
        "nemo.core.classes.modelPT": _model,
        "nemo.lightning": None,
        "nemo.lightning.pytorch": None,
        "nemo.lightning.pytorch.callbacks": _unused("NsysCallback"),
    },
    "transformer_engine": {
        "transformer_engine": None,
        # peft asks whether a layer is one of these
        "transformer_engine.pytorch": _unused("LayerNormLinear", "LayerNormMLP", "Linear"),
        "transformer_engine.pytorch.attention": lambda: {"DotProductAttention": torch.nn.Module},
        "transformer_engine.common": None,
        "transformer_engine.common.recipe": _unused("DelayedScaling", "Format"),
    },
    "s3torchconnectorclient": {
        "s3torchconnectorclient": None,
        "s3torchconnectorclient._mountpoint_s3_client": _client,
    },
    "aiobotocore": {"aiobotocore": None, "aiobotocore.credentials": _credentials},
    "datasets": {
        "datasets": _unused("interleave_datasets", "load_dataset", "load_from_disk", "Dataset")
    },
}
