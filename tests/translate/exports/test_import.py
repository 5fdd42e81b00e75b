"""The way back is exact: import_hf writes what ranks hold, and export_hf returns the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from smckpt import ImportOptions, errors, find_checkpoints
from smckpt.checkpoint.reading.committed import open_catalogue
from smckpt.checkpoint.upkeep.verify import verify_checkpoint
from smckpt.storage import open_storage
from smckpt.translate import (
    LayoutRow,
    Parallel,
    TensorLayout,
    export_hf,
    get_layout,
    import_hf,
    register_layout,
)
from tests.support import child
from tests.support.faults.copies import killed_at
from tests.support.models import references as ref

State = dict[str, torch.Tensor]
CUTS: dict[str, Any] = {
    "mcore_te": lambda s, t, r, ep, e: ref.mcore(s, t, r, ep, e, rows=128),
    "mcore_local": lambda s, t, r, ep, e: ref.mcore(
        s, t, r, ep, e, rows=128, local=True, sequential=True
    ),
    "te_split": lambda s, t, r, ep, e: ref.te(s, t, r, rows=128),
    "te_fused": lambda s, t, r, ep, e: ref.te(s, t, r, rows=128, fused="per_rank"),
    "te_fused_interleaved": lambda s, t, r, ep, e: ref.te(
        s, t, r, rows=128, fused="interleaved"
    ),
    "meta": lambda s, t, r, ep, e: ref.meta(s, t, r),
}  # fmt: skip


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> dict[str, tuple[Path, State]]:
    out = {}
    for family in ("llama", "qwen2", "qwen3", "gpt_neox", "mixtral", "qwen3_moe"):
        folder = tmp_path_factory.mktemp(family)
        out[family] = (folder, ref.on_disk(ref.model(family), folder))
    return out


def same_but_for_padding(found: State, wanted: State) -> bool:
    """Rows of padding are zero in an import; the reference has other values there."""
    dropped = ("_extra_state", "rope.freqs")
    wanted = {n: torch.where(w == 7.5, 0.0, w) for n, w in wanted.items()
              if not n.endswith(dropped)}  # fmt: skip
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


PAIRS = [
    *((layout, family, t, 1) for layout in ("mcore_te", "mcore_local", "te_split")
      for family in ("llama", "qwen2", "qwen3", "gpt_neox") for t in (2, 4)),
    *((layout, family, t, ep) for layout in ("mcore_te", "mcore_local")
      for family in ("mixtral", "qwen3_moe") for t, ep in ((1, 1), (2, 2))),
    *(("mcore_te", "llama", t, 1) for t in (1, 8)),
    *((layout, family, 2, 1) for layout in ("te_fused", "te_fused_interleaved")
      for family in ("qwen2", "gpt_neox")),
    ("meta", "llama", 2, 1),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "family", "t", "ep"), PAIRS)
def test_an_import_is_what_ranks_hold_and_its_export_the_original(
    tmp_path, hub, judged, layout, family, t, ep
):
    folder, state = hub[family]
    multiple = 1 if layout == "meta" else 128 // t
    report = import_hf(
        folder, tmp_path / "ranks", Parallel(layout, tp=t, ep=ep),   prefix="",
        options=ImportOptions(pad_vocab_to_multiple_of=multiple),
    )  # fmt: skip
    paths = [tmp_path / "ranks" / name for name in report.files]
    for number, path in enumerate(paths):
        wanted = CUTS[layout](state, t, number % t, ep, number // t)
        assert same_but_for_padding(load_file(path), wanted)
    assert verify_checkpoint(str(tmp_path / "ranks")).ok
    export_hf(
        tmp_path / "ranks",
        tmp_path / "hf",
        config=folder,
        parallel=Parallel(layout=layout),
        prefix="",
    )
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[n], state[n]) for n in state)
    at = f"{t}×{ep}" if ep > 1 else str(t)
    judged(family, layout, exports=["formulas"], imports=["formulas"], at=at)


def test_ranks_whose_vocabulary_is_all_padding_hold_zeros(tmp_path, hub):
    folder, state = hub["llama"]
    report = import_hf(
        folder,
        tmp_path / "r",
        Parallel("mcore_te", tp=4),
        options=ImportOptions(pad_vocab_to_multiple_of=128),
        prefix="",
    )
    last = load_file(tmp_path / "r" / report.files[3])["embedding.word_embeddings.weight"]
    assert last.shape == (128, 64) and not last.any()
    paths = [tmp_path / "r" / name for name in report.files]
    export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=4), config=folder)
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(found[n], state[n]) for n in state)


def test_a_layout_with_other_names_takes_a_few_lines(tmp_path, hub):
    folder, state = hub["llama"]
    mine = get_layout("te_split", "llama").renamed(
        "mine", ("model.layers.", "transformer.blocks."), ("layernorm_mlp.", "ffn.")
    )
    register_layout(mine)
    report = import_hf(folder, tmp_path / "r", Parallel("mine", tp=2), prefix="")
    assert "transformer.blocks.1.ffn.fc1_weight" in load_file(tmp_path / "r" / report.files[0])
    paths = [tmp_path / "r" / name for name in report.files]
    found = export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=2), config=folder)
    assert found.layout == "mine"
    out = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(out[n], state[n]) for n in state)
    with pytest.raises(errors.UsageError, match="'te_split' exists already"):
        register_layout(TensorLayout("te_split", ()))


def test_a_transposed_and_a_stacked_row_both_ways(tmp_path, hub):
    folder, state = hub["mixtral"]
    hub_rows = get_layout("hf_tp", "mixtral").rows
    own = TensorLayout(
        "conv1d",
        (
            *(row for row in hub_rows if "experts" not in row.name),
            LayoutRow(
                "x.{i}.fc1", ("e_gate", "e_up"), "per_rank", 0, transposed=True, stacked=True
            ),
            LayoutRow("x.{i}.fc2", ("e_down",), tp=1, transposed=True, stacked=True),
        ),
    )
    report = import_hf(folder, tmp_path / "r", Parallel(own, tp=2, ep=2), prefix="")
    second = load_file(tmp_path / "r" / report.files[2])  # tp 0, ep 1
    name = "model.layers.0.block_sparse_moe.experts.{}.w1.weight"
    assert torch.equal(second["x.0.fc1"][1, :, :80], state[name.format(5)][:80].T)
    paths = [tmp_path / "r" / name for name in report.files]
    export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=2, ep=2, layout=own), config=folder)
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(found[n], state[n]) for n in state)


def test_a_table_that_says_something_twice_or_not_at_all_fails_its_proof(tmp_path, hub):
    folder, _ = hub["llama"]
    base = get_layout("te_split", "llama")
    twice = TensorLayout("twice", (*base.rows, LayoutRow("again.{i}", ("o",))), base.drop)
    with pytest.raises(errors.TensorMismatchError, match=r"o_proj.*more than once"):
        import_hf(folder, tmp_path / "r", Parallel(twice))
    less = TensorLayout("less", tuple(r for r in base.rows if r.roles != ("o",)), base.drop)
    with pytest.raises(errors.KeysMismatchError, match=r"has no row for \['o'\]"):
        import_hf(folder, tmp_path / "r", Parallel(less))


def test_nothing_loads_before_all_is_there_nor_after_a_failure(tmp_path, hub):
    folder, _ = hub["llama"]

    def fail(done: int, total: int) -> None:
        with pytest.raises(errors.CheckpointNotFoundError):
            open_catalogue(open_storage(str(tmp_path / "r")))
        if done == total:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        import_hf(
            folder, tmp_path / "r", Parallel("te_split", tp=2), options=ImportOptions(progress=fail)
        )
    assert list((tmp_path / "r").glob("*")) == []


def test_a_try_after_a_kill_at_any_call_completes(tmp_path, hub):
    """The kill leaves parts, a config or half of one, a lease; a committed import is refused."""
    folder, _ = hub["llama"]

    def imported(at: Path) -> None:
        import_hf(folder, at, Parallel("mcore_te", tp=2))

    for moment in sorted({0, *range(20, 400, 23), *range(110, 120)}):
        out = tmp_path / f"r{moment}"
        if not killed_at(moment, lambda at=out: imported(at), calls=True):
            break
        if not find_checkpoints(out):
            imported(out)
        assert verify_checkpoint(out).ok
        assert (out / "config.json").is_file()
    assert moment > 126
    with pytest.raises(errors.UsageError, match="not empty"):
        imported(out)


def test_an_import_into_s3_is_a_checkpoint_and_takes_the_place_of_another(tmp_path, hub, s3_root):
    folder, state = hub["mixtral"]
    there = f"{s3_root}/import"
    first = import_hf(folder, there, Parallel("mcore_te", tp=2))
    with pytest.raises(errors.UsageError, match="not empty"):
        import_hf(folder, there, Parallel("mcore_te", tp=2))
    report = import_hf(
        folder, there, Parallel("mcore_te", tp=2, ep=2), options=ImportOptions(overwrite=True)
    )
    names = {info.name for info in open_storage(there).list()}
    assert names.issuperset(report.files) and names.isdisjoint(first.files)
    assert verify_checkpoint(there).ok
    export_hf(there, tmp_path / "hf", config=folder)
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[n], state[n]) for n in state)


def test_the_command_goes_there_and_back_without_torch(tmp_path, hub):
    folder, state = hub["mixtral"]
    code = """
    import sys
    from smckpt.cli.app import app
    folder, ranks, hf = sys.argv[1:]
    degrees = ["--ep", "2", "--etp", "1"]  # experts are whole
    app(["import", folder, ranks, "--layout", "mcore_te", "--tp", "2", *degrees, "--json",
         "--pad-vocab-to-multiple-of", "48", "--allow-nonfinite"], standalone_mode=False)
    app(["export", ranks, hf, "--config", ranks, *degrees, "--json",
         "--padded-vocab-size", "192"], standalone_mode=False)
    print("torch" in sys.modules)
    """
    told = child.run(code, str(folder), str(tmp_path / "r"), str(tmp_path / "hf"), timeout=120)
    assert told.endswith("False")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[n], state[n]) for n in state)


def test_memory_stays_small_whatever_the_size_of_a_tensor(tmp_path):
    """Anonymous memory: pages of mapped files are the system's to drop."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=1024, intermediate_size=16384, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=65536, tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "hf")
    state = {
        "model.embed_tokens.weight": torch.ones(65536, 1024), "model.norm.weight": torch.ones(1024),
        "lm_head.weight": torch.ones(65536, 1024),
    }  # fmt: skip
    shapes = {
        "input_layernorm": (1024,), "post_attention_layernorm": (1024,),
        "self_attn.q_proj": (1024, 1024), "self_attn.k_proj": (512, 1024),
        "self_attn.v_proj": (512, 1024), "self_attn.o_proj": (1024, 1024),
        "mlp.gate_proj": (16384, 1024), "mlp.up_proj": (16384, 1024),
        "mlp.down_proj": (1024, 16384),
    }  # fmt: skip
    state |= {f"model.layers.0.{n}.weight": torch.ones(s) for n, s in shapes.items()}
    save_file(state, tmp_path / "hf" / "model.safetensors")
    code = """
    import re, sys
    from pathlib import Path
    from smckpt.translate import ImportOptions, Parallel, import_hf
    peak = [0]
    def look(done, total):
        text = Path("/proc/self/status").read_text()
        peak[0] = max(peak[0], int(re.search(r"RssAnon:\\s+(\\d+)", text)[1]) +
                      int(re.search(r"RssShmem:\\s+(\\d+)", text)[1]))
    look(0, 0)
    before = peak[0]
    options = ImportOptions(threads=2, progress=look)
    import_hf(sys.argv[1], sys.argv[2], Parallel("mcore_te", tp=2), options=options)
    print(peak[0] - before)
    """
    kibibytes = int(child.run(code, str(tmp_path / "hf"), str(tmp_path / "r"), timeout=200))
    assert kibibytes < 80 << 10
