"""The executor in Triton: each pass of a program is one kernel over the whole batch.

A pass whose contrast needs the image's mean is three: `kernels.py` says why. Registered as the
operator `streamloader::augment`, so that whoever looks at operators sees it. (`torch.compile`
leaves recipes as they are: `Recipe.run`.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from streamloader.augment import kernel_ops, kernels
from streamloader.augment.layout import Layout
from streamloader.augment.program import (
    Erase,
    Grayscale,
    Jitter,
    Normalize,
    Op,
    Pass,
    Program,
    Resample,
    Scale,
)
from streamloader.augment.ragged import Images, RaggedImages
from streamloader.augment.view import View

__all__ = ["run"]

TILE = (16, 32)
"""Rows and columns of an output that one program of the grid computes."""

FAR = 1 << 31
"""Elements from an image's first to its last from which on 32 bits are too few."""

WARPS = 4
"""Of 32 threads each, which share that work."""

MEANS_BLOCK = 1024
"""Sums of tiles that are added at a time."""


def run(program: Program, images: Images, table: Tensor, sizes: Sequence[Layout]) -> Tensor:
    """The images that come out: `reference.run`, within rounding.

    Between passes, images of different sizes lie in a buffer that is as large, in float32, as if
    each were the largest: of ragged ones that is so until the first crop or resize to one size.

    Args:
        program: What is done.
        images: (N, C, H, W), (C, H, W) for one image without a batch, or ragged; not written to.
        table: float32, (N, columns), on the images' device.
        sizes: Of the images as they come in, and after each pass.

    Returns:
        (N, C, H', W') or (C, H', W'), in the program's dtype and memory format.
    """
    _PROGRAMS.setdefault(_name(program), program)
    most = [edge for size in sizes[1:] for edge in _largest(size)]
    operator = torch.ops.streamloader.augment
    if isinstance(images, RaggedImages):
        known = (images.places, images.channels, images.reach)
        ragged: Tensor = operator(images.elements, *known, table, _name(program), most)
        return ragged
    batch = images if images.ndim == 4 else images[None]
    channels, reach = batch.shape[1], _reach(batch)
    out: Tensor = operator(batch, None, channels, reach, table, _name(program), most)
    return out if images.ndim == 4 else out[0]


def _largest(size: Layout) -> tuple[int, int]:
    return int(size.heights.max()), int(size.widths.max())


_PROGRAMS: dict[str, Program] = {}
"""An operator takes no objects, so programs go by name."""


@functools.lru_cache(maxsize=256)
def _name(program: Program) -> str:
    return repr(program)


@torch.library.triton_op("streamloader::augment", mutates_args=())
def _augment(  # noqa: PLR0913  # an operator takes tensors, numbers and words
    images: Tensor,
    places: Tensor | None,
    channels: int,
    reach: int,
    table: Tensor,
    program: str,
    sizes: Sequence[int],
) -> Tensor:
    known = _PROGRAMS[program]
    batch = _Batch(table, table if places is None else places, channels)
    source = _Source(images, known.unit, places is not None, reach >= FAR)
    size_column = kernels.ALIKE if places is None else kernels.PLACED
    for number, part in enumerate(known.passes):
        last = number == len(known.passes) - 1
        height, width = sizes[2 * number : 2 * number + 2]
        if part.resample is not None:
            size_column = part.resample.column + View._fields.index("out_height")
        out = torch.empty(
            (len(table), channels, height, width),
            dtype=known.dtype if last else torch.float32,
            memory_format=known.memory_format if last else torch.contiguous_format,
            device=images.device,
        )
        _carry_out(part, source, batch, out, size_column)
        source = _dense(out)
    return source.images


class _Batch(NamedTuple):
    """What stays the same from pass to pass; `places` is any tensor if images are of one size."""

    table: Tensor
    places: Tensor
    channels: int


class _Source(NamedTuple):
    """What a pass reads: (N, C, H, W), or `places` says where; far if 32 bits are too few."""

    images: Tensor
    unit: float
    ragged: bool
    far: bool


def _dense(images: Tensor) -> _Source:
    """What a pass has made, as the next one's source."""
    return _Source(images, 1.0, ragged=False, far=_reach(images) >= FAR)


def _carry_out(part: Pass, source: _Source, batch: _Batch, out: Tensor, size_column: int) -> None:
    if part.mean is None:
        _launch(kernels.PLAIN, part, source, batch, out, None, size_column)
        return
    raw = out
    if part.resample is not None:
        raw = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    sums = torch.empty(len(out), _tiles(out), dtype=torch.float32, device=out.device)
    _launch(kernels.SUM, part, source, batch, raw, sums, size_column)
    mean = torch.empty(len(out), dtype=torch.float32, device=out.device)
    _launched(kernels.means)[(len(out),)](
        sums, mean, batch.places, batch.table, batch.table.stride(0), sums.shape[1],
        *out.shape[2:],
        SIZE=size_column, BLOCK=MEANS_BLOCK,
    )  # fmt: skip
    if part.resample is not None:
        part, source = Pass(part.places, None, part.ops), _dense(raw)
    _launch(kernels.APPLY, part, source, batch, out, mean, size_column)


def _launch(  # noqa: PLR0913  # what the kernel needs
    step: int,
    part: Pass,
    source: _Source,
    batch: _Batch,
    out: Tensor,
    sums: Tensor | None,
    size_column: int,
) -> None:
    images, resample = source.images, part.resample or Resample(-1)
    table, places, channels = batch
    strides = (0, 0, 0, 0) if source.ragged else images.stride()
    together = channels if channels in (1, 3) else 1
    rows, columns = _tile(out)
    height, width = out.shape[2:]
    tiles = _tiles(out)
    lowered = _lowered(part)
    constants = _constants(lowered.rows, channels, str(images.device))
    _launched(kernels.carry_out)[(tiles * len(out), channels // together)](
        images, places, table, constants, out, table if sums is None else sums,
        table.stride(0), *strides, *out.stride(), height, width, tiles, channels,
        STEP=step,
        CHANNELS=together,
        RAGGED=source.ragged,
        WIDE=source.far,
        UNIT=source.unit,
        VIEW=resample.column,
        SIZE=size_column,
        MODE=resample.interpolation,
        ANTIALIAS=resample.antialias,
        CLAMP=resample.clamp,
        OPS=lowered.ops,
        STOP=-1 if part.mean is None else part.mean,
        STORE=part.resample is not None,
        LEVELS=out.dtype == torch.uint8,
        BLOCK_Y=rows,
        BLOCK_X=columns,
        num_warps=WARPS,
    )  # fmt: skip


def _reach(images: Tensor) -> int:
    """Elements from an image's first to its last."""
    pairs = zip(images.shape[1:], images.stride()[1:], strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs)


def _tile(out: Tensor) -> tuple[int, int]:
    """One program a sample where programs are interpreted, and each costs Python's time."""
    if _interpreted():
        height, width = out.shape[2:]
        return 1 << math.ceil(math.log2(height)), 1 << math.ceil(math.log2(width))
    return TILE


def _tiles(out: Tensor) -> int:
    rows, columns = _tile(out)
    return math.ceil(out.shape[2] / rows) * math.ceil(out.shape[3] / columns)


def _interpreted() -> bool:
    """Whether Triton was imported with TRITON_INTERPRET=1: kernels then run on the CPU."""
    return not isinstance(kernels.carry_out, JITFunction)


def _launched(kernel: Any) -> Any:
    """A kernel that `torch.compile` can see; interpreted ones it cannot."""
    return kernel if _interpreted() else torch.library.wrap_triton(kernel)


# -- a pass's operations as the kernel takes them: pure -------------------------------------------


@dataclass(frozen=True)
class _Lowered:
    """Operations as the kernel takes them.

    Attributes:
        ops: Of each its kind and what it needs.
        rows: Numbers, one for all channels or one for each: the fill, then what `ops` refer to.
    """

    ops: tuple[tuple[Any, ...], ...]
    rows: tuple[tuple[float, ...], ...]


@functools.lru_cache(maxsize=256)
def _lowered(part: Pass) -> _Lowered:
    rows = [part.resample.fill if part.resample else (0.0,)]
    ops = tuple(_op(op, rows) for op in part.ops)
    return _Lowered(ops, tuple(rows))


def _op(op: Op, rows: list[tuple[float, ...]]) -> tuple[Any, ...]:
    at = len(rows)
    match op:
        case Jitter():
            return (kernel_ops.JITTER, op.column, *op.active)
        case Grayscale():
            return (kernel_ops.GRAYSCALE, op.column)
        case Normalize():
            rows += [op.mean, tuple(1 / value for value in op.std)]
            return (kernel_ops.NORMALIZE, at)
        case Scale():
            return (kernel_ops.SCALE, op.factor)
        case Erase(value=None):
            return (kernel_ops.ERASE, op.column, -1)
    assert op.value is not None
    rows.append(op.value)
    return (kernel_ops.ERASE, op.column, at)


_ON_DEVICE: dict[Any, Tensor] = {}


def _constants(rows: tuple[tuple[float, ...], ...], channels: int, device: str) -> Tensor:
    """float32 (rows, channels), on the device for good: any stream may read them at any time."""
    known = _ON_DEVICE.get((rows, channels, device))
    if known is None:
        full = [row * channels if len(row) == 1 else row for row in rows]
        known = torch.tensor(full, dtype=torch.float32, device=device)
        if type(known) is Tensor:  # not one of those that only trace
            _ON_DEVICE[rows, channels, device] = known
    return known
