"""Tensors that hold other tensors (quantised weights, low-bit optimizer state), as their parts.

A class with `__tensor_flatten__` says which tensors it holds, and a context that is no tensor. A
save stores each of these tensors below the tensor's own path, and beside them, under `FACTS`, the
name of the class, the context and, for a DTensor, its mesh. A load fills the parts of a live tensor
of the same class and context. Or it makes one, if the class is on the list of those that may be
imported: a checkpoint never chooses what is imported.

A DTensor with a reduction pending (Partial) is of this kind, too: no rank has its values, and each
has a tensor of its own from which torch computes them.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from smckpt.checkpoint.records.objects import encode_object
from smckpt.errors import CheckpointError, CorruptCheckpointError, StateError, TensorMismatchError
from smckpt.layout.containers import FACTS
from smckpt.layout.entries import ObjectLeaf, Path, dotted
from smckpt.registry import Registry
from smckpt.state_dict.tags import Tag, clear_tag, set_tag, tag_of
from smckpt.state_dict.tensors import (
    PLAIN,
    cuts_itself,
    dtensor_parts,
    is_dtensor,
    is_flattening,
    pending_in,
    pending_on_mesh,
    unwrapped,
)

log = logging.getLogger("smckpt")

_LIBRARIES = ("torch", "torchao")
_MARKS = (  # what torch and frameworks note on tensors, and note anew in a new process
    "_smckpt_", "_dynamo_", "_fsdp_", "_has_been_cloned", "_is_", "is_paged", "page_deviceid",
    "expert_tp", "is_qkv", "tensor_model_parallel", "sequence_parallel", "partition_", "allreduce",
    "shared", "main_",
)  # fmt: skip
_CLASSES: Registry[type] = Registry("tensor class", type, "smckpt.tensor_classes", {})


def register_tensor_class(kind: type[torch.Tensor]) -> None:
    """Let loads make tensors of this class, which has `__tensor_flatten__` and
    `__tensor_unflatten__`. Classes of torch and torchao need no registration, nor does one of which
    the target already has a tensor in the same place.

    Raises:
        StateError: the class has not both methods.
    """
    if not all(hasattr(kind, f"__tensor_{do}__") for do in ("flatten", "unflatten")):
        raise StateError(
            f"{_name_of(kind)} has not both __tensor_flatten__ and __tensor_unflatten__",
            remedy="give the class both, as torch asks of classes that torch.compile sees",
        )
    _CLASSES.register(_name_of(kind), kind)


def parts_of(tensor: torch.Tensor, path: Path) -> tuple[dict[str, torch.Tensor], Any] | None:
    """The tensors inside, by their names, and the facts beside them. None for a tensor whose values
    are those of its own memory, or of one tensor inside.

    Raises:
        StateError: the class cannot say what is inside, or the context cannot be stored.
    """
    local, mesh, placed = tensor, None, None
    if is_dtensor(tensor):
        local, mesh, placements, shape = dtensor_parts(tensor)
        placed = pending_in(tensor)
    kind, context = type(local), placed
    if placed is not None:
        kind, inner = type(tensor), {"local": local}
    elif not is_flattening(local) or unwrapped(local) is not local:
        return None
    else:
        try:
            names, context = local.__tensor_flatten__()  # type: ignore[attr-defined]
            inner = {name: getattr(local, name) for name in names}
        except Exception as error:  # the class's own code
            raise StateError(
                f"{dotted(path)} is a {_name_of(kind)}, which does not say what it holds: "
                f"{type(error).__name__}: {error}",
                remedy="leave it out, or save the tensors that it holds",
            ) from error
    facts = {
        "class": _name_of(kind),
        "context": _plain(context, path),
        "shape": list(local.shape),
        "stride": list(local.stride()),
    }
    if mesh is not None:  # its parts are this rank's own, so they fit the same mesh alone
        facts["mesh"] = {
            "ranks": mesh.mesh.tolist(),
            "placements": [str(p) for p in placements],
            "shape": list(shape),
        }
    _tag(tensor, inner)
    return {name: part for name, part in inner.items() if part is not None}, facts


def refuse_key(leaf: ObjectLeaf, rank: int) -> None:
    """
    Raises:
        StateError: a value under the key `FACTS` is not what `parts_of` writes there.
    """
    value = leaf.value
    if isinstance(value, Mapping) and {"class", "context", "shape", "stride"} <= value.keys():
        return
    raise StateError(
        f"{dotted(leaf.path)} is a value under the key {FACTS!r}, where smckpt keeps what a tensor "
        "that holds others needs, so that no load could put it into a state",
        remedy="give it another key",
        rank=rank,
    )


def _tag(tensor: torch.Tensor, inner: Mapping[str, Any]) -> None:
    """Name the parts after the parameter whose state the tensor is."""
    tag = tag_of(tensor)
    for name, part in inner.items():
        if not isinstance(part, torch.Tensor):
            continue
        if tag is None:
            clear_tag(part)
        else:
            made = Tag(tag.kind, tag.fqns, None, (*tag.after, name), tag.parameter)
            if tag_of(part) != made:
                set_tag(part, made)


def _plain(value: Any, path: Path) -> Any:
    """The context as plain data. An enum, a dataclass and the like become their text, which tells
    whether two contexts are equal."""
    if isinstance(value, Mapping):
        return {str(key): _plain(child, path) for key, child in value.items()}
    if type(value) in (list, tuple, torch.Size):
        return type(value)(_plain(child, path) for child in value)
    if value is None or type(value) in (bool, int, float, str, torch.dtype):
        return value
    if type(value) is torch.device:
        return None  # where the tensor is does not belong to its value
    text = repr(value)
    if isinstance(value, torch.Tensor) or " at 0x" in text or " object at " in text:
        raise StateError(
            f"{dotted(path)} has a {_name_of(type(value))} in the context of its class, which "
            "cannot be saved",
            remedy="give it a __repr__ that tells its values, or keep it out of the context",
        )
    return {_TEXT: text}


_TEXT = "__repr__"


def refuse_gathered(named: Iterable[tuple[str, torch.Tensor]], parts: bool = True) -> None:
    """
    Args:
        parts: refuse tensors that hold others; without a process group nothing is gathered.

    Raises:
        StateError: one of these tensors holds others or has attributes, which no gathering puts
            together.
    """
    for name, tensor in named:
        local = dtensor_parts(tensor)[0] if is_dtensor(tensor) else tensor
        if type(local) is not torch.Tensor and (kept := _own_attributes(local)):
            what, remedy = _with_attributes(local, kept)
            raise StateError(f"{name} is a {what}, which FULL state does not keep", remedy=remedy)
        if parts and pending_in(tensor) is not None:
            raise StateError(
                f"{name} has the placements {dtensor_parts(tensor)[2]}: what each rank holds of it "
                "is not kept by FULL state",
                remedy="take LOCAL or SHARDED state; or redistribute it to Replicate",
            )
        if parts and is_flattening(local) and unwrapped(local) is local:
            raise StateError(
                f"{name} is a {_name_of(type(local))}, whose parts FULL state cannot gather",
                remedy="take LOCAL or SHARDED state, or put the model and the optimizer themselves "
                "into the state",
            )


def match(
    leaves: Sequence[ObjectLeaf], objects: MutableMapping[str, tuple[Path, Any]], strict: bool
) -> None:
    """Compare the live tensors' facts with the saved ones, and take these from `objects`.

    Raises:
        TensorMismatchError: class, context or mesh differ.
    """
    live = {leaf.key: leaf.value for leaf in leaves if leaf.path[-1:] == (FACTS,)}
    for key, facts in live.items():
        if key not in objects:
            continue
        saved = objects.pop(key)[1]
        saved = saved if isinstance(saved, Mapping) else {}
        for fact in ("class", "context", "mesh", "shape"):
            mine, theirs = facts.get(fact), saved.get(fact)
            if encode_object(mine) == encode_object(theirs):
                continue
            remedy = "give the target a tensor of the same class and options"
            if fact in ("mesh", "shape"):
                remedy = (
                    "load it on the mesh on which it was saved: what each rank holds of it cannot "
                    "be cut anew"
                )
                if saved.get("class") == _PENDING:
                    remedy += "; or redistribute it to Replicate before the save"
            raise TensorMismatchError(
                f"{key.removesuffix('.' + FACTS)} was saved with the {fact} {theirs!r}, and the "
                f"target has {mine!r}",
                remedy=remedy,
            )
    if not strict:
        for key in [key for key, (path, _) in objects.items() if path[-1:] == (FACTS,)]:
            del objects[key]


# -- tensors that a load makes -------------------------------------------------------------------


def is_made_as(live: torch.Tensor, facts: Any) -> bool:
    """Whether a live tensor stays where one of these facts was saved. One with another reduction
    pending does not; other differences `match` refuses."""
    found = facts if isinstance(facts, Mapping) else {}
    return pending_in(live) == (found.get("context") if found.get("class") == _PENDING else None)


def made_of_parts(
    saved: Mapping[str, Any], make: Callable[[Any], Any], like: torch.Tensor | None, name: str
) -> torch.Tensor:
    """A tensor of the class that was saved.

    Args:
        saved: its parts and facts. make: makes a part that holds no others. like: the parameter
            whose state it is, or another one on its mesh.

    Raises:
        StateError: the class is not on the list, or takes no such context, or no mesh is there.
    """
    parts = {
        part: made_of_parts(inner, make, None, f"{name}.{part}")
        if isinstance(inner, Mapping)
        else make(inner)
        for part, inner in saved.items()
        if part != FACTS
    }
    facts: Any = saved.get(FACTS)
    if not isinstance(facts, Mapping) or facts.get("class") != _PENDING:
        made = _built(facts, parts, name)
        if like is None or not is_dtensor(like) or "mesh" not in facts:
            return made
        from torch.distributed.tensor import DTensor

        _, mesh, placements, shape = dtensor_parts(like)
        return DTensor.from_local(
            made, mesh, placements, run_check=False, shape=shape, stride=like.stride()
        )
    if like is None or not is_dtensor(like):
        raise StateError(
            f"{name} is to be computed from what each rank of a mesh holds, and the target has no "
            "such mesh",
            remedy="load it on the mesh on which it was saved; or redistribute it to Replicate "
            "before the save",
        )
    try:
        return pending_on_mesh(like, parts["local"], facts["context"], facts["mesh"]["shape"])
    except Exception as error:
        raise StateError(
            f"{name} has placements that this torch or this mesh does not take, "
            f"{facts.get('context')!r}: {error}",
            remedy="load it on the mesh and with the torch with which it was saved",
        ) from error


_PENDING = "torch.distributed.tensor.DTensor"


def _built(facts: Any, parts: Mapping[str, Any], name: str) -> torch.Tensor:
    """
    Raises:
        StateError: the class is not on the list, or takes no such context.
    """
    if not isinstance(facts, Mapping) or not {"class", "context", "shape", "stride"} <= {*facts}:
        raise CorruptCheckpointError(
            f"what was saved beside the parts of {name} is {facts!r}",
            remedy="verify the checkpoint, and load another step",
        )
    kind = _class_of(str(facts["class"]))
    if kind is None:
        raise StateError(
            f"{name} is a {facts['class']}, which may not be imported for a checkpoint",
            remedy="call smckpt.state_dict.register_tensor_class on the class first, or give the "
            "target a tensor of it",
        )
    if _has_text(facts["context"]):
        raise StateError(
            f"{name} is a {facts['class']} with options that only code can make: "
            f"{facts['context']!r}",
            remedy="give the target a tensor of it, made with the same options",
        )
    try:
        names = dict.fromkeys((*parts, *_optional(kind, facts["context"])))
        made: torch.Tensor = kind.__tensor_unflatten__(  # type: ignore[attr-defined]
            {part: parts.get(part) for part in names},
            facts["context"],
            torch.Size(facts["shape"]),
            tuple(facts["stride"]),
        )
    except Exception as error:  # the class's own code
        raise StateError(
            f"{name} cannot be made by {facts['class']}.__tensor_unflatten__: "
            f"{type(error).__name__}: {error}",
            remedy="use the version of its library that saved it, or give the target a tensor of "
            "it",
        ) from error
    return made


def _optional(kind: type, context: Any) -> Sequence[str]:
    names = getattr(kind, "optional_tensor_data_names", ())
    return tuple(names or ())


def _has_text(context: Any) -> bool:
    if isinstance(context, Mapping):
        return _TEXT in context or any(map(_has_text, context.values()))
    return isinstance(context, (list, tuple)) and any(map(_has_text, context))


def unregistered(kind: type) -> tuple[str, str]:
    """As `not_made`, of a container with tensors."""
    return (
        f"{_name_of(kind)} with tensors, whose class is not registered",
        "call smckpt.state_dict.register_value_class on it, on both sides",
    )


def of_own_class(kind: type) -> tuple[str, str]:
    """As `not_made`, of a container with tensors, or a tensor, of a class that no load makes."""
    return (
        _name_of(kind),
        "put a plain tensor (as_subclass(torch.Tensor)), dict, list or tuple into the state",
    )


def not_made(facts: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why a load could not make a tensor of these facts, and the remedy; None if it could."""
    if _class_of(str(facts["class"])) is None:
        return (
            f"{facts['class']}, whose class is not registered",
            "call smckpt.state_dict.register_tensor_class on it, on both sides",
        )
    if _has_text(facts["context"]):
        return (
            f"{facts['class']} with options that only code can make ({facts['context']!r})",
            "give its __tensor_flatten__ a context of numbers, texts, dtypes, tuples and dicts",
        )
    return None


def note_attributes(
    tensor: torch.Tensor,
    path: Path,
    unmade: list[tuple[str, str, str]],
    bare: list[str],
    made: bool,
) -> None:
    """Add the tensor to `unmade` or `bare` of a `Selection` if attributes of it are not saved.

    Args:
        made: a load may have to make it, also if it is a parameter or buffer.
    """
    local = dtensor_parts(tensor)[0] if is_dtensor(tensor) else tensor
    if not (names := _own_attributes(local, made)):
        return
    if type(local) not in PLAIN:
        unmade.append((dotted(path), *_with_attributes(local, names)))
    elif local is tensor:
        bare.append(f"{dotted(path)} ({', '.join(names)})")


def _own_attributes(tensor: torch.Tensor, made: bool = False) -> list[str]:
    """The names of what a program keeps on the tensor itself, beside its values. None of a
    parameter or a module's buffer that no load makes, of a class of torch, and of one that says
    what it holds."""
    kind, kept = type(tensor), vars(tensor)
    if kind not in PLAIN:
        if kind.__module__.split(".")[0] in _LIBRARIES or is_flattening(tensor):
            return []
        if cuts_itself(tensor):  # DCP, too, gives its memory alone back
            return []
        slots = [vars(each).get("__slots__", ()) for each in kind.__mro__]
        names = [n for of in slots for n in ((of,) if isinstance(of, str) else of)]
        kept = {**kept, **{name: None for name in names if hasattr(tensor, name)}}
    if not kept or (not made and isinstance(tensor, (nn.Parameter, nn.Buffer))):
        return []
    flags = ("persistent",) if isinstance(tensor, nn.Buffer) else ()
    return sorted(name for name in kept if not name.startswith((*_MARKS, *flags)))


def _with_attributes(tensor: torch.Tensor, names: Sequence[str]) -> tuple[str, str]:
    return (
        f"{_name_of(type(tensor))} with attributes of its own ({', '.join(names)})",
        "give the class __tensor_flatten__ and __tensor_unflatten__, with them in the context; or "
        "put tensor.as_subclass(torch.Tensor) and the attributes into the state, side by side",
    )


def _class_of(name: str) -> type | None:
    """The class of that qualified name, if it may be imported."""
    if (known := _CLASSES.find(name)) is not None:
        return known
    if name.split(".")[0] not in _LIBRARIES:
        return None
    module, _, last = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), last)
    except (ImportError, AttributeError):
        return None
    return found if isinstance(found, type) and issubclass(found, torch.Tensor) else None


def joined(tree: Any, path: Path = ()) -> Any:
    """A state that was loaded without a target, with its parts put together again. A tensor that
    cannot be made stays a dict of its parts, and a warning names it."""
    if isinstance(tree, dict):
        for key, child in list(tree.items()):
            tree[key] = joined(child, (*path, key))
        facts = tree.get(FACTS)
        if not isinstance(facts, Mapping) or "class" not in facts or not path:
            return tree
        try:
            if "mesh" in facts:
                raise StateError(
                    f"{dotted(path)} is a {facts['class']} of which each rank holds its own part",
                    remedy="load it into the sharded optimizer or model",
                )
            return _built(facts, {k: v for k, v in tree.items() if k != FACTS}, dotted(path))
        except CheckpointError as error:
            log.warning("%s. It stays a dict of its parts", error)
            return tree
    if isinstance(tree, list):
        tree[:] = [joined(child, (*path, index)) for index, child in enumerate(tree)]
    elif type(tree) is tuple:
        return tuple(joined(child, (*path, index)) for index, child in enumerate(tree))
    return tree


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
