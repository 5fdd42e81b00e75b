"""What a store is tried out for before the first save: a real disk with one wrong answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from smckpt.errors import CheckpointNotFoundError, StorageError
from smckpt.storage import access_to
from smckpt.storage.base import Storage
from smckpt.storage.preflight import try_out


@pytest.fixture
def store(tmp_path: Path) -> Storage:
    return access_to(str(tmp_path)).open(str(tmp_path))


def test_a_sound_store_passes_and_nothing_is_left(store: Storage) -> None:
    assert try_out(store, "probe", lambda name: (store.delete(name), name)[1]) == "probe"
    assert list(store.list()) == []


def test_other_bytes_that_are_read_back_are_told(
    store: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(store), "read", lambda *_, **__: bytes(16))
    with pytest.raises(StorageError, match="reads back with other bytes"):
        try_out(store, "probe", store.delete)
    assert list(store.list()) == []


def test_a_file_that_is_not_there_yet_is_told(
    store: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object, **__: object) -> bytes:
        raise CheckpointNotFoundError("nothing", remedy="", path="")

    monkeypatch.setattr(type(store), "read", read)
    with pytest.raises(StorageError, match="cannot be found when it is read"):
        try_out(store, "probe", store.delete)


def test_a_second_create_that_succeeds_is_told(
    store: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(store), "put_exclusive", lambda *_, **__: True)
    with pytest.raises(StorageError, match="a second create replace"):
        try_out(store, "probe", store.delete)


def test_a_name_that_is_taken_is_told(store: Storage) -> None:
    store.put_exclusive("probe", b"of another")
    with pytest.raises(StorageError):
        try_out(store, "probe", store.delete)
    assert store.read("probe") == b"of another"
