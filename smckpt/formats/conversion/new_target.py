"""A file or directory that appears whole, under a name that is free, or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, BinaryIO

from smckpt.errors import UsageError
from smckpt.storage.disk.directory import Directory
from smckpt.storage.disk.posix_write import publish
from smckpt.storage.faults import storage_error

__all__ = ["NewTarget"]

UNFINISHED = ".unfinished"


class NewTarget:
    """A new file or directory beside `target` that becomes it at the end of the block, unless it
    fails or something is there by then.

    Nothing is reached through a link that somebody puts there meanwhile: the directory above both,
    which the user named, stays open, and so does what is made in it.
    """

    def __init__(self, target: str, *, directory: bool) -> None:
        self._target, self._directory = target, directory
        self._name = os.path.basename(target)
        self._begun = f"{self._name}.{secrets.token_hex(6)}{UNFINISHED}"

    def __enter__(self) -> NewTarget:
        above = os.path.dirname(self._target)
        try:
            self._above = Directory.open(above, make=True)
        except OSError as error:
            raise storage_error(error, above, "make the directory") from error
        try:
            there = self._above.status(self._name)
            taken = there is not None
            if there is not None and self._directory and stat.S_ISDIR(there.st_mode):
                with self._above.below(self._name) as directory:
                    taken = bool(directory.names())
            if taken:
                raise self._taken()
            if self._directory:
                self._made = self._above.make(self._begun)
            else:
                self._fd = self._above.create(self._begun)
        except BaseException as error:
            self._above.close()
            if isinstance(error, OSError):
                raise storage_error(error, self._target, "write") from error
            raise
        return self

    @contextmanager
    def file(self, name: str = "") -> Iterator[BinaryIO]:
        """The new file, or one in the new directory, durable at the end of the block.

        Args:
            name: in a directory; "a/b" is below another one.
        """
        *folders, last = name.split("/")
        with ExitStack() as stack:
            if self._directory:
                above = stack.enter_context(self._made.below(*folders, make=True))
                fd = above.create(last)
            else:
                fd = os.dup(self._fd)
            with open(fd, "wb") as file:
                yield file
                file.flush()
                os.fsync(fd)
            if folders:
                above.sync()

    def put(self, name: str, data: bytes) -> None:
        """Write a file in the new directory."""
        with self.file(name) as file:
            file.write(data)

    @contextmanager
    def folder(self, name: str) -> Iterator[str]:
        """The path of a directory that is made in the new one, durable at the end of the block."""
        with self._made.make(name) as made:
            yield f"{self.path()}/{name}"
            made.sync()

    def path(self) -> str:
        """A path of the new directory, for writers that take no descriptor."""
        return self._made.path_for_others()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if error is None:
                try:
                    if self._directory:
                        self._made.sync()
                        # refused unless the target is empty
                        self._above.rename(self._begun, self._name)
                    elif not publish(self._above, self._begun, self._name):
                        raise self._taken()
                    self._above.sync()
                except OSError as failed:
                    if self._above.status(self._name) is not None:
                        raise self._taken() from failed
                    raise storage_error(
                        failed, self._target, "name the finished checkpoint"
                    ) from failed
            elif isinstance(error, OSError):
                raise storage_error(error, self._target, "write") from error
        finally:
            if self._directory:
                self._made.close()
            else:
                os.close(self._fd)
            with self._above, suppress(OSError):
                self._above.remove_all(self._begun)

    def _taken(self) -> UsageError:
        return UsageError(
            "something is there already", remedy="choose another target", path=self._target
        )
