"""What stands in the arena after staging: the files, byte for byte."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from smckpt.errors import StateError
from smckpt.layout.entries import DTYPES, Entry
from smckpt.layout.geometry import MeshGeometry, PerRankGeometry
from smckpt.layout.image import SLICES_KEY, Layout, compile_layout
from smckpt.layout.mesh import Mesh, Placement
from smckpt.staging.arena import Arena
from smckpt.staging.copies import stage
from tests.support import child


def entry_of(key: str, tensor: torch.Tensor, ranks: tuple[int, ...] = (0,)) -> Entry:
    """Kept by rank 0, or the same on all of several `ranks`."""
    shape = tuple(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    geometry: PerRankGeometry | MeshGeometry = PerRankGeometry((key,), shape, (0,))
    if len(ranks) > 1:
        mesh = Mesh(("replicate",), (len(ranks),), ranks)
        geometry = MeshGeometry(key, shape, mesh, (Placement("replicate"),))
    return Entry((key,), dtype, geometry, (), (), ranks[:1])


def staged(
    tensors: dict[str, torch.Tensor],
    *,
    rank: int = 0,
    ranks: tuple[int, ...] = (0,),
    **options: int,
) -> tuple[Layout, list[bytes]]:
    """The layout of `rank`, and the bytes of its files as the arena has them."""
    entries = [entry_of(key, tensor, ranks) for key, tensor in tensors.items()]
    layout = compile_layout(entries, rank=rank, group_ranks=ranks, **options)
    with closing(Arena(layout.arena_size)) as arena:
        stage(arena, layout, [tensors[entry.key] for entry in layout.entries])
        return layout, files_in(arena, layout)


def files_in(arena: Arena, layout: Layout) -> list[bytes]:
    return [bytes(arena.view(file.arena_offset, file.size)) for file in layout.files]


def raw(tensor: torch.Tensor) -> bytes:
    """The tensor's elements in row-major order, as bytes."""
    if tensor.dtype.itemsize == 1:
        tensor = tensor.view(torch.uint8)
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.view(tensor.shape).copy_(tensor)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def content(file: bytes) -> dict[str, bytes]:
    """Key → bytes, read from the header alone."""
    length = int.from_bytes(file[:8], "little")
    table = json.loads(file[8 : 8 + length])
    table.pop("__metadata__")
    spans = {key: value["data_offsets"] for key, value in table.items()}
    return {key: file[8 + length + a : 8 + length + b] for key, (a, b) in spans.items()}


def any_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every bit pattern: NaN payloads, denormals, what no arithmetic would keep."""
    count = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return bits.view(dtype).view(shape)


def test_every_dtype_is_staged_bit_for_bit() -> None:
    tensors = {
        name: any_bits(getattr(torch, name), 3, 5) for name in DTYPES if hasattr(torch, name)
    }
    assert len(tensors) >= 20
    _, (file,) = staged(tensors)
    assert content(file) == {key: raw(tensor) for key, tensor in tensors.items()}
    loaded = load(file)  # safetensors' own reader accepts the file
    assert torch.equal(loaded["int64"], tensors["int64"])


def test_any_strides_shape_and_view_are_staged_row_major() -> None:
    base = torch.randn(6, 8, 10)
    complex_ = torch.randn(4, 5, dtype=torch.complex64)
    tensors = {
        "transposed": base.transpose(0, 2),
        "sliced": base[::2, 1:7:3, ::3],
        "expanded": torch.randn(1, 5).expand(7, 5),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "empty strided": torch.empty(4, 0).t(),
        "conjugated": complex_.conj(),
        "conjugated transposed": complex_.mH,
        "imaginary part of a conjugate": complex_.conj().imag,
        "parameter": torch.nn.Parameter(base[0]),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "offset": torch.arange(100, dtype=torch.int16)[3:90],
    }
    _, (file,) = staged(tensors)
    assert content(file) == {key: raw(tensor.detach()) for key, tensor in tensors.items()}


@settings(max_examples=150, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    step=st.integers(1, 3),
    writers=st.integers(1, 5),
)
def test_the_parts_of_replicas_join_to_the_whole_whatever_the_strides(
    shape: list[int], order: object, step: int, writers: int
) -> None:
    dims = list(range(len(shape)))
    order.shuffle(dims)  # type: ignore[attr-defined]
    tensors = {
        "a": torch.randn(shape).permute(dims)[::step],
        "b": torch.randn(3, 7).to(torch.bfloat16).t(),
        "conjugated": torch.randn(3, 4, dtype=torch.complex64).mH,
        "negated": torch.randn(11, dtype=torch.complex64).conj().imag,
    }
    ranks = tuple(range(writers))
    joined = dict.fromkeys(tensors, b"")
    for rank in ranks:
        for file in staged(tensors, rank=rank, ranks=ranks)[1]:
            for key, data in content(file).items():
                joined[key] += data
    assert joined == {key: raw(tensor) for key, tensor in tensors.items()}


def test_a_split_state_fills_several_files() -> None:
    tensors = {"a": torch.randn(1000), "b": torch.randn(30, 30).t(), "c": torch.ones(7).bool()}
    layout, files = staged(tensors, max_file_bytes=1500)
    assert len(files) > 3
    joined = dict.fromkeys(tensors, b"")
    for file in files:
        assert load(file)
        for key, data in content(file).items():
            joined[key] += data
    assert joined == {key: raw(tensor) for key, tensor in tensors.items()}
    assert any(SLICES_KEY.encode() in image.header for image in layout.files)


def test_a_repeated_save_has_the_new_values_and_another_state_its_own_layout() -> None:
    one = {"w": torch.zeros(1000)}
    other = {"w": torch.ones(10), "v": torch.full((9,), 2, dtype=torch.int8)}
    layouts = [
        compile_layout([entry_of(k, t) for k, t in state.items()], rank=0, group_ranks=(0,))
        for state in (one, other)
    ]
    with closing(Arena(max(layout.arena_size for layout in layouts))) as arena:
        for value in (1.0, 2.0):
            one["w"].fill_(value)
            stage(arena, layouts[0], [one["w"]])
            assert content(files_in(arena, layouts[0])[0])["w"] == raw(one["w"])
        stage(arena, layouts[1], [other[e.key] for e in layouts[1].entries])
        (file,) = files_in(arena, layouts[1])
        assert content(file) == {key: raw(tensor) for key, tensor in other.items()}


def test_a_tensor_that_is_not_its_entry_is_refused() -> None:
    layout = compile_layout([entry_of("w", torch.zeros(4, 4))], rank=0, group_ranks=(0,))
    with closing(Arena(layout.arena_size)) as arena:
        for wrong in (torch.zeros(4, 5), torch.zeros(4, 4, dtype=torch.float64)):
            with pytest.raises(StateError, match=r"w is .* its entry says float32 \(4, 4\)"):
                stage(arena, layout, [wrong])
        with pytest.raises(StateError, match="meta device"):
            stage(arena, layout, [torch.zeros(4, 4, device="meta")])


def test_an_arena_that_is_too_small_is_refused() -> None:
    layout = compile_layout([entry_of("w", torch.zeros(4000))], rank=0, group_ranks=(0,))
    with closing(Arena(4096)) as arena, pytest.raises(StateError, match="the arena has 4,096"):
        stage(arena, layout, [torch.zeros(4000)])


def test_staging_leaves_gradients_and_the_graph_alone() -> None:
    weight = torch.nn.Parameter(torch.randn(8, 8))
    loss = (weight * 2).sum()
    layout = compile_layout([entry_of("w", weight)], rank=0, group_ranks=(0,))
    with closing(Arena(layout.arena_size)) as arena:
        version = weight._version
        stage(arena, layout, [weight])
        assert weight._version == version and weight.grad is None
    loss.backward()
    assert torch.equal(weight.grad, torch.full((8, 8), 2.0))  # type: ignore[arg-type]


def test_a_strided_tensor_is_staged_without_a_copy_of_it() -> None:
    growth = child.run(
        """
        import resource, torch
        from tests.staging.test_stage import compile_layout, entry_of, stage, Arena
        base = torch.zeros(16 << 20, dtype=torch.float32).view(4096, 4096)
        tensor = base[:, 1:].t()
        ranks = (0, 1)
        layout = compile_layout([entry_of("w", tensor, ranks)], rank=1, group_ranks=ranks)
        arena = Arena(layout.arena_size)
        small = base[:64, 1:].t()
        little = compile_layout([entry_of("s", small, ranks)], rank=1, group_ranks=ranks)
        stage(arena, little, [small])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        stage(arena, layout, [tensor])
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        """
    )
    assert int(growth) < 15_000, "KiB; the tensor has 65,536"


@pytest.mark.parametrize("most", [100, 1 << 20])
def test_tensors_of_which_an_array_is_made_are_staged_one_after_the_other(most: int) -> None:
    """Whatever their strides, and wherever a file ends; a wrong number of elements is refused."""
    wide = any_bits(torch.float32, 8, 6)
    parts = [wide[:, 1:4], torch.zeros(0, 3), any_bits(torch.float32, 5), wide.t()[:, :3]]
    joined = torch.cat([part.reshape(-1) for part in parts])
    layout = compile_layout([entry_of("w", joined)], rank=0, group_ranks=(0,), max_file_bytes=most)
    with closing(Arena(layout.arena_size)) as arena:
        stage(arena, layout, [parts])
        files = files_in(arena, layout)
        assert (len(files) > 1) == (most == 100)
        assert b"".join(content(file)["w"] for file in files) == raw(joined)
        with pytest.raises(StateError, match="its entry says"):
            stage(arena, layout, [parts[:-1]])
        with pytest.raises(StateError, match="torch.float32, torch.int32"):
            stage(arena, layout, [[*parts[:-1], parts[-1].to(torch.int32)]])
