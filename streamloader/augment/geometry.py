"""Transforms that flip and resize: they end up in one view of the source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from streamloader.augment import checks
from streamloader.augment.draws import Floats, Ints, chance
from streamloader.augment.layout import alike
from streamloader.augment.recipe import Alone
from streamloader.augment.step import Geometric, keep
from streamloader.augment.view import Motion, View

__all__ = ["RandomHorizontalFlip", "RandomVerticalFlip", "Resize"]


@dataclass(frozen=True)
class _Flip(Geometric, Alone):
    """What both flips have in common: how likely they are."""

    p: float = 0.5

    draws = 1
    motion = Motion(flips=True)

    def __post_init__(self) -> None:
        keep(self, p=checks.probability("p", self.p))


@dataclass(frozen=True)
class RandomHorizontalFlip(_Flip):
    """Exchanges left and right.

    Args:
        p: How likely, for each image.

    Raises:
        TypeError: `p` is no number.
        ValueError: `p` is not from 0 to 1.
    """

    @override
    def moved(self, view: View, uniform: Floats) -> View:
        return view.flipped(np.zeros_like(view.top), chance(uniform[:, 0], self.p))


@dataclass(frozen=True)
class RandomVerticalFlip(_Flip):
    """Turns images upside down.

    Args:
        p: How likely, for each image.

    Raises:
        TypeError: `p` is no number.
        ValueError: `p` is not from 0 to 1.
    """

    @override
    def moved(self, view: View, uniform: Floats) -> View:
        return view.flipped(chance(uniform[:, 0], self.p), np.zeros_like(view.top))


@dataclass(frozen=True)
class Resize(Geometric, Alone):
    """Resizes images.

    Args:
        size: (height, width), or the shorter edge, the longer one in proportion, rounded down; None
            for what `max_size` says.
        interpolation: "bilinear", "bicubic", "nearest" or "nearest-exact"; torchvision's enum.
        max_size: The most that the longer edge may be where `size` is one number, or what it
            becomes where `size` is None.
        antialias: Whether a reduction averages over all pixels (bilinear, bicubic). None is False.

    An edge is never less than 1 pixel; torchvision fails where its formula gives 0.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: Sizes are below 1, or `max_size` is not above `size`, or goes with a pair.
    """

    size: int | Sequence[int] | None
    interpolation: Any = "bilinear"
    max_size: int | None = None
    antialias: bool | None = True

    def __post_init__(self) -> None:
        size = self.size
        if isinstance(size, Sequence) and len(size) != 1:
            size = checks.pair("size", size)
            if self.max_size is not None:
                raise ValueError(
                    "max_size must be None where size gives height and width, got "
                    f"max_size={self.max_size!r} with size={size}"
                )
        elif size is not None:
            size = checks.pair("size", size)[0]
        if size is None or self.max_size is not None:
            checks.whole("max_size", self.max_size)
        if isinstance(size, int) and self.max_size is not None and self.max_size <= size:
            raise ValueError(f"max_size must be above size, {size}, got {self.max_size}")
        mode = checks.interpolation(self.interpolation)
        keep(self, size=size, interpolation=mode, antialias=bool(self.antialias))

    @property
    @override
    def motion(self) -> Motion:
        return Motion(
            resizes=True,
            interpolation=self.interpolation,
            antialias=bool(self.antialias),
        )

    @override
    def sizes(self, heights: Ints, widths: Ints) -> tuple[Ints, Ints]:
        if isinstance(self.size, tuple):
            return alike(len(heights), self.size)
        short, long = np.minimum(heights, widths), np.maximum(heights, widths)
        new_short, new_long = _edges(short, long, self.size, self.max_size)
        new_short = np.maximum(new_short, 1)
        upright = widths <= heights
        return np.where(upright, new_long, new_short), np.where(upright, new_short, new_long)

    @override
    def moved(self, view: View, uniform: Floats) -> View:
        return view.resized(*self.sizes(view.out_height, view.out_width))


def _edges(short: Ints, long: Ints, size: Any, max_size: int | None) -> tuple[Ints, Ints]:
    """The new shorter and longer edge (torchvision's `_compute_resized_output_size`)."""
    most = max_size or 0  # 0 where there is no limit
    if size is None:
        return most * short // long, np.full_like(long, most)
    new_short, new_long = np.full_like(short, size), size * long // short
    over = (new_long > most) & (most > 0)
    return (
        np.where(over, most * new_short // new_long, new_short),
        np.where(over, most, new_long),
    )
