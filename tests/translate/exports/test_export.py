"""Export to Hugging Face: from_pretrained finds every tensor, and the logits are the same."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BloomConfig,
    FalconConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    T5Config,
)

from smckpt import ExportOptions, errors, export_hf
from smckpt.storage import open_storage
from tests.support import child
from tests.support.limits import seconds
from tests.support.models import shards

HOW = {"plain": shards.plain, "fsdp1": shards.fsdp1, "fsdp2": shards.fsdp2, "tp": shards.tp}


def llama(**more: Any) -> Any:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=16, vocab_size=120, rope_theta=5e5, **more,
    )  # fmt: skip
    return scrambled(AutoModelForCausalLM.from_config(config))


def gpt2() -> Any:
    config = GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=120, n_positions=64)
    return scrambled(AutoModelForCausalLM.from_config(config))


def t5() -> Any:
    config = T5Config(
        d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4, vocab_size=120,
        decoder_start_token_id=0,
    )  # fmt: skip
    return scrambled(AutoModelForSeq2SeqLM.from_config(config))


def scrambled(model: Any) -> Any:
    """Fresh biases are zero and norms one: a fault there would not show."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.eval()


def saved(folder: Path, model: Any, how: str = "plain", world: int = 1, **more: Any) -> Path:
    state = model.state_dict()
    return shards.write(folder / "ckpt", world, lambda r: HOW[how](state, r, world), **more)


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(40).reshape(2, 20) % 120
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            return model(input_ids=tokens, decoder_input_ids=tokens[:, :7]).logits
        return model(tokens).logits


def assert_loads_as(model: Any, folder: Path, auto: Any = AutoModelForCausalLM) -> None:
    """The gate: nothing missing, unexpected or mismatched, and the same logits to the bit."""
    again, info = auto.from_pretrained(folder, output_loading_info=True)
    assert {name: list(found) for name, found in info.items()} == {
        "missing_keys": [], "unexpected_keys": [], "mismatched_keys": [], "error_msgs": [],
    }  # fmt: skip
    assert torch.equal(logits(again.eval()), logits(model))


# -- what comes out ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "world"), [("plain", 2), ("fsdp1", 3), ("fsdp2", 2), ("fsdp2", 4), ("tp", 2)]
)
def test_a_llama_saved_in_any_parallelism_loads_with_equal_logits(tmp_path, how, world):
    model = llama()
    report = export_hf(
        saved(tmp_path, model, how, world), tmp_path / "hf", config=model.config,
        options=ExportOptions(max_shard_size="100KB"),
    )  # fmt: skip
    assert len(report.files) > 2 and report.tensors == len(model.state_dict())
    assert_loads_as(model, tmp_path / "hf")


def test_a_tied_gpt2_leaves_its_head_out(tmp_path):
    model = gpt2()
    report = export_hf(saved(tmp_path, model, "fsdp2", 2), tmp_path / "hf", config=model.config)
    assert report.left_out == ("lm_head.weight",)
    assert report.files == ("model.safetensors",)
    assert_loads_as(model, tmp_path / "hf")


def test_a_t5_stores_its_shared_embedding_once(tmp_path):
    model = t5()
    report = export_hf(saved(tmp_path, model, "fsdp1", 2), tmp_path / "hf", config=model.config)
    assert set(report.left_out) == {
        "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight",
    }  # fmt: skip
    assert_loads_as(model, tmp_path / "hf", AutoModelForSeq2SeqLM)


def test_an_untied_head_is_kept(tmp_path):
    model = llama(tie_word_embeddings=False)
    report = export_hf(saved(tmp_path, model), tmp_path / "hf", config=model.config)
    assert report.left_out == ()
    assert_loads_as(model, tmp_path / "hf")


def test_tied_names_that_differ_are_refused(tmp_path):
    state = {**llama().state_dict()}
    checkpoint = shards.write(tmp_path / "c", 1, lambda r: shards.plain(state, r, 1))
    config = llama(tie_word_embeddings=True).config
    with pytest.raises(errors.TensorMismatchError, match=r"lm_head\.weight"):
        export_hf(checkpoint, tmp_path / "hf", config=config)
    assert not (tmp_path / "hf").exists()


def test_bytes_are_those_of_the_state_dict_for_every_dtype(tmp_path):
    torch.manual_seed(0)
    state = {
        "a.bf16": torch.randn(7, 9).bfloat16(), "a.fp16": torch.randn(3, 2, 5).half(),
        "a.fp32": torch.randn(11), "a.fp64": torch.randn(2, 2).double(),
        "a.int": torch.arange(6).reshape(2, 3), "a.bool": torch.tensor([True, False, True]),
        "a.fp8": torch.randn(4, 4).to(torch.float8_e4m3fn), "a.scalar": torch.tensor(3.5),
        "a.empty": torch.zeros(0, 4),
    }  # fmt: skip
    checkpoint = shards.write(tmp_path / "c", 2, lambda r: shards.fsdp2(state, r, 2))
    export_hf(checkpoint, tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert found[name].flatten().view(torch.uint8).equal(tensor.flatten().view(torch.uint8))


def test_a_tensor_larger_than_a_chunk_and_a_shard_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("smckpt.translate.stream.CHUNK", 8192)
    state = {"w": torch.randn(301, 97), "v": torch.randn(5)}
    checkpoint = shards.write(tmp_path / "c", 3, lambda r: shards.fsdp1(state, r, 3))
    seen: list[tuple[int, int]] = []
    tell = lambda done, total: seen.append((done, total))  # noqa: E731
    options = ExportOptions(max_shard_size=20_000, threads=3, progress=tell)
    report = export_hf(checkpoint, tmp_path / "hf", options=options)
    assert len(report.files) == 2
    found = {k: v for f in report.files for k, v in load_file(tmp_path / "hf" / f).items()}
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)
    assert seen[-1] == (report.nbytes, report.nbytes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cast_is_torchs_and_the_config_says_so(tmp_path, dtype):
    model = llama()
    export_hf(saved(tmp_path, model, "fsdp1", 2), tmp_path / "hf", config=model.config, dtype=dtype)
    found = load_file(tmp_path / "hf" / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor.to(getattr(torch, dtype)))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == dtype
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert again.dtype == getattr(torch, dtype)


def test_integers_are_never_cast(tmp_path):
    state = {"w": torch.randn(4), "ids": torch.arange(5)}
    checkpoint = shards.write(tmp_path / "c", 1, lambda r: shards.plain(state, r, 1))
    export_hf(checkpoint, tmp_path / "hf", dtype="bfloat16")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert (found["w"].dtype, found["ids"].dtype) == (torch.bfloat16, torch.int64)


def test_a_value_beyond_float16_is_refused_by_name_and_leaves_nothing(tmp_path):
    state = {"fine": torch.ones(3), "huge": torch.tensor([1.0, 1e6])}
    checkpoint = shards.write(tmp_path / "c", 1, lambda r: shards.plain(state, r, 1))
    with pytest.raises(errors.UsageError, match=r"huge.*1000000"):
        export_hf(checkpoint, tmp_path / "hf", dtype="float16")
    assert list((tmp_path / "hf").glob("*")) == []


def test_the_index_and_headers_are_what_transformers_expects(tmp_path):
    model = llama()
    report = export_hf(
        saved(tmp_path, model),
        tmp_path / "hf",
        config=model.config,
        options=ExportOptions(max_shard_size="100KB"),
    )
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.nbytes
    assert index["weight_map"].keys() == model.state_dict().keys()
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "hf" / file, "np") as opened:
            assert name in opened.keys()  # noqa: SIM118
            assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize("kind", [GPT2Config, OPTConfig, BloomConfig, FalconConfig])
def test_a_head_is_tied_by_default_where_the_families_config_does_not_say_it(tmp_path, kind):
    """The releases' configs leave the key out. transformers 4 would put the embedding in the place
    of a head that differs, without a word."""
    config = kind(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
    said = {k: v for k, v in config.to_dict().items() if k != "tie_word_embeddings"}
    state = {**AutoModelForCausalLM.from_config(config).state_dict()}
    checkpoint = shards.write(tmp_path / "c", 1, lambda r: shards.plain(state, r, 1))
    assert export_hf(checkpoint, tmp_path / "hf", config=said).left_out == ("lm_head.weight",)
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    checkpoint = shards.write(tmp_path / "d", 1, lambda r: shards.plain(state, r, 1))
    with pytest.raises(errors.TensorMismatchError, match=r"lm_head\.weight"):
        export_hf(checkpoint, tmp_path / "no", config=said)


def test_tokenizer_and_generation_settings_are_copied_from_the_configs_directory(tmp_path):
    model = llama()
    source = tmp_path / "source"
    model.config.save_pretrained(source)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (source / name).write_text('{"made": "up"}')
    export_hf(saved(tmp_path, model), tmp_path / "hf", config=source)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (source / name).read_bytes()
    assert AutoConfig.from_pretrained(tmp_path / "hf").rope_parameters["rope_theta"] == 5e5


# -- where the model stands -------------------------------------------------------------------


def test_a_tokenizers_files_are_all_written_and_all_removed_if_the_export_fails(tmp_path, s3_root):
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}  # one in a folder
    model = llama()
    checkpoint = saved(tmp_path, model)
    given: dict[str, Any] = {"config": model.config, "tokenizer": tokenizer}
    export_hf(checkpoint, tmp_path / "hf", **given)
    again = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert again.chat_template == tokenizer.chat_template
    export_hf(checkpoint, f"{s3_root}/hf", **given)
    folder = open_storage(f"{s3_root}/hf/additional_chat_templates")
    assert folder.names() == ["tool_use.jinja"]
    with torch.no_grad():
        model.lm_head.weight[0] = float("nan")
    for _ in range(2):
        with pytest.raises(errors.UsageError, match="NaN or infinite"):
            export_hf(saved(tmp_path / "bad", model), tmp_path / "no", **given)
        assert not (tmp_path / "no").exists()


def test_an_overwritten_directory_keeps_nothing_of_an_older_tokenizer(tmp_path):
    model, hf = llama(), tmp_path / "hf"
    checkpoint = saved(tmp_path, model)
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    old, new = (PreTrainedTokenizerFast(tokenizer_object=words) for _ in range(2))
    old.chat_template = {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    export_hf(checkpoint, hf, config=model.config, tokenizer=old)
    (hf / "README.md").write_text("mine")
    export_hf(
        checkpoint, hf, config=model.config, options=ExportOptions(overwrite=True)
    )  # none is given: the old stays
    assert AutoTokenizer.from_pretrained(hf).chat_template == old.chat_template
    export_hf(
        checkpoint, hf, config=model.config, tokenizer=new, options=ExportOptions(overwrite=True)
    )
    assert AutoTokenizer.from_pretrained(hf).chat_template is None
    assert (hf / "README.md").read_text() == "mine"


def test_an_overwritten_directory_keeps_no_older_settings_of_generation(tmp_path):
    model, hf = llama(bos_token_id=None, eos_token_id=None, pad_token_id=None), tmp_path / "hf"
    checkpoint = saved(tmp_path, model)
    export_hf(checkpoint, hf, config={**model.config.to_dict(), "eos_token_id": 99})
    assert json.loads((hf / "generation_config.json").read_text())["eos_token_id"] == 99
    export_hf(checkpoint, hf, config=model.config, options=ExportOptions(overwrite=True))
    assert not (hf / "generation_config.json").exists()


def _with(folder: Path, **tops: dict[str, torch.Tensor]) -> Path:
    """A checkpoint whose state dict has these top-level keys ("" for none)."""
    return shards.write(
        folder / "ckpt", 1,
        lambda r: [
            held
            for top, state in tops.items()
            for held in shards.plain(state, r, 1, (top,) if top != "flat" else ())
        ],
        optimizers={"optimizer": {"form": "fqn", "ids": []}},
    )  # fmt: skip


def test_optimizer_state_is_not_exported(tmp_path):
    state = {"w": torch.randn(3, 4)}
    moments = {"w.exp_avg": torch.randn(3, 4)}
    checkpoint = _with(tmp_path, net=state, optimizer=moments)
    export_hf(checkpoint, tmp_path / "hf")
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == {"w"}


def test_a_state_dict_that_is_the_model_itself_is_exported_whole(tmp_path):
    state = {"layer.w": torch.randn(3, 4), "layer.b": torch.randn(3)}
    export_hf(_with(tmp_path, flat=state), tmp_path / "hf")
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == state.keys()


def test_two_possible_models_are_refused_and_named(tmp_path):
    checkpoint = _with(tmp_path, actor={"w": torch.randn(3)}, critic={"w": torch.randn(3)})
    with pytest.raises(errors.UsageError, match=r"actor.*critic"):
        export_hf(checkpoint, tmp_path / "hf")
    export_hf(checkpoint, tmp_path / "hf", prefix="critic")
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == {"w"}


def test_a_prefix_that_is_not_there_is_refused_with_what_is(tmp_path):
    with pytest.raises(errors.KeysMismatchError, match="net"):
        export_hf(_with(tmp_path, net={"w": torch.randn(3)}), tmp_path / "hf", prefix="model")


def test_names_that_wrappers_added_are_taken_off(tmp_path):
    state = {"module._orig_mod.layer.w": torch.randn(3), "module._orig_mod.b": torch.randn(2)}
    export_hf(_with(tmp_path, model=state), tmp_path / "hf")
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == {"layer.w", "b"}


def test_a_peft_model_is_refused(tmp_path):
    state = {"base_model.model.q.lora_A.weight": torch.randn(3, 4)}
    with pytest.raises(errors.UsageError, match="PEFT"):
        export_hf(_with(tmp_path, model=state), tmp_path / "hf")


# -- what goes wrong --------------------------------------------------------------------------


def test_a_directory_that_holds_something_is_refused_unless_it_may_be_overwritten(tmp_path):
    first, second = llama(), gpt2()
    out = tmp_path / "hf"
    export_hf(
        saved(tmp_path / "1", first),
        out,
        config=first.config,
        options=ExportOptions(max_shard_size="100KB"),
    )
    other = saved(tmp_path / "2", second)
    with pytest.raises(errors.UsageError, match="not empty"):
        export_hf(other, out, config=second.config)
    assert_loads_as(first, out)
    for name in ("consolidated.00.pth", "consolidated.safetensors", "params.json", "model.h5",
                 "hf_quant_config.json", "quantize_config.json"):  # fmt: skip
        (out / name).write_text("{}")
    export_hf(other, out, config=second.config, options=ExportOptions(overwrite=True))
    assert sorted(p.name for p in out.iterdir()) == [
        "README.md", "config.json", "generation_config.json", "model.safetensors",
    ]  # fmt: skip
    assert_loads_as(second, out)


def test_what_a_killed_export_left_is_named(tmp_path):
    model, out = llama(), tmp_path / "hf"
    path = saved(tmp_path / "1", model)
    out.mkdir()
    # in a store, files have their names from the beginning, and the index is last
    for left in ("model-00001-of-00003.safetensors", "model.safetensors.unfinished"):
        (out / left).write_bytes(b"half")
        with pytest.raises(errors.UsageError) as caught:
            export_hf(path, out, config=model.config)
        assert f"was killed or still runs left {left}" in str(caught.value)
        assert "overwrite=True" in str(caught.value) and "if none runs" in str(caught.value)
    export_hf(path, out, config=model.config, options=ExportOptions(overwrite=True))
    assert not [*out.glob("*.unfinished")]
    assert_loads_as(model, out)


def test_a_changed_byte_is_reported_with_file_and_offset_and_nothing_is_left(tmp_path):
    state = {f"w{i}": torch.randn(3 << 17) for i in range(3)}  # 1.5 MiB each
    checkpoint = shards.write(tmp_path / "c", 1, lambda r: shards.plain(state, r, 1))
    (victim,) = shards.files(checkpoint)
    shards.flip(victim, victim.stat().st_size - 5)
    seen: list[int] = []
    with pytest.raises(errors.CorruptCheckpointError, match="bytes 4194304 to") as caught:
        export_hf(
            checkpoint,
            tmp_path / "hf",
            options=ExportOptions(
                max_shard_size="2MB", threads=1, progress=lambda done, total: seen.append(done)
            ),
        )
    assert victim.name in str(caught.value)
    assert len(seen) == 2  # two files were written, and are gone again
    assert list((tmp_path / "hf").glob("*")) == []


def test_no_checkpoint_is_told_before_anything_is_made(tmp_path):
    with pytest.raises(errors.CheckpointNotFoundError):
        export_hf(tmp_path / "nothing", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    point = tmp_path / "small"
    point.mkdir()
    if os.geteuid() or os.system(f"mount -t tmpfs -o size=4m tmpfs {point} 2>/dev/null"):
        pytest.skip("mounting a small tmpfs needs root")
    yield point
    os.system(f"umount -l {point}")


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(tmp_path, small_disk):
    state = {"w": torch.zeros(1 << 20)}
    checkpoint = shards.write(tmp_path / "c", 1, lambda r: shards.plain(state, r, 1))
    with pytest.raises(errors.StorageError, match=r"4,198,400 bytes, but only [\d,]+ are free"):
        export_hf(checkpoint, small_disk / "hf")
    assert not (small_disk / "hf").exists()


def test_a_disk_that_fills_while_writing_leaves_nothing(tmp_path):
    state = {f"w{i}": torch.ones(1 << 18) for i in range(4)}
    checkpoint = shards.write(tmp_path / "c", 1, lambda r: shards.plain(state, r, 1))
    # A file may have 1.5 MB here: the second of the files is refused by the kernel.
    code = """
    import resource, signal, sys
    from smckpt import ExportOptions, errors, export_hf
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 19, 3 << 19))
    try:
        export_hf(sys.argv[1], sys.argv[2], options=ExportOptions(max_shard_size=sys.argv[3]))
    except errors.StorageError as error:
        print("refused")
    """
    out = tmp_path / "hf"
    assert child.run(code, str(checkpoint), str(out), "2MiB") == "refused"
    assert list((out).glob("*")) == []


@pytest.mark.parametrize("max_shard_size", ["5GB", "60KB"])
def test_an_export_that_is_killed_leaves_nothing_that_loads(tmp_path, max_shard_size):
    model = llama()
    checkpoint = saved(tmp_path, model, "fsdp1", 2)
    (tmp_path / "config").mkdir()
    model.config.save_pretrained(tmp_path / "config")
    code = """
    import sys
    from smckpt import ExportOptions, export_hf
    def stop(done, total):
        if done > total / 2:
            print("half", flush=True)
            sys.stdin.read()
    export_hf(sys.argv[1], sys.argv[2], config=sys.argv[3], options=ExportOptions(
        max_shard_size=sys.argv[4], threads=1, progress=stop, against_model=False))
    """
    out = tmp_path / "hf"
    process = subprocess.Popen(
        child.command(code, str(checkpoint), str(out), str(tmp_path / "config"), max_shard_size),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    process.kill()
    process.wait(seconds(30))
    assert os.listdir(out)  # it was under way
    model.config.save_pretrained(out)  # the weights alone must keep it from loading
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(out)
    export_hf(
        checkpoint,
        out,
        config=model.config,
        options=ExportOptions(max_shard_size=max_shard_size, overwrite=True),
    )
    assert_loads_as(model, out)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("dtype", "float8"), ("config", 7), ("tokenizer", 7), ("options", 7),
    ],
)  # fmt: skip
def test_an_argument_that_makes_no_sense_is_refused_by_name(tmp_path, argument, value):
    checkpoint = _with(tmp_path, model={"w": torch.randn(3)})
    with pytest.raises(errors.UsageError, match=argument):
        export_hf(checkpoint, tmp_path / "hf", **{argument: value})
    assert not (tmp_path / "hf").exists()


# -- what it needs ----------------------------------------------------------------------------


def test_neither_torch_nor_transformers_is_imported(tmp_path):
    checkpoint = _with(tmp_path, model={"w": torch.randn(3)})
    code = """
    import sys
    from smckpt import ExportOptions, export_hf
    export_hf(sys.argv[1], sys.argv[2], dtype="bfloat16", config={"model_type": "llama"},
              options=ExportOptions(against_model=False, naming="module"))
    print(sorted({"torch", "transformers"} & set(sys.modules)))
    """
    assert child.run(code, str(checkpoint), str(tmp_path / "hf")) == "[]"


def test_memory_stays_at_a_few_chunks_whatever_the_size_of_a_tensor(tmp_path):
    state = {"w": torch.ones(96 << 20, dtype=torch.bfloat16)}  # 192 MiB in one tensor
    checkpoint = shards.write(tmp_path / "c", 2, lambda r: shards.fsdp2(state, r, 2))
    code = """
    import resource, sys
    from smckpt import ExportOptions, export_hf
    import numpy, smckpt.translate.stream
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    export_hf(sys.argv[1], sys.argv[2], dtype="float32", options=ExportOptions(threads=2))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    kibibytes = int(child.run(code, str(checkpoint), str(tmp_path / "hf"), timeout=120))
    assert kibibytes < 120 << 10
    found = np.memmap(tmp_path / "hf" / "model.safetensors", np.float32, "r")
    assert (found[-1], found.nbytes > 384 << 20) == (1.0, True)
