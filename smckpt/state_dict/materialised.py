"""Memory for tensors on the meta device, for a load to fill.

The live tensor itself gets the memory: it stays the same object, so all that hold it (a second
module, a second model, an optimizer) hold one parameter as before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from smckpt.errors import StateError
from smckpt.state_dict.modes import neutral
from smckpt.state_dict.tags import set_tag, tag_of
from smckpt.state_dict.tensors import dtensor_parts, is_dtensor

__all__ = ["Materialised"]

log = logging.getLogger("smckpt")


class Materialised:
    """The memory of one load. Tensors that share a storage on the meta device share one here, so
    tied weights and views stay what they are to each other."""

    def __init__(self) -> None:
        self._memory: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the meta storage
        # the live tensor, and what takes the memory away
        self._given: list[tuple[torch.Tensor, Callable[[], object]]] = []
        self._models: tuple[nn.Module, ...] = ()
        self._unread: set[int] = set()

    @neutral()
    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor like this one of the meta device, with memory: on its mesh's device or the
        CPU."""
        made = self._made(tensor, give=True)
        assert made is not None
        if (tag := tag_of(tensor)) is not None:
            set_tag(made, tag)
        return made

    @neutral()
    def enter(
        self, models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
    ) -> None:
        """Give memory to the live tensors that have a twin.

        Raises:
            StateError: something holds a tensor so that it cannot get memory.
        """
        self._models = tuple(models)
        for model in self._models:
            for name, tensor in _tensors(model):
                self._give(name, tensor)
        for optimizer in optimizers if self._memory else ():
            for slots in optimizer.state.values():
                for slot, value in slots.items() if isinstance(slots, dict) else ():
                    if isinstance(value, torch.Tensor):
                        self._give(f"the optimizer's {slot}", value)

    def left(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note the twins into which the load read nothing. Their live tensors stay empty."""
        self._unread = {_storage_of(tensor) for tensor in tensors}
        self.undo(self.unread)

    def unread(self, tensor: torch.Tensor) -> bool:
        return bool(self._unread) and _storage_of(tensor) in self._unread

    def _give(self, name: str, tensor: torch.Tensor) -> None:
        made = self._made(tensor, give=False) if tensor.is_meta else None
        if made is None:
            return
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        for attribute, value in vars(tensor).items():
            vars(made).setdefault(attribute, value)  # they belong to the object, not its memory
        try:
            _swap(tensor, made)
        except RuntimeError as error:
            if not self._assign(tensor, made):
                raise StateError(
                    f"{name} is on the meta device and cannot be given memory: {error}",
                    remedy="call to_empty(device=) on the model before the load",
                ) from error
            self._given.append((made, lambda: self._assign(made, tensor)))
        else:
            self._given.append((tensor, lambda: _swap(tensor, made)))

    def _assign(self, old: torch.Tensor, new: torch.Tensor) -> bool:
        """Replace a buffer of the models that torch cannot swap, because a view of it is another
        buffer. A parameter stays the same object, since an optimizer may hold it."""
        found = False
        for module in (m for model in self._models for m in model.modules()):
            for name, held in module._buffers.items():
                if held is old:
                    module._buffers[name], found = new, True
        return found

    @neutral()
    def undo(self, chosen: Callable[[torch.Tensor], bool] = lambda _: True) -> None:
        """Take the memory away again: after a failure, or where nothing was read into it."""
        given, self._given = self._given, []
        for live, back in given:
            if chosen(live):
                back()
            else:
                self._given.append((live, back))

    def name_the_left(self) -> None:
        """Name the tensors of the models that the load left on the meta device."""
        left = [
            name for model in self._models for name, tensor in _tensors(model) if tensor.is_meta
        ]
        if left:
            log.warning(
                "after the load %d tensors of the model are still on the meta device, because the "
                "checkpoint or the model's state dict lacks them: %s. Give them values before the "
                "first step",
                len(left),
                ", ".join(sorted(left)[:12]),
            )

    def _made(self, tensor: torch.Tensor, *, give: bool) -> torch.Tensor | None:
        """The tensor over the memory of its storage. None if that has no memory yet, and must not
        be given any."""
        if not is_dtensor(tensor):
            return self._placed(tensor, "cpu", give)
        local, mesh, placements, shape = dtensor_parts(tensor)
        placed = self._placed(local, mesh.device_type, give)
        if placed is None:
            return None
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            placed, mesh, placements, run_check=False, shape=shape, stride=tensor.stride()
        )

    def _placed(self, tensor: torch.Tensor, device: str, give: bool) -> torch.Tensor | None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory:
            if not give:
                return None
            room = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
            self._memory[key] = tensor, room  # the tensor keeps the key's storage alive
        made = torch.empty(0, dtype=tensor.dtype, device=self._memory[key][1].device)
        made.set_(
            self._memory[key][1].untyped_storage(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )
        return made


def _storage_of(tensor: torch.Tensor) -> int:
    local = dtensor_parts(tensor)[0] if is_dtensor(tensor) else tensor
    return int(local.untyped_storage()._cdata)


_swap: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, those too that its state dict lacks, each once."""
    named: Iterable[tuple[str, torch.Tensor]] = (*model.named_parameters(), *model.named_buffers())
    seen: set[int] = set()
    for name, tensor in named:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor
