"""State dicts that others made, adapters alone, and FULL."""

from __future__ import annotations

import io
import logging
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import (
    FullStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

import smckpt
from smckpt.checkpoint.reading.committed import open_catalogue
from smckpt.full import gathered as full_state
from smckpt.full import wire as full_wire
from smckpt.storage import open_storage
from tests.state_dict.test_interchange import build, taken, whole
from tests.support.launch import run_ranks
from tests.support.nets import Net, step
from tests.support.truth import differences, flat, snapshot


def torchs_own(kind: str, model: Any, optimizer: Any) -> dict[str, Any]:
    if kind.startswith("fsdp1"):
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            return {
                "model": model.state_dict(),
                "optimizer": FSDP.optim_state_dict(model, optimizer),
            }
    tensors, state = get_state_dict(model, optimizer)
    return {"model": tensors, "optimizer": state}


def two_shards_of_a_rank(folder: str) -> list[Any]:
    """A ShardedTensor of which each rank holds two pieces that do not touch: filled in place."""
    rank = dist.get_rank()
    pieces = [torch.full((2, 3), float(10 * rank + i)) for i in range(2)]
    shards = [
        Shard.from_tensor_and_offsets(piece, [4 * i + 2 * rank, 0], rank)
        for i, piece in enumerate(pieces)
    ]
    state = {"sharded": init_from_local_shards(shards, 8, 3)}
    smckpt.save(state, checkpoint_id=folder)
    for piece in pieces:
        piece.zero_()
    smckpt.load(state, checkpoint_id=folder)
    expected = [torch.full((2, 3), float(10 * rank + i)) for i in range(2)]
    return [(a, b) for a, b in zip(pieces, expected, strict=True) if not torch.equal(a, b)]


def pickled(states: dict[str, Any]) -> list[str]:
    """Those that `torch.load` refuses as holding more than weights."""
    refused = []
    for name, state in states.items():
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        try:
            torch.load(file)
        except pickle.UnpicklingError as error:
            refused.append(f"{name}: {error}")
    return refused


def others(folder: str) -> dict[str, Any]:
    """Saved as torch gives it, loaded as we give it; loaded as torch gives it, too."""
    warnings.simplefilter("ignore")
    out: dict[str, Any] = {}
    for kind in ("fsdp1 original", "fsdp2", "ddp"):
        model, optimizer = build(kind, 0)
        step(model, optimizer, 2)
        expected = whole(model, optimizer)
        ours = taken(model, optimizer, smckpt.LOCAL)
        place = f"{folder}/{kind}"
        smckpt.save(torchs_own(kind, model, optimizer), checkpoint_id=place)
        if (form := open_catalogue(open_storage(place)).kind) is not None:
            out[f"{kind} after a LOCAL take"] = form
        gathered = taken(model, optimizer, smckpt.FULL)
        stock = optimizer.state_dict()
        out[f"{kind} pickled"] = pickled({"taken": ours, "full": gathered, "stock": stock})
        other, fresh = build(kind, 3)
        target = taken(other, fresh, smckpt.SHARDED)
        smckpt.load(target, checkpoint_id=f"{folder}/{kind}", check_keys_matched=False)
        out[f"{kind} into ours"] = differences(whole(other, fresh), expected)
        other, fresh = build(kind, 4)
        target = {"model": torchs_own(kind, other, fresh)["model"]}
        smckpt.load(target, checkpoint_id=f"{folder}/{kind}", check_keys_matched=False)
        if kind.startswith("fsdp1"):  # whose own state dict is no live one
            with FSDP.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
                other.load_state_dict(target["model"])
        ours = {n: t for n, t in whole(other, fresh).items() if n.startswith("model")}
        theirs = {n: t for n, t in expected.items() if n.startswith("model")}
        out[f"{kind} model into torch's"] = differences(ours, theirs)
    out["two shards on a rank"] = two_shards_of_a_rank(f"{folder}/shards")
    return {what: found for what, found in out.items() if found}


def test_what_torch_returns_is_saved_and_loaded(tmp_path: Path) -> None:
    assert run_ranks(others, 2, str(tmp_path)) == [{}, {}]


def full(folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    out: dict[str, Any] = {}
    for kind in ("fsdp1 original", "fsdp2", "ddp"):
        model, optimizer = build(kind, 0)
        step(model, optimizer, 2)
        expected = whole(model, optimizer)
        config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
        with smckpt.sm_state_dict_type(model, smckpt.FULL, config):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        place = f"{folder}/{kind}"
        smckpt.save({**state, "step": 7}, checkpoint_id=f"{place}/full")
        smckpt.save(taken(model, optimizer, smckpt.LOCAL, step=7), checkpoint_id=f"{place}/local")
        again = full_load(f"{place}/full", kind, smckpt.FULL, expected, twice=True)
        out[f"{kind} from full, load_state_dict after it"] = again
        out[f"{kind} from local"] = full_load(f"{place}/local", kind, smckpt.FULL, expected)
        out[f"{kind} sharded"] = full_load(f"{place}/full", kind, smckpt.SHARDED, expected)
        some = {name: value for name, value in expected.items() if "optimizer" not in name}
        out[f"{kind} in part, by all"] = in_part(f"{place}/full", kind, some)
        if dist.get_rank():
            out[f"{kind} on rank 1"] = [*state["model"], *state["optimizer"]["state"]]
            continue
        out[kind] = differences(flat(state), expected)
        out[f"{kind} elsewhere"] = [n for n, t in flat(state).items() if t.device.type != "cpu"]
    out["rank 0 alone is told"] = told_alone(f"{folder}/ddp/full")
    return {"found": {what: found for what, found in out.items() if found}, "failed": failed_full()}


def full_load(
    folder: str, kind: str, form: Any, expected: dict[str, Any], twice: bool = False
) -> list[str]:
    """What differs after a load into a fresh optimizer of other rates, by all ranks."""
    model, optimizer = build(kind, 3)
    target = taken(model, optimizer, form, step=0)
    smckpt.load(target, checkpoint_id=folder, options=smckpt.LoadOptions(timeout=60))
    if twice:
        with smckpt.sm_state_dict_type(model, form):
            model.load_state_dict(target["model"])
            optimizer.load_state_dict(target["optimizer"])
    found = differences(whole(model, optimizer), expected)
    rates = [target["step"], optimizer.param_groups[0]["lr"]]
    return found if rates == [7, 1e-2] else [*found, str(rates)]


def in_part(folder: str, kind: str, expected: dict[str, Any]) -> list[str]:
    """What differs where all ranks hold all of the model's state but its first tensor."""
    model, optimizer = build(kind, 3)
    fresh = whole(model, optimizer)
    first = min(expected)
    config = FullStateDictConfig(rank0_only=False)
    name = first.removeprefix("model.")
    form = smckpt.sm_state_dict_type(model, smckpt.FULL, config, only=lambda fqn: fqn != name)
    with form:
        target = {"model": model.state_dict()}
    smckpt.load(
        target,
        checkpoint_id=folder,
        check_keys_matched=False,
        options=smckpt.LoadOptions(timeout=60),
    )
    now = {k: v for k, v in whole(model, optimizer).items() if k in expected}
    return differences(now, {**expected, first: fresh[first]})


def told_alone(folder: str) -> list[str]:
    """What is wrong with what a rank is told that loads FULL state without the others."""
    group = dist.new_group([0])
    model, optimizer = build("fsdp2", 3)
    target = taken(model, optimizer, smckpt.FULL)
    live = [parameter.to_local() for parameter in model.parameters()]
    fresh = [array.clone() for array in live]
    said = io.StringIO()
    log, handler = logging.getLogger("smckpt"), logging.StreamHandler(said)
    log.addHandler(handler)
    smckpt.load(
        target,
        checkpoint_id=folder,
        process_group=group,
        check_keys_matched=False,
        options=smckpt.LoadOptions(timeout=60),
    )
    log.removeHandler(handler)
    told = "call load_state_dict on all ranks" in said.getvalue()
    found = [] if told == (dist.get_rank() == 0) else ["told", said.getvalue()]
    return found if all(map(torch.equal, live, fresh)) else [*found, "filled"]


def failed_full() -> dict[str, Any]:
    """What is raised where one rank has no room for the second tensor, or a hook that raises."""
    model, optimizer = build("fsdp2", 0)
    step(model, optimizer, 2)
    out: dict[str, Any] = {}
    for rank in (0, 1):
        for what in (model.state_dict, optimizer.state_dict):
            with no_room(dist.get_rank() == rank):
                out[f"{rank} {what.__self__.__class__.__name__}"] = said(model, what)
    if dist.get_rank() == 1:
        model.register_state_dict_pre_hook(refuse)
    out["1 hook"] = said(model, model.state_dict)
    for name in ("a pending sum", "a parameter without memory"):
        model, optimizer = build("fsdp2", 0)
        parameter = next(model.parameters())
        if dist.get_rank() == 1 and name == "a pending sum":
            pending = DTensor.from_local(torch.ones(3), parameter.device_mesh, [Partial()])
            optimizer.state[parameter]["no room"] = pending
        elif dist.get_rank() == 1:
            model.register_parameter("no room", nn.Parameter(torch.ones(3, device="meta")))
        whose = optimizer if name == "a pending sum" else model
        out[f"1 {name}"] = said(model, whose.state_dict)
    model, optimizer = build("fsdp2", 0)
    step(model, optimizer, 2)
    with smckpt.sm_state_dict_type(model, smckpt.FULL):
        whole = optimizer.state_dict()
    if dist.get_rank() == 0:
        full_wire.Wire.placed = refuse
    out["0 put"] = said(model, optimizer.load_state_dict, whole)
    return out


def refuse(*_: Any) -> None:
    raise MemoryError("no room")


@contextmanager
def no_room(here: bool) -> Iterator[None]:
    stock, calls = full_state._check_room, [0]

    def check(value: Any) -> None:
        calls[0] += 1
        if here and calls[0] == 2:
            refuse()
        stock(value)

    full_state._check_room = check
    try:
        yield
    finally:
        full_state._check_room = stock


def said(model: Any, what: Any, *given: Any) -> str:
    try:
        with smckpt.sm_state_dict_type(model, smckpt.FULL):
            getattr(what.__self__, what.__name__)(*given)
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return ""


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(full, 2, str(tmp_path_factory.mktemp("full")))


def test_full_gathers_to_rank_0_on_the_cpu_and_is_saved_and_loaded_by_all_ranks(gathered) -> None:
    assert [rank["found"] for rank in gathered] == [{}, {}]


def test_what_one_rank_fails_with_while_full_state_is_gathered_is_raised_on_all(gathered) -> None:
    for rank, told in enumerate(gathered):
        for case, text in told["failed"].items():
            mine = "StateError" if "a p" in case else "MemoryError no room"
            wanted = mine if int(case[0]) == rank else f"rank {case[0]}]"
            assert wanted in text and "no room" in text, case


def in_other_orders(wrapper: str, folder: str) -> list[str]:
    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 4))
        parametrizations.orthogonal(model[1])  # its buffer is a transposed one
        model.register_buffer("transposed", torch.randn(3, 2).t())
        model.register_buffer("conjugated", torch.randn(3, dtype=torch.complex64).conj())
        if wrapper == "fsdp2":
            model = fully_shard(model)
        else:
            model = DistributedDataParallel(model.to(memory_format=torch.channels_last))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        kept = torch.randn(2, 3, dtype=torch.complex64)
        optimizer.state[next(model.parameters())] = {"c": kept.conj(), "n": kept.conj().imag.t()}
        return model, optimizer

    (saved, first), (loaded, second) = made(0), made(1)
    with smckpt.sm_state_dict_type(saved, smckpt.FULL):
        taken = {"model": saved.state_dict(), "optimizer": first.state_dict()}
        smckpt.save(taken, checkpoint_id=folder)
    wrong = []
    for given in (taken, None):  # as it is in memory, and from the checkpoint
        if given is None:
            loaded, second = made(1)
        with smckpt.sm_state_dict_type(loaded, smckpt.FULL):
            if given is None:
                given = {"model": loaded.state_dict(), "optimizer": second.state_dict()}
                smckpt.load(given, checkpoint_id=folder)
            loaded.load_state_dict(given["model"])
            second.load_state_dict(given["optimizer"])
        was, now = (
            {**model.state_dict(), **next(iter(optimizer.state.values()))}
            for model, optimizer in ((saved, first), (loaded, second))
        )
        wrong += [name for name in was if not torch.equal(local(was[name]), local(now[name]))]
    return wrong


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_full_gives_all_ranks_tensors_of_any_order_in_memory(tmp_path: Path, wrapper: str) -> None:
    """torch broadcasts rank 0's memory as it lies there."""
    assert run_ranks(in_other_orders, 2, wrapper, str(tmp_path)) == [[], []]


@pytest.mark.parametrize("only", ["trainable", None])
def test_adapters_alone_or_all_are_saved_and_resumed(tmp_path: Path, only: str | None) -> None:
    peft = pytest.importorskip("peft")

    def build_adapted(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(0 if only else seed)
        base = Net()
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=2, target_modules=["up", "down"])
        model = peft.get_peft_model(base, config)
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def state(model: Any, optimizer: Any) -> dict[str, Any]:
        with smckpt.sm_state_dict_type(model, smckpt.LOCAL, only=only):
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    model, optimizer = build_adapted(0)
    for _ in range(2):
        model.base_model.model(torch.zeros(2, 3, dtype=torch.long)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = state(model, optimizer)
    assert all("lora_" in name for name in saved["model"]) == bool(only)
    smckpt.save(saved, checkpoint_id=tmp_path / "c")
    other, fresh = build_adapted(3)
    smckpt.load(state(other, fresh), checkpoint_id=tmp_path / "c")
    after, before = snapshot(other, fresh), snapshot(model, optimizer)
    left = [what for what in differences(after, before) if only is None or ".seen" not in what]
    assert left == []


# -- boxes of which torch names no mesh ------------------------------------------------------------


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4))


def saved_as_torch_shards_it(folder: str, slices: bool) -> list[str]:
    """FSDP1 over four ranks in one group: two replicas of two shards, or two tensor-parallel slices
    of two shards. Each rank then loads what it saved. Gives the names that differ."""
    rank = dist.get_rank()
    rows, columns = ([dist.new_group(ranks) for ranks in pair]
                     for pair in (((0, 1), (2, 3)), ((0, 2), (1, 3))))  # fmt: skip
    own, other = rows[rank // 2], columns[rank % 2]
    torch.manual_seed(rank // 2 if slices else 0)
    groups = {"process_group": own} if slices else {"process_group": (own, other)}
    strategy = ShardingStrategy.FULL_SHARD if slices else ShardingStrategy.HYBRID_SHARD
    cpu = torch.device("cpu")
    model = FSDP(two_layers(), sharding_strategy=strategy, device_id=cpu, **groups)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict()}
    smckpt.save(state, checkpoint_id=folder)
    shards = {name: tensor.local_shards() for name, tensor in state["model"].items()}
    before = {name: [shard.tensor.clone() for shard in held] for name, held in shards.items()}
    for held in shards.values():
        for shard in held:
            shard.tensor.zero_()
    smckpt.load(state, checkpoint_id=folder)
    return [
        name
        for name, held in shards.items()
        if not all(map(torch.equal, (shard.tensor for shard in held), before[name]))
    ]


def test_replicas_that_torch_shards_load_in_one_process(tmp_path: Path) -> None:
    assert run_ranks(saved_as_torch_shards_it, 4, str(tmp_path), False) == [[]] * 4
    torch.manual_seed(0)
    expected = two_layers().state_dict()
    found = smckpt.load(checkpoint_id=tmp_path)["model"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_slices_that_torch_shards_are_refused_in_one_process(tmp_path: Path) -> None:
    assert run_ranks(saved_as_torch_shards_it, 4, str(tmp_path), True) == [[]] * 4
    with pytest.raises(smckpt.errors.TopologyError, match="separately by ranks .*parallel_state="):
        smckpt.load(checkpoint_id=tmp_path)
