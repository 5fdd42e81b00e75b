"""Digests of memory on a CUDA device, 64 bits for each 256 KiB.

The device reads the bytes once, at the rate of its memory, in one launch for all tensors: launches
of torch's own reductions take longer than the reads. torch has no such reduction either. A sum, or
the XOR of `torch.hash_tensor`, is the same after an even number of equal changes, as `neg_()` makes
of 64-bit numbers, or after elements trade places.

Here each word of 64 bits is first mixed with its position by the finalizer of SplitMix64 (Steele,
Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014). That maps different words at one
position to different values, so a change of one word always changes the sum of a chunk. Other
changes leave it as it was once in 2^64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

# Bytes of one digest: small enough that a tensor of a few MiB keeps the whole device busy.
CHUNK = 256 << 10
_THREADS = 256

# Words at any address, in the processor's order of bytes; one beyond the end of a chunk has zeros.
_KERNEL = r"""
typedef unsigned long long u64;

__device__ u64 word_at(const unsigned char* data, u64 at, u64 size) {
    u64 word = 0;
    for (int byte = 7; byte >= 0; byte--)
        word = word << 8 | (at + byte < size ? data[at + byte] : 0);
    return word;
}

__device__ u64 share_of(const unsigned char* data, u64 size, u64 thread, u64 threads) {
    u64 aligned = (u64)data % 8 ? 0 : size / 8, sum = 0;
    for (u64 i = thread; i * 8 < size; i += threads) {
        u64 z = i < aligned ? ((const u64*)data)[i] : word_at(data, i * 8, size);
        z += (i + 1) * 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        sum += z ^ (z >> 31);
    }
    return sum;
}

// spans: address, bytes and number of the first chunk of each.
__device__ u64 share_of_chunk(const u64* spans, int count, u64 chunk, u64 thread) {
    int span = 0, beyond = count;
    while (beyond - span > 1) {
        int middle = (span + beyond) / 2;
        if (spans[3 * middle + 2] <= chunk) span = middle; else beyond = middle;
    }
    u64 at = (chunk - spans[3 * span + 2]) * CHUNK, left = spans[3 * span + 1] - at;
    const unsigned char* data = (const unsigned char*)spans[3 * span] + at;
    return share_of(data, left < CHUNK ? left : CHUNK, thread, THREADS);
}

// A block of threads takes a chunk.
extern "C" __global__ void digests(const u64* spans, int count, u64* out) {
    __shared__ u64 shares[THREADS];
    shares[threadIdx.x] = share_of_chunk(spans, count, blockIdx.x, threadIdx.x);
    __syncthreads();
    for (int half = THREADS / 2; half; half /= 2) {
        if (threadIdx.x < half) shares[threadIdx.x] += shares[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = shares[0];
}
"""


def chunks_of(nbytes: int) -> int:
    return -(-nbytes // CHUNK)


def kernel_text() -> str:
    return _KERNEL.replace("CHUNK", f"{CHUNK}ull").replace("THREADS", str(_THREADS))


def digests_on(device: torch.device) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
    """Compile the kernel for a device.

    Returns:
        A function of contiguous tensors on the device, none of them empty: their digests, tensor by
        tensor and chunk by chunk, as an int64 tensor there. It queues on the current stream, which
        is to be the same stream of the device each time.

    Raises:
        Exception: torch has no compiler of CUDA here, or it fails.
    """
    from torch.utils import cpp_extension

    compile_kernel: Any = torch.cuda._compile_kernel
    home = cpp_extension.CUDA_HOME
    # torch adds the toolkit's headers and refuses a host without them; the kernel includes none
    cpp_extension.CUDA_HOME = home or "/usr"
    try:
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # it makes the device's context this thread's
            kernel = compile_kernel(kernel_text(), "digests")
    finally:
        cpp_extension.CUDA_HOME = home

    @functools.lru_cache(maxsize=16)  # training keeps its tensors, and a save its buffer
    def table_of(spans: tuple[tuple[int, int, int], ...]) -> torch.Tensor:
        return torch.tensor(spans, dtype=torch.int64, device="cpu").to(device)

    def digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        spans, chunks = [], 0
        for tensor in tensors:
            spans.append((tensor.data_ptr(), tensor.nbytes, chunks))
            chunks += chunks_of(tensor.nbytes)
        out = torch.empty(chunks, dtype=torch.int64, device=device)
        kernel((chunks, 1, 1), (_THREADS, 1, 1), (table_of(tuple(spans)), len(spans), out))
        return out

    return digests
