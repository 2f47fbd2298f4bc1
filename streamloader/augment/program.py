"""What a recipe comes to: passes over the batch, as data that an executor runs. Pure.

    input ──► ÷ unit ──► pass ──► pass ──► to its dtype ──► output
                         resample, then its operations, in order, on each pixel

Values are float32 all the way, of images in 0 to 1, and are converted once, at the end. What is
drawn is not in here: it stands in the plan's table, a row a sample, and a program says in which
columns. So one program serves every batch of a dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from streamloader.augment.view import Motion, View

__all__ = [
    "LEVELS",
    "Erase",
    "Grayscale",
    "Jitter",
    "Normalize",
    "Op",
    "Pass",
    "Program",
    "Resample",
    "Scale",
    "per_channel",
]

LEVELS = 255.0
"""The value of uint8 that 1.0 is."""


@dataclass(frozen=True)
class Resample:
    """Crops, resizes and flips each image: the columns are a `View`'s, whole numbers.

    Attributes:
        column: The first of the 12.
        interpolation: A mode of `torch.nn.functional.interpolate`, corners not aligned.
        antialias: As there.
        fill: Beyond the image: one number or one per channel.
        clamp: Whether what the resize makes is clamped to 0..1: bicubic overshoots.
    """

    column: int
    interpolation: str = Motion.interpolation
    antialias: bool = Motion.antialias
    fill: tuple[float, ...] = Motion.fill
    clamp: bool = False

    width = len(View._fields)


@dataclass(frozen=True)
class Jitter:
    """Changes brightness, contrast, saturation and hue, in an order of each sample's own.

    Columns: the four factors, then the four steps, each 0 (brightness), 1 (contrast), 2
    (saturation) or 3 (hue).

    Attributes:
        column: The first of the 8.
        active: Which of the four are done at all; the others' factors mean nothing.
    """

    column: int
    active: tuple[bool, bool, bool, bool]

    @property
    def needs_mean(self) -> bool:
        """Contrast is relative to the mean of the grey image, as it is when its turn comes."""
        return self.active[1]


@dataclass(frozen=True)
class Grayscale:
    """Makes all channels the luma where the column is 1.

    Attributes:
        column: The only one.
    """

    column: int
    needs_mean = False


@dataclass(frozen=True)
class Normalize:
    """Subtracts the mean, divides by the deviation: one number each, or one per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    needs_mean = False


@dataclass(frozen=True)
class Scale:
    """Multiplies by a number."""

    factor: float
    needs_mean = False


@dataclass(frozen=True)
class Erase:
    """Overwrites a rectangle of the output. Columns: top, left, height, width; 0 high for none.

    Attributes:
        column: The first of the 4.
        value: What is written: one number or one per channel. None for normally distributed noise
            (`noise.normal`), whose key is in two columns more, and whose counter is a value's place
            in the pass's output, (channel * height + row) * width + column.
    """

    column: int
    value: tuple[float, ...] | None
    needs_mean = False


Op: TypeAlias = Jitter | Grayscale | Normalize | Scale | Erase


@dataclass(frozen=True)
class Pass:
    """One reading of an image and one writing.

    Attributes:
        places: The recipe's transforms that it carries out, by their place.
        resample: What is done first, or None where the pass leaves every pixel where it is.
        ops: What is then done with each pixel, in order. At most one of them needs a mean.
    """

    places: tuple[int, ...]
    resample: Resample | None
    ops: tuple[Op, ...]

    @property
    def mean(self) -> int | None:
        """Which of `ops` needs the mean over the image of what comes before it; None for none.

        Such a pass takes two readings: the first, up to that point, only sums.
        """
        return next((at for at, op in enumerate(self.ops) if op.needs_mean), None)


@dataclass(frozen=True)
class Program:
    """A recipe for inputs of one dtype.

    Attributes:
        unit: What is 1.0 in the input: values are divided by it as they are read.
        passes: At least one.
        columns: The table's columns by name.
        starts: Of each transform the first of its columns; of those that move pixels, their pass's.
        dtype: The output's; what is uint8 is multiplied by 255, rounded and clamped.
        memory_format: The output's.
    """

    unit: float
    passes: tuple[Pass, ...]
    columns: tuple[str, ...]
    starts: tuple[int, ...]
    dtype: torch.dtype
    memory_format: torch.memory_format


def per_channel(name: str, values: Sequence[float], channels: int) -> None:
    """Refuses numbers that are neither one for all nor one per channel.

    Raises:
        ValueError: They are not.
    """
    if len(values) not in (1, channels):
        raise ValueError(
            f"{name} must be one number, or one for each of the images' {channels} channels, got "
            f"{len(values)}: {tuple(values)}"
        )
