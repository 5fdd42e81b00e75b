"""Casts are exact: the nearest value, ties to even, once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from smckpt.translate.cast import CASTABLE, cast, stored_type

_DTYPES = {name: getattr(torch, name) for name in CASTABLE}


def _bits(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def _interesting_floats() -> np.ndarray:
    """Every sign and exponent of float32 with the mantissas at which rounding turns."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    return (high[:, None] | low[None, :]).ravel().view(np.float32)


def test_bfloat16_rounds_as_torch_does_for_every_exponent_and_turning_point():
    values = _interesting_floats()
    inside = values[np.isfinite(torch.from_numpy(values).bfloat16().float().numpy())]
    expected = _bits(torch.from_numpy(inside).bfloat16())
    np.testing.assert_array_equal(cast(inside, "float32", "bfloat16"), expected)


def test_float16_rounds_as_torch_does():
    values = _interesting_floats()
    inside = values[np.isfinite(torch.from_numpy(values).half().numpy())]
    expected = torch.from_numpy(inside).half().numpy()
    np.testing.assert_array_equal(
        cast(inside, "float32", "float16").view(np.uint16), expected.view(np.uint16)
    )


def test_every_bfloat16_widens_and_comes_back_unchanged():
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide = cast(bits, "bfloat16", "float32")
    numbers = ~np.isnan(wide)
    np.testing.assert_array_equal(
        wide[numbers], torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float()[numbers]
    )
    np.testing.assert_array_equal(cast(wide, "float32", "bfloat16")[numbers], bits[numbers])


def test_a_nan_stays_a_nan_with_its_sign_even_if_its_payload_is_cut_off():
    bits = np.array([0x7F800001, 0xFF800001, 0x7FC00000, 0xFFFFFFFF], dtype=np.uint32)
    for target in ("bfloat16", "float16"):
        out = cast(bits.view(np.float32), "float32", target)
        back = cast(out, target, "float32")
        assert np.isnan(back).all()
        np.testing.assert_array_equal(np.signbit(back), [False, True, False, True])


def test_infinities_stay():
    values = np.array([np.inf, -np.inf], dtype=np.float32)
    for target in ("bfloat16", "float16", "float64"):
        np.testing.assert_array_equal(
            cast(cast(values, "float32", target), target, "float64"), values
        )


@pytest.mark.parametrize(
    ("source", "value", "target"),
    [
        ("float32", 65520.0, "float16"),
        ("float32", 3.4e38, "bfloat16"),
        ("float64", 1e300, "bfloat16"),
        ("float64", 1e39, "float32"),
    ],
)
def test_a_finite_value_that_would_become_infinite_is_refused(source, value, target):
    values = np.array([1.0, value], dtype=stored_type(source))
    with pytest.raises(OverflowError, match=target):
        cast(values, source, target)


def test_float64_is_rounded_once_and_not_by_way_of_float32():
    # Just above the middle of two bfloat16 values: float32 would round it down onto the middle,
    # and the tie would then go to the even neighbour below.
    middle = 1.0 + 2.0**-8
    value = np.array([middle + 2.0**-40, middle, middle - 2.0**-40, -(middle + 2.0**-40)])
    wide = cast(cast(value, "float64", "bfloat16"), "bfloat16", "float64")
    np.testing.assert_array_equal(wide, [1.0 + 2.0**-7, 1.0, 1.0, -(1.0 + 2.0**-7)])


def test_the_least_and_largest_float64_of_bfloat16s_range_are_kept():
    largest = float(torch.finfo(torch.bfloat16).max)
    values = np.array([largest, -largest, 2.0**-133, 0.0, -0.0])
    out = cast(cast(values, "float64", "bfloat16"), "bfloat16", "float64")
    np.testing.assert_array_equal(out, values)
    np.testing.assert_array_equal(np.signbit(out), np.signbit(values))
