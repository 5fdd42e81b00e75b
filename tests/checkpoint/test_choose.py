"""Which commit counts, and what is said where none does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from smckpt.checkpoint.commits.choose import Commit, choose_commit
from smckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UsageError,
)
from smckpt.storage import open_storage
from tests.support import synthetic
from tests.support.faults.forge import find, reforge
from tests.support.saves import Group, hybrid, state_of
from tests.support.synthetic import Step, flip

MESH = hybrid((0, 1, 2, 3), 2)
GROUPS = {"part0": (0, 2), "part1": (1, 3)}


def choose(directory: Path, name: str | None = None) -> Commit:
    return choose_commit(open_storage(str(directory)), name)


def steps(root: Path) -> Step:
    return Step(root, GROUPS, state_of(MESH))


def test_the_newest_of_several_saves_counts_above_and_in_each_group(tmp_path: Path) -> None:
    step = steps(tmp_path)
    step.save()
    newest = step.save()
    above = choose(tmp_path)
    assert above.identity == newest and above.through_record and len(above.manifests) == 2
    for name in GROUPS:
        commit = choose(tmp_path / name)
        assert commit.identity == newest and len(commit.manifests) == 1


def test_a_later_fencing_token_wins_over_a_higher_number(tmp_path: Path) -> None:
    made = state_of(hybrid((0,), 1))
    first = synthetic.save(tmp_path, (0,), made, session="a" * 12)
    first.save()
    first.save()
    second = Group(tmp_path, (0,), session="b" * 12, state=made)
    newest = second.save()
    assert choose(tmp_path).identity == newest["manifest"]


def test_a_crash_between_the_groups_leaves_the_older_step_in_all_of_them(tmp_path: Path) -> None:
    step = steps(tmp_path)
    older = step.save()
    step.save(commit=False)
    assert {choose(place).identity for place in (tmp_path, *(tmp_path / g for g in GROUPS))} == {
        older
    }


def test_an_older_commit_is_had_by_its_name(tmp_path: Path) -> None:
    step = steps(tmp_path)
    older = step.save()
    step.save()
    assert choose(tmp_path, older).identity == older
    assert choose(tmp_path / "part1", older).order == choose(tmp_path, older).order
    with pytest.raises(UsageError, match="is not a commit"):
        choose(tmp_path, "part-x.json")
    with pytest.raises(CheckpointNotFoundError, match="another group"):
        choose(tmp_path, older.replace("-00000000-", "-00000007-"))


@pytest.mark.parametrize("where", ["record", "manifest"])
def test_a_damaged_newest_commit_is_told_and_no_older_one_taken(tmp_path: Path, where: str) -> None:
    step = steps(tmp_path)
    step.save()
    step.save()
    path = max(tmp_path.rglob(f"{where}-*"), key=lambda p: p.name)
    flip(path, path.stat().st_size // 2)
    with pytest.raises(CorruptCheckpointError) as caught:
        choose(tmp_path)
    assert caught.value.path == str(path) and caught.value.remedy


def test_a_manifest_that_the_record_does_not_name_does_not_count(tmp_path: Path) -> None:
    """Such as one left by a rank that wrote for the same number and lost."""
    steps(tmp_path).save()
    (record,) = find(tmp_path, "record")
    reforge(record, lambda body: body["groups"].pop(0))
    with pytest.raises(CheckpointNotFoundError):
        choose(tmp_path / "part0")
    assert choose(tmp_path / "part1").identity == record.name


def test_a_record_whose_manifest_was_deleted_is_damage_not_absence(tmp_path: Path) -> None:
    steps(tmp_path).save()
    (manifest,) = (tmp_path / "part0").glob("manifest-*")
    manifest.unlink()
    with pytest.raises(CorruptCheckpointError, match="missing") as caught:
        choose(tmp_path)
    assert caught.value.path == str(manifest)


def test_a_manifest_swapped_for_another_whole_one_is_not_taken(tmp_path: Path) -> None:
    steps(tmp_path / "a").save()
    steps(tmp_path / "b").save(metadata={"other": 1})
    (mine,) = (tmp_path / "a" / "part0").glob("manifest-*")
    (other,) = (tmp_path / "b" / "part0").glob("manifest-*")
    mine.write_bytes(other.read_bytes())
    for place in (tmp_path / "a", tmp_path / "a" / "part0"):
        with pytest.raises(CorruptCheckpointError, match="the one that the checkpoint names"):
            choose(place)


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"format": [1, 0]}'])
def test_a_commit_that_is_half_written_is_damage_with_path_and_remedy(
    tmp_path: Path, junk: bytes
) -> None:
    for name in ("manifest", "record"):
        path = tmp_path / name / f"{name}-000001-00000000-{'a' * 12}.json"
        path.parent.mkdir()
        path.write_bytes(junk)
        with pytest.raises(CheckpointError) as caught:
            choose(path.parent)
        assert caught.value.path == str(path) and caught.value.remedy, json.dumps(str(caught.value))


def nothing(root: Path) -> dict[str, Path]:
    """Places without a commit, by what is to be said of them."""
    steps(root / "job" / "step").save()
    steps(root / "cut").save(commit=False)
    Group(root / "parts", (0,)).write(0)
    (root / "foreign").mkdir()
    (root / "foreign" / "model.pt").write_text("")
    (root / "empty").mkdir()
    (root / "job" / "step" / "part0" / "deeper").mkdir()
    return {
        "checkpoints are below, in step": root / "job",
        "checkpoint is above": root / "job" / "step" / "part0" / "deeper",
        "record that would commit": root / "cut" / "part0",
        "files of unfinished saves": root / "parts",
        "1 other files": root / "foreign",
        "empty or missing": root / "empty",
        "is empty or missing": root / "never",
    }


def test_where_there_is_no_commit_the_error_says_what_is_here_instead(tmp_path: Path) -> None:
    for words, place in nothing(tmp_path).items():
        with pytest.raises(CheckpointNotFoundError, match=words) as caught:
            choose(place)
        assert caught.value.path == str(place) and caught.value.remedy


@pytest.mark.parametrize(
    ("names", "what", "call"),
    [
        ([".metadata", "__0_0.distcp"], "torch.distributed.checkpoint (DCP)", "smckpt convert "),
        (["config.json", "model.safetensors"], "Hugging Face's format", "smckpt import "),
        (["pytorch_model.bin.index.json"], "Hugging Face's format", "from_pretrained("),
        (["adapter_config.json", "adapter_model.safetensors"], "PEFT's format", "PeftModel."),
    ],
)
def test_a_directory_of_another_format_is_named_with_the_call_that_reads_it(
    tmp_path: Path, names: list[str], what: str, call: str
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointNotFoundError) as error:
        choose(tmp_path)
    assert what in error.value.message and call in error.value.remedy
    assert str(tmp_path) in error.value.remedy


def test_checkpoints_below_are_told_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for step in (100, 20, 10):
        synthetic.save(tmp_path / f"step_{step}", (0,), state_of(hybrid((0,), 1)))
    with pytest.raises(CheckpointNotFoundError, match="in step_10, step_20, step_100"):
        choose(tmp_path)
