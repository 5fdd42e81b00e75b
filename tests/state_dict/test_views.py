"""What the room holds to: private names of FSDP1 in one module, no search of the heap, and errors
that are told as what they were."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smckpt
from smckpt.errors import as_checkpoint_error
from smckpt.state_dict import model_views
from smckpt.state_dict.views import ModelView

PACKAGE = Path(smckpt.__file__).parent
PRIVATE = re.compile(
    r"\b(_handle|flat_param|_fsdp_wrapped_module|_inter_node_pg|_shard_param_infos|_local_shard"
    r"|_buffer_name_to_orig_dtype|_use_orig_params)\b"
)


def test_private_names_of_fsdp1_stand_in_its_view_alone() -> None:
    named = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if PRIVATE.search(path.read_text())
    }
    named.discard("formats/names.py")  # reads names of checkpoints that others wrote
    named.discard("integrations/nvrx/async_ckpt/core.py")  # the handle of a save
    assert named == {"state_dict/fsdp1.py"}


def test_no_state_is_found_by_a_search_of_the_heap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the optimizer of a dict from outside a block."""

    def searched(*_: Any) -> list[Any]:
        raise AssertionError("a search of the heap")

    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    for name in ("get_objects", "get_referrers"):
        monkeypatch.setattr(gc, name, searched)
    for number, form in enumerate(("object", "LOCAL", "SHARDED")):

        def state(form: str = form) -> Any:
            if form == "object":
                return {"optimizer": optimizer}
            with smckpt.sm_state_dict_type(model, getattr(smckpt, form)):
                return {"optimizer": optimizer.state_dict()}

        optimizer.param_groups[0]["lr"] = 0.1
        smckpt.save(state(), checkpoint_id=tmp_path / str(number))
        optimizer.param_groups[0]["lr"] = 9.0
        smckpt.load(state(), checkpoint_id=tmp_path / str(number))
        assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("error", [TypeError("x"), ValueError("x"), KeyError("x")], ids=repr)
def test_an_error_that_nobody_foresaw_is_not_told_as_the_users(error: Exception) -> None:
    told = as_checkpoint_error(error, 3)
    assert type(told) is smckpt.CheckpointError
    assert type(error).__name__ in str(told) and "rank 3" in str(told)


class Wrapped(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self._inside = inside


class WrappedView(ModelView):
    components = (*ModelView.components, "_inside")

    @classmethod
    def sees(cls, model: nn.Module) -> bool:
        return isinstance(model, Wrapped)


def test_a_registered_view_is_asked_first_and_sees_through_torch_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = model_views._VIEWS
    monkeypatch.setattr(known, "_registered", {"wrapped": WrappedView})
    model = torch.compile(Wrapped(nn.Sequential(nn.Linear(2, 2))))
    with smckpt.sm_state_dict_type(model, smckpt.LOCAL):
        assert sorted(model.state_dict()) == ["0.bias", "0.weight"]
        model.load_state_dict({"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)})
    assert type(model_views.view_of(nn.Linear(2, 2))) is ModelView


def test_two_tensors_that_come_to_one_name_are_refused() -> None:
    model = nn.Module()
    model.a = nn.Linear(2, 2)
    model.a._orig_mod = nn.Linear(2, 2)
    with (
        smckpt.sm_state_dict_type(model, smckpt.LOCAL),
        pytest.raises(smckpt.StateError, match="a.weight"),
    ):
        model.state_dict()
