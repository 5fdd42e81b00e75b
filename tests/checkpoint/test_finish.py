"""Parts whose coordinator died are committed, by the rules of a coordinator, or not at all."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smckpt import find_checkpoints, verify_checkpoint
from smckpt.checkpoint.commits import leases
from smckpt.checkpoint.commits.commit import publish_manifest, publish_record, take_lease
from smckpt.checkpoint.commits.discover import found_at
from smckpt.checkpoint.commits.sweep import sweep
from smckpt.checkpoint.records.format import GroupManifest, fence_name, record_name
from smckpt.checkpoint.records.sealed import seal_json
from smckpt.checkpoint.upkeep.repair import RepairReport, repair_checkpoint
from smckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    UsageError,
)
from smckpt.storage import Access, open_storage
from tests.support import synthetic
from tests.support.faults import forge
from tests.support.faults.copies import contents, killed_at
from tests.support.saves import Group, State, hybrid
from tests.support.synthetic import kept, on_mesh

MESH = hybrid((0, 1, 2, 3), 2)
GROUPS = {"part0": (0, 2), "part1": (1, 3)}
SHAPES = {"w": (10, 6), "b": (7,), "step": ()}
A, B = "a" * 12, "b" * 12


def made(seed: int = 0) -> State:
    rules = [on_mesh("w", (10, 6), MESH, "R S0"), on_mesh("b", (7,), MESH, "R R"), kept("step")]
    return synthetic.state(rules, synthetic.whole(SHAPES, seed=seed))


def commit(at: Path | str, **how: Any) -> RepairReport:
    """Repair that has to commit."""
    report = repair_checkpoint(at, **how)
    assert report.commits and report.whole, report
    return report


def refused(at: Path | str, **how: Any) -> str:
    """What is left of a repair that changed nothing."""
    before = contents(at)
    report = repair_checkpoint(at, **how)
    assert not report.whole and not report.commits and not report.mended
    assert contents(at) == before
    return "; ".join(f"{one.what} | {one.remedy}" for one in report.left)


def unfinished(at: Path, *, lease: bool = True, **part: Any) -> tuple[Group, dict[str, Any]]:
    """A group of two ranks, both of which have written; then its coordinator died. And what it
    would have published."""
    group = Group(at, (0, 1), session=A)
    if lease:
        group.lease()
    return group, group.write(0, **part)


class DeadStep:
    """A step of two groups, whose lead died at a given moment.

    Args:
        after: "parts", "lease", "manifest" (of the first group), "manifests".
    """

    def __init__(self, root: Path, after: str, state: State | None = None, **part: Any) -> None:
        self.root = root
        groups = [
            Group(root / name, ranks, session=f"{index:012x}", state=state or made())
            for index, (name, ranks) in enumerate(GROUPS.items())
        ]
        payloads = [group.write(0, step=20, **part) for group in groups]
        if after == "parts":
            return
        urls = [str(group.directory) for group in groups]
        told = take_lease(Access(), str(root), B, "host", urls, ranks=(0, 1, 2, 3))
        self.token = told["fencing_token"]
        self.record = record_name(self.token, 0, B)
        count = {"lease": 0, "manifest": 1, "manifests": 2}[after]
        self.published: list[GroupManifest] = []
        self.payloads = [
            {**payload, "fencing_token": self.token, "record": f"../{self.record}"}
            for payload in payloads
        ]
        for payload in self.payloads[:count]:
            self.publish(payload)

    def publish(self, payload: dict[str, Any]) -> None:
        done = publish_manifest(Access(), **payload)
        way = Path(payload["directory"]).name
        self.published.append(
            GroupManifest(way, done["manifest"], done["crc64"], min(payload["ranks"]))
        )

    def live_lead(self) -> str:
        """What the lead does if it was not dead after all."""
        for payload in self.payloads[len(self.published) :]:
            self.publish(payload)
        publish_record(Access(), str(self.root), B, 0, self.token, self.published)
        return self.record


# -- committing one directory ----------------------------------------------------------------------


def test_parts_whose_coordinator_died_are_committed(tmp_path: Path) -> None:
    unfinished(tmp_path, step=20)
    assert find_checkpoints(tmp_path) == []
    before = contents(tmp_path)
    looked = repair_checkpoint(tmp_path, dry_run=True)
    assert looked.commits and looked.step == 20 and contents(tmp_path) == before
    report = commit(tmp_path)
    found = found_at(open_storage(str(tmp_path)))
    assert found is not None and (found.identity, found.step) == (report.committed, 20)
    assert verify_checkpoint(tmp_path).ok
    assert before.items() <= contents(tmp_path).items()
    assert contents(tmp_path).keys() - before.keys() == {report.committed}
    again = repair_checkpoint(tmp_path)
    assert again.whole and not again.commits and not again.mended


def test_in_s3_too(s3_root: str) -> None:
    group = Group(s3_root, (0, 1), session=A)  # type: ignore[arg-type]
    group.lease()
    group.write(0, step=20)
    report = commit(s3_root)
    assert found_at(open_storage(s3_root)).identity == report.committed  # type: ignore[union-attr]
    assert verify_checkpoint(s3_root).ok


def test_a_newer_save_in_the_directory_of_an_older_one_is_committed_and_counts(
    tmp_path: Path,
) -> None:
    group = Group(tmp_path, (0, 1), session=A)
    group.save()
    group.write(1)
    commit(tmp_path)
    found = found_at(open_storage(str(tmp_path)))
    assert found is not None and (found.step, found.number, found.fencing_token) == (10, 1, 2)
    later = Group(tmp_path, (0, 1), session=B)  # the job starts again, saves and sweeps
    done = later.save(step=30)
    sweep(Access(), str(tmp_path), [done["manifest"]], later.lease())
    assert {name.split("-")[1] for name in contents(tmp_path) if name.startswith("data")} == {B}


def test_what_was_superseded_stays_uncommitted(tmp_path: Path) -> None:
    old = Group(tmp_path, (0, 1), session=A)
    old.lease()
    old.write(0)
    Group(tmp_path, (0, 1), session=B).save(step=30)
    report = repair_checkpoint(tmp_path)
    assert report.whole and not report.commits
    assert verify_checkpoint(tmp_path).identity == "manifest-000002-00000000-bbbbbbbbbbbb.json"


def test_a_later_run_that_has_taken_a_lease_is_not_overtaken(tmp_path: Path) -> None:
    unfinished(tmp_path)
    take_lease(Access(), str(tmp_path), B, "h")
    before = contents(tmp_path)
    with pytest.raises(CheckpointNotFoundError):
        repair_checkpoint(tmp_path)
    assert contents(tmp_path) == before


def test_without_a_lease_nothing_is_guessed(tmp_path: Path) -> None:
    unfinished(tmp_path, lease=False)
    assert f"smckpt repair {tmp_path} --group ." in refused(tmp_path)
    commit(tmp_path, groups=["."])
    assert verify_checkpoint(tmp_path).ok


def test_one_group_of_a_step_is_never_committed_alone(tmp_path: Path) -> None:
    DeadStep(tmp_path, "manifests")
    assert f"pass the directory of the step, {tmp_path}" in refused(tmp_path / "part0")
    said = refused(tmp_path / "part0", groups=["."])
    assert "shared with ranks [1, 3]" in said and "the step has more groups" in said
    DeadStep(tmp_path / "never", "parts")
    assert "--group ." in refused(tmp_path / "never" / "part0")


@pytest.mark.parametrize("what", ["part", "data", "crc"])
def test_a_save_of_which_a_file_is_missing_is_named(tmp_path: Path, what: str) -> None:
    unfinished(tmp_path)
    pattern = {"part": "part-*r00001.json", "data": "data-*r00001-0.safetensors"}
    victim = next(tmp_path.glob(pattern.get(what, "data-*r00001-0.crc")))
    victim.unlink()
    said = refused(tmp_path)
    assert ("rank 1 wrote no part" if what == "part" else victim.name) in said


@pytest.mark.parametrize("what", ["data", "crc", "part"])
def test_a_save_of_which_a_bit_is_wrong_is_not_committed(tmp_path: Path, what: str) -> None:
    unfinished(tmp_path)
    pattern = {"part": "part-*r00001.json", "data": "data-*r00001-0.safetensors"}
    victim = next(tmp_path.glob(pattern.get(what, "data-*r00001-0.crc")))
    synthetic.flip(victim, victim.stat().st_size - 3)
    assert not list(tmp_path.glob("manifest-*"))
    refused(tmp_path)


# -- committing several groups ---------------------------------------------------------------------


@pytest.mark.parametrize("after", ["lease", "manifest", "manifests"])
def test_a_step_of_groups_is_committed_wherever_its_lead_died(tmp_path: Path, after: str) -> None:
    DeadStep(tmp_path, after)
    before = contents(tmp_path)
    commit(tmp_path)
    found = found_at(open_storage(str(tmp_path)))
    assert found is not None and found.step == 20 and set(found.groups) == set(GROUPS)
    assert verify_checkpoint(tmp_path).ok
    assert before.items() <= contents(tmp_path).items()
    assert not [name for name in contents(tmp_path) if "fence" in name]


def test_groups_that_no_lease_names_are_given_by_the_user(tmp_path: Path) -> None:
    DeadStep(tmp_path, "parts")
    said = refused(tmp_path)
    assert f"smckpt repair {tmp_path} --group part0 --group part1" in said
    assert "the step has more groups" in refused(tmp_path, groups=["part0"])
    commit(tmp_path, groups=["part0", "part1"])
    assert verify_checkpoint(tmp_path).ok


def test_a_group_that_lacks_a_part_keeps_the_step_uncommitted(tmp_path: Path) -> None:
    DeadStep(tmp_path, "lease")
    next((tmp_path / "part1").glob("part-*-r00003.json")).unlink()
    assert "rank 3 of part1 wrote no part" in refused(tmp_path)


def test_groups_that_do_not_agree_are_not_joined(tmp_path: Path) -> None:
    DeadStep(tmp_path, "lease", kind=lambda rank: "LOCAL" if rank in (0, 2) else "SHARDED")
    assert "do not agree on the kind" in refused(tmp_path)


def test_groups_of_two_numbers_are_not_joined(tmp_path: Path) -> None:
    step = DeadStep(tmp_path, "lease")
    for path in (tmp_path / "part1").iterdir():
        path.unlink()
    Group(tmp_path / "part1", (1, 3), session=f"{1:012x}", state=made()).write(1, step=20)
    assert "nothing of it is in" in refused(tmp_path)
    assert step.token == 1


def parts_of(at: Path, groups: dict[str, tuple[int, ...]], **part: Any) -> None:
    """What groups have written of one step; nobody holds a lease."""
    for index, (name, ranks) in enumerate(groups.items()):
        state = made() if groups == GROUPS else None
        Group(at / name, ranks, session=f"{index:012x}", state=state).write(0, **part)


def test_groups_that_share_a_rank_are_not_joined(tmp_path: Path) -> None:
    parts_of(tmp_path, {"part0": (0, 1), "part1": (1, 2)}, step=20)
    assert "a rank is in two of the groups" in refused(tmp_path, groups=["part0", "part1"])


def test_groups_of_other_ranks_than_the_lease_names_are_not_joined(tmp_path: Path) -> None:
    parts_of(tmp_path, {"part0": (0, 2), "part1": (1, 5)}, step=20)
    urls = [str(tmp_path / name) for name in GROUPS]
    take_lease(Access(), str(tmp_path), B, "host", urls, ranks=(0, 1, 2, 3))
    assert "not those of the lease" in refused(tmp_path)


def test_groups_that_nothing_ties_together_are_not_joined(tmp_path: Path) -> None:
    parts_of(tmp_path, GROUPS, step=None)
    urls = [str(tmp_path / name) for name in GROUPS]
    take_lease(Access(), str(tmp_path), B, "host", urls, ranks=(0, 1, 2, 3))
    assert "they record no step" in refused(tmp_path)


def test_of_two_sessions_that_nothing_orders_none_is_chosen(tmp_path: Path) -> None:
    for session in (A, B):
        Group(tmp_path, (0, 1), session=session).write(0, step=20)
    assert "several sessions left parts" in refused(tmp_path)


# -- killed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["alone", pytest.param("groups", marks=pytest.mark.long)])
def test_a_commit_killed_at_any_call_makes_nothing_worse_and_a_second_one_finishes(
    tmp_path: Path, how: str
) -> None:
    root = tmp_path / "root"
    if how == "alone":
        group = Group(root, (0, 1), session=A)
        group.save()
        group.write(1)
    else:
        DeadStep(root, "lease")
    before = contents(root)
    outcomes = set()
    for moment in itertools.count():
        place = Path(shutil.copytree(root, tmp_path / f"killed-{moment}"))
        killed = killed_at(moment, lambda at=place: repair_checkpoint(at, threads=1), calls=True)
        assert before.items() <= contents(place).items(), moment
        found = found_at(open_storage(str(place)))
        outcomes.add(None if found is None else found.step)
        if found is not None:  # the older one, or the new one: whole
            assert verify_checkpoint(place).ok, moment
        assert repair_checkpoint(place).whole
        finished = found_at(open_storage(str(place)))
        assert finished is not None and finished.step == (10 if how == "alone" else 20)
        assert verify_checkpoint(place).ok
        assert not [name for name in contents(place) if "fence" in name], moment
        if not killed:
            break
    assert moment > 10
    assert outcomes == ({0, 10} if how == "alone" else {None, 20})


# -- a session that lives --------------------------------------------------------------------------


def test_a_session_that_lives_fails_by_name_and_takes_no_file_back(tmp_path: Path) -> None:
    group, payload = unfinished(tmp_path)
    commit(tmp_path)
    with pytest.raises(StorageError, match="smckpt repair.*may not save here any more"):
        publish_manifest(Access(), **payload)
    assert verify_checkpoint(tmp_path).ok
    before = contents(tmp_path)
    with pytest.raises(StorageError, match="was taken after this session's"):
        publish_manifest(Access(), **group.write(1))
    assert contents(tmp_path) == before


def between(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, act: Callable[[], None]
) -> None:
    """`act`, once, just before the function is called."""
    home = __import__(module, fromlist=[name])
    real, done = getattr(home, name), []

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if not done:
            done.append(True)
            act()
        return real(*arguments, **named)

    monkeypatch.setattr(home, name, wrapped)


@pytest.mark.parametrize("at", ["claim", "_refuse_changed", "create_manifest", "release"])
def test_a_session_that_wakes_up_at_any_moment_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Whoever decides first, what is committed in the end is whole."""
    _, payload = unfinished(tmp_path)
    woke: list[str] = []

    def wake() -> None:
        try:
            publish_manifest(Access(), **payload)
        except CheckpointError as error:
            woke.append(error.message)

    between(monkeypatch, "smckpt.checkpoint.upkeep.repair", at, wake)
    try:
        commit(tmp_path)
        committed = True
    except StorageError:
        committed = False
    assert len(woke) == 1, "the session was fenced"
    assert committed == (at != "claim")
    if committed:
        assert "smckpt repair" in woke[0]
        assert verify_checkpoint(tmp_path).ok
    else:  # it took its files back first
        assert not list(tmp_path.glob("data-*")) and not list(tmp_path.glob("manifest-*"))


def test_a_session_that_commits_while_the_bytes_are_read_is_not_overtaken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, payload = unfinished(tmp_path)
    between(
        monkeypatch, "smckpt.checkpoint.upkeep.repair", "commit_unfinished",
        lambda: publish_manifest(Access(), **payload),
    )  # fmt: skip
    with pytest.raises(StorageError, match="a job writes here"):
        repair_checkpoint(tmp_path)
    assert verify_checkpoint(tmp_path).ok
    assert len(list(tmp_path.glob("manifest-*"))) == 1


@pytest.mark.parametrize("at", ["claim", "gathered_manifest"])
def test_a_run_that_takes_a_lease_meanwhile_ends_the_repair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    unfinished(tmp_path)
    before = contents(tmp_path)
    home = __import__("smckpt.checkpoint.upkeep.repair", fromlist=[at])
    real, calls = getattr(home, at), []

    def late(*arguments: Any, **named: Any) -> Any:
        calls.append(at)
        if at == "claim" or len(calls) == 2:  # the first look at the parts is before our lease
            take_lease(Access(), str(tmp_path), B, "h")
        return real(*arguments, **named)

    monkeypatch.setattr(home, at, late)
    with pytest.raises(StorageError, match="a job writes here|was taken after"):
        repair_checkpoint(tmp_path)
    assert contents(tmp_path) == before


def test_what_a_session_has_committed_it_does_not_take_back(tmp_path: Path) -> None:
    """It asks again, since the answer was lost; meanwhile a later run has come."""
    _, payload = unfinished(tmp_path)
    publish_manifest(Access(), **payload)
    take_lease(Access(), str(tmp_path), B, "h")
    before = contents(tmp_path)
    with pytest.raises(StorageError, match="was taken after"):
        publish_manifest(Access(), **payload)
    assert contents(tmp_path) == before


def test_a_sweep_leaves_what_a_repair_has_claimed(tmp_path: Path) -> None:
    _, payload = unfinished(tmp_path, lease=False)
    later = Group(tmp_path, (0, 1), session=B)
    done = later.save(step=30)  # its lease knows the other session as one without a lease
    assert leases.claim(open_storage(str(tmp_path)), payload["attempt"])
    before = contents(tmp_path)
    sweep(Access(), str(tmp_path), [done["manifest"]], later.lease())
    assert contents(tmp_path) == before
    leases.release(open_storage(str(tmp_path)), payload["attempt"])
    sweep(Access(), str(tmp_path), [done["manifest"]], later.lease())
    assert not list(tmp_path.glob(f"data-{A}-*"))


def test_a_lower_number_of_the_session_that_has_committed_is_over(tmp_path: Path) -> None:
    group, _ = unfinished(tmp_path)
    next(group.numbers)
    group.save()
    report = repair_checkpoint(tmp_path)
    assert report.whole and not report.commits


def test_what_another_run_gave_up_is_left_to_it(tmp_path: Path) -> None:
    group, _ = unfinished(tmp_path)
    leases.raise_fence(open_storage(str(tmp_path)), f"{group.session}-00000000")
    with pytest.raises(StorageError, match="gave up"):
        repair_checkpoint(tmp_path)
    assert fence_name(f"{group.session}-00000000") in contents(tmp_path)


def test_a_damaged_manifest_is_made_again_of_its_parts(tmp_path: Path) -> None:
    Group(tmp_path, (0, 1), session=A).save(step=20)
    manifest = next(tmp_path.glob("manifest-*"))
    synthetic.flip(manifest, 300)
    with pytest.raises(CorruptCheckpointError):
        found_at(open_storage(str(tmp_path)))
    commit(tmp_path)
    assert verify_checkpoint(tmp_path).ok
    assert found_at(open_storage(str(tmp_path))).step == 20  # type: ignore[union-attr]


# -- forged ----------------------------------------------------------------------------------------


def reforged(at: Path, change: forge.Change, rank: int = 1) -> None:
    forge.reforge(next(at.glob(f"part-*-r{rank:05d}.json")), change)


def renamed(name: str) -> forge.Change:
    def change(body: dict[str, Any]) -> None:
        sums = name.removesuffix(".safetensors") + ".crc"
        body["files"][0].update(name=name, crc_name=sums)

    return change


OTHER = "data-bbbbbbbbbbbb-00000000-r00001-0.safetensors"
RANK_0 = renamed("data-aaaaaaaaaaaa-00000000-r00000-0.safetensors")
FORGED: dict[str, forge.Change] = {
    "a path outside": renamed("../../etc/passwd"),
    "an absolute path": renamed("/etc/passwd"),
    "a file of another rank": RANK_0,
    "a file of another session": renamed(OTHER),
    "another size": lambda body: body["files"][0].update(size=1),
    "a huge size": lambda body: body["files"][0].update(size=1 << 60),
    "another checksum": lambda body: body["files"][0].update(crc64="0" * 16),
    "another rank": lambda body: body.update(rank=0),
    "the part of another rank": lambda body: (body.update(rank=0), RANK_0(body)),
    "a rank that is not in its group": lambda body: body.update(group_ranks=[0, 7]),
    "a larger group": lambda body: body.update(group_ranks=[0, 1, 2]),
    "another step": lambda body: body.update(step=99),
    "another kind": lambda body: body.update(kind="FULL"),
    "another session": lambda body: body.update(session=B, attempt=f"{B}-00000000"),
    "a table that is none": lambda body: body.update(layout={"rows": 5}),
    "no files": lambda body: body.update(files=[]),
    "rows of other shapes": lambda body: body["layout"]["rows"][0]["geometry"].update(shape=[9, 9]),
    "values that are none": lambda body: body["objects"].update(
        x={"path": ["x"], "value": {"~": 1}}
    ),
}  # fmt: skip


# What the first of several guards says: those behind it would refuse these too, for other reasons.
SAID = {
    "a file of another rank": "is not file 0",
    "a file of another session": "is not file 0",
    "another rank": "is not file 0 of rank 0",
    "another session": "is not file 0",
    "the part of another rank": "rank is '0' here",
    "a rank that is not in its group": "rank 1 is not in its group",
}


@pytest.mark.parametrize("what", FORGED)
def test_forged_parts_are_refused_and_nothing_is_written(tmp_path: Path, what: str) -> None:
    unfinished(tmp_path)
    reforged(tmp_path, FORGED[what])
    said = refused(tmp_path)
    assert said and SAID.get(what, "") in said
    assert not list(tmp_path.glob("manifest-*"))


def test_a_lease_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    outside = tmp_path / "outside"
    unfinished(outside)
    unfinished(root / "part0")
    body = {
        "format": [1, 1], "epoch": 1, "session": B, "host": "h", "claimed_at": 1,
        "groups": ["part0", "../outside"], "before": [], "ranks": [0, 1],
    }  # fmt: skip
    (root / "epoch-000001.json").write_bytes(seal_json(body))
    before = contents(tmp_path)
    with pytest.raises(UsageError, match="leads out of the directory"):
        repair_checkpoint(root)
    with pytest.raises(UsageError, match="leads out of the directory"):
        repair_checkpoint(root, groups=["../outside", "part0"])
    assert contents(tmp_path) == before
