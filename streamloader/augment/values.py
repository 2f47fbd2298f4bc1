"""Transforms of what values mean: normalised, or of another dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from streamloader.augment import checks, program
from streamloader.augment.program import LEVELS
from streamloader.augment.recipe import Alone
from streamloader.augment.step import Pointwise, keep

__all__ = ["Normalize", "ToDtype"]


@dataclass(frozen=True)
class Normalize(Pointwise, Alone):
    """Subtracts a mean and divides by a deviation, channel by channel.

    Images that are uint8 by then are scaled to 0..1 first and become float32 (torchvision refuses
    them).

    Args:
        mean: One number, or one per channel.
        std: Likewise, not 0.
        inplace: False; the input is never written to.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: `std` holds a 0, `mean` and `std` are of different lengths, `inplace` is True.
    """

    mean: float | Sequence[float]
    std: float | Sequence[float]
    inplace: bool = False

    def __post_init__(self) -> None:
        checks.inplace(self.inplace)
        mean, std = checks.numbers("mean", self.mean), checks.numbers("std", self.std)
        if not all(std):
            raise ValueError(f"std must hold no 0, got {std}")
        if len(mean) != len(std) and 1 not in (len(mean), len(std)):
            raise ValueError(f"mean and std must be of one length, got {mean} and {std}")
        keep(self, mean=mean, std=std)

    @override
    def check(self, channels: int) -> None:
        program.per_channel("mean", checks.numbers("mean", self.mean), channels)
        program.per_channel("std", checks.numbers("std", self.std), channels)

    @override
    def dtype_after(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if dtype == torch.uint8 else dtype

    @override
    def op(self, column: int, dtype: torch.dtype) -> program.Normalize:
        mean, std = checks.numbers("mean", self.mean), checks.numbers("std", self.std)
        return program.Normalize(mean, std)


@dataclass(frozen=True)
class ToDtype(Pointwise, Alone):
    """Says which dtype images are from here on; the last one is what comes out.

    In between all is computed in float32 whatever it says: values are rounded once, at the end, and
    to uint8 to the nearest (torchvision cuts off).

    Args:
        dtype: `torch.uint8` or a floating-point one.
        scale: Whether 255 in uint8 is 1.0 in floats. Else values stay: 255 is 255.0.

    Raises:
        TypeError: It is no dtype, or another one; torchvision's dict is not supported.
    """

    dtype: torch.dtype
    scale: bool = False

    def __post_init__(self) -> None:
        checks.dtype("dtype", self.dtype)

    @override
    def dtype_after(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype

    @override
    def op(self, column: int, dtype: torch.dtype) -> program.Scale | None:
        if self.scale:
            return None
        if dtype.is_floating_point == self.dtype.is_floating_point:
            return program.Scale(1.0)  # so that passes are alike whatever the dtype
        return program.Scale(LEVELS if self.dtype.is_floating_point else 1 / LEVELS)
