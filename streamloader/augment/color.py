"""Transforms that change colours: jitter and grey."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from streamloader.augment import checks
from streamloader.augment.draws import Floats, Ints, between, chance
from streamloader.augment.program import Grayscale, Jitter
from streamloader.augment.recipe import Alone
from streamloader.augment.step import Pointwise, keep

__all__ = ["ColorJitter", "RandomGrayscale"]


def _colours(name: str, channels: int) -> None:
    """Refuses what is neither RGB nor grey.

    Raises:
        TypeError: It has neither 3 channels nor 1.
    """
    if channels not in (1, 3):
        raise TypeError(f"{name} takes images of 3 channels, or 1, got {channels}")


def _range(name: str, value: Any, middle: float, low: float, high: float) -> Any:
    """Least and most of a factor; one number is how far it may be from the middle.

    None, as is a range that holds nothing but the middle, is no change.

    Raises:
        ValueError: The number is below 0.
    """
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not value >= 0:
            raise ValueError(f"{name} must be at least 0 where it is one number, got {value}")
        value = (max(middle - value, 0.0) if middle else -value, middle + value)
    least, most = checks.span(name, value, low, high)
    return None if least == most == middle else (least, most)


@dataclass(frozen=True)
class ColorJitter(Pointwise, Alone):
    """Changes brightness, contrast, saturation and hue, in an order drawn for each image.

    Each argument is the least and the most of a factor, drawn uniformly, or one number x for
    (1 - x, 1 + x), not below 0. Images are clamped to 0..1 after each step but hue. Of images with
    one channel, brightness and contrast alone are changed.

    Args:
        brightness: Of the factor that values are multiplied by.
        contrast: Of the factor that a value's distance to the mean of the grey image is multiplied
            by.
        saturation: Of the factor that a value's distance to the pixel's grey is multiplied by.
        hue: Of what is added to the hue, a turn being 1: from -0.5 to 0.5, and x is for (-x, x).
            The image must be in 0..1.

    Raises:
        TypeError: An argument is neither a number nor two.
        ValueError: It is negative, or falls, or is outside of what it may be.
    """

    brightness: float | Sequence[float] | None = None
    contrast: float | Sequence[float] | None = None
    saturation: float | Sequence[float] | None = None
    hue: float | Sequence[float] | None = None

    draws = 8
    fields = (
        *("brightness", "contrast", "saturation", "hue"),
        *("first", "second", "third", "fourth"),
    )

    def __post_init__(self) -> None:
        for name in self.fields[:3]:
            value = _range(name, getattr(self, name), 1.0, 0.0, math.inf)
            keep(self, **{name: value})
        keep(self, hue=_range("hue", self.hue, 0.0, -0.5, 0.5))

    @property
    def _ranges(self) -> tuple[Any, ...]:
        return self.brightness, self.contrast, self.saturation, self.hue

    @override
    def check(self, channels: int) -> None:
        _colours("ColorJitter", channels)

    @override
    def decide(self, uniform: Floats, heights: Ints, widths: Ints) -> Floats:
        neutral = ((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (0.0, 0.0))
        ranges = [mine or none for mine, none in zip(self._ranges, neutral, strict=True)]
        factors = [between(uniform[:, n], *ranges[n]) for n in range(4)]
        order = uniform[:, 4:].argsort(axis=1)  # of four numbers that are alike but for chance
        return np.column_stack([*factors, order])

    @override
    def op(self, column: int, dtype: torch.dtype) -> Jitter | None:
        brightness, contrast, saturation, hue = (part is not None for part in self._ranges)
        active = (brightness, contrast, saturation, hue)
        return Jitter(column, active) if any(active) else None


@dataclass(frozen=True)
class RandomGrayscale(Pointwise, Alone):
    """Makes an image grey: every channel becomes 0.2989 R + 0.587 G + 0.114 B.

    Args:
        p: How likely, for each image.

    Raises:
        TypeError: `p` is no number.
        ValueError: `p` is not from 0 to 1.
    """

    p: float = 0.1

    draws = 1
    fields = ("flag",)

    def __post_init__(self) -> None:
        keep(self, p=checks.probability("p", self.p))

    @override
    def check(self, channels: int) -> None:
        _colours("RandomGrayscale", channels)

    @override
    def decide(self, uniform: Floats, heights: Ints, widths: Ints) -> Floats:
        return chance(uniform, self.p).astype(np.float64)

    @override
    def op(self, column: int, dtype: torch.dtype) -> Grayscale:
        return Grayscale(column)
