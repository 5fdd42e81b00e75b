"""A tensor-parallel layout that smckpt does not know comes in through `register_layout`, or through
an entry point of an installed package: this file is that package, and uses public names alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from smckpt import Parallel, errors, export_hf
from smckpt.translate import LayoutRow, TensorLayout, import_hf, register_layout
from tests.doors.test_family_door import export_with, installed
from tests.support.models import references as ref

State = dict[str, torch.Tensor]

# A trainer of its own: queries, keys and values of a rank in one tensor, gate and up transposed.
_AT = "blocks.{i}."
OURS = TensorLayout(
    "ours",
    (
        LayoutRow("wte", ("embed",), "vocabulary", tp=0),
        LayoutRow("out", ("head",), "vocabulary", tp=0),
        LayoutRow("ln", ("final_norm",)),
        LayoutRow(f"{_AT}ln1", ("norm1",)),
        LayoutRow(f"{_AT}ln2", ("norm2",)),
        LayoutRow(f"{_AT}qkv", ("q", "k", "v"), "per_rank", tp=0),
        LayoutRow(f"{_AT}proj", ("o",), tp=1),
        LayoutRow(f"{_AT}gate_up", ("gate", "up"), "per_rank", tp=0, transposed=True),
        LayoutRow(f"{_AT}down", ("down",), tp=1),
    ),
    drop=(r"step_\d+",),
)


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> tuple[State, Path]:
    folder = tmp_path_factory.mktemp("llama")
    return ref.on_disk(ref.model("llama"), folder), folder


def our_rank(hub: State, rank: int, of: int) -> State:
    """What a rank of that trainer holds, by straight torch code."""
    part = lambda name, dim=0: hub[name].chunk(of, dim)[rank]  # noqa: E731
    out = {
        "wte": part("model.embed_tokens.weight"), "out": part("lm_head.weight"),
        "ln": hub["model.norm.weight"],
    }  # fmt: skip
    for i in range(sum(name.endswith("input_layernorm.weight") for name in hub)):
        own, to = f"model.layers.{i}.", f"blocks.{i}."
        gate_up = [part(f"{own}mlp.{name}_proj.weight") for name in ("gate", "up")]
        out |= {
            f"{to}ln1": hub[f"{own}input_layernorm.weight"],
            f"{to}ln2": hub[f"{own}post_attention_layernorm.weight"],
            f"{to}qkv": torch.cat([part(f"{own}self_attn.{p}_proj.weight") for p in "qkv"]),
            f"{to}proj": part(f"{own}self_attn.o_proj.weight", 1),
            f"{to}gate_up": torch.cat(gate_up).T,
            f"{to}down": part(f"{own}mlp.down_proj.weight", 1),
        }
    return {name: tensor.contiguous().clone() for name, tensor in out.items()}


def written(folder: Path, hub: State, of: int) -> list[Path]:
    folder.mkdir()
    paths = [folder / f"rank{rank}.safetensors" for rank in range(of)]
    for rank, path in enumerate(paths):
        save_file({**our_rank(hub, rank, of), "step_7": torch.zeros(1)}, path)
    return paths


def same(found: State, wanted: State) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_a_layout_that_is_registered_is_found_from_names_both_ways_bitwise(tmp_path, hub):
    state, directory = hub
    register_layout(OURS)
    report = export_hf(
        written(tmp_path / "ranks", state, 2),
        tmp_path / "hf",
        parallel=Parallel(tp=2),
        config=directory,
    )
    assert report.layout == "ours"
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), state)
    done = import_hf(directory, tmp_path / "back", Parallel("ours", tp=2), prefix="")
    for rank, name in enumerate(done.files):
        assert same(load_file(tmp_path / "back" / name), our_rank(state, rank, 2))


@pytest.mark.parametrize("name", ["mcore_te", "hf_tp", "ours"])
def test_a_name_that_is_taken_is_refused(name):
    register_layout(OURS)
    register_layout(OURS)  # the same once more
    with pytest.raises(errors.UsageError, match=f"the layout '{name}' exists already"):
        register_layout(TensorLayout(name, OURS.rows[:3]))


def test_a_layout_of_an_installed_package_is_found_by_its_entry_point(tmp_path, hub):
    state, directory = hub
    site = installed(tmp_path, "smckpt.layouts", "ours = their_layout:OURS")
    source = Path(__file__).read_text()
    table = source[source.index("_AT = ") : source.index("@pytest.fixture")]
    (site / "their_layout.py").write_text(
        f"from smckpt.translate import LayoutRow, TensorLayout\n{table}"
    )
    paths = written(tmp_path / "ranks", state, 2)
    told = export_with(site, *paths, tmp_path / "hf", "--tp", "2", "--config", directory)
    assert told.returncode == 0, told.stderr
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), state)
