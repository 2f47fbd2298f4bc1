"""The program's meaning: plain torch, one sample after the other, on every device.

Clear rather than fast. What an executor makes of a program and a table is right if it is this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from streamloader.augment.noise import normal
from streamloader.augment.program import (
    LEVELS,
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
from streamloader.augment.ragged import Images
from streamloader.augment.taps import taps
from streamloader.augment.view import View

__all__ = ["run"]

Row: TypeAlias = Sequence[float]
"""A sample's row of the table."""


def run(
    program: Program, images: Images, table: Tensor, compute: torch.dtype = torch.float32
) -> Tensor:
    """The images that come out.

    Args:
        program: What is done.
        images: (N, C, H, W), (C, H, W) for one image without a batch, or ragged; of the dtype that
            the program is for. Not written to.
        table: float32, (N, columns), on any device: what was decided.
        compute: What is computed in, for those who want to know how much float32 loses.

    Returns:
        (N, C, H', W') or (C, H', W'), in the program's dtype and memory format.
    """
    alone = isinstance(images, Tensor) and images.ndim == 3
    batch: Iterable[Any] = [images] if alone else images
    rows = table.tolist()
    samples = [sample(program, *one, compute) for one in zip(batch, rows, strict=True)]
    out = convert(torch.stack(samples), program.dtype)
    out = out.contiguous(memory_format=program.memory_format)
    return out[0] if alone else out


def sample(program: Program, image: Tensor, row: Row, compute: torch.dtype) -> Tensor:
    """One image, (C, H, W), through all passes: (C, H', W') in `compute`."""
    values = image.to(compute) / program.unit
    for part in program.passes:
        values = _pass(part, values, row)
    return values


def convert(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The one conversion, at the end: to uint8 to the nearest, else as torch rounds."""
    if dtype == torch.uint8:
        values = (values * LEVELS).round().clamp(0, LEVELS)
    return values.to(dtype)


def _pass(part: Pass, image: Tensor, row: Row) -> Tensor:
    if part.resample is not None:
        image = resample(part.resample, image, row)
    for op in part.ops:
        image = _DO[type(op)](op, image, row)
    return image


def resample(spec: Resample, image: Tensor, row: Row) -> Tensor:
    """The view that the row says: the box resized, the window of it, flipped.

    Along one axis after the other, columns first, and only what the window shows: an image of 1 by
    8,000 pixels whose shorter edge is resized would be huge, and its middle is not.
    """
    cells = row[spec.column : spec.column + spec.width]
    view: dict[str, int] = dict(zip(View._fields, map(int, cells), strict=True))
    top, left = view["top"], view["left"]
    out = image[:, top : top + view["height"], left : left + view["width"]]
    for axis, extent, side, start in _AXES:
        seen = (view[f"window_{start}"], view[f"out_{extent}"])
        out = _resized(spec, out, axis, view[f"grid_{extent}"], seen)
        out = out.flip(axis) if view[f"flip_{side}"] else out
    outside = _outside(view)
    if not outside.any():
        return out
    return torch.where(outside.to(out.device), _channels(spec.fill, out), out)


_AXES = ((-1, "width", "horizontal", "left"), (-2, "height", "vertical", "top"))


def _resized(spec: Resample, box: Tensor, axis: int, new: int, window: tuple[int, int]) -> Tensor:
    """Resized along an axis, as far as the window shows; beyond the grid its edge is repeated."""
    start, extent = window
    seen = torch.arange(start, start + extent).clamp(0, new - 1)
    old = box.shape[axis]
    if old == new:
        return box.index_select(axis, seen.to(box.device))
    lines = taps(seen, old, new, spec.interpolation, antialias=spec.antialias)
    shape = [1, 1, 1]
    shape[axis] = extent
    out = torch.zeros((), dtype=box.dtype, device=box.device)
    for pixels, weights in zip(lines.pixels.T, lines.weights.T, strict=True):
        share = weights.to(box.dtype).to(box.device).view(shape)
        out = out + box.index_select(axis, pixels.to(box.device)) * share
    return out.clamp(0, 1) if spec.clamp else out


def _outside(view: Mapping[str, int]) -> Tensor:
    """Which pixels of the output are not of the grid: bool, (height, width)."""
    lines = []
    for _, extent, side, start in _AXES:
        places = torch.arange(view[f"out_{extent}"]) + view[f"window_{start}"]
        beyond = (places < 0) | (places >= view[f"grid_{extent}"])
        lines.append(beyond.flip(0) if view[f"flip_{side}"] else beyond)
    across, down = lines
    return down[:, None] | across


def _channels(values: Sequence[float], image: Tensor) -> Tensor:
    """One number, or one per channel, as (1 or C, 1, 1)."""
    return torch.tensor(values, dtype=image.dtype, device=image.device)[:, None, None]


def _grey(image: Tensor) -> Tensor:
    """Luma, (1, H, W), with torchvision's weights; of one channel that channel."""
    if len(image) == 1:
        return image
    red, green, blue = image
    grey: Tensor = 0.2989 * red + 0.587 * green + 0.114 * blue
    return grey[None]


def _blend(image: Tensor, other: Tensor, factor: float) -> Tensor:
    """From `other` (0) to `image` (1) and beyond."""
    return (factor * image + (1 - factor) * other).clamp(0, 1)


def _brightness(image: Tensor, factor: float) -> Tensor:
    return (image * factor).clamp(0, 1)


def _contrast(image: Tensor, factor: float) -> Tensor:
    return _blend(image, _grey(image).mean(), factor)


def _saturation(image: Tensor, factor: float) -> Tensor:
    return image if len(image) == 1 else _blend(image, _grey(image), factor)


def _hue(image: Tensor, turn: float) -> Tensor:
    """To hue, saturation and value, and back with another hue.

    Smith, "Color gamut transform pairs" (1978); back by the formula that needs no cases:
    value - chroma * clamp(min(k, 4 - k), 0, 1), with k = (n + 6 hue) mod 6 for n = 5, 3, 1.
    """
    if len(image) == 1:
        return image
    red, green, blue = image
    value, least = image.amax(0), image.amin(0)
    chroma = value - least
    apart = torch.where(chroma == 0, 1.0, chroma)  # of greys the hue does not matter
    of_green, of_blue = 2 + (blue - red) / apart, 4 + (red - green) / apart
    sixths = torch.where(
        value == red,
        (green - blue) / apart,
        torch.where(value == green, of_green, of_blue),
    )
    parts = []
    for n in (5, 3, 1):
        k = (n + sixths + 6 * turn).remainder(6)
        parts.append(value - chroma * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(parts)


_STEPS = (_brightness, _contrast, _saturation, _hue)


def _jitter(op: Jitter, image: Tensor, row: Row) -> Tensor:
    factors, order = row[op.column : op.column + 4], row[op.column + 4 : op.column + 8]
    for step in map(int, order):
        if op.active[step]:
            image = _STEPS[step](image, factors[step])
    return image


def _grayscale(op: Grayscale, image: Tensor, row: Row) -> Tensor:
    return _grey(image).expand_as(image) if row[op.column] else image


def _normalize(op: Normalize, image: Tensor, _: Row) -> Tensor:
    return (image - _channels(op.mean, image)) / _channels(op.std, image)


def _scale(op: Scale, image: Tensor, _: Row) -> Tensor:
    return image * op.factor


def _erase(op: Erase, image: Tensor, row: Row) -> Tensor:
    top, left, height, width = map(int, row[op.column : op.column + 4])
    if not height or not width:
        return image
    if op.value is None:
        key = (int(row[op.column + 4]), int(row[op.column + 5]))
        places = torch.arange(image.numel(), device=image.device).view(image.shape)
        written = normal(key, places[:, top : top + height, left : left + width]).to(image.dtype)
    else:
        written = _channels(op.value, image)
    out = image.clone()
    out[:, top : top + height, left : left + width] = written
    return out


_DO: dict[type[Op], Callable[..., Tensor]] = {
    Jitter: _jitter,
    Grayscale: _grayscale,
    Normalize: _normalize,
    Scale: _scale,
    Erase: _erase,
}
