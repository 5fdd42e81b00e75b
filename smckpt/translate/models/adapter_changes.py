"""What adapters change in a base: each LoRA pair with the weight that it is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from smckpt.errors import KeysMismatchError, TensorMismatchError, UsageError
from smckpt.layout.mesh import Shape
from smckpt.layout.strided import Box, Copy, row_major_strides
from smckpt.translate.models.lora import LoraConfig, PeftTensors
from smckpt.translate.models.merged import Change, Merged
from smckpt.translate.ranks.translated import Translated
from smckpt.translate.writing.cast import CASTABLE

__all__ = ["Adapters", "change_of_pair", "changed_tensor", "changes_of"]

# The adapters to merge, in order.
Adapters: TypeAlias = "Sequence[tuple[PeftTensors[Translated], LoraConfig]]"


def changes_of(
    adapters: Adapters, shapes: Mapping[str, Shape], where: str
) -> dict[str, tuple[Change, ...]]:
    """What the adapters change, by the model's names in memory, whose `shapes` these are; the
    changes of a weight in the adapters' order.

    Raises:
        KeysMismatchError, TensorMismatchError: weights are missing or do not fit the adapter.
        UsageError: DoRA would come after another adapter.
    """
    made: dict[str, tuple[Change, ...]] = {}
    for parts, config in adapters:
        weights = config.weights(parts.pairs, shapes, where)
        if lost := sorted(parts.pairs.keys() - set(weights.values())):
            raise KeysMismatchError(
                f"the base weights that the adapter changes are missing: {lost[:8]}",
                remedy="pass base= the Hugging Face directory of the base model, and config= if "
                "that has none",
                path=where,
            )
        own = {
            name: change_of_pair(parts, config, module, name, shapes[name], where)
            for name, module in weights.items()
        }
        oriented = {name: _oriented(change, own, where) for name, change in own.items()}
        for name, change in oriented.items():
            if name in made and change.magnitude is not None:
                raise UsageError(
                    f"an adapter with DoRA would be merged into {name} after another adapter. PEFT "
                    "takes the other one out again first, and rounds",
                    remedy="name the adapter with DoRA first, or merge them with PEFT",
                    path=where,
                )
            made[name] = (*made.get(name, ()), change)
    return made


def change_of_pair(
    parts: PeftTensors[Translated], config: LoraConfig, module: str, name: str, shape: Shape,
    where: str,
) -> Change:  # fmt: skip
    a, b = (parts.pairs[module][side] for side in "AB")
    magnitude = parts.magnitudes.get(module)
    parameter = config.has_parameter(name)
    embeds = module in parts.embeddings
    key = name if parameter else module
    flip = embeds or (config.transposes(module) and not parameter)
    experts, rows, columns = shape if len(shape) == 3 else (1, *shape)[:3]
    product = (b.shape[0], a.shape[1])
    if len(shape) == 3:
        flip = product != (rows, columns)
    if len(shape) not in (2, 3) or product != ((columns, rows) if flip else (rows, columns)):
        raise TensorMismatchError(
            f"{name} has the shape {shape}, but the adapter's product has "
            f"{product[::-1] if flip else product}",
            remedy="pass the base that the adapter was trained on, and its own lora_config=",
            path=where,
        )
    if a.shape[0] != config.rank(key) * experts:
        raise TensorMismatchError(
            f"{name} of {experts} experts has LoRA matrices of rank {a.shape[0]}; the config says "
            f"{config.rank(key)} for each",
            remedy="pass lora_config= of this adapter", path=where,
        )  # fmt: skip
    if magnitude is not None and magnitude.shape != ((columns,) if flip else (rows,)):
        raise TensorMismatchError(
            f"{name} has the shape {shape}, and DoRA's vector {magnitude.shape}",
            remedy="pass the base that the adapter was trained on, and its own lora_config=",
            path=where,
        )
    made = Change(
        name, (experts, rows, columns), a, b, config.scaling(key), flip, embeds or parameter,
        magnitude,
    )  # fmt: skip
    if strange := {part.dtype for part in made.adapted} - CASTABLE.keys():
        raise _of_strange_dtype(name, strange, where)
    return made


def _oriented(change: Change, others: Mapping[str, Change], where: str) -> Change:
    """Square matrices of experts do not show whether they are transposed. All parameters of one
    module are alike.

    Raises:
        TensorMismatchError: no other shows it either.
    """
    experts, rows, columns = change.shape
    if rows != columns or experts == 1:
        return change
    prefix = change.name.rpartition(".")[0]
    for other in others.values():
        if other.name.rpartition(".")[0] == prefix and other.shape[1] != other.shape[2]:
            return replace(change, flip=other.flip)
    raise TensorMismatchError(
        f"{change.name} has square matrices, and no other parameter of its module has a LoRA pair "
        "that shows their order",
        remedy="merge it with PEFT",
        path=where,
    )


def changed_tensor(
    base: Translated, changes: tuple[Change, ...], copy: Copy | None, where: str
) -> Merged | Translated:
    """A tensor with the changes of the weight of which it is `copy`, or all.

    Raises:
        TensorMismatchError: its dtype cannot be computed with.
        UsageError: it is not a block of the weight.
    """
    if not changes:
        return base
    change = changes[0]  # all are of one shape, and only the first may be DoRA's
    if base.dtype not in CASTABLE:
        raise _of_strange_dtype(base.name, {base.dtype}, where)
    box, turned = Box.whole(change.shape), False
    if copy is not None:
        found = _block(copy, change.shape)
        cut = found is not None and (found[1] or found[0].sizes[2] != change.shape[2])
        if found is None or (change.magnitude is not None and (cut or change.flip)):
            raise UsageError(
                f"released models of this family hold {change.name} in other tensors "
                f"({base.name}), which are not merged with an adapter",
                remedy="pass ExportOptions(naming='module'), which transformers 5 loads, or merge "
                "it with PEFT",
                path=where,
            )
        box, turned = found
    return Merged(base.name, base.dtype, base, changes, box, turned)


def _block(copy: Copy, shape: Shape) -> tuple[Box, bool] | None:
    """The block of a weight that a copy is, and whether it is transposed; None if it is none."""
    sizes, target = copy.sizes, copy.target
    ordered = zip(sizes, target.strides, row_major_strides(sizes), strict=True)
    if target.start or any(size > 1 and stride != unit for size, stride, unit in ordered):
        return None
    steps = copy.source.steps(shape)
    dims = [step.dim for step in steps if step.dim >= 0]
    if any(step.number > 1 and step.step != 1 for step in steps):
        return None
    turned = dims != sorted(dims)
    if turned and sorted((*dims[:-2], *dims[:-3:-1])) != [*dims[:-2], *dims[:-3:-1]]:
        return None
    return Box(tuple(s.at for s in steps), tuple(s.number for s in steps)), turned


def _of_strange_dtype(name: str, dtypes: set[str], where: str) -> TensorMismatchError:
    return TensorMismatchError(
        f"{name}, or its LoRA pair, has dtype {', '.join(sorted(dtypes))}",
        remedy='export it with lora="adapter"; a quantized base is not merged',
        path=where,
    )
