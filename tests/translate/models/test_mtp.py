"""Layers that predict further tokens (multi-token prediction): kept or left out, as asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import smckpt
from smckpt import Adapter, ExportOptions, ImportOptions, Parallel, errors, export_hf
from smckpt.cli.app import app
from smckpt.translate import import_hf, verify_hf
from smckpt.translate.config import ModelConfig
from smckpt.translate.prediction import beyond_model
from tests.support.launch import run_ranks
from tests.support.models import families
from tests.support.models import next_families as ref
from tests.support.models.references import each_rank, on_disk
from tests.translate.layouts.test_families import PADDED, State, same, written

FAMILIES = ("deepseek_v3", "glm4_moe", "qwen3_next")
LAYERS = "num_nextn_predict_layers"
Release = Callable[..., tuple[Any, State, State, Path]]


def source_of(family: str) -> Any:
    return ref if family in ref.FAMILIES else families


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> Release:
    """A release with such layers: the model, its state, the layers' state, the directory."""

    @cache
    def made(family: str, count: int = 1) -> tuple[Any, State, State, Path]:
        folder = tmp_path_factory.mktemp(family)
        model = source_of(family).model(family)
        state = on_disk(model, folder)
        more = ref.further(family, state, count)
        save_file({**state, **more}, folder / "model.safetensors")
        said = {} if family == "qwen3_next" else {LAYERS: count}
        with_config(folder, **said)
        return model, state, more, folder

    return made


def with_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, **changes}))


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def cuts_of(
    family: str, state: State, more: State, t: int, ep: int, local: bool = False
) -> list[State]:
    source = source_of(family)
    return each_rank(
        lambda r, e: source.mcore(family, state, t, r, ep, e, local=local)
        | ref.mcore_further(family, more, t, r, ep, e, local=local),
        t, ep,
    )  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("layout", "t", "ep"), [("mcore_te", 2, 2), ("mcore_local", 2, 1)])
def test_layers_that_are_kept_are_megatrons_mtp(tmp_path, release, judged, family, layout, t, ep):
    _, state, more, folder = release(family)
    cuts = cuts_of(family, state, more, t, ep, layout == "mcore_local")
    done = import_hf(
        folder,
        tmp_path / "ranks",
        Parallel(layout, tp=t, ep=ep),
        prefix="",
        options=ImportOptions(mtp="keep"),
    )
    assert done.notes == () and config_of(tmp_path / "ranks")[LAYERS] == 1
    for name, cut in zip(done.files, cuts, strict=True):
        found = load_file(tmp_path / "ranks" / name)
        assert found.keys() == cut.keys()
        names = [n for n in cut if not n.endswith(PADDED)]
        assert [n for n in names if not torch.equal(found[n], cut[n])] == []
    whole = {**state, **more}
    for source, degrees in (
        (tmp_path / "ranks", {}), (written(tmp_path / "in", cuts), {"tp": t, "ep": ep}),
    ):  # fmt: skip
        out = tmp_path / f"hf{len(degrees)}"
        report = export_hf(
            source,
            out,
            config=folder,
            options=ExportOptions(mtp="keep"),
            parallel=Parallel(**degrees),
        )
        assert report.layout == layout and report.notes == ()
        assert same(load_file(out / "model.safetensors"), whole)
        assert config_of(out)[LAYERS] == 1
    assert verify_hf(out, against=tmp_path / "ranks", prefix="").problems == ()
    with_config(out, **{LAYERS: 0})
    if family != "qwen3_next":  # whose layers transformers leaves out without a word
        (problem,) = verify_hf(out).problems
        assert "unexpected_keys" in problem and "model.layers.2" in problem
    judged(family, f"{layout}, MTP", exports=["formulas"], imports=["formulas"], at=f"{t}×{ep}")


@pytest.mark.parametrize("family", FAMILIES)
def test_by_default_they_are_left_out_and_the_report_says_so(tmp_path, release, family):
    _, state, more, folder = release(family)
    cuts = cuts_of(family, state, more, 2, 1)
    report = export_hf(
        written(tmp_path / "in", cuts), tmp_path / "hf", parallel=Parallel(tp=2), config=folder
    )
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), state)
    assert len(report.notes) == 1 and "that predict further tokens are left out" in report.notes[0]
    assert config_of(tmp_path / "hf").get(LAYERS, 0) == 0
    done = import_hf(folder, tmp_path / "ranks", Parallel("mcore_te", tp=2), prefix="")
    assert f"{len(more)} tensors of layers that predict further tokens" in done.notes[0]
    assert config_of(tmp_path / "ranks").get(LAYERS, 0) == 0
    assert not any("mtp." in n for n in load_file(tmp_path / "ranks" / done.files[0]))


def test_two_layers_are_numbered_on(tmp_path, release):
    _, state, more, folder = release("deepseek_v3", 2)
    cuts = cuts_of("deepseek_v3", state, more, 2, 1)
    assert any(name.startswith("mtp.layers.1.") for name in cuts[0])
    export_hf(
        written(tmp_path / "in", cuts),
        tmp_path / "hf",
        parallel=Parallel(tp=2),
        config=folder,
        options=ExportOptions(mtp="keep"),
    )
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), {**state, **more})
    assert config_of(tmp_path / "hf")[LAYERS] == 2


# -- checkpoints by released names -----------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_checkpoint_keeps_them_bitwise(tmp_path, release, judged, family):
    """Also where the model itself has its names in memory."""
    model, state, more, folder = release(family)
    for number, own in enumerate((state, model.state_dict())):
        smckpt.save({"model": {**own, **more}}, checkpoint_id=str(tmp_path / f"{number}"))
        kept, left = tmp_path / f"kept{number}", tmp_path / f"left{number}"
        report = export_hf(
            tmp_path / f"{number}", kept, config=folder, options=ExportOptions(mtp="keep")
        )
        assert same(load_file(kept / "model.safetensors"), {**state, **more})
        assert report.notes == () and report.naming == "hub" and config_of(kept)[LAYERS] == 1
        report = export_hf(tmp_path / f"{number}", left, config=folder)
        assert same(load_file(left / "model.safetensors"), state)
        assert "left out" in report.notes[0] and config_of(left).get(LAYERS, 0) == 0
    judged(family, "plain, MTP", exports=["save_pretrained"])


def test_what_they_share_with_the_model_may_be_missing_in_a_plain_checkpoint(tmp_path, release):
    _, state, more, folder = release("glm4_moe")
    own = {n: t for n, t in more.items() if "embed_tokens" not in n and "shared_head.head" not in n}
    smckpt.save({"model": {**state, **own}}, checkpoint_id=str(tmp_path / "saved"))
    export_hf(tmp_path / "saved", tmp_path / "hf", config=folder, options=ExportOptions(mtp="keep"))
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), {**state, **own})


def saved_by_a_rank(folder: str, more: State, out: str) -> None:
    """FSDP2: the model, and beside it the further layers, sharded on the same mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    own = {n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in more.items()}
    smckpt.save({"model": {**model.state_dict(), **own}}, checkpoint_id=out, step=1)


@pytest.mark.long
def test_a_checkpoint_of_fsdp2_keeps_them_bitwise(tmp_path, release, judged):
    _, state, more, folder = release("deepseek_v3")
    run_ranks(saved_by_a_rank, 2, str(folder), more, str(tmp_path / "saved"))
    checkpoint = smckpt.latest_checkpoint(tmp_path / "saved")
    report = export_hf(
        checkpoint, tmp_path / "hf", config=folder, options=ExportOptions(mtp="keep")
    )
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), {**state, **more})
    assert report.naming == "hub"
    judged("deepseek_v3", "FSDP2, MTP", exports=["save_pretrained"], at="2")


def test_layers_whose_experts_are_packed_come_out_one_by_one(tmp_path, release):
    model, state, more, folder = release("deepseek_v3")
    at = "model.layers.2.mlp.experts."
    packed = {n: t for n, t in more.items() if not n.startswith(at)}
    each = [[more[f"{at}{e}.{p}_proj.weight"] for p in ("gate", "up", "down")] for e in range(8)]
    packed[f"{at}gate_up_proj"] = torch.stack([torch.cat(three[:2]) for three in each])
    packed[f"{at}down_proj"] = torch.stack([three[2] for three in each])
    smckpt.save({"model": {**model.state_dict(), **packed}}, checkpoint_id=str(tmp_path / "saved"))
    export_hf(tmp_path / "saved", tmp_path / "hf", config=folder, options=ExportOptions(mtp="keep"))
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), {**state, **more})


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_which_has_none_of_them_is_merged(tmp_path, release, family):
    """transformers builds none of these layers, so PEFT adapts none."""
    import peft
    from transformers import AutoModelForCausalLM

    *_, more, folder = release(family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = peft.LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    report = export_hf(
        tmp_path / "adapter", tmp_path / "hf", adapter=Adapter(lora="merge", base=folder)
    )
    assert any(f"{len(more)} tensors of layers that predict" in note for note in report.notes)
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert same({name: stored[name] for name in more}, more)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    wanted = adapted.merge_and_unload().state_dict()
    assert merged.keys() == wanted.keys()
    assert all(torch.allclose(merged[n], wanted[n].float(), atol=1e-6) for n in wanted)


def test_pipeline_stages_have_them_at_the_end(tmp_path, release):
    """Megatron numbers them on their own, beside the layers of the last stage."""
    _, state, more, folder = release("deepseek_v3")
    (whole,) = cuts_of("deepseek_v3", state, more, 1, 1)
    stages: list[State] = [{}, {}]
    for name, tensor in whole.items():
        last = not name.startswith(("embedding.", "decoder.layers.0."))
        own = name.replace("decoder.layers.1.", "decoder.layers.0.")
        stages[last][own] = tensor
    paths = written(tmp_path / "in", stages)
    export_hf(
        paths,
        tmp_path / "hf",
        parallel=Parallel(pp=2),
        config=folder,
        options=ExportOptions(mtp="keep"),
    )
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), {**state, **more})
    export_hf(paths, tmp_path / "left", parallel=Parallel(pp=2), config=folder)
    assert same(load_file(tmp_path / "left" / "model.safetensors"), state)


def test_the_command_keeps_them_on_request(tmp_path, release):
    _, state, more, folder = release("glm4_moe")
    run = partial(CliRunner().invoke, app, catch_exceptions=False)
    ranks, hf = str(tmp_path / "ranks"), str(tmp_path / "hf")
    given = ["--layout", "mcore_te", "--tp", "2", "--mtp", "keep"]
    assert run(["import", str(folder), ranks, *given]).exit_code == 0
    assert run(["export", ranks, hf, "--config", ranks, "--mtp", "keep"]).exit_code == 0
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), {**state, **more})


# -- what is refused, and what is seen -------------------------------------------------------------


def test_faults_of_such_layers_are_refused(tmp_path, release):
    _, state, more, folder = release("deepseek_v3")
    at = "model.layers.2."

    def imported(number: int, changes: State, without: str = "", **config: Any) -> None:
        path = tmp_path / f"{number}"
        path.mkdir()
        (path / "config.json").write_bytes((folder / "config.json").read_bytes())
        with_config(path, **config)
        whole = {n: t for n, t in {**state, **more, **changes}.items() if n != without}
        save_file(whole, path / "model.safetensors")
        import_hf(
            path,
            tmp_path / f"ranks{number}",
            Parallel("mcore_te", tp=2),
            options=ImportOptions(mtp="keep"),
        )

    other = {f"{at}embed_tokens.weight": more[f"{at}embed_tokens.weight"] + 1}
    with pytest.raises(errors.TensorMismatchError, match=r"should be copies .*2.embed_tokens"):
        imported(0, other)
    with pytest.raises(errors.KeysMismatchError, match=r"missing .*layers.2.hnorm"):
        imported(1, {}, f"{at}hnorm.weight")
    with pytest.raises(errors.TensorMismatchError, match=r"eh_proj.weight .*\(128, 64\)"):
        imported(2, {f"{at}eh_proj.weight": more[f"{at}eh_proj.weight"].T.contiguous()})
    with pytest.raises(errors.KeysMismatchError, match=f"there are 1 layers .*{LAYERS}=2"):
        imported(3, {}, **{LAYERS: 2})
    with pytest.raises(errors.UsageError, match="there are no layers that predict"):
        imported(4, {}, **{LAYERS: 0})


def test_what_cannot_be_kept_is_refused_by_name(tmp_path, release, hub_model):
    _, state, _, folder = release("deepseek_v3")
    with pytest.raises(errors.UsageError, match="mtp='both'"):
        import_hf(folder, tmp_path / "a", Parallel("mcore_te"), options=ImportOptions(mtp="both"))
    with pytest.raises(errors.KeysMismatchError, match="no row for .*mtp_join"):
        import_hf(
            folder,
            tmp_path / "b",
            Parallel(rows_of_the_model_alone()),
            options=ImportOptions(mtp="keep"),
        )
    smckpt.save({"model": state}, checkpoint_id=str(tmp_path / "saved"))
    with pytest.raises(errors.UsageError, match="there are no layers that predict"):
        export_hf(
            tmp_path / "saved", tmp_path / "c", config=folder, options=ExportOptions(mtp="keep")
        )
    other = hub_model("qwen2_moe")
    smckpt.save({"model": other.state_dict()}, checkpoint_id=str(tmp_path / "other"))
    with pytest.raises(errors.UsageError, match="no table of layers of qwen2_moe"):
        export_hf(
            tmp_path / "other",
            tmp_path / "d",
            config=other.config,
            options=ExportOptions(mtp="keep"),
        )


def rows_of_the_model_alone() -> Any:
    from dataclasses import replace

    from smckpt.translate.tables.layouts import get_layout

    layout = get_layout("mcore_te", "deepseek_v3")
    return replace(layout, rows=tuple(row for row in layout.rows if not row.predicts))


@pytest.fixture(scope="module")
def hub_model() -> Callable[[str], Any]:
    return cache(families.model)


def test_a_layer_too_many_of_the_model_itself_is_no_such_layer(tmp_path, release):
    """Not even where they would be left out: the config is wrong."""
    _, state, _, folder = release("deepseek_v3")
    smckpt.save({"model": state}, checkpoint_id=str(tmp_path / "saved"))
    config = {**config_of(folder), "num_hidden_layers": 1}
    with pytest.raises(errors.KeysMismatchError, match=r"model.layers.1.* is unexpected"):
        export_hf(tmp_path / "saved", tmp_path / "hf", config=config)


@pytest.mark.parametrize("fault", ["swapped", "shape", "strange"])
def test_a_plain_checkpoint_with_faulty_layers(tmp_path, release, fault):
    _, state, more, folder = release("glm4_moe")
    at = "model.layers.2."
    own = dict(more)
    if fault == "swapped":
        own[f"{at}enorm.weight"], own[f"{at}hnorm.weight"] = (
            more[f"{at}hnorm.weight"], more[f"{at}enorm.weight"],
        )  # fmt: skip
    elif fault == "shape":
        own[f"{at}eh_proj.weight"] = more[f"{at}eh_proj.weight"][:, :64].contiguous()
    else:
        own[f"{at}mlp.experts.9.up_proj.weight"] = torch.ones(48, 64)
    smckpt.save({"model": {**state, **own}}, checkpoint_id=str(tmp_path / "saved"))
    if fault == "swapped":  # of one shape: only a comparison sees it
        problems = verify_hf(folder, against=tmp_path / "saved").problems
        differ = [text for text in problems if "differs from the checkpoint" in text]
        assert len(differ) == 2 and all("norm.weight" in text for text in differ)
        return
    with pytest.raises(errors.KeysMismatchError, match="not layers of a glm4_moe model"):
        export_hf(
            tmp_path / "saved", tmp_path / "hf", config=folder, options=ExportOptions(mtp="keep")
        )


@pytest.mark.parametrize("kept", [True, False])
def test_verification_compares_them_where_both_sides_have_them(tmp_path, release, kept):
    _, state, more, folder = release("deepseek_v3")
    import_hf(
        folder,
        tmp_path / "ranks",
        Parallel("mcore_te", tp=2),
        options=ImportOptions(mtp="keep" if kept else "drop"),
    )
    report = verify_hf(folder, against=tmp_path / "ranks")
    assert report.compared == len(state) + len(more) * kept
    assert [text for text in report.problems if "checkpoint" in text] == []


def test_layers_of_another_stack_are_no_layers_that_predict_further_tokens() -> None:
    """Such as a decoder's, or a tower's, of which there are more than the config says of layers."""
    settings = ModelConfig({"model_type": "blenderbot", "num_hidden_layers": 2}, None)
    assert not beyond_model("model.decoder.layers.2.self_attn.q_proj.weight", settings)
    values = {"model_type": "deepseek_v3", "num_hidden_layers": 61, LAYERS: 1}
    names = {n: f"model.layers.{n}.eh_proj.weight" for n in range(60, 64)}
    further = [n for n, name in names.items() if beyond_model(name, ModelConfig(values, None))]
    assert further == [61]
    assert beyond_model("mtp.layers.0.self_attn.q_proj.weight", None)
