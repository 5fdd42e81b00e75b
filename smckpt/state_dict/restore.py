"""Gives back values that are not tensors, to the user's dict and to live optimizers."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smckpt.errors import StateError
from smckpt.layout.containers import (
    class_name,
    is_extra_state,
    items_of,
    like,
    object_in,
    renewed,
)
from smckpt.layout.entries import Path, dotted
from smckpt.state_dict.of_optimizers.bindings import (
    bound,
    inside,
    is_optimizer_dict,
    optimizer_dicts,
    stock_record,
)
from smckpt.state_dict.of_optimizers.groups import fill_groups, with_own_numbers
from smckpt.state_dict.of_optimizers.own_methods import hand_over, hand_to_wrapper, wrappers_in
from smckpt.state_dict.of_optimizers.slots import (
    ABSENT,
    Room,
    SavedSlot,
    SavedState,
    aligned,
    room,
)
from smckpt.state_dict.tags import (
    ModelStateDict,
    StatefulStateDict,
)
from smckpt.state_dict.tensors import is_dtensor

if TYPE_CHECKING:
    from smckpt.checkpoint.reading.loading_rank import LoadingRank


log = logging.getLogger("smckpt")


def restore(
    state_dict: MutableMapping[str, Any],
    objects: Mapping[str, tuple[Path, Any]],
    *,
    strict: bool = True,
) -> None:
    """Put the saved values into `state_dict`, in place, and through to live optimizers.

    Args:
        objects: key → (path, value), without what optimizers have already.
        strict: whether a value without a place in the target is an error or a log line.
    """
    for key, (path, value) in objects.items():
        if not put(state_dict, path, value) and strict:
            raise StateError(
                f"the saved value {key} has no place in the target",
                remedy="give the target the structure that was saved, or pass "
                "check_keys_matched=False",
            )
    for path, tree, binding in optimizer_dicts(state_dict):
        if binding is not None:
            fill_groups(binding, tree["param_groups"])
            if binding.put_through is None:  # otherwise that fills the optimizers of all ranks
                hand_over(binding, tree)
            with_own_numbers(tree, binding)
        elif not isinstance(tree, StatefulStateDict):  # its object loads it, when all is read
            # torch's set_state_dict takes a dict by names, such as that of the AppState recipe.
            numbered = stock_record(tree) is not None
            log.log(
                logging.WARNING if numbered else logging.INFO,
                "%s: its optimizer is not known, so its plain values were loaded into the dict "
                "only. Call its load_state_dict, or put the optimizer itself into the state",
                dotted(path),
            )
    for _, tree, wrapper in wrappers_in(state_dict):
        hand_to_wrapper(wrapper, tree)
    for model in _model_dicts(state_dict):
        if model.give_back is not None:
            model.give_back(model)


def gathered_parts(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Callable[[], object]]]:
    """The gathered state dicts in a state, in the user's order: the path of each, and what puts it
    through to the live objects after a load has filled it."""
    if is_optimizer_dict(tree):  # first that of an optimizer inside, which the outer one takes
        for key, child in tree.items():
            if key not in ("state", "param_groups"):
                yield from gathered_parts(child, (*path, key))
    if (put_through := getattr(tree, "put_through", None)) is not None:
        yield path, partial(put_through, tree)
    elif is_optimizer_dict(tree):
        if (put_through := getattr(bound(tree), "put_through", None)) is not None:
            yield path, partial(put_through, tree)  # a class added keys in a new dict
    elif isinstance(tree, Mapping):
        for key, child in tree.items():
            yield from gathered_parts(child, (*path, key))
    elif isinstance(tree, (list, tuple)):
        for index, child in enumerate(tree):
            yield from gathered_parts(child, (*path, index))


def _model_dicts(tree: Any) -> Iterator[ModelStateDict]:
    if isinstance(tree, ModelStateDict):
        yield tree
    else:
        for _, child in inside(tree):
            yield from _model_dicts(child)


def put(tree: Any, path: Path, value: Any) -> bool:
    """Assign at `path`; False if the structure lacks it. A container that cannot change is replaced
    by a new one."""
    return _put(tree, path, value) is not None


def _put(tree: Any, path: Path, value: Any) -> Any:
    """The container with `value` at `path`: itself, or one like it; None if it lacks the path."""
    key, children = _key_in(tree, path[0]) if path else (None, None)
    if children is None:
        return None
    new = _settled(children[key], value) if len(path) == 1 else _put(children[key], path[1:], value)
    if len(path) > 1 and (new is None or new is children[key]):
        return None if new is None else tree
    return renewed(tree, {key: new})


def _settled(live: Any, saved: Any) -> Any:
    """The saved value, in which a random generator is the live one, which others may hold, too."""
    if isinstance(live, torch.Generator) and isinstance(saved, torch.Generator):
        return live.set_state(saved.get_state()) if live.device == saved.device else saved
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        return saved.to(live.device)
    pairs, lives = dict(items_of(saved) or ()), dict(items_of(live) or ())
    deeper = [key for key in pairs.keys() & lives.keys() if type(pairs[key]) not in _PLAIN]
    changed = {key: _settled(lives[key], pairs[key]) for key in deeper}
    changed = {key: new for key, new in changed.items() if new is not pairs[key]}
    return renewed(saved, changed) if changed else saved


def _key_in(tree: Any, key: Any) -> tuple[Any, Mapping[Any, Any] | None]:
    """The container's own key for one of a path, and its children; None without such a key."""
    children: Mapping[Any, Any] = tree if isinstance(tree, Mapping) else dict(items_of(tree) or ())
    if key in children:
        return key, children
    odd = (each for each in children if type(each) not in (str, int) and repr(each) == key)
    found = next(odd, _NONE)
    return found, None if found is _NONE else children


_NONE = object()
_PLAIN = (int, float, str, bool, type(None))


def make_read(
    state_dict: MutableMapping[str, Any],
    me: LoadingRank,
    values: Mapping[str, tuple[Path, Any]],
    *,
    grows: bool,
) -> tuple[bool, frozenset[Path]]:
    """Give what objects and modules read by code of their own the structure that was saved, with
    tensors to fill: extra state, lists and buffers that grow, all that an object gives, be it a
    dict or not. Nothing else says their sizes, and a new object may have none of it.

    Args:
        values: what was saved and is no tensor.
        grows: whether objects get keys that they lack, and lose those that were not saved.
            Otherwise only extra state takes another structure.

    Returns:
        Whether `state_dict` changed, and the paths of what now has all saved values.

    Raises:
        StateError: nothing says how ranks divide a tensor.
    """
    changed, settled = False, set[Path]()
    make: Room | None = None
    objects = {
        at: name for at, kind in (me.kinds or {}).items() if (name := object_in(kind)) is not None
    }
    for path, given in [*_reading(state_dict)]:
        stored = tuple(map(_in_path, path))
        above = SavedState(me, values, stored[:-1], owned=()).more()
        saved = above.get(str(path[-1]), ABSENT) if path else above
        # what has no tensors is one value, unless another object is inside
        apart_too = any(at[:-1][: len(stored)] == stored for at, _ in values.values())
        if saved is ABSENT or not (apart_too or _has_tensors(saved) or _has_tensors(given)):
            continue  # one value in the place of another
        make = make or room(None, None, {}, [*_divided(state_dict)])
        reads = (getattr(given, "reads", None) if grows else None) or _none
        apart = {at[0] for at, _ in _apart(given)}
        form = getattr(given, "form", None)
        other = form in _FORMS and (
            type(saved) is not form or objects.get(stored, "") in map(class_name, _OF_PARAMETERS)
        )
        if other or not (isinstance(given, dict) and isinstance(saved, Mapping)):
            if grows and not apart and (reads is not _none or not isinstance(given, dict)):
                around: Any = state_dict
                for key in path[:-1]:
                    around = around[key]
                new = aligned(saved, given, make)
                new = like(saved, new) if new is given and other else new
                around[path[-1]] = _with_objects(new, stored, objects, top=True)
                settled.add(stored)
                changed = True
            if not (other and apart):
                continue
        for key in [key for key in given if reads(key) and key not in saved and key not in apart]:
            del given[key]
        for key, value in saved.items():
            if key in apart or not (reads(key) or (key in given and is_extra_state(key))):
                continue
            new = aligned(value, given.get(key), make)
            if new is not ABSENT:
                at = (*stored, key if type(key) is int else str(key))
                given[key] = _with_objects(new, at, objects)
                settled.add(at)
        if form is not None and reads is not _none:  # in the order that was saved
            for key in [key for key in saved if key in given]:
                given[key] = given.pop(key)
        changed = True
    return changed, frozenset(settled)


_OF_PARAMETERS = (nn.ParameterList, nn.ParameterDict)
_FORMS = (dict, OrderedDict, defaultdict, Counter, *_OF_PARAMETERS)


def _with_objects(new: Any, path: Path, objects: Mapping[Path, str], *, top: bool = False) -> Any:
    """A value that a load made, with lists and dicts of parameters made again.

    Args:
        objects: path → the class of an object there, which was saved inside another one.
        top: the object at `path` itself is there.

    Raises:
        StateError: another object is to be made.
    """
    if not any(at[: len(path)] == path for at in objects):
        return new
    items = dict(items_of(new) or ())
    found = {
        key: _with_objects(child, (*path, _in_path(key)), objects) for key, child in items.items()
    }
    for kind in _OF_PARAMETERS:
        if objects.get(path) == class_name(kind):
            # torch sorts the keys of a dict
            return kind(items.values() if kind is nn.ParameterList else OrderedDict(items))
    if path in objects and not top:
        raise StateError(
            f"{dotted(path)} was saved by an object of the class {objects[path]}, and the target "
            "has none there, which no load can make",
            remedy="make it before the load; or have the object around it give its state_dict(), "
            "and not the object",
        )
    changed = {key: child for key, child in found.items() if child is not items[key]}
    return renewed(new, changed) if changed else new


def _in_path(key: Any) -> str | int:
    """A dict's key as the path of an entry has it."""
    return key if type(key) in (str, int) else repr(key)


def _none(_: Any) -> bool:
    return False


def _reading(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The state dicts of objects and modules, and other dicts with extra state, but what is inside
    of an optimizer's."""
    is_object = isinstance(tree, StatefulStateDict)
    if is_optimizer_dict(tree) or (is_object and tree.of_optimizer):
        return
    if isinstance(tree, dict) and (getattr(tree, "reads", None) or any(map(is_extra_state, tree))):
        yield path, tree
    held: Iterable[tuple[Path, Any]] = (((key,), tree[key]) for key in getattr(tree, "holds", ()))
    for at, value in _apart(tree) if is_object else held:
        if not isinstance(value, dict):
            yield (*path, *at), value
    for at, value in _apart(tree) if is_object else inside(tree):
        yield from _reading(value, (*path, *at))


def _apart(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """What other objects inside gave, and the dicts of an optimizer."""
    holds = getattr(tree, "holds", ())
    yield from (((*path, key), tree[key]) for key in holds)
    for at, value in inside(tree, path):
        if at[-1] in holds:
            continue
        if isinstance(value, StatefulStateDict) or is_optimizer_dict(value):
            yield at, value
        else:
            yield from _apart(value, at)


def _has_tensors(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, SavedSlot)) or type(value).__name__ == "ndarray":
        return True
    return any(_has_tensors(child) for _, child in items_of(value) or ())


def _divided(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors that a mesh divides."""
    if isinstance(tree, torch.Tensor):
        if is_dtensor(tree):
            yield tree
    else:
        for _, child in items_of(tree) or ():
            yield from _divided(child)
