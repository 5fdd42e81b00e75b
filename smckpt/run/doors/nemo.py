"""Puts NeMo's modules of S3 checkpointing in place, where NeMo is absent."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from smckpt.run.places import Provided, refuse_shadow, refuse_version

__all__ = ["put"]


def put(provided: Provided, *, force: bool, shadow: bool) -> None:
    """
    Raises:
        UsageError: NeMo is installed, or lightning is of another version.
    """
    import lightning

    from smckpt.run.doors.lightning import TESTED

    refuse_shadow("nemo", shadow)
    refuse_version("lightning", lightning.__version__, TESTED, force)
    for name, names in _modules().items():
        module = ModuleType(name, "smckpt, in NeMo's place")
        module.__dict__.update(names)
        if not names:
            module.__path__ = []
        provided.module(name, module)


def _modules() -> dict[str, dict[str, Any]]:
    from smckpt.integrations.lightning import nemo, plugin, s3
    from smckpt.storage.urls import build_s3_url

    resumes = {name: getattr(nemo, name) for name in nemo.__all__}
    sizes = {name: getattr(s3, name) for name in s3.__all__ if name.startswith("DEFAULT_")}
    return {
        "nemo": {},
        "nemo.utils": {},
        "nemo.utils.s3_dirpath_utils": {
            "S3_PATH_PREFIX": "s3://",
            "build_s3_url": build_s3_url,
            "is_s3_url": s3.S3Utils.is_s3_url,
        },
        "nemo.utils.s3_utils": {"S3Utils": s3.S3Utils, **sizes},
        "nemo.utils.exp_manager": resumes,
        "nemo.utils.callbacks": {},
        "nemo.utils.callbacks.s3_checkpoint_io": {"S3CheckpointIO": plugin.S3CheckpointIO},
        "nemo.utils.callbacks.nemo_model_checkpoint": resumes,
    }
