"""How many requests the deletion of old steps takes: as many for 24 files of a step as for 96."""

from __future__ import annotations

from collections import Counter

import pytest

from smckpt.checkpoint.commits.run_directory import RunDirectory, Template
from smckpt.manager.retention import Newest, Retention
from smckpt.storage import open_storage
from tests.support.faults.copies import contents
from tests.support.faults.proxy import faulty_proxy
from tests.support.s3 import Server
from tests.support.saves import Group

STEPS = 4


def requests_of_a_deletion(root: str, ranks: int, server: Server) -> tuple[int, Counter[str]]:
    """The files of the deleted steps, and the requests by kind for each of them."""
    for step in range(1, STEPS + 2):
        group = Group(f"{root}/{step}", tuple(range(ranks)), session=f"{step:012x}")  # type: ignore
        group.save(step=step, metadata={"manager": {"run": "r"}})
    files = len(contents(f"{root}/1"))
    with faulty_proxy(server.endpoint) as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMCKPT_S3_ENDPOINT", proxy.endpoint)
        keeper = Retention(RunDirectory(open_storage(root), Template("{step}")), (Newest(1),), "r")
        assert len(keeper.tidy(str(STEPS + 1))) == STEPS
        kinds = Counter(_kind(line) for line in proxy.seen)
    assert {way.split("/")[0] for way in contents(root)} == {str(STEPS + 1)}
    return files, kinds


def _kind(line: str) -> str:
    method, _, rest = line.partition(" ")
    if "list-type" in rest:
        return "list"
    return "delete many" if "?delete" in rest else method


def test_requests_do_not_grow_with_the_files_of_a_step(s3_root: str, s3_server: Server) -> None:
    few, of_few = requests_of_a_deletion(f"{s3_root}/few", 8, s3_server)
    many, of_many = requests_of_a_deletion(f"{s3_root}/many", 32, s3_server)
    assert many > 3.9 * few - 10
    assert of_many == of_few, (of_many, of_few)
    total = sum(of_many.values())
    assert total < STEPS * many, "fewer requests than files"
    assert of_many["delete many"] <= 3 * STEPS
    # those that find the steps and the attempts count too
    assert of_many["list"] <= 7 * STEPS
