"""Leases that are not what they seem: named, and passed over where that is safe."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from smckpt.checkpoint.commits.leases import leases_at, mark_lease, take_lease
from smckpt.checkpoint.records.format import FORMAT_VERSION, lease_name
from smckpt.checkpoint.records.sealed import seal_json
from smckpt.errors import CorruptCheckpointError, UsageError
from smckpt.storage import Access, open_storage

A, B = "a" * 12, "b" * 12
HOUR = 3600 * 10**9


def lease(root: Path, session: str, ranks: list[int], since: int = 0) -> dict[str, Any]:
    return take_lease(Access(), str(root), session, "h", ranks=ranks, since=since)


def stamp(root: Path, at: int, **values: Any) -> Path:
    """A lease of ranks 2 and 3, stamped by some clock."""
    path = root / lease_name(1)
    body = {
        "format": list(FORMAT_VERSION),
        "epoch": 1,
        "session": A,
        "host": "h",
        "claimed_at": at,
        "groups": [],
        "before": [],
        "ranks": [2, 3],
    }
    path.write_bytes(seal_json({**body, **values}))
    return path


def test_a_lease_stamped_in_the_future_is_passed_over_and_told(tmp_path: Path) -> None:
    path = stamp(tmp_path, time.time_ns() + 24 * HOUR)
    told = lease(tmp_path, B, [0, 1], since=time.time_ns())
    assert told["fencing_token"] == 2
    assert str(path) in told["remark"] and "future" in told["remark"]


def test_a_lease_of_other_ranks_since_this_job_began_is_refused(tmp_path: Path) -> None:
    path = stamp(tmp_path, time.time_ns() + 10**9)  # within what clocks of one job may differ
    with pytest.raises(UsageError, match="one checkpoint_id") as caught:
        lease(tmp_path, B, [0, 1], since=time.time_ns() - HOUR)
    assert str(path) in caught.value.remedy
    assert "remark" not in lease(tmp_path, B, [0, 1], since=time.time_ns() + HOUR)


@pytest.mark.parametrize("what", ["link", "directory"])
def test_a_name_of_a_lease_that_is_no_file_is_passed_over_and_told(
    tmp_path: Path, what: str
) -> None:
    path = tmp_path / lease_name(1)
    if what == "link":
        path.symlink_to(tmp_path / "nowhere")
    else:
        path.mkdir()
    told = lease(tmp_path, A, [0])
    assert told["fencing_token"] == 2
    assert str(path) in told["remark"] and "remove" in told["remark"]
    assert "remark" not in lease(tmp_path, B, [0])


def test_a_link_in_a_groups_directory_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / lease_name(4)).symlink_to(tmp_path / "nowhere")
    with pytest.raises(CorruptCheckpointError, match="symbolic link") as caught:
        mark_lease(open_storage(str(tmp_path)), 4, A)
    assert lease_name(4) in str(caught.value.path) and "remove" in caught.value.remedy


@pytest.mark.parametrize(
    "values",
    [
        {"epoch": "1"},
        {"epoch": 2},
        {"claimed_at": None},
        {"claimed_at": 1.5},
        {"groups": 3},
        {"groups": [3]},
        {"groups": ["/etc"]},
        {"before": {"a": 1}},
        {"before": [1]},
        {"session": None},
        {"session": 1},
        {"ranks": ["0"]},
        {"ranks": None},
        {"spread": []},
        {"session": None, "spread": {"up": "x"}},
    ],
)
def test_a_lease_of_wrong_types_is_a_typed_error(tmp_path: Path, values: dict[str, Any]) -> None:
    path = stamp(tmp_path, 1, **values)
    with pytest.raises(CorruptCheckpointError) as caught:
        leases_at(open_storage(str(tmp_path)))
    assert caught.value.path == str(path) and caught.value.remedy
