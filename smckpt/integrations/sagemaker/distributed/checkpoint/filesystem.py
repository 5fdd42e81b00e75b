"""Readers and writers, with SMP's hooks; the file system beside a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

import smckpt
from smckpt.errors import UsageError
from smckpt.integrations.sagemaker.distributed.checkpoint.s3_filesystem import (
    S3FileSystem,
    format_s3_path,
    is_s3_uri,
    store_options,
)
from smckpt.staging.copies import Copies, copy_all

__all__ = ["DistributedFileSystemReader", "DistributedFileSystemWriter", "path_to_file_system"]

Hook = Callable[["DistributedFileSystemWriter"], object]


def path_to_file_system(path: str | os.PathLike[str]) -> Any:
    """The file system for small files beside a checkpoint: torch's `FileSystem`, or an
    `S3FileSystem`."""
    return S3FileSystem() if is_s3_uri(path) else FileSystem()


class DistributedFileSystemReader(smckpt.DistributedFileSystemReader):
    """smckpt's reader, with `fs` and `path`."""

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(_url_of(path), **_with_store(options))
        self.fs = path_to_file_system(self.checkpoint_id)


class DistributedFileSystemWriter(smckpt.DistributedFileSystemWriter):
    """smckpt's writer, with `fs`, `path`, `is_coordinator` and hooks.

    Args:
        pre_write_hooks: called with the writer on each rank, after its state is in host memory and
            before a byte is written. If one raises, the save fails on all ranks.
        post_write_hooks: called with the writer on each rank after the commit, in the background.
            The next `maybe_finalize_async_calls` of the queue raises the error of a hook.
        options: as in `smckpt.DistributedFileSystemWriter`, with `s3_region` and `s3client_config`
            in place of `storage`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        pre_write_hooks: Iterable[Hook] = (),
        post_write_hooks: Iterable[Hook] = (),
        **options: Any,
    ) -> None:
        super().__init__(_url_of(path), **_with_store(options))
        self.fs = path_to_file_system(self.checkpoint_id)
        self.is_coordinator = False
        self._before = tuple(pre_write_hooks)
        self._after = tuple(post_write_hooks)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self.is_coordinator = is_coordinator

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Called by DCP, where a planner is given."""
        if self._after:
            raise UsageError(
                "post_write_hooks= is not honoured together with a planner",
                remedy="leave the planner out",
                path=self.checkpoint_id,
            )
        self._run(self._before)
        return super().write_data(plan, planner)

    def hooked(self, process_group: Any, coordinator_rank: int | None) -> dict[str, Any]:
        """The options of a save that run the hooks before the write."""
        import torch.distributed as dist

        ranks = smckpt.get_global_ranks(process_group)
        rank = dist.get_rank() if dist.is_initialized() else 0
        lead = ranks[0] if coordinator_rank is None else coordinator_rank
        self.is_coordinator = rank == lead
        if not self._before:
            return {}

        def stager(copies: Copies) -> None:
            copy_all(copies)
            self._run(self._before)

        return {"stager": stager}

    def after(self, handle: smckpt.SaveHandle) -> Future[None]:
        """Start the hooks that follow the commit."""
        done: Future[None] = Future()

        def run(saved: Any) -> None:
            try:
                if saved.error is None:  # if the save failed, the queue raises it
                    self._run(self._after)
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        handle.add_done_callback(run)
        return done

    def _run(self, hooks: Iterable[Hook]) -> None:
        for hook in hooks:
            hook(self)


def _url_of(path: str | os.PathLike[str]) -> str:
    return format_s3_path(path) if is_s3_uri(path) else os.fspath(path)


def _with_store(options: dict[str, Any]) -> dict[str, Any]:
    region, config = options.pop("s3_region", None), options.pop("s3client_config", None)
    given = store_options(region, config)
    return options if given is None else {**options, "storage": given}
