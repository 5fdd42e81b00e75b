"""`SaveOptions(staging="overlap")`: what may go on while the state is copied, and what fails."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import optimizer as torch_optimizers

import smckpt
from smckpt.engine import api
from smckpt.engine.saving.alarms import Observer
from smckpt.state_dict import register_tensor_class
from tests.support.faults.late_stream import LateStream
from tests.support.launch import run_ranks
from tests.support.limits import seconds

QUEUES = itertools.count()
OVERLAP = smckpt.SaveOptions(staging="overlap")


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateStream]:
    """A stream that copies from the CPU as from a device, once a test lets it."""
    stream = LateStream()
    monkeypatch.setattr(api._RUNTIME, "overlap", stream.overlap())
    yield stream
    stream.let.set()
    assert not torch_optimizers._global_optimizer_pre_hooks


class Run:
    """A model with a buffer, an optimizer, and saves of both in a queue of their own."""

    def __init__(self, root: Path, optimizer: Callable[[Any], Any] = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(7, 50), nn.BatchNorm1d(50), nn.Linear(50, 3))
        self.kind, self.optimizer = optimizer, optimizer(self.model.parameters())
        self.root, self.queue, self.saves = root, f"overlap-{next(QUEUES)}", 0
        self.learn()
        self.optimizer.step()

    def learn(self) -> None:
        """A forward, which changes the buffers, and a backward."""
        self.model(torch.randn(11, 7)).square().mean().backward()

    def state(self) -> dict[str, Any]:
        with smckpt.sm_state_dict_type(self.model, smckpt.LOCAL):
            return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self, options: smckpt.SaveOptions = OVERLAP) -> tuple[Any, dict[str, torch.Tensor]]:
        """Begin a save. Returns the handle, and copies of the tensors as they are now."""
        self.saves += 1
        state = self.state()
        now = {key: value.clone() for key, value in flat(state).items()}
        handle = smckpt.async_save(
            state,
            checkpoint_id=self.root / str(self.saves),
            options=replace(options, queue=self.queue),
        )
        assert handle is not None
        return handle, now

    def saved(self, number: int = 0) -> dict[str, torch.Tensor]:
        other = Run(self.root, self.kind)
        state = other.state()
        smckpt.load(state, checkpoint_id=self.root / str(number or self.saves))
        return flat(state)


def flat(tree: Any, at: str = "") -> dict[str, torch.Tensor]:
    if hasattr(tree, "__tensor_flatten__"):
        tree = {name: getattr(tree, name) for name in tree.__tensor_flatten__()[0]}
    if isinstance(tree, torch.Tensor):
        return {at: tree.detach()}
    if not isinstance(tree, (dict, list, tuple)):
        return {}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {k: v for key, value in items for k, v in flat(value, f"{at}.{key}").items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys() and len(found) > 10
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def waits(late: LateStream, act: Callable[[], object], limit: float | None = None) -> None:
    """`act` does not end before the copies have landed. They land once it waits for them; after
    `limit` seconds if it does so unseen."""
    ended = threading.Event()
    late.asked.clear()

    def run() -> None:
        act()
        ended.set()
        late.asked.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert late.asked.wait(seconds(60) if limit is None else limit) or limit
    early = ended.is_set()
    late.let.set()
    thread.join(seconds(60))
    assert ended.is_set() and not early


# -- what may go on --------------------------------------------------------------------------------


def test_forward_and_backward_go_on_and_the_step_waits(late: LateStream, tmp_path: Path) -> None:
    """Gradients accumulate, and BatchNorm's statistics change, while nothing is copied yet."""
    run = Run(tmp_path)
    handle, now = run.save()
    assert not handle.copied.done() and late.waits > 0
    run.learn()
    run.learn()
    assert not torch.equal(flat(run.state())[".model.1.running_mean"], now[".model.1.running_mean"])
    waits(late, run.optimizer.step)
    timings = handle.wait(seconds(60))
    assert timings.blocked < timings.staged
    assert_same(run.saved(), now)
    assert not torch_optimizers._global_optimizer_pre_hooks
    assert not torch.equal(flat(run.state())[".model.0.weight"], now[".model.0.weight"])


def test_each_optimizer_waits_and_one_that_is_not_in_the_state_does_nothing_else(
    late: LateStream, tmp_path: Path
) -> None:
    run, other = Run(tmp_path), nn.Parameter(torch.ones(3))
    second = torch.optim.SGD([other], lr=1.0)
    other.grad = torch.ones(3)
    attributes = vars(second).keys()
    handle, now = run.save()
    waits(late, second.step)
    assert vars(second).keys() == attributes and not second._optimizer_step_pre_hooks
    assert torch.equal(other, torch.zeros(3))
    handle.wait(seconds(60))
    assert_same(run.saved(), now)


def test_optimizers_that_step_in_the_backward_wait_there(late: LateStream, tmp_path: Path) -> None:
    run = Run(tmp_path)
    for parameter in run.model.parameters():
        each = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, each=each: each.step())
    handle, now = run.save()
    waits(late, run.learn)
    handle.wait(seconds(60))
    assert_same(run.saved(), now)
    assert not torch.equal(flat(run.state())[".model.0.weight"], now[".model.0.weight"])


def test_a_compiled_step_waits(late: LateStream, tmp_path: Path) -> None:
    """Compiled before there was a hook."""
    run = Run(tmp_path)
    step = torch.compile(run.optimizer.step, backend="eager")
    run.learn()
    step()
    handle, now = run.save()
    waits(late, step)
    handle.wait(seconds(60))
    assert_same(run.saved(), now)
    assert not torch.equal(flat(run.state())[".model.0.weight"], now[".model.0.weight"])


def test_the_step_of_a_grad_scaler_waits(late: LateStream, tmp_path: Path) -> None:
    run, scaler = Run(tmp_path), torch.amp.GradScaler("cpu", init_scale=4.0)
    run.optimizer.zero_grad()
    handle, now = run.save()
    scaler.scale(run.model(torch.randn(11, 7)).square().mean()).backward()
    scaler.unscale_(run.optimizer)
    waits(late, lambda: scaler.step(run.optimizer))
    scaler.update()
    handle.wait(seconds(60))
    assert_same(run.saved(), now)


def test_after_wait_for_staging_anything_may_change(late: LateStream, tmp_path: Path) -> None:
    run = Run(tmp_path)
    handle, now = run.save()
    with pytest.raises(TimeoutError, match=f"save {handle.number} was not copied within"):
        handle.wait_for_staging(0.01)
    waits(late, handle.wait_for_staging, 0.2)
    with torch.no_grad():
        run.model[0].weight.zero_()
    handle.wait(seconds(60))
    assert_same(run.saved(), now)
    blocking, _ = run.save(smckpt.SaveOptions())
    blocking.wait_for_staging(0)  # nothing is under way
    blocking.wait(seconds(60))


def test_an_optimizer_object_and_its_own_dict_wait_too(late: LateStream, tmp_path: Path) -> None:
    """Their state changes in a step. A model's plain tensors may be buffers outside a block."""
    run = Run(tmp_path)
    tree = {
        "object": run.optimizer,
        "dict": run.optimizer.state_dict(),
        "model": run.model.state_dict(),
    }
    now = {
        key: value.clone()
        for key, value in flat({**tree, "object": run.optimizer.state_dict()}).items()
    }
    handle = smckpt.async_save(
        tree, checkpoint_id=tmp_path / "c", options=replace(OVERLAP, queue=run.queue)
    )
    assert handle is not None and handle.copied is not None and not handle.copied.done()
    with torch.no_grad():
        run.model[0].weight.zero_()  # is copied
    run.learn()
    waits(late, run.optimizer.step)
    handle.wait(seconds(60))
    other = Run(tmp_path)
    target = {
        "object": other.optimizer,
        "dict": other.optimizer.state_dict(),
        "model": other.model.state_dict(),
    }
    smckpt.load(target, checkpoint_id=tmp_path / "c")
    assert_same(flat({**target, "object": other.optimizer.state_dict()}), now)


def test_a_load_into_the_state_and_a_save_in_another_queue_do_not_tear_it(
    late: LateStream, tmp_path: Path
) -> None:
    run = Run(tmp_path)
    late.let.set()
    run.save()[0].wait(seconds(60))
    late.let.clear()
    run.learn()
    run.optimizer.step()
    handle, now = run.save()
    run.queue = f"overlap-{next(QUEUES)}"
    other, same = run.save()
    waits(late, lambda: smckpt.load(run.state(), checkpoint_id=tmp_path / "1"))
    handle.wait(seconds(60))
    other.wait(seconds(60))
    assert_same(run.saved(2), now)
    assert_same(run.saved(3), same)


# -- what fails, and what blocks -------------------------------------------------------------------


def test_a_change_that_no_hook_sees_fails_the_save_by_name_and_later_ones_block(
    late: LateStream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel, a replay of a graph, a write through .data: none of them says so to anybody."""
    run = Run(tmp_path)
    handle, _ = run.save()
    run.model[2].weight.data.view(-1)[17] += 1.0
    late.let.set()
    with pytest.raises(smckpt.SaveFailedError) as failed:
        handle.wait(seconds(60))
    text = str(failed.value)
    assert "model.2.weight changed while the save copied the state" in text and "rank 0" in text
    assert "wait_for_staging()" in failed.value.remedy and '"block"' in failed.value.remedy
    with pytest.raises(smckpt.errors.CheckpointNotFoundError):
        run.saved()
    late.let.clear()
    with caplog.at_level(logging.WARNING, "smckpt"):
        for _ in range(2):
            handle, now = run.save()
            with torch.no_grad():
                run.model[2].weight.zero_()
            handle.wait(seconds(60))
            assert_same(run.saved(), now)
    said = [r.getMessage() for r in caplog.records if "does not overlap" in r.getMessage()]
    assert len(said) == 1 and "model.2.weight changed while an earlier save" in said[0]


class ScheduleFree(torch.optim.SGD):
    """As the optimizers of that name: it swaps the parameters for their average, and back."""

    def eval(self) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.5)

    def train(self) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(2.0)


@pytest.mark.parametrize("as_object", [False, True])
def test_an_optimizer_that_swaps_parameters_outside_its_step_blocks(
    late: LateStream, tmp_path: Path, caplog: pytest.LogCaptureFixture, as_object: bool
) -> None:
    run = Run(tmp_path, lambda of: ScheduleFree(of, lr=0.1, momentum=0.9))
    state = run.state()
    if as_object:
        state["optimizer"] = run.optimizer
    run.optimizer.eval()
    weight = run.model[0].weight.detach().clone()
    smckpt.async_save(
        state, checkpoint_id=tmp_path / "1", options=replace(OVERLAP, queue=run.queue)
    ).wait()
    run.optimizer.train()
    target = {"model": Run(tmp_path).model.state_dict()}
    smckpt.load(target, checkpoint_id=tmp_path / "1")
    assert torch.equal(target["model"]["0.weight"], weight)
    assert "ScheduleFree changes parameters in train() and eval() too" in caplog.text


class Wrapper(torch.optim.SGD):
    """As accelerate's: it has both methods, whatever the optimizer inside has."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.state, self.param_groups = optimizer.state, optimizer.param_groups
        self.defaults = optimizer.defaults

    def eval(self) -> None: ...

    def train(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


def test_a_wrapper_with_the_modes_of_such_an_optimizer_overlaps(
    late: LateStream, tmp_path: Path
) -> None:
    run = Run(tmp_path)
    state = {"optimizer": Wrapper(run.optimizer)}
    handle = smckpt.async_save(
        state, checkpoint_id=tmp_path / "c", options=replace(OVERLAP, queue=run.queue)
    )
    assert handle is not None and handle.copied is not None and not handle.copied.done()
    late.let.set()
    handle.wait(seconds(60))


class LowBit(torch.Tensor):
    """Eight bits a value, and a scale, as the state of a low-bit optimizer."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, shape: Any, stride: Any) -> Any:
        return cls(**inner)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise AssertionError(f"{func} ran: only what is inside is to be read")


class LowBitSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if "low" not in state:
                codes = torch.zeros(parameter.shape, dtype=torch.uint8)
                state["low"] = LowBit(codes, torch.ones(()))
            state["low"].codes += 1
            state["low"].scale += 1.0


def test_low_bit_state_is_copied_late_by_its_parts(late: LateStream, tmp_path: Path) -> None:
    register_tensor_class(LowBit)
    run = Run(tmp_path, LowBitSGD)
    handle, now = run.save()
    waits(late, run.optimizer.step)
    handle.wait(seconds(60))
    assert_same(run.saved(), now)
    late.let.clear()
    handle, now = run.save()
    run.optimizer.state[run.model[0].weight]["low"].codes += 1  # not in a step
    late.let.set()
    with pytest.raises(smckpt.SaveFailedError, match="low.codes changed while"):
        handle.wait(seconds(60))


def test_a_state_of_which_nothing_can_be_late_blocks_and_auto_on_the_cpu_says_nothing(
    late: LateStream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, state = Run(tmp_path), {"w": torch.randn(100), "step": 3}
    for options, said in ((OVERLAP, True), (smckpt.SaveOptions(staging="auto"), False)):
        caplog.clear()
        smckpt.save(state, checkpoint_id=tmp_path / "c", options=replace(options, queue=run.queue))
        assert ("take the state in sm_state_dict_type" in caplog.text) == said
    assert late.waits == 0


def test_the_next_save_waits_for_the_copies_of_one_that_failed_before_they_ended(
    late: LateStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They still write to the arena."""
    run, begun = Run(tmp_path), []  # type: tuple[Run, list[Any]]
    with monkeypatch.context() as patched:

        def fails(*_: Any) -> Any:
            raise RuntimeError("no memory for checksums")

        patched.setattr(Observer, "hold", fails)
        with pytest.raises(RuntimeError, match="no memory for checksums"):
            run.save()
    waits(late, lambda: begun.append(run.save(smckpt.SaveOptions())), 0.2)
    ((handle, now),) = begun
    handle.wait(seconds(60))
    assert_same(run.saved(2), now)


def sharded(folder: str) -> tuple[bool, str]:
    """FSDP2: a save with a step right behind it, then one that rank 1 tears. Returns whether the
    first one has the bits of its call, and how the second one fails."""
    stream = LateStream()
    api._RUNTIME.overlap = stream.overlap()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 50), nn.Linear(50, 60))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def learn() -> None:
        model(torch.randn(5, 60)).square().mean().backward()

    def state() -> dict[str, Any]:
        with smckpt.sm_state_dict_type(model, smckpt.SHARDED):
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def local() -> dict[str, torch.Tensor]:
        return {k: v.clone() for k, v in flat(state()).items() if k.endswith("._local_tensor")}

    learn()
    optimizer.step()
    now = local()
    handle = smckpt.async_save(state(), checkpoint_id=f"{folder}/1", options=OVERLAP)
    assert handle is not None and handle.copied is not None and not handle.copied.done()
    learn()
    waits(stream, optimizer.step)
    handle.wait(seconds(60))
    stream.let.clear()
    handle = smckpt.async_save(state(), checkpoint_id=f"{folder}/2", options=OVERLAP)
    if torch.distributed.get_rank() == 1:
        model[1].weight.detach().to_local()[3, 4] += 1.0
    stream.let.set()
    try:
        handle.wait(seconds(60))
        failed = "committed"
    except smckpt.SaveFailedError as error:
        failed = str(error)
    smckpt.load(state(), checkpoint_id=f"{folder}/1")
    found = local()
    same = found.keys() == now.keys() and all(torch.equal(found[k], now[k]) for k in now)
    return same and len(now) == 12, failed


def test_shards_are_saved_as_they_were_and_a_tear_of_one_rank_fails_all(tmp_path: Path) -> None:
    for same, failed in run_ranks(sharded, 2, str(tmp_path)):
        assert same
        assert "model.1.weight changed while the save copied" in failed and "rank 1" in failed


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"staging": "later"}, "staging is 'later'"),
        ({"staging": "overlap", "stager": print}, "no effect together with stager="),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options: Any, text: str) -> None:
    with pytest.raises(smckpt.errors.UsageError, match=text):
        smckpt.SaveOptions(**options)
