"""An export under a limit of memory that the kernel enforces, a tenth of the checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import child
from tests.support.models import shards

LIMIT = 448 << 20  # of address space: what the interpreter and the libraries map counts too
TENSOR = 512 << 20  # bytes: one alone is more than the limit


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Emptied at once: pytest would keep ten gigabytes for a while."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.long
def test_a_checkpoint_ten_times_larger_than_the_memory_limit_is_exported(folder: Path):
    numel = TENSOR // 2
    state = {
        f"w{i}": torch.full((1,), i + 1, dtype=torch.bfloat16).expand(numel).view(4096, -1)
        for i in range(9)
    }
    checkpoint = shards.write(folder / "c", 8, lambda r: shards.fsdp2(state, r, 8))
    stored = sum(path.stat().st_size for path in shards.files(checkpoint))
    assert stored > 10 * LIMIT
    code = """
    import resource, sys
    limit = int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    from smckpt import ExportOptions, export_hf
    options = ExportOptions(threads=2, max_shard_size="2GB")
    report = export_hf(sys.argv[1], sys.argv[2], options=options)
    print(report.nbytes)
    """
    # glibc reserves 64 MiB of address space for each thread's heap, of which it uses hardly any.
    own_heap = {"MALLOC_ARENA_MAX": "1"}
    places = (str(checkpoint), str(folder / "hf"), str(LIMIT))
    out = child.run(code, *places, timeout=280, **own_heap)
    assert int(out) == 9 * TENSOR
    files = sorted((folder / "hf").glob("*.safetensors"))
    assert len(files) == 3
    for path in files:  # each tensor is the same value throughout: ends and middle of each
        data = np.memmap(path, np.uint16, "r")
        found = {int(data[-1 - k * (numel // 2)]) for k in range(2 * (data.size // numel))}
        assert len(found) == data.size // numel
