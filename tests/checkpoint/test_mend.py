"""Damaged files of a committed checkpoint are mended from places that have their bytes."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from smckpt import verify_checkpoint
from smckpt.checkpoint.records.crc import BLOCK
from smckpt.checkpoint.upkeep.repair import repair_checkpoint
from smckpt.checkpoint.upkeep.transfer import copy_checkpoint
from smckpt.errors import (
    CheckpointNotFoundError,
    StorageError,
    UsageError,
)
from smckpt.storage import open_storage
from smckpt.storage.disk.posix import PosixWriter
from tests.support import synthetic
from tests.support.faults.copies import contents, killed_at
from tests.support.saves import State, hybrid
from tests.support.synthetic import Step, kept, on_mesh

MESH = hybrid((0, 1, 2, 3), 2)
GROUPS = {"part0": (0, 2), "part1": (1, 3)}
SHAPES = {"w": (10, 6), "b": (7,), "step": ()}


def made(seed: int = 0) -> State:
    rules = [on_mesh("w", (10, 6), MESH, "R S0"), on_mesh("b", (7,), MESH, "R R"), kept("step")]
    return synthetic.state(rules, synthetic.whole(SHAPES, seed=seed))


def large(root: Path, name: str, *, step: int = 10, **frozen: int) -> Path:
    """A checkpoint of two ranks, each with a file of 4 MiB and more: a weight that is equal in all,
    and one that differs with the step."""
    mesh = hybrid((0, 1), 1)
    rules = [on_mesh("frozen", (1536, 1024), mesh, "R S0"), on_mesh("w", (512, 1024), mesh, "R S0")]
    arrays = {
        **synthetic.whole({"frozen": (1536, 1024)}),
        **synthetic.whole({"w": (512, 1024)}, seed=step),
    }
    session = f"{step:012x}"
    synthetic.save(
        root / name, (0, 1), synthetic.state(rules, arrays), session=session, step=step, **frozen
    )
    return root / name


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large(tmp_path_factory.mktemp("sound"), "10")


@pytest.fixture
def hurt(sound: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage; nothing else is beside it."""
    return Path(shutil.copytree(sound, tmp_path / "run" / "10"))


def data_of(at: Path, rank: int = 1, kind: str = "safetensors") -> Path:
    (found,) = at.glob(f"data-*-r{rank:05d}-0.{kind}")
    return found


def flipped(at: Path) -> None:
    for offset in (5, BLOCK + 7, 3 * BLOCK):
        synthetic.flip(data_of(at), offset)


def cut(at: Path) -> None:
    os.truncate(data_of(at), 2 * BLOCK + 1)


def grown(at: Path) -> None:
    with data_of(at).open("ab") as file:
        file.write(b"more")


def gone(at: Path) -> None:
    data_of(at).unlink()


def sums(at: Path) -> None:
    synthetic.flip(data_of(at, kind="crc"), 9)


def no_sums(at: Path) -> None:
    data_of(at, kind="crc").unlink()


def both(at: Path) -> None:
    sums(at)
    flipped(at)


def part(at: Path) -> None:
    synthetic.flip(next(at.glob("part-*r00000.json")), 200)


def no_part(at: Path) -> None:
    next(at.glob("part-*r00001.json")).unlink()


def rank_lost(at: Path) -> None:
    for path in at.glob("*-r00001*"):
        path.unlink()


DAMAGES = [flipped, cut, grown, gone, sums, no_sums, both, part, no_part, rank_lost]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda one: one.__name__)
def test_what_a_copy_has_is_mended(
    hurt: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    whole = contents(hurt)
    copy_checkpoint(hurt, tmp_path / "copy")
    damage(hurt)
    hurt_now = contents(hurt)
    looked = repair_checkpoint(hurt, sources=[tmp_path / "copy"], dry_run=True)
    assert looked.mended and looked.whole and contents(hurt) == hurt_now
    report = repair_checkpoint(hurt, sources=[tmp_path / "copy"])
    assert report.whole and [one.path for one in report.mended] == [
        one.path for one in looked.mended
    ]
    assert contents(hurt) == whole
    assert verify_checkpoint(hurt).ok
    assert not repair_checkpoint(hurt).mended


def test_what_a_copy_in_s3_has_is_mended_and_what_is_damaged_in_s3(
    hurt: Path, s3_root: str
) -> None:
    whole = contents(hurt)
    copy_checkpoint(hurt, s3_root)
    flipped(hurt)
    assert repair_checkpoint(hurt, sources=[s3_root]).whole
    assert contents(hurt) == whole
    there, name = open_storage(s3_root), data_of(hurt).name
    data = bytearray(there.read(name))
    data[BLOCK] ^= 1
    there.delete(name)
    there.put(name, bytes(data))
    report = repair_checkpoint(s3_root, sources=[hurt])
    assert report.whole and report.mended[0].nbytes == BLOCK
    assert contents(s3_root) == whole


def test_a_node_that_has_only_its_own_ranks_files_helps_too(hurt: Path, tmp_path: Path) -> None:
    whole = contents(hurt)
    node = tmp_path / "node"
    node.mkdir()
    for path in hurt.glob("*-r00001*"):
        shutil.copy2(path, node)
    both(hurt)
    assert repair_checkpoint(hurt, sources=[node]).whole
    assert contents(hurt) == whole


def test_equal_blocks_of_another_step_are_found_beside_it(hurt: Path) -> None:
    whole = contents(hurt)
    large(hurt.parent, "20", step=20)
    frozen = 2 * BLOCK  # within the frozen weight, which both steps have
    synthetic.flip(data_of(hurt), frozen + 5)
    report = repair_checkpoint(hurt)
    assert report.whole and contents(hurt) == whole
    (mended,) = report.mended
    assert mended.nbytes == BLOCK and mended.sources == (str(data_of(hurt.parent / "20")),)


def test_a_replica_s_equal_file_is_found_in_the_checkpoint_itself(tmp_path: Path) -> None:
    """Two ranks that keep the same values as their own."""
    rules = [kept("w", (1024, 1024))]
    arrays = synthetic.whole({"w": (1024, 1024)})
    synthetic.save(tmp_path, (0, 1), synthetic.state(rules, arrays))
    whole = contents(tmp_path)
    synthetic.flip(data_of(tmp_path), 2 * BLOCK + 5)
    report = repair_checkpoint(tmp_path)
    assert report.whole and contents(tmp_path) == whole
    assert report.mended[0].sources == (str(data_of(tmp_path, rank=0)),)


def test_what_cannot_be_mended_is_named_with_rank_bytes_and_tensors(hurt: Path) -> None:
    large(hurt.parent, "20", step=20)
    data = data_of(hurt)
    synthetic.flip(data, 2 * BLOCK + 5)  # frozen: the other step has it
    synthetic.flip(data, data.stat().st_size - 5)
    before = contents(hurt)
    report = repair_checkpoint(hurt)
    assert contents(hurt) == before  # a file is mended whole or not at all
    (left,) = report.left
    size = data.stat().st_size
    assert (left.path, left.rank) == (str(data), 1)
    assert left.ranges == ((size // BLOCK * BLOCK, size),)
    assert left.tensors == ("model.w",)
    assert f"smckpt repair {hurt} --from COPY" in left.remedy
    gone(hurt)
    (left,) = repair_checkpoint(hurt).left
    assert left.what == "is missing" and left.tensors == ("model.frozen", "model.w")


def test_a_copy_that_is_damaged_elsewhere_gives_its_good_blocks(hurt: Path, tmp_path: Path) -> None:
    whole = contents(hurt)
    one, other = tmp_path / "one", tmp_path / "other"
    for place in (one, other):
        copy_checkpoint(hurt, place)
    synthetic.flip(data_of(one), 5)
    synthetic.flip(data_of(other), 3 * BLOCK + 5)
    for offset in (5, 3 * BLOCK + 5):
        synthetic.flip(data_of(hurt), offset)
    assert not repair_checkpoint(hurt, sources=[one]).whole
    report = repair_checkpoint(hurt, sources=[one, other])
    assert report.whole and contents(hurt) == whole
    assert report.mended[0].sources == (str(data_of(one)), str(data_of(other)))


@pytest.mark.parametrize(
    "damage",
    [flipped, no_part, *(pytest.param(one, marks=pytest.mark.long) for one in (gone, both, cut))],
    ids=lambda one: one.__name__,
)
def test_a_mend_killed_at_any_call_makes_nothing_worse_and_a_second_one_finishes(
    hurt: Path, sound: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    whole = contents(hurt)
    damage(hurt)
    before = contents(hurt)
    for moment in itertools.count():
        place = Path(shutil.copytree(hurt, tmp_path / "killed"))
        killed = killed_at(
            moment, lambda at=place: repair_checkpoint(at, sources=[sound], threads=1), calls=True
        )
        for name, data in contents(place).items():
            if not name.startswith("."):
                assert data in (before.get(name), whole[name]), (moment, name)
        assert before.keys() <= contents(place).keys()
        assert repair_checkpoint(place, sources=[sound]).whole
        assert contents(place) == whole, moment
        shutil.rmtree(place)
        if not killed:
            break
    assert moment > 8


def test_a_disk_that_gives_other_bytes_back_is_told(
    hurt: Path, sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = PosixWriter.finish

    def failing(self: PosixWriter) -> None:
        finish(self)
        synthetic.flip(Path(self._path), 3)

    flipped(hurt)
    monkeypatch.setattr(PosixWriter, "finish", failing)
    with pytest.raises(StorageError, match="reads back with other bytes"):
        repair_checkpoint(hurt, sources=[sound])


def test_several_groups_and_links(tmp_path: Path) -> None:
    root = tmp_path / "step"
    Step(root, GROUPS, made()).save()
    whole = contents(root)
    copy_checkpoint(root, tmp_path / "copy")
    victim = next((root / "part1").glob("data-*-r00003-0.safetensors"))
    synthetic.flip(victim, victim.stat().st_size - 2)
    with pytest.raises(UsageError, match="one group of a step"):
        repair_checkpoint(root / "part1")
    assert repair_checkpoint(root, sources=[tmp_path / "copy"]).whole
    assert contents(root) == whole
    synthetic.flip(victim, victim.stat().st_size - 2)
    shutil.move(root / "part1", tmp_path / "elsewhere")
    (root / "part1").symlink_to(tmp_path / "elsewhere")
    before = contents(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="symbolic link"):
        repair_checkpoint(root, sources=[tmp_path / "copy"])
    assert contents(tmp_path / "elsewhere") == before


def test_a_source_that_is_forged_gives_nothing(hurt: Path, sound: Path, tmp_path: Path) -> None:
    """Files of the right names with other bytes, and checksums that say the right thing."""
    fake = tmp_path / "fake"
    fake.mkdir()
    for path in sound.iterdir():
        (fake / path.name).write_bytes(b"x" * path.stat().st_size)
    shutil.copy2(data_of(sound, kind="crc"), fake)
    flipped(hurt)
    no_part(hurt)
    before = contents(hurt)
    report = repair_checkpoint(hurt, sources=[fake])
    assert len(report.left) == 2 and not report.mended and contents(hurt) == before


def test_places_that_make_no_sense_are_refused(hurt: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        repair_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointNotFoundError, match="checkpoints are below"):
        repair_checkpoint(hurt.parent)
    flipped(hurt)
    assert not repair_checkpoint(hurt, sources=[tmp_path / "absent"]).whole
