"""A file of safetensors, written as it streams."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

from smckpt.errors import StateError
from smckpt.layout.entries import DTYPES
from smckpt.translate.archives.new_target import NewTarget
from smckpt.translate.archives.torch_write import Placeholder
from smckpt.translate.conversion.whole_state import WholeState

__all__ = ["write_safetensors"]


def write_safetensors(
    whole: WholeState,
    key: str,
    target: NewTarget,
    name: str,
    renamed: Callable[[str], str] = str,
) -> None:
    """Write the tensors of a model's state dict.

    Args:
        renamed: gives a tensor's name in the file by that in the state dict.

    Raises:
        StateError: it has something else than tensors of dtypes that safetensors knows.
    """
    state = whole.nested(key)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    wrong = [
        each for each, leaf in state.items()
        if not isinstance(leaf, Placeholder) or DTYPES[leaf.dtype].code is None
    ]  # fmt: skip
    if wrong:
        raise StateError(
            f"{', '.join(wrong[:8])} cannot be in a file of safetensors",
            remedy="only a model of plain tensors goes back to a framework's own checkpoint",
            path=whole.catalogue.url,
        )
    numbers = [leaf.number for leaf in state.values()]
    for each, leaf in state.items():
        nbytes = whole.tensors[leaf.number].nbytes
        header[renamed(each)] = {
            "dtype": DTYPES[leaf.dtype].code, "shape": list(leaf.shape),
            "data_offsets": [at, at + nbytes],
        }  # fmt: skip
        at += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with target.file(name) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for pieces in whole.pieces(numbers).values():
            for piece in pieces:
                file.write(piece)
