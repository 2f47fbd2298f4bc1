"""Triton: pixels in, weighed as `taps.py` says, and out.

Where pixels lie is computed in whole numbers, so a weight is exact to float32's last bit however
large the image: with `old` pixels becoming `new`, all is in units of 1 / (2 new) of an old pixel.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["offset", "read", "resampled", "write"]

_ROUNDER = tl.constexpr(12582912.0)
"""1.5 * 2**23: a float32 near it is a whole number, so adding it rounds, half to even."""


@triton.jit
def read(at, step_c, inside, CHANNELS: tl.constexpr):
    """Pixels as float32, as they are stored; three channels, or one three times."""
    red = tl.load(at, mask=inside, other=0).to(tl.float32)
    green, blue = red, red
    if CHANNELS == 3:
        green = tl.load(at + step_c, mask=inside, other=0).to(tl.float32)
        blue = tl.load(at + 2 * step_c, mask=inside, other=0).to(tl.float32)
    return red, green, blue


@triton.jit
def write(at, red, green, blue, inside, out_c,
           CHANNELS: tl.constexpr, LEVELS: tl.constexpr):  # fmt: skip
    """Pixels in the dtype of where they go; to 0..255, rounded, where that is uint8."""
    tl.store(at, _converted(red, LEVELS).to(at.dtype.element_ty), mask=inside)
    if CHANNELS == 3:
        tl.store(at + out_c, _converted(green, LEVELS).to(at.dtype.element_ty), mask=inside)
        tl.store(at + 2 * out_c, _converted(blue, LEVELS).to(at.dtype.element_ty), mask=inside)


@triton.jit
def _converted(value, LEVELS: tl.constexpr):
    if LEVELS:
        value = tl.minimum(tl.maximum(value * 255.0, 0.0), 255.0)
        value = (value + _ROUNDER) - _ROUNDER
    return value


@triton.jit
def offset(line, step, WIDE: tl.constexpr):
    """Where a line begins within an image: 64 bits only where 32 are too few, as they cost time."""
    if WIDE:
        return line.to(tl.int64) * step
    else:
        return line * step.to(tl.int32)


@triton.jit
def resampled(
    image, step_c, step_y, step_x, view, fill, y, x,
    inside, CHANNELS: tl.constexpr, MODE: tl.constexpr, ANTIALIAS: tl.constexpr,
    CLAMP: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A view's pixels: columns are weighed first, then rows, as in the definition."""
    top, left = tl.load(view).to(tl.int64), tl.load(view + 1).to(tl.int64)
    image += top * step_y + left * step_x
    old_y, old_x = tl.load(view + 2).to(tl.int32), tl.load(view + 3).to(tl.int32)
    new_y, new_x = tl.load(view + 4).to(tl.int32), tl.load(view + 5).to(tl.int32)
    grid_y = _on_grid(y, tl.load(view + 6).to(tl.int32), tl.load(view + 8).to(tl.int32),
                      tl.load(view + 10))  # fmt: skip
    grid_x = _on_grid(x, tl.load(view + 7).to(tl.int32), tl.load(view + 9).to(tl.int32),
                      tl.load(view + 11))  # fmt: skip
    outside = ((grid_y < 0) | (grid_y >= new_y))[:, None] | ((grid_x < 0) | (grid_x >= new_x))
    grid_y = tl.minimum(tl.maximum(grid_y, 0), new_y - 1)
    grid_x = tl.minimum(tl.maximum(grid_x, 0), new_x - 1)
    first_y, taps_y = _first(grid_y, old_y, new_y, MODE, ANTIALIAS)
    first_x, taps_x = _first(grid_x, old_x, new_x, MODE, ANTIALIAS)
    total_x = tl.zeros_like(grid_x).to(tl.float32)
    for tap in range(taps_x):
        total_x += _weight(first_x + tap, grid_x, old_x, new_x, MODE, ANTIALIAS)
    total_y = tl.zeros_like(grid_y).to(tl.float32)
    red = tl.zeros(inside.shape, tl.float32)
    green, blue = red, red
    for tap_y in range(taps_y):
        weight_y = _weight(first_y + tap_y, grid_y, old_y, new_y, MODE, ANTIALIAS)
        total_y += weight_y
        at_y = offset(tl.minimum(tl.maximum(first_y + tap_y, 0), old_y - 1), step_y, WIDE)
        row_red = tl.zeros(inside.shape, tl.float32)
        row_green, row_blue = row_red, row_red
        for tap_x in range(taps_x):
            weight_x = _weight(first_x + tap_x, grid_x, old_x, new_x, MODE, ANTIALIAS)
            at_x = offset(tl.minimum(tl.maximum(first_x + tap_x, 0), old_x - 1), step_x, WIDE)
            one, two, three = read(image + at_y[:, None] + at_x[None, :], step_c, inside, CHANNELS)
            row_red += one * weight_x[None, :]
            row_green += two * weight_x[None, :]
            row_blue += three * weight_x[None, :]
        if CLAMP:
            most = (total_x * UNIT)[None, :]
            row_red = tl.minimum(tl.maximum(row_red, 0.0), most)
            row_green = tl.minimum(tl.maximum(row_green, 0.0), most)
            row_blue = tl.minimum(tl.maximum(row_blue, 0.0), most)
        red += row_red * weight_y[:, None]
        green += row_green * weight_y[:, None]
        blue += row_blue * weight_y[:, None]
    scale = total_y[:, None] * (total_x * UNIT)[None, :]
    red, green, blue = red / scale, green / scale, blue / scale
    if CLAMP:
        red = tl.minimum(tl.maximum(red, 0.0), 1.0)
        green = tl.minimum(tl.maximum(green, 0.0), 1.0)
        blue = tl.minimum(tl.maximum(blue, 0.0), 1.0)
    red = tl.where(outside, tl.load(fill), red)
    if CHANNELS == 3:
        green = tl.where(outside, tl.load(fill + 1), green)
        blue = tl.where(outside, tl.load(fill + 2), blue)
    return red, green, blue


@triton.jit
def _on_grid(at, start, extent, flip):
    """Which line of the grid is seen at a line of the output."""
    return start + tl.where(flip != 0, extent - 1 - at, at)


@triton.jit
def _first(grid, old, new, MODE: tl.constexpr, ANTIALIAS: tl.constexpr):
    """The first old line that a new one is made of, and of how many: `taps.taps`."""
    if MODE == "nearest":
        scale = old.to(tl.float32) / new.to(tl.float32)
        return tl.minimum((grid.to(tl.float32) * scale).to(tl.int32), old - 1), 1
    elif MODE == "nearest-exact":
        scale = old.to(tl.float32) / new.to(tl.float32)
        exact = ((grid.to(tl.float32) + 0.5) * scale - 0.5) + 0.5
        return tl.minimum(exact.to(tl.int32), old - 1), 1
    else:
        reach: tl.constexpr = 2 if MODE == "bicubic" else 1
        stretched = new
        if ANTIALIAS:
            stretched = tl.maximum(old, new)
        # Division cuts towards 0, so what is divided is kept above it.
        many = (2 * reach + 1) * stretched // (2 * new) + 1
        bound = (2 * grid + 1) * old - new - 2 * reach * stretched
        first = (bound + 2 * new * many + 2 * new - 1) // (2 * new) - many
        taps = 2 * reach * stretched // new + 2
        same = old == new
        return tl.where(same, grid, first), tl.where(same, 1, taps)


@triton.jit
def _weight(line, grid, old, new, MODE: tl.constexpr, ANTIALIAS: tl.constexpr):
    """How much an old line weighs in a new one, not yet divided by the sum of them."""
    if MODE == "nearest" or MODE == "nearest-exact":
        return tl.zeros_like(grid).to(tl.float32) + 1.0
    else:
        stretched = new
        if ANTIALIAS:
            stretched = tl.maximum(old, new)
        apart = tl.abs(2 * new * line - ((2 * grid + 1) * old - new))
        away = apart.to(tl.float32) / (2 * stretched).to(tl.float32)
        if MODE == "bilinear":
            weight = tl.maximum(1.0 - away, 0.0)
        else:
            sharp: tl.constexpr = -0.5 if ANTIALIAS else -0.75
            near = ((sharp + 2.0) * away - (sharp + 3.0)) * away * away + 1.0
            far = sharp * (((away - 5.0) * away + 8.0) * away - 4.0)
            weight = tl.where(away <= 1.0, near, tl.where(away < 2.0, far, 0.0))
        if ANTIALIAS or MODE == "bilinear":
            weight = tl.where((line >= 0) & (line < old), weight, 0.0)
        return weight
