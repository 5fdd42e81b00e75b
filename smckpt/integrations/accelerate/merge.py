"""The weights of a checkpoint as one file, as `accelerate merge-weights` makes it."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from accelerate import PartialState
from accelerate.utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME, save
from accelerate.utils import merge_fsdp_weights as stock_merge

import smckpt
from smckpt.errors import KeysMismatchError, UsageError
from smckpt.integrations.accelerate.accelerator import is_committed
from smckpt.storage.disk.directory import Directory

_FSDP = re.compile(r"pytorch_model_fsdp_(\d+)")


def merge_fsdp_weights(
    checkpoint_dir: Any,
    output_path: Any,
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
    *,
    stock: Callable[..., Any] = stock_merge,
) -> None:
    """accelerate's function, and `accelerate merge-weights`: it also takes a checkpoint of smckpt.

    Args:
        checkpoint_dir: the directory of `save_state`, or the name that a model has in it in
            accelerate's own checkpoints, such as `step_2/pytorch_model_fsdp_1`.
        stock: accelerate's own function, for what accelerate wrote.

    Raises:
        UsageError: it has no such model.
    """
    directory, key = os.fspath(checkpoint_dir).rstrip("/"), "model"
    above, _, name = directory.rpartition("/")
    if (found := _FSDP.fullmatch(name)) and not os.path.exists(directory):
        directory, key = above, "model" if found[1] == "0" else f"model_{found[1]}"
    if not is_committed(directory, {}):
        stock(checkpoint_dir, output_path, safe_serialization, remove_checkpoint_dir)
        return
    PartialState().wait_for_everyone()  # all have seen it, before it is removed
    if PartialState().is_main_process:
        try:
            state = smckpt.load(
                checkpoint_id=directory, options=smckpt.LoadOptions(only=[key]), no_dist=True
            )
        except KeysMismatchError as error:
            raise UsageError(
                f"the checkpoint has no {key!r}",
                remedy="pass the directory of save_state, or name one of its models",
                path=directory,
            ) from error
        assert state is not None
        name = SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME
        begun = f".{name}.{secrets.token_hex(6)}"
        with ExitStack() as stack:
            out = stack.enter_context(Directory.open(os.path.abspath(output_path), make=True))
            stack.callback(out.remove_all, begun)
            made = stack.enter_context(out.make(begun, 0o700))
            # accelerate writes to a path, and would follow a link that has the file's name
            path = f"{made.path_for_others()}/{name}"
            save(state[key], path, safe_serialization=safe_serialization)
            os.rename(name, name, src_dir_fd=made.fd, dst_dir_fd=out.fd)
        if remove_checkpoint_dir:
            smckpt.remove(directory)
    PartialState().wait_for_everyone()
