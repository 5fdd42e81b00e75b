"""An open directory of a file system. What is done in it goes from its descriptor.

The user names a directory, perhaps through a symbolic link. Below it nothing is reached through a
link, because others may be able to put one there, at any moment. A path that is checked first and
used later does not hold that. A descriptor does: it stays the directory that was opened, and the
kernel refuses links while it opens one below (`openat2`, or one name after the other).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Sequence

from smckpt.errors import UsageError
from smckpt.storage.disk.linux import open_beneath

_DIRECTORY = os.O_DIRECTORY | os.O_CLOEXEC
_PATH = getattr(os, "O_PATH", os.O_RDONLY)  # macOS has no O_PATH
_CREATE = os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
# The errors of fsync on a directory where the file system cannot do it (CIFS, some FUSE).
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP, errno.ENOTSUP)


class Directory:
    """An open directory, which its `with` block closes.

    fd: its descriptor, for calls with `dir_fd=`. path: for messages. A name is one file name.
    """

    def __init__(self, fd: int, path: str) -> None:
        self.fd, self.path = fd, path

    @classmethod
    def open(cls, root: str, below: Sequence[str] = (), *, make: bool = False) -> Directory:
        """Open the directory that the user named, or one below it.

        Args:
            root: what the user named. Links on the path to it are followed.
            below: the names from there on. None of them may be a link.
            make: make what is missing, each new name durable.

        Raises:
            UsageError: one of the names is a link.
            OSError: it is missing, is a file, or cannot be opened.
        """
        if make:
            # Make the directory that the user named, and its parents. Each new name is durable.
            missing, above = list[str](), root
            while not os.path.isdir(above):
                missing.append(above)
                above = os.path.dirname(above)
            for directory in reversed(missing):
                try:
                    os.mkdir(directory)
                except FileExistsError:
                    if not os.path.isdir(directory):
                        raise NotADirectoryError(errno.ENOTDIR, "a file", directory) from None
                with Directory.open(os.path.dirname(directory)) as parent:
                    parent.sync()
        here = cls(os.open(root, _DIRECTORY | _PATH), root)
        return here._down(below, make) if below else here

    def below(self, *names: str, make: bool = False) -> Directory:
        """A directory below this one, as `open` opens it. Both stay open."""
        return Directory(os.dup(self.fd), self.path)._down(names, make)

    def _down(self, names: Sequence[str], make: bool) -> Directory:
        """Go down, one directory after the other; this one is closed."""
        here = self
        try:
            if len(names) > 1 and not make:
                fd = open_beneath(here.fd, "/".join(names), _DIRECTORY | _PATH)
                if fd is not None:
                    here.close()
                    return Directory(fd, os.path.join(self.path, *names))
            for name in names:
                deeper = here._inner(name, make)
                here.close()
                here = deeper
        except BaseException:
            here.close()
            raise
        return here

    def _inner(self, name: str, make: bool) -> Directory:
        try:
            return self._opened(name)
        except FileNotFoundError:
            if not make:
                raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=self.fd)
        self.sync()
        return self._opened(name)

    def _opened(self, name: str) -> Directory:
        path = os.path.join(self.path, name)
        try:
            fd = os.open(name, _DIRECTORY | _PATH | os.O_NOFOLLOW, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and self.is_link(name):
                raise UsageError(
                    f"{name!r} below {self.path} is a symbolic link; smckpt does not write, "
                    "delete or read a checkpoint where a link below it leads",
                    remedy="if you mean the directory behind the link, pass its real path",
                    path=path,
                ) from None
            raise
        return Directory(fd, path)

    # -- what is in it ---------------------------------------------------------------------------

    def names(self) -> list[str]:
        """All names in it, sorted."""
        fd = self.listable()
        try:
            return sorted(os.listdir(fd))
        finally:
            os.close(fd)

    def listable(self) -> int:
        """Another descriptor of it, which can be listed and synced; the caller closes it."""
        return os.open(".", os.O_RDONLY | _DIRECTORY, dir_fd=self.fd)

    def status(self, name: str) -> os.stat_result | None:
        """What has a name, a link itself too; None: nothing has it."""
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def is_link(self, name: str) -> bool:
        found = self.status(name)
        return found is not None and stat.S_ISLNK(found.st_mode)

    def is_directory(self, name: str) -> bool:
        found = self.status(name)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def link_at(self, name: str) -> str | None:
        """Where a symbolic link leads; None: no link has the name."""
        return os.readlink(name, dir_fd=self.fd) if self.is_link(name) else None

    def open_file(self, name: str) -> int:
        """Open a file for reading. A pipe or a device is opened at once, too.

        Raises:
            OSError: ELOOP: the name is a link.
        """
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        return os.open(name, flags, dir_fd=self.fd)

    # -- changes ---------------------------------------------------------------------------------

    def create(self, name: str, *, read: bool = False) -> int:
        """A descriptor of a new file. The name must be free."""
        flags = (os.O_RDWR if read else os.O_WRONLY) | _CREATE
        return os.open(name, flags, 0o666, dir_fd=self.fd)

    def make(self, name: str, mode: int = 0o777) -> Directory:
        """A new directory. The name must be free."""
        os.mkdir(name, mode, dir_fd=self.fd)
        return self.below(name)

    def rename(self, name: str, new: str) -> None:
        """Rename. What has the new name is replaced: a file, or an empty directory."""
        os.rename(name, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def link_to(self, leads_to: str, name: str) -> None:
        """Make a symbolic link."""
        os.symlink(leads_to, name, dir_fd=self.fd)

    def remove(self, name: str) -> None:
        """Remove a file or a link. A missing one is no error."""
        unlink(name, dir_fd=self.fd)

    def remove_directory(self, name: str) -> None:
        """Remove an empty directory."""
        os.rmdir(name, dir_fd=self.fd)

    def remove_all(self, name: str) -> None:
        """Remove a directory with all that is in it; where a link leads, nothing. A missing one is
        no error."""
        if not self.is_directory(name):
            self.remove(name)
            return
        with self.below(name) as inner:
            for each in inner.names():
                inner.remove_all(each)
        with contextlib.suppress(FileNotFoundError):
            self.remove_directory(name)

    def path_for_others(self) -> str:
        """A path of it, for writers and processes that take no descriptor. On Linux it leads to the
        open directory, and not by a name."""
        path = f"/proc/{os.getpid()}/fd/{self.fd}"
        return path if os.path.isdir(path) else self.path

    def sync(self) -> None:
        """Make the names in it durable."""
        fd = self.listable()
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_SYNC:
                raise
        finally:
            os.close(fd)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def unlink(name: str, dir_fd: int | None = None) -> None:
    try:
        os.unlink(name, dir_fd=dir_fd)
    except FileNotFoundError:
        return  # nothing to remove
