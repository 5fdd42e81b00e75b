"""The arena: page-aligned memory that has the bytes of a rank's files at their offsets.

It is a `memfd`: it has no name, /dev/shm does not bound it, the worker maps it too, and the kernel
frees it with its last holder. All pages are faulted in before the first save: a copy into new pages
runs at a twentieth of the speed. Where the state is on a CUDA device, they are also registered with
CUDA, once. Forked children hold none of them. (The slots of a load's ring serve one process alone,
and are plain memory.)

The kernel does not refuse memory that it lacks: it kills a process. So before any arena of the host
is made, this module reads MemAvailable and the limits of this process's cgroups (v1 and v2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smckpt.calls import in_threads, while_alive
from smckpt.errors import MemoryBudgetError, UsageError
from smckpt.layout.image import ALIGNMENT

if TYPE_CHECKING:
    import torch


log = logging.getLogger("smckpt")

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_FAULT_THREADS = 4  # two threads fault pages in twice as fast as one; more gain little
_FAULT_CHUNK = 64 << 20
_ALONE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices of this process


class Arena:
    """Pre-faulted memory of `size` bytes, rounded up to 4,096.

    Args:
        shared: whether the worker may map it too. The memory of one process alone has huge pages
            where the kernel has some for those who ask, so that it goes back to the kernel sooner.

    Raises:
        MemoryBudgetError: the kernel does not have that much memory.
    """

    def __init__(self, size: int, *, shared: bool = True) -> None:
        if size <= 0:
            raise UsageError(f"an arena of {size} bytes", remedy="make it only if there is data")
        self.size = -(-size // ALIGNMENT) * ALIGNMENT
        self.plan: object = None  # the last layout's slots as tensors, released with the memory
        self.pinned: bool | None = None  # None: not asked for yet
        self._pinned_on: torch.device | None = None
        self.closed = False
        try:
            self.fd = anonymous_file("smckpt-arena") if shared else -1
        except OSError as error:
            raise _refused(self.size, error) from error
        try:
            if shared:
                os.ftruncate(self.fd, self.size)
            self._map = mmap.mmap(self.fd, self.size, mmap.MAP_SHARED if shared else _ALONE)
            _advise(self._map, "MADV_DONTFORK")
            _advise(self._map, "MADV_HUGEPAGE")  # fewer faults where shmem_enabled=advise
            # before the long part, during which the trainer may fork its data loader's workers
            os.register_at_fork(after_in_child=while_alive(self.forget))
            _fault_in(self._map, self.size)
        except BaseException as error:
            self._close_file()
            if isinstance(error, OSError):
                raise _refused(self.size, error) from error
            raise

    def forget(self) -> None:
        """Make a forked child release the arena, so that its memory is freed when the trainer ends.

        The child does not inherit the mapping (MADV_DONTFORK). `mmap` holds a descriptor of its
        own. It and the arena's are pointed at /dev/null, so that a later close of them closes
        nothing else.
        """
        if self.closed:
            return
        self.pinned = None  # CUDA belongs to the parent
        if self.fd < 0:
            return
        mine = os.fstat(self.fd)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for name in os.listdir("/dev/fd"):
            fd = int(name)
            try:
                found = os.fstat(fd)
            except OSError:
                continue  # the listing's own descriptor, closed by now
            if (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino) and fd != self.fd:
                os.dup2(null, fd, inheritable=False)
        os.dup2(null, self.fd, inheritable=False)
        os.close(null)

    def view(self, offset: int, length: int) -> memoryview:
        """`length` bytes at `offset`, writable. Do not use it after `close`."""
        if self.closed:
            raise UsageError("the arena is closed", remedy="make another")
        if offset < 0 or length < 0 or offset + length > self.size:
            raise UsageError(
                f"bytes {offset} to {offset + length} of an arena of {self.size}",
                remedy="ask for bytes inside the arena",
            )
        return memoryview(self._map)[offset : offset + length]

    def pin(self, device: torch.device) -> None:
        """Register the pages with CUDA, the first time; copies from devices then run at their full
        rate. If CUDA refuses, copies are slower, and the log says why.

        Args:
            device: a device with tensors to copy. No other device gets a context here.
        """
        if self.pinned is not None:
            return
        import torch

        with torch.cuda.device(device):
            code = int(_cuda_runtime().cudaHostRegister(_address(self._map), self.size, _PORTABLE))
            self.pinned, self._pinned_on = code == 0, device
            if self.pinned:
                return
            with contextlib.suppress(RuntimeError):
                # CUDA reports the error again at the next kernel, which would be the caller's.
                torch.ones(1, device=device)
        log.warning(
            "CUDA refused to pin %s bytes of host memory (error %d): saves are staged more slowly. "
            "Raise the locked-memory limit (ulimit -l), or free host memory",
            f"{self.size:,}",
            code,
        )

    def close(self) -> None:
        """Release the memory. The kernel frees it once the worker has released it too and every
        view is gone. A second call does nothing."""
        if self.closed:
            return
        self.plan = None
        if self.pinned:
            import torch

            # an error of the device would be raised here again
            with contextlib.suppress(RuntimeError), torch.cuda.device(self._pinned_on):
                _cuda_runtime().cudaHostUnregister(_address(self._map))
            self.pinned = False
        self._close_file()
        try:
            self._map.close()
        except BufferError:
            # A view still exists. The mapping ends with it.
            del self._map

    def _close_file(self) -> None:
        self.closed = True
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def beside_captures() -> bool:
    """Let this thread call CUDA while another one captures a graph, which would fail otherwise.
    False: CUDA's driver cannot."""
    relaxed = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        return int(driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))) == 0
    except (OSError, AttributeError):
        return False


def anonymous_file(name: str) -> int:
    """A descriptor of an empty file that has no path; its name is for people who list those."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    fd, path = tempfile.mkstemp(prefix=f"{name}-")  # macOS
    os.unlink(path)
    return fd


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _advise(memory: mmap.mmap, name: str) -> None:
    advice = getattr(mmap, name, None)
    if advice is None:
        return
    try:
        memory.madvise(advice)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):  # a kernel built without it
            raise


def _fault_in(memory: mmap.mmap, size: int) -> None:
    """Make the kernel provide every page now."""

    def provide(start: int) -> None:
        if code := _populate(memory, start, min(_FAULT_CHUNK, size - start)):
            raise OSError(code, os.strerror(code))

    threads = min(_FAULT_THREADS, os.cpu_count() or 1)
    try:
        in_threads(provide, range(0, size, _FAULT_CHUNK), threads, "smckpt-arena")
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
        # before Linux 5.14; other threads run between two chunks
        for start in range(0, size, _FAULT_CHUNK):
            part = memoryview(memory)[start : min(start + _FAULT_CHUNK, size) : mmap.PAGESIZE]
            part[:] = bytes(len(part))


def _refused(size: int, error: OSError) -> MemoryBudgetError:
    remedy = "free host memory, raise the container's limit, or run fewer ranks on this host"
    if error.errno == errno.EFBIG:  # the arena is a file to the kernel, and its size a file's
        remedy = (
            "raise this process's limit on the size of files (ulimit -f), which applies to the "
            "arena too; there is enough memory"
        )
    return MemoryBudgetError(
        f"the kernel could not provide {size:,} bytes for the arena: {error.strerror}",
        remedy=remedy,
    )


def _populate(memory: mmap.mmap, start: int, length: int) -> int:
    """Fault a range in through ctypes, which lets other threads run; an errno, 0 for success."""
    if not sys.platform.startswith("linux"):
        return errno.ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    while libc.madvise(_address(memory) + start, length, _POPULATE_WRITE):
        code = ctypes.get_errno()
        if code not in (errno.EINTR, errno.EAGAIN):
            return code
    return 0


def _cuda_runtime() -> Any:  # torch gives the module no type
    import torch

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


_RESERVE = 64 << 20  # per rank, for the worker process and its buffers


@dataclass(frozen=True)
class _Room:
    """Memory that is still free, in bytes, and the name of the bound."""

    free: int
    what: str


def _tightest(root: Path) -> _Room | None:
    rooms = [*_cgroup2(root), *_cgroup1(root)]
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            rooms.append(_Room(int(line.split()[1]) * 1024, "the host's MemAvailable"))
    return min(rooms, key=lambda room: room.free, default=None)


def free_memory(*, root: Path = Path("/")) -> int:
    """Bytes that this host and the cgroups of this process still allow."""
    tightest = _tightest(root)
    return sys.maxsize if tightest is None else max(tightest.free, 0)


def check_memory(
    arena_bytes: int, ranks_on_host: int, copies: int = 1, *, root: Path = Path("/")
) -> None:
    """Refuse arenas that do not fit; the error shows the arithmetic.

    Args:
        arena_bytes: of one arena.
        ranks_on_host: ranks on this host whose arenas are still to be made.
        copies: arenas per rank.
        root: of the host's /proc and /sys.

    Raises:
        MemoryBudgetError: they need more than the host has available or a cgroup still allows.
    """
    need = (arena_bytes * copies + _RESERVE) * ranks_on_host
    tightest = _tightest(root)
    if tightest is None:
        return  # no such files (macOS): the kernel will have to answer
    if need > tightest.free:
        times = f" × {copies} copies" if copies > 1 else ""
        raise MemoryBudgetError(
            f"{ranks_on_host} ranks on this host need ({_gib(arena_bytes)} of arena{times} + "
            f"{_gib(_RESERVE)}) each = {_gib(need)}, but {tightest.what} leaves "
            f"{_gib(tightest.free)}",
            remedy="raise the limit, run fewer ranks on this host, or save a smaller state per "
            "rank (shard further)",
        )


def _cgroup2(root: Path) -> Iterator[_Room]:
    for line in _lines(root / "proc/self/cgroup"):
        hierarchy, _, path = line.partition("::")
        if hierarchy != "0":
            continue
        for mount in (root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"):
            for group in _ancestry(mount, path):
                limit, used = _number(group / "memory.max"), _number(group / "memory.current")
                if limit is not None and used is not None:
                    kept = _reclaimable(group / "memory.stat", "inactive_file")
                    yield _Room(limit - used + kept, f"the cgroup limit {group}/memory.max")


def _cgroup1(root: Path) -> Iterator[_Room]:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" not in controllers.split(","):
            continue
        for group in _ancestry(root / "sys/fs/cgroup/memory", path):
            limit = _number(group / "memory.limit_in_bytes")
            used = _number(group / "memory.usage_in_bytes")
            if limit is not None and used is not None:
                kept = _reclaimable(group / "memory.stat", "total_inactive_file")
                what = f"the cgroup limit {group}/memory.limit_in_bytes"
                yield _Room(limit - used + kept, what)


def _ancestry(mount: Path, path: str) -> Iterator[Path]:
    """The group's directory and its parents. In a container the path may be the host's, and only
    the mount itself exists."""
    group = mount / path.lstrip("/")
    while group != mount:
        if ".." not in group.parts:
            yield group
        group = group.parent
    yield mount


def _reclaimable(path: Path, name: str) -> int:
    """File pages that the kernel drops before it refuses memory."""
    for line in _lines(path):
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    """None: no such file, or no limit ("max")."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # absent or not readable: no known bound
        return []


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"
