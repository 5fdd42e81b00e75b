"""Options that are in force for a call hold in all of its threads, not the environment's."""

from __future__ import annotations

from pathlib import Path

import pytest

from smckpt.checkpoint.commits.commit import publish_record
from smckpt.checkpoint.records.format import Record
from smckpt.checkpoint.records.sealed import read_file
from smckpt.checkpoint.upkeep.transfer import copy_checkpoint
from smckpt.checkpoint.upkeep.verify import verify_checkpoint
from smckpt.storage import open_storage
from smckpt.storage.s3.config import StoreOptions
from tests.support import synthetic
from tests.support.saves import hybrid
from tests.support.synthetic import Step, kept, on_mesh


def test_a_step_of_several_groups_is_read_under_the_options_of_the_call(
    tmp_path: Path, s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = hybrid((0, 1, 2, 3), 2)
    made = synthetic.state(
        [on_mesh("w", (10, 6), mesh, "R S0"), kept("step")],
        synthetic.whole({"w": (10, 6), "step": ()}),
    )
    Step(tmp_path / "step", {"part0": (0, 2), "part1": (1, 3)}, made).save()
    config = StoreOptions.from_environment()
    monkeypatch.setenv("SMCKPT_S3_ENDPOINT", "http://127.0.0.1:9")  # nobody is there
    monkeypatch.setenv("SMCKPT_S3_RETRIES", "0")
    copy_checkpoint(str(tmp_path / "step"), s3_root, storage=config)
    assert verify_checkpoint(s3_root, storage=config).ok
    given = {"endpoint": config.endpoint, "region": config.region}
    assert verify_checkpoint(s3_root, storage=given).ok
    store = open_storage(s3_root, storage=config)
    [record] = store.list("record-")
    groups = read_file(Record, store, record.name).groups
    store.delete(record.name)
    published = publish_record(store.access, s3_root, "f" * 12, 0, 1, groups)
    assert published == record.name
