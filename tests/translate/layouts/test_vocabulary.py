"""Padding of the vocabulary is what trainers round up to, or what the user says, and no row that a
tokenizer uses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from smckpt import (
    Adapter,
    ImportOptions,
    Parallel,
    ParallelState,
    errors,
    export_hf,
    import_hf,
    verify_hf,
)
from smckpt.translate.tables.vocabulary import check_rows, check_tokenizer
from tests.support.models import references as ref
from tests.support.models import shards

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[Path, State]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, ref.on_disk(ref.model("llama"), folder)


def rank_files(folder: Path, state: State, rows: int, t: int = 1) -> list[Path]:
    paths = [folder / f"rank{r}.safetensors" for r in range(t)]
    for r, path in enumerate(paths):
        save_file(ref.mcore(state, t, r, rows=rows), path)
    return paths


def same(folder: Path, state: State) -> bool:
    found = load_file(folder / "model.safetensors")
    return found.keys() == state.keys() and all(torch.equal(found[n], state[n]) for n in state)


@pytest.mark.parametrize(
    ("stored", "size", "tp"),
    [
        (50257, 50257, 1),
        (50304, 50257, 1),  # 128, the default of Megatron-LM and GPT-NeoX
        (50432, 50277, 2),
        (50688, 50257, 1),  # begun at tp 4
        (51200, 50257, 1),  # and at 8
        (50688, 50277, 6),
        (53248, 51201, 16),
        (32064, 32001, 1),  # to 64
        (50260, 50257, 4),  # to the degree
    ],
)
def test_what_trainers_round_up_to_is_padding(stored, size, tp) -> None:
    assert check_rows({"embed": stored, "head": stored}, size, tp, None) == stored


@pytest.mark.parametrize(
    ("stored", "size", "tp", "most"),
    [
        (32000, 31744, 1, 255),
        (50304, 50176, 8, 127),
        (50257, 50256, 1, 0),
        (53248, 52224, 8, 1023),
        (288, 256, 2, 31),
    ],
)
def test_more_rows_than_that_are_refused_unless_they_are_said(stored, size, tp, most) -> None:
    with pytest.raises(errors.TensorMismatchError) as caught:
        check_rows({"embed": stored}, size, tp, None)
    for text in (f"embed has {stored}", f"vocab_size={size}", f"at most {most}.",
                 f"padded_vocab_size={stored}"):  # fmt: skip
        assert text in str(caught.value)
    assert check_rows({"embed": stored}, size, tp, stored) == stored


def test_a_config_that_would_cut_off_rows_is_refused_and_the_user_can_say_otherwise(
    tmp_path, llama
):
    folder, state = llama
    paths = rank_files(tmp_path, state, rows=184, t=2)
    with pytest.raises(errors.TensorMismatchError, match="has 184.*64 more.*vocab_size=120"):
        export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=2), config=folder)
    for given, error, words in (
        (256, errors.TensorMismatchError, "=256, but there are 184.*padded_vocab_size=184"),
        (119, errors.UsageError, "padded_vocab_size=119.*vocab_size=120"),
        ("184", errors.UsageError, "padded_vocab_size='184'.*whole number"),
    ):
        with pytest.raises(error, match=words):
            export_hf(
                paths,
                tmp_path / "hf",
                parallel=Parallel(tp=2, padded_vocab_size=given),
                config=folder,
            )
    assert not (tmp_path / "hf").exists()
    export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=2, padded_vocab_size=184), config=folder)
    assert same(tmp_path / "hf", state)
    for name, rows in (("a", 128), ("b", 120)):  # what needs no word is held to it all the same
        with pytest.raises(errors.TensorMismatchError, match=f"=184, but there are {rows}"):
            export_hf(rank_files(tmp_path, state, rows), tmp_path / name, config=folder,
                      parallel=Parallel(padded_vocab_size=184))  # fmt: skip


def test_an_embedding_and_a_head_of_different_vocabularies_are_refused(tmp_path, llama):
    folder, state = llama
    shard = ref.mcore(state, 1, 0, rows=128)
    shard["output_layer.weight"] = ref.padded(state["lm_head.weight"], 256)
    save_file(shard, tmp_path / "rank.safetensors")
    for given in (None, 128):
        with pytest.raises(
            errors.TensorMismatchError, match=r"word_embeddings.* has 128.*output_layer.* has 256"
        ):
            export_hf([tmp_path / "rank.safetensors"], tmp_path / "hf", config=folder,
                      parallel=Parallel(padded_vocab_size=given))  # fmt: skip


def test_where_nothing_is_padded_the_option_is_refused(tmp_path, llama):
    folder, state = llama
    path = shards.write(tmp_path / "c", 1, lambda rank: shards.own(state, rank))
    with pytest.raises(errors.UsageError, match="padded_vocab_size=, pp= or vpp= are given"):
        export_hf(path, tmp_path / "hf", config=folder, parallel=Parallel(padded_vocab_size=128))
    with pytest.raises(errors.UsageError, match="padded_vocab_size=, pp= or vpp= are given"):
        verify_hf(folder, against=path, parallel=Parallel(padded_vocab_size=128))
    with pytest.raises(errors.UsageError, match="padded_vocab_size= has no effect without"):
        verify_hf(folder, parallel=Parallel(padded_vocab_size=128))
    save_file(state, tmp_path / "rank.safetensors")
    with pytest.raises(errors.TensorMismatchError, match="=128, but there are 120"):
        export_hf(
            [tmp_path / "rank.safetensors"],
            tmp_path / "hf",
            config=folder,
            parallel=Parallel("hf_tp", padded_vocab_size=128),
        )
    with pytest.raises(errors.UsageError, match="padded_vocab_size= has no effect with adapter="):
        export_hf(
            path,
            tmp_path / "hf",
            adapter=Adapter(lora="merge"),
            parallel=Parallel(padded_vocab_size=128),
        )


def test_a_checkpoint_is_compared_with_the_padding_that_is_said(tmp_path, llama):
    folder, state = llama
    cuts = [ref.te(state, 2, rank, rows=184) for rank in range(2)]
    topology = ParallelState(2, tensor_parallel_degree=2).to_json()
    path = shards.write(tmp_path / "c", 2, lambda r: shards.own(cuts[r], r), topology=topology)
    (problem,) = verify_hf(folder, against=path).problems
    assert "padded_vocab_size=184" in problem
    assert verify_hf(folder, against=path, parallel=Parallel(padded_vocab_size=184)).problems == ()


# -- the tokenizer beside it -----------------------------------------------------------------------


def unigram(count: int) -> dict[str, Any]:
    return {"model": {"type": "Unigram", "vocab": [["x", -1.0]] * count}}


def by_token(*ids: int) -> dict[str, int]:
    return {f"t{number}": number for number in ids}


TOKENIZERS: dict[str, tuple[dict[str, Any], int | None]] = {
    "the library's": ({"tokenizer.json": {"model": {"vocab": by_token(0, 119)}}}, None),
    "with a token beyond": ({"tokenizer.json": {"model": {"vocab": by_token(0, 120)}}}, 120),
    "its LoRA pair": (
        {"tokenizer.json": {"model": {"vocab": by_token(0)}, "added_tokens": [{"id": 127}]}}, 127,
    ),
    "unigram": ({"tokenizer.json": unigram(120)}, None),
    "unigram, longer": ({"tokenizer.json": unigram(121)}, 120),
    "slow": ({"vocab.json": by_token(0, 119)}, None),
    "slow, with one added": (
        {"vocab.json": by_token(0, 119), "added_tokens.json": by_token(125)}, 125,
    ),
    "its config's": ({"tokenizer_config.json": {"added_tokens_decoder": {"122": {}}}}, 122),
    "beyond what is stored": ({"vocab.json": by_token(128)}, None),
    "beyond it and not": ({"vocab.json": by_token(0, 121, 128)}, 121),
    "that cannot be read": ({"tokenizer.json": [1], "vocab.json": {"t": "x"}}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_tokenizers_highest_id_is_read_of_its_files(tmp_path, case) -> None:
    files, refused = TOKENIZERS[case]
    for name, said in files.items():
        (tmp_path / name).write_text(json.dumps(said))
    check_tokenizer(tmp_path, 128, 128)  # nothing is cut off
    if refused is None:
        check_tokenizer(tmp_path, 120, 128)
    else:
        with pytest.raises(errors.UsageError, match=f"the id {refused},.*padded_vocab_size=128"):
            check_tokenizer(tmp_path, 120, 128)


def test_an_export_that_would_cut_off_a_row_that_its_tokenizer_uses_is_refused(tmp_path, llama):
    folder, state = llama
    paths = rank_files(tmp_path, state, rows=128)
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "config.json").write_text((folder / "config.json").read_text())
    (beside / "tokenizer.json").write_text(json.dumps({"model": {"vocab": by_token(0, 120)}}))
    in_memory = SimpleNamespace(get_vocab=lambda: by_token(0, 120), save_pretrained=None)
    for given in ({"config": beside}, {"config": folder, "tokenizer": beside},
                  {"config": folder, "tokenizer": in_memory}):  # fmt: skip
        with pytest.raises(errors.UsageError, match="id 120, but vocab_size=120 would cut off"):
            export_hf(paths, tmp_path / "hf", **given)
    assert not (tmp_path / "hf").exists()
    export_hf(paths, tmp_path / "hf", config=beside, parallel=Parallel(padded_vocab_size=128))
    assert same(tmp_path / "hf", state)


# -- imports ---------------------------------------------------------------------------------------


def test_an_import_says_where_its_padding_will_have_to_be_said(tmp_path, llama, caplog):
    folder, state = llama
    told = import_hf(
        folder,
        tmp_path / "r",
        Parallel("mcore_te", tp=2),
        options=ImportOptions(pad_vocab_to_multiple_of=48),
    )
    (note,) = told.notes
    assert "120 is padded to 192" in note and "padded_vocab_size=192" in caplog.text
    with pytest.raises(errors.TensorMismatchError, match="padded_vocab_size=192"):
        export_hf(tmp_path / "r", tmp_path / "hf", config=folder)
    export_hf(
        tmp_path / "r", tmp_path / "hf", config=folder, parallel=Parallel(padded_vocab_size=192)
    )
    assert same(tmp_path / "hf", state)
    usual = import_hf(
        folder,
        tmp_path / "s",
        Parallel("mcore_te", tp=8),
        options=ImportOptions(pad_vocab_to_multiple_of=128),
    )
    assert usual.notes == () and usual.nonfinite == {}


def test_transformer_engines_ranks_have_whole_groups(tmp_path, llama):
    """4 groups: Megatron's ranks may be more, Transformer Engine's refuse to be made."""
    folder, state = llama
    for layout in ("te_split", "te_fused", "te_fused_interleaved"):
        with pytest.raises(errors.TopologyError, match=f"8 does not divide the 4 .*{layout}"):
            import_hf(folder, tmp_path / "r", Parallel(layout, tp=8))
    import_hf(folder, tmp_path / "r", Parallel("mcore_te", tp=8))
    paths = []
    for r in range(8):
        paths.append(tmp_path / f"rank{r}.safetensors")
        save_file(ref.te(state, 8, r), paths[-1])
    with pytest.raises(errors.TopologyError, match="8 does not divide the 4 .*te_split"):
        export_hf(paths, tmp_path / "hf", parallel=Parallel(tp=8), config=folder)
