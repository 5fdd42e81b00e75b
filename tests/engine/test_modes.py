"""A save and a load do the same in each mode of torch that their caller may be in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import smckpt
from smckpt import errors
from tests.support.truth import differences, snapshot


class EmptyFunctions(TorchFunctionMode):
    """Counts, and makes each new tensor wrong."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.empty, torch.empty_like, torch.zeros_like, torch.zeros, torch.tensor):
            return func(*args, **{**(kwargs or {}), "dtype": torch.float16})
        return func(*args, **(kwargs or {}))


class NoCopies(TorchDispatchMode):
    """A debugging mode that refuses what changes a tensor or makes one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in ("copy_", "empty", "zeros_like", "detach"):
            raise AssertionError(f"{func} was seen")
        return func(*args, **(kwargs or {}))


@contextmanager
def set_back(setter: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


@contextmanager
def level(transform: Callable[..., Any]) -> Iterator[None]:
    """Inside a transform of `torch.func`."""
    from torch._functorch import vmap as levels

    if transform is torch.vmap:
        with levels.vmap_increment_nesting(2, "error"):
            yield
    else:
        from torch._functorch.eager_transforms import grad_increment_nesting

        with grad_increment_nesting():
            yield


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "device meta": lambda: torch.device("meta"),
    "default device meta": lambda: set_back(torch.set_default_device, "meta", None),
    "default dtype half": lambda: set_back(torch.set_default_dtype, torch.float16, torch.float32),
    "default dtype double": lambda: set_back(torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic": lambda: set_back(torch.use_deterministic_algorithms, True, False),
    "function mode": EmptyFunctions,
    "dispatch mode": NoCopies,
    "fake": FakeTensorMode,
    "vmap": lambda: level(torch.vmap),
    "grad": lambda: level(torch.func.grad),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        # not contiguous: filled through a stand-in
        self.second = nn.Parameter(torch.randn(3, 6).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.first(x)) @ self.second
        return out


def made(seed: int, kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net()
    if kind == "sgd":
        return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if kind == "tensor rate":
        rate = torch.tensor(1e-2)
        return net, torch.optim.Adam(net.parameters(), lr=rate, amsgrad=True)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for _ in range(2):
        net(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


FORMS: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "objects": lambda net, optimizer: {"model": net, "optimizer": optimizer},
    "dicts": lambda net, optimizer: {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
    },
}


def taken(form: str, net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    if form in FORMS:
        return FORMS[form](net, optimizer)
    with smckpt.sm_state_dict_type(net, getattr(smckpt, form)):
        return FORMS["dicts"](net, optimizer)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "tensor rate"])
@pytest.mark.parametrize("form", ["objects", "LOCAL", "SHARDED"])
@pytest.mark.parametrize("mode", MODES)
def test_a_save_and_a_load_in_a_mode_change_no_bit_of_the_training(
    tmp_path: Path, mode: str, form: str, kind: str
) -> None:
    net, optimizer = made(0, kind)
    train(net, optimizer, 1)
    state = taken(form, net, optimizer)
    with MODES[mode]():
        smckpt.save(state, checkpoint_id=tmp_path / "in")
    train(net, optimizer, 2)
    # the arena of the save in the mode serves the next one too
    smckpt.save(taken(form, net, optimizer), checkpoint_id=tmp_path / "after")
    state = taken(form, net, optimizer)
    with MODES[mode]():
        smckpt.save(state, checkpoint_id=tmp_path / "again")
    train(net, optimizer, 3)
    wanted = snapshot(net, optimizer)

    resumed = made(7, kind)
    if kind == "sgd" and form != "objects":
        smckpt.init_optim_state(resumed[1])
    target = taken(form, *resumed)
    with MODES[mode]():
        smckpt.load(target, checkpoint_id=tmp_path / "in")
    train(*resumed, 2)
    train(*resumed, 3)
    assert not differences(wanted, snapshot(*resumed))

    late = made(8, kind)
    train(*late, 5)
    target = taken(form, *late)
    with MODES[mode]():
        smckpt.load(target, checkpoint_id=tmp_path / "again")
    train(*late, 3)
    assert not differences(wanted, snapshot(*late))


@pytest.mark.parametrize("form", ["dicts", "LOCAL", "SHARDED", "FULL"])
@pytest.mark.parametrize("mode", ["inference", "no_grad", "autocast", "device meta"])
def test_a_state_that_was_taken_in_the_mode_is_saved_and_loaded(
    tmp_path: Path, mode: str, form: str
) -> None:
    net, optimizer = made(0, "adamw")
    train(net, optimizer, 1)
    with MODES[mode]():
        smckpt.save(taken(form, net, optimizer), checkpoint_id=tmp_path)
    resumed = made(7, "adamw")
    train(*resumed, 5)
    with MODES[mode]():
        smckpt.load(taken(form, *resumed), checkpoint_id=tmp_path)
    train(net, optimizer, 2)
    train(*resumed, 2)
    assert not differences(snapshot(net, optimizer), snapshot(*resumed))


@pytest.mark.parametrize("mode", MODES)
def test_a_load_without_a_target_gives_ordinary_tensors_on_the_cpu(
    tmp_path: Path, mode: str
) -> None:
    net, optimizer = made(0, "adamw")
    train(net, optimizer, 1)
    smckpt.save({"model": net, "optimizer": optimizer}, checkpoint_id=tmp_path)
    with MODES[mode]():
        whole = smckpt.load(checkpoint_id=tmp_path)
    assert whole is not None
    again = made(3, "adamw")
    for tensor in whole["model"].values():
        assert type(tensor) is torch.Tensor and tensor.device.type == "cpu"
        assert not tensor.is_inference()
        tensor.add_(0)  # a tensor of inference mode refuses it
    again[0].load_state_dict(whole["model"])
    assert not differences(snapshot(net), snapshot(again[0]))


@pytest.mark.parametrize("mode", MODES)
def test_the_state_before_the_first_step_can_be_trained(mode: str) -> None:
    plain, ours = made(0, "adamw"), made(0, "adamw")
    with MODES[mode]():
        smckpt.init_optim_state(ours[1])
    slots = [slot for state in ours[1].state.values() for slot in state.values()]
    assert len(slots) == 15
    assert not any(slot.is_inference() or slot.is_meta for slot in slots)
    if "dtype" not in mode:  # Adam's count has the process's default dtype
        train(*plain, 1)
        train(*ours, 1)
        assert not differences(snapshot(*plain), snapshot(*ours))


class Asked:
    """Notes the modes in which its methods run."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def _note(self) -> None:
        made = torch.empty(1)
        self.seen.append(
            {
                "grad": torch.is_grad_enabled(),
                "autocast": torch.is_autocast_enabled("cpu"),
                "device": made.device.type,
                "inference": made.is_inference(),
            }
        )

    def state_dict(self) -> dict[str, Any]:
        self._note()
        return {"value": torch.ones(2, device="cpu")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._note()


@pytest.mark.parametrize(
    ("mode", "differs"),
    [
        ("none", {}),
        ("no_grad", {"grad": False}),
        ("autocast", {"autocast": True}),
        ("device meta", {"device": "meta"}),
        ("default device meta", {"device": "meta"}),
        ("inference", {"grad": False}),
        ("fake", {}),
    ],
)
def test_the_methods_of_a_users_object_run_in_the_users_mode_but_make_real_tensors(
    tmp_path: Path, mode: str, differs: dict[str, Any]
) -> None:
    asked, other = Asked(), torch.ones(2)
    with MODES[mode]():
        smckpt.save({"asked": asked, "w": other}, checkpoint_id=tmp_path)
        assert len(asked.seen) == 1
        smckpt.load({"asked": asked}, checkpoint_id=tmp_path)
    usual = {"grad": True, "autocast": False, "device": "cpu", "inference": False}
    assert asked.seen == [{**usual, **differs}] * 3


@pytest.mark.parametrize("mode", MODES)
def test_the_mode_of_the_caller_is_as_before_also_after_a_failure(
    tmp_path: Path, mode: str
) -> None:
    def now() -> tuple[Any, ...]:
        return (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"), torch.get_default_dtype(),
            torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack(),
            torch._C._functorch.maybe_current_level(), torch.get_default_device(),
        )  # fmt: skip

    tensor = torch.ones(2)
    without_memory = torch.ones(2, device="meta")
    with MODES[mode]():
        before = now()
        smckpt.save({"w": tensor}, checkpoint_id=tmp_path / "a")
        assert now() == before
        smckpt.load({"w": tensor}, checkpoint_id=tmp_path / "a")
        assert now() == before
        with pytest.raises(errors.CheckpointError):
            smckpt.load({"other": tensor}, checkpoint_id=tmp_path / "a")
        assert now() == before
        with pytest.raises(errors.StateError):
            smckpt.save({"w": without_memory}, checkpoint_id=tmp_path / "a")
        assert now() == before


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("form", ["objects", "dicts", "LOCAL", "SHARDED"])
def test_a_model_that_was_made_in_inference_mode_is_saved_and_loaded(
    tmp_path: Path, form: str, inside: bool
) -> None:
    with torch.inference_mode():
        torch.manual_seed(0)
        net, other = Net(), Net()

    def state(of: nn.Module) -> dict[str, Any]:
        if form == "objects":
            return {"model": of}
        if form == "dicts":
            return {"model": of.state_dict()}
        with smckpt.sm_state_dict_type(of, getattr(smckpt, form)):
            return {"model": of.state_dict()}

    with torch.inference_mode() if inside else nullcontext():
        smckpt.save(state(net), checkpoint_id=tmp_path)
        assert differences(snapshot(net), snapshot(other))
        smckpt.load(state(other), checkpoint_id=tmp_path)
        assert not differences(snapshot(net), snapshot(other))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_a_value_inside_a_transform_of_torch_func_is_refused_by_name(
    tmp_path: Path, transform: str
) -> None:
    def saved(x: torch.Tensor) -> torch.Tensor:
        smckpt.save({"inside": x}, checkpoint_id=tmp_path)
        return x.sum()

    with pytest.raises(errors.StateError, match=r"inside .*torch\.func"):
        (torch.vmap if transform == "vmap" else torch.func.grad)(saved)(torch.ones(2, 2))


@pytest.mark.filterwarnings("error")
def test_a_fake_tensor_is_refused_by_name(tmp_path: Path) -> None:
    with FakeTensorMode():
        fake = torch.ones(2)
        with pytest.raises(errors.StateError, match=r"\bw is a FakeTensor"):
            smckpt.save({"w": fake}, checkpoint_id=tmp_path)


def test_a_compiled_function_may_save_load_and_restore(tmp_path: Path) -> None:
    """The compiler would trace smckpt itself, and fail in it."""
    net, optimizer = made(0, "adamw")
    train(net, optimizer, 0)
    before = snapshot(net, optimizer)
    other, fresh = made(1, "adamw")
    last, new = made(2, "adamw")
    with smckpt.CheckpointManager(tmp_path / "run") as manager:

        @torch.compile(backend="eager")
        def step(x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            state = {"model": net, "optimizer": optimizer}
            smckpt.save(state, checkpoint_id=tmp_path / "one", step=1)
            manager.save(1, state).wait()
            smckpt.load({"model": other, "optimizer": fresh}, checkpoint_id=tmp_path / "one")
            return y * 2

        assert torch.equal(step(torch.ones(2)), torch.full((2,), 4.0))
        manager.restore({"model": last, "optimizer": new})
    for model, its in ((other, fresh), (last, new)):
        found = snapshot(model, its)
        assert differences(before, found) == []
