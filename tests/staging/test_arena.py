"""The arena's memory: whose it is, and when it goes."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
from contextlib import closing
from pathlib import Path

import pytest

import smckpt.staging.arena as arena_module
from smckpt.errors import MemoryBudgetError, UsageError
from smckpt.staging.arena import Arena
from tests.support import child


@pytest.mark.parametrize("kernel", ["this one", "before Linux 5.14"])
def test_its_pages_are_there_from_the_start(kernel: str) -> None:
    faults = child.run(
        """
        import errno, resource, sys
        from smckpt.staging import arena as module
        if sys.argv[1] != "this one":
            module._populate = lambda *_: errno.EINVAL
        arena = module.Arena((64 << 20) + 8192)
        view = arena.view(0, arena.size)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        view[::4096] = bytes(arena.size // 4096)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        """,
        kernel,
    )
    assert int(faults) < 1000, "16,386 pages would fault one by one"


def test_a_size_is_rounded_up_to_whole_pages_and_views_stay_inside() -> None:
    with closing(Arena(5000)) as arena:
        assert arena.size == 8192
        assert os.fstat(arena.fd).st_size == 8192
        arena.view(8000, 192)[:] = b"x" * 192
        for offset, length in ((8000, 193), (-1, 5), (0, -1)):
            with pytest.raises(UsageError):
                arena.view(offset, length)
    with pytest.raises(UsageError, match="0 bytes"):
        Arena(0)


def test_another_process_sees_the_bytes_through_the_descriptor() -> None:
    with closing(Arena(4096)) as arena:
        arena.view(100, 5)[:] = b"hello"
        with mmap.mmap(arena.fd, 4096, prot=mmap.PROT_READ) as other:
            assert other[100:105] == b"hello"


def test_closing_gives_the_memory_back_as_soon_as_no_view_lives() -> None:
    gc.collect()
    before = held_by(os.getpid())  # by tests that ran in this process
    arena = Arena(1 << 20)
    # ours, and the one that mmap keeps
    assert held_by(os.getpid()) == (before[0] + 2, before[1] + 1)
    arena.close()
    arena.close()
    assert held_by(os.getpid()) == before
    with pytest.raises(UsageError, match="closed"):
        arena.view(0, 1)
    arena = Arena(1 << 20)
    view = arena.view(0, 10)
    arena.close()
    view[:] = bytes(10)  # still mapped: no crash
    view.release()
    assert held_by(os.getpid()) == before


def test_memory_of_one_process_has_no_file_and_goes_at_the_close() -> None:
    before = held_by(os.getpid())
    files = os.listdir("/proc/self/fd")
    arena = Arena(8 << 20, shared=False)
    assert arena.fd < 0 and held_by(os.getpid()) == before
    assert os.listdir("/proc/self/fd") == files
    view = arena.view(0, 1)
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    view.release()
    assert kept_by_a_fork(address) == (True, False)
    arena.view(100, 5)[:] = b"hello"
    arena.close()
    arena.close()
    with pytest.raises(UsageError, match="closed"):
        arena.view(0, 1)
    assert not mapped(os.getpid(), address)


def mapped(pid: int, address: int) -> bool:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    ranges = (line.split()[0].split("-") for line in lines)
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


def kept_by_a_fork(address: int) -> tuple[bool, bool]:
    """Whether this process and a child have that address mapped."""
    answer, give = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(give, b"1" if mapped(os.getpid(), address) else b"0")
        os._exit(0)
    os.waitpid(pid, 0)
    child = os.read(answer, 1) == b"1"
    os.close(answer)
    os.close(give)
    return mapped(os.getpid(), address), child


def test_a_forked_child_holds_none_of_the_memory() -> None:
    """A data loader's worker that outlives the trainer must not keep its arena."""
    arena = Arena(1 << 20)
    ready, say_ready = os.pipe()
    hold, let_go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(say_ready, b"x")
        os.close(let_go)
        os.read(hold, 1)  # until the parent closes its end
        os._exit(0)
    os.read(ready, 1)
    held = held_by(pid)
    arena.close()
    for fd in (let_go, hold, ready, say_ready):
        os.close(fd)
    os.waitpid(pid, 0)
    assert held == (0, 0)


def test_a_child_that_is_forked_while_the_pages_are_made_holds_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first arena may be made in a thread, while the trainer forks its loader's workers."""
    forked: list[tuple[int, int]] = []
    populate = arena_module._populate

    def fork_first(memory: mmap.mmap, start: int, length: int) -> int:
        ready, say_ready = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(say_ready, b"x")
            signal.pause()  # until the parent ends it
        os.read(ready, 1)
        os.close(ready)
        os.close(say_ready)
        forked.append(held_by(pid))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return populate(memory, start, length)

    monkeypatch.setattr(arena_module, "_populate", fork_first)
    Arena(1 << 20).close()
    assert forked == [(0, 0)]


def test_a_child_may_fork_and_use_its_own_descriptors_after() -> None:
    """What the child closes late must not be somebody else's descriptor."""
    child.run(
        """
        import gc, os
        from smckpt.staging.arena import Arena
        arena = Arena(1 << 20)
        pid = os.fork()
        if pid == 0:
            mine = [os.open("/dev/zero", os.O_RDONLY) for _ in range(20)]
            del arena
            gc.collect()
            ok = all(os.read(fd, 1) == b"\\0" for fd in mine)
            os._exit(0 if ok else 1)
        assert os.waitpid(pid, 0)[1] == 0
        """
    )


def test_too_large_an_arena_is_an_error_and_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryBudgetError, match="could not provide"):
        Arena(1 << 60)
    assert len(os.listdir("/proc/self/fd")) == before


def held_by(pid: int) -> tuple[int, int]:
    """How many descriptors and mappings of arenas a process has."""
    links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return tuple(sum("smckpt-arena" in x for x in where) for where in (links, maps))  # type: ignore[return-value]


def test_a_limit_on_the_size_of_files_is_told_as_that() -> None:
    said = child.run(
        """
        import resource
        from smckpt.errors import MemoryBudgetError
        from smckpt.staging.arena import Arena
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            Arena(8 << 20)
        except MemoryBudgetError as error:
            print(error)
        """
    )
    assert "ulimit -f" in said
    assert "free host memory" not in said
