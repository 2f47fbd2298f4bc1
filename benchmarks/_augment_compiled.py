"""The recipes in plain torch for a whole batch at once, as one would write them for torch.compile.

They carry out the same table as the kernels. Each sample is cropped, resized and flipped by a
gather of four pixels (`sampled`), or by two matrices of weights (`weighed`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["sampled", "weighed"]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def sampled(
    images: Tensor, table: Tensor, place: Mapping[str, int], edge: int, *, jitters: bool
) -> Tensor:
    """Four pixels for each new one, whatever the crop's size: no antialias.

    Args:
        images: uint8 (N, 3, H, W).
        table: A plan with one pass.
        place: Its columns by name.
        edge: Of what comes out.
        jitters: Whether colours are changed.
    """
    y = _middles(table, place, edge, _DOWN)
    x = _middles(table, place, edge, _ACROSS)
    size = images.shape[-2:]
    # In -1 to 1, from edge to edge, as grid_sample has it.
    grid_y = ((2 * y + 1) / size[0] - 1)[:, :, None].expand(-1, edge, edge)
    grid_x = ((2 * x + 1) / size[1] - 1)[:, None, :].expand(-1, edge, edge)
    grid = torch.stack((grid_x, grid_y), dim=-1)
    values = functional.grid_sample(
        images.float() / 255, grid, padding_mode="border", align_corners=False
    )
    return _finished(values, table, place, jitters=jitters)


def weighed(
    images: Tensor, table: Tensor, place: Mapping[str, int], edge: int, *, jitters: bool
) -> Tensor:
    """All pixels of an image, times how much each weighs, along one axis after the other.

    Args:
        images: uint8 (N, 3, H, W).
        table: A plan with one pass.
        place: Its columns by name.
        edge: Of what comes out.
        jitters: Whether colours are changed.
    """
    down = _weights(table, place, edge, images.shape[-2], _DOWN).to(torch.bfloat16)
    across = _weights(table, place, edge, images.shape[-1], _ACROSS).to(torch.bfloat16)
    lines = images.to(torch.bfloat16) @ across[:, None].mT  # (N, 3, H, edge)
    values = (down[:, None] @ lines).float() / 255
    return _finished(values, table, place, jitters=jitters)


_DOWN = ("top", "height", "grid_height", "window_top", "flip_vertical")
_ACROSS = ("left", "width", "grid_width", "window_left", "flip_horizontal")


def _grid(table: Tensor, cells: tuple[int, ...], edge: int) -> Tensor:
    """(N, edge): which line of the resized crop is seen at each line of the output."""
    start, flip = (table[:, cell, None] for cell in cells[3:])
    at = torch.arange(edge, device=table.device, dtype=torch.float32)
    return start + torch.where(flip != 0, edge - 1 - at, at)


def _middles(table: Tensor, place: Mapping[str, int], edge: int, names: tuple[str, ...]) -> Tensor:
    """(N, edge): where in the image the middle of each new line is; within its crop."""
    cells = tuple(place[name] for name in names)
    first, old, new = (table[:, cell, None] for cell in cells[:3])
    middle = (_grid(table, cells, edge) + 0.5) * (old / new) - 0.5
    return first + torch.minimum(middle.clamp(min=0), old - 1)


def _weights(
    table: Tensor, place: Mapping[str, int], edge: int, size: int, names: tuple[str, ...]
) -> Tensor:
    """(N, edge, size): how much each old line weighs in each new one."""
    cells = tuple(place[name] for name in names)
    first, old, new = (table[:, cell, None, None] for cell in cells[:3])
    middle = (_grid(table, cells, edge)[:, :, None] + 0.5) * (old / new) - 0.5
    line = torch.arange(size, device=table.device) - first
    away = (line - middle).abs() / (old / new).clamp(min=1)
    weight = torch.where((line >= 0) & (line < old), (1 - away).clamp(min=0), 0.0)
    return weight / weight.sum(-1, keepdim=True)


def _finished(values: Tensor, table: Tensor, place: Mapping[str, int], *, jitters: bool) -> Tensor:
    if jitters:
        values = _jittered(values, table, place)
    mean = values.new_tensor(MEAN)[:, None, None]
    std = values.new_tensor(STD)[:, None, None]
    out = (values - mean) / std
    return out.to(torch.bfloat16, memory_format=torch.channels_last)


def _jittered(values: Tensor, table: Tensor, place: Mapping[str, int]) -> Tensor:
    """Four steps in the order of each sample: at each turn all four, of which one is taken."""
    turns = ("first", "second", "third", "fourth")
    names = ("brightness", "contrast", "saturation", "hue")
    factors = [table[:, place[name], None, None, None] for name in names]
    for turn in turns:
        step = table[:, place[turn], None, None, None]
        grey = _grey(values)
        mean = grey.mean((1, 2, 3), keepdim=True)
        bright = (values * factors[0]).clamp(0, 1)
        contrast = torch.lerp(mean, values, factors[1]).clamp(0, 1)
        saturated = torch.lerp(grey, values, factors[2]).clamp(0, 1)
        turned = _turned(values, factors[3][:, 0])
        done = torch.where(step == 2, saturated, turned)
        done = torch.where(step == 1, contrast, done)
        values = torch.where(step == 0, bright, done)
    return values


def _grey(values: Tensor) -> Tensor:
    red, green, blue = values.unbind(1)
    grey: Tensor = 0.2989 * red + 0.587 * green + 0.114 * blue
    return grey[:, None]


def _turned(values: Tensor, turn: Tensor) -> Tensor:
    red, green, blue = values.unbind(1)
    value = values.amax(1)
    chroma = value - values.amin(1)
    apart = torch.where(chroma == 0, 1.0, chroma)
    of_green, of_blue = 2 + (blue - red) / apart, 4 + (red - green) / apart
    of_red = (green - blue) / apart
    sixths = torch.where(value == red, of_red, torch.where(value == green, of_green, of_blue))
    parts = []
    for n in (5, 3, 1):
        k = (n + sixths + 6 * turn).remainder(6)
        parts.append(value - chroma * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(parts, 1)
