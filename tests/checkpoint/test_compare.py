"""Which elements of two tensors are compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from smckpt.checkpoint.upkeep.compare import _jobs
from smckpt.layout.strided import Box


def tensor(*boxes: Box) -> Any:
    """Of four elements, as ranks hold it."""
    pieces = [
        SimpleNamespace(piece=SimpleNamespace(box=box), holders=(rank,))
        for rank, box in enumerate(boxes)
    ]
    return SimpleNamespace(shape=(4,), pieces=pieces)


LEFT, RIGHT, ALL = Box((0,), (2,)), Box((2,), (2,)), Box((0,), (4,))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (tensor(LEFT), tensor(LEFT, RIGHT)),  # A has a hole: to read it there says so
        (tensor(LEFT, RIGHT), tensor(LEFT)),
        (tensor(ALL), tensor(LEFT, RIGHT)),
        (tensor(LEFT, RIGHT), tensor(LEFT, RIGHT)),
    ],
)
def test_every_element_of_either_is_looked_at(a: Any, b: Any) -> None:
    seen = {
        at for box, *_ in _jobs(a, b) for at in range(box.offsets[0], box.offsets[0] + box.sizes[0])
    }
    assert seen == {0, 1, 2, 3}
