"""How large the images of a batch are: all that a plan needs to know of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streamloader.augment.draws import Ints

__all__ = ["Layout", "alike"]


@dataclass(frozen=True, eq=False)
class Layout:
    """The sizes of a batch's images, in pixels.

    Attributes:
        channels: Of every image.
        heights: (N,) int64.
        widths: (N,) int64.
    """

    channels: int
    heights: Ints
    widths: Ints

    @classmethod
    def dense(cls, count: int, channels: int, height: int, width: int) -> Layout:
        """`count` images of one size."""
        return cls(channels, *alike(count, (height, width)))

    @property
    def count(self) -> int:
        """How many images."""
        return len(self.heights)

    @property
    def size(self) -> tuple[int, int] | None:
        """The height and width that all images share; None if they differ, or there is none."""
        heights, widths = self.heights, self.widths
        if not self.count or (heights != heights[0]).any() or (widths != widths[0]).any():
            return None
        return int(heights[0]), int(widths[0])


def alike(count: int, size: tuple[int, int]) -> tuple[Ints, Ints]:
    """The heights and widths of `count` images of one size."""
    height, width = size
    return np.full(count, height), np.full(count, width)
