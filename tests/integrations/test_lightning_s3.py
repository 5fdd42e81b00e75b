"""NeMo's helpers and plugin against a real S3 server."""

from __future__ import annotations

import io
import secrets
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from smckpt.errors import UsageError
from smckpt.integrations.lightning import S3CheckpointIO, S3Utils
from tests.support.frameworks.lightning_state import checkpoint, same


def test_nemos_helpers_move_whole_objects(s3_root: str, tmp_path: Path) -> None:
    data = secrets.token_bytes(6 << 20)
    buffer = io.BytesIO(data)
    buffer.seek(1000)
    S3Utils.upload_file_stream_to_s3(buffer, f"{s3_root}/a/one.bin", chunk_size_MB=5)
    here = tmp_path / "here.bin"
    S3Utils.download_s3_file_to_path(f"{s3_root}/a/one.bin", here, chunk_size_MB=1)
    assert here.read_bytes() == data
    S3Utils.upload_file(here, f"{s3_root}/a/two.bin", remove_file=True)
    assert not here.exists()
    found = S3Utils.download_s3_file_to_stream(f"{s3_root}/a/two.bin", max_concurrency=2)
    assert found.tell() == 0 and found.read() == data
    assert S3Utils.s3_path_exists(f"{s3_root}/a/tw")
    assert S3Utils.s3_path_exists(f"{s3_root}/a", match_directory=True)
    assert not S3Utils.s3_path_exists(f"{s3_root}/a/tw", match_directory=True)
    S3Utils.remove_object(f"{s3_root}/a/one.bin")
    assert not S3Utils.s3_path_exists(f"{s3_root}/a/one.bin")
    here.touch()
    with pytest.raises(UsageError, match="empty"):
        S3Utils.upload_file(here, f"{s3_root}/a/two.bin")


def test_nemos_helpers_know_names() -> None:
    assert S3Utils.parse_s3_url("s3://b/a/c") == ("b", "a/c")
    assert S3Utils.parse_s3_url("/a") == S3Utils.parse_s3_url("s3://b") == (None, None)
    assert S3Utils.build_s3_url("b", "a/c") == "s3://b/a/c"
    assert S3Utils.is_s3_url(" s3://b/a") and not S3Utils.is_s3_url(None)
    name = "s3://b/tp_rank_00/gpt--step=900-loss=6.47-last.ckpt"
    assert S3Utils.parse_prefix_with_step(name) == "s3://b/tp_rank_00/gpt--step=900-"
    assert S3Utils.parse_prefix_with_step("s3://b/last.ckpt") == "s3://b/last.ckpt"


def test_a_checkpoint_in_s3_is_one_name_to_nemos_helpers(s3_root: str) -> None:
    plugin = S3CheckpointIO(s3_root)
    last = f"{s3_root}/a/step=4-last.ckpt"
    plugin.save_checkpoint(checkpoint(), last)
    S3Utils.upload_file_stream_to_s3(io.BytesIO(b"1"), f"{s3_root}/a/notes.txt")
    listed = S3Utils.find_files_with_suffix(s3_root, None, return_key_only=False)
    assert sorted(listed) == [f"{s3_root}/a/notes.txt", last]
    key = last.partition("ckpt/")[2]
    assert S3Utils.find_files_with_suffix(s3_root, "last.ckpt") == [key]
    with pytest.raises(UsageError, match="creds"):
        S3Utils.find_files_with_suffix(s3_root, creds={})
    S3Utils.remove_object(last)
    assert S3Utils.find_files_with_suffix(s3_root, "last.ckpt") == []
    plugin.teardown()


def test_an_object_that_nemos_own_plugin_wrote_is_loaded_and_removed(s3_root: str) -> None:
    saved = checkpoint()
    del saved["hyper_parameters"]["where"]
    made = io.BytesIO()
    torch.save(saved, made)
    S3Utils.upload_file_stream_to_s3(made, f"{s3_root}/one-last.ckpt")
    plugin = S3CheckpointIO(s3_root)
    assert same(plugin.load_checkpoint(f"{s3_root}/one-last.ckpt"), saved)
    plugin.remove_checkpoint(f"{s3_root}/one-last.ckpt")
    with pytest.raises(FileNotFoundError, match="one-last"):
        plugin.load_checkpoint(f"{s3_root}/one-last.ckpt")


def test_fsspec_names_s3_without_s3fs(s3_root: str) -> None:
    saved = ModelCheckpoint(dirpath=f"{s3_root}/run")
    files = saved._fs
    assert not files.exists(f"{s3_root}/run")
    plugin = S3CheckpointIO(s3_root)
    plugin.save_checkpoint(checkpoint(), f"{s3_root}/run/one.ckpt")
    with files.open(f"{s3_root}/run/best.yaml", "w") as file:
        file.write("a: 1\n")
    inside = f"{s3_root}/run".removeprefix("s3://")
    assert sorted(files.ls(f"{s3_root}/run", detail=False)) == [
        f"{inside}/best.yaml", f"{inside}/one.ckpt",
    ]  # fmt: skip
    assert files.isdir(f"{s3_root}/run/one.ckpt") and files.isfile(f"{s3_root}/run/best.yaml")
    with files.open(f"{s3_root}/run/best.yaml") as file:
        assert file.read() == b"a: 1\n"
    with pytest.raises(ValueError, match="no"), files.open(f"{s3_root}/run/cut", "wb") as file:
        file.write(b"half")
        raise ValueError("no")
    assert not files.exists(f"{s3_root}/run/cut")
    plugin.remove_checkpoint(f"{s3_root}/run/one.ckpt")
    assert not files.exists(f"{s3_root}/run/one.ckpt")
