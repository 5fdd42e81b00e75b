"""Publishing: a manifest or record stands only when all that it names stands with it."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from smckpt.checkpoint.commits import leases
from smckpt.checkpoint.commits.commit import (
    probe,
    publish_manifest,
    publish_record,
    sweep,
    take_lease,
)
from smckpt.checkpoint.reading.committed import open_catalogue
from smckpt.checkpoint.records.crc import crc64, hex64
from smckpt.checkpoint.records.format import (
    GroupManifest,
    Manifest,
    Record,
    fence_name,
    lease_name,
    manifest_name,
    record_name,
)
from smckpt.checkpoint.records.rows import decode_rows
from smckpt.checkpoint.records.sealed import open_json, read_file, seal_json
from smckpt.errors import (
    CorruptCheckpointError,
    StateError,
    StorageError,
    UsageError,
)
from smckpt.layout.entries import Entry
from smckpt.layout.geometry import PerRankGeometry
from smckpt.storage import Access, open_storage
from tests.support.saves import Group, State, hybrid, state_of

A, B = "aaaaaaaaaaaa", "bbbbbbbbbbbb"


def manifest_at(directory: Path, published: dict[str, Any]) -> Manifest:
    return read_file(
        Manifest, open_storage(str(directory)), published["manifest"], published["crc64"]
    )


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


# -- manifests ---------------------------------------------------------------------------------


def test_a_manifest_names_every_part_and_file_with_its_size_and_checksum(tmp_path):
    group = Group(tmp_path, range(4), state=state_of(hybrid(range(4), 2)))
    published = group.save(metadata={"loss": 0.5}, topology={"world_size": 4})
    manifest = manifest_at(tmp_path, published)
    assert manifest.kind == "LOCAL" and manifest.step == 0 and manifest.record is None
    assert manifest.metadata == {"loss": 0.5} and manifest.topology == {"world_size": 4}
    assert manifest.group_ranks == (0, 1, 2, 3) == tuple(p.rank for p in manifest.parts)
    total = 0
    for part in manifest.parts:
        data = (tmp_path / part.name).read_bytes()
        assert part.crc64 == hex64(crc64(data)) and part.host == "host"
        for file in part.files:
            data = (tmp_path / file.name).read_bytes()
            assert (file.size, file.crc64) == (len(data), hex64(crc64(data)))
            total += len(data)
    assert published["bytes"] == total and len(manifest.layout["rows"]) == 4
    rows = decode_rows(manifest.layout, manifest.group_ranks)
    assert [row.ranks for row in rows] == [(0, 1, 2, 3)] * 4


def test_the_manifest_of_64_ranks_has_the_rows_of_one(tmp_path):
    sizes = {}
    for count in (1, 64):
        group = Group(
            tmp_path / str(count),
            range(count),
            state=state_of(hybrid(range(count), 1), rows=64, tensors=40),
        )
        published = group.save()
        manifest = manifest_at(group.directory, published)
        sizes[count] = len(manifest.layout["rows"])
        assert "objects" not in (group.directory / published["manifest"]).read_text()
        assert len(manifest.parts) == count
    assert sizes[1] == sizes[64] == 42


def test_a_rank_that_holds_nothing_has_a_part_without_files(tmp_path):
    whole = state_of(hybrid([0], 1))
    state: State = lambda rank: whole(rank) if rank == 0 else ([], {})  # noqa: E731
    manifest = manifest_at(tmp_path, Group(tmp_path, [0, 1], state=state).save())
    assert [len(part.files) for part in manifest.parts] == [1, 0]
    assert {row.ranks for row in decode_rows(manifest.layout, [0, 1])} == {(0,)}


def test_a_part_that_is_not_seen_here_says_which_hosts_do_not_share_the_directory(tmp_path):
    group = Group(tmp_path, range(3))
    group.lease()
    payload = group.write(0)
    for rank in (1, 2):
        payload["parts"][str(rank)]["host"] = f"node{rank}"
        (tmp_path / payload["parts"][str(rank)]["part"]).unlink()
    with pytest.raises(StorageError, match=r"not shared.*node1, node2.*ranks 1, 2") as caught:
        publish_manifest(Access(), **payload)
    assert socket.gethostname() in str(caught.value) and "mount" in caught.value.remedy
    assert not any(name.startswith("manifest") for name in names(tmp_path))


def test_a_file_that_is_gone_on_this_very_host_is_no_question_of_sharing(tmp_path):
    group = Group(tmp_path, range(2), host=socket.gethostname())
    group.lease()
    payload = group.write(0)
    (tmp_path / "data-0123456789ab-00000000-r00001-0.crc").unlink()
    with pytest.raises(StorageError, match=r"r00001-0.crc.*is missing"):
        publish_manifest(Access(), **payload)


@pytest.mark.parametrize("suffix", ["safetensors", "crc"])
def test_a_file_of_another_size_is_not_committed(tmp_path, suffix):
    group = Group(tmp_path, range(2))
    group.lease()
    payload = group.write(0)
    victim = tmp_path / f"data-0123456789ab-00000000-r00001-0.{suffix}"
    os.truncate(victim, victim.stat().st_size - 1)
    with pytest.raises(StorageError, match="were written") as caught:
        publish_manifest(Access(), **payload)
    assert caught.value.path == str(victim) and caught.value.rank == 1


def test_a_part_that_reads_back_otherwise_is_not_committed(tmp_path):
    group = Group(tmp_path, range(2))
    group.lease()
    payload = group.write(0)
    victim = tmp_path / payload["parts"]["1"]["part"]
    data = bytearray(victim.read_bytes())
    data[-20] ^= 1
    victim.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="other bytes") as caught:
        publish_manifest(Access(), **payload)
    assert caught.value.path == str(victim)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("kind", ("LOCAL", "SHARDED")),
        ("step", (10, 11)),
        ("step", (None, 0)),
        ("checkpoint_id", ("/a", "/b")),
        ("group_ranks", ([0, 1], [0, 1, 2])),
    ],
)
def test_ranks_that_asked_for_different_things_are_told_apart(tmp_path, key, values):
    group = Group(tmp_path, range(2))
    group.lease()
    payload = group.write(0, **{key: values[0]})
    done = None
    for path in tmp_path.glob("*-r00001*"):
        path.unlink()
    done = group.write_rank(1, 0, **{key: values[1]})
    payload["parts"]["1"]["crc64"] = done.crc64
    with pytest.raises(UsageError, match=key) as caught:
        publish_manifest(Access(), **payload)
    assert "rank 1" in str(caught.value) and "rank 0" in str(caught.value)


def test_a_part_of_another_attempt_is_refused(tmp_path):
    group = Group(tmp_path, range(2))
    group.lease()
    stale, payload = group.write(0), group.write(1)
    payload["parts"]["1"] = stale["parts"]["1"]
    with pytest.raises(StateError, match="different saves"):
        publish_manifest(Access(), **{**payload})
    swapped = group.write(2)
    swapped["parts"]["0"], swapped["parts"]["1"] = swapped["parts"]["1"], swapped["parts"]["0"]
    with pytest.raises(StateError, match="the part of rank 0 says rank 1"):
        publish_manifest(Access(), **swapped)


def test_a_rank_that_did_not_write_is_named(tmp_path):
    group = Group(tmp_path, range(3))
    group.lease()
    payload = group.write(0)
    del payload["parts"]["1"]
    with pytest.raises(StateError, match=r"ranks \[0, 2\] wrote, but the group is \[0, 1, 2\]"):
        publish_manifest(Access(), **payload)


def test_replicas_that_differ_are_refused_naming_ranks_and_tensor(tmp_path):
    mesh = hybrid(range(4), 2)
    usual = state_of(mesh)

    def state(rank: int) -> tuple[list[Entry], dict[str, bytes]]:
        entries, data = usual(rank)
        if rank == 3:  # it shares shard 1 with rank 1, and lacks a tensor of it
            entries = [e for e in entries if e.key != "model.layers.1.weight"]
        return entries, data

    group = Group(tmp_path, range(4), state=state)
    with pytest.raises(StateError, match=r"ranks 1, 3 share") as caught:
        group.save()
    said = str(caught.value)
    assert "rank 3 holds other tensors than rank 1: model.layers.1.weight" in said
    assert "init_optim_state" in caught.value.remedy


def test_a_replica_whose_tensor_is_kept_instead_is_refused(tmp_path):
    usual = state_of(hybrid(range(2), 2))

    def state(rank: int) -> tuple[list[Entry], dict[str, bytes]]:
        entries, data = usual(rank)
        if rank == 1:
            kept = PerRankGeometry(("bias",), (7,), (rank,))
            entries = [replace(e, geometry=kept) if e.key == "model.bias" else e for e in entries]
        return entries, data

    with pytest.raises(StateError, match=r"model\.bias"):
        Group(tmp_path, range(2), state=state).save()


def test_the_same_publication_again_is_a_success(tmp_path):
    """The answer of the first was lost, and the engine asks again."""
    group = Group(tmp_path, range(2))
    group.lease()
    payload = group.write(0)
    first = publish_manifest(Access(), **payload)
    assert publish_manifest(Access(), **payload) == first


def test_a_manifest_of_another_writer_is_never_replaced(tmp_path):
    group = Group(tmp_path, range(2))
    group.lease()
    payload = group.write(0)
    other = seal_json({"format": [1, 0], "committed_at": 1})
    name = tmp_path / manifest_name(1, 0, group.session)
    name.write_bytes(other)
    with pytest.raises(StorageError, match="another writer"):
        publish_manifest(Access(), **payload)
    assert name.read_bytes() == other


def test_optimizers_of_ranks_that_have_different_ones_are_all_kept(tmp_path):
    group = Group(tmp_path, [0, 1])
    group.lease()
    payload = group.write(0, optimizers={"a": {"form": "id", "ids": []}})
    for path in tmp_path.glob("*-r00001*"):
        path.unlink()
    done = group.write_rank(
        1, 0, optimizers={"b": {"form": "fqn", "ids": []}, "a": {"form": "fqn", "ids": []}}
    )
    payload["parts"]["1"]["crc64"] = done.crc64
    manifest = manifest_at(tmp_path, publish_manifest(Access(), **payload))
    assert manifest.optimizers == {
        "a": {"form": "id", "ids": []},
        "b": {"form": "fqn", "ids": []},
    }


# -- leases ------------------------------------------------------------------------------------


def test_fencing_tokens_count_up_over_leases_manifests_and_records(tmp_path):
    assert take_lease(Access(), str(tmp_path / "new"), A, "h") == {"fencing_token": 1}
    assert take_lease(Access(), str(tmp_path / "new"), B, "h") == {"fencing_token": 2}
    for name in (manifest_name(7, 0, A), record_name(9, 0, A)):
        (tmp_path / name).write_bytes(b"x")
    assert take_lease(Access(), str(tmp_path), A, "h") == {"fencing_token": 10}


def test_a_fencing_token_of_a_parent_is_above_those_of_its_groups(tmp_path):
    Group(tmp_path / "tp0", [0], fencing_token=41).save()
    told = take_lease(
        Access(),
        str(tmp_path),
        A,
        "h",
        groups=[str(tmp_path / "tp0"), str(tmp_path / "tp1")],
    )
    assert told == {"fencing_token": 42}


def test_of_all_that_take_a_lease_at_once_each_gets_a_token_of_its_own(tmp_path):
    got: list[int] = []
    start = threading.Barrier(8)

    def lease(session: str) -> None:
        start.wait()
        got.append(take_lease(Access(), str(tmp_path), session, "h")["fencing_token"])

    threads = [threading.Thread(target=lease, args=(f"{i:012x}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(1, 9))


def test_a_later_run_fences_a_zombie_which_takes_its_files_back(tmp_path):
    zombie = Group(tmp_path, range(2), session=A)
    zombie.save()
    before = names(tmp_path)
    payload = zombie.write(1)
    take_lease(Access(), str(tmp_path), B, "h")
    with pytest.raises(StorageError, match=r"fencing token 2 was taken.*\(1\).*not committed"):
        publish_manifest(Access(), **payload)
    assert names(tmp_path) == before | {lease_name(2)}


def test_a_zombie_under_which_the_directory_was_made_anew_takes_its_files_back(tmp_path):
    zombie = Group(tmp_path, range(2), session=A)
    zombie.save()
    shutil.rmtree(tmp_path)
    later = Group(tmp_path, range(2), session=B)
    later.save()
    before = names(tmp_path)
    with pytest.raises(
        StorageError, match=rf"session {B} holds the lease with fencing token 1 here"
    ):
        publish_manifest(Access(), **zombie.write(1))
    assert names(tmp_path) == before


def test_a_lease_that_was_removed_is_made_again_and_counts(tmp_path):
    group = Group(tmp_path, range(2), session=A)
    group.save()
    shutil.rmtree(tmp_path)
    publish_manifest(Access(), **group.write(1))
    assert take_lease(Access(), str(tmp_path), B, "h") == {"fencing_token": 2}


def test_a_lease_that_lands_while_the_parts_are_read_still_fences(tmp_path, monkeypatch):
    zombie = Group(tmp_path, range(2), session=A)
    zombie.lease()
    payload = zombie.write(0)
    looks: list[Any] = []
    real = leases.later_run

    def late(*args: Any) -> Any:
        looks.append(real(*args))
        if len(looks) == 1:
            take_lease(Access(), str(tmp_path), B, "h")
        return looks[-1]

    monkeypatch.setattr("smckpt.checkpoint.commits.commit.later_run", late)
    with pytest.raises(StorageError, match="fencing token 2"):
        publish_manifest(Access(), **payload)
    assert looks[0] is None and len(looks) == 2


def test_an_attempt_that_another_run_gave_up_is_not_committed(tmp_path):
    group = Group(tmp_path, range(2))
    group.lease()
    payload = group.write(0)
    leases.raise_fence(open_storage(str(tmp_path)), payload["attempt"])
    with pytest.raises(StorageError, match="gave up"):
        publish_manifest(Access(), **payload)
    assert names(tmp_path) == {lease_name(1), fence_name(payload["attempt"])}


def test_a_probe_is_seen_where_it_was_made_and_nowhere_else(tmp_path):
    here, elsewhere = str(tmp_path / "a"), str(tmp_path / "b")
    assert probe(Access(), here, A, True) == {"seen": True} == probe(Access(), here, A, False)
    assert probe(Access(), elsewhere, A, False) == {"seen": False}
    with pytest.raises(UsageError, match="session"):
        probe(Access(), here, "../x", True)


# -- records -----------------------------------------------------------------------------------


class Step:
    """Groups side by side that commit together."""

    def __init__(self, root: Path, session: str = B, names: tuple[str, ...] = ("tp0", "tp1")):
        self.root, self.session = root, session
        self.groups = [
            Group(root / name, (2 * i, 2 * i + 1), session=f"{session[:11]}{i}")
            for i, name in enumerate(names)
        ]
        urls = [str(group.directory) for group in self.groups]
        self.fencing_token = take_lease(Access(), str(root), session, "h", groups=urls)[
            "fencing_token"
        ]
        self.number = 0

    def publish(self, **part: Any) -> dict[str, Any]:
        """Manifests of all groups; the arguments for `publish_record`."""
        number, self.number = self.number, self.number + 1
        record = f"../{record_name(self.fencing_token, number, self.session)}"
        groups = []
        for group in self.groups:
            group.fencing_token = self.fencing_token
            published = group.save(record=record, **part)
            groups.append(
                GroupManifest(
                    group.directory.name,
                    published["manifest"],
                    published["crc64"],
                    group.ranks[0],
                )
            )
        return {
            "directory": str(self.root),
            "session": self.session,
            "number": number,
            "fencing_token": self.fencing_token,
            "groups": groups,
        }

    def commit(self, **part: Any) -> dict[str, Any]:
        payload = self.publish(**part)
        return {"record": publish_record(Access(), **payload), "groups": payload["groups"]}


def test_a_record_names_the_manifests_of_all_groups(tmp_path):
    step = Step(tmp_path)
    payload = step.publish(step=30)
    published = publish_record(Access(), **payload)
    record = read_file(Record, open_storage(str(tmp_path)), published)
    assert record.groups == tuple(payload["groups"])
    assert (record.step, record.kind, record.fencing_token, record.number) == (30, "LOCAL", 1, 0)
    assert record.nbytes > 0
    assert publish_record(Access(), **payload) == published  # asked again


def test_equal_tables_of_groups_are_decoded_once_and_each_has_rows_of_its_own_ranks(tmp_path):
    mesh = hybrid(range(8), 2)
    step = Step(tmp_path, names=("s0", "s1", "s2", "s3"))
    for shard, group in enumerate(step.groups):
        group.ranks, group.state = (shard, shard + 4), state_of(mesh)
    step.commit(step=30)
    catalogue = open_catalogue(open_storage(str(tmp_path)))
    apart = [
        row
        for manifest in catalogue.manifests
        for row in decode_rows(manifest.layout, manifest.group_ranks)
    ]
    assert list(catalogue.rows) == apart
    weights = [row for row in catalogue.rows if row.key == "model.layers.0.weight"]
    assert [row.ranks for row in weights] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert len({id(row.geometry) for row in weights}) == 1
    steps = [row for row in catalogue.rows if row.key == "optimizer.step"]
    assert [row.geometry.ranks for row in steps] == [row.ranks for row in weights]


def test_a_table_whose_rows_list_ranks_is_that_of_one_group(tmp_path):
    """Two groups have equal rows, which list a rank of the first one: the second is forged."""
    step = Step(tmp_path)
    mesh = hybrid(range(4), 2)
    for group in step.groups:
        group.state = state_of(mesh)
    payload = step.publish(step=30)
    forged = []
    for group, named in zip(step.groups, payload["groups"], strict=True):
        path = group.directory / named.manifest
        body = open_json(path.read_bytes(), str(path))
        rows = [{**row, "ranks": [[0, 1, 1]]} for row in body["layout"]["rows"]]
        path.write_bytes(seal_json({**body, "layout": {**body["layout"], "rows": rows}}))
        forged.append(replace(named, crc64=hex64(crc64(path.read_bytes()))))
    publish_record(Access(), **{**payload, "groups": forged})
    with pytest.raises(CorruptCheckpointError, match="not in the group"):
        open_catalogue(open_storage(str(tmp_path)))


def test_a_table_whose_meshes_lack_the_ranks_of_its_group_is_refused(tmp_path):
    """Equal to that of another group, whose ranks they have: it is not taken from there."""
    step = Step(tmp_path)  # each group's mesh is of its own ranks
    payload = step.publish(step=30)
    paths = [g.directory / n.manifest for g, n in zip(step.groups, payload["groups"], strict=True)]
    first, second = (open_json(path.read_bytes(), str(path)) for path in paths)
    paths[1].write_bytes(seal_json({**second, "layout": first["layout"]}))
    forged = replace(payload["groups"][1], crc64=hex64(crc64(paths[1].read_bytes())))
    publish_record(Access(), **{**payload, "groups": [payload["groups"][0], forged]})
    with pytest.raises(CorruptCheckpointError, match="outside its mesh"):
        open_catalogue(open_storage(str(tmp_path)))


@pytest.mark.parametrize("way", ["tp0", "tp0/deep", "tp0/../tp0"])
def test_groups_in_one_directory_or_one_inside_another_are_refused(tmp_path, way):
    payload = Step(tmp_path).publish()
    payload["groups"][1] = replace(payload["groups"][1], directory=way)
    with pytest.raises(UsageError):
        publish_record(Access(), **payload)
    assert not list(tmp_path.glob("record-*"))


def test_directories_whose_names_begin_alike_are_side_by_side(tmp_path):
    assert Step(tmp_path, names=("tp", "tp-1", "tp1")).commit()["record"]


@pytest.mark.parametrize(("key", "value"), [("step", 99), ("kind", "SHARDED")])
def test_groups_of_different_steps_or_kinds_are_refused(tmp_path, key, value):
    step = Step(tmp_path)
    payload = step.publish()
    other = step.groups[1]
    record = f"../{record_name(1, 0, step.session)}"
    for path in other.directory.iterdir():
        path.unlink()
    other.numbers = iter([0])
    published = other.save(record=record, **{key: value})
    payload["groups"][1] = replace(
        payload["groups"][1], manifest=published["manifest"], crc64=published["crc64"]
    )
    with pytest.raises(UsageError, match=key):
        publish_record(Access(), **payload)


def test_groups_without_a_step_that_saved_unequally_often_are_never_mixed(tmp_path):
    step = Step(tmp_path)
    next(step.groups[1].numbers)  # one group missed a save: it is one number ahead
    payload = step.publish(step=None)
    with pytest.raises(StateError, match=r"save 1 of one group .* save 0 of another"):
        publish_record(Access(), **payload)


def test_a_group_whose_manifest_names_another_record_is_refused(tmp_path):
    step = Step(tmp_path)
    payload = step.publish()
    with pytest.raises(StateError, match="does not name the record"):
        publish_record(Access(), **{**payload, "number": 5})


def test_groups_that_share_a_rank_are_refused(tmp_path):
    step = Step(tmp_path)
    step.groups[1].ranks = (1, 2)
    with pytest.raises(StateError, match="rank 1 is in two groups: it wrote to"):
        step.commit()


def test_a_manifest_that_the_lead_does_not_see_says_so(tmp_path):
    step = Step(tmp_path)
    payload = step.publish()
    (tmp_path / "tp1" / payload["groups"][1].manifest).unlink()
    with pytest.raises(StorageError, match="does not see the manifest that rank 2 published"):
        publish_record(Access(), **payload)


def test_a_changed_manifest_is_not_committed(tmp_path):
    step = Step(tmp_path)
    payload = step.publish()
    payload["groups"][1] = replace(payload["groups"][1], crc64="0" * 16)
    with pytest.raises(CorruptCheckpointError, match="checksum differs"):
        publish_record(Access(), **payload)


def test_the_lead_of_an_earlier_run_is_fenced(tmp_path):
    old = Step(tmp_path, session=A)
    payload = old.publish()
    Step(tmp_path, session=B).commit()
    with pytest.raises(StorageError, match="fencing token 2"):
        publish_record(Access(), **payload)
    with pytest.raises(StorageError, match="fencing token 2"):
        old.publish()


def test_two_jobs_may_keep_their_records_in_one_parent(tmp_path):
    one = Step(tmp_path, session=A, names=("run1-tp0", "run1-tp1"))
    two = Step(tmp_path, session=B, names=("run2-tp0", "run2-tp1"))
    for _ in range(2):
        assert one.commit()["record"] and two.commit()["record"]
    single = Group(tmp_path, [9], session="cccccccccccc")
    single.save()
    assert one.commit()["record"] and single.save()["manifest"]


def test_a_group_s_directory_carries_the_lease_of_its_parent(tmp_path):
    step = Step(tmp_path)
    step.publish()
    assert (tmp_path / "tp0" / lease_name(step.fencing_token)).exists()
    stranger = Group(
        tmp_path / "tp0", (0, 1), session="cccccccccccc", fencing_token=step.fencing_token
    )
    with pytest.raises(StorageError, match="holds the lease"):
        stranger.save(record=f"../{record_name(step.fencing_token, 0, step.session)}")


def test_the_functions_that_the_worker_names_are_here():
    from smckpt.checkpoint.commits import commit
    from smckpt.engine.background.commands import commands

    own = {"attach", "detach", "write_part"}
    assert set(commit.__all__) == commands().keys() - own
    assert commit.sweep is sweep
