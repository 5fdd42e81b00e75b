"""Below the directory that the user named, no verb that writes or deletes goes through a link, at
whatever moment somebody puts one there."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from smckpt.errors import CheckpointError, CorruptCheckpointError, UsageError
from smckpt.storage import Access, Storage, access_to, open_storage
from smckpt.storage.disk import directory
from smckpt.storage.disk.directory import Directory
from smckpt.storage.urls import Below
from tests.support.faults.swaps import below, swap, swapped_at, swapping

TEMPORARY = f".file.{'0' * 16}.tmp"


def _written(storage: Storage, name: str, **options: Any) -> None:
    writer = storage.create_file(name, 8192, **options)
    writer.write_at(0, memoryview(bytes(8192)))
    writer.finish()


def _aborted(storage: Storage, *, finished: bool) -> None:
    writer = storage.create_file("new", 8192)
    writer.write_at(0, memoryview(bytes(8192)))
    if finished:
        writer.finish()
    writer.abort()


VERBS: dict[str, Callable[[Storage], Any]] = {
    "put": lambda s: s.put("new", b"x"),
    "put_exclusive": lambda s: s.put_exclusive("new", b"x"),
    "create": lambda s: _written(s, "new"),
    "replace": lambda s: _written(s, "file", replace=True),
    "abort": lambda s: _aborted(s, finished=False),
    "abort_finished": lambda s: _aborted(s, finished=True),
    "delete": lambda s: s.delete("file"),
    "delete_many": lambda s: s.delete_many(["file", "other"]),
    "discard": lambda s: s.discard_unfinished(["file"]),
    "rename": lambda s: s.rename("file", "renamed"),
    "remove_directory": lambda s: s.join("empty").remove_directory(),
    "make": lambda s: s.join("x").join("y").put("new", b"x"),
    "read_strictly": lambda s: _nobody_elses(s.without_links().read("file")),
    "read_from_above": lambda s: _nobody_elses(s.reading_from(_above(s)).read("file", 0, 3)),
    "read_size": lambda s: _nobody_elses(bytes(s.reading_from(_above(s)).size("file"))),
    "read_names": lambda s: _nobody_elses(*s.reading_from(_above(s)).names()),
    "read_list": lambda s: _nobody_elses(*(i.name for i in s.without_links().list())),
}


def _above(storage: Storage) -> str:
    """The directory root, three levels up."""
    return str(Path(storage.url).parents[2])


def _nobody_elses(*read: bytes | str) -> None:
    """Nothing was read of the victim, which holds more bytes and another name."""
    assert not {b"precious", b"pre", bytes(8), "theirs"} & {*read}


class Tree:
    """root/a/b/c, the user named root; the victim has the same names below it."""

    def __init__(self, top: Path) -> None:
        self.root, self.victim = top / "root", top / "victim"
        for depth in (self.root / "a/b/c", self.victim, self.victim / "c", self.victim / "b/c"):
            depth.mkdir(parents=True)
            theirs = depth != self.root / "a/b/c"
            for name in ("file", "other", *(("new", "theirs") if theirs else ())):
                (depth / name).write_bytes(b"precious" if theirs else b"mine")
            (depth / TEMPORARY).write_bytes(b"precious")
            (depth / "empty").mkdir()
        self.before = below(self.victim)

    @property
    def storage(self) -> Storage:
        """As the worker opens it: by its URL, with the access of the call."""
        access = Access.from_json(access_to(str(self.root)).to_json())
        return access.open(str(self.root / "a/b/c"))

    def assert_spared(self) -> None:
        assert below(self.victim) == self.before


@pytest.fixture(params=["openat2", "one by one"])
def tree(tmp_path: Path, request: Any, monkeypatch: pytest.MonkeyPatch) -> Tree:
    if request.param == "one by one":
        monkeypatch.setattr(directory, "open_beneath", lambda *_: None)
    return Tree(tmp_path)


@pytest.mark.parametrize("component", ["a", "a/b", "a/b/c"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_link_at_any_name_below_is_refused(tree: Tree, verb: str, component: str) -> None:
    swap(tree.root / component, tree.victim)
    reads = verb.startswith("read")
    refused = CorruptCheckpointError if reads else UsageError
    with pytest.raises(refused, match="is a symbolic link") as caught:
        VERBS[verb](tree.storage)
    assert caught.value.path == str(tree.root / component)
    tree.assert_spared()


@pytest.mark.parametrize("component", ["a", "a/b", "a/b/c"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_link_that_comes_at_any_call_is_not_followed(
    tmp_path: Path, verb: str, component: str
) -> None:
    moment = 0
    for moment in range(200):
        tree = Tree(tmp_path / str(moment))

        def act(tree: Tree = tree) -> None:
            with suppress(CheckpointError):  # or it went on in the directory that was there
                VERBS[verb](tree.storage)

        def change(tree: Tree = tree) -> None:
            swap(tree.root / component, tree.victim)

        calls = swapped_at(moment, act, change)
        tree.assert_spared()
        if calls <= moment:
            break
    assert 1 < moment < 199


@pytest.mark.parametrize("verb", VERBS)
def test_a_name_that_is_a_link_to_a_file_is_not_written_through(tree: Tree, verb: str) -> None:
    """The link itself may go, or be replaced; what it leads to stays."""
    for name in ("file", "other", "new", TEMPORARY):
        (tree.root / "a/b/c" / name).unlink(missing_ok=True)
        (tree.root / "a/b/c" / name).symlink_to(tree.victim / "file")
    with suppress(CheckpointError):
        VERBS[verb](tree.storage)
    tree.assert_spared()


def test_while_links_come_and_go_all_the_time_nothing_reaches_the_victim(tree: Tree) -> None:
    link = tree.root / "a/link"
    link.symlink_to(tree.victim)
    with swapping(tree.root / "a/b", link):
        for turn in range(40):
            for verb in VERBS.values():
                with suppress(CheckpointError):
                    verb(tree.storage)
            if turn % 10 == 0:
                tree.assert_spared()
    tree.assert_spared()


def test_the_file_that_is_written_directly_is_the_one_that_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is opened twice: the second time, somebody else's file may have the name."""
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"precious" * 1024)
    os.makedirs(tmp_path / "root")
    for link in (os.symlink, os.link):

        def change(link: Callable[..., None] = link) -> None:
            (tmp_path / "root" / "new").unlink()
            link(theirs, tmp_path / "root" / "new")

        for moment in range(30):
            (tmp_path / "root" / "new").unlink(missing_ok=True)
            storage = open_storage(str(tmp_path / "root"))

            def act(storage: Storage = storage) -> None:
                with suppress(CheckpointError):
                    _written(storage, "new")

            def once(change: Callable[[], None] = change) -> None:
                if (tmp_path / "root" / "new").exists():
                    change()

            swapped_at(moment, act, once)
            assert theirs.read_bytes() == b"precious" * 1024


def test_what_the_user_names_may_be_a_link_and_lie_behind_one(tmp_path: Path) -> None:
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    for named in ("link", "link/inner", "link/not/yet"):
        storage = access_to(str(tmp_path / named)).open(str(tmp_path / named))
        storage.put("x", b"1")
        storage.join("sub").put("y", b"2")
        storage.join("sub").delete("y")
        assert (tmp_path / "real" / named.removeprefix("link").strip("/") / "x").exists()


def test_a_path_below_what_was_named_is_held_to_it(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "7").symlink_to(tmp_path / "theirs")
    root, step = str(tmp_path / "root"), str(tmp_path / "root" / "7")
    access_to(step).open(step).put("x", b"")  # the user names the link himself
    access_to(step, root).open(step).put("y", b"")  # also beside another
    for access, url in (
        (access_to(root), step),
        (access_to(Below(step, root)), step),
        (access_to(Below(step, root)), Below(step, root)),
    ):
        with pytest.raises(UsageError, match="symbolic link"):
            access.open(url).put("z", b"")
        with pytest.raises(UsageError, match="symbolic link"):
            access.open(root).at(step).put("z", b"")
    assert sorted(os.listdir(tmp_path / "theirs")) == ["x", "y"]


def test_a_strict_store_lists_and_reads_no_links(tmp_path: Path) -> None:
    (tmp_path / "root" / "dir").mkdir(parents=True)
    (tmp_path / "root" / "file").write_bytes(b"mine")
    (tmp_path / "secret").write_bytes(b"theirs")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "root" / "dirs").symlink_to(tmp_path)
    strict = open_storage(str(tmp_path / "root")).without_links()
    assert [info.name for info in strict.list()] == ["file"] == [*strict.names()]
    assert strict.list_dirs() == ["dir"]
    assert strict.read("file") == b"mine"
    for read in (lambda: strict.read("link"), lambda: strict.read("link", 0, 2)):
        with pytest.raises(CorruptCheckpointError, match="symbolic link"):
            read()
    with pytest.raises(CorruptCheckpointError, match="symbolic link"):
        strict.join("dirs").read("secret")
    with pytest.raises(CorruptCheckpointError, match="symbolic link"):
        strict.join("dirs").list()


def test_a_file_that_is_read_is_a_link_only_where_others_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_bytes(b"mine")
    (tmp_path / "real" / "link").symlink_to("file")
    (tmp_path / "latest").symlink_to("real")
    (tmp_path / "loop").symlink_to("loop")
    here = open_storage(str(tmp_path / "latest"))  # the directory itself may be one
    assert here.read("file") == here.reading_from(here.url).read("file") == b"mine"
    for read in (lambda: here.read("link"), lambda: here.read("link", 0, 1)):
        with pytest.raises(CorruptCheckpointError, match="symbolic link") as caught:
            read()
        assert caught.value.path == str(tmp_path / "latest" / "link")
    with pytest.raises(CorruptCheckpointError, match="symbolic link"):
        here.size("link")
    assert here.with_links().read("link") == b"mine" and here.with_links().size("link") == 4
    assert here.with_links().at(str(tmp_path / "real")).read("link") == b"mine"
    with pytest.raises(CheckpointError, match="form a loop"):
        open_storage(str(tmp_path / "loop")).read("file")


def test_a_tree_is_removed_without_what_its_links_lead_to(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    (tree.root / "a" / "link").symlink_to(tree.victim)
    (tree.root / "a" / "b" / "file").symlink_to(tree.victim / "file")
    with Directory.open(str(tree.root)) as root:
        root.remove_all("a")
        root.remove_all("a")
        assert root.names() == []
    tree.assert_spared()
