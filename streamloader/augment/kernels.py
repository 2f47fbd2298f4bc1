"""The program's passes in Triton: one kernel, made for each pass by what is constant in it.

A program of the grid computes a tile of one sample's output: it weighs the source's pixels
(`kernel_views.py`), does the operations on what comes out (`kernel_ops.py`), and writes it once.
With contrast, which is relative to the image's mean, there are three steps: SUM also adds up the
grey of each tile, `means` adds up the tiles, always in the same order, and APPLY has the mean.
"""

from __future__ import annotations

import triton
import triton.language as tl

from streamloader.augment.kernel_ops import SUM, SUM_, done, grey_of
from streamloader.augment.kernel_views import offset, read, resampled, write

__all__ = ["ALIKE", "APPLY", "PLACED", "PLAIN", "SUM", "carry_out", "means"]

PLAIN, APPLY = 0, 2
APPLY_ = tl.constexpr(APPLY)

ALIKE, PLACED = -1, -2
"""In place of the column of sizes: outputs are of one size, or of the sizes that `places` says."""

PLACED_ = tl.constexpr(PLACED)
_PLACE = tl.constexpr(6)
"""Columns of `places`."""


@triton.jit
def carry_out(
    source,
    places,
    table,
    constants,
    out,
    sums,
    columns,
    stride_n,
    stride_c,
    stride_y,
    stride_x,
    out_n,
    out_c,
    out_y,
    out_x,
    height,
    width,
    tiles,
    channels,
    STEP: tl.constexpr,
    CHANNELS: tl.constexpr,
    RAGGED: tl.constexpr,
    WIDE: tl.constexpr,
    UNIT: tl.constexpr,
    VIEW: tl.constexpr,
    SIZE: tl.constexpr,
    MODE: tl.constexpr,
    ANTIALIAS: tl.constexpr,
    CLAMP: tl.constexpr,
    OPS: tl.constexpr,
    STOP: tl.constexpr,
    STORE: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    """One pass, or one of its steps, over a batch.

    Args:
        source: The images: (N, C, H, W) by its strides, or ragged.
        places: Ragged: int64 (N, 6), of each image its offset, its strides of c, y and x, its
            height and width. Read where `RAGGED` or `SIZE` says so.
        table: float32 (N, columns).
        constants: float32 (rows, channels), which `VIEW`'s fill (row 0) and `OPS` are of.
        out: Written.
        sums: SUM: float32 (N, tiles), written. APPLY: float32 (N,), the means.
        columns: Of the table.
        stride_n: Of the source, in elements, as the next three.
        stride_c: Likewise.
        stride_y: Likewise.
        stride_x: Likewise.
        out_n: Of the output, as the next three.
        out_c: Likewise.
        out_y: Likewise.
        out_x: Likewise.
        height: Of the largest output.
        width: Of the widest.
        tiles: Tiles of the largest output.
        channels: Of the images.
        STEP: PLAIN, SUM or APPLY.
        CHANNELS: That a program has in hand: 3, or 1 where colours do not matter.
        RAGGED: Whether `places` says where images lie.
        WIDE: Whether some image has 2**31 elements or more from its first to its last.
        UNIT: What is 1.0 in the source.
        VIEW: The view's first column; -1 for none.
        SIZE: The column of the output's height, its width's next to it; or ALIKE, or PLACED.
        MODE: The interpolation.
        ANTIALIAS: Likewise.
        CLAMP: Likewise.
        OPS: Of each operation its kind and what it needs.
        STOP: SUM: the operation that needs the mean.
        STORE: Whether `out` is written at all.
        LEVELS: Whether it is in 0..255, whole.
        BLOCK_Y: Rows of a tile.
        BLOCK_X: Columns of a tile.
    """
    n, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    c = tl.program_id(1).to(tl.int64)
    row = table + n * columns
    high, wide = _size(places, row, n, height, width, SIZE)
    across = tl.cdiv(width, BLOCK_X)
    y = (tile // across) * BLOCK_Y + tl.arange(0, BLOCK_Y)
    x = (tile % across) * BLOCK_X + tl.arange(0, BLOCK_X)
    inside = (y < high)[:, None] & (x < wide)[None, :]

    image = source + n * stride_n
    step_c, step_y, step_x = stride_c, stride_y, stride_x
    if RAGGED:
        place = places + n * _PLACE
        image = source + tl.load(place)
        step_c = tl.load(place + 1)
        step_y = tl.load(place + 2)
        step_x = tl.load(place + 3)
    step_c = step_c.to(tl.int64)  # channels may lie far apart, rows only where it is WIDE
    image += c * step_c
    if VIEW >= 0:
        red, green, blue = resampled(
            image, step_c, step_y, step_x, row + VIEW, constants + c, y, x, inside,
            CHANNELS, MODE, ANTIALIAS, CLAMP, UNIT, WIDE,
        )  # fmt: skip
    else:
        seen_y, seen_x = tl.minimum(y, high - 1), tl.minimum(x, wide - 1)
        at = offset(seen_y, step_y, WIDE)[:, None] + offset(seen_x, step_x, WIDE)[None, :]
        red, green, blue = read(image, step_c, at, CHANNELS)
        red, green = red.to(tl.float32) / UNIT, green.to(tl.float32) / UNIT
        blue = blue.to(tl.float32) / UNIT

    apart = out_c  # assigned, it is a tensor also where Triton made a constant of it
    apart = apart.to(tl.int64)
    written = out + n * out_n + c * apart
    here = y.to(tl.int64)[:, None] * out_y + x[None, :] * out_x
    if STEP == SUM_ and STORE:
        write(written, here, red, green, blue, inside, apart, CHANNELS, False)
    mean = 0.0
    if STEP == APPLY_:
        mean = tl.load(sums + n)
    red, green, blue = done(
        red, green, blue, row, constants + c, mean, y, x, c, high, wide, channels,
        STEP, CHANNELS, OPS, STOP,
    )  # fmt: skip
    if STEP == SUM_:
        grey = tl.where(inside, grey_of(red, green, blue, CHANNELS), 0.0)
        tl.store(sums + n * tiles + tile, tl.sum(grey))
    else:
        write(written, here, red, green, blue, inside, apart, CHANNELS, LEVELS)


@triton.jit
def means(sums, out, places, table, columns, tiles, height, width,
          SIZE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Each sample's mean grey, from the sums of its tiles, in their order."""
    n = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, tiles, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(sums + n * tiles + at, mask=at < tiles, other=0.0)
    high, wide = _size(places, table + n * columns, n, height, width, SIZE)
    high, wide = high.to(tl.float32), wide.to(tl.float32)
    tl.store(out + n, tl.sum(total) / (high * wide))


@triton.jit
def _size(places, row, n, height, width, SIZE: tl.constexpr):
    """A sample's output: its height and width."""
    if SIZE == PLACED_:
        high = tl.load(places + n * _PLACE + 4).to(tl.int32)
        wide = tl.load(places + n * _PLACE + 5).to(tl.int32)
        return high, wide
    elif SIZE >= 0:
        return tl.load(row + SIZE).to(tl.int32), tl.load(row + SIZE + 1).to(tl.int32)
    else:
        return height, width
