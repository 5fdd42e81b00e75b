"""DCP's reader, which parses one file of metadata once."""

from __future__ import annotations

import copy
import os
from functools import lru_cache
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from smckpt.integrations.url_files import UrlFileSystem, is_url

__all__ = ["CachedMetadataFileSystemReader"]


class CachedMetadataFileSystemReader(FileSystemReader):
    """
    Args:
        path: a directory, or a URL.
        cache_metadata: keep the metadata for other readers of the directory, for as long as the
            file is the same one: a checkpoint that was replaced is read anew.
    """

    def __init__(self, path: str | os.PathLike[str], cache_metadata: bool = True) -> None:
        super().__init__(path)
        self._cached = cache_metadata and not is_url(path)
        if is_url(path):
            self.fs: Any = UrlFileSystem()
            self.path: Any = self.fs.init_path(path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if not self._cached or args or kwargs.get("rank") is not None:
            return super().read_metadata(*args, **kwargs)
        file = os.stat(self._get_metadata_path())
        identity = (file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns)
        return copy.copy(_read(os.path.abspath(self.path), identity))

    @classmethod
    def clear_metadata_cache(cls, path: str | os.PathLike[str] | None = None) -> None:
        """Forget what was read. With a path too, all of it: it is read again where needed."""
        _read.cache_clear()


@lru_cache(maxsize=16)
def _read(path: str, identity: tuple[int, ...]) -> Metadata:
    return FileSystemReader(path).read_metadata()
