"""What modules compute for their state dict goes back to them."""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardedStateDictConfig

import smckpt
from smckpt import errors
from smckpt.state_dict.tags import ModelStateDict
from tests.support.launch import run_ranks

KINDS = [smckpt.LOCAL, smckpt.SHARDED, smckpt.FULL]


class Scaling(nn.Linear):
    """Keeps its scales in bytes, as many as they take and none before the first step, as
    Transformer Engine's layers do."""

    scales: list[float] | None = None

    def get_extra_state(self) -> torch.Tensor:
        text = json.dumps(self.scales).encode() if self.scales else b""
        return torch.tensor(list(text), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.scales = json.loads(bytes(state.tolist())) if state.numel() else None


class Fused(nn.Module):
    """Two weights that stand as one, and a version, in its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self._register_state_dict_hook(self.fuse)
        self.register_load_state_dict_pre_hook(self.split)

    @staticmethod
    def fuse(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        two = [state.pop(f"{prefix}{name}.weight") for name in ("q", "k")]
        state[f"{prefix}qk.weight"], state[f"{prefix}version"] = torch.cat(two), 7

    @staticmethod
    def split(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        assert state.pop(f"{prefix}version") == 7
        two = state.pop(f"{prefix}qk.weight").chunk(2)
        state[f"{prefix}q.weight"], state[f"{prefix}k.weight"] = two


def model(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(Scaling(3, 3), Fused(), nn.Linear(3, 3))


@pytest.mark.parametrize("how", ["load alone", "load_state_dict", "after the block", "the model"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_extra_state_of_any_size_and_what_hooks_put_together_come_back_to_the_modules(
    tmp_path: Path, kind: Any, how: str
) -> None:
    trained, fresh = model(0), model(1)
    trained[0].scales = [1.5, 0.1]

    def block(of: nn.Module) -> Any:
        return nullcontext() if how == "the model" else smckpt.sm_state_dict_type(of, kind)

    with block(trained):
        state = {"model": trained if how == "the model" else trained.state_dict()}
        smckpt.save(state, checkpoint_id=tmp_path)
    with block(fresh):
        target = {"model": fresh if how == "the model" else fresh.state_dict()}
        if how != "after the block":
            smckpt.load(target, checkpoint_id=tmp_path)
        if how == "load_state_dict":
            fresh.load_state_dict(target["model"])
    if how == "after the block":
        smckpt.load(target, checkpoint_id=tmp_path)
    assert fresh[0].scales == [1.5, 0.1]
    for mine, theirs in zip(fresh.parameters(), trained.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("how", ["prefix", "copies in host memory"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_a_load_fills_the_modules_through_prefixed_names_and_through_copies(
    tmp_path: Path, kind: Any, how: str
) -> None:
    trained, fresh = model(0), model(1)
    trained[0].scales = [1.5, 0.1]
    prefix = "net." if how == "prefix" else ""
    config = None
    if not prefix:
        full = kind is smckpt.FULL
        config = smckpt.FullStateDictConfig(True) if full else ShardedStateDictConfig(True)
    with smckpt.sm_state_dict_type(trained, kind, config):
        state = trained.state_dict(prefix=prefix)
        assert sorted(state) == [f"{prefix}{name}" for name in sorted(trained.state_dict())]
        smckpt.save({"model": state}, checkpoint_id=tmp_path)
    saved = smckpt.load(checkpoint_id=tmp_path)["model"]
    assert sorted(saved) == sorted(state)
    with smckpt.sm_state_dict_type(fresh, kind, config):
        target = fresh.state_dict(prefix=prefix)
        smckpt.load({"model": target}, checkpoint_id=tmp_path)
    assert fresh[0].scales == [1.5, 0.1]
    for mine, theirs in zip(fresh.parameters(), trained.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    if not prefix and kind is not smckpt.FULL:
        with torch.no_grad():
            for parameter in fresh.parameters():
                parameter.zero_()
        assert all(value.any() for value in target.values() if isinstance(value, torch.Tensor))


def test_a_world_of_one_is_not_told_to_load_its_full_state_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained = model(0)
    with smckpt.sm_state_dict_type(trained, smckpt.FULL):
        smckpt.save({"model": trained.state_dict()}, checkpoint_id=tmp_path)
        smckpt.load({"model": trained.state_dict()}, checkpoint_id=tmp_path)
    assert "load_state_dict" not in caplog.text


class Counting(nn.Linear):
    """Adds a number to its state dict by a method that FSDP1's local state cannot call."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}count"] = 5


def listening() -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("smckpt").addHandler(handler)
    return said


def said_under_fsdp1() -> list[str]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    said = listening()
    inside = nn.Sequential(nn.Linear(3, 3), Counting(3, 3))
    wrapped = FullyShardedDataParallel(inside, device_id=torch.device("cpu"))
    for _ in range(2):
        with smckpt.sm_state_dict_type(wrapped, smckpt.LOCAL):
            wrapped.state_dict()
    return said


def test_under_fsdp1_the_log_says_once_which_module_saves_more_than_is_taken() -> None:
    for said in run_ranks(said_under_fsdp1, 2, timeout=60):
        [line] = [line for line in said if "_save_to_state_dict" in line]
        assert line.startswith("1 (Counting)")


class Packing(nn.Module):
    """Its state dict has a value that its `load_state_dict` does not know (as in bitsandbytes)."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.ones(3))
        self.factor = factor

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}packed"] = torch.tensor([self.factor])


@pytest.mark.parametrize("kind", [smckpt.LOCAL, smckpt.SHARDED])
def test_a_value_that_the_model_does_not_take_back_is_named(tmp_path: Path, kind: Any) -> None:
    def state(model: nn.Module) -> dict[str, Any]:
        with smckpt.sm_state_dict_type(model, kind):
            return {"model": model.state_dict()}

    smckpt.save(state(nn.Sequential(Packing(2.0))), checkpoint_id=tmp_path)
    with pytest.raises(errors.StateError, match=r"0\.packed.*does not take them back"):
        smckpt.load(state(nn.Sequential(Packing(1.0))), checkpoint_id=tmp_path)


class Deriving(nn.Module):
    """Computes from its weights, after each load, what no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("sums", None, persistent=False)
        self.loads = 0
        self.register_load_state_dict_post_hook(self.derive)

    @staticmethod
    def derive(module: nn.Module, keys: Any) -> None:
        assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
        module.sums, module.loads = module.inner.weight.sum(0).detach(), module.loads + 1


def wraps() -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    return {
        "plain": lambda model: model,
        "inside": lambda model: nn.Sequential(nn.Linear(2, 2), model),
        "DDP": nn.parallel.DistributedDataParallel,
        "FSDP2": fully_shard,
    }


def derived_by(wrap: str, kind: Any, path: str) -> tuple[int, bool]:
    def state(model: nn.Module) -> dict[str, Any]:
        if kind is None:
            return {"model": model}
        with smckpt.sm_state_dict_type(model, kind):
            return {"model": model.state_dict()}

    torch.manual_seed(0)
    trained, fresh = Deriving(), Deriving()
    sums = trained.inner.weight.sum(0).detach()
    smckpt.save(state(wraps()[wrap](trained)), checkpoint_id=path)
    smckpt.load(state(wraps()[wrap](fresh)), checkpoint_id=path)
    return fresh.loads, wrap == "FSDP2" or torch.equal(fresh.sums, sums)


@pytest.mark.parametrize("wrap", ["plain", "inside", "DDP", "FSDP2"])
def test_hooks_that_follow_a_load_are_called_once(tmp_path: Path, wrap: str) -> None:
    """Under FSDP2 they see shards, as in stock."""
    for kind in (None, smckpt.LOCAL, smckpt.SHARDED):
        path = str(tmp_path / str(kind))
        if wrap in ("plain", "inside"):
            assert derived_by(wrap, kind, path) == (1, True), kind
        else:
            for found in run_ranks(derived_by, 2, wrap, kind, path, timeout=60):
                assert found == (1, True), kind


def said_of_hooks(original: bool, kind: Any, path: str) -> tuple[list[str], int, list[bool]]:
    """What the log says, how often the hook ran, and whether states call hooks: without one, and
    with one."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    said, calls_hooks = listening(), []
    for inside in (nn.Linear(3, 3), deriving := Deriving()):
        wrapped = FullyShardedDataParallel(
            nn.Sequential(inside), use_orig_params=original, device_id=torch.device("cpu")
        )
        with smckpt.sm_state_dict_type(wrapped, kind):
            state = {"model": wrapped.state_dict()}
            smckpt.save(state, checkpoint_id=path)
            smckpt.load(state, checkpoint_id=path)
        calls_hooks.append(isinstance(state["model"], ModelStateDict))
    return [line for line in said if "hook" in line], deriving.loads, calls_hooks


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("kind", [smckpt.LOCAL, smckpt.SHARDED])
def test_under_fsdp1_the_log_names_the_hooks_that_a_load_does_not_call(
    tmp_path: Path, original: bool, kind: Any
) -> None:
    """torch's load gathers whole parameters for them. FSDP1's own hooks do not count."""
    for said, loads, calls_hooks in run_ranks(
        said_of_hooks, 2, original, kind, str(tmp_path), timeout=60
    ):
        [line] = said
        assert line.startswith("0 has hooks that follow a load")
        assert (loads, calls_hooks) == (0, [False, True])


def test_hooks_that_follow_a_load_are_called_in_torchs_order(tmp_path: Path) -> None:
    """Those of children from left to right, and of a shared module each time."""

    def model() -> tuple[nn.Module, list[str]]:
        shared, called = nn.Linear(2, 2), list[str]()
        out = nn.ModuleDict(
            {
                "first": nn.Sequential(nn.Linear(2, 2), shared),
                "second": nn.ModuleDict({"again": shared, "empty": nn.Identity()}),
            }
        )
        out["second"].register_module("none", None)
        for name, module in out.named_modules():
            module.register_load_state_dict_post_hook(lambda *_, name=name: called.append(name))
        return out, called

    (trained, _), (stock, expected), (fresh, called) = model(), model(), model()
    stock.load_state_dict(trained.state_dict())
    for call, each in ((smckpt.save, trained), (smckpt.load, fresh)):
        with smckpt.sm_state_dict_type(each, smckpt.SHARDED):
            call({"model": each.state_dict()}, checkpoint_id=tmp_path)
    assert called == expected and called.count("first.1") == 2


class Renaming(nn.Sequential):
    """Its own two methods keep a number beside the names."""

    step = 0

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        own = super().state_dict(*args, **kwargs)
        return {f"step{self.step}.{name}": value for name, value in own.items()}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        self.loaded = len(state_dict)
        own = {name.partition(".")[2]: value for name, value in state_dict.items()}
        return super().load_state_dict(own, *args, **kwargs)


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_a_class_with_both_methods_of_its_own_gets_its_state_by_them(
    tmp_path: Path, kind: Any
) -> None:
    def state(model: nn.Module) -> dict[str, Any]:
        with nullcontext() if kind is None else smckpt.sm_state_dict_type(model, kind):
            return {"model": model if kind is None else model.state_dict()}

    trained, fresh = Renaming(nn.Linear(3, 3)), Renaming(nn.Linear(3, 3))
    smckpt.save(state(trained), checkpoint_id=tmp_path)
    smckpt.load(state(fresh), checkpoint_id=tmp_path)
    assert fresh.loaded == 2 and torch.equal(fresh[0].weight, trained[0].weight)


class Written(nn.Linear):
    """Writes its count into a buffer before each state dict, and reads it after each load."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("count", torch.zeros(1))
        self.steps = 0
        self.register_state_dict_pre_hook(self.write)
        self.register_load_state_dict_post_hook(self.read)

    @staticmethod
    def write(module: Any, prefix: str, keep_vars: bool) -> None:
        module.count.fill_(module.steps)

    @staticmethod
    def read(module: Any, keys: Any) -> None:
        module.steps = int(module.count)


class Loading(nn.Linear):
    """Has a `load_state_dict` of its own, and torch's `state_dict`."""

    steps = 0

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.steps = len(state_dict)
        return super().load_state_dict(state_dict, strict, assign)


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize(
    ("make", "steps"),
    [(Written, 5), (lambda: nn.Sequential(Written()), 5), (lambda: Loading(3, 3), 2)],
)
def test_a_load_leaves_modules_as_torchs_own_load_does(
    tmp_path: Path, kind: Any, make: Any, steps: int
) -> None:
    """A hook that precedes `state_dict` wrote a new model's count over the one just loaded."""

    def state(model: nn.Module) -> dict[str, Any]:
        with nullcontext() if kind is None else smckpt.sm_state_dict_type(model, kind):
            return {"model": model if kind is None else model.state_dict()}

    trained, stock, fresh = make(), make(), make()
    for module in trained.modules():
        module.steps = 5
    stock.load_state_dict(trained.state_dict())
    smckpt.save(state(trained), checkpoint_id=tmp_path)
    smckpt.load(state(fresh), checkpoint_id=tmp_path)
    found = [getattr(module, "steps", None) for module in fresh.modules()]
    assert found == [getattr(module, "steps", None) for module in stock.modules()]
    assert found[-1] == steps
    for name, value in stock.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name
