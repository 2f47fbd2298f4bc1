"""Wrong arguments are errors: which one, what the rule is, what was given. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch

__all__ = [
    "dtype",
    "inplace",
    "interpolation",
    "numbers",
    "pair",
    "probability",
    "ratio",
    "span",
    "whole",
]

MODES = {"nearest": 0, "bilinear": 2, "bicubic": 3, "nearest-exact": None}
"""How images can be resized: torch's word, and Pillow's number."""


def whole(name: str, value: Any, least: int = 1) -> int:
    """`value`, if it is a whole number from `least`.

    Raises:
        TypeError: It is not a whole number.
        ValueError: It is too small.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if int(value) < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def pair(name: str, value: Any) -> tuple[int, int]:
    """Height and width in pixels; one number, or a sequence of one, stands for both.

    Raises:
        ValueError: It is a sequence of more than two, or of none.
    """
    items = tuple(value) if isinstance(value, Sequence) else (value,)
    if len(items) not in (1, 2):
        raise ValueError(f"{name} must be a number or (height, width), got {value!r}")
    height, width = (whole(name, item) for item in (items[0], items[-1]))
    return height, width


def _number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, Real) and math.isfinite(value)


def numbers(name: str, value: Any) -> tuple[float, ...]:
    """One number, or one per channel, as floats.

    Raises:
        TypeError: It is neither a number nor a sequence of them.
    """
    if hasattr(value, "tolist"):  # of torch or NumPy
        value = value.tolist()
    items = tuple(value) if isinstance(value, Sequence) else (value,)
    if not items or not all(map(_number, items)) or isinstance(value, str):
        raise TypeError(f"{name} must be a number, or a sequence of one per channel, got {value!r}")
    return tuple(map(float, items))


def probability(name: str, value: Any) -> float:
    """`value`, if it is a number from 0 to 1.

    Raises:
        TypeError: It is no number.
        ValueError: It is outside.
    """
    if not _number(value):
        raise TypeError(f"{name} must be a number from 0 to 1, got {value!r}")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be from 0 to 1, got {value}")
    return float(value)


def span(name: str, value: Any, low: float, high: float = math.inf) -> tuple[float, float]:
    """`value`, if it is two numbers, the least and the most, from `low` to `high`.

    Raises:
        TypeError: It is not two numbers.
        ValueError: They fall, or lie outside.
    """
    if not isinstance(value, Sequence) or len(value) != 2 or not all(map(_number, value)):
        raise TypeError(f"{name} must be two numbers (least, most), got {value!r}")
    least, most = map(float, value)
    if not low <= least <= most <= high:
        limit = f"from {low} to {high}" if high < math.inf else f"at least {low}"
        raise ValueError(f"{name} must be (least, most), rising, {limit}, got {tuple(value)}")
    return least, most


def ratio(name: str, value: Any) -> tuple[float, float]:
    """Least and most of a ratio of two sides.

    Raises:
        ValueError: They are not above 0.
    """
    least, most = span(name, value, low=0)
    if least == 0:
        raise ValueError(f"{name} must be above 0, got {tuple(value)}")
    return least, most


def interpolation(value: Any) -> str:
    """Torch's word for a way of resizing: given as that, as torchvision's enum, or Pillow's number.

    Raises:
        ValueError: It is none that is supported.
    """
    word = getattr(value, "value", value)
    for mode, number in MODES.items():
        if word == mode or (number is not None and word == number):
            return mode
    raise ValueError(f"interpolation must be one of {', '.join(map(repr, MODES))}, got {value!r}")


def dtype(name: str, value: Any) -> torch.dtype:
    """`value`, if images can be computed in it: uint8 or floating point.

    Raises:
        TypeError: It is another dtype, or none.
    """
    if isinstance(value, torch.dtype) and (value.is_floating_point or value == torch.uint8):
        return value
    raise TypeError(f"{name} must be torch.uint8 or a floating-point dtype, got {value!r}")


def inplace(value: Any) -> None:
    """Refuses True, which torchvision takes.

    Raises:
        ValueError: It is not False.
    """
    if value is not False:
        raise ValueError(f"inplace must be False: the input is never written to; got {value!r}")
