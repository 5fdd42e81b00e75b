"""Released checkpoints as they are downloaded: quantized weights, `.bin` files, further layers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from smckpt import Adapter, Parallel, convert, errors, export_hf, save
from smckpt.formats.readers.rank_files import open_directory
from smckpt.translate import import_hf, verify_hf
from smckpt.translate.config import read_config
from smckpt.translate.files import Chunk, Range
from smckpt.translate.models.contents import whole_tensors
from smckpt.translate.models.quantized import Dequantized, dequantized
from smckpt.translate.ranks.translated import TranslatedSource
from tests.support import child, interpreters
from tests.support.models import families
from tests.support.models import references as ref

State = dict[str, torch.Tensor]
LINEAR = re.compile(r"layers\.\d+\..*(proj|proj_with_mqa)\.weight$")


def float8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in blocks as DeepSeek releases it: numbers up to 448, and a factor for each block;
    those at the edges are smaller."""
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    out = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for r in range(scale.shape[0]):
        for c in range(scale.shape[1]):
            box = slice(r * block[0], (r + 1) * block[0]), slice(c * block[1], (c + 1) * block[1])
            scale[r, c] = weight[box].float().abs().max() / 448
            out[box] = (weight[box].float() / scale[r, c]).to(torch.float8_e4m3fn)
    return out, scale


def with_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def of_deepseek(block: tuple[int, int]) -> dict[str, Any]:
    return {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
            "weight_block_size": list(block)}  # fmt: skip


def deepseek(folder: Path, block: tuple[int, int] = (16, 16), **more: Any) -> State:
    """A tiny DeepSeek-V3 in float8. Returns what it stands for, multiplied by transformers."""
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    made = families.model("deepseek_v3", **more).to(torch.bfloat16)
    state = ref.on_disk(made, folder)
    released, wanted = {}, {}
    for name, tensor in state.items():
        released[name] = wanted[name] = tensor
        if LINEAR.search(name):
            released[name], scale = released[name + "_scale_inv"] = float8(tensor, block)
            released[name + "_scale_inv"] = scale
            wide = _dequantize_fp8_weight(released[name], scale, list(block), torch.float32)
            wanted[name] = wide.to(torch.bfloat16)
        elif name.endswith("e_score_correction_bias"):
            released[name] = wanted[name] = tensor.float()
    save_file(released, folder / "model.safetensors")
    with_config(folder, quantization_config=of_deepseek(block), torch_dtype="bfloat16",
                dtype="bfloat16")  # fmt: skip
    return wanted


def gpt_oss(folder: Path) -> State:
    """A tiny GPT-OSS in mxfp4. Returns what it stands for, unpacked by transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    made = families.model("gpt_oss", intermediate_size=64).to(torch.bfloat16)
    state = ref.on_disk(made, folder)
    released, wanted = {}, {}
    torch.manual_seed(3)
    for name, tensor in state.items():
        if not re.search(r"experts\.(gate_up|down)_proj$", name):
            released[name] = wanted[name] = tensor
            continue
        experts, rows, columns = tensor.shape
        blocks = torch.randint(0, 256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
        scales = torch.randint(116, 125, blocks.shape[:3], dtype=torch.uint8)
        released |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        wanted[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(released, folder / "model.safetensors")
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
               "lm_head"]  # fmt: skip
    with_config(folder, torch_dtype="bfloat16", dtype="bfloat16", quantization_config={
        "quant_method": "mxfp4", "modules_to_not_convert": skipped})  # fmt: skip
    return wanted


def same(found: State, wanted: State) -> bool:
    return found.keys() == wanted.keys() and all(
        found[n].dtype == w.dtype and torch.equal(found[n], w) for n, w in wanted.items()
    )


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["mismatched_keys"], info
    with torch.no_grad():
        return model.eval()(torch.arange(40).reshape(2, 20) % ref.V).logits


def round_trip(folder: Path, tmp_path: Path, **degrees: int) -> tuple[State, Path]:
    import_hf(folder, tmp_path / "ranks", Parallel("mcore_te", **degrees))
    assert "quantization_config" not in (tmp_path / "ranks" / "config.json").read_text()
    export_hf(tmp_path / "ranks", tmp_path / "hf", config=tmp_path / "ranks")
    return load_file(tmp_path / "hf" / "model.safetensors"), tmp_path / "hf"


# -- float8 in blocks ------------------------------------------------------------------------------


def test_a_release_in_float8_becomes_the_numbers_that_transformers_reads(tmp_path, judged):
    even = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 16}
    wanted = deepseek(tmp_path / "release", **even)
    found, folder = round_trip(tmp_path / "release", tmp_path, tp=2, ep=2)
    assert same(found, wanted)
    assert found["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert torch.equal(logits(folder), logits(tmp_path / "release"))
    report = verify_hf(tmp_path / "release", against=tmp_path / "ranks")
    assert (report.problems, report.compared) == ((), len(wanted))
    other = changed((tmp_path / "release", {}), tmp_path / "other", lambda s: s.update(
        {KV + "_scale_inv": s[KV + "_scale_inv"] * 2}))  # fmt: skip
    problems = verify_hf(other, against=tmp_path / "ranks").problems
    assert len(problems) == 1 and problems[0].startswith(f"{KV}: differs from the checkpoint")
    judges = ["transformers 5, its numbers", "logits"]
    judged("deepseek_v3", "release in float8", exports=judges, imports=judges, at="2×2")


def test_blocks_at_ragged_edges_are_smaller(tmp_path):
    """transformers 5.23 refuses or misreads them where it loads: it divides a weight's size by the
    number of scales. Its kernels and its backward pass have blocks of the config's size."""
    wanted = deepseek(tmp_path / "release")  # q_lora_rank is 40, in blocks of 16
    found, _ = round_trip(tmp_path / "release", tmp_path, tp=2, ep=1)
    assert same(found, wanted)


def read_all(folder: Path, step: int = 1 << 30) -> State:
    """What the reader gives, in ranges of `step` elements."""
    reader = dequantized(open_directory(folder), None)
    assert isinstance(reader, Dequantized)
    source, out = TranslatedSource(reader), {}
    for target in whole_tensors(reader):
        values = torch.empty(target.shape, dtype=getattr(torch, target.dtype))
        view = memoryview(values.view(torch.uint8).reshape(-1).numpy())
        for start in range(0, values.numel(), step):
            item = Range(target, start, min(values.numel(), start + step), 0)
            at = start * values.itemsize
            source.read(source.plans_of([Chunk(0, 0, (item,))])[0], [view[at : at + item.nbytes]])
        out[target.name] = values
    return out


def test_every_number_of_float8_in_blocks_of_128_from_any_element_to_any(tmp_path):
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    weight = torch.arange(200 * 300).remainder(256).to(torch.uint8).view(200, 300)
    weight[weight == 127] = weight[weight == 255] = 0  # no number
    weight = weight.view(torch.float8_e4m3fn)
    scale = torch.rand(2, 3) * 1e-3
    save_file({"a.weight": weight, "a.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    wanted = _dequantize_fp8_weight(weight, scale, [128, 128], torch.float32).bfloat16()
    for step in (1 << 30, 7919):
        assert same(read_all(tmp_path, step), {"a.weight": wanted})


def test_memory_stays_small_whatever_the_size_of_a_weight(tmp_path):
    """Anonymous memory: pages of mapped files are the system's to drop."""
    weight = torch.zeros(16384, 8192, dtype=torch.uint8).view(torch.float8_e4m3fn)
    blocks = torch.zeros(4, 8192, 128, 16, dtype=torch.uint8)
    state = {"a.weight": weight, "a.weight_scale_inv": torch.ones(128, 64),
             "e_blocks": blocks, "e_scales": blocks[..., 0].contiguous()}  # fmt: skip
    save_file(state, tmp_path / "model.safetensors")
    code = """
    import re, sys
    from pathlib import Path
    from smckpt.translate.models.contents import whole_tensors
    from smckpt.translate.models.quantized import dequantized
    from smckpt.formats.readers.rank_files import open_directory
    from smckpt.translate.files import Chunk, Range
    from smckpt.translate.ranks.translated import TranslatedSource
    def anonymous():
        text = Path("/proc/self/status").read_text()
        return int(re.search(r"RssAnon:\\s+(\\d+)", text)[1])
    source = TranslatedSource(dequantized(open_directory(Path(sys.argv[1])), None))
    buffer, peak, each = memoryview(bytearray(16 << 20)), 0, 8 << 20
    buffer[:] = bytes(16 << 20)
    before = anonymous()
    for target in whole_tensors(source.reader):
        numel = 1
        for size in target.shape:
            numel *= size
        for start in range(0, numel, each):
            item = Range(target, start, min(numel, start + each), 0)
            source.read(source.plans_of([Chunk(0, 0, (item,))])[0], [buffer[: item.nbytes]])
            peak = max(peak, anonymous())
    print(peak - before)
    """
    kibibytes = int(child.run(code, str(tmp_path), timeout=200))
    assert kibibytes < 48 << 10  # the weights have 512 MiB in bfloat16


def swapped(state: State, one: str, other: str) -> None:
    state[one], state[other] = state[other], state[one]


MLP = "model.layers.0.mlp."
KV = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
FAULTS: dict[str, tuple[Any, Any, str]] = {
    "a scale is missing": (
        lambda s: s.pop(KV + "_scale_inv"), errors.KeysMismatchError, "no scale_inv"),
    "a weight is missing": (
        lambda s: s.pop(KV), errors.KeysMismatchError, "has no weight beside it"),
    "scales of other blocks": (
        lambda s: s.update({KV + "_scale_inv": s[KV + "_scale_inv"][:1]}),
        errors.TensorMismatchError, "in blocks of 16 × 16"),
    "scales swapped between two shapes": (
        lambda s: swapped(s, MLP + "up_proj.weight_scale_inv", MLP + "down_proj.weight_scale_inv"),
        errors.TensorMismatchError, "in blocks of 16 × 16"),
    "a weight that is not quantized has scales": (
        lambda s: s.update({KV: s[KV].float()}), errors.TensorMismatchError, "should be float8"),
}  # fmt: skip


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> tuple[Path, State]:
    folder = tmp_path_factory.mktemp("deepseek")
    return folder, deepseek(folder)


def changed(release: tuple[Path, State], folder: Path, change: Any) -> Path:
    folder.mkdir()
    state = load_file(release[0] / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_bytes((release[0] / "config.json").read_bytes())
    return folder


@pytest.mark.parametrize("fault", FAULTS)
def test_a_release_that_is_not_whole_is_refused(tmp_path, release, fault):
    change, kind, text = FAULTS[fault]
    folder = changed(release, tmp_path / "hf", change)
    with pytest.raises(kind, match=text):
        import_hf(folder, tmp_path / "r", Parallel("mcore_te"))
    assert not list(tmp_path.glob("r/*"))


def test_scales_swapped_between_equal_shapes_make_another_model(tmp_path, release):
    names = [f"{MLP}{part}_proj.weight_scale_inv" for part in ("gate", "up")]
    folder = changed(release, tmp_path / "release", lambda s: swapped(s, *names))
    found, _ = round_trip(folder, tmp_path)
    wanted = release[1]
    differ = {n for n in wanted if not torch.equal(found[n], wanted[n])}
    assert differ == {f"{MLP}{part}_proj.weight" for part in ("gate", "up")}


def test_another_block_size_in_the_config_is_refused(tmp_path, release):
    folder = changed(release, tmp_path / "hf", lambda s: None)
    with_config(folder, quantization_config=of_deepseek((32, 16)))
    with pytest.raises(errors.TensorMismatchError, match="in blocks of 32 × 16"):
        import_hf(folder, tmp_path / "r", Parallel("mcore_te"))
    with_config(folder, quantization_config={"quant_method": "fbgemm_fp8"})
    with pytest.raises(errors.CheckpointError):
        import_hf(folder, tmp_path / "r", Parallel("mcore_te"))


def test_an_adapter_is_merged_into_a_release_in_float8(tmp_path, release):
    import peft
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(release[1], plain / "model.safetensors")
    said = json.loads((release[0] / "config.json").read_text())
    del said["quantization_config"]
    (plain / "config.json").write_text(json.dumps(said))
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    config = peft.LoraConfig(r=4, target_modules=["kv_a_proj_with_mqa"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    state = {n: t for n, t in adapted.state_dict().items() if ".lora_" in n}
    save({"model": state}, checkpoint_id=str(tmp_path / "saved"))
    found = []
    for base in (release[0], plain):
        out = tmp_path / f"from-{base.name}"
        export_hf(
            tmp_path / "saved",
            out,
            adapter=Adapter(lora="merge", lora_config=adapted.peft_config, base=base),
        )
        assert "quantization_config" not in json.loads((out / "config.json").read_text())
        found.append(load_file(out / "model.safetensors"))
    assert same(*found) and not torch.equal(found[0][KV], release[1][KV])


@pytest.mark.parametrize(("factor", "refused"), [(0.0, True), (-1.0, True), (0.0, False)])
def test_a_factor_that_no_weights_have_is_refused(tmp_path, factor, refused):
    weight = torch.full((256, 128), 2.0).to(torch.float8_e4m3fn)
    if not refused:  # a block of zeros has a factor of zero
        weight[128:] = 0
    state = {"a.weight": weight, "a.weight_scale_inv": torch.tensor([[1.0], [factor]])}
    save_file(state, tmp_path / "model.safetensors")
    if not refused:
        assert read_all(tmp_path, 1 << 30)["a.weight"].float().equal(weight.float())
        return
    with pytest.raises(errors.CorruptCheckpointError, match=f"scale_inv has the factor {factor}"):
        read_all(tmp_path, 1 << 30)


# -- mxfp4 -----------------------------------------------------------------------------------------


def test_a_release_in_mxfp4_becomes_the_numbers_that_transformers_reads(tmp_path, judged):
    wanted = gpt_oss(tmp_path / "release")
    found, folder = round_trip(tmp_path / "release", tmp_path, tp=2, ep=2)
    assert same(found, wanted)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert torch.equal(logits(folder), logits(tmp_path / "release"))
    judges = ["transformers 5, its numbers", "logits"]
    judged("gpt_oss", "release in mxfp4", exports=judges, imports=judges, at="2×2")


UNPACKS = """
import sys, torch, transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
assert transformers.__version__.startswith("4."), transformers.__version__
found = load_file(sys.argv[1])
save_file({"e": convert_moe_packed_tensors(found["e_blocks"], found["e_scales"])}, sys.argv[2])
"""


@pytest.mark.parametrize("version", [5, pytest.param(4, marks=pytest.mark.long)])
def test_every_byte_with_every_scale_is_what_transformers_unpacks(tmp_path, version):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    byte = torch.arange(256, dtype=torch.uint8).view(16, 16)
    blocks = byte.repeat(1, 256, 1, 1).reshape(2, 8, 256, 16).contiguous()
    # 255 stands for NaN, and is refused
    scales = torch.arange(256).clamp(max=254).repeat_interleave(16).to(torch.uint8).view(2, 8, 256)
    save_file({"e_blocks": blocks, "e_scales": scales}, tmp_path / "model.safetensors")
    if version == 5:
        wanted = convert_moe_packed_tensors(blocks, scales)
    else:
        paths = tmp_path / "model.safetensors", tmp_path / "4.safetensors"
        interpreters.run(interpreters.transformers4(), "-c", UNPACKS, *paths)
        wanted = load_file(paths[1])["e"]
    for step in (1 << 30, 4999):
        assert same(read_all(tmp_path, step), {"e": wanted})


def test_a_scale_that_stands_for_no_number_is_refused(tmp_path):
    """transformers takes it for 2**128, servers for NaN."""
    blocks = torch.ones(2, 4, 2, 16, dtype=torch.uint8)
    scales = torch.full((2, 4, 2), 127, dtype=torch.uint8)
    scales[1, 2, 1] = 255
    save_file({"e_blocks": blocks, "e_scales": scales}, tmp_path / "model.safetensors")
    with pytest.raises(errors.CorruptCheckpointError, match=r"e_scales has the scale 255.*NaN"):
        read_all(tmp_path, 1 << 30)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s, n: s.pop(f"{n}_scales"), "has no scales beside it"),
        (lambda s, n: s.pop(f"{n}_blocks"), "have no scale_inv, or no blocks"),
        (lambda s, n: s.update({f"{n}_scales": s[f"{n}_scales"][:, :-1]}), "mxfp4 is uint8"),
        (lambda s, n: s.update({f"{n}_blocks": s[f"{n}_blocks"][..., :8]}), "mxfp4 is uint8"),
    ],
)
def test_blocks_and_scales_that_do_not_fit_are_refused(tmp_path, change, text):
    blocks = torch.zeros(2, 4, 2, 16, dtype=torch.uint8)
    state = {"e_blocks": blocks, "e_scales": blocks[..., 0]}
    change(state, "e")
    save_file({n: t.contiguous() for n, t in state.items()}, tmp_path / "model.safetensors")
    with pytest.raises(errors.CheckpointError, match=text):
        dequantized(open_directory(tmp_path), read_config({"model_type": "gpt_oss"}))


# -- other forms of a release ----------------------------------------------------------------------


def test_bin_files_alone_are_imported_as_safetensors_are(tmp_path, judged):
    state = ref.on_disk(ref.model("llama"), tmp_path / "release")
    folder, names = tmp_path / "release", sorted(state)
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    assert same(round_trip(folder, tmp_path, tp=2)[0], state)

    (folder / "pytorch_model.bin").unlink()
    parts = {f"pytorch_model-{i:05d}-of-00002.bin": names[i - 1 :: 2] for i in (1, 2)}
    for file, own in parts.items():
        torch.save({n: state[n] for n in own}, folder / file)
    where = {n: file for file, own in parts.items() for n in own}
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    assert same(round_trip(folder, tmp_path / "2", tp=2)[0], state)
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(errors.CorruptCheckpointError, match="-00002-of-00002.bin is missing"):
        import_hf(folder, tmp_path / "r", Parallel("mcore_te"))
    index.unlink()
    with pytest.raises(errors.CorruptCheckpointError, match="-00001-of-00002.bin .*no index"):
        import_hf(folder, tmp_path / "r", Parallel("mcore_te"))
    judged("llama", "release in .bin files", imports=["save_pretrained"], at="2")


def test_one_file_beside_the_index_of_an_older_model_is_what_transformers_reads(tmp_path):
    """`save_pretrained` into one directory, first in shards, then in one file, leaves the index."""
    from transformers import AutoModelForCausalLM

    old, new, hub = ref.model("llama"), ref.model("llama"), tmp_path / "hub"
    with torch.no_grad():
        new.model.norm.weight.add_(1)
    old.save_pretrained(hub, max_shard_size="100KB")
    shards = {path.name: path.read_bytes() for path in hub.glob("model-*")}
    new.save_pretrained(hub)
    index = hub / "model.safetensors.index.json"
    assert index.exists() and not [*hub.glob("model-*")]
    for number, again in enumerate(({}, shards)):  # somebody else may leave the shards too
        for name, data in again.items():
            (hub / name).write_bytes(data)
        theirs = AutoModelForCausalLM.from_pretrained(hub).state_dict()
        assert torch.equal(theirs["model.norm.weight"], new.state_dict()["model.norm.weight"])
        import_hf(hub, tmp_path / f"c{number}", Parallel("hf_tp"))
        export_hf(tmp_path / f"c{number}", tmp_path / f"hf{number}")
        ours = load_file(tmp_path / f"hf{number}" / "model.safetensors")
        assert [n for n in theirs if not torch.equal(ours[n], theirs[n])] == []
        convert(hub, tmp_path / f"{number}.pt", to="torch")
        converted = torch.load(tmp_path / f"{number}.pt")
        assert [n for n in theirs if not torch.equal(converted[n], theirs[n])] == []


def test_a_bin_file_of_an_old_torch_is_imported(tmp_path, judged):
    folder = tmp_path / "release"
    state = ref.on_disk(families.model("gpt2"), folder)
    (folder / "model.safetensors").unlink()
    short = {n.removeprefix("transformer."): t for n, t in state.items()}
    short["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
    torch.save(short, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert same(round_trip(folder, tmp_path, tp=2)[0], state)
    judged("gpt2", "release in .bin files", imports=["save_pretrained"], at="2")


def test_buffers_of_gpt_neox_are_left_out_and_its_weights_are_not(tmp_path, judged):
    """As in the releases of Pythia and GPT-NeoX-20B."""
    folder = tmp_path / "release"
    state = ref.on_disk(ref.model("gpt_neox"), folder)
    at, more = "gpt_neox.layers.{}.attention.", dict(state)
    for i in range(2):
        more[at.format(i) + "bias"] = torch.ones(1, 1, 64, 64).tril().bool()
        more[at.format(i) + "masked_bias"] = torch.tensor(-1e9)
        more[at.format(i) + "rotary_emb.inv_freq"] = torch.rand(4)
    save_file(more, folder / "model.safetensors")
    assert same(round_trip(folder, tmp_path, tp=2)[0], state)
    save_file({**more, "gpt_neox.layers.0.attention.other": torch.ones(3)},
              folder / "model.safetensors")  # fmt: skip
    with pytest.raises(errors.KeysMismatchError, match="attention.other"):
        import_hf(folder, tmp_path / "r", Parallel("mcore_te"))
    judged("gpt_neox", "release with buffers", imports=["save_pretrained"], at="2")


def further_layer(state: State) -> State:
    """DeepSeek's layer of multi-token prediction, which follows the others."""
    at = "model.layers.2."
    last = {n.replace("layers.1.", "layers.2."): t for n, t in state.items() if "layers.1." in n}
    hidden = state["model.norm.weight"]
    return {
        **last, f"{at}enorm.weight": hidden + 1, f"{at}hnorm.weight": hidden + 2,
        f"{at}eh_proj.weight": torch.cat([state["lm_head.weight"][:64]] * 2, 1),
        f"{at}shared_head.norm.weight": hidden + 3,
        f"{at}shared_head.head.weight": state["lm_head.weight"],
        f"{at}embed_tokens.weight": state["model.embed_tokens.weight"],
    }  # fmt: skip


def test_layers_that_predict_further_tokens_are_left_out_and_named(tmp_path, release):
    def extend(state: State) -> None:
        more = further_layer(state)
        state.update({n: t.clone() for n, t in more.items()})

    folder = changed(release, tmp_path / "release", extend)
    with_config(folder, num_nextn_predict_layers=0)
    with pytest.raises(errors.KeysMismatchError, match=r"unexpected .*model.layers.2"):
        import_hf(folder, tmp_path / "none", Parallel("mcore_te"))
    with_config(folder, num_nextn_predict_layers=1)
    report = import_hf(folder, tmp_path / "ranks", Parallel("mcore_te", tp=2))
    assert re.search(r"\d+ tensors of layers that predict further tokens", report.notes[0])
    export_hf(tmp_path / "ranks", tmp_path / "hf", config=tmp_path / "ranks")
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), release[1])
    said = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert said["num_nextn_predict_layers"] == 0


# -- what stays in float32 -------------------------------------------------------------------------


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=64)
    return T5ForConditionalGeneration(config)


KEPT: dict[str, Any] = {
    "deepseek_v3": lambda: families.model("deepseek_v3"),
    "gpt_oss": lambda: families.model("gpt_oss"), "t5": t5,
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", KEPT)
def test_what_from_pretrained_keeps_in_float32_is_written_so(tmp_path, family, dtype):
    model = KEPT[family]()
    save({"model": model.state_dict()}, checkpoint_id=str(tmp_path / "saved"))
    export_hf(tmp_path / "saved", tmp_path / "hf", config=model.config, dtype=dtype)
    wide = load_file(tmp_path / "hf" / "model.safetensors")
    found = {n for n, t in wide.items() if t.dtype == torch.float32}
    model.save_pretrained(tmp_path / "whole")
    kind = getattr(torch, dtype)
    loaded = type(model).from_pretrained(tmp_path / "whole", dtype=kind)
    kept = {n for n, t in loaded.state_dict().items() if t.dtype == torch.float32}
    assert found == kept & wide.keys() and kept.issubset(wide)
    assert {t.dtype for t in wide.values()} == {kind, *([torch.float32] if found else [])}
    assert bool(found) == (dtype == "float16" or family == "deepseek_v3")
