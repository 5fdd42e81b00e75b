"""Targets laid out in files: valid safetensors, cut in chunks that never split an element."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from smckpt.errors import UsageError
from smckpt.formats.boxes import BoxTensors, whole_tensor
from smckpt.formats.source_files import ArchiveRecord, SourceFiles
from smckpt.formats.tensors import TensorKey
from smckpt.formats.torch_archive import StoredTensor
from smckpt.layout.entries import DTYPES
from smckpt.layout.strided import row_major_strides
from smckpt.translate.files import ALIGNMENT, Chunk, OutputFile, Range, arrange
from smckpt.translate.ranks.translated import Translated, TranslatedSource, whole


def target(name: str, dtype: str, shape: tuple[int, ...]) -> Translated:
    return whole(TensorKey(name, 0, 0), shape, dtype)


_TARGETS = st.lists(
    st.tuples(
        st.sampled_from(["float32", "bfloat16", "uint8", "int64", "bool", "complex64"]),
        st.lists(st.integers(0, 40), max_size=3).map(tuple),
    ),
    max_size=8,
).map(lambda drawn: [target(f"t{i}", *one) for i, one in enumerate(drawn)])


@given(_TARGETS)
def test_chunks_cover_the_data_once_in_order_and_split_no_element(targets):
    file = OutputFile("f", tuple(targets))
    at, seen = len(file.header), {t.name: 0 for t in targets}
    for chunk in file.chunks(ALIGNMENT):
        assert chunk.offset == at and chunk.offset % ALIGNMENT == 0
        assert chunk.length <= ALIGNMENT
        filled = 0
        for item in chunk.ranges:
            assert item.offset == filled
            assert item.start == seen[item.target.name]
            seen[item.target.name] = item.stop
            filled += item.nbytes
        assert filled == chunk.length
        at += chunk.length
    assert at == file.size
    assert seen == {t.name: math.prod(t.shape) for t in targets}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("values")


@given(_TARGETS)
def test_a_range_is_read_as_exactly_its_elements(made, targets):
    for one in targets:
        numel = math.prod(one.shape)
        start, stop = numel // 3, numel - numel // 4
        if stop <= start:
            continue
        memory = np.random.default_rng(1).bytes(numel * DTYPES[one.dtype].itemsize)
        values = np.frombuffer(memory, f"u{DTYPES[one.dtype].itemsize}").reshape(one.shape)
        file = made / "values"
        file.write_bytes(memory)
        stored = StoredTensor(
            one.dtype, one.shape, row_major_strides(one.shape), 0,
            ArchiveRecord(str(file), 0, len(memory)),
        )  # fmt: skip
        tensors = {TensorKey(one.name, 0, 0): whole_tensor((one.name,), stored)}
        source = TranslatedSource(BoxTensors("here", tensors, SourceFiles()))
        found = bytearray((stop - start) * DTYPES[one.dtype].itemsize)
        (plan,) = source.plans_of([Chunk(0, len(found), (Range(one, start, stop, 0),))])
        source.read(plan, [memoryview(found)])
        assert found == values.reshape(-1)[start:stop].tobytes()


def test_the_header_makes_a_file_that_safetensors_opens(tmp_path: Path):
    targets = [target("b", "bfloat16", (3, 5)), target("a", "int64", ()), target("z", "bool", (0,))]
    file = OutputFile("model.safetensors", tuple(targets))
    path = tmp_path / file.name
    path.write_bytes(file.header + bytes(file.data_bytes))
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert {n: tuple(opened.get_slice(n).get_shape()) for n in opened.keys()} == {  # noqa: SIM118
            "a": (), "b": (3, 5), "z": (0,)
        }  # fmt: skip


def test_tensors_are_packed_in_their_order_up_to_the_limit():
    files = arrange([target(n, "float32", (256,)) for n in "dbac"], 2048)
    assert [f.name for f in files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert [[t.name for t in f.targets] for f in files] == [["d", "b"], ["a", "c"]]


def test_a_tensor_above_the_limit_has_a_file_of_its_own():
    files = arrange([target("a", "uint8", (1,)), target("b", "uint8", (99,))], 10)
    assert [[t.name for t in f.targets] for f in files] == [["a"], ["b"]]


def test_one_file_has_the_plain_name():
    (file,) = arrange([target("a", "uint8", (1,))], 10)
    assert file.name == "model.safetensors"


def test_a_dtype_that_safetensors_lacks_is_refused_by_name():
    lacking = next(name for name, dtype in DTYPES.items() if dtype.code is None)
    with pytest.raises(UsageError, match=rf"odd.*{lacking}"):
        arrange([target("odd", lacking, (2,))], 10)


def test_header_numbers_are_those_of_the_data():
    file = OutputFile("f", (target("a", "uint8", (3,)), target("b", "float64", (2,))))
    length = int.from_bytes(file.header[:8], "little")
    table = json.loads(file.header[8 : 8 + length])
    assert table["b"]["data_offsets"] == [0, 16]
    assert table["a"]["data_offsets"] == [16, 19]
