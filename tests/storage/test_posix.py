"""What a store on a file system promises."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from smckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    UsageError,
)
from smckpt.storage import FileInfo, open_storage
from smckpt.storage.disk import posix_write
from smckpt.storage.disk.linux import fallocate
from smckpt.storage.disk.posix import PosixStorage
from smckpt.storage.disk.posix_read import STRETCH
from tests.support import child
from tests.support.faults import refuse


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def aligned(size: int) -> memoryview:
    """`size` random bytes at a page boundary."""
    memory = mmap.mmap(-1, size)
    memory[:] = os.urandom(size)
    return memoryview(memory)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, (9 << 20) + 77])
def test_a_file_written_in_pieces_by_threads_holds_exactly_its_bytes(
    tmp_path: Path, size: int
) -> None:
    store = open_storage(str(tmp_path / "new" / "deep"))
    data = aligned(size + 1)[:size]
    writer = store.create_file("data", size)
    pieces = range(0, size, 1 << 20)
    threads = [
        threading.Thread(target=writer.write_at, args=(at, data[at : at + (1 << 20)]))
        for at in pieces
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.finish()
    assert store.read("data") == bytes(data)
    assert store.size("data") == size


def test_big_aligned_writes_bypass_the_page_cache_where_the_file_system_allows(
    tmp_path: Path,
) -> None:
    path = tmp_path / "probe"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"no O_DIRECT on this file system: {error}")
    data = aligned(1 << 20)
    writer = PosixStorage(str(tmp_path)).create_file("data", len(data))
    assert writer.direct
    writer.write_at(0, data)
    assert writer.direct, "an aligned write must not fall back"
    writer.finish()
    assert (tmp_path / "data").read_bytes() == data


def test_unaligned_memory_is_written_all_the_same(tmp_path: Path) -> None:
    data = aligned(3 << 20)[5:-3]
    writer = PosixStorage(str(tmp_path)).create_file("data", len(data))
    writer.write_at(0, data[: 1 << 20])
    writer.write_at(1 << 20, data[1 << 20 :])
    writer.finish()
    assert (tmp_path / "data").read_bytes() == data


def test_a_missing_piece_is_noticed_before_the_file_counts(tmp_path: Path) -> None:
    writer = PosixStorage(str(tmp_path)).create_file("data", 8192)
    writer.write_at(4096, aligned(4096))
    with pytest.raises(StorageError, match="4096 of 8192 bytes"):
        writer.finish()


def test_an_aborted_file_is_gone_and_abort_may_be_repeated(tmp_path: Path) -> None:
    writer = PosixStorage(str(tmp_path)).create_file("data", 8192)
    writer.write_at(0, aligned(4096))
    writer.abort()
    writer.abort()
    assert names(tmp_path) == []


def test_an_existing_name_is_never_written_to(tmp_path: Path) -> None:
    store = PosixStorage(str(tmp_path))
    store.put("name", b"first")
    with pytest.raises(StorageError, match="exists already"):
        store.create_file("name", 10)
    with pytest.raises(StorageError, match="exists already"):
        store.put("name", b"second")
    assert store.put_exclusive("name", b"third") is False
    assert store.read("name") == b"first"
    assert names(tmp_path) == ["name"]


def test_of_many_that_create_a_name_exclusively_one_succeeds(tmp_path: Path) -> None:
    store = PosixStorage(str(tmp_path / "d"))
    for round_ in range(20):
        race(store, f"manifest-{round_}")
    assert all(name.startswith("manifest-") for name in names(tmp_path / "d"))


def race(store: PosixStorage, name: str, threads: int = 6) -> None:
    """Threads create one name at once: one must succeed, and the content must be its own."""
    start = threading.Barrier(threads)

    def create(i: int) -> bool:
        start.wait()
        return store.put_exclusive(name, b"%d" % i * 5000)

    with ThreadPoolExecutor(threads) as pool:
        won = list(pool.map(create, range(threads)))
    assert sorted(won) == [False] * (threads - 1) + [True]
    assert store.read(name) == b"%d" % won.index(True) * 5000
    assert store.put_exclusive(name, b"late") is False


WITHOUT = """
    import errno, sys
    from tests.storage.test_posix import PosixStorage, race, refuse
    refuse.refuse({calls})
    store = PosixStorage(sys.argv[1])
    for round_ in range(100):
        race(store, f"manifest-{round_}")
"""


@pytest.mark.skipif(not refuse.available(), reason="no seccomp filter for this platform")
@pytest.mark.parametrize(
    "calls",
    [
        {"link": errno.EPERM, "linkat": errno.EPERM},
        {"link": errno.EOPNOTSUPP, "linkat": errno.EOPNOTSUPP, "renameat2": errno.EINVAL},
        {"link": errno.ENOSYS, "linkat": errno.ENOSYS, "renameat2": errno.ENOSYS},
    ],
    ids=["no-link", "no-link-no-renameat2", "neither-known"],
)
def test_exclusive_creation_works_where_the_kernel_refuses_link(
    tmp_path: Path, calls: dict[str, int]
) -> None:
    child.run(WITHOUT.replace("{calls}", repr(calls)), str(tmp_path))
    assert len(names(tmp_path)) == 100
    assert all(name.startswith("manifest-") for name in names(tmp_path))


def test_a_name_that_was_created_counts_although_its_temporary_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(path: str, *, dir_fd: int | None = None) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)

    with monkeypatch.context() as faulty:
        faulty.setattr(os, "unlink", stale)
        assert open_storage(str(tmp_path)).put_exclusive("manifest", b"x") is True
    assert open_storage(str(tmp_path)).list_unfinished() == ["manifest"]  # swept, as any is


def test_a_name_that_may_not_last_is_said_to_be_seen_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def fails_for_directories(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(fd)

    monkeypatch.setattr(os, "fsync", fails_for_directories)
    with pytest.raises(StorageError, match="durable.*it is visible.*input/output error"):
        open_storage(str(tmp_path)).put_exclusive("manifest", b"x")
    assert names(tmp_path) == ["manifest"]


@pytest.mark.skipif(not refuse.available(), reason="no seccomp filter for this platform")
def test_a_guard_left_by_a_dead_process_is_named_and_not_waited_for_forever(
    tmp_path: Path,
) -> None:
    (tmp_path / ".manifest.guard").touch()
    out = child.run(
        """
        import errno, sys, time
        from tests.support.faults import refuse
        from tests.support.limits import seconds
        from smckpt.errors import StorageError
        from smckpt.storage import open_storage
        refuse.refuse({"link": errno.EPERM, "linkat": errno.EPERM, "renameat2": errno.EINVAL})
        begin = time.monotonic()
        try:
            open_storage(sys.argv[1]).put_exclusive("manifest", b"x")
        except StorageError as error:
            assert time.monotonic() - begin < seconds(30)
            print(error)
        """,
        str(tmp_path),
    )
    assert "delete " + str(tmp_path / ".manifest.guard") in out
    assert names(tmp_path) == [".manifest.guard"]


@pytest.mark.skipif(not refuse.available(), reason="no seccomp filter for this platform")
def test_a_mount_that_refuses_every_exclusive_way_gets_a_clear_error(tmp_path: Path) -> None:
    out = child.run(
        """
        import errno, sys
        from tests.support.faults import refuse
        from smckpt.errors import StorageError
        from smckpt.storage import open_storage
        no = {"link": errno.ENOSYS, "linkat": errno.ENOSYS, "renameat2": errno.ENOSYS,
              "rename": errno.ENOSYS, "renameat": errno.ENOSYS}
        refuse.refuse(no)
        try:
            open_storage(sys.argv[1]).put_exclusive("manifest", b"x")
        except StorageError as error:
            print(error)
        """,
        str(tmp_path),
    )
    assert "cannot create exclusively" in out and "save to another file system" in out
    assert names(tmp_path) == []


@pytest.mark.parametrize("replace", [False, True])
def test_a_file_is_durable_before_its_directory_says_so(
    replace: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, int]] = []
    sync = os.fsync

    def seen(fd: int) -> None:
        sync(fd)
        found = os.fstat(fd)
        synced.append((found.st_ino, found.st_size))

    monkeypatch.setattr(os, "fsync", seen)
    size = (1 << 20) + 7  # a whole block and an odd end
    writer = open_storage(str(tmp_path)).create_file("data", size, replace=replace)
    for at in (0, 1 << 20):
        writer.write_at(at, memoryview(b"x" * min(1 << 20, size - at)))
    writer.finish()
    made = (tmp_path / "data").stat()
    assert synced[0] == (made.st_ino, size)
    assert [inode for inode, _ in synced[1:]] == [tmp_path.stat().st_ino]


@pytest.mark.skipif(not refuse.available(), reason="no seccomp filter for this platform")
def test_a_failing_fsync_means_that_nothing_was_created(tmp_path: Path) -> None:
    child.run(
        """
        import errno, sys
        from tests.support.faults import refuse
        from smckpt.errors import StorageError
        from smckpt.storage import open_storage
        refuse.refuse({"fsync": errno.EIO, "fallocate": errno.EOPNOTSUPP})
        store = open_storage(sys.argv[1])
        for attempt in (
            lambda: store.put("name", b"x"),
            lambda: store.put_exclusive("name", b"x"),
        ):
            try:
                attempt()
            except StorageError as error:
                assert "input/output" in str(error)
            else:
                raise SystemExit("no error")
        writer = store.create_file("data", 3)
        writer.write_at(0, memoryview(b"abc"))
        try:
            writer.finish()
        except StorageError:
            writer.abort()
        else:
            raise SystemExit("no error")
        """,
        str(tmp_path),
    )
    assert names(tmp_path) == []


def test_ranges_are_read_across_many_buffers(tmp_path: Path) -> None:
    content = os.urandom(300_000)
    (tmp_path / "data").write_bytes(content)
    store = PosixStorage(str(tmp_path))
    buffers = [bytearray(n) for n in (0, 1, 70_000, *[13] * 3000, 5)]
    store.read_into("data", 17, [memoryview(b) for b in buffers])
    joined = b"".join(buffers)
    assert joined == content[17 : 17 + len(joined)]
    assert store.read("data", 299_990) == content[299_990:]
    assert store.read("data", 5, 7) == content[5:12]
    assert store.read("data", 400_000) == b""


def test_what_is_read_is_shown_in_order_in_small_stretches(tmp_path: Path) -> None:
    content = os.urandom(14_000_000)
    (tmp_path / "data").write_bytes(content)
    buffers = [bytearray(n) for n in (3, 12_700_000, 0, 1, 200_000)]
    shown: list[bytes] = []
    PosixStorage(str(tmp_path)).read_into(
        "data", 17, [memoryview(b) for b in buffers], lambda stretch: shown.append(bytes(stretch))
    )
    assert b"".join(shown) == b"".join(buffers) == content[17 : 17 + 12_900_004]
    assert max(map(len, shown)) <= STRETCH


def test_a_file_that_ends_early_is_corrupt_and_named_with_the_offset(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x" * 1000)
    store = PosixStorage(str(tmp_path))
    with pytest.raises(CorruptCheckpointError, match=r"data ends at byte 1000; 1100") as caught:
        store.read_into("data", 900, [memoryview(bytearray(150)), memoryview(bytearray(50))])
    assert caught.value.path == str(tmp_path / "data")


def test_many_files_are_read_with_few_descriptors(tmp_path: Path) -> None:
    store = PosixStorage(str(tmp_path))
    for i in range(200):
        (tmp_path / f"{i}").write_bytes(b"%d" % i)
    before = len(names(Path("/proc/self/fd")))
    for i in range(200):
        assert store.read(f"{i}") == b"%d" % i
    assert len(names(Path("/proc/self/fd"))) <= before + 64
    store.close()
    assert len(names(Path("/proc/self/fd"))) == before


def test_files_and_directories_are_listed_apart(tmp_path: Path) -> None:
    store = PosixStorage(str(tmp_path))
    store.put("b", b"12")
    store.put("a1", b"1")
    store.join("sub").put("inner", b"")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert store.list() == [FileInfo("a1", 1), FileInfo("b", 2)]
    assert store.list("a") == [FileInfo("a1", 1)]
    assert store.list_dirs() == ["sub"]
    missing = store.join("not/yet")
    assert (missing.list(), missing.list_dirs()) == ([], [])
    store.delete("b")
    store.delete("b")
    missing.delete("b")
    assert store.list("b") == []


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    store = PosixStorage(str(tmp_path))
    for attempt in (lambda: store.size("x"), lambda: store.read("x")):
        with pytest.raises(CheckpointNotFoundError, match="no such file"):
            attempt()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "/etc/passwd", "a\0b"])
def test_a_name_never_leads_out_of_the_directory(tmp_path: Path, name: str) -> None:
    store = PosixStorage(str(tmp_path))
    for attempt in (
        lambda: store.put(name, b""),
        lambda: store.read(name),
        lambda: store.delete(name),
        lambda: store.create_file(name, 1),
        lambda: store.put_exclusive(name, b""),
    ):
        with pytest.raises(UsageError, match="is not a plain file name"):
            attempt()
    with pytest.raises(UsageError):
        store.join(f"../{name}")


def test_a_path_that_is_a_file_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        store = PosixStorage(str(directory))
        for attempt in (
            lambda store=store: store.put("x", b""),
            lambda store=store: store.put_exclusive("x", b""),
            lambda store=store: store.create_file("x", 1),
            lambda store=store: store.list(),
        ):
            with pytest.raises(StorageError, match="path is a file") as caught:
                attempt()
            assert str(directory) in str(caught.value) and caught.value.remedy
    assert (tmp_path / "file").read_bytes() == b"mine"


@pytest.fixture
def small_disk(tmp_path: Path):  # type: ignore[no-untyped-def]
    """A file system of 2 MiB; needs the right to mount."""
    point = tmp_path / "small"
    point.mkdir()
    if os.geteuid() or os.system(f"mount -t tmpfs -o size=2m tmpfs {point} 2>/dev/null"):
        pytest.skip("mounting a small tmpfs needs root")
    yield point
    os.system(f"umount -l {point}")


def test_a_full_disk_says_so_before_anything_is_written(small_disk: Path) -> None:
    store = PosixStorage(str(small_disk))
    store.put("older", b"kept")
    with pytest.raises(StorageError, match="disk is full") as caught:
        store.create_file("data", 8 << 20)
    assert str(small_disk) in str(caught.value) and "free space" in str(caught.value)
    assert names(small_disk) == ["older"]
    for attempt in (
        lambda: store.put("big", bytes(4 << 20)),
        lambda: store.put_exclusive("big", bytes(4 << 20)),
    ):
        with pytest.raises(StorageError, match="disk is full"):
            attempt()
    assert store.read("older") == b"kept" and names(small_disk) == ["older"]


def test_a_file_system_without_o_direct_is_written_buffered(small_disk: Path) -> None:
    data = aligned(1 << 20)
    store = PosixStorage(str(small_disk))
    writer = store.create_file("data", len(data) - 5)
    writer.write_at(0, data[:-5])
    writer.finish()
    assert store.read("data") == data[:-5]


def test_a_read_only_file_system_says_so(small_disk: Path) -> None:
    assert os.system(f"mount -o remount,ro {small_disk}") == 0
    store = PosixStorage(str(small_disk / "new"))
    for attempt in (lambda: store.put("x", b""), lambda: store.put_exclusive("x", b"")):
        with pytest.raises(StorageError, match="read-only") as caught:
            attempt()
        assert caught.value.path.startswith(str(small_disk))  # type: ignore[union-attr]


@pytest.mark.skipif(os.geteuid() != 0, reason="changing the user needs root")
def test_a_directory_without_write_permission_says_so() -> None:
    out = child.run(
        """
        import os, tempfile
        from smckpt.errors import StorageError
        from smckpt.storage import open_storage
        with tempfile.TemporaryDirectory(dir="/tmp") as directory:
            os.chmod(directory, 0o755)
            store = open_storage(directory)
            os.seteuid(65534)
            try:
                store.put_exclusive("x", b"")
            except StorageError as error:
                print(error)
            os.seteuid(0)
            assert os.listdir(directory) == []
        """
    )
    assert "permission denied" in out and "give this user access" in out


def test_a_file_size_limit_is_explained(tmp_path: Path) -> None:
    out = child.run(
        """
        import resource, signal, sys
        from smckpt.errors import StorageError
        from smckpt.storage import open_storage
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            open_storage(sys.argv[1]).put("x", bytes(5000))
        except StorageError as error:
            print(error)
        """,
        str(tmp_path),
    )
    assert "ulimit -f" in out
    assert names(tmp_path) == []


def test_a_scheme_that_nobody_knows_is_refused_by_name_with_the_remedy() -> None:
    with pytest.raises(UsageError, match="no store is known for nosuch://.*s3://.*register"):
        open_storage("nosuch://host/run")
    with pytest.raises(UsageError, match="path is empty"):
        open_storage("")


def test_a_file_removed_right_after_its_creation_tells_of_the_other_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removed_meanwhile(fd: int, size: int) -> bool:
        for path in tmp_path.iterdir():
            path.unlink()  # what another copy's start does to unfinished files
        return fallocate(fd, size)

    monkeypatch.setattr(posix_write, "fallocate", removed_meanwhile)
    with pytest.raises(StorageError, match="another copy to this directory took over"):
        PosixStorage(str(tmp_path)).create_file("a", 1 << 20, replace=True)
    assert names(tmp_path) == []


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EOPNOTSUPP, None])
def test_what_is_not_in_the_page_cache_is_asked_of_the_disk_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None
) -> None:
    size, cached = 18 << 20, 3 << 20  # None: nothing is missing
    content = os.urandom(size)
    (tmp_path / "a").write_bytes(content)
    asked: list[tuple[int, int]] = []
    preadv = os.preadv

    def partly_cached(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags and code is not None and offset >= cached:
            raise OSError(code, os.strerror(code))
        return preadv(fd, buffers, offset, flags & 0)

    monkeypatch.setattr(os, "preadv", partly_cached)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, at, span, _: asked.append((at, span)))
    data = bytearray(size)
    parts = [memoryview(data)[:5], memoryview(data)[5 : 13 << 20], memoryview(data)[13 << 20 :]]
    seen: list[bytes] = []
    PosixStorage(str(tmp_path)).read_into("a", 0, parts, lambda piece: seen.append(bytes(piece)))
    assert data == content == b"".join(seen)
    assert len(asked) == (code is not None)
    for at, span in asked:
        assert cached <= at < cached + STRETCH and at + span == size
