"""Sweeping: what is superseded goes; what is kept, later, alive or foreign stays."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from smckpt.checkpoint.commits import leases
from smckpt.checkpoint.commits.choose import choose_commit
from smckpt.checkpoint.commits.commit import publish_manifest, publish_record, take_lease
from smckpt.checkpoint.commits.sweep import discard_attempt, sweep, sweep_records
from smckpt.checkpoint.records.format import (
    GroupManifest,
    Manifest,
    fence_name,
    lease_name,
    manifest_name,
    parse_name,
    record_name,
)
from smckpt.checkpoint.records.sealed import read_file
from smckpt.errors import CorruptCheckpointError, StorageError, UsageError
from smckpt.storage import Access, open_storage
from tests.support.saves import Group, hybrid, state_of

A, B, C = "aaaaaaaaaaaa", "bbbbbbbbbbbb", "cccccccccccc"


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def attempts(directory: Path) -> set[tuple[str, int]]:
    """(session, number) of every part and data file."""
    parsed = (parse_name(name) for name in names(directory))
    return {(p.session, p.number) for p in parsed if p and p.kind in ("data", "crc", "part")}


def whole(directory: Path, manifest: str) -> bool:
    """Whether all that a manifest names is there."""
    body = read_file(Manifest, open_storage(str(directory)), manifest)
    here = names(directory)
    return all(
        {part.name, *(n for f in part.files for n in (f.name, f.crc_name))} <= here
        for part in body.parts
    )


def group_of(path: Path, session: str = A) -> Group:
    return Group(path, range(2), session=session, state=state_of(hybrid(range(2), 1)))


def swept(group: Group, published: dict[str, object], **more: object) -> int:
    assert group.fencing_token is not None
    done = sweep(
        Access(), str(group.directory), [published["manifest"]], group.fencing_token, **more
    )  # type: ignore
    return done


def test_an_older_commit_of_the_same_session_goes_with_all_it_names(tmp_path):
    group = group_of(tmp_path)
    group.save()
    old = names(tmp_path)
    newest = group.save()
    kept = (names(tmp_path) - old) | {lease_name(1)}
    assert swept(group, newest) == len(old) - 1
    assert names(tmp_path) == kept and whole(tmp_path, newest["manifest"])
    assert swept(group, newest) == 0


def test_several_commits_are_kept_when_named(tmp_path):
    group = group_of(tmp_path)
    saves = [group.save()["manifest"] for _ in range(4)]
    sweep(Access(), str(tmp_path), [saves[1], saves[3]], 1)
    assert attempts(tmp_path) == {(A, 1), (A, 3)}
    assert whole(tmp_path, saves[1]) and whole(tmp_path, saves[3])


def test_leftovers_of_a_save_that_failed_go_with_the_next_commit(tmp_path):
    group = group_of(tmp_path)
    group.lease()
    group.write(next(group.numbers))
    swept(group, group.save())
    assert attempts(tmp_path) == {(A, 1)}


def test_what_a_dead_session_left_goes_and_its_lease(tmp_path):
    dead = group_of(tmp_path, A)
    dead.save()
    dead.write(1)
    group = group_of(tmp_path, B)
    swept(group, group.save())
    assert attempts(tmp_path) == {(B, 0)}
    assert {n for n in names(tmp_path) if n.startswith("epoch")} == {lease_name(2)}


def test_what_is_being_written_next_is_never_touched(tmp_path):
    group = group_of(tmp_path)
    published = group.save()
    group.write(1)
    group.write(2)
    before = names(tmp_path)
    assert swept(group, published) == 0
    assert names(tmp_path) == before


def test_a_zombie_s_sweep_deletes_nothing_once_a_later_run_took_a_lease(tmp_path):
    zombie = group_of(tmp_path, A)
    zombie.save()
    published = zombie.save()
    group_of(tmp_path, B).lease()
    assert swept(zombie, published) == 0
    assert attempts(tmp_path) == {(A, 0), (A, 1)}


def test_a_session_that_came_after_us_and_has_taken_no_lease_yet_is_left_alone(tmp_path):
    zombie = group_of(tmp_path, A)
    zombie.lease()
    new = group_of(tmp_path, B)
    payload = new.write(next(new.numbers))
    swept(zombie, zombie.save())
    assert (B, 0) in attempts(tmp_path)
    payload["fencing_token"] = new.lease()
    assert whole(tmp_path, publish_manifest(Access(), **payload)["manifest"])


def test_a_session_that_died_before_it_took_a_lease_is_found_by_the_next(tmp_path):
    group_of(tmp_path, A).write(0)
    group = group_of(tmp_path, B)
    swept(group, group.save())
    assert attempts(tmp_path) == {(B, 0)}
    assert not any(name.startswith("fence") for name in names(tmp_path))


def test_one_that_wakes_up_while_it_is_given_up_keeps_its_files(tmp_path, monkeypatch):
    """It takes a lease between our look at them and our fence: we see it at the second look."""
    sleeper = group_of(tmp_path, A)
    payload = sleeper.write(0)
    group = group_of(tmp_path, B)
    published = group.save()
    real = leases.raise_fence

    def wake(storage: object, attempt: str) -> None:
        payload["fencing_token"] = sleeper.lease()
        real(storage, attempt)  # type: ignore[arg-type]

    monkeypatch.setattr("smckpt.checkpoint.commits.sweep.raise_fence", wake)
    swept(group, published)
    assert (A, 0) in attempts(tmp_path)
    assert fence_name(payload["attempt"]) not in names(tmp_path)
    assert whole(tmp_path, publish_manifest(Access(), **payload)["manifest"])


def test_one_that_wakes_up_after_it_was_given_up_is_refused(tmp_path):
    sleeper = group_of(tmp_path, A)
    payload = sleeper.write(0)
    group = group_of(tmp_path, B)
    swept(group, group.save())
    payload["fencing_token"] = sleeper.lease()
    with pytest.raises(StorageError, match="not shared|gone|gave up"):
        publish_manifest(Access(), **payload)
    again = sleeper.write(1)
    assert whole(tmp_path, publish_manifest(Access(), **again)["manifest"])


def test_a_fence_without_files_is_cleaned_up(tmp_path):
    (tmp_path / fence_name(f"{C}-00000003")).write_bytes(b"{}")
    group = group_of(tmp_path)
    swept(group, group.save())
    assert not list(tmp_path.glob("fence-*"))


def test_foreign_files_and_directories_are_never_touched(tmp_path):
    group = group_of(tmp_path)
    group.save()
    foreign = ["model.safetensors", "data-x.safetensors", "manifest.json", ".hidden", "part-1.json"]
    for name in [*foreign, f"manifest-000001-00000000-{A}.json.bak"]:
        (tmp_path / name).write_text("mine")
    (tmp_path / f"data-{A}-00000000-r00007-0.safetensors.d").mkdir()
    left = {*foreign, f"manifest-000001-00000000-{A}.json.bak"}
    swept(group, group.save())
    assert left | {f"data-{A}-00000000-r00007-0.safetensors.d"} <= names(tmp_path)


def test_temporaries_of_cut_short_creations_go_with_their_session(tmp_path):
    dead = group_of(tmp_path, A)
    dead.save()
    old = f".{manifest_name(1, 1, A)}.0123456789abcdef.tmp"
    live = f".{manifest_name(2, 5, B)}.0123456789abcdef.tmp"
    for name in (old, live):
        (tmp_path / name).write_bytes(b"half")
    group = group_of(tmp_path, B)
    swept(group, group.save())
    assert old not in names(tmp_path) and live in names(tmp_path)


def test_probes_go_once_their_session_has_committed(tmp_path):
    leases.probe(Access(), str(tmp_path), A, True)
    group = group_of(tmp_path)
    manifest = group.save()
    leases.probe(Access(), str(tmp_path), C, True)  # it began after our lease
    swept(group, manifest)
    assert f"probe-{A}.json" not in names(tmp_path) and f"probe-{C}.json" in names(tmp_path)


def test_a_job_whose_probe_another_job_swept_away_hears_of_that_job(tmp_path):
    probe = partial(leases.probe, Access(), str(tmp_path))
    rival = group_of(tmp_path, B)
    swept(rival, rival.save())
    assert probe(C, False) == {"seen": False}  # nobody has written it: a host of its own
    probe(A, True)
    later = group_of(tmp_path, C)
    manifest = later.save()
    assert probe(A, False) == {"seen": True}
    swept(later, manifest)
    with pytest.raises(StorageError, match=rf"session {C} .* another job saves here") as caught:
        probe(A, False)
    assert str(caught.value.path) == str(tmp_path / lease_name(2))


@pytest.mark.parametrize(
    "victim", ["part-*r00001*", "*r00001-0.safetensors", "manifest-*-00000001-*"]
)
def test_nothing_is_deleted_when_the_newest_is_not_whole(tmp_path, victim):
    group = group_of(tmp_path)
    group.save()
    old = names(tmp_path)
    newest = group.save()
    (path,) = (p for p in tmp_path.glob(victim) if p.name not in old)
    if path.name.startswith("manifest"):
        path.write_bytes(path.read_bytes().replace(b'"LOCAL"', b'"FULL!"'))
    elif path.suffix == ".safetensors":
        os.truncate(path, path.stat().st_size - 1)
    else:
        path.unlink()
    with pytest.raises(CorruptCheckpointError):
        swept(group, newest)
    assert old <= names(tmp_path)


@pytest.mark.parametrize("gone", ["before", "beside the sweep", "with its directory"])
def test_a_checkpoint_that_a_rotation_removes_is_no_failure(tmp_path, monkeypatch, gone):
    """The save's own sweep runs after its commit, and may meet the removal of that commit."""
    group = group_of(tmp_path / "run")
    group.save()
    newest = group.save()
    first = Path(group.directory) / newest["manifest"]
    if gone == "beside the sweep":
        store = type(open_storage(str(group.directory)))
        listed = store.list

        def list_late(self, prefix=""):
            found = listed(self, prefix)
            if prefix == "" and first.exists():
                first.unlink()
                return [info for info in found if not info.name.startswith("part-")]
            return found

        monkeypatch.setattr(store, "list", list_late)
    elif gone == "before":
        first.unlink()
    else:
        shutil.rmtree(group.directory)
    assert swept(group, newest) == 0


def test_nothing_is_deleted_for_a_manifest_whose_step_was_not_committed(tmp_path):
    group = group_of(tmp_path / "tp0")
    group.fencing_token = take_lease(Access(), str(tmp_path), B, "h")["fencing_token"]
    group.save()
    published = group.save(record=f"../{record_name(1, 1, B)}")
    before = names(tmp_path / "tp0")
    with pytest.raises(CorruptCheckpointError, match="does not exist"):
        swept(group, published)
    assert names(tmp_path / "tp0") == before


def test_a_sweep_without_anything_to_keep_is_refused(tmp_path):
    with pytest.raises(UsageError, match="keep"):
        sweep(Access(), str(tmp_path), [], 1)


def test_what_names_others_is_deleted_before_what_it_names(tmp_path, monkeypatch):
    group = group_of(tmp_path)
    for _ in range(2):
        group.save()
    newest = group.save()
    order: list[str] = []
    storage = open_storage(str(tmp_path))
    real = type(storage).delete

    def delete(self: object, name: str) -> None:
        order.append(parse_name(name).kind)  # type: ignore[union-attr]
        real(self, name)  # type: ignore[arg-type]

    monkeypatch.setattr(type(storage), "delete", delete)
    swept(group, newest)
    assert [kind for kind, _ in itertools.groupby(order)] == ["manifest", "part", "data", "crc"]


def test_a_crash_in_the_middle_of_a_sweep_leaves_no_broken_commit(tmp_path, monkeypatch):
    group = group_of(tmp_path)
    group.save()
    newest = group.save()
    storage = open_storage(str(tmp_path))
    real = type(storage).delete
    for survive in range(7):
        count = itertools.count()

        def delete(self: object, name: str, count=count, survive=survive) -> None:
            if next(count) >= survive:
                raise StorageError("killed here")
            real(self, name)  # type: ignore[arg-type]

        monkeypatch.setattr(type(storage), "delete", delete)
        with contextlib.suppress(StorageError):
            swept(group, newest)
        manifests = [name for name in names(tmp_path) if name.startswith("manifest")]
        assert newest["manifest"] in manifests
        assert all(whole(tmp_path, name) for name in manifests)
    monkeypatch.undo()
    swept(group, newest)
    assert attempts(tmp_path) == {(A, 1)}


def test_discarding_takes_one_attempt_and_nothing_else(tmp_path):
    group = group_of(tmp_path)
    group.save()
    before = names(tmp_path)
    group.write(1)
    assert discard_attempt(open_storage(str(tmp_path)), f"{A}-00000001") == 6
    assert names(tmp_path) == before


# -- several groups ----------------------------------------------------------------------------


def step(
    root: Path, groups: list[Group], session: str, fencing_token: int, number: int
) -> dict[str, object]:
    named = []
    for group in groups:
        group.fencing_token = fencing_token
        done = group.save(record=f"../{record_name(fencing_token, number, session)}")
        named.append(
            GroupManifest(group.directory.name, done["manifest"], done["crc64"], group.ranks[0])
        )
    record = publish_record(Access(), str(root), session, number, fencing_token, named)
    return {"record": record, "manifests": [group.manifest for group in named]}


def pair(root: Path, names: tuple[str, str], sessions: str) -> list[Group]:
    return [
        Group(root / name, (2 * i, 2 * i + 1), session=f"{sessions * 11}{i}")
        for i, name in enumerate(names)
    ]


def test_the_lead_s_sweep_takes_records_first_and_leaves_other_jobs_records(tmp_path):
    ours, theirs = pair(tmp_path, ("a0", "a1"), "a"), pair(tmp_path, ("b0", "b1"), "b")
    mine = take_lease(Access(), str(tmp_path), A, "h", [str(g.directory) for g in ours])[
        "fencing_token"
    ]
    other = take_lease(Access(), str(tmp_path), B, "h", [str(g.directory) for g in theirs])[
        "fencing_token"
    ]
    foreign = step(tmp_path, theirs, B, other, 0)
    old = step(tmp_path, ours, A, mine, 0)
    new = step(tmp_path, ours, A, mine, 1)
    for index, group in enumerate(ours):
        lead = {"record_directory": str(tmp_path), "keep_records": [new["record"]]}
        sweep(
            Access(),
            str(group.directory),
            [new["manifests"][index]],
            mine,
            **lead if index == 0 else {},
        )
    here = names(tmp_path)
    assert {new["record"], foreign["record"]} <= here and old["record"] not in here
    assert {lease_name(mine), lease_name(other)} <= here
    for index, group in enumerate(ours):
        assert whole(group.directory, new["manifests"][index])
        assert {number for _, number in attempts(group.directory)} == {1}
    assert whole(tmp_path / "b0", foreign["manifests"][0])


def test_a_later_run_s_lead_takes_the_leases_and_records_of_the_earlier(tmp_path):
    first, second = pair(tmp_path, ("a0", "a1"), "a"), pair(tmp_path, ("a0", "a1"), "b")
    urls = [str(g.directory) for g in first]
    e1 = take_lease(Access(), str(tmp_path), A, "h", urls)["fencing_token"]
    old = step(tmp_path, first, A, e1, 4)
    e2 = take_lease(Access(), str(tmp_path), B, "h", urls)["fencing_token"]
    new = step(tmp_path, second, B, e2, 0)
    assert sweep_records(Access(), str(tmp_path), [new["record"]], e2) == 2
    assert old["record"] not in names(tmp_path)
    assert lease_name(e1) not in names(tmp_path)


def test_records_of_steps_in_other_directories_stay(tmp_path):
    """One parent, a directory for each step: root/tp0-10, root/tp0-20."""
    e = take_lease(Access(), str(tmp_path), A, "h")["fencing_token"]
    ten = step(tmp_path, pair(tmp_path, ("tp0-10", "tp1-10"), "a"), A, e, 0)
    twenty = step(tmp_path, pair(tmp_path, ("tp0-20", "tp1-20"), "a"), A, e, 1)
    assert sweep_records(Access(), str(tmp_path), [twenty["record"]], e) == 0
    assert {ten["record"], twenty["record"]} <= names(tmp_path)


def test_a_step_of_several_groups_goes_as_a_whole_when_one_of_them_saves_alone(tmp_path):
    run = tmp_path / "run"
    groups, others = pair(run, ("g0", "g1"), "a"), pair(run, ("h0", "h1"), "c")
    mine = take_lease(Access(), str(run), A, "h", [str(g.directory) for g in groups])[
        "fencing_token"
    ]
    old = step(run, groups, A, mine, 0)
    theirs = take_lease(Access(), str(run), C, "h", [str(g.directory) for g in others])[
        "fencing_token"
    ]
    foreign = step(run, others, C, theirs, 0)
    alone = Group(groups[0].directory, (0, 1), session=B)
    new = alone.save()
    swept(alone, new)
    assert old["record"] not in names(run)
    assert choose_commit(open_storage(str(run))).identity == foreign["record"]
    assert whole(groups[0].directory, new["manifest"])


def test_a_damaged_record_to_keep_stops_the_sweep(tmp_path):
    groups = pair(tmp_path, ("a0", "a1"), "a")
    e = take_lease(Access(), str(tmp_path), A, "h")["fencing_token"]
    step(tmp_path, groups, A, e, 0)
    new = step(tmp_path, groups, A, e, 1)
    path = tmp_path / str(new["record"])
    path.write_bytes(path.read_bytes()[:-9])
    before = names(tmp_path)
    with pytest.raises(CorruptCheckpointError):
        sweep_records(Access(), str(tmp_path), [new["record"]], e)  # type: ignore[list-item]
    assert names(tmp_path) == before


def test_a_newer_job_s_lead_leaves_the_lease_of_an_older_job_beside_it(tmp_path):
    ours, theirs = pair(tmp_path, ("a0", "a1"), "a"), pair(tmp_path, ("b0", "b1"), "b")
    older = take_lease(Access(), str(tmp_path), A, "h", [str(g.directory) for g in ours])[
        "fencing_token"
    ]
    newer = take_lease(Access(), str(tmp_path), B, "h", [str(g.directory) for g in theirs])[
        "fencing_token"
    ]
    done = step(tmp_path, theirs, B, newer, 0)
    assert sweep_records(Access(), str(tmp_path), [done["record"]], newer) == 0  # type: ignore
    assert {lease_name(older), lease_name(newer)} <= names(tmp_path)


def test_a_probe_of_a_save_that_was_killed_before_its_lease_goes_with_the_next_commit(
    tmp_path: Path,
) -> None:
    import smckpt

    def left(session: str) -> Path:
        path = tmp_path / f"probe-{session}.json"
        path.write_bytes(b"{}")
        return path

    dead = left("00112233aabb")
    smckpt.save({"n": 1}, checkpoint_id=tmp_path)
    later = left("99112233aabb")  # of a session that began after our lease
    smckpt.save({"n": 2}, checkpoint_id=tmp_path)  # after the sweep of the save before it
    smckpt.save({"n": 3}, checkpoint_id=tmp_path)
    assert not dead.exists() and later.exists()
