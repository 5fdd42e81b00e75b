"""What `lfs` tells of a Lustre. A script on PATH stands in for it, which prints the formats that
Lustre's manual shows: no Lustre has been tried."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smckpt.manager import room
from smckpt.manager.room import Room, room_at
from smckpt.storage import open_storage
from smckpt.storage.disk import lustre
from smckpt.storage.disk.lustre import LustreTarget, quotas_left, targets
from tests.support.limits import seconds

Answers = Callable[..., None]

DF = """\
UUID                   1K-blocks        Used   Available Use% Mounted on
scratch-MDT0000_UUID     9174328       20508     8622808   1% /scratch[MDT:0]
scratch-OST0000_UUID    94181368    56330708    37850660  60% /scratch[OST:0]
scratch-OST0001_UUID    94181368    94180368        1000 100% /scratch[OST:1] f
scratch-OST0002_UUID: inactive device
scratch-OST0003_UUID : Resource temporarily unavailable
scratch-OST001f_UUID    94181368    56329644    37851724  60% /scratch[OST:31]

filesystem_summary:    282544104   206840720    75703384  73% /scratch
"""


@pytest.fixture
def lfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Sets what `lfs df`, `lfs quota -u`, … print. It logs how it was called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def answers(script: str = "exit 1", **said: str) -> None:
        for name, text in said.items():
            (folder / name).write_text(text)
        program = folder / "lfs"
        program.write_text(
            f'#!/bin/sh\necho "$@" >> {folder}/calls\n'
            f'case "$1$3" in\n'
            f'quota-u) cat {folder}/user;;\nquota-g) cat {folder}/group;;\n'
            f'quota-p) cat {folder}/project_quota;;\n'
            f'*) case $1 in df) cat {folder}/df;; project) cat {folder}/project;; *) {script};; '
            "esac;;\nesac\n"
        )  # fmt: skip
        program.chmod(0o755)

    return answers


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "bin" / "calls").read_text().splitlines()


def test_each_target_is_told_and_those_that_do_not_answer_are_left_out(
    lfs: Answers, tmp_path: Path
) -> None:
    lfs(df=DF)
    assert targets("/scratch") == (
        LustreTarget("scratch-OST0000", 0, 37850660 * 1024),
        LustreTarget("scratch-OST0001", 1, 1000 * 1024),
        LustreTarget("scratch-OST001f", 31, 37851724 * 1024),
    )
    assert calls(tmp_path) == ["df -l /scratch"]


def test_a_full_target_is_named_with_what_to_do(lfs: Answers, tmp_path: Path, caplog: Any) -> None:
    lfs(df=DF)
    root = open_storage(tmp_path / "run" / "not" / "there")
    room.check_room(root, {0: 500_000, 1: 1_000_000}, 1, (), lambda: 0)
    assert not caplog.records  # each has room for a rank
    room.check_room(root, {0: 500_000, 1: 2_000_000}, 1, (), lambda: 0)
    (warned,) = (one for one in caplog.records if one.levelno == logging.WARNING)
    said = warned.getMessage()
    assert "1 of 3 Lustre targets" in said and "scratch-OST0001 (1.0 MB left)" in said
    assert "OST0000" not in said and f"lfs find {root.url} --ost 1" in said and "setstripe" in said


QUOTA = "{path} 1000{star}  {soft}  {hard}  -  12  0  0  -\n"


@pytest.mark.parametrize(
    ("user", "left"),
    [
        (QUOTA.format(path="{path}", star="", soft=1500, hard=2000), 1000),
        (QUOTA.format(path="{path}", star="", soft=1500, hard=0), 500),
        (QUOTA.format(path="{path}", star="*", soft=500, hard=900), 0),
        (QUOTA.format(path="{path}\n         ", star="", soft=0, hard=3000), 2000),
        ("{path}  [1000]  [0]  [1200]  -  [12]  [0]  [0]  -\n", 200),
    ],
    ids=["hard", "soft", "above", "long path", "a server does not answer"],
)
def test_the_rest_of_the_users_quota(lfs: Answers, tmp_path: Path, user: str, left: int) -> None:
    none = QUOTA.format(path=tmp_path, star="", soft=0, hard=0)
    lfs(user=user.replace("{path}", str(tmp_path)), group=none, project="    0 - x\n")
    assert list(quotas_left(str(tmp_path))) == [("this user's Lustre quota", left * 1024)]
    assert room_at(open_storage(tmp_path)) == Room(left * 1024, "this user's Lustre quota")


def test_the_quotas_of_group_and_project_count_too(lfs: Answers, tmp_path: Path) -> None:
    def told(hard: int) -> str:
        return QUOTA.format(path=tmp_path, star="", soft=0, hard=hard)

    lfs(user=told(0), group=told(1500), project="   42 P x\n", project_quota=told(1200))
    os.chmod(tmp_path, stat.S_IMODE(os.stat(tmp_path).st_mode) | stat.S_ISGID)
    group = os.stat(tmp_path).st_gid
    assert list(quotas_left(str(tmp_path))) == [
        (f"the Lustre quota of group {group}", 500 * 1024),
        ("the Lustre quota of project 42", 200 * 1024),
    ]
    assert f"quota -q -g {group} {tmp_path}" in calls(tmp_path)
    assert f"quota -q -p 42 {tmp_path}" in calls(tmp_path)
    assert room_at(open_storage(tmp_path)) == Room(200 * 1024, "the Lustre quota of project 42")


def test_elsewhere_and_where_lfs_says_something_else_it_is_as_without_it(
    lfs: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path)
    for noise in ("", "lfs df: '/tmp' is not a Lustre filesystem\n", "1 2 3 \0\xff", f"{path} a b"):
        lfs(df=noise, user=noise, group=noise, project=noise, project_quota=noise)
        assert targets(path) == () and list(quotas_left(path)) == []
    monkeypatch.setenv("PATH", "/nonexistent")
    assert targets(path) == () and list(quotas_left(path)) == []


def test_a_client_that_waits_for_a_server_is_not_waited_for(
    lfs: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lustre, "_SECONDS", 0.2)
    program = tmp_path / "bin" / "lfs"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    began = time.monotonic()
    assert targets("/scratch") == ()
    assert time.monotonic() - began < seconds(30)
