"""A saved state, whole, whose tensors are read when they are written: what conversions write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any

from smckpt.checkpoint.reading.catalogue import Catalogue
from smckpt.checkpoint.reading.read import Meter, Progress
from smckpt.checkpoint.reading.whole import WholeTensor, WholeTensors, kind_of, nested
from smckpt.checkpoint.records.parameter_names import under_names
from smckpt.errors import StateError
from smckpt.layout.containers import flattened
from smckpt.layout.entries import Path, dotted
from smckpt.layout.strided import Box

__all__ = ["AT_ONCE", "WholeState"]

AT_ONCE = 64 << 20  # bytes of tensors in memory


class WholeState:
    """The state that rank `rank` would load without a target, under logical names. An optimizer's
    parameters have their names.

    tensors, values: those that are not left out, of the whole checkpoint.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        rank: int,
        threads: int,
        *,
        left_out: Callable[[str], bool],
        progress: Progress | None = None,
    ) -> None:
        """
        Args:
            left_out: whether the tensor or value of this name is left out.
        """
        self.catalogue, self.rank = catalogue, rank
        self._threads, self._left_out = threads, left_out
        self._reads = WholeTensors(catalogue, rank, threads)
        self.tensors = [one for one in self._reads.tensors if not left_out(one.name)]
        self.values = self._named_values(dict.fromkeys((rank, catalogue.object_ranks[0])))
        self._meter = Meter(progress, sum(tensor.nbytes for tensor in self.tensors))

    def of_rank(self, rank: int) -> WholeState:
        """The state of another rank."""
        return WholeState(self.catalogue, rank, self._threads, left_out=self._left_out)

    def add_values(self, ranks: Iterable[int]) -> None:
        """Add the values of these ranks under names that are not here yet, below dicts too: each
        rank may have one of its own."""
        for rank in ranks:
            for path, value in self._named_values([rank]).items():
                self.values[path] = _joined(self.values.get(path, value), value)

    @property
    def keys(self) -> set[str]:
        """The first names of what was saved."""
        return {str(path[0]) for path in (*(one.path for one in self.tensors), *self.values)}

    def leaves(
        self, key: str | None = None, held: Callable[[WholeTensor], bool] = lambda _: False
    ) -> dict[Path, Any]:
        """The values, and a placeholder for each tensor; of all, or what is below the first name
        `key`. Arrays of NumPy are in memory, because formats have them among the values.

        Args:
            held: whether a tensor itself is wanted, in memory.
        """
        from smckpt.translate.archives.torch_write import Placeholder

        leaves = {path: v for path, v in self.values.items() if key in (None, path[0])}
        for number, tensor in enumerate(self.tensors):
            if key not in (None, tensor.path[0]):
                continue
            array = kind_of(self.catalogue, tensor.path) == "ndarray"
            if array or held(tensor):
                if tensor.nbytes > AT_ONCE:
                    raise StateError(
                        f"{tensor.name} has {tensor.nbytes} bytes, and torch keeps it among the "
                        "values",
                        remedy="save it as a tensor, outside of tuples", path=self.catalogue.url,
                    )  # fmt: skip
                import torch

                dtype: torch.dtype = getattr(torch, tensor.dtype)
                made = torch.empty(tensor.shape, dtype=dtype)
                if tensor.nbytes:
                    data: Any = made.reshape(-1).view(torch.uint8).numpy()
                    self.read(tensor, Box.whole(tensor.shape), memoryview(data))
                leaves[tensor.path] = made.numpy() if array else made
            else:
                leaves[tensor.path] = Placeholder(number, tensor.dtype, tensor.shape)
        return leaves

    def nested(
        self, key: str | None = None, held: Callable[[WholeTensor], bool] = lambda _: False
    ) -> Any:
        """The state of those leaves, in its containers."""
        state = nested(self.catalogue, self.leaves(key, held))
        return state if key is None else state[key]

    def is_in_tuple(self, tensor: WholeTensor) -> bool:
        path = tensor.path
        return any(kind_of(self.catalogue, path[:depth]) == "tuple" for depth in range(len(path)))

    def in_memory(self, key: str) -> Any:
        """What is under a first name, with its tensors."""
        return self.nested(key, held=lambda _: True)

    def read(self, tensor: WholeTensor, box: Box, memory: memoryview) -> None:
        self._reads.read(tensor, box, memory)
        self._meter.add(len(memory))

    # -- writing -------------------------------------------------------------------------------

    def pieces(self, numbers: Iterable[int]) -> dict[int, Iterator[memoryview]]:
        """The bytes of these tensors. A piece is valid until the next one is taken."""
        chosen = {number: self.tensors[number] for number in numbers}
        size = min(AT_ONCE, max((one.nbytes for one in chosen.values()), default=0))
        buffer = memoryview(bytearray(size))

        def of(tensor: WholeTensor) -> Iterator[memoryview]:
            for box in tensor.chunks(AT_ONCE) if tensor.nbytes else ():
                memory = buffer[: box.numel * tensor.itemsize]
                self.read(tensor, box, memory)
                yield memory

        return {number: of(tensor) for number, tensor in chosen.items()}

    def write_torch(self, file: IO[bytes], state: Any) -> None:
        """Write a state that `nested` gave, or one made of it, as one file of `torch.save`."""
        from smckpt.translate.archives.torch_write import Placeholder, bytes_of, write_archive

        held: list[Any] = []

        def placed(value: Any) -> Any:
            import torch

            if not isinstance(value, torch.Tensor):
                return value
            held.append(value)
            dtype = str(value.dtype).removeprefix("torch.")
            return Placeholder(len(self.tensors) + len(held) - 1, dtype, tuple(value.shape))

        state = _replaced(state, placed)
        numbers = {leaf.number for leaf in _leaves(state) if isinstance(leaf, Placeholder)}
        read = self.pieces(sorted(number for number in numbers if number < len(self.tensors)))
        kept = {len(self.tensors) + at: [bytes_of(one)] for at, one in enumerate(held)}
        write_archive(file, state, {**read, **kept})

    def write_dcp(self, directory: str, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Write a state as DCP flattens it. Gives the names whose form that changes."""
        import torch

        from smckpt.translate.archives.torch_write import Placeholder
        from smckpt.translate.sources.dcp.write import write_dcp

        parts: dict[Path, WholeTensor] = {}
        values: dict[Path, Any] = {}
        for path, leaf in flattened((), state, (Placeholder, torch.Tensor)):
            if isinstance(leaf, Placeholder):
                parts[path] = self.tensors[leaf.number]
            else:
                values[path] = leaf
        write_dcp(directory, parts, values, self.read)
        return tuple(sorted(set(_changed((), state))))

    def _named_values(self, ranks: Iterable[int]) -> dict[Path, Any]:
        found: dict[Path, Any] = {}
        for rank in ranks:
            for path, value in self.catalogue.objects(rank).values():
                for dotted_path, named in under_names(self.catalogue.optimizers, path, value):
                    if not self._left_out(dotted(dotted_path)):
                        found.setdefault(dotted_path, named)
        return found


def _joined(first: Any, other: Any) -> Any:
    if not (isinstance(first, dict) and isinstance(other, dict)):
        return first
    joined = first.copy()
    for key, value in other.items():
        joined[key] = _joined(first[key], value) if key in first else value
    return joined


def _replaced(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Nested dicts, lists and tuples with other leaves. What has none to replace stays itself."""
    if isinstance(value, dict):
        made = {key: _replaced(inner, replace) for key, inner in value.items()}
        if all(made[key] is value[key] for key in made):
            return value
        copied = value.copy()
        copied.update(made)
        return copied
    if type(value) in (list, tuple):
        inner = [_replaced(one, replace) for one in value]
        same = all(new is old for new, old in zip(inner, value, strict=True))
        return value if same else type(value)(inner)
    return replace(value)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list, tuple)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    else:
        yield value


def _changed(path: Path, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if not value or any(type(key) is not str for key in value):
            yield dotted(path)
        for key, inner in value.items():
            yield from _changed((*path, str(key)), inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _changed((*path, index), inner)
