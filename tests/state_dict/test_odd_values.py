"""Tensors whose elements are no array (sparse, nested, quantised), and random generators, are saved
as values."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import smckpt
from smckpt import errors
from tests.support.launch import run_ranks


def value_of_kind(kind: str) -> Any:
    """A tensor whose elements are no array, or a random generator. Sparse ones have an element
    twice."""
    if kind == "generator":
        made = torch.Generator().manual_seed(7)
        torch.randn(5, generator=made)
        return made
    if kind == "nested":
        return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    if kind == "quantised":
        return torch.quantize_per_tensor(torch.arange(6.0), 0.1, 3, torch.quint8)
    if kind == "coo":
        return torch.sparse_coo_tensor(torch.tensor([[1, 1, 0]]), torch.ones(3, 2), (3, 2))
    return getattr(torch.arange(16.0).reshape(4, 4), f"to_sparse_{kind}")(
        *[(2, 2)] * kind.startswith("bs")
    )


def described(value: Any) -> str:
    if isinstance(value, torch.Generator):
        return str(value.get_state().tolist())
    return repr(value.detach()) + str(value.layout is torch.sparse_coo and value.is_coalesced())


KINDS_OF_VALUES = ("coo", "csr", "csc", "bsr", "bsc", "quantised", "nested", "generator")


def job_with(value: Any, wrap: Any = None, *, kept: bool) -> tuple[Any, Any]:
    """A model with the value in a buffer, and an optimizer that keeps it in three places.

    Args:
        kept: whether the optimizer has it already. A new one has not.
    """
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    if wrap != DistributedDataParallel and isinstance(value, torch.Tensor) and not value.is_nested:
        if value.is_quantized:
            empty = torch.quantize_per_tensor(torch.zeros(6), 1.0, 0, torch.quint8)
        else:
            empty = torch.sparse_coo_tensor(size=(3, 2)) if value.is_sparse else value * 0
        model.register_buffer("odd", value.clone() if kept else empty)
    wrapped = wrap(model) if wrap else model
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    wrapped(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if kept:
        optimizer.param_groups[0]["odd"] = value
        for slots in optimizer.state.values():
            slots.update(odd=value, more=[value, {"inner": (value, 3)}])
    return wrapped, optimizer


def loaded_with(folder: str, kind: str, wrap: Any, form: Any) -> Any:
    """What a new job has of the value after a load, as text; or the save's error."""
    value = value_of_kind(kind)

    def taken(model: Any, optimizer: Any) -> dict[str, Any]:
        more = {"alone": value, "list": [torch.ones(2), {"inner": value}]}
        if form is None:
            return {"model": model, "optimizer": optimizer, **more}
        with smckpt.sm_state_dict_type(model, form):
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}

    try:
        smckpt.save(taken(*job_with(value, wrap, kept=True)), checkpoint_id=folder)
    except errors.CheckpointError as error:
        return str(error)
    expected, value = value, value_of_kind(kind)
    if kind == "generator":  # a live one, which others may have, goes on as it was saved
        torch.randn(5, generator=value)
    model, optimizer = job_with(value, wrap, kept=False)
    state = taken(model, optimizer)
    smckpt.load(state, checkpoint_id=folder)
    if kind == "generator":
        assert state["alone"] is value
    buffers = [each for name, each in model.named_buffers() if name.endswith("odd")]
    slots = [optimizer.state[p] for p in optimizer.param_groups[0]["params"] if p.numel()]
    found = [
        *buffers, state["alone"], state["list"][1]["inner"], optimizer.param_groups[0]["odd"],
        *(one["odd"] for one in slots), *(one["more"][0] for one in slots),
        *(one["more"][1]["inner"][0] for one in slots),
    ]  # fmt: skip
    return {*map(described, found)} == {described(expected)}


def test_sparse_and_other_odd_tensors_and_generators_come_back_into_new_objects(
    tmp_path: Path,
) -> None:
    for kind in KINDS_OF_VALUES:
        for form in (None, smckpt.LOCAL, smckpt.SHARDED, smckpt.FULL):
            folder = str(tmp_path / f"{kind}-{form}")
            assert loaded_with(folder, kind, None, form) is True, (kind, form)
            whole = smckpt.load(None, checkpoint_id=folder)
            assert described(whole["alone"]) == described(value_of_kind(kind))


def under_wrappers(root: str) -> list[Any]:
    wraps = {
        "ddp": DistributedDataParallel,
        "fsdp1": partial(FSDP, use_orig_params=True, device_id=torch.device("cpu")),
        "fsdp2": fully_shard,
    }
    return [
        (kind, name, str(form), loaded_with(f"{root}/{kind}-{name}-{form}", kind, wrap, form))
        for kind in ("coo", "bsr", "generator")
        for name, wrap in wraps.items()
        for form in (None, smckpt.LOCAL, smckpt.SHARDED, smckpt.FULL)
    ]


def test_ranks_get_odd_tensors_back_and_full_state_refuses_them_on_all(tmp_path: Path) -> None:
    for rank in run_ranks(under_wrappers, 2, str(tmp_path), timeout=120):
        for kind, name, form, found in rank:
            refused = name == "fsdp1" or (name == "fsdp2" and kind != "generator")
            if "FULL" in form and refused:
                assert "FULL" in found and "gather" in found, (kind, name, form, found)
            else:
                assert found is True, (kind, name, form, found)
