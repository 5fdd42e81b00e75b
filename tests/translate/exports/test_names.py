"""Exports have the names of released models, whatever transformers calls the tensors in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import distributed as dist
from transformers import StableLmConfig, StableLmForCausalLM

import smckpt
from smckpt import LOCAL, SHARDED, ExportOptions, Parallel, errors, export_hf, sm_state_dict_type
from smckpt.decoding import decode
from smckpt.translate import import_hf
from smckpt.translate.exports.verify_hf import verify_hf
from smckpt.translate.models import comparison, meta_model
from tests.support import child, interpreters
from tests.support.launch import run_ranks
from tests.support.limits import seconds
from tests.support.models import hub_families, judges

SAMPLE = ("gpt_neox", "deepseek_v3", "qwen2_moe", "phimoe", "jamba", "gemma3", "llava")
WRAPPED = ("gpt_neox", "qwen2_moe")
LOADS = """
import json, sys
from pathlib import Path
import torch, transformers
transformers.utils.logging.disable_progress_bar()
found = {"version": transformers.__version__}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    wanted = torch.load(folder / "logits.pt")
    kind = (folder / "class").read_text()
    try:
        model, info = getattr(transformers, kind).from_pretrained(
            folder / "hf", output_loading_info=True, dtype=torch.float32,
            # with the other one, 4 leaves out Gemma 2's soft cap; 5 knows
            attn_implementation="eager" if folder.name == "gemma2" else None,
        )
        with torch.no_grad():
            made = model.eval()(input_ids=wanted["tokens"]).logits
        apart = (made - wanted["logits"]).abs().max().item()
        lists = {name: sorted(map(str, names)) for name, names in info.items() if names}
        found[folder.name] = {"lists": lists, "apart": apart}
    except Exception as error:
        found[folder.name] = {"error": repr(error)}
print(json.dumps(found))
"""


def released(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """As transformers itself writes it, but for a prefix of vision towers, which it leaves out of
    models that were not loaded from a release, and for the experts of Qwen3-VL-MoE, which it leaves
    in the order in memory: transformers 4 and servers take that of the release."""
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    if model.config.model_type == "qwen3_vl_moe":
        state = {n: t.mT.contiguous() if ".mlp.experts." in n else t for n, t in state.items()}
    return {n.replace("vision_tower.", "vision_tower.vision_model."): t for n, t in state.items()}


def assert_same(directory: Path, wanted: dict[str, torch.Tensor]) -> None:
    found = load_file(directory / "model.safetensors")
    assert sorted(found) == sorted(wanted)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def saved(folder: Path, state: Any) -> str:
    smckpt.save({"model": state}, checkpoint_id=str(folder), step=1)
    return smckpt.latest_checkpoint(folder)


def exported(family: str, folder: Path) -> None:
    """Export a plain save, hold its names against other projects' lists (`support/judges.py`), and
    leave beside it what the model computes."""
    model = hub_families.model(family)
    checkpoint = saved(folder / "checkpoint", model.state_dict())
    report = export_hf(checkpoint, folder / "hf", config=model.config)
    assert report.naming == "hub"
    wanted = released(model, folder / "released")
    assert_same(folder / "hf", wanted)
    said = judges.problems(family, wanted)
    assert {name: problems for name, problems in said.items() if problems} == {}, family
    logits = {"tokens": hub_families.TOKENS, "logits": hub_families.logits(model)}
    torch.save(logits, folder / "logits.pt")
    (folder / "class").write_text(type(model).__name__)


def assert_loads(python: str, root: Path, version: str, families: tuple[str, ...]) -> None:
    told = interpreters.run(python, "-c", LOADS, root, timeout=800)
    found = json.loads(told.splitlines()[-1])
    assert found.pop("version").startswith(version)
    wrong = {
        family: made for family, made in found.items()
        if "error" in made or made["lists"] or not made["apart"] <= 1e-5
    }  # fmt: skip
    assert wrong == {}
    assert set(found) == set(families)


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    root: Path = tmp_path_factory.mktemp("sample")
    for family in SAMPLE:
        exported(family, root / family)
    return root


def test_a_plain_save_comes_out_as_transformers_writes_it_and_loads_in_transformers_4(
    sample, judged
):
    assert_loads(interpreters.transformers4(), sample, "4.", SAMPLE)
    for family in SAMPLE:
        say(judged, family, "transformers 4")


def say(judged: Any, family: str, *more: str) -> None:
    """What `exported` compared, and more."""
    called = {"llama.cpp": "llama.cpp", "sglang": "SGLang", "vllm": "vLLM", "released": "release"}
    lists = [called[name] for name in judges.problems(family, ())]
    judged(family, "its own names, plain", exports=["save_pretrained", *lists, *more])


@pytest.mark.parametrize("family", SAMPLE)
def test_the_export_is_the_checkpoint_and_has_released_names(sample, family):
    checkpoint = smckpt.latest_checkpoint(sample / family / "checkpoint")
    report = verify_hf(sample / family / "hf", against=checkpoint)
    assert report.problems == () and report.compared == report.tensors > 0


@pytest.mark.parametrize("kind", ["AutoModel", "AutoModelForSequenceClassification"])
def test_experts_of_a_class_with_another_head_or_none_come_out_as_transformers_writes_them(
    tmp_path, kind
):
    """In memory all experts of a layer are one tensor, and no table is of such a class."""
    model = getattr(transformers, kind).from_config(hub_families.model("qwen3_moe").config)
    model.save_pretrained(tmp_path / "wanted")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    export_hf(tmp_path / "model.pt", tmp_path / "hf", config=tmp_path / "wanted")
    assert_same(tmp_path / "hf", load_file(tmp_path / "wanted" / "model.safetensors"))


@pytest.mark.parametrize("family", ["gemma3", "llava"])
def test_what_transformers_saves_of_a_model_that_was_never_loaded_gets_released_names(
    tmp_path, family
):
    """It leaves out a prefix then, which releases have."""
    wanted = released(hub_families.model(family), tmp_path / "saved")
    export_hf(tmp_path / "saved", tmp_path / "hf")
    assert_same(tmp_path / "hf", wanted)


def test_names_in_memory_are_written_on_request_and_verification_names_them(tmp_path, sample):
    checkpoint = smckpt.latest_checkpoint(sample / "qwen2_moe" / "checkpoint")
    model = hub_families.model("qwen2_moe")
    report = export_hf(
        checkpoint, tmp_path / "hf", config=model.config, options=ExportOptions(naming="module")
    )
    assert report.naming == "module"
    assert_same(tmp_path / "hf", model.state_dict())
    (problem,) = verify_hf(tmp_path / "hf").problems
    assert "released models" in problem and "mlp.experts.gate_up_proj" in problem
    against = verify_hf(tmp_path / "hf", against=checkpoint).problems
    lacks = [text for text in against if text.startswith("only the checkpoint has")]
    assert any(text.endswith("experts.3.up_proj.weight") for text in lacks)


def test_without_a_config_the_names_stay_and_the_report_says_so(tmp_path, sample):
    checkpoint = smckpt.latest_checkpoint(sample / "phimoe" / "checkpoint")
    report = export_hf(checkpoint, tmp_path / "hf")
    assert report.naming == "module" and "no config was given" in report.notes[0]


def test_another_naming_is_refused(tmp_path, sample):
    checkpoint = smckpt.latest_checkpoint(sample / "phimoe" / "checkpoint")
    with pytest.raises(errors.UsageError, match="naming='disk'"):
        export_hf(checkpoint, tmp_path / "hf", options=ExportOptions(naming="disk"))


@pytest.mark.parametrize(
    ("family", "layout"), [("gpt_neox", "mcore_te"), ("deepseek_v3", "mcore_te")]
)
def test_an_import_takes_what_an_export_wrote(tmp_path, sample, family, layout):
    import_hf(sample / family / "hf", tmp_path / "ranks", Parallel(layout, tp=2))
    model = hub_families.model(family)
    export_hf(smckpt.latest_checkpoint(tmp_path / "ranks"), tmp_path / "hf", config=model.config)
    assert_same(tmp_path / "hf", load_file(sample / family / "hf" / "model.safetensors"))


def test_tensors_that_would_be_used_twice_or_not_at_all_are_refused(tmp_path, monkeypatch):
    """The proof, and not trust in transformers' conversion, stands before the first byte."""
    model = hub_families.model("minimax")
    checkpoint = saved(tmp_path / "checkpoint", model.state_dict())
    honest = meta_model.hub_shapes

    def swapped(of: Any) -> Any:
        found = honest(of)
        one, two = (f"model.layers.1.block_sparse_moe.experts.{e}.w3.weight" for e in (0, 1))
        found[one] = meta_model.HubTensor(one, found[one].shape, found[two].parts)
        return found

    monkeypatch.setattr(meta_model, "hub_shapes", swapped)
    with pytest.raises(errors.KeysMismatchError, match=r"filled exactly once.*gate_up_proj"):
        export_hf(checkpoint, tmp_path / "hf", config=model.config)
    assert not (tmp_path / "hf").exists()


# -- wrapped models ------------------------------------------------------------------------------


def saved_by_a_rank(families: tuple[str, ...], out: str) -> None:
    """Each family under DDP, FSDP1 and FSDP2."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    wraps = {
        "ddp": DistributedDataParallel,
        "fsdp1": lambda m: FullyShardedDataParallel(
            m, device_id=torch.device("cpu"), use_orig_params=True
        ),
        "fsdp2": fully_shard,
    }
    for family in families:
        for name, wrap in wraps.items():
            model = wrap(hub_families.model(family))
            with sm_state_dict_type(model, LOCAL if name == "fsdp1" else SHARDED):
                state = {"model": model.state_dict()}
            smckpt.save(state, checkpoint_id=f"{out}/{family}/{name}", step=1)
            dist.barrier()


def assert_wrapped(families: tuple[str, ...], root: Path) -> None:
    run_ranks(saved_by_a_rank, 2, families, str(root), timeout=600)
    for family in families:
        model = hub_families.model(family)
        wanted = released(model, root / family / "released")
        for name in ("ddp", "fsdp1", "fsdp2"):
            out = root / family / f"{name}-hf"
            checkpoint = smckpt.latest_checkpoint(root / family / name)
            report = export_hf(checkpoint, out, config=model.config)
            assert report.naming == "hub", (family, name)
            assert_same(out, wanted)


def test_wrapped_models_come_out_as_transformers_writes_them(tmp_path):
    assert_wrapped(WRAPPED, tmp_path)  # the long test below says what it compared


# -- all of them ---------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_family_loads_in_transformers_4_and_5(tmp_path, judged):
    import sys

    families = tuple(hub_families.FAMILIES)
    for family in families:
        exported(family, tmp_path / family)
    assert_loads(sys.executable, tmp_path, "5.", families)
    assert_loads(interpreters.transformers4(), tmp_path, "4.", families)
    for family in families:
        say(judged, family, "transformers 4", "logits")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_converted_family_comes_out_from_every_wrapper(tmp_path, judged):
    assert_wrapped(hub_families.CONVERTED, tmp_path)
    for family in hub_families.CONVERTED:
        judged(family, "its own names: DDP, FSDP1, FSDP2", exports=["save_pretrained"], at="2")


# -- the child process -----------------------------------------------------------------------------


def test_the_child_that_compares_imports_what_it_needs_and_answers_as_this_process():
    """Neither the rest of the translator nor accelerate, which take a sixth of its time."""
    model = hub_families.model("minimax")
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    config = json.loads(json.dumps(config, default=str))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    asked = f"{json.dumps(config)}\n{json.dumps([shapes, False])}\n"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", comparison._CHILD], input=asked,
        capture_output=True, text=True, timeout=seconds(120),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = decode(meta_model.Fit, json.loads(done.stdout.splitlines()[-1]), newer=True)
    assert found == meta_model.compare(config, shapes, False) and found.hub
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "transformers.modeling_utils" in imported
    assert imported.isdisjoint({"accelerate", "smckpt.translate.exports.export", "smckpt.storage"})


BEGINS = """
import json, sys
from smckpt import ExportOptions, errors, export_hf
from smckpt.translate.exports.options import export_group_of_environment
from smckpt.translate.exports.export import Stages
begun, write = [], Stages.write
def counted(stages):
    begun.append(sorted(t.name for t in stages.made.found.targets))
    return write(stages)
Stages.write = counted
checkpoint, out, config, options = sys.argv[1:]
crew = export_group_of_environment(60)
given = json.loads(options)
dtype = given.pop("dtype", None)
try:
    made = export_hf(
        checkpoint, out, config=config, dtype=dtype,
        options=ExportOptions(process_group=crew, **given),
    )
    notes = [note for note in made.notes if "generation_config" not in note]
    told = [len(begun), made.naming, notes]
except errors.KeysMismatchError as error:
    told = [len(begun), "refused", []]
assert crew or not {"torch", "transformers"} & set(sys.modules)
sys.stdout.write(json.dumps(told) + chr(10))  # one text of the ranks' output
"""


def begun(
    folder: Path, model: Any, config: dict[str, Any], *, out: str = "", ranks: int = 1,
    **options: Any,
) -> list[Any]:  # fmt: skip
    """How often fresh processes begin to write an export, and under which names it ends."""
    folder.mkdir()
    smckpt.save({"model": model.state_dict()}, checkpoint_id=folder / "c")
    values = model.config.to_dict() | {"architectures": [type(model).__name__]} | config
    (folder / "config.json").write_text(json.dumps(values, default=str))
    (folder / "begins.py").write_text(BEGINS)
    arguments = [str(folder / "c"), out or str(folder / "hf"), str(folder / "config.json")]
    done = child.script(
        folder / "begins.py", *arguments, json.dumps(options), ranks=ranks, forked=ranks > 1
    )  # a single process says what it has imported
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and told == [told[0]] * ranks, done.stderr
    return told[0]  # type: ignore[no-any-return]


def test_an_export_begins_before_transformers_tells_the_names_and_again_if_they_differ(tmp_path):
    torch.manual_seed(0)
    stablelm = StableLmForCausalLM(
        StableLmConfig(
            vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2,
        )
    )  # fmt: skip
    minimax = hub_families.model("minimax")
    assert begun(tmp_path / "same", stablelm, {}) == [1, "hub", []]
    assert begun(tmp_path / "others", minimax, {}) == [2, "hub", []]
    for folder, model in (("same", stablelm), ("others", minimax)):
        wanted = released(model, tmp_path / folder / "wanted")
        found = load_file(tmp_path / folder / "hf" / "model.safetensors")
        assert sorted(found) == sorted(wanted)
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
        assert not [*(tmp_path / folder / "hf").glob("*.unfinished")]
    unknown = begun(tmp_path / "unknown", stablelm, {"model_type": "own"})
    assert unknown[:2] == [2, "module"] and "the names are those of the state dict" in unknown[2][0]
    wrong = begun(tmp_path / "wrong", stablelm, {"num_hidden_layers": 3})
    assert wrong[1] == "refused" and not (tmp_path / "wrong" / "hf").exists()


@pytest.mark.long
def test_an_export_waits_for_the_names_where_it_could_not_begin_again(tmp_path, s3_root):
    """It would write other dtypes, remove an old model first, write where files that are whole can
    be loaded, or do so with other processes."""
    minimax = hub_families.model("minimax")
    assert begun(tmp_path / "cast", minimax, {}, dtype="bfloat16") == [1, "hub", []]
    assert begun(tmp_path / "over", minimax, {}, overwrite=True) == [1, "hub", []]
    assert begun(tmp_path / "s3", minimax, {}, out=f"{s3_root}/hf") == [1, "hub", []]
    assert begun(tmp_path / "two", minimax, {}, ranks=2) == [1, "hub", []]
