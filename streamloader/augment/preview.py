"""A batch's images side by side, as one picture: to see what training sees."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from streamloader import tree
from streamloader.augment import batches, checks
from streamloader.augment.program import LEVELS, per_channel

__all__ = ["preview"]

GAP = 2
"""White pixels between two images."""


def preview(
    batch: Any,
    *,
    count: int = 64,
    columns: int | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Tensor:
    """Draws a grid of a batch's images, in order, row by row.

        augment.preview(batch, mean=mean, std=std, path="batch.png")      # what a loader yields
        augment.preview(recipe(image.expand(16, -1, -1, -1)))   # one (C, H, W), drawn for 16 times

    Images are shown as they are if they are uint8, or floats within 0 to 1. Other floats, which
    something has normalised, are brought back by `mean` and `std`; without these each channel is
    stretched, from its least value in the grid to its greatest, and colours are but roughly right.

    Args:
        batch: On any device: images, or a container whose first tensor of three or more dimensions
            they are: (N, C, H, W) or (C, H, W), of 3 channels or 1, uint8 or floating point, in any
            memory format. It waits for them, copies those that it shows, and writes to none.
        count: How many to show at most: the first ones.
        columns: How many side by side; None is as many as make rows and columns alike.
        mean: What `Normalize` has subtracted, one number or one per channel; goes with `std`. Not
            for uint8, which nothing has normalised.
        std: What it has divided by.
        path: A file to write, by Pillow, in the format of its ending: `.png` loses nothing.

    Returns:
        The picture: uint8, (height, width, 3), on the CPU. What was not finite is black in it.

    Raises:
        ImportError: `path` is given, and Pillow is not installed.
        TypeError: There are no images, or they are of another dtype; an argument is of the wrong
            kind.
        ValueError: Images have another shape, or several, or no pixel; `count` or `columns` is
            below 1; `mean` comes without `std`, or neither one number nor one per channel.
    """
    found, _ = batches.dense(batch)
    batches.layout(found)
    checks.dtype("the images' dtype", found.dtype)
    images = found if found.ndim == 4 else found[None]
    if images.shape[1] not in (1, 3):
        shape = tree.describe(found)
        raise ValueError(f"images must have 3 channels, or 1, to be shown, got {shape}")
    shown = images[: checks.whole("count", count)].detach().cpu()
    picture = _grid(_levels(shown, _normalised(mean, std, images.shape[1])), _wide(columns, shown))
    if path is not None:
        _write(picture, Path(path))
    return picture


def _wide(columns: int | None, images: Tensor) -> int:
    """How many images are side by side."""
    wide = math.ceil(math.sqrt(len(images)))
    return min(wide if columns is None else checks.whole("columns", columns), len(images))


def _normalised(mean: Any, std: Any, channels: int) -> tuple[Tensor, Tensor] | None:
    """Mean and deviation as (1 or C, 1, 1) each; None if they are not given.

    Raises:
        ValueError: One is given without the other, or they are not for that many channels.
    """
    if mean is None and std is None:
        return None
    if mean is None or std is None:
        raise ValueError(f"mean and std must be given together, got mean={mean!r}, std={std!r}")
    parts = []
    for name, value in (("mean", mean), ("std", std)):
        numbers = checks.numbers(name, value)
        per_channel(name, numbers, channels)
        parts.append(torch.tensor(numbers)[:, None, None])
    return parts[0], parts[1]


def _levels(images: Tensor, normalised: tuple[Tensor, Tensor] | None) -> Tensor:
    """The images in 0 to 255: uint8, (N, C, H, W)."""
    if images.dtype == torch.uint8:  # nothing normalised can be
        return images
    values = images.float()
    finite = values.isfinite()
    if normalised is not None:
        mean, std = normalised
        values = values * std + mean
    else:
        values = _stretched(torch.where(finite, values, 0.0), finite)
    values = torch.where(finite, values, 0.0)
    return (values * LEVELS).round().clamp(0, LEVELS).to(torch.uint8)


def _stretched(values: Tensor, finite: Tensor) -> Tensor:
    """In 0 to 1: as they are if they are so, else each channel by what it holds."""
    if values.min() >= 0 and values.max() <= 1:
        return values
    among = (0, 2, 3)
    least = torch.where(finite, values, math.inf).amin(among, keepdim=True)
    most = torch.where(finite, values, -math.inf).amax(among, keepdim=True)
    return (values - least) / (most - least).clamp(min=torch.finfo(torch.float32).tiny)


def _grid(images: Tensor, columns: int) -> Tensor:
    """The picture: uint8, (height, width, 3)."""
    count, _, height, width = images.shape
    rows = math.ceil(count / columns)
    size = (rows * (height + GAP) - GAP, columns * (width + GAP) - GAP)
    picture = torch.full((*size, 3), int(LEVELS), dtype=torch.uint8)
    for n, image in enumerate(images.permute(0, 2, 3, 1)):  # a grey one is written three times
        top, left = n // columns * (height + GAP), n % columns * (width + GAP)
        picture[top : top + height, left : left + width] = image
    return picture


def _write(picture: Tensor, path: Path) -> None:
    """Writes a file.

    Raises:
        ImportError: Pillow is not installed.
    """
    try:
        from PIL import Image  # noqa: PLC0415  # nothing else here needs it
    except ImportError as error:
        raise ImportError("augment.preview writes path with Pillow: pip install pillow") from error
    Image.fromarray(picture.numpy()).save(path)
