"""Transforms that crop: they end up in one view of the source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from streamloader.augment import checks
from streamloader.augment.draws import ATTEMPTS, Floats, Ints, below, first, sides
from streamloader.augment.layout import alike
from streamloader.augment.program import per_channel
from streamloader.augment.recipe import Alone
from streamloader.augment.step import Geometric, keep
from streamloader.augment.view import Motion, View

__all__ = ["CenterCrop", "RandomCrop", "RandomResizedCrop"]


@dataclass(frozen=True)
class CenterCrop(Geometric, Alone):
    """Cuts out the middle; where an image is too small it is padded with 0.

    Args:
        size: (height, width) in pixels, or one number for both.

    Raises:
        TypeError: `size` is not made of whole numbers.
        ValueError: One is below 1.
    """

    size: int | Sequence[int]

    motion = Motion(crops=True, pads=True)

    def __post_init__(self) -> None:
        keep(self, size=checks.pair("size", self.size))

    @override
    def sizes(self, heights: Ints, widths: Ints) -> tuple[Ints, Ints]:
        return alike(len(heights), checks.pair("size", self.size))

    @override
    def moved(self, view: View, uniform: Floats) -> View:
        height, width = self.sizes(view.out_height, view.out_width)
        return view.cropped(
            _center(view.out_height, height), _center(view.out_width, width), height, width
        )


@dataclass(frozen=True)
class RandomResizedCrop(Geometric, Alone):
    """Cuts out a rectangle of random area, shape and place, and resizes it.

    The area's share of the image is uniform, the shape log-uniform; a rectangle that does not fit
    is drawn again, ten times in all, and then the largest central one of a shape that is allowed
    is taken ("Going deeper with convolutions", as in torchvision).

    Args:
        size: (height, width) of what comes out, or one number for both.
        scale: The area's share, least and most.
        ratio: Width by height, least and most.
        interpolation: "bilinear", "bicubic", "nearest" or "nearest-exact"; torchvision's enum.
        antialias: Whether a reduction averages over all pixels (bilinear, bicubic). None is False.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: A size is below 1; a range falls, or holds what it may not.
    """

    size: int | Sequence[int]
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3.0 / 4.0, 4.0 / 3.0)
    interpolation: Any = "bilinear"
    antialias: bool | None = True

    draws = 2 * ATTEMPTS + 2

    def __post_init__(self) -> None:
        keep(
            self,
            size=checks.pair("size", self.size),
            scale=checks.span("scale", self.scale, low=0),
            ratio=checks.ratio("ratio", self.ratio),
            interpolation=checks.interpolation(self.interpolation),
            antialias=bool(self.antialias),
        )

    @property
    @override
    def motion(self) -> Motion:
        return Motion(
            crops=True,
            resizes=True,
            interpolation=self.interpolation,
            antialias=bool(self.antialias),
        )

    @override
    def sizes(self, heights: Ints, widths: Ints) -> tuple[Ints, Ints]:
        return alike(len(heights), checks.pair("size", self.size))

    @override
    def moved(self, view: View, uniform: Floats) -> View:
        box = self._box(uniform, view.out_height, view.out_width)
        return view.cropped(*box).resized(*self.sizes(view.out_height, view.out_width))

    def _box(self, uniform: Floats, heights: Ints, widths: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Top, left, height, width."""
        wide, high = sides(uniform[:, :-2], heights * widths, self.scale, self.ratio)
        fits = (wide > 0) & (wide <= widths[:, None]) & (high > 0) & (high <= heights[:, None])
        least, most = self.ratio
        central_height = np.minimum(heights, np.rint(widths / least).astype(np.int64))
        central_width = np.minimum(widths, np.rint(heights * most).astype(np.int64))
        height = first(fits, high, np.maximum(central_height, 1))
        width = first(fits, wide, np.maximum(central_width, 1))
        found = fits.any(axis=1)
        spare_height, spare_width = heights - height, widths - width
        top = np.where(found, below(uniform[:, -2], spare_height + 1), spare_height // 2)
        left = np.where(found, below(uniform[:, -1], spare_width + 1), spare_width // 2)
        return top, left, height, width


@dataclass(frozen=True)
class RandomCrop(Geometric, Alone):
    """Cuts out a rectangle of one size at a random place, of the image with a border around it.

    Args:
        size: (height, width) in pixels, or one number for both.
        padding: The border's width: one number, (left and right, top and bottom), or (left, top,
            right, bottom).
        pad_if_needed: Where the image with its border is too small, by how much it is so is added
            on both sides. Without, that is an error.
        fill: The border's value, one number or one per channel, in the images' own units: 0 to 255
            if they are uint8 by then.
        padding_mode: "constant"; torchvision's others are not supported.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: Sizes are below 1, `padding` is negative or of another length, `padding_mode`
            is not supported.
    """

    size: int | Sequence[int]
    padding: int | Sequence[int] | None = None
    pad_if_needed: bool = False
    fill: float | Sequence[float] | None = 0
    padding_mode: str = "constant"

    draws = 2

    def __post_init__(self) -> None:
        if self.padding_mode != "constant":
            raise ValueError(f'padding_mode must be "constant", got {self.padding_mode!r}')
        keep(
            self,
            size=checks.pair("size", self.size),
            padding=None if self.padding is None else _border(self.padding),
            fill=_fill(self.fill),
        )

    @override
    def check(self, channels: int) -> None:
        per_channel("fill", _fill(self.fill), channels)

    @property
    @override
    def motion(self) -> Motion:
        pads = self.pad_if_needed or any(_border(self.padding))
        return Motion(crops=True, pads=pads, fill=_fill(self.fill))

    @override
    def sizes(self, heights: Ints, widths: Ints) -> tuple[Ints, Ints]:
        left, top, right, bottom = _border(self.padding)
        height, width = checks.pair("size", self.size)
        small = (heights + top + bottom < height) | (widths + left + right < width)
        if not self.pad_if_needed and small.any():
            which = int(small.argmax())
            raise ValueError(
                f"size must be within the image and its padding, got size={self.size} for an "
                f"image of {(int(heights[which]), int(widths[which]))} with padding="
                f"{self.padding}: pad_if_needed=True pads it"
            )
        return alike(len(heights), (height, width))

    @override
    def moved(self, view: View, uniform: Floats) -> View:
        left, top, right, bottom = _border(self.padding)
        height, width = self.sizes(view.out_height, view.out_width)
        return view.cropped(
            _place(uniform[:, 0], view.out_height, (top, bottom), height),
            _place(uniform[:, 1], view.out_width, (left, right), width),
            height,
            width,
        )


def _center(old: Ints, new: Ints) -> Ints:
    """Where the middle begins: half to even where it is cut out, down where it is padded."""
    cut: Ints = np.rint(np.maximum(old - new, 0) / 2).astype(np.int64)
    pad: Ints = np.maximum(new - old, 0) // 2
    return cut - pad


def _border(padding: int | Sequence[int] | None) -> tuple[int, int, int, int]:
    """Left, top, right, bottom.

    Raises:
        ValueError: Neither one number, nor two, nor four.
    """
    if padding is None:
        return (0, 0, 0, 0)
    items = tuple(padding) if isinstance(padding, Sequence) else (padding,)
    if len(items) not in (1, 2, 4):
        raise ValueError(
            "padding must be a number, (left and right, top and bottom) or (left, top, right, "
            f"bottom), got {padding!r}"
        )
    left, top, right, bottom = (
        checks.whole("padding", n, least=0) for n in items * (4 // len(items))
    )
    return left, top, right, bottom


def _place(uniform: Floats, old: Ints, border: tuple[int, int], new: Ints) -> Ints:
    """Where a random crop begins in the image, whose border begins before 0."""
    padded = old + sum(border)
    more: Ints = np.maximum(new - padded, 0)  # on both sides; 0 unless pad_if_needed
    return below(uniform, padded + 2 * more - new + 1) - border[0] - more


def _fill(fill: float | Sequence[float] | None) -> tuple[float, ...]:
    return checks.numbers("fill", 0 if fill is None else fill)
