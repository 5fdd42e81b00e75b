"""Checkpoints of torch.distributed.checkpoint, each by its own writer, come out as models of
Hugging Face."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import smckpt
from smckpt import ExportOptions, errors, export_hf
from smckpt.cli.app import app
from smckpt.formats import pickled
from smckpt.translate.exports.verify_hf import verify_hf
from tests.support.launch import run_ranks
from tests.support.models import hub_families

State = dict[str, torch.Tensor]
SAMPLE = "qwen2_moe"  # in memory its experts are one tensor; sizes that two ranks do not divide


def trained(how: str) -> tuple[Any, Any]:
    """The sample under a wrapper, its optimizer with a state, and its weights as they were."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model = hub_families.model(SAMPLE)
    if how == "fsdp1":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    elif how == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model(input_ids=hub_families.TOKENS, labels=hub_families.TOKENS).loss.backward()
    optimizer.step()  # with a rate of 0 the weights stay
    return model, optimizer


def save(folder: str) -> None:
    """As trainers nest it: a model and an optimizer, in one object, the weights alone, wrapped."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    for how, shapes in (("fsdp2", ("model", "flat", "module")), ("fsdp1", ("app",)), ("plain", ())):
        model, optimizer = trained(how)
        if how == "fsdp1":
            FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        weights, more = model.state_dict(), get_optimizer_state_dict(model, optimizer)
        states = {
            "model": {"model": weights, "optimizer": more, "step": 7},
            "app": {"app": {"model": weights, "optim": more}},
            "flat": weights,
            "module": {"module." + name: tensor for name, tensor in weights.items()},
            "plain": {"model": weights, "optimizer": more},
        }
        for shape in shapes or (how,):
            dcp.save(states[shape], checkpoint_id=f"{folder}/{shape}")
        if how == "fsdp2":
            for place in ("parts", "consolidated"):
                writer = dcp.HuggingFaceStorageWriter(
                    path=f"{folder}/{place}",
                    save_distributed=True,
                    enable_consolidation=place == "consolidated",
                )
                dcp.save(weights, storage_writer=writer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save, 2, str(folder))
    return folder


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> tuple[Any, State]:
    model = hub_families.model(SAMPLE)
    folder = tmp_path_factory.mktemp("released")
    model.save_pretrained(folder)
    return model.config, load_file(folder / "model.safetensors")


def assert_same(directory: Path, wanted: State) -> None:
    found = load_file(directory / "model.safetensors")
    assert sorted(found) == sorted(wanted)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("shape", ["model", "app", "flat", "module", "plain"])
def test_a_save_of_two_ranks_comes_out_bitwise(tmp_path, saved, released, judged, shape):
    config, wanted = released
    report = export_hf(saved / shape, tmp_path / "hf", config=config)
    assert report.source == "torch.distributed.checkpoint (DCP)" and report.naming == "hub"
    assert_same(tmp_path / "hf", wanted)
    judged(SAMPLE, "torch DCP", exports=["save_pretrained"])


def accelerate_saves(folder: str) -> None:
    from accelerate import Accelerator, DistributedType, PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    PartialState(cpu=True)  # accelerate shards on accelerators only: it takes the CPUs for such
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen2MoeDecoderLayer"],
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = hub_families.model(SAMPLE)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.save_state(folder)


def test_what_accelerate_saved_comes_out_bitwise(tmp_path, released, judged):
    run_ranks(accelerate_saves, 2, str(tmp_path / "run"))
    config, wanted = released
    for given in ("run", "run/pytorch_model_fsdp_0"):
        report = export_hf(
            tmp_path / given, tmp_path / "hf", config=config, options=ExportOptions(overwrite=True)
        )
        assert report.source.startswith("accelerate")
        assert_same(tmp_path / "hf", wanted)
    place = tmp_path / "run" / "pytorch_model_fsdp_0"
    weights = hub_families.model(SAMPLE).state_dict()
    for ours in (place, tmp_path / "ours"):  # as it is, and converted
        target = {"model": {name: torch.zeros_like(value) for name, value in weights.items()}}
        smckpt.load(target, checkpoint_id=ours)
        assert [n for n, v in weights.items() if not torch.equal(target["model"][n], v)] == []
        smckpt.convert(place, tmp_path / "ours", to="smckpt") if ours == place else None
    judged(SAMPLE, "accelerate, FSDP2", exports=["save_pretrained"])


@pytest.mark.parametrize("consolidated", [False, True])
def test_parts_in_safetensors_come_out_bitwise(tmp_path, saved, released, judged, consolidated):
    config, wanted = released
    place = saved / ("consolidated" if consolidated else "parts")
    report = export_hf(place, tmp_path / "hf", config=config)
    assert "HuggingFaceStorageWriter" in report.source
    assert_same(tmp_path / "hf", wanted)
    judged(SAMPLE, "HuggingFaceStorageWriter", exports=["save_pretrained"])


def test_parts_in_safetensors_that_are_missing_or_mixed_are_refused(tmp_path, saved, released):
    first, second = sorted((saved / "parts").iterdir())
    for number, (files, told) in enumerate(
        [
            ([second], "shards \\[1\\] are missing"),
            ([first], r"\(60, 128\).*should be \(120, 128\)"),
        ]
    ):
        folder = tmp_path / f"parts{number}"
        folder.mkdir()
        for file in files:
            shutil.copy(file, folder)
        with pytest.raises(errors.CheckpointError, match=told):
            export_hf(folder, tmp_path / "hf", config=released[0])


# -- what is damaged, mixed or hostile is refused --------------------------------------------------


@pytest.fixture
def whole(saved) -> Path:
    return saved / "flat"


def changed(whole: Path, folder: Path, change: Callable[[Any], object]) -> Path:
    """A copy, with other metadata."""
    shutil.copytree(whole, folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


NORM = "model.norm.weight"
Q = "model.layers.0.self_attn.q_proj.weight"


def parts(metadata: Any, name: str) -> list[tuple[Any, Any]]:
    return [(i, info) for i, info in metadata.storage_data.items() if i.fqn == name]


def without_a_part(metadata: Any) -> None:
    metadata.state_dict_metadata[Q].chunks.pop()


def without_parts(metadata: Any) -> None:
    metadata.state_dict_metadata[Q].chunks.clear()


def with_a_part_that_overlaps(metadata: Any) -> None:
    first, _ = metadata.state_dict_metadata[Q].chunks
    first.sizes = torch.Size([first.sizes[0] + 1, *first.sizes[1:]])


def with_a_part_outside(metadata: Any) -> None:
    metadata.state_dict_metadata[Q].size = torch.Size([80, 128])


def of_another_shape(metadata: Any) -> None:
    found = metadata.state_dict_metadata[Q]
    found.size = torch.Size([128, 64])
    for chunk in found.chunks:
        chunk.sizes = torch.Size([64, 64])


def of_another_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata[Q].properties.dtype = torch.bfloat16


def beyond_the_end(metadata: Any) -> None:
    parts(metadata, Q)[0][1].offset = 1 << 40


def in_the_middle(metadata: Any) -> None:
    parts(metadata, Q)[0][1].offset += 8
    parts(metadata, Q)[0][1].length -= 8


def at_the_same_bytes(metadata: Any) -> None:
    (_, first), (_, second) = parts(metadata, Q)
    second.relative_path, second.offset = first.relative_path, first.offset


def outside_the_directory(metadata: Any) -> None:
    parts(metadata, Q)[0][1].relative_path = "../secret"


def negative(metadata: Any) -> None:
    parts(metadata, Q)[0][1].offset = -4


def compressed(metadata: Any) -> None:
    parts(metadata, Q)[0][1].transform_descriptors = ["zstd"]


@pytest.mark.parametrize(
    ("change", "kind", "told"),
    [
        (without_a_part, errors.CorruptCheckpointError, "q_proj.*8192 elements are in no part"),
        (without_parts, errors.CorruptCheckpointError, "q_proj.*[0-9]+ elements are in no part"),
        (with_a_part_that_overlaps, errors.CorruptCheckpointError, "128 in several"),
        (with_a_part_outside, errors.CorruptCheckpointError, "outside"),
        (of_another_shape, errors.TensorMismatchError, r"q_proj.*\(64, 128\).*says.*\(64, 64\)"),
        (of_another_dtype, errors.TensorMismatchError, "float32.*says bfloat16"),
        (beyond_the_end, errors.CorruptCheckpointError, "the file has [0-9]+ bytes"),
        (in_the_middle, errors.CorruptCheckpointError, "no whole archive of torch.save"),
        (at_the_same_bytes, errors.CorruptCheckpointError, "two parts at"),
        (outside_the_directory, errors.CorruptCheckpointError, "'../secret'"),
        (negative, errors.CorruptCheckpointError, "-4 is no size or place"),
        (compressed, errors.UsageError, "zstd"),
    ],
)
def test_metadata_that_is_wrong_is_refused(tmp_path, whole, change, kind, told):
    broken = changed(whole, tmp_path / "dcp", change)
    with pytest.raises(kind, match=told):
        export_hf(broken, tmp_path / "hf")
    assert not (tmp_path / "hf").exists() or not any((tmp_path / "hf").iterdir())
    with pytest.raises(kind, match=told):
        smckpt.load(checkpoint_id=str(broken))


def test_files_that_are_missing_or_short_or_changed_are_refused(tmp_path, whole, released):
    file = "__1_0.distcp"
    data = (whole / file).read_bytes()
    metadata = pickle.loads((whole / ".metadata").read_bytes())
    info = next(info for _, info in parts(metadata, Q) if info.relative_path == file)
    middle = bytearray(data)
    middle[info.offset + info.length // 2] ^= 1  # in the numbers of the tensor
    for broken, told in (
        (None, f"{file}, which is missing"),
        (data[: len(data) // 2], "the file has"),
        (bytes(middle), "differ from the CRC-32"),
    ):
        folder = tmp_path / "dcp"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        if broken is None:
            (folder / file).unlink()
        else:
            (folder / file).write_bytes(broken)
        with pytest.raises(errors.CorruptCheckpointError, match=told):
            export_hf(folder, tmp_path / "hf", config=released[0])


@pytest.mark.parametrize("shape", ["flat", "module"])
def test_a_copy_of_another_ranks_file_is_refused(tmp_path, saved, released, shape):
    """Its bytes have the right checksums, and nothing in it says what they are parts of."""
    config, wanted = released
    folder = tmp_path / "dcp"
    shutil.copytree(saved / shape, folder)
    first, second = (folder / f"__{rank}_0.distcp" for rank in range(2))
    own = second.read_bytes()
    shutil.copy(first, second)
    with pytest.raises(errors.UsageError, match=f"byte for byte .*{first.name}") as caught:
        export_hf(folder, tmp_path / "no", config=config)
    assert caught.value.path == str(second)
    second.write_bytes(own)
    export_hf(folder, tmp_path / "hf", config=config)
    assert_same(tmp_path / "hf", wanted)


def test_archives_that_were_written_without_a_crc_are_read(tmp_path):
    from torch.serialization import set_crc32_options

    state = {"w": torch.randn(3, 4).T, "half": torch.randn(5).bfloat16(), "one": torch.tensor(2.0)}
    set_crc32_options(False)
    try:
        dcp.save({**state, "none": torch.zeros(0, 4)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    finally:
        set_crc32_options(True)
    export_hf(tmp_path / "dcp", tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert found["none"].shape == (0, 4)


def test_what_each_rank_planned_for_itself_is_joined(tmp_path):
    """`use_collectives=False`: no rank knows of the others' parts."""
    run_ranks(save_apart, 2, str(tmp_path / "dcp"))
    export_hf(tmp_path / "dcp", tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(found["w"], torch.arange(12.0).reshape(6, 2))
    (tmp_path / "dcp" / "__1.metadata").unlink()
    with pytest.raises(errors.CorruptCheckpointError, match="6 elements are in no part"):
        export_hf(tmp_path / "dcp", tmp_path / "hf", options=ExportOptions(overwrite=True))


def save_apart(folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.arange(12.0).reshape(6, 2), mesh, [Shard(0)])
    dcp.save({"w": tensor}, checkpoint_id=folder, use_collectives=False)


class Harm:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("harm"),))


def test_a_pickle_that_would_run_something_runs_nothing(tmp_path, whole, released, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def with_harm(metadata: Any) -> None:
        metadata.planner_data = {**metadata.planner_data, NORM: Harm()}

    harmful = changed(whole, tmp_path / "dcp", with_harm)
    report = export_hf(harmful, tmp_path / "hf", config=released[0])
    assert_same(Path(report.directory), released[1])
    assert not (tmp_path / "harm").exists()
    pickle.loads((harmful / ".metadata").read_bytes())
    assert (tmp_path / "harm").exists()  # it would have


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "damaged"),
        (b"\x80\x04" + b"]" * 9_000, "more than 6000 objects"),
        (b"\x80\x04(" + b"\x8c\x01a" * 20 + b"t\x94}h\x00N" + b"s.", "long or nested"),
        (b"\x80\x04)" + b"2\x86" * 200 + b"}\x94h\x00.", "no metadata"),
        (b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f", "damaged"),  # 2**63 bytes follow
        (b"\x80\x04r\xff\xff\xff\xff.", "damaged"),
        (b"\x80\x04\x82\x01.", "opcode EXT1"),
    ],
)
def test_bombs_are_refused(tmp_path, monkeypatch, text, told):
    monkeypatch.setattr(pickled, "_OBJECTS", 6000)
    (tmp_path / ".metadata").write_bytes(text)
    with pytest.raises(errors.CorruptCheckpointError, match=told):
        export_hf(tmp_path, tmp_path / "hf")


def test_a_swapped_tensor_is_told_by_verify(tmp_path, whole, released):
    """What no checksum can see: two tensors of one shape under each other's names."""

    def swap(metadata: Any) -> None:
        other = Q.replace("layers.0", "layers.1")
        places = metadata.storage_data
        for (one, _), (two, _) in zip(parts(metadata, Q), parts(metadata, other), strict=True):
            places[one], places[two] = places[two], places[one]

    config, _ = released
    export_hf(changed(whole, tmp_path / "swapped", swap), tmp_path / "hf", config=config)
    report = verify_hf(tmp_path / "hf", against=whole)
    assert sorted(p.split()[0].rstrip(":") for p in report.problems) == [
        Q, Q.replace("layers.0", "layers.1"),
    ]  # fmt: skip
    assert verify_hf(tmp_path / "hf", against=tmp_path / "swapped").ok


def test_show_names_the_format_and_lists_the_tensors(whole, capsys):
    app(["show", str(whole), "--json"], standalone_mode=False)
    facts = json.loads(capsys.readouterr().out)
    assert facts["format"] == "torch.distributed.checkpoint (DCP)"
    found = {t["name"]: (t["dtype"], t["shape"], t["held"]) for t in facts["tensors"]}
    assert found[Q] == ("float32", [128, 128], "2 parts")
    assert found.keys() == hub_families.model(SAMPLE).state_dict().keys()
    assert [file["name"] for file in facts["files"]] == ["__0_0.distcp", "__1_0.distcp"]
    app(["show", str(whole), "--tensors", "q_proj"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "(DCP)" in shown and Q in shown and "k_proj" not in shown
