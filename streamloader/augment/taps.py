"""Which pixels a resized line is made of, and how much each weighs. Pure.

The formulas of `torch.nn.functional.interpolate` with `align_corners=False`, each line on its own,
since images are resized along one axis after the other: a kernel reads off here what it has to do.
(`interpolate` itself cannot be the definition: antialiased on the CPU it is wrong where the width
becomes 1, and on CUDA it refuses large reductions.)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Taps", "taps"]


class Taps(NamedTuple):
    """Each pixel of a line as a weighed sum of `count` pixels of another.

    Attributes:
        pixels: int64, (length, count), within the other line.
        weights: float64, (length, count); a row's sum is 1.
    """

    pixels: Tensor
    weights: Tensor


def taps(places: Tensor, old: int, new: int, interpolation: str, *, antialias: bool) -> Taps:
    """How a line of `old` pixels becomes one of `new`, of which some are wanted.

    Args:
        places: int64, (length,): which, from 0 to `new - 1`.
        old: At least 1.
        new: At least 1.
        interpolation: "bilinear", "bicubic", "nearest" or "nearest-exact".
        antialias: Whether, where pixels become fewer, the filter is as wide as a new one.
    """
    if interpolation.startswith("nearest"):
        # In float32, as torch does: where two pixels are as near, rounding says which is taken.
        middle = 0.5 if interpolation == "nearest-exact" else 0.0
        scale = torch.tensor(float(old)) / new
        index = ((places + middle) * scale).long().clamp(max=old - 1)
        return Taps(index[:, None], torch.ones(len(places), 1, dtype=torch.float64))
    stretch = max(old / new, 1.0) if antialias else 1.0
    reach = stretch * _REACH[interpolation]
    middle_of = (places.double() + 0.5) * (old / new) - 0.5
    offsets = torch.arange(math.ceil(2 * reach) + 1)
    index = (middle_of - reach).ceil().long()[:, None] + offsets
    away = (index - middle_of[:, None]) / stretch
    weight = _triangle(away) if interpolation == "bilinear" else _cubic(away, _SHARP[antialias])
    if antialias or interpolation == "bilinear":  # what lies outside has no weight, ...
        weight = weight * ((index >= 0) & (index < old))
    return Taps(index.clamp(0, old - 1), weight / weight.sum(1, keepdim=True))  # ... or the edge's


_REACH = {"bilinear": 1.0, "bicubic": 2.0}
"""How far from a new pixel's middle old ones weigh, in pixels."""

_SHARP = {True: -0.5, False: -0.75}
"""Keys's parameter: torch follows Pillow with antialias, and OpenCV without."""


def _triangle(away: Tensor) -> Tensor:
    return (1 - away.abs()).clamp(min=0)


def _cubic(away: Tensor, sharp: float) -> Tensor:
    """Keys, "Cubic convolution interpolation for digital image processing" (1981)."""
    x = away.abs()
    near = ((sharp + 2) * x - (sharp + 3)) * x * x + 1
    far = sharp * (((x - 5) * x + 8) * x - 4)
    return torch.where(x <= 1, near, torch.where(x < 2, far, 0.0))
