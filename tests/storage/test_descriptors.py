"""Descriptors kept for reading are not closed under a thread that reads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from smckpt.storage import open_storage


def test_many_threads_read_more_files_than_stay_open(tmp_path: Path) -> None:
    names = [f"f{i}" for i in range(200)]
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(number.to_bytes(2, "little") * 2048)
    storage = open_storage(str(tmp_path))

    def read(turn: int) -> bool:
        number = turn * 67 % len(names)
        return storage.read(names[number]) == number.to_bytes(2, "little") * 2048

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(6000)))


def test_many_threads_open_one_file_at_once(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(4096))
    with ThreadPoolExecutor(8) as pool:
        for _ in range(300):
            storage = open_storage(str(tmp_path))
            assert set(pool.map(storage.read, ["f"] * 16)) == {bytes(4096)}
