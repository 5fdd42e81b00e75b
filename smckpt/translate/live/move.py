"""Send the tensors of all ranks to rank 0 one by one, make the targets there, and send them out.

A rank that fails goes on sending and receiving until all ranks settle.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from smckpt.errors import TensorMismatchError, UsageError
from smckpt.formats.tensors import Block, TensorKey
from smckpt.full.wire import Array, ArrayMetadata, Attempt, Wire, assembled, own_rank
from smckpt.layout.mesh import Shape
from smckpt.layout.strided import Piece, execute
from smckpt.translate.cast import cast
from smckpt.translate.ranks.translated import Translated

log = logging.getLogger("smckpt")

_SETTLE = 256 << 20  # at most this many bytes move after a failure before all ranks raise it


@dataclass(frozen=True)
class MoveTask:
    """One stored tensor: the ranks that have its parts, the targets of its blocks, and the tensor
    that it must equal. replica: the previous task's tensor again, from the last of the ranks that
    should hold the same."""

    key: TensorKey
    shape: Shape
    dtype: str
    parts: tuple[tuple[int, ArrayMetadata, tuple[Piece, ...]], ...]
    blocks: tuple[tuple[str, Block], ...]
    copy_of: TensorKey | None
    replica: bool = False


@dataclass(frozen=True)
class MoveStep:
    """One stored tensor for the other ranks: who sends, which targets are whole afterwards, and
    whether all ranks then ask each other for failures."""

    name: str
    senders: tuple[int, ...]
    done: tuple[tuple[str, str, Shape], ...]
    device: str
    settles: bool


@dataclass(frozen=True)
class MovePlan:
    """The plan that all ranks follow: the steps, the order of the targets, the tied names, and
    whether rank 0 alone gets the state."""

    steps: tuple[MoveStep, ...]
    order: tuple[str, ...]
    tied: tuple[tuple[str, str], ...]
    rank0_only: bool


@dataclass(frozen=True)
class MoveJob:
    """targets: dtype and shape of each, in order. tied: (name, the name whose tensor it shares).
    computed: targets that need arithmetic, not copies alone. equal_ranks: expert-parallel ranks may
    hold equal experts."""

    tasks: tuple[MoveTask, ...]
    targets: Mapping[str, tuple[str, Shape]]
    tied: tuple[tuple[str, str], ...]
    computed: Mapping[str, Translated] = field(default_factory=dict)
    equal_ranks: bool = False

    def steps(self) -> tuple[MoveStep, ...]:
        left: dict[str, int] = {}
        for task in self.tasks:
            for name, _ in task.blocks:
                left[name] = left.get(name, 0) + 1
        out, since = [], 0
        for task in self.tasks:
            done = []
            for name, _ in task.blocks:
                left[name] -= 1
                if not left[name]:
                    done.append((name, *self.targets[name]))
            senders = tuple(rank for rank, *_ in task.parts)
            devices = {metadata.device for _, metadata, _ in task.parts}
            device = min(devices - {"cpu"}, default="cpu")
            since += sum(metadata.nbytes for _, metadata, _ in task.parts)
            settles = since >= _SETTLE
            since = 0 if settles else since
            out.append(MoveStep(task.key.name, senders, tuple(done), device, settles))
        return tuple(out)


def follow(
    plan: MovePlan, arrays: Mapping[str, Array], wire: Wire, rank0_only: bool, to_cpu: bool
) -> dict[str, Any]:
    rank, out = own_rank(), dict[str, Any]()
    attempt = Attempt(out)
    attempt(lambda: _refuse_other(plan, rank0_only))
    for attempt.step, step in enumerate(plan.steps):
        if rank in step.senders:
            array = arrays[step.name]
            wire.send(array.metadata, attempt(lambda: wire.packed(array.tensor)))  # noqa: B023  # at once
        if not plan.rank0_only:
            for name, dtype, shape in step.done:
                whole = attempt(lambda: wire.room(dtype, shape, step.device))  # noqa: B023
                wire.share(whole, dtype, shape, step.device)
                attempt(lambda: _keep(out, name, whole, to_cpu))  # noqa: B023
        if step.settles:
            attempt.settle()
    attempt.settle()
    return _in_order(out, plan.order, plan.tied)


def lead(
    job: MoveJob, plan: MovePlan, arrays: Mapping[str, Array], wire: Wire, to_cpu: bool
) -> dict[str, Any]:
    making, out, check = _Making(job), dict[str, Any](), _Check(job)
    attempt = Attempt(making.unfinished, out, check.first)
    for attempt.step, (task, step) in enumerate(zip(job.tasks, plan.steps, strict=True)):
        # after a failure the other ranks send all the same
        flats: list[torch.Tensor | None] = []
        for rank, part, _ in task.parts:
            if rank == own_rank():
                own = arrays[task.key.name].tensor
                flats.append(attempt(lambda: own.detach().contiguous().view(-1)))  # noqa: B023
            else:
                flats.append(attempt(partial(wire.room, part.dtype, (part.numel,), part.device)))
                wire.receive(part, rank, flats[-1])
        whole: Any = attempt(partial(_joined_parts, task, flats))
        attempt(lambda: check.look(task, whole))  # noqa: B023  # run at once
        attempt(lambda: making.take(task, whole))  # noqa: B023
        for name, dtype, shape in step.done:
            made: Any = attempt(lambda: making.done(name))  # noqa: B023
            if not plan.rank0_only:
                made = attempt(lambda: wire.placed(made, step.device))  # noqa: B023
                wire.share(made, dtype, shape, step.device)
            attempt(lambda: _keep(out, name, made, to_cpu))  # noqa: B023
        if step.settles:
            attempt.settle()
    attempt.step += 1
    attempt(lambda: _refuse(check, job, out))
    attempt.settle()
    return _in_order(out, plan.order, plan.tied)


def _refuse_other(plan: MovePlan, rank0_only: bool) -> None:
    if rank0_only != plan.rank0_only:
        raise UsageError(
            f"rank0_only={rank0_only} here, and {plan.rank0_only} on rank 0",
            remedy="pass the same config on all ranks",
        )


def _keep(out: dict[str, Any], name: str, whole: Any, to_cpu: bool) -> None:
    out[name] = whole.cpu() if to_cpu else whole


class _Check:
    """Compares tensors of which ranks hold copies, and finds ranks that hold the same in all."""

    def __init__(self, job: MoveJob) -> None:
        self.differ: list[str] = []
        self.first: dict[TensorKey, torch.Tensor] = {}
        self._originals = {task.copy_of for task in job.tasks if task.copy_of is not None}
        self._originals |= {task.key for task in job.tasks if task.replica}
        copied = {task.key.name for task in job.tasks if task.copy_of is not None}
        self._cut = {t.key for t in job.tasks if t.key.tp >= 0 and t.key.name not in copied}
        self.alike = set(itertools.combinations(sorted({key[1:] for key in self._cut}), 2))
        self._of_name: dict[tuple[int, int], torch.Tensor] = {}
        self._name = ""

    def look(self, task: MoveTask, whole: torch.Tensor) -> None:
        key, other = task.key, task.copy_of
        if any(known.name != key.name for known in self.first):
            self.first.clear()
        if key.name != self._name:
            self._name = key.name
            self._of_name.clear()
        if key in self._cut and not task.replica and self.alike:
            # compare it with those of that name whose ranks have been alike so far
            here = key[1:]
            for pair in [pair for pair in self.alike if here in pair]:
                known = self._of_name.get(pair[0] if pair[1] == here else pair[1])
                if known is not None and not _equal(known, whole):
                    self.alike.discard(pair)
            if any(here in pair for pair in self.alike):
                self._of_name[here] = whole
        if task.replica:
            if not _equal(self.first[key], whole):
                self.differ.append(f"{key.name} on ranks that are (tp, ep) {key[1:]}")
            return
        if key in self._originals:
            self.first[key] = whole
        if other is not None and not _equal(self.first[other], whole):
            self.differ.append(f"{key.name} on (tp, ep) {key[1:]} and {other[1:]}")


class _Making:
    """The unfinished targets. Computed targets are summed in float64 and rounded once, on the CPU,
    as in an export."""

    def __init__(self, job: MoveJob) -> None:
        self.unfinished: dict[str, torch.Tensor] = {}
        self._job = job

    def take(self, task: MoveTask, whole: torch.Tensor) -> None:
        for name, block in task.blocks:
            dtype, shape = self._job.targets[name]
            computed = name in self._job.computed
            if name not in self.unfinished:
                kind = torch.float64 if computed else getattr(torch, dtype)
                device = "cpu" if computed else whole.device
                self.unfinished[name] = torch.zeros(shape, dtype=kind, device=device)
            if computed:
                term = torch.zeros(shape, dtype=torch.float64)
                execute(block.copy, whole.to("cpu", torch.float64), term)
                self.unfinished[name] += term
            else:
                execute(block.copy, whole, self.unfinished[name])

    def done(self, name: str) -> torch.Tensor:
        made = self.unfinished.pop(name)
        target = self._job.computed.get(name)
        if target is None:
            return made
        total = made.numpy() / (len(target.terms) + 1 if target.mean else 1) + target.shift
        try:
            rounded = torch.from_numpy(cast(total, "float64", target.dtype))
        except OverflowError as error:
            raise UsageError(
                f"{name} cannot be computed in {target.dtype}: {error}",
                remedy="check layout=, which does not fit the ranks' copies; or the model has "
                "diverged",
            ) from error
        return rounded.view(getattr(torch, target.dtype))


def _joined_parts(task: MoveTask, flats: list[Any]) -> torch.Tensor:
    devices = {flat.device for flat in flats}
    parts = [(flat, pieces) for flat, (*_, pieces) in zip(flats, task.parts, strict=True)]
    if len(devices) > 1:  # move what arrived on another device to this rank's own
        gpu = next(device for device in devices if device.type != "cpu")
        parts = [(flat.to(gpu), pieces) for flat, pieces in parts]
    return assembled(task.shape, task.dtype, parts)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise."""
    one, two = (t.contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(one, two.to(one.device))


def _refuse(check: _Check, job: MoveJob, out: Mapping[str, Any]) -> None:
    """Refuse copies and tied tensors that differ, and ranks that hold the same."""
    if differ := check.differ:
        raise TensorMismatchError(
            f"{len(differ)} tensors of which ranks hold copies differ: {'; '.join(differ[:8])}",
            remedy="check layout= and parallel_state=; if they are right, the ranks have diverged",
        )
    for head, embedding in job.tied:
        if head in out and not _equal(out[head], out[embedding]):
            raise TensorMismatchError(
                f"tie_word_embeddings is true, but {head} and {embedding} differ",
                remedy="set tie_word_embeddings to false in the config if the model was trained "
                "with both",
            )
    # Two tensor-parallel ranks with the same parts have loaded one shard. Expert-parallel ranks may
    # have experts that were all made from one.
    for one, two in sorted(check.alike):
        if one[0] != two[0]:
            raise TensorMismatchError(
                f"the ranks that are (tp, ep) {one} and {two} hold the same in all tensors that "
                "tensor parallelism cuts, so both have loaded one rank's part",
                remedy="load each rank's own part, and check parallel_state=",
            )
        if not job.equal_ranks:
            raise TensorMismatchError(
                f"the ranks that are (tp, ep) {one} and {two} hold equal experts, so both have "
                "loaded one rank's part",
                remedy="load each rank's own part; if all experts were made from one (upcycled), "
                "pass FullStateDictConfig(allow_equal_ranks=True)",
            )


def _in_order(
    out: dict[str, Any], order: tuple[str, ...], tied: tuple[tuple[str, str], ...]
) -> dict[str, Any]:
    """The targets in the table's order. Tied names share one tensor, as in the model."""
    if out:
        out = {name: out[name] for name in order}
        out.update({head: out[embedding] for head, embedding in tied})
    return out
