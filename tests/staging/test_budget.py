"""Arenas that would not fit are refused before any is made, with the arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from smckpt.errors import MemoryBudgetError
from smckpt.staging.arena import check_memory

GIB = 1 << 30


def host(root: Path, available: int, cgroup: str = "", **files: object) -> Path:
    """A host's /proc and /sys; names of `files` have "__" for "/"."""
    for name, text in {
        "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:   {available // 1024} kB\n",
        "proc/self/cgroup": cgroup,
        **{f"sys/fs/cgroup/{name.replace('__', '/')}": value for name, value in files.items()},
    }.items():
        path = root / name.replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}")
    return root


def test_this_machine_has_room_for_a_megabyte_and_not_for_an_exabyte() -> None:
    check_memory(1 << 20, 2)
    with pytest.raises(MemoryBudgetError):
        check_memory(1 << 60, 1)


def test_all_ranks_and_copies_count_against_the_host(tmp_path: Path) -> None:
    root = host(tmp_path, 10 * GIB)
    check_memory(2 * GIB, 4, root=root)
    with pytest.raises(MemoryBudgetError) as caught:
        check_memory(2 * GIB, 4, copies=2, root=root)
    message = str(caught.value)
    assert "4 ranks" in message and "2.00 GiB of arena × 2 copies" in message
    assert "16.25 GiB" in message and "MemAvailable leaves 10.00 GiB" in message
    assert caught.value.remedy


def test_the_limit_of_a_cgroup_v2_or_of_one_above_it_counts(tmp_path: Path) -> None:
    root = host(
        tmp_path,
        100 * GIB,
        "0::/job/step\n",
        job__memory_DOT_max=8 * GIB,
        job__memory_DOT_current=6 * GIB,
        job__memory_DOT_stat=f"anon 5\ninactive_file {1 * GIB}\n",
        job__step__memory_DOT_max="max",
        job__step__memory_DOT_current=GIB,
    )
    check_memory(2 * GIB, 1, root=root)  # 8 - 6 + 1 that the kernel can drop
    with pytest.raises(MemoryBudgetError, match=r"job/memory\.max leaves 3\.00 GiB"):
        check_memory(3 * GIB, 1, root=root)


def test_the_limit_of_a_cgroup_v1_counts(tmp_path: Path) -> None:
    root = host(
        tmp_path,
        100 * GIB,
        "9:cpu:/x\n4:memory:/docker/abc\n0::/\n",
        memory__docker__abc__memory_DOT_limit_in_bytes=4 * GIB,
        memory__docker__abc__memory_DOT_usage_in_bytes=3 * GIB,
        memory__memory_DOT_limit_in_bytes=1 << 62,
        memory__memory_DOT_usage_in_bytes=50 * GIB,
    )
    with pytest.raises(MemoryBudgetError, match=r"limit_in_bytes leaves 1\.00 GiB"):
        check_memory(2 * GIB, 1, root=root)


def test_in_a_container_the_limit_at_the_mount_counts(tmp_path: Path) -> None:
    """There the path in /proc/self/cgroup is the host's, and only the mount is there."""
    root = host(
        tmp_path,
        100 * GIB,
        "0::/../../kubepods/pod1\n",
        memory_DOT_max=GIB,
        memory_DOT_current=0,
    )
    with pytest.raises(MemoryBudgetError, match=r"cgroup/memory\.max leaves 1\.00 GiB"):
        check_memory(2 * GIB, 1, root=root)


def test_a_host_that_tells_nothing_is_not_refused(tmp_path: Path) -> None:
    check_memory(GIB, 1, root=tmp_path)
