"""Loads whose target has other names than the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import smckpt
from smckpt import CheckpointManager, errors
from tests.support.launch import run_ranks


class Old(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
        self.head = nn.Linear(4, 2)


class New(nn.Module):
    """The same with other names; it lacks nothing and has nothing more."""

    def __init__(self) -> None:
        super().__init__()
        old = Old()
        self.backbone = nn.ModuleDict({"layers": old.encoder})
        self.classifier = old.head


RENAMED = {"backbone.layers": "encoder", "classifier": "head"}


def wrapped(model: Any, how: str) -> Any:
    if how.startswith("fsdp1"):
        return FullyShardedDataParallel(
            model, use_orig_params=how.endswith("orig"), device_id=torch.device("cpu")
        )
    if how == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def taken(model: Any, kind: Any) -> dict[str, Any]:
    with smckpt.sm_state_dict_type(model, kind):
        return {"model": model.state_dict()}


def values_of(place: str) -> dict[str, Any]:
    """The saved model, whole, by name."""
    loaded = smckpt.load(
        checkpoint_id=place, options=smckpt.LoadOptions(only=["model"]), no_dist=True
    )
    assert loaded is not None
    model: dict[str, Any] = loaded["model"]
    return model


def renamed_everywhere(folder: str, hows: tuple[str, ...]) -> None:
    for source in hows:
        torch.manual_seed(1)
        for kind in (smckpt.LOCAL, smckpt.SHARDED):
            saved = taken(wrapped(Old(), source), kind)
            place = f"{folder}/{source}-{kind.value}"
            smckpt.save(saved, checkpoint_id=place)
            wanted = values_of(place)
            for how in hows:
                for into in (smckpt.LOCAL, smckpt.SHARDED):
                    torch.manual_seed(7)
                    target = wrapped(New(), how)
                    smckpt.load(
                        taken(target, into),
                        checkpoint_id=place,
                        options=smckpt.LoadOptions(renamed=RENAMED),
                    )
                    again = f"{folder}/again"
                    smckpt.save(taken(target, smckpt.SHARDED), checkpoint_id=again)
                    found = values_of(again)
                    assert len(found) == len(wanted) > 8
                    for ours, value in found.items():
                        name = ours.replace("backbone.layers", "encoder")
                        name = name.replace("classifier", "head")
                        assert torch.equal(value, wanted[name]), (source, how, into, ours)
                    dist.barrier()


@pytest.mark.parametrize(
    "hows",
    [("fsdp2",), pytest.param(("fsdp2", "fsdp1", "fsdp1-orig", "plain"), marks=pytest.mark.long)],
)
def test_weights_load_under_other_names(hows: tuple[str, ...], tmp_path: Path) -> None:
    run_ranks(renamed_everywhere, 2, str(tmp_path), hows)


def test_what_does_not_fit_is_named_and_nothing_is_changed(tmp_path: Path) -> None:
    smckpt.save({"model": Old().state_dict()}, checkpoint_id=tmp_path)
    model = New()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    half = {"backbone.layers": "encoder"}
    for renamed in (None, half, {**half, "classifier": "heads"}, {**half, "class": "head"}):
        with pytest.raises(errors.KeysMismatchError, match="head"):
            smckpt.load(
                {"model": model.state_dict()},
                checkpoint_id=tmp_path,
                options=smckpt.LoadOptions(renamed=renamed),
            )
    crossed = {"backbone.layers.0": "encoder.2", "classifier": "head"}
    with pytest.raises(errors.CheckpointError):
        smckpt.load(
            {"model": model.state_dict()},
            checkpoint_id=tmp_path,
            options=smckpt.LoadOptions(renamed=crossed),
        )
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_what_cannot_be_honoured_is_refused(tmp_path: Path) -> None:
    model = New()
    optimizer = torch.optim.AdamW(model.parameters())
    smckpt.save({"model": Old().state_dict()}, checkpoint_id=tmp_path)
    both = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for target, renamed, why in (
        (both, RENAMED, "has an optimizer's state"),
        (None, RENAMED, "there is no target"),
        ({"model": model.state_dict()}, {"": "head"}, "renamed is"),
        ({"model": model.state_dict()}, {"classifier": 3}, "renamed is"),
    ):
        with pytest.raises(errors.UsageError, match=why):
            smckpt.load(target, checkpoint_id=tmp_path, options=smckpt.LoadOptions(renamed=renamed))  # type: ignore[arg-type]


def test_a_manager_restores_under_other_names(tmp_path: Path) -> None:
    old, new = Old(), New()
    with CheckpointManager(tmp_path, signals=()) as manager:
        manager.save(3, {"model": old})
    with CheckpointManager(tmp_path, signals=()) as manager:
        assert manager.restore({"model": new}, renamed=RENAMED) == 3
    assert torch.equal(new.classifier.weight, old.head.weight)
    assert torch.equal(new.backbone["layers"][0].bias, old.encoder[0].bias)  # type: ignore[index]
