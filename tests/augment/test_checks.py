"""Arguments and their errors."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from streamloader.augment import checks


@pytest.mark.parametrize("value", [3, (3,), [3, 3]])
def test_a_pair_is_one_number_or_two(value: Any) -> None:
    assert checks.pair("size", value) == (3, 3)


@pytest.mark.parametrize("value", [True, 1.0, "3", None])
def test_a_whole_number_is_an_int(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^size must be a whole number, got "):
        checks.whole("size", value)


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "1", [[1]]])
def test_numbers_are_finite_and_no_booleans(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^fill must be a number, or a sequence of one per ch"):
        checks.numbers("fill", value)


def test_a_ratio_is_above_zero() -> None:
    assert checks.ratio("ratio", [1, 2]) == (1.0, 2.0)
    with pytest.raises(ValueError, match=r"^ratio must be above 0, got \(0, 2\)$"):
        checks.ratio("ratio", (0, 2))


def test_a_dtype_is_for_images() -> None:
    assert checks.dtype("dtype", torch.uint8) == torch.uint8
    with pytest.raises(TypeError, match=r"^dtype must be torch.uint8 or .*, got torch.complex64$"):
        checks.dtype("dtype", torch.complex64)


def test_numbers_may_be_numpys_or_torchs() -> None:
    assert checks.numbers("mean", np.array([0.5, 0.25], np.float32)) == (0.5, 0.25)
    assert checks.numbers("mean", torch.tensor([0.5, 0.25])) == (0.5, 0.25)
    assert checks.numbers("mean", np.float32(0.5)) == (0.5,)
    assert checks.whole("size", np.int64(4)) == 4
