"""An import reads what an export reads: from one layout and its degrees to another in one step,
with pipeline stages, and nothing of Hugging Face's form between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

from smckpt import ImportOptions, Parallel, errors, export_hf, import_hf
from smckpt.cli.app import app
from tests.support.models import references as ref
from tests.translate.models.test_pipeline import megatron_lm, of_megatron

State = dict[str, torch.Tensor]
# (layout, degrees) in a chain: each is made from the one before
CHAINS: dict[str, list[tuple[str, dict[str, int]]]] = {
    "llama": [
        ("mcore_te", {"tp": 2, "pp": 2}),
        ("mcore_local", {"tp": 4}),
        ("te_split", {"tp": 2, "pp": 4}), ("meta", {"tp": 1}), ("mcore_te", {"tp": 1, "pp": 4}),
    ],
    "qwen3_moe": [
        ("mcore_te", {"tp": 2, "ep": 2, "pp": 2}), ("mcore_local", {"tp": 1, "ep": 4}),
        ("mcore_te", {"tp": 4, "ep": 2, "etp": 1}), ("hf_tp", {"tp": 2}),
        ("mcore_te", {"tp": 1, "pp": 4}),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> dict[str, tuple[Path, State]]:
    out = {}
    for family in CHAINS:
        folder = tmp_path_factory.mktemp(family)
        out[family] = (folder, ref.on_disk(ref.model(family, num_hidden_layers=4), folder))
    return out


def files_of(folder: Path, report: Any) -> list[State]:
    return [load_file(folder / name) for name in report.files]


def assert_equal(found: list[State], wanted: list[State]) -> None:
    assert len(found) == len(wanted)
    for own, other in zip(found, wanted, strict=True):
        assert own.keys() == other.keys()
        assert [n for n in own if not torch.equal(own[n], other[n])] == []


@pytest.mark.parametrize("family", CHAINS)
def test_from_layout_to_layout_is_what_comes_from_the_release(tmp_path, hub, family):
    folder, state = hub[family]
    before: Any = folder
    given: dict[str, Any] = {}
    for number, (layout, degrees) in enumerate(CHAINS[family]):
        padding = 32 if layout == "mcore_local" and family == "llama" else 1
        options = ImportOptions(pad_vocab_to_multiple_of=padding)
        to = Parallel(layout, **degrees)
        here, direct = tmp_path / f"{number}", tmp_path / f"direct{number}"
        chained = import_hf(before, here, to, config=folder, options=options, **given)
        wanted = import_hf(folder, direct, to, options=options)
        assert_equal(files_of(here, chained), files_of(direct, wanted))
        assert chained.source == ("smckpt" if number else "a Hugging Face directory")
        given = (
            {"source": Parallel(etp=degrees["etp"], ep=degrees["ep"])} if "etp" in degrees else {}
        )
        before = here
    export_hf(before, tmp_path / "hf", config=folder)
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert_equal([found], [state])


def test_each_stage_has_its_part_and_the_command_says_so(tmp_path, hub):
    folder, state = hub["llama"]
    run = CliRunner().invoke(app, [
        "import", str(folder), str(tmp_path / "in"), "--layout", "mcore_te", "--tp", "2", "--pp",
        "2", "--pad-vocab-to-multiple-of", "64",
    ])  # fmt: skip
    assert run.exit_code == 0, run.output
    assert "mcore_te: 4 ranks" in run.output and "a Hugging Face directory" in run.output
    files = sorted((tmp_path / "in").glob("*.safetensors"))
    for path, (chunk,) in zip(files, of_megatron(state, 2, t=2), strict=True):
        own = {
            f"model.{n}": torch.where(t == 7.5, 0.0, t)
            for n, t in chunk.items()
            if not n.endswith(("_extra_state", "rope.freqs"))
        }
        assert_equal([load_file(path)], [own])


def sources(folder: Path, state: State) -> dict[str, tuple[Any, dict[str, Any]]]:
    """A model in the forms that others write: what to pass."""
    (folder / "files").mkdir()
    files = [folder / "files" / f"rank{number}.pt" for number in range(4)]
    ranks = of_megatron(state, 2, t=2)
    for path, (chunk,) in zip(files, ranks, strict=True):
        torch.save({"ema": {"net": chunk}, "model": {n: t + 1 for n, t in chunk.items()}}, path)
    dcp.save({"app": {f"net.{n}": t for n, t in state.items()}}, checkpoint_id=folder / "dcp",
             no_dist=True)  # fmt: skip
    torch.save({"state_dict": {f"net.{n}": t for n, t in state.items()}}, folder / "last.ckpt")
    save_file({n: t.contiguous() for n, t in state.items()}, folder / "one.safetensors")
    return {
        "Megatron-LM (mp_rank_XX)": (megatron_lm(folder / "lm", ranks, 2, 2), {}),
        "files of ranks": (files, {"source": Parallel(tp=2, pp=2), "from_prefix": "ema.net"}),
        "torch.distributed.checkpoint (DCP)": (folder / "dcp", {}),
        "one file": (folder / "last.ckpt", {}),
        "one  file": (str(folder / "one.safetensors"), {}),
    }


def test_what_others_wrote_is_imported_in_one_step(tmp_path, hub):
    folder, state = hub["llama"]
    wanted = import_hf(
        folder,
        tmp_path / "wanted",
        Parallel("mcore_te", tp=4, pp=2),
    )
    for number, (kind, (source, given)) in enumerate(sources(tmp_path, state).items()):
        out = tmp_path / f"in{number}"
        made = import_hf(source, out, Parallel("mcore_te", tp=4, pp=2), config=folder, **given)
        assert made.source == kind.replace("  ", " ")
        assert_equal(files_of(out, made), files_of(tmp_path / "wanted", wanted))


def test_a_tied_head_is_compared_and_copied_to_the_last_stage(tmp_path):
    model = ref.model("llama", num_hidden_layers=4, tie_word_embeddings=True)
    state = ref.on_disk(model, tmp_path / "hub")
    assert "lm_head.weight" not in state
    first = import_hf(
        tmp_path / "hub",
        tmp_path / "a",
        Parallel("mcore_te", tp=2, pp=2),
    )
    ranks = files_of(tmp_path / "a", first)
    head, embedding = "model.output_layer.weight", "model.embedding.word_embeddings.weight"
    assert [(head in rank, embedding in rank) for rank in ranks] == [
        (False, True), (False, True), (True, False), (True, False)
    ]  # fmt: skip
    assert all(torch.equal(ranks[r][embedding], ranks[r + 2][head]) for r in range(2))
    second = import_hf(
        tmp_path / "a", tmp_path / "b", Parallel("mcore_te", tp=1), config=tmp_path / "hub"
    )
    (whole,) = files_of(tmp_path / "b", second)
    assert torch.equal(whole[embedding], state["model.embed_tokens.weight"]) and head not in whole
    torch.save({"model": {**{n.removeprefix("model."): t for n, t in whole.items()},
                          head.removeprefix("model."): whole[embedding] + 1}},
               tmp_path / "other.pt")  # fmt: skip
    with pytest.raises(errors.TensorMismatchError, match=r"output_layer.*differ"):
        import_hf(
            tmp_path / "other.pt", tmp_path / "c", Parallel("mcore_te"), config=tmp_path / "hub"
        )


def test_what_cannot_be_imported_is_refused_by_name(tmp_path, hub):
    folder, state = hub["llama"]
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (folder, {"parallel": Parallel("mcore_te", pp=3)}, "3 pipeline stages do not divide 4"),
        (folder, {"source": Parallel(tp=2)}, "names are Hugging Face's own"),
        (tmp_path / "none", {"config": folder}, "no committed checkpoint"),
        (tmp_path / "none", {}, "no committed checkpoint"),
        (7, {}, "directory=7"),
    ]
    for source, given, text in cases:
        with pytest.raises(errors.CheckpointError, match=text):
            import_hf(source, tmp_path / "no", **{"parallel": Parallel("mcore_te"), **given})
    files = []
    for number in range(2):
        files.append(tmp_path / f"rank{number}.safetensors")
        save_file({n: t.contiguous() for n, t in ref.mcore(state, 2, 0).items()}, files[-1])
    with pytest.raises(errors.CheckpointError, match="copy of another rank"):
        import_hf(
            files, tmp_path / "no", Parallel("mcore_te"), config=folder, source=Parallel(tp=2)
        )
    assert not (tmp_path / "no").exists()
