"""What is no tensor comes back exactly, or is refused with its place; nothing read is executed."""

from __future__ import annotations

import argparse
import base64
import datetime
import decimal
import fractions
import io
import json
import math
import pickle
import random
import struct
import uuid
from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smckpt.checkpoint.records.objects import decode_object, encode_object
from smckpt.errors import CorruptCheckpointError, StateError
from tests.support import child

nans = st.integers(1, (1 << 51) - 1).map(
    lambda bits: struct.unpack("<d", struct.pack("<Q", (0x7FF8 << 48) | bits))[0]
)
numpy_scalars = st.one_of(
    st.integers(-(2**31), 2**31 - 1).map(np.int32),
    st.floats().map(np.float64),
    st.floats(width=32).map(np.float32),
    st.booleans().map(np.bool_),
    st.complex_numbers().map(np.complex128),
    st.text(alphabet="abcü", min_size=1, max_size=5).map(np.str_),
    st.integers(0, 10**9).map(lambda n: np.datetime64(n, "s")),
)
hashable = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 200), 1 << 200),
    st.floats(),
    nans,
    st.complex_numbers(),
    st.text(st.characters()),
    st.binary(max_size=40),
)
keys = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()), st.just("~"))
values = st.recursive(
    st.one_of(
        hashable,
        st.binary(max_size=40).map(bytearray),
        numpy_scalars,
        st.sampled_from([torch.float32, torch.bfloat16, torch.Size([2, 3]), torch.device("cpu")]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.sets(st.integers() | st.text(), max_size=4),
        st.frozensets(st.integers() | st.binary(max_size=3), max_size=4),
    ),
    max_leaves=25,
)


def through(value: Any, **options: Any) -> Any:
    """Through the very JSON that the files hold."""
    return decode_object(json.loads(json.dumps(encode_object(value, **options), allow_nan=False)))


def same(a: Any, b: Any) -> bool:
    """Equal in value, type and order, to the last bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.keys()), list(b.keys())) and same(list(a.values()), list(b.values()))
    if isinstance(a, (np.ndarray, np.generic)):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    return bool(a == b)


@settings(max_examples=300)
@given(values)
def test_every_plain_value_comes_back_to_the_last_bit(value):
    assert same(through(value), value)


@pytest.mark.parametrize(
    "value",
    [
        -0.0,
        float("nan"),
        -float("nan"),
        math.inf,
        -math.inf,
        5e-324,
        0.1 + 0.2,
        complex(-0.0, float("nan")),
        10**5000,
        -(1 << 63),
        (1 << 63) - 1,
        {},
        (),
        set(),
        {1: "a", "1": "b", (2, 3): None, None: 1, 0.5: 2},
        {"~": "tuple", "v": [1]},
        {"a": {"~": {"~": "dict", "v": []}}},
        OrderedDict([("b", 1), ("a", 2)]),
        "\ud800 lone surrogate \x00",
        ((1, [2, (3,)]), {"x": ({4},)}),
        np.arange(6, dtype=">i2").reshape(2, 3),
        np.array([], dtype="float16"),
        np.array(3.5),
        np.array(["2020-01-01", "NaT"], dtype="datetime64[D]"),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        torch.complex64,
        torch.Size([]),
        torch.device("cuda", 3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_hard_values_come_back(value):
    assert same(through(value), value)


def test_the_random_states_of_python_and_numpy_come_back():
    assert same(through(random.getstate()), random.getstate())
    assert same(through(np.random.get_state()), np.random.get_state())
    generator = np.random.default_rng(7)
    generator.random(3)
    again = np.random.default_rng()
    again.bit_generator.state = through(generator.bit_generator.state)
    assert again.random() == generator.random()


def test_a_scheduler_s_state_comes_back():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    state = scheduler.state_dict()
    assert isinstance(state["milestones"], Counter)  # a dict of int keys that is no dict
    again = through(state)
    assert again == state and isinstance(again["milestones"], Counter)
    scheduler.load_state_dict(again)


def test_a_generator_as_the_format_has_it_draws_on():
    live = torch.Generator().manual_seed(7)
    state = base64.b64encode(live.get_state().numpy().tobytes()).decode()
    decoded = decode_object({"~": "torch.Generator", "v": ["cpu", state]})
    assert torch.equal(torch.rand(3, generator=decoded), torch.rand(3, generator=live))


def test_an_array_that_came_back_can_be_written():
    array = through(np.arange(3))
    array[0] = 5


def test_a_tensor_hidden_in_an_object_comes_back():
    value = {1: (torch.arange(4), "x")}
    again = through(value)
    assert torch.equal(again[1][0], value[1][0]) and again[1][1] == "x"


def test_text_and_numbers_need_no_tags():
    plain = {"lr": 1e-3, "betas": [0.9, 0.999], "names": ["a"], "amsgrad": False, "step": None}
    assert encode_object(plain) == plain


@dataclass
class Settings:
    lr: float = 0.1


Point = namedtuple("Point", "x y")


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("executed",))


@pytest.mark.parametrize(
    "value",
    [
        Settings(),
        Evil(),
        Evil,
        print,
        lambda: 0,
        Point(1, 2),
        random.Random(0),
        np.array([Evil()], dtype=object),
        (i for i in ()),
        torch.nn.Linear(1, 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_carry_code_is_refused_naming_place_and_type(value):
    with pytest.raises(StateError) as caught:
        encode_object({"loader": [1, {"x": value}]}, path="trainer")
    assert "trainer.loader.1.x" in str(caught.value)
    assert type(value).__qualname__ in str(caught.value)
    assert "state_dict" in caught.value.remedy


def test_a_refused_key_is_named_too():
    with pytest.raises(StateError, match=r"Point at a key of trainer"):
        encode_object({Point(1, 2): 1}, path="trainer")


def test_a_defaultdict_keeps_its_data_and_what_makes_its_defaults():
    for factory in (None, list, int, dict):
        value = defaultdict(factory, {1: [2], "a": {}})
        again = through(value)
        assert type(again) is defaultdict and again == value
        assert again.default_factory is factory
    with pytest.raises(StateError, match="defaultdict"):
        encode_object(defaultdict(lambda: 0))


def test_values_of_python_s_library_come_back_without_code():
    stream = io.BytesIO(b"abc")
    stream.seek(2)
    value = {
        "paths": [Path("/a/b"), PurePosixPath("x"), PureWindowsPath("C:/d")],
        "span": datetime.timedelta(days=-3, seconds=5, microseconds=7),
        "args": argparse.Namespace(lr=0.1, out=Path("o"), tags={1: (2,)}),
        "ranges": [range(3), range(1 << 70, 0, -2), slice(None, 2, (1, "a")), ...],
        "numbers": [fractions.Fraction(-1, 3), decimal.Decimal("-0E-7"), decimal.Decimal("sNaN12")],
        "ids": [uuid.UUID(int=5)],
        "dtypes": [np.dtype("float32"), np.dtype(">i2"), np.dtype("U3")],
    }
    assert repr(through(value)) == repr(value)
    again = through({"stream": stream})["stream"]
    assert type(again) is io.BytesIO and again.getvalue() == b"abc" and again.tell() == 2

    class Own(argparse.Namespace):
        pass

    with pytest.raises(StateError, match="Own"):
        encode_object(Own(a=1))


def test_an_allowed_type_comes_back_where_it_is_allowed():
    encoded = encode_object(Settings(0.5), allow=[Settings])
    with pytest.raises(StateError, match="a type that is not allowed"):
        decode_object(encoded)
    with torch.serialization.safe_globals([Settings]):
        assert decode_object(encoded) == Settings(0.5)


def test_a_value_that_contains_itself_is_refused():
    loop: list[Any] = [1]
    loop.append({"again": loop})
    with pytest.raises(StateError, match=r"data\.1\.again contains itself"):
        encode_object(loop, path="data")


def test_a_value_that_stands_twice_is_no_cycle():
    twice = [1]
    assert through([twice, twice]) == [[1], [1]]


def test_a_bottomless_value_is_refused_and_not_a_crash():
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(StateError, match="nested too deeply"):
        encode_object(deep, path="data")
    while deep:  # or the interpreter recurses when it frees it
        deep = deep.pop()


@pytest.mark.parametrize(
    "data",
    [
        {"~": "pickle", "v": "x"},
        {"~": 7, "v": "x"},
        {"~": "tuple"},
        {"~": "int", "v": [1]},
        {"~": "bytes", "v": "?"},
        {"~": "float", "v": "zz"},
        {"~": "dict", "v": [[1]]},
        {"~": "torch.dtype", "v": "load"},
        {"~": "ndarray", "v": ["|O", base64.b64encode(b"\0" * 8).decode(), [1]]},
        {"~": "ndarray", "v": ["<i4", base64.b64encode(b"\0" * 8).decode(), [3]]},
        {"~": "numpy.dtype", "v": None},
        {"~": "called", "v": ["Fraction", ["1e9999999999"]]},
        {"~": "called", "v": ["Fraction", [{"~": "called", "v": ["Decimal", ["1e99999999"]]}]]},
        {"~": "called", "v": ["Fraction", [1, 0]]},
        {"~": "called", "v": ["range", [0, 1, 0]]},
        {"~": "called", "v": ["Decimal", [1.5]]},
        {"~": "called", "v": ["UUID", []]},
        {"~": "called", "v": ["Ellipsis", [1]]},
        {"~": "torch.Generator", "v": ["cpu", "?"]},
        {"~": "torch.Generator", "v": ["cpu", base64.b64encode(b"\1" * 16).decode()]},
        {"~": "torch.Generator", "v": ["cpu", base64.b64encode(b"\377" * 5056).decode()]},
        {"~": "torch.Generator", "v": ["cpu", ""]},
        {"~": "torch.Generator", "v": ["mars", ""]},
        {"~": "torch.Generator", "v": [7, ""]},
        {"~": "torch.Generator", "v": []},
    ],
    ids=repr,
)
def test_damaged_values_are_refused(data):
    with pytest.raises(CorruptCheckpointError):
        decode_object([data])


def test_a_pickle_that_runs_code_is_not_run_on_reading(capsys):
    for raw, error in (
        (pickle.dumps(Evil(), protocol=2), CorruptCheckpointError),  # no archive
        (_torch_saved(Evil()), StateError),
    ):
        with pytest.raises(error):
            decode_object({"~": "torch.save", "v": base64.b64encode(raw).decode()})
    assert capsys.readouterr().out == ""


def _torch_saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_plain_values_are_read_and_written_without_torch():
    code = """
        import sys
        from smckpt.checkpoint.records.objects import decode_object, encode_object
        value = {"a": [(1, 2.5, b"x"), {3: float("nan")}]}
        assert repr(decode_object(encode_object(value))) == repr(value)
        print("torch" in sys.modules, "numpy" in sys.modules)
    """
    assert child.run(code) == "False False"
