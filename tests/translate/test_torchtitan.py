"""torchtitan 0.3's adapter for Llama 3 and the tables agree, bitwise; so do its logits.

The adapter moves the rotary rows of query and key as Meta's order wants it. Up to 0.2 torchtitan's
names were Meta's (`meta`); they are `torchtitan` now, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from smckpt.translate import export_hf, import_hf
from tests.support import interpreters, torchtitan_run
from tests.support import references as ref

State = dict[str, torch.Tensor]


def swapped(held: State) -> State:
    one, two = (f"layers.{i}.feed_forward.w1.weight" for i in (0, 1))
    return {one: held[two], two: held[one]}


def in_the_hubs_order(held: State) -> State:
    """A head's rotary rows in two halves, as Hugging Face has them, and not in pairs."""
    name = "layers.0.attention.qkv_linear.wq.weight"
    halves = held[name].view(ref.H, ref.D // 2, 2, -1).transpose(1, 2)
    return {name: halves.reshape(held[name].shape).contiguous()}


def of_one_rank_of_two(held: State) -> State:
    name = "layers.1.feed_forward.w3.weight"
    return {name: held[name].chunk(2)[0].contiguous()}


WRONG: dict[str, Callable[[State], State]] = {
    "swapped": swapped, "order": in_the_hubs_order, "degree": of_one_rank_of_two,
}  # fmt: skip


@pytest.fixture(scope="module")
def titan(tmp_path_factory) -> tuple[Any, State, Path]:
    """A Llama, its state, and the folder where torchtitan has been at work."""
    python = interpreters.torchtitan()
    folder = tmp_path_factory.mktemp("titan")
    model = ref.model("llama")
    state = ref.on_disk(model, folder)
    report = import_hf(folder, folder / "theirs", "torchtitan", prefix="")
    theirs = folder / "theirs" / report.files[0]
    others = [folder / f"{name}.safetensors" for name in WRONG]
    for path, change in zip(others, WRONG.values(), strict=True):
        held = load_file(theirs)
        save_file(held | change(held), path)
    interpreters.run(python, torchtitan_run.__file__, folder, theirs, *others)
    return model, state, folder


def assert_same(found: State, wanted: State) -> None:
    assert found.keys() == wanted.keys()
    assert [n for n in wanted if not torch.equal(found[n], wanted[n])] == []


@pytest.mark.parametrize("fused", [0, 1])
def test_what_torchtitan_holds_exports_to_the_original(tmp_path, titan, fused):
    model, state, folder = titan
    with torch.no_grad():
        wanted = model(torch.arange(40).reshape(2, 20) % ref.V).logits
    assert (torch.load(folder / f"logits{fused}.pt") - wanted).abs().max() <= 1e-5
    report = export_hf([folder / f"titan{fused}.pt"], tmp_path / "out", config=model.config)
    assert report.layout == "torchtitan"
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), state)


def test_its_distributed_checkpoint_exports_to_the_original(tmp_path, titan):
    model, state, folder = titan
    report = export_hf(folder / "dcp", tmp_path / "out", config=model.config)
    assert report.layout == "torchtitan" and "(DCP)" in report.source
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), state)


def test_an_import_is_what_torchtitans_adapter_reads(titan):
    _, state, folder = titan
    theirs = torch.load(folder / "titan0.pt")["model"]
    (read,) = (folder / "theirs").glob("data-*.safetensors")
    assert_same(load_file(read), theirs)
    assert_same(torch.load(folder / "hf.pt"), state)


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("swapped", [f"model.layers.{i}.mlp.gate_proj.weight" for i in (0, 1)]),
        ("order", ["model.layers.0.self_attn.q_proj.weight"]),
        ("degree", ["model.layers.1.mlp.up_proj.weight"]),
    ],
)
def test_torchtitans_adapter_sees_what_is_wrong(titan, what, names):
    _, state, folder = titan
    found = torch.load(folder / f"{what}.pt")
    assert found.keys() == state.keys()
    assert [n for n in sorted(state) if not torch.equal(found[n], state[n])] == names


def test_metas_names_are_the_same_in_other_words(tmp_path, titan):
    _, _, folder = titan
    report = import_hf(folder, tmp_path / "in", "meta", prefix="")
    found = load_file(tmp_path / "in" / report.files[0])
    names = {"output.weight": "lm_head.weight"}
    renamed = {
        names.get(n, n.replace("attention.w", "attention.qkv_linear.w")).replace(
            "qkv_linear.wo", "wo"
        ): t
        for n, t in found.items()
    }
    assert_same(renamed, torch.load(folder / "titan0.pt")["model"])


@pytest.mark.parametrize("t", [2, 4])
def test_its_tensor_parallel_ranks_are_rows_and_columns_of_it(tmp_path, titan, t):
    _, state, folder = titan
    report = import_hf(folder, tmp_path / "in", "torchtitan", tp=t, prefix="")
    files = [tmp_path / "in" / name for name in report.files]
    whole = torch.load(folder / "titan0.pt")["model"]
    for rank, file in enumerate(files):
        for name, tensor in load_file(file).items():
            dim = 1 if name.endswith(("wo.weight", "w2.weight")) else 0
            wanted = whole[name] if "norm" in name else whole[name].chunk(t, dim)[rank]
            assert torch.equal(tensor, wanted), name
    export_hf(files, tmp_path / "out", tp=t, config=folder)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), state)
