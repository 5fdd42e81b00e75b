"""FULL state of tensor-parallel models, live: translated as it is taken, or not."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig as TorchConfig
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Shard

import smckpt
from smckpt import FULL, FullStateDictConfig, ParallelState, errors, sm_state_dict_type
from smckpt.full.parallel import FullWishes
from smckpt.full.wire import ArrayMetadata
from smckpt.layout.strided import Box, Piece, row_major_strides
from smckpt.translate.live.full_state import job_of
from tests.support.launch import run_ranks
from tests.support.models import references as ref
from tests.support.models.faulty_wire import with_one_that_fails
from tests.support.models.live_disagreement import EXPECTED, disagreements, padding_that_is_said
from tests.support.models.live_job import ON_RANK0, TOKENS, Job, State, differences, raised, taken
from tests.support.models.parallel_models import Named
from tests.translate.layouts.test_rows import NORM, legacy, with_copies

# -- the cases: run on all ranks, in one order -----------------------------------------------------


def fsdp1(job: Job) -> Any:
    model = job.model("fsdp1")
    with torch.no_grad():
        logits = model(TOKENS)
    found = taken(model, parallel_state=job.degrees)
    if dist.get_rank() == 0:
        (job.folder / "fsdp1").mkdir()
        torch.save(found, job.folder / "fsdp1" / "pytorch_model.bin")
        torch.save(logits, job.folder / "fsdp1" / "logits.pt")
    return differences(found, job.llama if dist.get_rank() == 0 else {})


def fsdp2_on_all_ranks(job: Job) -> Any:
    found = taken(job.model("fsdp2"), FullStateDictConfig(), parallel_state=job.degrees)
    return differences(found, job.llama)


def the_documentations_snippet(job: Job) -> Any:
    """As in SMP's documentation; ours are the two lines that ask for it."""
    warnings.simplefilter("ignore", FutureWarning)
    model, save_dir = job.model("fsdp1"), job.folder / "snippet"
    extension = smckpt.extend_torch_config(parallel_state=job.degrees)
    with FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        TorchConfig(
            rank0_only=True,
            offload_to_cpu=True,
            # translate_on_save=True
        ),
    ):
        state_dict = model.state_dict()
    if dist.get_rank() == 0:
        os.makedirs(save_dir, exist_ok=True)
        torch.save(state_dict, os.path.join(save_dir, "pytorch_model.bin"))
    dist.barrier()
    off = TorchConfig(rank0_only=True, translate_on_save=False)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, off):
        kept = model.state_dict()
    shown = repr(off)
    twice, _ = raised(smckpt.extend_torch_config)
    extension.undo()
    stock = False
    try:
        TorchConfig(translate_on_save=True)
    except TypeError:
        stock = TorchConfig(True, True) == TorchConfig(True, True)
    return {
        "found": differences(state_dict, job.llama if dist.get_rank() == 0 else {}),
        "untranslated": differences(kept, joined(job) if dist.get_rank() == 0 else {}),
        "twice": twice,
        "repr": shown,
        "stock again": stock and "translate" not in repr(TorchConfig()),
    }


def model_of_dtensors(job: Job) -> nn.Module:
    model = Named(job.cut(ref.mcore), job.config)
    for name, parameter in list(model.named_parameters()):
        if parameter.dim() > 1:  # norms stay plain
            dim = int("linear_proj" in name or "fc2" in name)
            value = DTensor.from_local(parameter.data, job.mesh["tp"], [Shard(dim)])
            owner, _, last = name.rpartition(".")
            model.get_submodule(owner)._parameters[last] = nn.Parameter(value)
    return model


def dtensors_tell_by_their_mesh(job: Job) -> Any:
    out = {}
    for shards in (False, True):
        model = model_of_dtensors(job)
        if shards:
            fully_shard(model, mesh=job.mesh["shard"])
        found = taken(model)
        out[shards] = differences(found, job.llama if dist.get_rank() == 0 else {})
    return out


def experts_of_expert_parallel_ranks(job: Job) -> Any:
    state, config = job.saved("mixtral")
    degrees = ParallelState(4, tensor_parallel_degree=2, expert_parallel_degree=2)
    own = ref.mcore(state, 2, degrees.tp_rank, 2, degrees.ep_rank)
    found = taken(Named(own, config), parallel_state=degrees)
    off = FullStateDictConfig(translate_on_save=False)
    refused = raised(lambda: taken(Named(own, config), off, parallel_state=degrees))
    twice = Named(ref.mcore(state, 2, degrees.tp_rank, 2, 0), config)
    equal = raised(lambda: taken(twice, parallel_state=degrees))
    wished = FullStateDictConfig(allow_equal_ranks=True)
    taken(twice, wished, parallel_state=degrees)
    return differences(found, state if dist.get_rank() == 0 else {}), *refused, *equal


def computed_and_folded(job: Job) -> Any:
    """What an export computes, and in the same way: bitwise."""
    out, first = {}, dist.get_rank() == 0
    less = {n: t - 1 if "norm" in n else t for n, t in job.llama.items()}
    centred = Named(ref.te(less, 2, job.degrees.tp_rank), job.config)
    found = taken(centred, layout="te_split_zero_centred", parallel_state=job.degrees)
    wanted = {n: (t.double() + 1).float() if "norm" in n else t for n, t in less.items()}
    out["shifted"] = differences(found, wanted if first else {})
    drifted = [torch.randn(64, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    own = job.cut(ref.mcore, local=True) | {NORM: drifted[job.degrees.tp_rank]}
    found = taken(
        Named(own, job.config), FullStateDictConfig(), layout=with_copies("mean"),
        parallel_state=job.degrees,
    )  # fmt: skip
    mean = ((drifted[0].double() + drifted[1].double()) / 2).float()
    out["averaged"] = differences(found, job.llama | {"model.norm.weight": mean})
    state, config = job.saved("mixtral")
    degrees = ParallelState(4, tensor_parallel_degree=2, expert_parallel_degree=2)
    experts = legacy(state, "mixtral", 2, degrees.tp_rank, 2, degrees.ep_rank)
    found = taken(Named(experts, config), parallel_state=degrees)
    out["folded"] = differences(found, state if first else {})
    off = FullStateDictConfig(translate_on_save=False)
    told = raised(lambda: taken(Named(experts, config), off, parallel_state=degrees))
    out["folded, untranslated"] = told
    return out


def a_failure_while_tensors_move(job: Job) -> Any:
    """Rank 0 alone sees it: two copies whose sum is beyond the dtype."""
    own = {n: t.half() for n, t in job.cut(ref.mcore, local=True).items()}
    own[NORM] = torch.full((64,), 60000.0).half()
    model = Named(own, job.config)
    state = {"layout": with_copies("sum"), "parallel_state": job.degrees}
    return [
        raised(lambda: taken(model, **state)),
        raised(lambda: taken(model, FullStateDictConfig(), **state)),
    ]


def failures_of_any_rank(job: Job) -> Any:
    """Where each finds no memory for the third tensor that it sends, takes or shares."""
    model, everywhere = Named(job.cut(ref.te), job.config), FullStateDictConfig()

    def fails(rank: int, act: str, how: Any = ON_RANK0, **more: Any) -> Any:
        return with_one_that_fails(
            lambda: taken(model, how, parallel_state=job.degrees), rank, act, **more
        )

    out = {
        (1, "packed"): fails(1, "packed"),
        (1, "packed, soon"): fails(1, "packed", at_once=True),
        (0, "room"): fails(0, "room"),
        (0, "placed"): fails(0, "placed", everywhere),
        (3, "room"): fails(3, "room", everywhere),
    }
    out[2, "other config"] = with_one_that_fails(
        lambda: taken(model, everywhere if dist.get_rank() == 2 else ON_RANK0,
                      parallel_state=job.degrees), 2, "nothing",
    )  # fmt: skip
    found = taken(model, parallel_state=job.degrees)  # nothing is left on the way
    return out, differences(found, job.llama if dist.get_rank() == 0 else {})


def tied_heads_are_one_tensor(job: Job) -> Any:
    config = {**job.config, "tie_word_embeddings": True}
    cut = {n: t for n, t in job.cut(ref.te).items() if n != "lm_head.weight"}
    found = taken(Named(cut, config), parallel_state=job.degrees)
    wanted = {**job.llama, "lm_head.weight": job.llama["model.embed_tokens.weight"]}
    if dist.get_rank():
        return found == {}
    return (
        differences(found, wanted) == []
        and found["lm_head.weight"] is found["model.embed_tokens.weight"]
    )


def untranslated(job: Job) -> Any:
    own = FullStateDictConfig(rank0_only=True, translate_on_save=False)
    found = taken(job.model("fsdp1 original"), own, parallel_state=job.degrees)
    return differences(found, joined(job) if dist.get_rank() == 0 else {})


def joined(job: Job) -> State:
    """The ranks' arrays one after the other, by straight torch code."""
    cuts = [ref.te(job.llama, 2, r) for r in range(2)]
    wanted = {}
    for name, first in cuts[0].items():
        dim = 1 if name.endswith(("proj.weight", "fc2_weight")) else 0
        alike = torch.equal(first, cuts[1][name])
        wanted[name] = first if alike else torch.cat([cut[name] for cut in cuts], dim)
    return {n: t for n, t in wanted.items() if not n.endswith("_extra_state")}


def huggingface_names_stay(job: Job) -> Any:
    """Packed experts too, which are called otherwise on disk."""
    out = {}
    mixtral, config = job.saved("mixtral in memory")
    for family, state, about in (("llama", job.llama, job.config), ("mixtral", mixtral, config)):
        model = Named(state, about)
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        out[family] = differences(taken(model), state if dist.get_rank() == 0 else {})
    return out


def refusals(job: Job) -> Any:
    fused = Named(job.cut(ref.te, fused="per_rank"), job.config)
    te = job.cut(ref.te)
    drifted = {n: t + (job.degrees.tp_rank if "norm" in n else 0) for n, t in te.items()}
    tall = {n: t for n, t in te.items() if "layers.1" not in n}
    state = {"parallel_state": job.degrees}
    say: dict[str, Callable[[], Any]] = {
        "ambiguous": lambda: taken(fused, **state),
        "unknown": lambda: taken(Named(tall, job.config), **state),
        "wrong layout": lambda: taken(Named(te, job.config), layout="mcore_te", **state),
        "no config": lambda: taken(Named(te), **state),
        "no ranks": lambda: taken(Named(te, job.config)),
        "no ranks, untranslated": lambda: taken(
            Named(te, job.config), FullStateDictConfig(translate_on_save=False)
        ),
        "another job's": lambda: taken(
            Named(te, job.config), parallel_state=ParallelState(2, tensor_parallel_degree=2)
        ),
        "other than the mesh": lambda: taken(
            model_of_dtensors(job), parallel_state=ParallelState(4, tensor_parallel_degree=4)
        ),
        "another order": lambda: taken(  # tp outermost, and said to be innermost
            Named(ref.te(job.llama, 2, dist.get_rank() // 2), job.config), **state
        ),
        "drifted": lambda: taken(Named(drifted, job.config), **state),
        "one shard on both": lambda: taken(Named(ref.te(job.llama, 2, 0), job.config), **state),
        "another dtype": lambda: taken(
            Named({n: t.to(torch.float64 if dist.get_rank() == 3 else t.dtype)
                   for n, t in te.items()}, job.config), **state
        ),
        "only": lambda: taken(Named(te, job.config), only="trainable", **state),
        "no such config": lambda: taken(fused, {"rank0_only": True}),
        "translated, loaded": lambda: given_back(job, FullStateDictConfig()),
        "joined, loaded": lambda: given_back(job, FullStateDictConfig(translate_on_save=False)),
        "optimizer": lambda: optimizer_taken(job),
        "layout with LOCAL": lambda: sm_state_dict_type(
            fused, smckpt.LOCAL, layout="te_fused"
        ).__enter__(),
    }  # fmt: skip
    out: dict[str, Any] = {name: raised(act) for name, act in say.items()}
    out["named"] = differences(
        taken(fused, layout="te_fused", **state), job.llama if dist.get_rank() == 0 else {}
    )
    out["given"] = differences(
        taken(Named(te), config=job.config, **state), job.llama if dist.get_rank() == 0 else {}
    )
    return out


def given_back(job: Job, how: FullStateDictConfig) -> None:
    model = job.model("fsdp1")
    with sm_state_dict_type(model, FULL, how, parallel_state=job.degrees):
        model.load_state_dict(model.state_dict())


def optimizer_taken(job: Job) -> Any:
    model = job.model("fsdp2")
    optimizer = torch.optim.AdamW(model.parameters())
    smckpt.init_optim_state(optimizer)
    with sm_state_dict_type(model, FULL, parallel_state=job.degrees):
        return optimizer.state_dict()


CASES = [
    fsdp1, fsdp2_on_all_ranks, the_documentations_snippet, dtensors_tell_by_their_mesh,
    experts_of_expert_parallel_ranks, tied_heads_are_one_tensor, untranslated,
    huggingface_names_stay, refusals, computed_and_folded, a_failure_while_tensors_move,
    failures_of_any_rank, disagreements, padding_that_is_said,
]  # fmt: skip


def all_cases(folder: str) -> dict[str, Any]:
    job = Job(folder)
    out: dict[str, Any] = {}
    for case in CASES:
        try:
            out[case.__name__] = case(job)
        except Exception:  # told by case; what raises, raises on all ranks
            out[case.__name__] = traceback.format_exc()
    return out


# -- the tests -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], Any]:
    folder = tmp_path_factory.mktemp("on-save")
    llama = ref.model("llama")
    for family, model in (("llama", llama), ("mixtral", ref.model("mixtral"))):
        state = ref.on_disk(model, folder / f"hub-{family}")
        torch.save((state, model.config.to_dict()), folder / f"{family}.pt")
        memory = {n: t.detach() for n, t in model.state_dict().items()}
        torch.save((memory, model.config.to_dict()), folder / f"{family} in memory.pt")
    return folder, run_ranks(all_cases, 4, str(folder)), llama


def loads_and_computes_the_same(folder: Path, llama: Any) -> float:
    """Whether `from_pretrained` finds every tensor; the largest difference of logits."""
    from transformers import AutoModelForCausalLM

    llama.config.save_pretrained(folder)
    loaded, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()), told
    with torch.no_grad():
        expected = llama(TOKENS).logits
        return float((loaded(TOKENS).logits - expected).abs().max())


def test_fsdp1_over_tensor_parallel_ranks_comes_out_in_huggingface_names(made) -> None:
    folder, ranks, llama = made
    assert [rank["fsdp1"] for rank in ranks] == [[]] * 4
    assert loads_and_computes_the_same(folder / "fsdp1", llama) == 0
    logits = torch.load(folder / "fsdp1" / "logits.pt")
    with torch.no_grad():
        assert (logits - llama(TOKENS).logits).abs().max() <= 1e-5


def test_fsdp2_over_tensor_parallel_ranks_comes_out_on_every_rank(made) -> None:
    assert [rank["fsdp2_on_all_ranks"] for rank in made[1]] == [[]] * 4


def test_the_snippet_of_smps_documentation_works_and_torch_can_be_put_back(made) -> None:
    folder, ranks, llama = made
    for rank in ranks:
        told = rank["the_documentations_snippet"]
        assert told["found"] == [] and told["untranslated"] == []
        assert told["twice"] == "UsageError" and told["stock again"]
        assert "translate_on_save=False" in told["repr"]
    assert loads_and_computes_the_same(folder / "snippet", llama) == 0


def test_a_mesh_with_a_tp_dimension_tells_which_rank_is_which(made) -> None:
    assert [rank["dtensors_tell_by_their_mesh"] for rank in made[1]] == [{False: [], True: []}] * 4


def test_experts_come_from_their_expert_parallel_ranks(made) -> None:
    for rank in made[1]:
        bad, kind, text, *equal = rank["experts_of_expert_parallel_ranks"]
        assert bad == []
        assert kind == "UsageError" and "translate_on_save=True" in text
        assert equal[0] == "TensorMismatchError" and "allow_equal_ranks=True" in equal[1]


def test_what_an_export_computes_or_unfolds_comes_out_live_too(made) -> None:
    for rank in made[1]:
        told = rank["computed_and_folded"]
        kind, text = told.pop("folded, untranslated")
        assert kind == "UsageError" and "translate_on_save=True" in text
        assert told == {"shifted": [], "averaged": [], "folded": []}


def test_what_fails_on_the_first_rank_while_tensors_move_is_raised_on_every_rank(made) -> None:
    for rank in made[1]:
        for kind, text in rank["a_failure_while_tensors_move"]:
            assert kind == "UsageError" and "model.norm.weight cannot be computed" in text


def test_what_any_rank_fails_with_while_tensors_move_is_raised_on_all_and_names_it(made) -> None:
    for rank, told in enumerate(made[1]):
        outcomes, afterwards = told["failures_of_any_rank"]
        assert afterwards == []
        for (who, what), (kind, text, seconds, _) in outcomes.items():
            own = who == rank and what != "other config"
            assert own or f"rank {who}]" in text
            assert "no room to have it" in text or "rank0_only=False here" in text
            assert kind == (
                "MemoryError" if own else "UsageError" if "here" in text else "CheckpointError"
            )
            assert seconds < 20
    sent = [told["failures_of_any_rank"][0] for told in made[1]]
    assert sent[1][1, "packed, soon"][3] <= 3 < sent[1][1, "packed"][3]


def test_a_tied_head_is_the_embedding_itself(made) -> None:
    assert all(rank["tied_heads_are_one_tensor"] for rank in made[1])


def test_untranslated_the_ranks_arrays_stand_one_after_the_other(made) -> None:
    assert [rank["untranslated"] for rank in made[1]] == [[]] * 4


def test_a_model_with_huggingface_names_comes_out_as_it_is(made) -> None:
    for rank in made[1]:
        assert rank["huggingface_names_stay"] == {"llama": [], "mixtral": []}


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("ambiguous", "UsageError", ["te_fused, te_fused_interleaved", "layout="]),
        ("unknown", "UsageError", ["nearest is te_split", "layers.1", "translate_on_save=False"]),
        ("wrong layout", "KeysMismatchError", ["mcore_te", "decoder.layers.0"]),
        ("no config", "UsageError", ["config="]),
        ("no ranks", "TopologyError", ["parallel_state="]),
        ("no ranks, untranslated", "TopologyError", ["parallel_state="]),
        ("another job's", "TopologyError", ["2 ranks", "has 4"]),
        ("other than the mesh", "TopologyError", ["of 4 by parallel_state", "device mesh"]),
        ("another order", "TensorMismatchError", ["copies differ", "on ranks that are (tp, ep)"]),
        ("drifted", "TensorMismatchError", ["copies differ", "model.norm.weight"]),
        ("one shard on both", "TensorMismatchError", ["(0, 0) and (1, 0)", "one rank's part"]),
        ("another dtype", "TensorMismatchError", ["float32 and float64"]),
        ("only", "UsageError", ["only="]),
        ("no such config", "UsageError", ["dict"]),
        ("translated, loaded", "KeysMismatchError", ["q_proj", "translate_on_save=False"]),
        ("joined, loaded", "TensorMismatchError", ["embed_tokens", "LOCAL"]),
        ("optimizer", "UsageError", ["LOCAL", "embed_tokens"]),
        ("layout with LOCAL", "UsageError", ["layout="]),
    ],
)
def test_what_cannot_be_translated_is_refused_on_every_rank(made, case, kind, words) -> None:
    for rank in made[1]:
        found, text = rank["refusals"][case]
        assert found == kind, text
        assert all(word in text for word in words), text


def test_ranks_that_pass_different_things_are_refused_on_every_rank(made) -> None:
    for rank in made[1]:
        told = rank["disagreements"]
        assert told.pop("afterwards") == ("", "[]") and len(told) == len(EXPECTED)
        for case, words in EXPECTED.items():
            assert told[case][0] == "UsageError" and words in told[case][1], (case, told[case])


def test_padding_that_no_trainer_makes_is_taken_where_it_is_said(made) -> None:
    for rank in made[1]:
        refused, wrong, local, bad, kept = rank["padding_that_is_said"]
        assert refused[0] == wrong[0] == "TensorMismatchError" and bad == []
        assert kept == {184}  # untranslated, padding stays
        assert "padded_vocab_size=184" in refused[1] and "=192, but there are 184" in wrong[1]
        assert local[0] == "UsageError" and "padded_vocab_size=" in local[1]


def test_a_layout_and_a_config_can_be_given(made) -> None:
    for rank in made[1]:
        assert rank["refusals"]["named"] == [] and rank["refusals"]["given"] == []


def test_no_more_than_a_few_tensors_are_in_the_making_at_a_time(tmp_path: Path) -> None:
    neox = ref.model("gpt_neox")
    state = ref.on_disk(neox, tmp_path)
    told: list[dict[str, ArrayMetadata]] = []
    for rank in range(4):
        told.append({})
        for name, tensor in ref.te(state, 4, rank).items():
            shape = tuple(tensor.shape)
            whole = Piece(name, shape, Box.whole(shape), 0, row_major_strides(shape))
            told[rank][name] = ArrayMetadata(
                "float32", shape, tensor.numel(), (whole,), (rank,), (), "cpu"
            )
    wishes = FullWishes(True, True, True, ParallelState(4, tensor_parallel_degree=4))
    job = job_of(neox, told, wishes)
    assert job is not None
    begun: set[str] = set()
    for task, step in zip(job.tasks, job.steps(), strict=True):
        begun.update(name for name, _ in task.blocks)
        assert len(begun) <= 2  # weight and bias of one that query, key and value make
        begun.difference_update(name for name, *_ in step.done)
    assert not begun


def test_one_process_needs_no_process_group() -> None:
    llama = ref.model("llama")
    state = {n: t.detach() for n, t in llama.state_dict().items()}
    model = Named(ref.te(state, 1, 0), llama.config)
    assert differences(taken(model), state) == []


def test_the_config_takes_what_torchs_takes_and_nothing_else() -> None:
    assert FullStateDictConfig(True, False).offload_to_cpu
    with pytest.raises(errors.UsageError, match="translate_on_save='no'"):
        FullStateDictConfig(translate_on_save="no")  # type: ignore[arg-type]
