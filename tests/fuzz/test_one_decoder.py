"""`verify` decodes what `load` decodes: a checkpoint in which any value is another one, with right
checksums, is refused by both, or verified and loaded. No reader and no command raises what is no
`CheckpointError`, and one bad checkpoint costs the others nothing.

`-m long` takes more examples, see `test_fuzz.py`.
"""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import strategies as st

import smckpt
from smckpt.checkpoint.reading.committed import open_catalogue
from smckpt.checkpoint.upkeep.restorable import restorable_at
from smckpt.cli.app import app
from smckpt.cli.browse_facts import Facts
from smckpt.cli.show import describe
from smckpt.errors import CheckpointError, CorruptCheckpointError
from smckpt.manager.doctor import examine
from smckpt.storage import open_storage
from smckpt.topology import ParallelState
from smckpt.translate import ExportOptions, export_hf
from tests.fuzz.memory import Tree
from tests.fuzz.test_fuzz import (
    BODIES,
    BYTES,
    DATA,
    ROOTS,
    TREES,
    VALUES,
    at_length,
    changed,
    fuzz,
    reseal,
    reseal_data,
    spots,
    with_bytes,
)  # fmt: skip

# Values of other types than those that stand there, on purpose.
ODD = st.sampled_from(
    [[], {}, [[]], [{}], [None], {"a": {}}, "", " ", 0, -1, 1.5, True, None, 1 << 62, "\x9b31m",
     "\u202etxt", ["a", {}], [[1], "x"], {"~": "tuple", "v": [1]}, {"~": "ndarray", "v": []}]
)  # fmt: skip


def written(tree: Tree, root: str, folder: Path) -> Path:
    """The tree below a folder, and the directory of its checkpoint."""
    for at, files in tree.items():
        directory = folder / at.strip("/")
        directory.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (directory / name).write_bytes(data)
    return folder / root.strip("/")


def refused_or_done(read: Callable[[], Any]) -> CheckpointError | None:
    try:
        read()
    except CheckpointError as error:
        assert error.message
        return error
    return None


def read_all(place: Path, good: Path) -> None:
    """Each reader of one checkpoint; `good` is another one beside it."""
    error = refused_or_done(lambda: smckpt.verify_checkpoint(place).to_json())
    sound = error is None and smckpt.verify_checkpoint(place).ok
    failed = refused_or_done(lambda: smckpt.load(None, checkpoint_id=str(place)))
    assert not (sound and isinstance(failed, CorruptCheckpointError)), failed
    for read in (
        lambda: describe(open_catalogue(open_storage(str(place))), None),
        lambda: restorable_at(place, ParallelState(2)),
        lambda: smckpt.load({"model": {}}, checkpoint_id=str(place), check_keys_matched=False),
        lambda: export_hf(place, place.parent / "hf", prefix="", config=_config(),
                          options=ExportOptions(overwrite=True, naming="module",
                                                against_model=False, allow_nonfinite=True)),
    ):  # fmt: skip
        refused_or_done(read)
    page = Facts(open_storage(str(place.parent)), verify="quick", histograms="*")
    for condition in examine(open_storage(str(place.parent)), 1):
        page.add_step(condition)
    for arguments in (
        ["ls", str(place.parent)], ["doctor", str(place.parent)], ["status", str(place.parent)],
        ["show", str(place)], ["show", str(place), "--stats"], ["diff", str(place), str(good)],
        ["diff", str(good), str(place)], ["verify", str(place)],
    ):  # fmt: skip
        for options in ([], ["--json"]):
            done = CliRunner().invoke(app, [*arguments, *options])
            raised = done.exception
            assert raised is None or isinstance(raised, (SystemExit, CheckpointError)), (
                arguments, raised,
            )  # fmt: skip
            text = done.output.replace("\n", "")
            assert text.isprintable() or all(map(_harmless, text)), (arguments, text)
            if options and done.exit_code == 0:
                json.loads(done.stdout)


@functools.cache
def _config() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="smckpt-config"))
    (folder / "config.json").write_text(json.dumps({"model_type": "custom_x"}))
    return folder


def _harmless(character: str) -> bool:
    return character.isprintable() or character in "\t"


@functools.cache
def goods() -> dict[str, Path]:
    """A whole checkpoint of each format."""
    folder = Path(tempfile.mkdtemp(prefix="smckpt-good"))
    return {name: written(tree, ROOTS[name], folder / name) for name, tree in TREES.items()}


def _other_header(whole: bytes, what: str, data: st.DataObject) -> bytes:
    end = 8 + int.from_bytes(whole[:8], "little")
    if what == "bytes":
        return with_bytes(whole[:end], data.draw(BYTES), data.draw(st.booleans())) + whole[end:]
    header = json.loads(whole[8:end])
    for _ in range(data.draw(st.integers(1, 2))):
        way = data.draw(st.sampled_from(spots(header) or [("a",)]))
        how = data.draw(st.sampled_from(["other", "other", "gone", "twice"]))
        header = changed(header, way, data.draw(ODD | VALUES), how) if spots(header) else {}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + whole[end:]


def read_tree(fixture: str, tree: Tree) -> None:
    with tempfile.TemporaryDirectory(prefix="smckpt-fuzz") as folder:
        read_all(written(tree, ROOTS[fixture], Path(folder)), goods()[fixture])


def read_changed(fixture: str, at: str, name: str, body: Any) -> None:
    read_tree(fixture, reseal(TREES[fixture], at, name, body))


@at_length
def test_what_verify_passes_loads_whatever_value_is_changed(examples: int) -> None:
    fuzz(examples, _change, data=st.data())


def _change(data: st.DataObject) -> None:
    """A value of a manifest, record or part; or of the header of a data file; or bytes of a header
    or of a table of checksums."""
    what = data.draw(st.sampled_from(["value", "value", "header", "bytes", "table"]))
    if what != "value":
        fixture, at, name, whole = data.draw(st.sampled_from(DATA))
        tree = TREES[fixture]
        if what == "table":
            table = name.replace(".safetensors", ".crc")
            sums = with_bytes(tree[at][table], data.draw(BYTES), data.draw(st.booleans()))
            tree = {**tree, at: {**tree[at], table: sums}}
        else:
            tree = reseal_data(tree, at, name, _other_header(whole, what, data))
        read_tree(fixture, tree)
        return
    fixture, at, name, body = data.draw(st.sampled_from(BODIES))
    for _ in range(data.draw(st.integers(1, 2))):
        way = data.draw(st.sampled_from(spots(body)))
        how = data.draw(st.sampled_from(["other", "other", "gone", "twice"]))
        body = changed(body, way, data.draw(ODD | VALUES), how)
    read_changed(fixture, at, name, body)


def _parts() -> list[tuple[str, str, str, Any]]:
    return [e for e in BODIES if e[2].startswith("part-") and e[2].endswith("r00000.json")]


def _manifests() -> list[tuple[str, str, str, Any]]:
    return [each for each in BODIES if each[2].startswith("manifest-")]


OBJECTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an empty path": lambda leaf: leaf.update(path=[]),
    "a dict in the path": lambda leaf: leaf.update(path=["a", {}]),
    "a list in the path": lambda leaf: leaf.update(path=[["a"]]),
    "a number for the path": lambda leaf: leaf.update(path=3),
    "no path": lambda leaf: leaf.pop("path"),
    "no value": lambda leaf: leaf.pop("value"),
    "an unknown tag": lambda leaf: leaf.update(value={"~": [], "v": 1}),
    "a set in a set": lambda leaf: leaf.update(value={"~": "set", "v": [[]]}),
    "a float in the path": lambda leaf: leaf.update(path=["a", 1.5]),
    "true in the path": lambda leaf: leaf.update(path=[True]),
}


@pytest.mark.parametrize("what", OBJECTS)
def test_a_malformed_value_is_refused_by_verify_and_by_load(what: str) -> None:
    fixture, at, name, body = _parts()[-1]
    body = copy.deepcopy(body)
    OBJECTS[what](body["objects"][sorted(body["objects"])[0]])
    with tempfile.TemporaryDirectory() as folder:
        place = written(reseal(TREES[fixture], at, name, body), ROOTS[fixture], Path(folder))
        report = smckpt.verify_checkpoint(place)
        assert not report.ok and name in report.problems[0].path
        error = refused_or_done(lambda: smckpt.load(None, checkpoint_id=str(place)))
        assert isinstance(error, CorruptCheckpointError) and error.remedy
        assert name in (error.path or "")
        read_all(place, goods()[fixture])


MANIFESTS: dict[str, dict[str, Any]] = {
    "degrees of text": {"topology": {"world_size": "4"}},
    "a list of topology": {"topology": {"world_size": 4, "order": 3}},
    "a world of nothing": {"topology": {"world_size": 0}},
    "degrees that do not fit": {"topology": {"world_size": 4, "tensor_parallel_degree": 3}},
    "no world": {"topology": {}},
    "an optimizer of text": {"optimizers": {"optimizer": "x"}},
    "ids that are a number": {"optimizers": {"optimizer": {"ids": 3}}},
    "ids of numbers": {"optimizers": {"optimizer": {"ids": [[1]]}}},
    "ids of lists": {"optimizers": {"optimizer": {"ids": [[["a"]]]}}},
    "versions of lists": {"versions": {"torch": [1]}},
}


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_malformed_manifest_is_refused_by_verify_and_by_load(what: str) -> None:
    fixture, at, name, body = _manifests()[-1]
    body = {**body, **MANIFESTS[what]}
    with tempfile.TemporaryDirectory() as folder:
        place = written(reseal(TREES[fixture], at, name, body), ROOTS[fixture], Path(folder))
        report = smckpt.verify_checkpoint(place)
        assert not report.ok and name in report.problems[0].path
        error = refused_or_done(lambda: smckpt.load(None, checkpoint_id=str(place)))
        assert isinstance(error, CorruptCheckpointError) and error.remedy
        assert name in (error.path or "")
        read_all(place, goods()[fixture])


def test_a_tensor_inside_a_tensor_is_refused_by_verify_and_by_load() -> None:
    fixture, at, name, body = _manifests()[-1]
    body = copy.deepcopy(body)
    rows = body["layout"]["rows"]
    rows[1]["path"] = [*rows[0]["path"], "more"]
    with tempfile.TemporaryDirectory() as folder:
        place = written(reseal(TREES[fixture], at, name, body), ROOTS[fixture], Path(folder))
        assert not smckpt.verify_checkpoint(place).ok
        error = refused_or_done(lambda: smckpt.load(None, checkpoint_id=str(place)))
        assert isinstance(error, CorruptCheckpointError) and "a tensor" in error.message
        read_all(place, goods()[fixture])
