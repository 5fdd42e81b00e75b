"""Compile the two sides of a translation to block copies, and prove them on shapes before any data
moves."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from smckpt.errors import KeysMismatchError, TensorMismatchError
from smckpt.layout.mesh import Shape
from smckpt.layout.strided import Copy, Coverage, Strided, coverage, meet
from smckpt.translate.tables.pieces import Side, TensorKey

__all__ = ["Block", "compile_blocks", "prove_copies"]


@dataclass(frozen=True, slots=True)
class Block:
    """Elements of the stored tensor `source` that go unchanged into a target; or, with several
    buffers, those that go into buffer number `buffer`."""

    source: TensorKey
    copy: Copy
    buffer: int = 0


def compile_blocks(source: Side, target: Side) -> dict[TensorKey, list[Block]]:
    """Target tensor → the blocks that fill it.

    It proves that each target element is written once and each source element is used once, except
    for padding of the vocabulary.

    Raises:
        KeysMismatchError, TensorMismatchError: the proof fails; the message lists what is left
            over.
    """
    blocks: dict[TensorKey, list[Block]] = {key: [] for key in target.shapes}
    for role, pieces in target.pieces.items():
        for to, piece in pieces:
            for key, other in source.pieces.get(role, ()):
                copy = meet(other, piece)
                if copy is not None:
                    blocks[to].append(Block(key, copy))
    proof = _Proof()
    used: dict[TensorKey, list[Strided]] = {key: [] for key in source.shapes}
    for held in blocks.values():
        for block in held:
            used[block.source].append(block.copy.source)
    repeated = {other for _, other in source.copies}
    repeated.update(other for _, others in source.joined.values() for other in others)
    wrong = []
    for key, parts in used.items():
        if key not in repeated:
            fault = proof.fault(source.shapes[key], parts, source.padding.get(key, 0))
            if fault:
                wrong.append(f"{key.name} {source.shapes[key]}: {fault}")
    if wrong:
        raise TensorMismatchError(
            f"{len(wrong)} tensors of the source would not be used exactly once: "
            f"{'; '.join(wrong[:8])}",
            remedy="check layout= and config=, which do not describe this source",
        )
    for first, (how, others) in target.joined.items():
        # a mean is written to all ranks, a sum to one rank and zeros to the others
        for rank in others:
            blocks[rank] = blocks[first] if how == "mean" else []
            target.padding[rank] = 0 if how == "mean" else target.shapes[rank][0]
    for first, copied in target.copies:
        blocks[copied] = blocks[first]
    wrong = []
    for key, shape in target.shapes.items():
        filled = (block.copy.target for block in blocks[key])
        fault = proof.fault(shape, filled, target.padding.get(target.original(key), 0))
        if fault:
            wrong.append(f"{key.name} {shape}: {fault}")
    if wrong:
        raise KeysMismatchError(
            f"{len(wrong)} tensors would not be filled exactly once: {'; '.join(wrong[:8])}",
            remedy="the source lacks parts of these tensors, or has some twice: check layout= "
            "and config=",
        )
    return blocks


def prove_copies(
    sources: Mapping[str, Shape],
    targets: Mapping[str, Shape],
    parts: Mapping[str, Sequence[tuple[str, Copy]]],
) -> None:
    """Prove that the parts of each target, which are copies out of sources, fill it exactly once,
    and that they use each element of each source exactly once.

    Raises:
        KeysMismatchError: they do not; the message lists what is left over.
    """
    proof = _Proof()
    used: dict[str, list[Strided]] = {name: [] for name in sources}
    wrong = []
    for name, shape in targets.items():
        for source, copy in parts[name]:
            used[source].append(copy.source)
        fault = proof.fault(shape, (copy.target for _, copy in parts[name]), 0)
        wrong += [f"{name} {shape}: {fault}"] if fault else []
    for name, shape in sources.items():
        fault = proof.fault(shape, used[name], 0)
        wrong += [f"{name} {shape} of the source: {fault}"] if fault else []
    if wrong:
        raise KeysMismatchError(
            f"{len(wrong)} tensors would not be used or filled exactly once: "
            f"{'; '.join(wrong[:8])}",
            remedy="pass the model's own config; ExportOptions(naming='module') keeps the names",
        )


# -- the proof ---------------------------------------------------------------------------------


class _Proof:
    """Proves that parts cover tensors exactly. Equal layers are checked once."""

    def __init__(self) -> None:
        self._coverage = functools.cache(coverage)

    def fault(self, shape: Shape, parts: Iterable[Strided], padding: int) -> str:
        """The fault, or "" if each element is covered once, except the last `padding` rows."""
        filled = (shape[0] - padding, *shape[1:]) if padding else shape
        found: Coverage = self._coverage(filled, tuple(parts))
        if found.outside:
            return (
                "padding is used as vocabulary" if padding else "a part reaches beyond the tensor"
            )
        if found.exact:
            return ""
        return f"{found.never} elements are not covered, {found.often} are covered more than once"
