"""Files that contradict each other, with checksums that are right: no reader mixes them.

What `docs/format.md` says of a commit is held by whoever reads one, and by `verify`.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smckpt.checkpoint.commits.choose import choose_commit
from smckpt.checkpoint.commits.contents import contents_of
from smckpt.checkpoint.reading.committed import open_catalogue
from smckpt.checkpoint.records.format import Manifest, Record
from smckpt.checkpoint.records.sealed import decode_body, open_json
from smckpt.checkpoint.upkeep.verify import verify_checkpoint
from smckpt.errors import CheckpointError, CorruptCheckpointError
from smckpt.storage import open_storage
from tests.support.faults.forge import Change, find, reforge, reforge_step
from tests.support.saves import Group, hybrid, state_of
from tests.support.synthetic import Step

GROUPS = {"part0": (0, 2), "part1": (1, 3)}
MADE = state_of(hybrid((0, 1, 2, 3), 2))


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """Two groups, one save."""
    Step(tmp_path / "run", GROUPS, MADE).save()
    return tmp_path / "run"


def refused(root: Path) -> str:
    """That every reader refuses what is at `root`; what `verify` says of it."""
    for read in (
        lambda: choose_commit(open_storage(str(root))),
        lambda: contents_of(open_storage(str(root))),
    ):
        with pytest.raises(CorruptCheckpointError) as caught:
            read()
        assert caught.value.path and caught.value.remedy
    report = verify_checkpoint(str(root))
    assert not report.ok
    return report.problems[0].what


def put(body: dict[str, Any], **values: Any) -> None:
    body.update(values)


RECORD: dict[str, Change] = {
    "epoch": lambda body: put(body, epoch=9),
    "number": lambda body: put(body, number=9),
    "session": lambda body: put(body, session="9" * 12),
    "kind": lambda body: put(body, kind="FULL"),
    "step": lambda body: put(body, step=9),
    "no groups": lambda body: put(body, groups=[]),
    "one group twice": lambda body: body["groups"].append(body["groups"][0]),
    "one within another": lambda body: body["groups"][0].update(directory="part1/part0"),
    "another place": lambda body: body["groups"][0].update(directory="../private/part0"),
    "above": lambda body: body["groups"][0].update(directory=".."),
    "absolute": lambda body: body["groups"][0].update(directory="/etc"),
}


@pytest.mark.parametrize("what", RECORD)
def test_a_record_that_contradicts_its_name_or_its_manifests_is_refused(
    step: Path, what: str
) -> None:
    shutil.copytree(step, step.parent / "private")  # what it may lead to is there, and whole
    (record,) = find(step, "record")
    reforge(record, RECORD[what])
    refused(step)


MANIFEST: dict[str, Change] = {
    "epoch": lambda body: put(body, epoch=9),
    "number": lambda body: put(body, number=9, attempt=f"{body['session']}-00000009"),
    "session": lambda body: put(body, session="9" * 12, attempt=f"{'9' * 12}-00000000"),
    "attempt": lambda body: put(
        body,
        attempt=f"{'9' * 12}-00000000",
        parts=json.loads(json.dumps(body["parts"]).replace("000000000000-", "9" * 12 + "-")),
    ),
    "kind": lambda body: put(body, kind="FULL"),
    "step": lambda body: put(body, step=9),
    "another record": lambda body: put(body, record=f"../record-000001-00000000-{'9' * 12}.json"),
    "a record elsewhere": lambda body: put(body, record="../../private/" + body["record"][3:]),
    "no record": lambda body: put(body, record=None),
    "parts of other ranks": lambda body: put(body, parts=body["parts"][::-1]),
    "a part of another attempt": lambda body: body["parts"].__setitem__(
        0, json.loads(json.dumps(body["parts"][0]).replace("000000000000-", "9" * 12 + "-"))
    ),
    "a file of another rank": lambda body: body["parts"][0].update(files=body["parts"][1]["files"]),
    "a file twice": lambda body: body["parts"][0]["files"].append(body["parts"][0]["files"][0]),
    "checksums of another file": lambda body: body["parts"][0]["files"][0].update(
        crc_name=body["parts"][1]["files"][0]["crc_name"]
    ),
}


@pytest.mark.parametrize("what", MANIFEST)
def test_a_manifest_that_contradicts_its_name_or_its_record_is_refused(
    step: Path, what: str
) -> None:
    reforge_step(step, "part0", MANIFEST[what])
    refused(step)
    if what != "no record":  # that one commits itself
        with pytest.raises(CheckpointError):
            choose_commit(open_storage(str(step / "part0")))


@pytest.mark.parametrize("directory", ["..", "../private/part0", "/etc"])
def test_a_record_s_directories_lie_below_it(step: Path, directory: str) -> None:
    body = open_json(find(step, "record")[0].read_bytes(), "")
    decode_body(Record, body, "")
    body["groups"][0]["directory"] = directory
    with pytest.raises(CorruptCheckpointError, match="not below"):
        decode_body(Record, body, "")


@pytest.mark.parametrize("way", ["sub/", "/etc/", "../private/", "../../run/../"])
def test_a_manifest_s_record_stands_above_it(step: Path, way: str) -> None:
    body = open_json(find(step, "manifest")[0].read_bytes(), "")
    decode_body(Manifest, body, "")
    body["record"] = way + body["record"].rpartition("/")[2]
    with pytest.raises(CorruptCheckpointError, match="upwards"):
        decode_body(Manifest, body, "")


def test_two_groups_with_one_rank_are_refused(tmp_path: Path) -> None:
    Step(tmp_path / "a", {"part0": (0, 1), "part1": (2, 3)}, MADE).save()
    Step(tmp_path / "b", {"part0": (0, 1), "part1": (1, 3)}, MADE).save(commit=False)
    shutil.rmtree(tmp_path / "a" / "part1")
    shutil.copytree(tmp_path / "b" / "part1", tmp_path / "a" / "part1")
    reforge_step(tmp_path / "a", "part1", lambda body: None)  # the record names the new one
    assert "rank 1" in refused(tmp_path / "a")


def test_a_record_that_names_manifests_of_two_steps_is_refused(tmp_path: Path) -> None:
    made = Step(tmp_path, GROUPS, MADE)
    made.save()
    made.save()
    older, newer = find(tmp_path, "record")
    first = open_storage(str(tmp_path)).read(older.name)
    older_groups: list[dict[str, Any]] = []
    reforge(older, lambda body: older_groups.extend(body["groups"]))
    assert older.read_bytes() == first
    reforge(newer, lambda body: body["groups"].__setitem__(0, older_groups[0]))
    assert "step" in refused(tmp_path)


PART: dict[str, Change] = {
    "rank": lambda body: put(body, rank=2),
    "attempt": lambda body: put(body, number=7, attempt=f"{body['session']}-00000007"),
    "group_ranks": lambda body: put(body, group_ranks=[0, 1]),
    "kind": lambda body: put(body, kind="FULL"),
    "step": lambda body: put(body, step=9),
    "files": lambda body: put(body, files=[]),
}


@pytest.mark.parametrize("what", PART)
def test_a_part_that_contradicts_the_manifest_is_refused(tmp_path: Path, what: str) -> None:
    Group(tmp_path, (0, 2)).save()
    crc = reforge(find(tmp_path, "part")[0], PART[what])
    (manifest,) = find(tmp_path, "manifest")
    reforge(manifest, lambda body: body["parts"][0].update(crc64=crc))
    with pytest.raises(CorruptCheckpointError, match=what) as caught:
        open_catalogue(open_storage(str(tmp_path))).objects(0)
    assert caught.value.path and "part-" in caught.value.path
    assert [what in problem.what for problem in verify_checkpoint(str(tmp_path)).problems] == [True]


def saves_of_a_group(root: Path) -> None:
    group = Group(root, (0, 2))
    for seed in range(3):
        group.save(state=state_of(hybrid((0, 2), 1), seed=seed))


def saves_of_a_step(root: Path) -> None:
    made = Step(root, GROUPS, MADE)
    for seed in range(3):
        made.save(state=state_of(hybrid((0, 1, 2, 3), 2), seed=seed))


@pytest.mark.parametrize("make", [saves_of_a_group, saves_of_a_step])
def test_an_older_file_under_the_newest_name_is_never_taken_for_it(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    """All of them one by one, and 21 times several at once, as a restored backup mixes them."""
    make(tmp_path / "run")
    by_kind: dict[tuple[str, str], list[Path]] = {}
    for path in sorted((tmp_path / "run").rglob("*-*")):
        kind = path.name.split("-")[0] + path.suffix
        rank = path.stem.partition("-r")[2]
        if kind != "epoch.json" and path.is_file():
            by_kind.setdefault((str(path.parent), kind + rank), []).append(path)
    pairs = [pair for paths in by_kind.values() for pair in itertools.combinations(paths, 2)]
    swaps = [[(old, new)] for old, new in pairs if new in by_kind[_key(by_kind, new)][-1:]]
    chance = random.Random(13)
    swaps += [chance.sample(pairs, 3) for _ in range(21)]
    for swap in swaps:
        newest = [new for _, new in swap if new == by_kind[_key(by_kind, new)][-1]]
        before = {new: new.read_bytes() for _, new in swap}
        for old, new in swap:
            new.write_bytes(old.read_bytes())
        assert verify_checkpoint(str(tmp_path / "run"), threads=1).ok == (not newest), swap
        for path, data in before.items():
            path.write_bytes(data)
    assert verify_checkpoint(str(tmp_path / "run")).ok


def _key(by_kind: dict[tuple[str, str], list[Path]], path: Path) -> tuple[str, str]:
    return next(key for key, paths in by_kind.items() if path in paths)
