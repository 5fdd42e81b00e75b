"""Where ranks' files lie when one prefix of a bucket does not answer enough requests."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from smckpt import ExportOptions, export_hf
from smckpt.checkpoint.commits.choose import choose_commit
from smckpt.checkpoint.commits.contents import contents_of
from smckpt.checkpoint.commits.discover import find_checkpoints
from smckpt.checkpoint.commits.remove import remove_newest
from smckpt.checkpoint.commits.sweep import sweep
from smckpt.checkpoint.reading.committed import open_catalogue
from smckpt.checkpoint.records.format import Manifest, data_name, part_name
from smckpt.checkpoint.records.prefixes import is_prefix, spread_of, spread_over
from smckpt.checkpoint.records.sealed import open_json, read_file
from smckpt.checkpoint.upkeep.transfer import copy_checkpoint
from smckpt.checkpoint.upkeep.verify import verify_checkpoint
from smckpt.cli.app import app
from smckpt.decoding import decode
from smckpt.errors import FormatVersionError, UsageError
from smckpt.storage import Access, access_to, open_storage
from smckpt.storage.budget import Spread
from smckpt.storage.s3.config import StoreOptions
from tests.support.faults.copies import contents
from tests.support.saves import Group, hybrid, state_of

A, B = "aaaaaaaaaaaa", "bbbbbbbbbbbb"
FOUR = Spread(1, 4)


def sharded_over(prefixes: int = 8, **options: str) -> StoreOptions:
    return StoreOptions.from_mapping({"prefixes": prefixes, **options})


def group_at(url: str, session: str = A, spread: Spread | None = FOUR, ranks: int = 4) -> Group:
    state = state_of(hybrid(range(ranks), 2 if ranks > 1 else 1))
    return Group(url, range(ranks), session=session, state=state, spread=spread)  # type: ignore[arg-type]


# -- the way ----------------------------------------------------------------------------------


def test_the_prefixes_stand_before_the_step_and_are_the_same_at_each():
    directories = [Spread(1, 8).directories(f"s3://b/run/step-{step}") for step in (100, 200)]
    assert [
        directory.replace("step-100", "step-200") for directory in directories[0]
    ] == directories[1]
    assert directories[0][:3] == [f"s3://b/run/{n}-smckpt/step-100/" for n in ("00", "80", "40")]
    assert len(set(directories[0])) == 8
    assert Spread(1, 16).directories("s3://b/run/step-100")[:8] == directories[0], (
        "more keep the first ones"
    )
    assert (
        Spread(2, 8).directories("s3://b/run/step-1/tp0")[9 % 8]
        == "s3://b/run/80-smckpt/step-1/tp0/"
    )
    assert all(is_prefix(directory.split("/")[4]) for directory in directories[0])


@pytest.mark.parametrize("key", ["a/b//c", "a//", "/a", "..x/y/.", "a/./b"])
def test_keys_stay_what_they_are_byte_for_byte(key):
    assert Spread(1, 2).directories(f"s3://b/top/{key}/step")[0].endswith(f"{key}/00-smckpt/step/")


def test_the_root_is_above_the_step_or_where_the_options_say():
    def root(url: str, groups: int = 1, **options: str) -> str:
        spread = spread_of(open_storage(url, storage=sharded_over(**options)), groups)
        assert spread is not None
        return spread.directories(url)[0]

    assert root("s3://b/run/step-1") == "s3://b/run/00-smckpt/step-1/"
    assert root("s3://b/run/step-1/tp0", 2) == "s3://b/run/00-smckpt/step-1/tp0/"
    assert root("s3://b/step-1", 1) == "s3://b/00-smckpt/step-1/"
    assert root("s3://b/tp0", 2) == "s3://b/00-smckpt/tp0/", "no higher than the bucket"
    assert root("s3://b") == "s3://b/00-smckpt/"
    above = "s3://b/team"
    assert root("s3://b/team/run/s1/tp0", prefix_root=above) == "s3://b/team/00-smckpt/run/s1/tp0/"
    assert root("s3://b/team", prefix_root=above) == "s3://b/team/00-smckpt/"
    for elsewhere in ("s3://b/other/run", "s3://c/team/run", "s3://b/teams/run"):
        with pytest.raises(UsageError, match="is not below prefix_root"):
            root(elsewhere, prefix_root=above)


def test_a_disk_and_a_single_prefix_are_not_sharded():
    access = access_to("s3://b", storage=sharded_over())
    assert spread_of(access.open("/run/step-1")) is None
    assert spread_of(open_storage("s3://b/run/step-1", storage=StoreOptions())) is None
    for options in ({"prefixes": 0}, {"prefixes": 257}, {"prefix_root": "run"}):
        with pytest.raises(UsageError, match="prefix"):
            StoreOptions.from_mapping(options)


@pytest.mark.parametrize(
    "spread",
    [{"up": -1, "prefixes": 2}, {"up": "../..", "prefixes": 2}, {"up": 1, "prefixes": 1},
     {"up": 1, "prefixes": 257}, {"up": True, "prefixes": 2}],
)  # fmt: skip
def test_a_manifest_that_says_anything_but_two_numbers_is_refused(spread):
    with pytest.raises(ValueError, match=r"\$\.(up|prefixes)"):
        decode(Spread, spread)


def test_a_directory_over_prefixes_is_one_store_of_what_belongs_there(s3_root: str) -> None:
    url = f"{s3_root}/run/step-100"
    directory, under = open_storage(url), open_storage(FOUR.directories(url)[1])
    ours, stray, elder = (part_name(f"{A}-00000000", rank) for rank in (1, 2, 3))
    store = spread_over(directory, [FOUR])
    store.put(ours, b"under the prefix of rank 1")
    store.put("notes.txt", b"in the directory")
    under.put(stray, b"where no file of rank 2 is")
    directory.put(elder, b"of a save without prefixes")
    assert store.path_of(ours) == f"{under.url}{ours}"
    assert store.names() == ["notes.txt", ours]
    both = spread_over(directory, [FOUR, None])
    assert [info.name for info in both.list()] == ["notes.txt", ours, elder]
    both.delete_many([ours, elder])
    assert (directory.names(), under.names()) == (["notes.txt"], [stray])


# -- a checkpoint that is sharded --------------------------------------------------------------


@pytest.fixture
def step(s3_root: str) -> str:
    url = f"{s3_root}/run/step-100"
    group_at(url).save()
    return url


def ways(url: str) -> set[str]:
    return set(contents(url))


def test_only_the_manifest_lies_in_the_directory_and_readers_need_no_option(
    step: str, s3_root: str
) -> None:
    names = [info.name for info in open_storage(step).list()]
    assert sorted(name.split("-")[0] for name in names) == ["epoch", "manifest"]
    directories = {way.rpartition("/")[0] for way in ways(s3_root) if "manifest" not in way}
    assert directories == {f"run/{n}-smckpt/step-100" for n in ("00", "80", "40", "c0")}
    assert verify_checkpoint(step).ok
    [found] = find_checkpoints(s3_root)
    assert found.path == step
    [name] = [name for name in names if name.startswith("manifest-")]
    body = open_json(open_storage(step).read(name), name)
    assert body["format"] == [2, 2], "a reader that does not know of this must refuse it"
    assert read_file(Manifest, open_storage(step), name).spread == FOUR


def test_what_is_not_sharded_is_written_as_ever(s3_root: str) -> None:
    group_at(s3_root, spread=None).save()
    manifest = choose_commit(open_storage(s3_root)).manifests[0][1]
    assert manifest.format == (1, 2)
    assert "spread" not in manifest.to_json()


def test_damage_is_named_where_it_lies(step: str) -> None:
    store = open_storage(Spread(1, 4).directories(step)[3])
    [data] = [info for info in store.list("data-") if info.name.endswith("safetensors")]
    body = bytearray(store.read(data.name))
    body[-1] ^= 1
    store.delete(data.name)
    store.put(data.name, bytes(body))
    [problem] = verify_checkpoint(step).problems
    assert problem.path == f"{store.url}{data.name}"


def test_a_copy_to_a_disk_has_all_in_one_directory_and_the_way_back_shards_it(
    step: str, s3_root: str, tmp_path: Path
) -> None:
    here = tmp_path / "deep" / "copy"
    report = copy_checkpoint(step, str(here))
    assert len(os.listdir(here)) == report.files
    assert os.listdir(tmp_path / "deep") == ["copy"]
    assert verify_checkpoint(str(here)).ok
    assert copy_checkpoint(step, str(here)).files_present == report.files
    back = copy_checkpoint(str(here), f"{s3_root}/other/step-7")
    assert back.files == report.files
    assert verify_checkpoint(back.target).ok
    again = copy_checkpoint(step, back.target)
    assert again.files_present == report.files
    places = {way.split("/")[0] for way in ways(f"{s3_root}/other")}
    assert places == {"step-7", *(f"{n}-smckpt" for n in ("00", "80", "40", "c0"))}
    remove_newest(open_storage(back.target))
    assert ways(f"{s3_root}/other") == set()
    remove_newest(open_storage(str(here)))
    assert ways(str(here)) == set()


def test_the_commands_and_an_export_say_of_it_what_they_say_of_a_copy_on_a_disk(
    step: str, tmp_path: Path
) -> None:
    here = str(tmp_path / "copy")
    copy_checkpoint(step, here)

    def said(*arguments: str) -> str:
        done = CliRunner().invoke(app, [*arguments], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    for command in ("show", "verify"):
        there, copied = (json.loads(said(command, "--json", url)) for url in (f"{step}/", here))
        directories = [writer.pop("directory") for writer in there.get("writers", ())]
        if directories:
            assert directories == [f"../{n}-smckpt/step-100" for n in ("00", "80", "40", "c0")]
            assert {writer.pop("directory") for writer in copied["writers"]} == {""}
        url = "path" if command == "show" else "url"
        assert (there.pop(url), copied.pop(url)) == (f"{step}/", here)
        assert there == copied
        said(command, step)
    for url, out in ((step, "there"), (here, "copied")):
        export_hf(
            url, tmp_path / out, options=ExportOptions(allow_nonfinite=True, card=False)
        )  # it names the checkpoint
    assert contents(tmp_path / "there") == contents(tmp_path / "copied") != {}


def test_a_file_system_that_shows_the_bucket_as_it_is_is_read_too(
    step: str, s3_root: str, tmp_path: Path
) -> None:
    for way, data in contents(s3_root).items():
        (tmp_path / way).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / way).write_bytes(data)
    shown = tmp_path / "run" / "step-100"
    assert verify_checkpoint(str(shown)).ok
    assert (
        copy_checkpoint(str(shown), str(tmp_path / "flat")).files
        == contents_of(open_storage(step)).files
    )
    remove_newest(open_storage(str(shown)))
    assert ways(str(tmp_path / "run")) == set()


def test_a_removal_takes_what_is_named_and_nothing_else_under_the_shared_prefixes(
    step: str, s3_root: str
) -> None:
    group_at(f"{s3_root}/run/step-200", B).save()
    stranger = open_storage(Spread(1, 4).directories(step)[0])
    stranger.put("notes.txt", b"not ours")
    stranger.put(data_name(f"{B}-00000007", 0, 0), b"an attempt under way")
    remove_newest(open_storage(step))
    left = {way for way in ways(s3_root) if "step-100" in way}
    assert {way.rpartition("/")[2] for way in left} == {
        "notes.txt", data_name(f"{B}-00000007", 0, 0)
    }  # fmt: skip
    assert verify_checkpoint(f"{s3_root}/run/step-200").ok


def test_a_sweep_finds_what_earlier_saves_left_under_their_prefixes_and_its_own(
    s3_root: str,
) -> None:
    url = f"{s3_root}/run/step-100"
    group_at(f"{s3_root}/other/step-1", "d" * 12, Spread(0, 4)).save()
    copy_checkpoint(f"{s3_root}/other/step-1", url)  # its manifest says how, and no lease
    dead = group_at(url, "cccccccccccc")
    dead.fencing_token = 1
    dead.write(3)  # it took no lease: as this run shards
    elder = group_at(url, A, Spread(2, 4))  # of a run with other options, which says its lease
    elder.lease()
    elder.write(0)
    begun = open_storage(Spread(2, 4).directories(url)[1])
    begun.create_file(data_name(f"{A}-00000001", 5, 0), 200 << 20)  # killed in mid upload
    ours = group_at(url, B)
    ours.save()
    kept = ours.save()
    sweep(Access(), url, [kept["manifest"]], ours.lease())
    assert begun.list_unfinished() == []
    left = {way for way in ways(s3_root) if not way.startswith("other/")}
    assert all(f"{B}-00000001" in way or "manifest" in way for way in left), left
    assert verify_checkpoint(url).ok


def test_an_attempt_that_is_fenced_takes_back_what_it_wrote(s3_root: str) -> None:
    url = f"{s3_root}/run/step-100"
    slow, quick = group_at(url, A), group_at(url, B)
    slow.lease()
    quick.save()
    with pytest.raises(Exception, match="a later run writes here"):
        slow.save()
    assert not any(A in way for way in ways(s3_root))


def test_a_newer_format_than_ours_is_refused_still(step: str) -> None:
    from smckpt.checkpoint.records.sealed import seal_json

    store = open_storage(step)
    [name] = [info.name for info in store.list("manifest-")]
    body = {**open_json(store.read(name), name), "format": [9, 0]}
    store.delete(name)
    store.put(name, seal_json(body))
    with pytest.raises(FormatVersionError, match=r"9\.0"):
        open_catalogue(open_storage(step))
