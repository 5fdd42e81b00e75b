"""Readers of what others wrote: any input is read, or refused by a typed error, in bounds.

By structure, with hypothesis: one value of a whole checkpoint is another one, and the checksums are
right. `-m long` takes LONG examples of each, and SMCKPT_FUZZ_EXAMPLES says how many CI takes. By
coverage: `python -m tests.fuzz.run`; its corpus is read here.
"""

from __future__ import annotations

import copy
import io
import json
import os
import resource
import struct
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smckpt.checkpoint.records.crc import BLOCK, crc64, hex64
from smckpt.checkpoint.records.sealed import open_json, seal_json
from smckpt.errors import CheckpointError
from tests.fuzz.memory import Tree, tree_of
from tests.fuzz.targets import MARK, TARGETS, finish, mark_of, quiet, read_everything
from tests.support.limits import seconds

CORPUS = Path(__file__).parent / "corpus"
FIXTURES = sorted(p for p in (Path(__file__).parent.parent / "fixtures").glob("format-*"))
EXAMPLES = int(os.environ.get("SMCKPT_FUZZ_EXAMPLES", "25"))
LONG = int(os.environ.get("SMCKPT_FUZZ_LONG", "1000"))
MEMORY = 1 << 30
at_length = pytest.mark.parametrize(
    "examples",
    [EXAMPLES, pytest.param(LONG, marks=[pytest.mark.long, pytest.mark.timeout(2 * LONG + 300)])],
)

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.sampled_from([0, 1, 1 << 20, 1 << 24, 10**13]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
    st.sampled_from(["R", "S0", "S99", "SS0/2", "SS0/1000000000", "..", "../x", "/etc", "", "~"]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["~", "v", "a", "mesh", "kept", "boxes"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


def fuzz(examples: int, check: Callable[..., None], **drawn: st.SearchStrategy[Any]) -> None:
    """Check examples that are drawn."""
    how = settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    how(given(**drawn)(check))()


def bounded(target: Any, given_input: Any) -> None:
    """Run it within time and memory; a typed error is fine."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    try:
        target(given_input)
    except CheckpointError as error:
        assert error.message
    assert time.monotonic() - began < seconds(20)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    assert grown < MEMORY


def spots(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all values within a value."""
    out = [way] if way else []
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            out += spots(item, (*way, key))
    return out


def changed(body: Any, way: tuple[Any, ...], value: Any, how: str) -> Any:
    """A copy in which the value at `way` is another one, is gone, or stands twice."""
    body = copy.deepcopy(body)
    at = body
    for key in way[:-1]:
        at = at[key]
    if how == "gone" and isinstance(at, dict):
        del at[way[-1]]
    elif how == "twice" and isinstance(at, list):
        at.append(at[way[-1]])
    else:
        at[way[-1]] = value
    return body


def reseal(tree: Tree, directory: str, name: str, body: Any) -> Tree:
    """The tree with another body in a file, and with the checksums of those that name it right."""
    tree = {at: dict(files) for at, files in tree.items()}
    before = hex64(crc64(tree[directory][name]))
    tree[directory][name] = seal_json(body)
    after = hex64(crc64(tree[directory][name]))
    for at, files in tree.items():
        for other, data in files.items():
            if (
                before.encode() in data
                and other.endswith(".json")
                and (at, other) != (directory, name)
            ):
                text = json.dumps(open_json(data, other)).replace(before, after)
                return reseal(tree, at, other, json.loads(text))
    return tree


def reseal_data(tree: Tree, directory: str, name: str, data: bytes) -> Tree:
    """The tree with another data file, and with the checksums of its blocks and of those that name
    it right."""
    before = hex64(crc64(tree[directory][name]))
    table = name.replace(".safetensors", ".crc")
    pieces = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
    sums = struct.pack(f"<{len(pieces)}Q", *map(crc64, pieces))
    tree = {at: dict(files) for at, files in tree.items()}
    tree[directory].update({name: data, table: sums})
    for at, other in [(at, other) for at, files in tree.items() for other in files]:
        if other.endswith(".json") and before.encode() in tree[at][other]:
            body = open_json(tree[at][other], other)
            for record in records_of(body, name):
                record.update(size=len(data), crc64=hex64(crc64(data)))
            tree = reseal(tree, at, other, body)
    return tree


def records_of(value: Any, name: str) -> list[dict[str, Any]]:
    """What a manifest or a part says of a file."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    here = [value] if isinstance(value, dict) and value.get("name") == name else []
    return here + [found for each in inner for found in records_of(each, name)]


TREES = {path.name: tree_of(path / "checkpoint") for path in FIXTURES}
ROOTS = {
    fixture: min(at for at, files in tree.items() if any("record" in n for n in files))
    for fixture, tree in TREES.items()
}
BODIES = [
    (fixture, at, name, open_json(data, name))
    for fixture, tree in TREES.items()
    for at, files in sorted(tree.items())
    for name, data in sorted(files.items())
    if name.endswith(".json")
]


DATA = [
    (fixture, at, name, data)
    for fixture, tree in TREES.items()
    for at, files in sorted(tree.items())
    for name, data in sorted(files.items())
    if name.endswith(".safetensors")
]


def test_the_fixtures_are_read_whole() -> None:
    for fixture, tree in TREES.items():
        read_everything(tree, ROOTS[fixture])


@at_length
def test_a_checkpoint_with_any_value_changed_is_read_or_refused(examples: int) -> None:
    fuzz(examples, _read_changed, data=st.data())


def _read_changed(data: st.DataObject) -> None:
    fixture, at, name, body = data.draw(st.sampled_from(BODIES))
    for _ in range(data.draw(st.integers(1, 3))):
        way = data.draw(st.sampled_from(spots(body)))
        how = data.draw(st.sampled_from(["other", "other", "gone", "twice"]))
        body = changed(body, way, data.draw(VALUES), how)
    tree = reseal(TREES[fixture], at, name, body)
    bounded(lambda _: read_everything(tree, ROOTS[fixture]), None)


@at_length
def test_a_changed_mark_of_a_deletion_takes_nothing_but_files_of_ours_below_it(
    examples: int,
) -> None:
    fuzz(examples, _delete_changed, data=st.data())


def _delete_changed(data: st.DataObject) -> None:
    fixture = data.draw(st.sampled_from(sorted(TREES)))
    tree, root = TREES[fixture], ROOTS[fixture]
    body = mark_of(tree, root)
    for _ in range(data.draw(st.integers(0, 2))):
        way = data.draw(st.sampled_from(spots(body)))
        how = data.draw(st.sampled_from(["other", "other", "gone", "twice"]))
        value = data.draw(VALUES | st.sampled_from(["../private", "/private", "../", "a/../.."]))
        body = changed(body, way, value, how)
    marked = {**tree, root: {**tree[root], MARK: seal_json(body)}}
    bounded(lambda _: finish(marked, root), None)


BYTES = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4)


def with_bytes(data: bytes, changes: list[tuple[float, int]], cut: bool) -> bytes:
    """The data with some bytes changed, and perhaps cut short at the last of them."""
    out = bytearray(data)
    for at, byte in changes:
        out[int(at * len(out))] = byte
    return bytes(out[: int(changes[-1][0] * len(out))] if changes and cut else out)


@at_length
@pytest.mark.parametrize("target", ["archive", "pickle"])
def test_files_of_others_with_bytes_changed_or_cut_short_are_read_or_refused(
    target: str, examples: int
) -> None:
    data = archive() if target == "archive" else dcp_metadata()

    def check(changes: list[tuple[float, int]], cut: bool) -> None:
        bounded(TARGETS[target], with_bytes(data, changes, cut))

    fuzz(examples, check, changes=BYTES, cut=st.booleans())


@cache
def dcp_metadata() -> bytes:
    import tempfile

    import torch
    import torch.distributed.checkpoint as dcp

    with tempfile.TemporaryDirectory() as folder:
        state = {"model": {"weight": torch.ones(2, 3)}, "step": 7}
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        return (Path(folder) / ".metadata").read_bytes()


@cache
def archive() -> bytes:
    import torch

    file = io.BytesIO()
    torch.save({"model": {"weight": torch.ones(2, 3)}, "step": 7}, file)
    return file.getvalue()


def test_a_deletion_that_a_mark_names_is_finished_unless_a_pin_holds() -> None:
    for fixture, tree in TREES.items():
        root = ROOTS[fixture]
        files = {**tree[root], MARK: seal_json(mark_of(tree, root))}
        left = finish({**tree, root: files}, root)
        assert not [at for at in left if at.startswith(root) and left[at].keys() - {"notes"}]
        for pin in (b"", b"[" * 9999, seal_json({"format": [9, 0], "until": 0})):
            pins = {**files, "pin-0123456789abcdef.json": pin}
            left = finish({**tree, root: pins}, root)
            assert left[root].keys() == {*tree[root], "pin-0123456789abcdef.json", "notes"}


@at_length
@pytest.mark.parametrize("target", TARGETS)
def test_any_json_and_any_bytes_are_read_or_refused(target: str, examples: int) -> None:
    def check(value: Any, raw: bytes) -> None:
        bounded(TARGETS[target], json.dumps(value).encode())
        bounded(TARGETS[target], raw)

    fuzz(examples, check, value=VALUES, raw=st.binary(max_size=200))


@pytest.mark.parametrize(
    "path", sorted(CORPUS.glob("*/*")), ids=lambda p: f"{p.parent.name}/{p.name[:12]}"
)
def test_what_was_found_once_stays_refused(path: Path) -> None:
    bounded(quiet(TARGETS[path.parent.name]), path.read_bytes())
