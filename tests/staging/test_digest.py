"""The digests of a device's memory, by the kernel's own text compiled for this processor."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from smckpt.staging import digest
from tests.support.faults.late_stream import digests_of
from tests.support.limits import seconds

_ON_THE_HOST = """
#define __device__
#define __global__
#define __shared__ static
#define __syncthreads()
struct { unsigned x; } blockIdx, threadIdx;
%s
extern "C" void all(const u64* spans, int count, u64 chunks, u64* out) {
    for (u64 chunk = 0; chunk < chunks; chunk++) {
        out[chunk] = 0;
        for (u64 thread = 0; thread < %d; thread++)
            out[chunk] += share_of_chunk(spans, count, chunk, thread);
    }
}
"""

Digests = Callable[[Sequence[torch.Tensor]], list[int]]


@pytest.fixture
def by_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Digests:
    monkeypatch.setattr(digest, "CHUNK", 1 << 10)
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler for the kernel's text")
    source, built = tmp_path / "digest.cpp", tmp_path / "digest.so"
    source.write_text(_ON_THE_HOST % (digest.kernel_text(), digest._THREADS))
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", built, source], check=True, timeout=seconds(60)
    )
    run = ctypes.CDLL(str(built)).all

    def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
        spans, chunks = [], 0
        for tensor in tensors:
            spans += [tensor.data_ptr(), tensor.nbytes, chunks]
            chunks += digest.chunks_of(tensor.nbytes)
        table, out = (ctypes.c_uint64 * len(spans))(*spans), (ctypes.c_uint64 * chunks)()
        run(table, ctypes.c_int(len(tensors)), ctypes.c_uint64(chunks), out)
        return list(out)

    return digests


def test_it_depends_on_the_bytes_alone_wherever_they_begin_and_however_many(
    by_kernel: Digests,
) -> None:
    data = torch.randint(0, 256, (9000,), dtype=torch.uint8)
    sizes = [1, 7, 8, 9, 1023, 1024, 1025, 2047, 2048, 5000]
    expected = digests_of([data[:size].clone() for size in sizes])
    assert len(expected) == sum(map(digest.chunks_of, sizes))
    for offset in range(9):
        moved = [torch.empty(size + offset, dtype=torch.uint8)[offset:] for size in sizes]
        for to, size in zip(moved, sizes, strict=True):
            to.copy_(data[:size])
        assert by_kernel(moved) == expected, f"{offset} bytes further"


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.int64, torch.bfloat16])
def test_what_no_sum_of_words_sees_is_seen(by_kernel: Digests, dtype: torch.dtype) -> None:
    """An even number of changes of the highest bit, and words that trade places."""
    before = torch.randint(1, 9, (16, 32)).to(dtype)
    if dtype.is_complex:
        before *= 1 + 1j
    kept = by_kernel([before])
    changes: dict[str, Callable[[torch.Tensor], object]] = {
        "all": lambda t: t.neg_(),
        "every second": lambda t: t[:, ::2].neg_(),
        "two rows": lambda t: t[3:5].neg_(),
        "rolled": lambda t: t.copy_(t.roll(1)),
        "rolled by words, within a chunk": lambda t: t[0].copy_(t[0].roll(4)),
        "transposed": lambda t: t.copy_(t.clone().view(32, 16).t()),
    }
    if dtype.is_complex:
        changes["conjugated"] = lambda t: t.copy_(torch.conj_physical(t))
    for name, change in changes.items():
        after = before.clone()
        change(after)
        assert not torch.equal(after, before)
        assert by_kernel([after]) != kept, name


def test_the_chunk_that_changed_is_the_one_that_differs(by_kernel: Digests) -> None:
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (5, 3000, 1, 1024)]
    before = by_kernel(tensors)
    tensors[1][2999] ^= 128
    after = by_kernel(tensors)
    differ = [a != b for a, b in zip(before, after, strict=True)]
    assert differ == [False, False, False, True, False, False]
