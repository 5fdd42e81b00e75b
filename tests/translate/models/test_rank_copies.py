"""A rank's file copied as another's is refused by its values; upcycled experts are named as the
exception."""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from smckpt import Parallel, errors, export_hf, import_hf
from smckpt.cli.app import app
from smckpt.formats.source_files import SourceFiles
from smckpt.topology import ParallelState
from smckpt.translate.ranks import copied
from tests.support.models import families, shards
from tests.support.models import references as ref
from tests.translate.layouts.test_layout_checkpoints import plain

State = dict[str, torch.Tensor]


def write(state: State, path: Path) -> None:
    plain = {name: tensor.contiguous().clone() for name, tensor in state.items()}
    save_file(plain, path) if path.suffix == ".safetensors" else torch.save(plain, path)


def assert_same(directory: Path, wanted: State) -> None:
    found = load_file(directory / "model.safetensors")
    assert sorted(found) == sorted(wanted)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Callable[[str], tuple[Any, State]]:
    known: dict[str, tuple[Any, State]] = {}

    def get(family: str) -> tuple[Any, State]:
        if family not in known:
            model = ref.model(family, num_hidden_layers=4)
            known[family] = model, ref.on_disk(model, tmp_path_factory.mktemp(family))
        return known[family]

    return get


def cuts_of(family: str, state: State, tp: int, ep: int) -> list[State]:
    return ref.each_rank(lambda r, e: ref.mcore(state, tp, r, ep, e), tp, ep)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize(
    ("family", "tp", "ep", "copied"),
    [("llama", 2, 1, (0, 1)), ("llama", 4, 1, (3, 1)), ("mixtral", 1, 4, (1, 2)),
     ("mixtral", 2, 2, (0, 3)), ("mixtral", 2, 2, (0, 2))],
)  # fmt: skip
def test_a_copied_file_is_refused(tmp_path, made, suffix, family, tp, ep, copied):
    model, state = made(family)
    files = [tmp_path / f"{letter}.{suffix}" for letter in "abcd"[: tp * ep]]
    for path, cut in zip(files, cuts_of(family, state, tp, ep), strict=True):
        write(cut, path)
    export_hf(files, tmp_path / "hf", config=model.config, parallel=Parallel(tp=tp, ep=ep))
    assert_same(tmp_path / "hf", state)
    first, second = (files[number] for number in copied)
    shutil.copy(first, second)
    with pytest.raises(errors.UsageError, match="copy of another rank's") as caught:
        export_hf(files, tmp_path / "no", config=model.config, parallel=Parallel(tp=tp, ep=ep))
    assert first.name in str(caught.value) and second.name in str(caught.value)
    assert not (tmp_path / "no").exists()


def test_a_copied_stage_in_safetensors_is_refused(tmp_path, made):
    model, state = made("llama")
    files = [tmp_path / f"{letter}.safetensors" for letter in "abcd"]
    for path, part in zip(files, of_stages(state, 4), strict=True):
        write(part, path)
    export_hf(files, tmp_path / "hf", config=model.config, parallel=Parallel(pp=4))
    assert_same(tmp_path / "hf", state)
    shutil.copy(files[1], files[2])
    with pytest.raises(errors.UsageError, match="copy of another rank's"):
        export_hf(files, tmp_path / "no", config=model.config, parallel=Parallel(pp=4))


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_upcycled_experts_are_exported_on_request(tmp_path, suffix):
    model = ref.model("mixtral")
    with torch.no_grad():
        for layer in model.model.layers:
            for parameter in layer.mlp.experts.parameters():
                parameter.copy_(parameter[:1].expand_as(parameter))
    state = ref.on_disk(model, tmp_path / "own")
    files = [tmp_path / f"{number}.{suffix}" for number in "ab"]
    for path, cut in zip(files, cuts_of("mixtral", state, 1, 2), strict=True):
        write(cut, path)
    with pytest.raises(errors.UsageError, match=r"upcycled.*allow_equal_ranks=True"):
        export_hf(files, tmp_path / "no", config=model.config, parallel=Parallel(ep=2))
    export_hf(
        files, tmp_path / "hf", config=model.config, parallel=Parallel(ep=2, allow_equal_ranks=True)
    )
    assert_same(tmp_path / "hf", state)
    command = ["export", *map(str, files), str(tmp_path / "by command"), "--ep", "2",
               "--config", str(tmp_path / "own"), "--allow-equal-ranks"]  # fmt: skip
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output


def test_a_checkpoint_of_ranks_that_hold_one_shard_is_refused(tmp_path, made):
    model, state = made("llama")
    topology = ParallelState(2, tensor_parallel_degree=2).to_json()
    one = ref.te(state, 2, 0)
    path = shards.write(
        tmp_path / "c", 2, lambda r: list(plain([one, one], r)), topology=topology
    )  # fmt: skip
    with pytest.raises(errors.UsageError, match=r"rank 1 are those of rank 0"):
        export_hf(path, tmp_path / "no", config=model.config)


def test_that_an_order_cannot_be_told_is_noted(tmp_path, made):
    model, state = made("llama")
    for names, noted in ((("left", "right"), True), (("rank0", "rank1"), False)):
        files = [tmp_path / f"{name}.safetensors" for name in names]
        for path, cut in zip(files, cuts_of("llama", state, 2, 1), strict=True):
            write(cut, path)
        report = export_hf(files, tmp_path / names[0], config=model.config, parallel=Parallel(tp=2))
        assert any("order" in note for note in report.notes) == noted, report.notes


def stated(folder: Path, cuts: list[State], ranks: list[int], **args: Any) -> list[Path]:
    """Files whose names tell nothing, of what Megatron writes on these ranks."""
    files = [folder / f"{letter}.pt" for letter in "abcdefgh"[: len(cuts)]]
    folder.mkdir()
    for path, cut, rank in zip(files, cuts, ranks, strict=True):
        said = argparse.Namespace(rank=rank, **args)
        torch.save({"args": said, "iteration": 10, "model": cut}, path)
    return files


def of_stages(state: State, pp: int) -> list[State]:
    """Of four layers."""
    whole, each = ref.mcore(state, 1, 0), 4 // pp
    return [
        {n.replace(f"layers.{p * each + i}.", f"layers.{i}."): t for i in range(each)
         for n, t in whole.items()
         if f"layers.{p * each + i}." in n or (p == 0 and "embedding" in n)
         or (p == pp - 1 and ("final" in n or "output_layer" in n))}
        for p in range(pp)
    ]  # fmt: skip


# each: degrees; the ranks that wrote the files; two that change places; what else the files say
MOVED = {
    "tp": ({"tp": 4}, (0, 1, 2, 3), (1, 3), {}),
    "ep": ({"tp": 2, "ep": 2}, (0, 1, 2, 3), (0, 2), {}),
    "ep among data-parallel ranks": ({"ep": 4}, (4, 5, 6, 7), (1, 2), {}),
    "ep with cp": ({"tp": 1, "ep": 4}, (0, 1, 2, 3), (0, 3), {"context_parallel_size": 2}),
    "ep with cp, before core 0.10": (
        {"tp": 1, "ep": 4}, (0, 2, 4, 6), (0, 3), {"context_parallel_size": 2}),
    "etp": ({"tp": 2, "ep": 4, "etp": 1}, (0, 1, 2, 3), (0, 2), {}),
    "inner stages": ({"pp": 4}, (0, 2, 4, 6), (1, 2), {"world_size": 8}),
    "inner stages of a world that is not told": ({"pp": 4}, (0, 2, 4, 6), (1, 2), {}),
    "inner stages before data parallelism": (
        {"pp": 4}, (0, 1, 2, 3), (1, 2), {"world_size": 8, "use_tp_pp_dp_mapping": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", MOVED)
def test_a_file_in_the_place_of_another_rank_is_refused(tmp_path, made, case):
    degrees, ranks, swapped, args = MOVED[case]
    model, state = made("mixtral" if "ep" in degrees else "llama")
    tp, ep, etp = degrees.get("tp", 1), degrees.get("ep", 1), degrees.get("etp")
    if "pp" in degrees:
        cuts = of_stages(state, degrees["pp"])
    elif etp is not None:  # a rank has all of its experts, beside its part of the layers
        cuts = [
            {**ref.mcore(state, tp, r % tp, ep, r),
             **{n: t for n, t in ref.mcore(state, 1, 0, ep, r).items() if ".experts." in n}}
            for r in range(ep)
        ]  # fmt: skip
    else:
        cuts = ref.each_rank(lambda r, e: ref.mcore(state, tp, r, ep, e), tp, ep)
    args = {"tensor_model_parallel_size": tp, **args}
    files = stated(tmp_path / "files", cuts, list(ranks), **args)
    export_hf(files, tmp_path / "hf", config=model.config, parallel=Parallel(**degrees))
    assert_same(tmp_path / "hf", state)
    one, two = swapped
    files[one], files[two] = files[two], files[one]
    with pytest.raises(errors.TopologyError, match=f"rank {ranks[two]} wrote it") as caught:
        export_hf(files, tmp_path / "no", config=model.config, parallel=Parallel(**degrees))
    assert files[one].name in str(caught.value)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("kind", ["safetensors", "pt", "checkpoint", "import"])
@pytest.mark.parametrize(
    ("family", "tp", "ep", "copied"),
    [("llama", 2, 1, (0, 1)), ("llama", 4, 1, (3, 1)), ("mixtral", 1, 4, (1, 2)),
     ("mixtral", 2, 2, (0, 2))],
)  # fmt: skip
def test_layers_of_another_rank_are_refused(tmp_path, made, kind, family, tp, ep, copied):
    """Two of four layers, with all that is not cut; the rest is the rank's own."""
    model, state = made(family)
    cuts = cuts_of(family, state, tp, ep)
    files = [tmp_path / f"{letter}.{kind}" for letter in "abcd"[: tp * ep]]

    def exported(name: str) -> None:
        given: Any = files
        if kind == "checkpoint":
            topology = ParallelState(
                tp * ep, tensor_parallel_degree=tp, expert_parallel_degree=ep
            ).to_json()
            given = shards.write(
                tmp_path / f"ck-{name}", tp * ep, lambda r: list(plain(cuts, r)), topology=topology
            )
        else:
            for path, cut in zip(files, cuts, strict=True):
                write(cut, path)
        degrees = Parallel(tp=tp, ep=ep)
        if kind == "import":
            import_hf(given, tmp_path / name, Parallel("mcore_te"), config=model.config,
                      source=degrees)  # fmt: skip
        else:
            export_hf(given, tmp_path / name, config=model.config, parallel=degrees)

    exported("good")
    first, second = copied
    cuts[second] = {
        name: cuts[first][name] if re.search(r"layers\.[12]\.", name) else tensor
        for name, tensor in cuts[second].items()
    }
    with pytest.raises(errors.UsageError, match="in layer 1 is equal") as caught:
        exported("no")
    assert "allow_equal_ranks" in str(caught.value)
    assert ("upcycled" in str(caught.value)) == (first % tp == second % tp)
    assert not (tmp_path / "no").exists()


def test_single_matrices_of_another_rank_are_noted(tmp_path, made):
    model, state = made("llama")
    for name, noted in (("layers.0.mlp.linear_fc2.weight", True), ("layernorm", False),
                        ("output_layer.weight", True)):  # fmt: skip
        cuts = cuts_of("llama", state, 2, 1)
        cuts[1] |= {n: t for n, t in cuts[0].items() if name in n}
        files = [tmp_path / f"rank{rank}.safetensors" for rank in range(2)]
        for path, cut in zip(files, cuts, strict=True):
            write(cut, path)
        report = export_hf(files, tmp_path / name, config=model.config, parallel=Parallel(tp=2))
        found = [note for note in report.notes if "equal matrices" in note]
        assert bool(found) == noted, report.notes
        assert not noted or f"{name} of (tp, ep) (0, 0) and (1, 0)" in found[0]


@pytest.mark.parametrize("kind", ["files", "checkpoint"])
@pytest.mark.parametrize(
    ("family", "degrees"),
    [("glm4_moe", Parallel("mcore_te_sequential", ep=2, pp=2)),
     ("gpt_oss", Parallel("hf_tp", tp=2, pp=2))],
)  # fmt: skip
def test_ranks_of_a_stage_that_have_no_parts_of_their_own_are_no_copies(
    tmp_path, kind, family, degrees
):
    """The first layers of GLM are dense; transformers cuts of GPT-OSS the head alone."""
    model = families.model(family)
    state = ref.on_disk(model, tmp_path / "hub")
    import_hf(tmp_path / "hub", tmp_path / "ranks", degrees, prefix="")
    source: Any = tmp_path / "ranks"
    if kind == "files":
        made = sorted(source.glob("data-*.safetensors"))
        source = [shutil.copy(path, tmp_path / f"{rank}.safetensors")
                  for rank, path in enumerate(made)]  # fmt: skip
    export_hf(source, tmp_path / "hf", config=model.config, parallel=degrees)
    assert_same(tmp_path / "hf", state)


def test_a_copied_file_under_transformers_own_names_is_refused(tmp_path, made):
    model, state = made("llama")
    files = [tmp_path / f"{letter}.safetensors" for letter in "ab"]
    for rank, path in enumerate(files):
        write(ref.hf_tp(model, 2, rank), path)
    export_hf(files, tmp_path / "hf", config=model.config, parallel=Parallel(tp=2))
    assert_same(tmp_path / "hf", state)
    shutil.copy(*files)
    with pytest.raises(errors.UsageError, match="have of their own in .* is equal"):
        export_hf(files, tmp_path / "no", config=model.config, parallel=Parallel(tp=2))


@pytest.mark.parametrize("kind", ["stages", "ranks"])
def test_a_layer_of_another_stage_is_noted(tmp_path, made, kind):
    """A model that was made deeper by its own layers has such too."""
    model, state = made("llama")
    cuts = of_stages(state, 2) if kind == "stages" else cuts_of("llama", state, 2, 1)
    whole = [dict(cut) for cut in cuts]
    for cut in whole:
        of_layer = {n: t for n, t in cut.items() if "layers.1." in n}
        cut |= {n.replace("layers.1.", "layers.0."): t for n, t in of_layer.items()}
    degrees = Parallel(pp=2) if kind == "stages" else Parallel(tp=2)
    for number, held in enumerate((cuts, whole)):
        files = [tmp_path / f"{number}-rank{rank}.safetensors" for rank in range(2)]
        for path, cut in zip(files, held, strict=True):
            write(cut, path)
        report = export_hf(files, tmp_path / f"{number}", config=model.config, parallel=degrees)
        found = [note for note in report.notes if "begin with the same numbers" in note]
        assert len(found) == (0 if number == 0 else 2 if kind == "stages" else 1), report.notes


@pytest.mark.parametrize(
    "of", ["zeros", "one number", "repeated heads", "the same in both halves of a row"]
)
def test_ranks_whose_tensors_are_alike_by_design_are_no_obstacle(tmp_path, made, of):
    """Biases and matrices that begin with zeros; key and value heads that were made from one."""
    model, state = made("llama")
    state = {name: tensor.clone() for name, tensor in state.items()}
    cut = ref.te if of == "repeated heads" else ref.mcore
    for name, tensor in state.items():
        if of in ("zeros", "one number") and re.search(r"(o|down|up)_proj", name):
            tensor.fill_(0.0 if of == "zeros" else 0.02)
        elif of == "repeated heads" and re.search(r"[kv]_proj", name):
            tensor.copy_(tensor[:16].repeat(len(tensor) // 16, 1))
        elif of.startswith("the same") and name.endswith("layernorm.weight"):
            tensor.copy_(tensor[: len(tensor) // 2].repeat(2))
    files = [tmp_path / f"rank{rank}.safetensors" for rank in range(2)]
    for rank, path in enumerate(files):
        write(cut(state, 2, rank), path)
    report = export_hf(files, tmp_path / "hf", config=model.config, parallel=Parallel(tp=2))
    assert_same(tmp_path / "hf", state)
    assert not any("equal" in note for note in report.notes), report.notes


@pytest.mark.parametrize("kind", ["safetensors", "pt", "checkpoint"])
@pytest.mark.parametrize(
    ("family", "degrees"),
    [("llama", {"pp": 4}), ("llama", {"tp": 2}), ("mixtral", {"ep": 2}),
     ("mixtral", {"tp": 2, "ep": 2})],
)  # fmt: skip
@pytest.mark.parametrize("constant", ["zeros", "one for each tensor", "layers"])
def test_a_model_of_constants_is_no_copy(tmp_path, kind, family, degrees, constant):
    """Equal constants tell nothing of a copy, also where a fused tensor holds several of them."""
    model = ref.model(family, num_hidden_layers=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if constant == "zeros" or (constant == "layers" and ".layers." in name):
                parameter.zero_()
            elif constant == "one for each tensor":
                number = sorted({re.sub(r"\d+", "#", n) for n, _ in model.named_parameters()})
                parameter.fill_(0.01 * number.index(re.sub(r"\d+", "#", name)))
    state = ref.on_disk(model, tmp_path / "own")
    tp, ep = degrees.get("tp", 1), degrees.get("ep", 1)
    cuts = of_stages(state, 4) if "pp" in degrees else cuts_of(family, state, tp, ep)
    given: Any = [tmp_path / f"rank{number}.{kind}" for number in range(len(cuts))]
    if kind != "checkpoint":
        for path, cut in zip(given, cuts, strict=True):
            write(cut, path)
    else:
        topology = ParallelState(
            len(cuts), tensor_parallel_degree=tp, expert_parallel_degree=ep,
            pipeline_parallel_degree=degrees.get("pp", 1),
        ).to_json()  # fmt: skip
        given = shards.write(
            tmp_path / "ck", len(cuts), lambda r: list(plain(cuts, r)), topology=topology
        )
    report = export_hf(given, tmp_path / "hf", config=model.config, parallel=Parallel(**degrees))
    assert_same(tmp_path / "hf", state)
    noted = [note for note in report.notes if "whether one is a copy" in note]
    assert len(noted) == (family == "mixtral" or "pp" in degrees), report.notes


def test_what_ranks_have_is_compared_before_a_byte_of_it_is_checked(tmp_path, made, monkeypatch):
    """Or each byte of a model would be fetched twice: a CRC is of a whole tensor."""
    model, state = made("llama")
    files = [tmp_path / f"rank{rank}.pt" for rank in range(2)]
    for path, cut in zip(files, cuts_of("llama", state, 2, 1), strict=True):
        write(cut, path)
    compared, checked = list[int](), set[str]()
    stock, check = copied.refuse_equal_layers, SourceFiles.check
    monkeypatch.setattr(
        SourceFiles, "check", lambda self, record: (checked.add(str(record)), check(self, record))
    )

    def compare(reader, side):
        before = len(checked)
        notes = stock(reader, side)
        compared.append(len(checked) - before)
        return notes

    monkeypatch.setattr("smckpt.translate.models.model.refuse_equal_layers", compare)
    export_hf(files, tmp_path / "hf", config=model.config, parallel=Parallel(tp=2))
    assert compared == [0] and checked
    assert_same(tmp_path / "hf", state)
