"""Triton: what is done with each pixel, as in `reference.py`."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["ERASE", "GRAYSCALE", "JITTER", "NORMALIZE", "SCALE", "SUM_", "done", "grey_of"]

JITTER, GRAYSCALE, NORMALIZE, SCALE, ERASE = 0, 1, 2, 3, 4
SUM = 1
"""The step of `kernels.carry_out` that sums what a mean is of."""

SUM_ = tl.constexpr(SUM)
_JITTER, _GRAYSCALE = tl.constexpr(JITTER), tl.constexpr(GRAYSCALE)
_NORMALIZE, _SCALE = tl.constexpr(NORMALIZE), tl.constexpr(SCALE)


@triton.jit
def done(
    red, green, blue, row, constants, mean, y, x, c, high, wide, channels,
    STEP: tl.constexpr, CHANNELS: tl.constexpr, OPS: tl.constexpr, STOP: tl.constexpr,
):  # fmt: skip
    """All operations in order; those before the mean is needed where `STEP` is to sum it."""
    for at in tl.static_range(len(OPS)):
        if STEP != SUM_ or at <= STOP:
            if OPS[at][0] == _JITTER:
                red, green, blue = _jittered(
                    red, green, blue, row + OPS[at][1], mean,
                    OPS[at][2], OPS[at][3], OPS[at][4], OPS[at][5], CHANNELS,
                    STEP == SUM_ and at == STOP,
                )  # fmt: skip
            elif OPS[at][0] == _GRAYSCALE:
                if CHANNELS == 3:
                    grey = tl.load(row + OPS[at][1]) != 0
                    luma = grey_of(red, green, blue, CHANNELS)
                    red = tl.where(grey, luma, red)
                    green = tl.where(grey, luma, green)
                    blue = tl.where(grey, luma, blue)
            elif OPS[at][0] == _NORMALIZE:
                mine = constants + OPS[at][1] * channels
                red = (red - tl.load(mine)) * tl.load(mine + channels)
                if CHANNELS == 3:
                    green = (green - tl.load(mine + 1)) * tl.load(mine + channels + 1)
                    blue = (blue - tl.load(mine + 2)) * tl.load(mine + channels + 2)
            elif OPS[at][0] == _SCALE:
                red, green, blue = red * OPS[at][1], green * OPS[at][1], blue * OPS[at][1]
            else:
                red, green, blue = _erased(
                    red, green, blue, row + OPS[at][1], constants + OPS[at][2] * channels,
                    y, x, c, high, wide, CHANNELS, OPS[at][2] < 0,
                )  # fmt: skip
    return red, green, blue


@triton.jit
def grey_of(red, green, blue, CHANNELS: tl.constexpr):
    """Luma; of one channel that channel."""
    if CHANNELS == 3:
        return 0.2989 * red + 0.587 * green + 0.114 * blue
    else:
        return red


@triton.jit
def _blend(value, other, factor):
    return tl.minimum(tl.maximum(factor * value + (1.0 - factor) * other, 0.0), 1.0)


@triton.jit
def _jittered(
    red, green, blue, cells, mean, BRIGHTNESS: tl.constexpr,
    CONTRAST: tl.constexpr, SATURATION: tl.constexpr, HUE: tl.constexpr, CHANNELS: tl.constexpr,
    ONLY_BEFORE: tl.constexpr,
):  # fmt: skip
    """All four steps in the sample's order, or only those before contrast."""
    going = 1
    for turn in tl.static_range(4):
        step = tl.load(cells + 4 + turn).to(tl.int32)
        if ONLY_BEFORE:
            going = tl.where(step == 1, 0, going)
            step = tl.where(going == 1, step, 4)
        if BRIGHTNESS and step == 0:
            factor = tl.load(cells)
            red = tl.minimum(tl.maximum(red * factor, 0.0), 1.0)
            green = tl.minimum(tl.maximum(green * factor, 0.0), 1.0)
            blue = tl.minimum(tl.maximum(blue * factor, 0.0), 1.0)
        if CONTRAST and step == 1:
            factor = tl.load(cells + 1)
            red = _blend(red, mean, factor)
            green = _blend(green, mean, factor)
            blue = _blend(blue, mean, factor)
        if CHANNELS == 3:
            if SATURATION and step == 2:
                factor = tl.load(cells + 2)
                grey = grey_of(red, green, blue, CHANNELS)
                red = _blend(red, grey, factor)
                green = _blend(green, grey, factor)
                blue = _blend(blue, grey, factor)
            if HUE and step == 3:
                red, green, blue = _turned(red, green, blue, tl.load(cells + 3))
    return red, green, blue


@triton.jit
def _turned(red, green, blue, turn):
    """Another hue: the formulas of the definition."""
    value = tl.maximum(red, tl.maximum(green, blue))
    chroma = value - tl.minimum(red, tl.minimum(green, blue))
    apart = tl.where(chroma == 0.0, 1.0, chroma)
    sixths = tl.where(
        value == red,
        (green - blue) / apart,
        tl.where(value == green, 2.0 + (blue - red) / apart, 4.0 + (red - green) / apart),
    )
    sixths = sixths + 6.0 * turn
    return (
        _part(value, chroma, sixths + 5.0),
        _part(value, chroma, sixths + 3.0),
        _part(value, chroma, sixths + 1.0),
    )


@triton.jit
def _part(value, chroma, k):
    k = k - 6.0 * tl.floor(k / 6.0)
    return value - chroma * tl.minimum(tl.maximum(tl.minimum(k, 4.0 - k), 0.0), 1.0)


@triton.jit
def _erased(
    red, green, blue, cells, value, y, x, c, high,
    wide, CHANNELS: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    top, left = tl.load(cells), tl.load(cells + 1)
    below, beyond = top + tl.load(cells + 2), left + tl.load(cells + 3)
    rows, lines = (y >= top) & (y < below), (x >= left) & (x < beyond)
    within = rows[:, None] & lines[None, :]
    if NOISE:
        low, upper = tl.load(cells + 4).to(tl.int64), tl.load(cells + 5).to(tl.int64)
        seed = low | (upper << 32)
        place = (c * high + y)[:, None] * wide + x[None, :]
        red = tl.where(within, tl.randn(seed, place), red)
        if CHANNELS == 3:
            green = tl.where(within, tl.randn(seed, place + high * wide), green)
            blue = tl.where(within, tl.randn(seed, place + 2 * high * wide), blue)
    else:
        red = tl.where(within, tl.load(value), red)
        if CHANNELS == 3:
            green = tl.where(within, tl.load(value + 1), green)
            blue = tl.where(within, tl.load(value + 2), blue)
    return red, green, blue
