"""What other programs wrote is exported, shown and converted from S3 as from a disk: by ranged
reads, with the same comparisons, from a real server."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import smckpt
from smckpt import errors, export_hf
from smckpt.cli.app import app
from smckpt.formats import source_files
from smckpt.formats.readers.torch_files import stored_state
from smckpt.formats.source_files import SourceFiles
from smckpt.storage import open_storage
from tests.formats.test_deepspeed import zero3
from tests.formats.test_sources import megatron_directory
from tests.support.models import references
from tests.support.models.references import each_rank, on_disk

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[Any, State]:
    model = references.model("llama")
    return model, on_disk(model, tmp_path_factory.mktemp("llama"))


def upload(local: Path, url: str) -> str:
    """A file, or all files of a directory."""
    if local.is_file():
        open_storage(url.rpartition("/")[0]).put(local.name, local.read_bytes())
        return url
    for path in local.rglob("*"):
        if path.is_file():
            above = path.parent.relative_to(local)
            place = url if above == Path() else f"{url}/{above}"
            open_storage(place).put(path.name, path.read_bytes())
    return url


def written(kind: str, folder: Path, state: State) -> Path:
    mcore = references.mcore(state, 1, 0)
    if kind == "model.safetensors":
        save_file(state, folder / kind)
    elif kind == "model.pt":
        torch.save({"state_dict": state, "step": 3}, folder / kind)
    elif kind == "old.bin":  # of a torch before 1.6
        torch.save(state, folder / kind, _use_new_zipfile_serialization=False)
    elif kind == "pytorch_model_fsdp_0":
        dcp.save({"model": state}, checkpoint_id=folder / kind, no_dist=True)
    elif kind == "torch_dist":
        dcp.save(mcore, checkpoint_id=folder / kind, no_dist=True)
        torch.save({"iteration": 7}, folder / kind / "common.pt")
        (folder / kind / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    elif kind == "megatron":
        cuts = each_rank(lambda r, e: references.mcore(state, 2, r), 2)
        megatron_directory(folder / kind, cuts, 1)
    elif kind == "model.nemo":
        torch.save({f"model.{n}": t for n, t in mcore.items()}, folder / "model_weights.ckpt")
        with tarfile.open(folder / kind, "w") as archive:
            archive.add(folder / "model_weights.ckpt", "./model_weights.ckpt")
    else:
        zero3(folder / kind, state, 3)
    return folder / kind


KINDS = {
    "model.safetensors": "one file", "model.pt": "one file", "old.bin": "one file",
    "pytorch_model_fsdp_0": "accelerate", "torch_dist": "torch_dist", "megatron": "Megatron-LM",
    "model.nemo": "NeMo", "zero3": "DeepSpeed",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_exported_and_shown_from_s3(tmp_path, s3_root, llama, kind, capsys):
    model, state = llama
    url = upload(written(kind, tmp_path, state), f"{s3_root}/{kind}")
    report = export_hf(url, tmp_path / "hf", config=model.config)
    assert KINDS[kind] in report.source
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert sorted(found) == sorted(state)
    assert [name for name in state if not torch.equal(found[name], state[name])] == []
    app(["show", url], standalone_mode=False)
    assert KINDS[kind] in capsys.readouterr().out


def test_a_state_in_s3_is_converted_and_loaded(tmp_path, s3_root):
    state = {"w": torch.randn(6, 4).T, "inner": {"b": torch.arange(5)}, "step": 7}
    torch.save(state, tmp_path / "state.pt")
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name in ("state.pt", "dcp"):
        url = upload(tmp_path / name, f"{s3_root}/{name}")
        smckpt.convert(url, tmp_path / f"of-{name}", to="torch")
        found = torch.load(tmp_path / f"of-{name}", weights_only=True)
        assert torch.equal(found["w"], state["w"]) and found["step"] == 7
        target = {"w": torch.zeros(4, 6), "inner": {"b": torch.zeros(5, dtype=torch.int64)}}
        smckpt.load(target, checkpoint_id=url, no_dist=True)
        assert torch.equal(target["w"], state["w"])
        assert torch.equal(target["inner"]["b"], state["inner"]["b"])


def test_a_changed_byte_in_s3_is_told_and_nothing_there_is_told(tmp_path, s3_root, monkeypatch):
    monkeypatch.setattr(source_files, "_WINDOW", 8 << 10)  # so that the record is larger
    torch.save({"w": torch.arange(4096.0)}, tmp_path / "model.pt")
    data = bytearray((tmp_path / "model.pt").read_bytes())
    data[data.index(torch.arange(3000.0, 3010).numpy().tobytes())] ^= 1
    (tmp_path / "bad.pt").write_bytes(data)
    for name in ("model.pt", "bad.pt"):
        upload(tmp_path / name, f"{s3_root}/{name}")
    export_hf(f"{s3_root}/model.pt", tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(found["w"], torch.arange(4096.0))
    with pytest.raises(errors.CorruptCheckpointError, match="differ from the CRC-32"):
        export_hf(f"{s3_root}/bad.pt", tmp_path / "no")
    with pytest.raises(errors.CheckpointNotFoundError):
        export_hf(f"{s3_root}/nothing", tmp_path / "no")


@pytest.mark.parametrize("store", ["s3", "memory"])
def test_an_object_that_is_replaced_while_it_is_read_is_refused(store, s3_root, monkeypatch):
    """By its ETag, or by fsspec's key: half of each would be tensors of both."""
    root = f"{s3_root}/replaced" if store == "s3" else "memory://replaced"
    url, storage, source = f"{root}/model.bin", open_storage(root), SourceFiles()
    monkeypatch.setattr(source_files, "_WINDOW", 4)  # nothing is kept
    storage.overwrite("model.bin", b"old" * 4)
    whole = source.whole(url)
    storage.overwrite("model.bin", b"new" * 4)
    for _ in range(2):
        with pytest.raises(errors.CorruptCheckpointError, match="changed since its reading began"):
            source.read(whole, 0, 6)
    source.close()
    assert source.read(whole, 0, 6) == b"newnew"  # without a look at its size before
    storage.overwrite("model.bin", b"old" * 4)
    with pytest.raises(errors.CorruptCheckpointError, match="changed since its reading began"):
        source.read(whole, 6, 12)
    source.close()
    assert source.read(whole, 6, 12) == b"oldold"


def test_ranges_of_a_store_stay_small(tmp_path, s3_root, monkeypatch):
    """A transposed tensor and columns of one are read in parts, none larger than the limit."""
    monkeypatch.setattr(source_files, "_WINDOW", 4 << 10)
    whole = torch.arange(64.0 * 96).reshape(64, 96)
    torch.save({"turned": whole.T, "w": whole}, tmp_path / "model.pt")
    url = upload(tmp_path / "model.pt", f"{s3_root}/model.pt")
    source, sizes = SourceFiles(), []
    read = source.read
    monkeypatch.setattr(
        source, "read", lambda r, a=0, b=None: sizes.append((b or r.nbytes) - a) or read(r, a, b)
    )
    stored = stored_state(source, source.whole(url)).tensors
    sizes.clear()
    from smckpt.formats.boxes import BoxTensors, whole_tensor
    from smckpt.formats.tensors import TensorKey
    from smckpt.translate.files import arrange
    from smckpt.translate.ranks.translated import TranslatedSource
    from smckpt.translate.ranks.translated import whole as whole_target

    tensors = {TensorKey(n): whole_tensor((n,), s) for n, s in stored.items()}
    reader = TranslatedSource(BoxTensors(url, tensors, source))
    for name, wanted in (("turned", whole.T), ("w", whole)):
        target = whole_target(TensorKey(name), tuple(wanted.shape), "float32")
        (file,) = arrange([target], 1 << 40)
        for chunk in file.chunks(1 << 20):
            (plan,) = reader.plans_of([chunk])
            buffers = [memoryview(bytearray(r.nbytes)) for r in chunk.ranges]
            reader.read(plan, buffers)
            found = torch.frombuffer(bytearray(b"".join(buffers)), dtype=torch.float32)
            assert torch.equal(found, wanted.reshape(-1))
    assert sizes and max(sizes) <= 4 << 10
