"""Replaces objects in a user's state by their state dicts, for a load to fill.

Tensors on the meta device get memory. The live tensor itself gets the memory: it stays the same
object, so all that hold it (a second module, a second model, an optimizer) hold one parameter as
before.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from smckpt.errors import StateError
from smckpt.layout.containers import items_of, named_class, renewed
from smckpt.state_dict.model_views import modules_in, names_in_state
from smckpt.state_dict.modes import mode_of, neutral, read_by
from smckpt.state_dict.of_optimizers.bindings import (
    bound,
    is_optimizer_dict,
    optimizer_dicts,
    owner_of,
    stock,
    stock_record,
)
from smckpt.state_dict.of_optimizers.groups import names_of
from smckpt.state_dict.of_optimizers.own_methods import (
    copied,
    exactly,
    has_own_methods,
    is_optimizer,
)
from smckpt.state_dict.tags import (
    OptimizerStateDict,
    RememberingDict,
    RememberingList,
    StatefulStateDict,
    is_stateful,
    model_of,
    set_tag,
    tag_of,
)
from smckpt.state_dict.tensors import cuts_itself, dtensor_parts, is_dtensor


class Opened:
    """Copies of containers for the time of a load. In a copy, an object is replaced by its state
    dict, and a tensor without memory by one with memory. The user's own containers change only
    after the load has succeeded.

    Objects give their state dicts in the order of their keys on all ranks, since their
    `state_dict` may run a collective.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Any, Any]] = {}  # by id: the copy and its original
        self._models: dict[int, torch.nn.Module] = {}  # those that may be on the meta device
        self.memory = Materialised()
        self._objects: list[Any] = []  # those whose state dicts are being opened
        self._optimizers: list[tuple[Any, RememberingDict]] = []  # with the dict in its place

    def open(self, state_dict: Any) -> Any:
        """The state that a load fills: `state_dict` itself where nothing is replaced."""
        opened = self._open(state_dict)
        if self._optimizers:
            known = names_in_state(modules_in(state_dict))
            for optimizer, tree in self._optimizers:
                tree.names = names_of(optimizer, known)
        optimizers = [b.optimizer for _, _, b in optimizer_dicts(opened) if b is not None]
        self.memory.enter(self._models.values(), optimizers)
        return opened

    def _open(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            # one of several shards does not tell their places
            meta = not cuts_itself(value) and value.is_meta
            if not meta:
                return value
            if (model := model_of(value)) is not None:
                self._models[id(model)] = model
            return self.memory.twin(value)
        if type(value) is not dict and is_stateful(value):
            return self._taken(value)
        if isinstance(value, MutableMapping):
            of_optimizer = is_optimizer_dict(value) and bound(value) is None
            if of_optimizer and self._objects:
                return self._given(value)
            items = {key: self._open(value[key]) for key in sorted(value, key=str)}
            if of_optimizer and (owner := owner_of(value)) is not None:
                return self._copy(stock(owner, {key: items[key] for key in value}), value)
            same = all(items[key] is child for key, child in value.items())
            if same and getattr(value, "reads", None) is None:
                return value
            items = {key: items[key] for key in value}
            items = value.like(items) if isinstance(value, RememberingDict) else items
            return self._copy(_holding(items, value.items()), value)
        if isinstance(value, (list, tuple)):
            opened = [self._open(child) for child in value]
            if all(new is child for new, child in zip(opened, value, strict=True)):
                return value
            return self._copy(_holding(opened, enumerate(value)), value)
        if type(value) is deque or named_class(value) == "data":
            pairs = items_of(value) or []
            inside = {key: self._open(child) for key, child in pairs}
            if all(inside[key] is child for key, child in pairs):
                return value
            made = list(inside.values()) if isinstance(value, deque) else inside
            return self._copy(_holding(made, pairs), value)
        return value

    def _taken(self, value: Any) -> Any:
        given = value.state_dict()
        if isinstance(value, torch.nn.Module):
            self._models[id(value)] = value
        if isinstance(value, torch.optim.Optimizer) and is_optimizer_dict(given):
            if bound(given) is not None:
                return self._open(given)
            if stock_record(given) is not None and not has_own_methods(value):
                tree = stock(value, {key: self._open(child) for key, child in given.items()})
                self._optimizers.append((value, tree))
                return tree
            # Only its own load_state_dict knows what it added, or names from elsewhere, such as
            # those of torch's get_optimizer_state_dict.
        self._objects.append(value)
        try:
            inner = self._open(given)
        finally:
            self._objects.pop()
        if not isinstance(inner, dict):
            return inner
        if not isinstance(inner, StatefulStateDict):
            holds = getattr(inner, "holds", ())
            inner = self._copy(StatefulStateDict(inner), given)
            inner.holds = holds
        if is_optimizer(value):
            inner.of_optimizer = True
            self._optimizers.append((value, inner))
        else:
            is_module = isinstance(value, nn.Module)
            inner.reads = read_by(value) if is_module else lambda _: True
            inner.form = None if is_module else type(given)
        return inner

    def _given(self, value: MutableMapping[str, Any]) -> StatefulStateDict:
        """A copy of an optimizer's dict that an object gave and will load."""
        made = StatefulStateDict(
            {
                **{key: self._open(child) for key, child in value.items()},
                "state": copied(value["state"]),
                "param_groups": [dict(group) for group in value["param_groups"]],
            }
        )
        sizes = [len(group["params"]) for group in value["param_groups"]]
        for each in (*_optimizers_of(self._objects[-1]), owner_of(value)):
            groups = each.param_groups if is_optimizer(each) else ()
            if [len(group["params"]) for group in groups] == sizes:
                made.groups = groups
                if all(map(_has_options, groups, value["param_groups"])):
                    break
        return self._copy(made, value)  # type: ignore[no-any-return]

    def _copy(self, made: Any, of: Any) -> Any:
        self._copies[id(made)] = made, of
        return made

    def settle(self, value: Any, filled: Any) -> Any:
        """The value after a load: the user's own containers get the new values from the copies, and
        objects get their state dicts."""
        if filled is value:
            return value
        if isinstance(value, torch.Tensor):
            return value if self.memory.unread(filled) else filled
        if is_stateful(value):
            # The load wrote to the optimizer already; its load_state_dict would cast the state.
            if not isinstance(filled, OptimizerStateDict):
                _, given = self._copies.get(id(filled), (filled, filled))
                state = self._into(given, filled)
                with mode_of(given):
                    if is_optimizer(value):
                        exact = copied(filled)
                        value.load_state_dict(state)
                        exactly(value.state_dict(), exact)
                    else:
                        value.load_state_dict(state)
            return value
        if isinstance(filled, OptimizerStateDict) and id(filled) in self._copies:
            return self._numbered(value, filled)
        return self._into(value, filled) if id(filled) in self._copies else filled

    def _numbered(self, own: dict[str, Any], filled: OptimizerStateDict) -> dict[str, Any]:
        """A dict from outside a block, with what the load gave to its optimizer."""
        binding = bound(filled)
        for key in filled:
            if key not in ("state", "param_groups"):
                own[key] = self.settle(own[key], filled[key])
        own["state"] = binding.numbered()  # its live dicts again, for another load
        own["param_groups"][:] = filled["param_groups"]
        return own

    def _into(self, own: Any, filled: Any) -> Any:
        if own is filled:
            return own
        if not isinstance(own, (MutableMapping, list)):
            theirs, pairs = dict(items_of(filled) or ()), items_of(own) or ()
            new = {key: self.settle(child, theirs[key]) for key, child in pairs}
            changed = {key: new[key] for key, child in pairs if new[key] is not child}
            return renewed(own, changed) if changed else own
        if isinstance(own, MutableMapping):
            for key in [key for key in own if key not in filled]:
                del own[key]
        for key in _keys(filled):
            had = isinstance(own, list) or key in own
            new = self.settle(own[key], filled[key]) if had else filled[key]
            if not had or new is not own[key]:
                own[key] = new
        if getattr(filled, "form", None) is not None and [*own] != [*filled]:
            for key in filled:
                own[key] = own.pop(key)
        return own


def _holding(made: Any, pairs: Iterable[tuple[Any, Any]]) -> Any:
    """The copy of a container; it remembers under which of its keys objects are."""
    if holds := [key for key, child in pairs if type(child) is not dict and is_stateful(child)]:
        if not isinstance(made, RememberingDict):
            made = RememberingDict(made) if isinstance(made, dict) else RememberingList(made)
        made.holds = holds
    return made


def _optimizers_of(value: Any, depth: int = 2) -> Iterator[Any]:
    """Those that an object is, or holds in attributes, and in containers there."""
    if is_optimizer(value):
        yield value
    if isinstance(value, (torch.Tensor, nn.Module, str, bytes)) or depth < 0:
        return
    inside = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        inside += [getattr(value, n, None) for n in ([names] if isinstance(names, str) else names)]
    if isinstance(value, Mapping):
        inside += value.values()
    elif isinstance(value, (list, tuple)):
        inside += value
    for child in inside:
        yield from _optimizers_of(child, depth - 1)


def _has_options(group: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    return all(group.get(key) is value for key, value in given.items() if key != "params")


def _keys(container: Any) -> Iterator[Any]:
    yield from sorted(container, key=str) if isinstance(container, dict) else range(len(container))


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
