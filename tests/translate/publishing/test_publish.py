"""What a model's directory changed is published alone, and applied byte for byte."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from smckpt import apply_published, errors, publish
from smckpt.checkpoint.records.format import FORMAT_VERSION
from smckpt.checkpoint.records.sealed import open_json, seal_json
from smckpt.storage import open_storage
from smckpt.storage.disk.directory import Directory
from smckpt.storage.disk.posix import PosixStorage
from smckpt.translate.publishing.published import FILES, MANIFEST, RECORD
from tests.support.faults.swaps import NO_FILE, put_no_file
from tests.support.limits import seconds
from tests.support.main_job import ROOT
from tests.support.saves import Group

MiB = 1 << 20
Tensors = dict[str, Any]


def weights(seed: int = 0, rows: int = 700) -> Tensors:
    """About 6 MB: one tensor of several blocks, some small ones, an empty one."""
    random = np.random.default_rng(seed)
    tensors: Tensors = {
        f"layers.{n}.weight": random.standard_normal((64, 64), np.float32) for n in range(6)
    }
    tensors["embed.weight"] = random.standard_normal((rows, 1999), np.float32)
    tensors["none"] = np.zeros((0, 4), np.float32)
    return tensors


def write(directory: Path, tensors: Tensors, **more: bytes) -> Path:
    directory.mkdir(exist_ok=True)
    for old in directory.iterdir():
        old.unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[:3], names[3:])):
        save_file({n: tensors[n] for n in part}, directory / f"model-{number}.safetensors")
    for name, data in {"config.json": b"{}", **more}.items():
        (directory / name).write_bytes(data)
    return directory


def contents(directory: Path | str) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in Path(directory).iterdir()}
    files.pop(".smckpt_publish.json", None)
    return files


class Served:
    """A model that changes, its publishes, and a host that applies them."""

    def __init__(self, folder: Path, root: str | None = None) -> None:
        self.model, self.host = folder / "model", folder / "host"
        self.root = root or str(folder / "published")
        self.tensors = weights()
        write(self.model, self.tensors)

    def publish(self, **options: Any) -> Any:
        return publish(self.model, self.root, **options)

    def apply(self, **options: Any) -> Any:
        done = apply_published(self.root, self.host, **options)
        assert Path(os.path.realpath(self.host / "latest")) == Path(done.directory)
        return done

    def assert_same(self) -> None:
        assert contents(self.host / "latest") == contents(self.model)


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served(tmp_path)


def test_the_first_publish_is_the_directory_itself(served: Served) -> None:
    done = served.publish()
    assert (done.number, done.full) == (0, True)
    published = contents(done.directory)
    published.pop(MANIFEST)
    assert published == contents(served.model)
    served.apply()
    served.assert_same()


@pytest.mark.parametrize("unit", ["tensor", "block"])
def test_only_what_changed_is_written_and_read(served: Served, unit: str) -> None:
    served.publish()
    served.apply()
    served.tensors["embed.weight"][600, 5] += 1  # one block of six
    served.tensors["layers.1.weight"] *= 2
    write(served.model, served.tensors)
    done = served.publish(delta=unit)
    assert (done.number, done.full, done.tensors, done.tensors_in_all) == (1, False, 2, 8)
    embed, layer = served.tensors["embed.weight"].nbytes, 64 * 64 * 4
    changed = layer + (embed if unit == "tensor" else MiB)
    assert done.changed_bytes == changed
    stored = sum(path.stat().st_size for path in Path(done.directory).iterdir())
    assert stored == done.nbytes and stored / changed <= 1.05
    assert served.apply().nbytes == changed
    served.assert_same()


@pytest.mark.parametrize("how", ["refuses", "stops"])
def test_a_base_is_copied_where_the_kernel_does_not(
    served: Served, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    served.publish()
    served.apply()
    served.tensors["layers.0.weight"][0, 0] += 1
    write(served.model, served.tensors)
    served.publish(delta="block")
    real, calls = os.copy_file_range, []

    def part(source: int, target: int, count: int) -> int:
        calls.append(count)
        if len(calls) == 1:
            return real(source, target, 1000)  # a part is copied already
        if how == "refuses":
            raise OSError(95, "not supported")
        return 0

    monkeypatch.setattr(os, "copy_file_range", part)
    assert served.apply().nbytes == 64 * 64 * 4, "the rest came from the base"
    assert len(calls) >= 2
    served.assert_same()


def test_a_delta_of_tensors_is_plain_safetensors(served: Served) -> None:
    served.publish()
    served.tensors["layers.1.weight"] *= 2
    write(served.model, served.tensors)
    (delta,) = Path(served.publish().directory).glob("*.safetensors")
    loaded = load_file(delta)
    assert list(loaded) == ["layers.1.weight"]
    assert np.array_equal(loaded["layers.1.weight"], served.tensors["layers.1.weight"])


def test_what_does_not_change_is_published_once(served: Served) -> None:
    served.publish()
    again = served.publish()
    assert (again.number, again.nbytes, again.tensors) == (0, 0, 0)
    assert sorted(os.listdir(served.root)) == ["00000000"]


def test_a_host_that_missed_some_catches_up_and_unchanged_files_are_links(served: Served) -> None:
    served.publish()
    served.apply()
    for n in range(3):
        served.tensors[f"layers.{n}.weight"] += 1
        write(served.model, served.tensors)
        served.publish(delta="block" if n == 1 else "tensor")
    done = served.apply()
    assert (done.number, done.nbytes) == (3, 3 * 64 * 64 * 4)
    served.assert_same()
    same = [
        (served.host / folder / "config.json").stat().st_ino for folder in ("00000000", "00000003")
    ]
    assert same[0] == same[1]
    other = served.host.parent / "fresh"
    apply_published(served.root, other)  # from the full one
    assert contents(other / "latest") == contents(served.model)
    apply_published(served.root, other, number=1)
    assert contents(other / "latest") != contents(served.model)


def test_files_and_shapes_may_come_go_and_change(served: Served) -> None:
    write(served.model, served.tensors, **{"old.txt": b"old"})
    served.publish()
    served.apply()
    served.tensors = weights(3, rows=500)  # the header changes: the whole file goes
    write(served.model, served.tensors, **{"new.txt": b"new", "config.json": b'{"a": 1}'})
    done = served.publish()
    assert not done.full
    served.apply()
    served.assert_same()
    assert done.nbytes / done.changed_bytes <= 1.05


def test_names_that_change_places_of_one_size_are_not_mixed_up(served: Served) -> None:
    served.publish()
    served.apply()
    first, second = (served.tensors.pop(f"layers.{n}.weight") for n in (4, 5))
    served.tensors |= {"layers.6.weight": first, "layers.7.weight": second}
    write(served.model, served.tensors)  # the same sizes at the same places, under other names
    served.publish()
    served.apply()
    served.assert_same()


def test_two_files_with_a_tensor_of_one_name_are_both_published(served: Served) -> None:
    twice = served.model / "twin.safetensors"
    write(served.model, served.tensors)
    save_file({"layers.1.weight": served.tensors["layers.2.weight"]}, twice)
    served.publish()
    served.apply()
    served.tensors["layers.1.weight"] *= 2
    write(served.model, served.tensors)
    save_file({"layers.1.weight": served.tensors["layers.1.weight"] + 1}, twice)
    served.publish()
    served.apply()
    served.assert_same()


def test_after_so_many_a_publish_is_full_and_old_chains_go(served: Served) -> None:
    fulls = []
    for _ in range(7):
        served.tensors["layers.0.weight"] += 1
        write(served.model, served.tensors)
        fulls.append(served.publish(full_every=2).full)
    assert fulls == [True, False, True, False, True, False, True]
    assert sorted(map(int, os.listdir(served.root))) == [4, 5, 6]
    served.apply()
    served.assert_same()


def test_old_directories_go_and_the_served_one_stays(served: Served) -> None:
    for _ in range(4):
        served.tensors["layers.0.weight"] += 1
        write(served.model, served.tensors)
        served.publish()
        served.apply(keep=2)
    kept = sorted(name for name in os.listdir(served.host) if name.isdigit())
    assert kept == ["00000002", "00000003"]
    served.apply(number=2, keep=1)
    assert [name for name in os.listdir(served.host) if name.isdigit()] == ["00000002"]


def test_it_works_through_s3(tmp_path: Path, s3_root: str) -> None:
    served = Served(tmp_path, f"{s3_root}/published")
    served.publish()
    served.apply()
    served.tensors["embed.weight"][0, 0] += 1
    write(served.model, served.tensors)
    done = served.publish(delta="block")
    assert done.nbytes < 1.05 * MiB
    assert served.apply().nbytes == MiB
    served.assert_same()


def test_an_object_that_is_replaced_while_it_is_scanned_is_refused(
    tmp_path: Path, s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the last publish has is not read again: half of one version would be taken for it."""
    served, url = Served(tmp_path, root=f"{s3_root}/published"), f"{s3_root}/model"
    name = "model-1.safetensors"
    store, old = open_storage(url), contents(served.model)
    for each, data in old.items():
        store.overwrite(each, data)
    assert publish(url, served.root).number == 0
    code = import_module("smckpt.translate.publishing.publish")
    header_of = code.header_of

    def replaced(model: Any, file: str, size: int) -> Any:
        header = header_of(model, file, size)
        if file == name:
            store.overwrite(name, old[name][:-4] + b"new!")
        return header

    with monkeypatch.context() as patch:
        patch.setattr(code, "header_of", replaced)
        with pytest.raises(errors.CorruptCheckpointError, match="changed since its reading began"):
            publish(url, served.root)
    assert publish(url, served.root).number == 1


@settings(max_examples=10)
@given(data=st.data())
def test_any_changes_in_any_order_give_the_directory_again(
    tmp_path_factory: Any, data: Any
) -> None:
    served = Served(tmp_path_factory.mktemp("chain"))
    for _ in range(data.draw(st.integers(1, 5))):
        for name in data.draw(st.lists(st.sampled_from(sorted(served.tensors)), unique=True)):
            if served.tensors[name].size:
                where = data.draw(st.integers(0, served.tensors[name].size - 1))
                served.tensors[name].reshape(-1)[where] += 1
        if data.draw(st.booleans()):
            served.tensors.pop(data.draw(st.sampled_from(sorted(served.tensors)[:-2])), None)
        write(served.model, served.tensors, **data.draw(
            st.dictionaries(st.sampled_from(["a", "b", "c"]), st.binary(max_size=40))
        ))  # fmt: skip
        served.publish(
            delta=data.draw(st.sampled_from(["tensor", "block", None])),
            full_every=data.draw(st.integers(2, 5)),
        )
        if data.draw(st.booleans()):
            served.apply()
            served.assert_same()
    served.apply()
    served.assert_same()


# -- what goes wrong -----------------------------------------------------------------------------


def test_a_changed_byte_of_a_delta_is_refused_and_the_old_model_stays(served: Served) -> None:
    served.publish()
    served.apply()
    before = contents(served.model)
    served.tensors["layers.1.weight"] *= 2
    write(served.model, served.tensors)
    (delta,) = Path(served.publish().directory).glob("*.safetensors")
    data = bytearray(delta.read_bytes())
    data[-3] ^= 1
    delta.write_bytes(data)
    with pytest.raises(errors.CorruptCheckpointError, match=r"layers\.1\.weight.*bytes \d+ to"):
        served.apply()
    assert contents(served.host / "latest") == before
    assert not [name for name in os.listdir(served.host) if name.startswith(".applying")]
    served.publish(delta=None)
    served.apply()
    served.assert_same()


def test_a_directory_that_somebody_changed_is_no_base(served: Served, caplog: Any) -> None:
    served.publish()
    base = Path(served.apply().directory)
    served.tensors["layers.1.weight"] *= 2
    write(served.model, served.tensors)
    served.publish()
    (changed,) = (name for name in contents(base) if "layers.1" in _names(base / name))
    data = bytearray((base / changed).read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1  # of a tensor that no delta replaces
    (base / changed).write_bytes(data)
    done = served.apply()
    assert done.nbytes > sum(map(len, contents(served.model).values())) - MiB  # all anew
    assert "is no base for publish 1" in caplog.text
    served.assert_same()


def _names(path: Path) -> str:
    return path.read_bytes()[:4096].decode("latin-1")


def test_bytes_that_change_while_they_are_published_publish_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("smckpt.translate.publishing.publish")
    scanned = module._scanned

    def scan_and_change(model: Any) -> Any:
        found = scanned(model)
        path = served.model / "model-1.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        return found

    monkeypatch.setattr(module, "_scanned", scan_and_change)
    with pytest.raises(errors.CorruptCheckpointError, match="changed while they were published"):
        served.publish()
    with pytest.raises(errors.CheckpointNotFoundError):
        served.apply()


KILLED = """
import os, signal, sys
from smckpt import apply_published, publish
count = int(sys.argv[4])
def counted(owner, name):
    call = getattr(owner, name)
    def seen(*args, **options):
        global count
        count -= 1
        if count < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **options)
    setattr(owner, name, seen)
for name in ("pwrite", "rename", "link", "fsync", "unlink", "open", "mkdir", "replace", "symlink",
             "rmdir", "readlink", "stat", "listdir", "close"):
    counted(os, name)
{"publish": publish, "apply": apply_published}[sys.argv[1]](sys.argv[2], sys.argv[3])
"""


def _killed(what: str, source: Any, target: Any, at: int) -> bool:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, what, str(source), str(target), str(at)],
        cwd=ROOT, capture_output=True, text=True, timeout=seconds(60), check=False,
    )  # fmt: skip
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


def _kills_of(
    what: str, served: Served, moments: range, *, newer: bool = False, keep: int = 2
) -> int:
    """Kill `what` at these of its calls; what is served stays whole, and the next try completes."""
    old = contents(served.host / "latest")
    before = {place: served.host.parent / f"{place.name}-before" for place in
              (served.host, Path(served.root), Path(served.model))}  # fmt: skip
    for place, kept in before.items():
        shutil.copytree(place, kept, symlinks=True)
    kills = 0
    for at in moments:
        for place, kept in before.items():
            shutil.rmtree(place)
            shutil.copytree(kept, place, symlinks=True)
        source, target = (
            (served.model, served.root) if what == "publish" else (served.root, served.host)
        )
        if not _killed(what, source, target, at):
            break
        kills += 1
        assert contents(served.host / "latest") in (old, contents(served.model))
        if newer:
            write(served.model, {**served.tensors, "embed.weight": weights(at)["embed.weight"]})
        if what == "publish" or newer:
            served.publish()
        served.apply(keep=keep)
        served.assert_same()
        assert not [name for name in os.listdir(served.host) if name.startswith(".applying")]
    return kills


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("what", ["publish", "apply"])
@pytest.mark.parametrize(
    "moments", [range(8, 11), pytest.param(range(1000), marks=pytest.mark.long)]
)
def test_a_kill_at_any_call_leaves_the_old_model_or_the_new(
    served: Served, what: str, moments: range, newer: bool
) -> None:
    """The next try is of the same publish, or of a newer one."""
    served.publish()
    served.apply()
    served.tensors["layers.1.weight"] *= 2
    served.tensors["embed.weight"] *= 2
    write(served.model, served.tensors)
    if what == "apply":
        served.publish()
    kills = _kills_of(what, served, moments, newer=newer, keep=1)
    print(f"{what}: {kills} kills")
    assert kills == len(moments) or (len(moments) > 100 and kills > 10)


@pytest.mark.parametrize("what", ["publish", "apply"])
def test_a_call_that_fails_once_leaves_the_old_model_or_the_new(
    served: Served, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Each call in turn, also after the manifest is there. The next try is without the fault."""
    served.publish()
    served.apply()
    old = contents(served.host / "latest")
    served.tensors["embed.weight"] *= 2
    write(served.model, served.tensors)
    act = served.publish
    if what == "apply":
        served.publish()
        act = served.apply
    kept = [(place, served.host.parent / f"{place.name}-before") for place in
            (served.host, Path(served.root))]  # fmt: skip
    for place, copy in kept:
        shutil.copytree(place, copy, symlinks=True)
    names, failed = ("pwrite", "rename", "link", "fsync", "unlink", "mkdir", "symlink"), 0
    for at in range(1000):
        for place, copy in kept:
            shutil.rmtree(place)
            shutil.copytree(copy, place, symlinks=True)
        left = [at]
        with monkeypatch.context() as patch:
            for name in names:
                patch.setattr(os, name, _failing_once(getattr(os, name), left))
            try:
                act()
            except errors.CheckpointError:
                failed += 1
        if left[0] >= 0:  # it ended before so many calls
            break
        served.apply()
        served.assert_same() if what == "apply" else None
        assert contents(served.host / "latest") in (old, contents(served.model)), at
        served.publish()
        served.apply()
        served.assert_same()
    assert failed > 10


def _failing_once(call: Any, left: list[int]) -> Any:
    """The call, which fails once, after `left` calls of all that share it."""

    def faulty(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(*args, **options)

    return faulty


def test_two_may_not_apply_to_one_directory(served: Served) -> None:
    import fcntl

    served.publish()
    served.apply()
    with open(served.host / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(errors.StorageError, match="another process applies"):
            served.apply()


@pytest.mark.parametrize("before", ["numbers_in", "_next_number"])
def test_two_publishes_at_one_moment_do_not_both_count(
    served: Served, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    module = import_module("smckpt.translate.publishing.publish")
    served.publish()
    write(served.model, weights(1))
    called = getattr(module, before)

    def late(*args: Any) -> Any:
        listed = called(*args)
        monkeypatch.setattr(module, before, called)
        write(served.model, weights(2))
        other = threading.Thread(target=served.publish)
        other.start()
        other.join(seconds(60))
        write(served.model, weights(1))
        return listed

    monkeypatch.setattr(module, before, late)
    with pytest.raises(errors.StorageError, match="another process has published"):
        served.publish()
    write(served.model, weights(2))
    served.apply()
    served.assert_same()


@pytest.mark.parametrize("name", [FILES, MANIFEST])
def test_publishes_that_are_written_at_one_moment_leave_one_chain(
    served: Served, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The other one takes the same number, or the next one, and has the same base."""
    served.publish()
    write(served.model, weights(1))
    put = PosixStorage.put_exclusive

    def late(storage: PosixStorage, file: str, data: bytes) -> bool:
        if file == name:
            monkeypatch.setattr(PosixStorage, "put_exclusive", put)
            write(served.model, weights(2))
            other = threading.Thread(target=served.publish)
            other.start()
            other.join(seconds(60))
            write(served.model, weights(1))
        return put(storage, file, data)

    monkeypatch.setattr(PosixStorage, "put_exclusive", late)
    with pytest.raises(errors.StorageError, match="another process has published"):
        served.publish()
    for seed in (2, 3):
        write(served.model, weights(seed))
        served.publish()
        served.apply()
        served.assert_same()


def test_what_killed_publishers_left_goes_with_the_next_full_ones(served: Served) -> None:
    """One of them came second, with a record of files of its own. One had made its directory."""
    root = Path(served.root)
    served.publish(full_every=1)
    first = root / "00000000"
    (first / "delta-0.safetensors").write_text("half")
    record = {"format": list(FORMAT_VERSION), "files": ["delta-0.safetensors"]}
    (first / FILES).write_bytes(seal_json(record))
    (first / f".{MANIFEST}.{'0' * 16}.tmp").write_text("half")
    (root / "00000001").mkdir()
    for number in range(2, 5):
        served.tensors["layers.0.weight"] += 1
        write(served.model, served.tensors)
        assert served.publish(full_every=1).number == number
    assert sorted(os.listdir(root)) == ["00000003", "00000004"]


def test_a_number_that_is_not_there_is_not_another_one(served: Served) -> None:
    served.publish()
    with pytest.raises(errors.CheckpointNotFoundError, match="no publish 7"):
        served.apply(number=7)
    assert not served.host.exists()  # nor a lock in it


def _forged(body: dict[str, Any], name: str) -> None:
    (file,) = (file for file in body["files"].values() if not file["whole"])
    (tensor,) = file["tensors"].values()
    match name:
        case "outside":
            body["files"]["../escape"] = {**file, "whole": True}
        case "range":
            tensor[1] = file["size"] + 1
        case "block":
            tensor[2] = [99]
        case "negative":
            tensor[0] = -8
        case "digits":
            tensor[3] = "zz" * 8
        case "base":
            body["base"] = "0" * 16
        case "stranger":
            file["tensors"]["other"] = file["tensors"].pop("layers.1.weight")
        case "type":
            body["files"] = [1]


@pytest.mark.parametrize(
    "what", ["outside", "range", "block", "negative", "digits", "base", "stranger", "type"]
)
def test_a_forged_manifest_is_refused(served: Served, what: str) -> None:
    served.publish()
    served.apply()
    before = sorted(served.host.rglob("*")), contents(served.host / "latest")
    served.tensors["layers.1.weight"] *= 2
    write(served.model, served.tensors)
    path = Path(served.publish().directory) / MANIFEST
    body = open_json(path.read_bytes(), str(path))
    _forged(body, what)
    path.write_bytes(seal_json(body))
    with pytest.raises(errors.CorruptCheckpointError):
        served.apply()
    assert (sorted(served.host.rglob("*")), contents(served.host / "latest")) == before


@pytest.mark.parametrize(
    ("options", "said"),
    [({"delta": "bit"}, "delta='bit'"), ({"full_every": 0}, "full_every=0")],
)
def test_an_argument_that_makes_no_sense_is_refused(
    served: Served, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(errors.UsageError, match=said):
        served.publish(**options)


def test_what_is_no_whole_model_is_refused(served: Served) -> None:
    (served.model / "model.safetensors.unfinished").write_bytes(b"")
    with pytest.raises(errors.UsageError, match="unfinished"):
        served.publish()
    with pytest.raises(errors.UsageError, match="no files"):
        publish(served.host, served.root)
    with pytest.raises(errors.UsageError, match="local directory"):
        apply_published(served.root, "s3://bucket/host")
    Group(served.host, (0,)).save(step=1)
    with pytest.raises(errors.UsageError, match="a checkpoint of training"):
        publish(served.host, served.root)
    assert not open_storage(served.root).list_dirs()


@pytest.mark.parametrize("what", NO_FILE)
def test_what_cannot_be_published_is_not_left_out_in_silence(served: Served, what: str) -> None:
    path = served.model / "chat_template.jinja"
    put_no_file(path, what)
    with pytest.raises(errors.UsageError, match=path.name):
        served.publish()
    assert not open_storage(served.root).list_dirs()


def test_half_of_an_export_in_several_files_is_refused(served: Served) -> None:
    """Its files have their names while they are written; the index comes last."""
    index = served.model / "model.safetensors.index.json"
    parts = [served.model / f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    (served.model / "model.safetensors").unlink(missing_ok=True)
    for path in [*served.model.glob("*.safetensors")]:
        path.unlink()
    save_file(weights(), parts[0])
    with pytest.raises(errors.UsageError, match=r"it lacks model\.safetensors\.index\.json"):
        served.publish()
    where = {"weight_map": {"a": parts[0].name, "b": parts[1].name}}
    index.write_text(json.dumps(where))
    with pytest.raises(errors.UsageError, match="it lacks model-00002-of-00002"):
        served.publish()
    no_names = [{"weight_map": {"a": no}} for no in (0, None, True, 1.5, [], {"b": 1})]
    for text in ("{", "[]", json.dumps({"weight_map": [1]}), *map(json.dumps, no_names)):
        index.write_text(text)
        with pytest.raises(errors.UsageError, match="it lacks a weight_map"):
            served.publish()
    assert not open_storage(served.root).list_dirs()
    index.write_text(json.dumps(where))
    save_file({"b": np.ones(2, np.float32)}, parts[1])
    served.publish()
    served.apply()
    served.assert_same()


def test_a_model_that_began_as_a_copy_of_an_applied_one_is_published_without_its_record(
    served: Served,
) -> None:
    """A host's unchanged files are links: a record among them would be written through them."""
    served.publish()
    copy = Path(served.apply().directory) / RECORD
    shutil.copy(copy, served.model)
    for number in (1, 2):
        served.tensors["embed.weight"] += 1
        write(served.model, served.tensors, **{RECORD: copy.read_bytes()})
        assert served.publish().number == number
        assert not (Path(served.root) / f"{number:08d}" / RECORD).exists()
        before = (served.host / "latest" / RECORD).read_bytes()
        old = Path(os.path.realpath(served.host / "latest"))
        served.apply()
        served.assert_same()
        assert (old / RECORD).read_bytes() == before


def test_the_commands_print_what_they_did(served: Served) -> None:
    def run(*arguments: Any) -> str:
        code = "import sys; sys.modules['torch'] = None; from smckpt.cli import main; main()"
        return subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            cwd=ROOT, capture_output=True, text=True, timeout=seconds(60), check=True,
        ).stdout  # fmt: skip

    assert run("publish", served.model, served.root).startswith("all: ")
    assert run("publish", served.model, served.root).startswith("nothing changed: ")
    served.tensors["layers.1.weight"] *= 2
    write(served.model, served.tensors)
    assert "1 of 8 tensors changed" in run("publish", served.model, served.root, "--delta", "block")
    assert run("apply", served.root, served.host).startswith("publish 1, ")
    served.assert_same()


@pytest.mark.parametrize("what", ["range", "block"])
def test_a_forged_table_of_a_full_publish_is_refused(served: Served, what: str) -> None:
    path = Path(served.publish().directory) / MANIFEST
    body = open_json(path.read_bytes(), str(path))
    tensor = body["files"]["model-0.safetensors"]["tensors"]["layers.1.weight"]
    if what == "range":
        tensor[1] = 1 << 60  # a walk over its blocks would not end
    else:
        tensor[2] = [1]
    path.write_bytes(seal_json(body))
    with pytest.raises(errors.CorruptCheckpointError, match=r"bytes|blocks"):
        served.apply()


def test_a_host_of_another_root_takes_nothing_from_its_base(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    served.publish()
    served.apply()
    shutil.rmtree(served.root)
    served.tensors = weights(5)
    write(served.model, served.tensors)
    served.publish()  # number 0 again, of other weights
    write(served.model, served.tensors, **{"new.txt": b"new"})
    served.publish()
    served.apply()
    served.assert_same()
    assert "is no base" not in caplog.text  # it was not even compared


def test_a_half_removed_directory_is_made_anew(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.publish()
    first = contents(served.model)
    served.apply()
    write(served.model, served.tensors, **{"new.txt": b"new"})
    served.publish()
    remove = Directory.remove

    def cut_short(self: Directory, name: str) -> None:
        remove(self, name)
        if self.path.endswith("00000000") and not name.startswith(RECORD):
            raise KeyboardInterrupt

    monkeypatch.setattr(Directory, "remove", cut_short)
    with pytest.raises(KeyboardInterrupt):
        served.apply(keep=1)
    monkeypatch.undo()
    served.apply(number=0)
    assert contents(served.host / "latest") == first


@pytest.mark.parametrize("how", ["rot", "cut", "link", "directory", "gone"])
def test_rotten_bytes_of_a_file_that_did_not_change_are_not_linked(
    served: Served, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(served.model, served.tensors, **{"big.bin": bytes(3 * MiB)})
    served.publish()
    there = Path(served.apply().directory) / "big.bin"
    match how:
        case "rot":
            there.write_bytes(bytes(2 * MiB) + b"x" * MiB)
        case "cut":
            there.write_bytes(bytes(MiB))
        case "link":
            (there.parent.parent / "elsewhere").write_bytes(bytes(3 * MiB))
            there.unlink()
            there.symlink_to("../elsewhere")
        case "directory":
            there.unlink()
            there.mkdir()
        case "gone":
            there.unlink()
    served.tensors["layers.1.weight"] *= 2
    write(served.model, served.tensors, **{"big.bin": bytes(3 * MiB)})
    served.publish()
    done = served.apply()
    served.assert_same()
    assert "big.bin" in caplog.text and "is no base for publish 1" in caplog.text
    assert not (served.host / "latest" / "big.bin").is_symlink()
    assert done.nbytes < 4 * MiB, "only that file was read anew"


def test_files_that_grew_by_a_hole_are_fetched_anew_without_reading_them(served: Served) -> None:
    served.publish()
    folder = Path(served.apply().directory)
    served.tensors["layers.1.weight"] *= 2
    write(served.model, served.tensors)
    served.publish()
    for path in (folder / "config.json", *folder.glob("model-*.safetensors")):  # one is patched
        os.truncate(path, 1 << 40)
    served.apply()  # in the time of a test, and not of a terabyte
    served.assert_same()


def test_a_name_that_no_host_takes_is_refused_when_it_is_published(served: Served) -> None:
    """A backslash parts directories on some systems, so no manifest may have one in a name."""
    served.publish()
    (served.model / "a\\b").write_text("")
    with pytest.raises(errors.UsageError, match=r"it has a\\b"):
        served.publish()
    (served.model / "a\\b").unlink()
    served.publish()
    served.apply()
    served.assert_same()


def test_a_record_that_a_kill_left_half_made_is_no_file_of_the_model(served: Served) -> None:
    half = served.model / ".smckpt_publish.json.new"
    half.write_text("{")
    served.publish()
    half.unlink()
    served.apply()
    served.assert_same()
    assert served.apply().mended == ()


_HARMS = ("rot", "cut", "gone", "link", "pipe")


def _harm(there: Path, how: str) -> None:
    data = bytearray(there.read_bytes())
    there.unlink()
    match how:
        case "rot":
            data[len(data) // 2] ^= 1
            there.write_bytes(data)
        case "cut":
            there.write_bytes(data[:-1])
        case "link":
            (there.parent.parent / "elsewhere").write_bytes(data)
            there.symlink_to("../elsewhere")
        case "pipe":
            os.mkfifo(there)


@pytest.mark.parametrize("how", _HARMS)
@pytest.mark.parametrize("file", ["model-1.safetensors", "config.json", "big.bin"])
def test_rotten_bytes_of_the_served_directory_are_made_anew(
    served: Served, how: str, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The publish is applied already. What a server has open stays; the name is replaced."""
    write(served.model, served.tensors, **{"big.bin": bytes(3 * MiB)})
    served.publish()
    served.apply()
    served.tensors["layers.1.weight"] *= 2
    write(served.model, served.tensors, **{"big.bin": bytes(3 * MiB)})
    served.publish(delta="block")
    folder = Path(served.apply().directory)
    (folder / "mine").write_text("mine")
    for quick in (False, True):
        done = served.apply(quick=quick)
        assert (done.nbytes, done.mended) == (0, ())
    with open(folder / file, "rb") as opened:
        _harm(folder / file, how)
        done = served.apply()
        assert done.mended == (file,) and done.nbytes > 0
        assert f"{file} of {folder}, which is served, is made anew" in caplog.text
        assert opened.read() == (served.model / file).read_bytes()
    assert (folder / "mine").read_text() == "mine"
    (folder / "mine").unlink()
    served.assert_same()
    assert not (folder / file).is_symlink()
    assert not [name for name in os.listdir(served.host) if name.startswith(".applying")]
    assert served.apply().mended == ()


def test_a_damaged_record_of_the_served_directory_is_made_anew(served: Served) -> None:
    """If its files are those of the publish. Otherwise it may be another root's."""
    served.publish()
    record = Path(served.apply().directory) / RECORD
    whole = record.read_bytes()
    record.write_bytes(whole.replace(b"config", b"konfig"))
    served.apply()
    assert record.read_bytes() == whole
    record.unlink()
    (record.parent / "config.json").write_text("theirs")
    with pytest.raises(errors.UsageError, match="publish 0 of this root"):
        served.apply()


def test_a_loop_reads_only_what_was_changed_after_it_was_made(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.publish()
    folder = Path(served.apply().directory)
    read: list[str] = []
    module = import_module("smckpt.translate.publishing.apply")
    check = module._check
    monkeypatch.setattr(
        module, "_check", lambda fd, f, path: (read.append(path), check(fd, f, path))
    )
    served.apply(quick=True)
    assert read == []
    served.apply()
    assert len(read) == 3
    times = os.stat(folder / "config.json")
    _harm(folder / "config.json", "cut")  # of another size, with the old time
    os.utime(folder / "config.json", ns=(times.st_atime_ns, times.st_mtime_ns))
    _harm(folder / "model-0.safetensors", "rot")
    assert served.apply(quick=True).mended == ("config.json", "model-0.safetensors")
    served.assert_same()
    read.clear()
    assert served.apply(quick=True).mended == () and read == []


def test_a_users_directory_in_a_files_place_is_left_to_the_user(served: Served) -> None:
    served.publish()
    folder = Path(served.apply().directory)
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    (folder / "config.json" / "mine").write_text("mine")
    with pytest.raises(errors.UsageError, match=r"config\.json.*that no publish brought"):
        served.apply()
    assert (folder / "config.json" / "mine").read_text() == "mine"


def test_an_older_directory_that_rotted_is_made_anew_before_it_is_served_again(
    served: Served,
) -> None:
    served.publish()
    first = contents(served.model)
    served.apply()
    write(served.model, served.tensors, **{"new.txt": b"new"})
    served.publish()
    served.apply()
    (served.host / "00000000" / "config.json").unlink()
    (served.host / "00000000" / "config.json").write_bytes(b"[]")
    served.apply(number=0)
    assert contents(served.host / "latest") == first


def test_what_no_publish_wrote_stays_on_a_host(served: Served) -> None:
    """A directory with a number for a name, and files in a directory of ours."""
    served.publish()
    served.apply()
    (served.host / "20240101").mkdir()
    (served.host / "00000000" / "notes").write_text("mine")
    for name in ("20240101", "000000000002"):
        (served.host / name).mkdir(exist_ok=True)
        (served.host / name / "config.json").write_text("mine")
    for _ in range(3):
        served.tensors["layers.0.weight"] += 1
        write(served.model, served.tensors)
        served.publish()
        served.apply(keep=1)
        served.assert_same()
    assert contents(served.host / "00000000") == {"notes": b"mine"}
    for name in ("20240101", "000000000002"):
        assert contents(served.host / name) == {"config.json": b"mine"}
    (served.host / "00000004").mkdir()
    (served.host / "00000004" / "config.json").write_text("mine")
    write(served.model, weights(7))
    served.publish()
    with pytest.raises(errors.UsageError, match="files are there that no publish brought"):
        served.apply()
    assert contents(served.host / "00000004") == {"config.json": b"mine"}


def test_what_no_publish_wrote_stays_in_the_root(served: Served) -> None:
    root = Path(served.root)
    served.publish(full_every=1)
    (root / "00000000" / "notes").write_text("mine")
    (root / "00000000" / "kept").mkdir()
    for number in range(1, 5):
        served.tensors["layers.0.weight"] += 1
        write(served.model, served.tensors)
        assert served.publish(full_every=1).number == number
    assert contents(root / "00000003") and sorted(os.listdir(root)) == [
        "00000000", "00000003", "00000004",
    ]  # fmt: skip
    assert sorted(os.listdir(root / "00000000")) == ["kept", "notes"]


@pytest.mark.parametrize("name", ["999999999999", "00000099", "00000001", "000000000000"])
@pytest.mark.parametrize("what", ["empty", "files", "copy", "file", "link"])
def test_only_publishes_count(served: Served, name: str, what: str, tmp_path: Path) -> None:
    root = Path(served.root)
    served.publish()
    match what:
        case "empty":
            (root / name).mkdir()
        case "files":
            (root / name).mkdir()
            (root / name / "config.json").write_text("mine")
        case "copy":
            shutil.copytree(root / "00000000", root / name)
        case "file":
            (root / name).write_text("mine")
        case "link":
            (tmp_path / "theirs").mkdir()
            (root / name).symlink_to(tmp_path / "theirs")
    for delta in ("tensor", "block", None, "tensor"):
        served.tensors["layers.0.weight"] += 1
        write(served.model, served.tensors)
        number = served.publish(delta=delta).number
        assert served.apply().number == number < 99
        served.assert_same()
    if what == "files":
        assert (root / name / "config.json").read_text() == "mine"


def test_no_number_is_too_large_to_count(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.publish()
    monkeypatch.setattr(import_module("smckpt.translate.publishing.publish"), "MAX_NUMBER", 0)
    write(served.model, weights(1))
    with pytest.raises(errors.UsageError, match="publish to another directory") as caught:
        served.publish()
    assert caught.value.path == served.root


def test_a_served_directory_of_another_root_is_not_taken_away(served: Served) -> None:
    served.publish()
    served.apply()
    before = contents(served.host / "latest")
    shutil.rmtree(served.root)
    write(served.model, weights(5))
    served.publish()  # number 0 again
    with pytest.raises(errors.UsageError, match="publish 0 of this root"):
        served.apply()
    assert contents(served.host / "latest") == before
