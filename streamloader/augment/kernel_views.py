"""Triton: pixels in, weighed as `taps.py` says, and out.

Where pixels lie is computed in whole numbers, so a weight is exact to float32's last bits however
large the image: with `old` pixels becoming `new`, all is in units of 1 / (2 new) of an old pixel.

The innermost loop is what takes the time, some ten times a pixel and channel: of it a load, a
multiplication with addition, one instruction that makes a float of a byte, and two of address.

NOTE [Threads side by side]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
32 threads should take 32 neighbours in a row, whose bytes a GPU reads at once. Where Triton knows
nothing of addresses, 3.8 does that, and 3.6 gives them neighbours in a column. So it is told that
two in a row are contiguous, which decides it, and aligned to nothing, so that it reads and writes
each by itself, since contiguous they need not be.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["offset", "read", "resampled", "write"]

_ROUNDER = tl.constexpr(12582912.0)
"""1.5 * 2**23: a float32 near it is a whole number, so adding it rounds, half to even."""

_ONE = tl.constexpr(0x3F800000)
"""The bits of 1.0."""


@triton.jit
def read(image, step_c, at, CHANNELS: tl.constexpr):
    """Pixels as they are stored; three channels, or one three times.

    Nothing is masked, which would cost two instructions a value: `at` must lie within the image.
    NOTE [Threads side by side]
    """
    here = tl.multiple_of(tl.max_contiguous(image + at, [1, 2]), [1, 1])
    red = tl.load(here)
    green, blue = red, red
    if CHANNELS == 3:
        here = tl.multiple_of(tl.max_contiguous((image + step_c) + at, [1, 2]), [1, 1])
        green = tl.load(here)
        here = tl.multiple_of(tl.max_contiguous((image + 2 * step_c) + at, [1, 2]), [1, 1])
        blue = tl.load(here)
    return red, green, blue


@triton.jit
def _lifted(value):
    """Float32: a level as 1 + level / 256, put together from its bits in one instruction.

    A GPU converts eight bits to float at an eighth of the speed at which it adds.
    """
    if value.dtype == tl.uint8:
        return ((value.to(tl.int32) << 15) | _ONE).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def write(image, at, red, green, blue, inside, out_c,
           CHANNELS: tl.constexpr, LEVELS: tl.constexpr):  # fmt: skip
    """Pixels in the dtype of where they go; to 0..255, rounded, where that is uint8.

    NOTE [Threads side by side]
    """
    to = image.dtype.element_ty
    here = tl.multiple_of(tl.max_contiguous(image + at, [1, 2]), [1, 1])
    tl.store(here, _converted(red, LEVELS).to(to), mask=inside)
    if CHANNELS == 3:  # pragma: no branch  # an interpreted function's end is not seen
        here = tl.multiple_of(tl.max_contiguous((image + out_c) + at, [1, 2]), [1, 1])
        tl.store(here, _converted(green, LEVELS).to(to), mask=inside)
        here = tl.multiple_of(tl.max_contiguous((image + 2 * out_c) + at, [1, 2]), [1, 1])
        tl.store(here, _converted(blue, LEVELS).to(to), mask=inside)


@triton.jit
def _converted(value, LEVELS: tl.constexpr):
    if LEVELS:
        value = tl.minimum(tl.maximum(value * 255.0, 0.0), 255.0)
        value = (value + _ROUNDER) - _ROUNDER
    return value


@triton.jit
def offset(line, step, WIDE: tl.constexpr):
    """Where a line begins within an image: 64 bits only where 32 are too few, as they cost time.

    Unsigned, so that a load takes it as it is, on top of a base that all threads share.
    """
    if WIDE:
        return line.to(tl.int64) * step
    else:
        return line.to(tl.uint32) * step.to(tl.uint32)


@triton.jit
def resampled(
    image, step_c, step_y, step_x, view, fill, y, x,
    inside, CHANNELS: tl.constexpr, MODE: tl.constexpr, ANTIALIAS: tl.constexpr,
    CLAMP: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A view's pixels: columns are weighed first, then rows, as in the definition."""
    top, left = tl.load(view).to(tl.int32), tl.load(view + 1).to(tl.int32)
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
    near_y, near_x = _nearness(old_y, new_y, ANTIALIAS), _nearness(old_x, new_x, ANTIALIAS)
    total_x = tl.zeros_like(grid_x).to(tl.float32)
    for tap in range(taps_x):
        _, weight_x = _tap(first_x + tap, grid_x, old_x, new_x, near_x, MODE, ANTIALIAS)
        total_x += weight_x
    # Levels are lifted by 1: a row begins with what that comes to, so that it cancels out.
    lifted: tl.constexpr = image.dtype.element_ty == tl.uint8
    unit: tl.constexpr = UNIT / 256.0 if lifted else UNIT
    begin = tl.zeros(inside.shape, tl.float32)
    if lifted:
        begin -= total_x[None, :]
    total_y = tl.zeros_like(grid_y).to(tl.float32)
    red = tl.zeros(inside.shape, tl.float32)
    green, blue = red, red
    for tap_y in range(taps_y):
        line_y, weight_y = _tap(first_y + tap_y, grid_y, old_y, new_y, near_y, MODE, ANTIALIAS)
        total_y += weight_y
        at_y = offset(top + line_y, step_y, WIDE)
        row_red, row_green, row_blue = begin, begin, begin
        for tap_x in range(taps_x):
            line_x, weight_x = _tap(first_x + tap_x, grid_x, old_x, new_x, near_x, MODE, ANTIALIAS)
            at = at_y[:, None] + offset(left + line_x, step_x, WIDE)[None, :]
            one, two, three = read(image, step_c, at, CHANNELS)
            row_red += _lifted(one) * weight_x[None, :]
            row_green += _lifted(two) * weight_x[None, :]
            row_blue += _lifted(three) * weight_x[None, :]
        if CLAMP:
            most = (total_x * unit)[None, :]
            row_red = tl.minimum(tl.maximum(row_red, 0.0), most)
            row_green = tl.minimum(tl.maximum(row_green, 0.0), most)
            row_blue = tl.minimum(tl.maximum(row_blue, 0.0), most)
        red += row_red * weight_y[:, None]
        green += row_green * weight_y[:, None]
        blue += row_blue * weight_y[:, None]
    scale = (1.0 / total_y)[:, None] * (1.0 / (total_x * unit))[None, :]
    red, green, blue = red * scale, green * scale, blue * scale
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
    if MODE == "nearest" or MODE == "nearest-exact":
        middle: tl.constexpr = 0.5 if MODE == "nearest-exact" else 0.0
        # Rounded as the definition rounds: `/` would be approximate, and another pixel taken.
        scale = tl.div_rn(old.to(tl.float32), new.to(tl.float32))
        return tl.minimum(((grid.to(tl.float32) + middle) * scale).to(tl.int32), old - 1), 1
    else:
        reach: tl.constexpr = 2 if MODE == "bicubic" else 1
        stretched = new
        if ANTIALIAS:
            stretched = tl.maximum(old, new)
        # The filter's edge is at `edge / (2 new)`. A line on it weighs nothing: the first is beyond
        # it, and there are not more than the filter is wide, rounded up. Floats say which it is,
        # give or take one, and whole numbers what is left: they may wrap around meanwhile, what is
        # left cannot.
        edge = (2 * grid + 1) * old - new - 2 * reach * stretched
        ratio, width = old.to(tl.float32) / new, (reach * stretched).to(tl.float32) / new
        first = tl.floor((grid.to(tl.float32) + 0.5) * ratio - (0.5 + width)).to(tl.int32)
        left = edge - 2 * new * first
        first += tl.where(left < 0, 0, tl.where(left < 2 * new, 1, 2))
        taps = (2 * reach * stretched + new - 1) // new
        same = old == new
        return tl.where(same, grid, first), tl.where(same, 1, taps)


@triton.jit
def _nearness(old, new, ANTIALIAS: tl.constexpr):
    """What a distance is multiplied by: one over the filter's width, in its units."""
    stretched = new
    if ANTIALIAS:
        stretched = tl.maximum(old, new)
    return 1.0 / (2 * stretched).to(tl.float32)


@triton.jit
def _tap(line, grid, old, new, nearness, MODE: tl.constexpr, ANTIALIAS: tl.constexpr):
    """An old line, or the nearest that there is, and its weight in a new one, not yet divided."""
    seen = tl.minimum(tl.maximum(line, 0), old - 1)
    if MODE == "nearest" or MODE == "nearest-exact":
        return seen, tl.zeros_like(grid).to(tl.float32) + 1.0
    else:
        apart = tl.abs(2 * new * line - ((2 * grid + 1) * old - new))
        away = apart.to(tl.float32) * nearness
        if MODE == "bilinear":
            weight = tl.maximum(1.0 - away, 0.0)
        else:
            sharp: tl.constexpr = -0.5 if ANTIALIAS else -0.75
            near = ((sharp + 2.0) * away - (sharp + 3.0)) * away * away + 1.0
            far = sharp * (((away - 5.0) * away + 8.0) * away - 4.0)
            weight = tl.where(away <= 1.0, near, tl.where(away < 2.0, far, 0.0))
        if ANTIALIAS or MODE == "bilinear":
            weight = tl.where(seen == line, weight, 0.0)
        return seen, weight
