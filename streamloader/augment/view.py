"""Where each pixel of an output comes from: crops, a resize and flips, resolved into one. Pure.

    source image          box resized to a grid       window, may stick out
    +-----------+         +---------+                    +-----+
    |  +----+   |         |         |                 ...|..   |
    |  |box |   |   ──►   |  grid   |   ──►           .  |  .  |  ──►  flips ──► output
    |  +----+   |         |         |                 ...|..   |
    +-----------+         +---------+                    +-----+
                                                 fill where there is no grid

A view per sample. A crop moves the window, a resize makes the window the box, a flip turns the
output around. A resize of what was resized, or of what was filled, is no view; nor is what shows
again the pixels that a crop took away. `Fold` knows that from the transforms alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from streamloader.augment.draws import Ints

__all__ = ["Fold", "Motion", "View"]


class View(NamedTuple):
    """One view per sample: (N,) int64 each, in pixels.

    Attributes:
        top: The box's first row in the source; the box lies within it.
        left: Its first column.
        height: Its height.
        width: Its width.
        grid_height: What the box's height is resized to.
        grid_width: What its width is resized to.
        window_top: The window's first row in the grid; below 0 where it sticks out.
        window_left: Its first column.
        out_height: Its height, and the output's.
        out_width: Its width, and the output's.
        flip_vertical: 1 where the window is then turned upside down, else 0.
        flip_horizontal: 1 where left and right are then exchanged, else 0.
    """

    top: Ints
    left: Ints
    height: Ints
    width: Ints
    grid_height: Ints
    grid_width: Ints
    window_top: Ints
    window_left: Ints
    out_height: Ints
    out_width: Ints
    flip_vertical: Ints
    flip_horizontal: Ints

    @classmethod
    def whole(cls, heights: Ints, widths: Ints) -> View:
        """Images as they are."""
        none = np.zeros_like(heights)
        box = grid = window = (heights, widths)
        return cls(none, none, *box, *grid, none, none, *window, none, none)

    def cropped(self, top: Ints, left: Ints, height: Ints, width: Ints) -> View:
        """A rectangle of the output, which may reach beyond it."""
        # In the window, which is turned around afterwards, the rectangle is on the other side.
        under = np.where(self.flip_vertical, self.out_height - top - height, top)
        beside = np.where(self.flip_horizontal, self.out_width - left - width, left)
        return self._replace(
            window_top=self.window_top + under,
            window_left=self.window_left + beside,
            out_height=height,
            out_width=width,
        )

    def resized(self, height: Ints, width: Ints) -> View:
        """The output, resized; nothing was resized before, and the window does not stick out.

        Flips stay the last thing: a resize that weighs both sides alike commutes with them.
        """
        none = np.zeros_like(height)
        return View(
            *(self.top + self.window_top, self.left + self.window_left),
            *(self.out_height, self.out_width),
            *(height, width),
            *(none, none, height, width),
            *(self.flip_vertical, self.flip_horizontal),
        )

    def flipped(self, vertical: Ints, horizontal: Ints) -> View:
        """The output, turned around where the number is 1."""
        return self._replace(
            flip_vertical=self.flip_vertical ^ vertical,
            flip_horizontal=self.flip_horizontal ^ horizontal,
        )


@dataclass(frozen=True)
class Motion:
    """What a transform may do to a view, whatever it draws.

    Attributes:
        crops: It moves the window, within the output.
        pads: It moves the window, beyond the output perhaps.
        resizes: It resizes, after it has cropped.
        flips: It flips.
        interpolation: How it resizes: an `interpolate` mode of torch's.
        antialias: Whether a reduction averages over all pixels.
        fill: What is seen beyond the image, one number or one per channel.
    """

    crops: bool = False
    pads: bool = False
    resizes: bool = False
    flips: bool = False
    interpolation: str = "bilinear"
    antialias: bool = True
    fill: tuple[float, ...] = (0.0,)


@dataclass(frozen=True)
class Fold:
    """What has been folded into a view, and so what still can be.

    Attributes:
        resized: There was a resize.
        cut: The window may leave out some of the grid since.
        padded: The window may stick out of the grid.
        flipped: There was a flip.
    """

    resized: bool = False
    cut: bool = False
    padded: bool = False
    flipped: bool = False

    def takes(self, motion: Motion) -> bool:
        """Whether the view with that motion added is a view still."""
        if motion.resizes and (self.resized or self.padded):
            return False
        if motion.resizes and self.flipped and motion.interpolation.startswith("nearest"):
            return False  # of two that are as near it takes the later: no symmetry
        return not (motion.pads and self.cut)

    def then(self, motion: Motion) -> Fold:
        """With that motion added."""
        moved = motion.crops or motion.pads
        return replace(
            self,
            resized=self.resized or motion.resizes,
            cut=not motion.resizes and (self.cut or moved),
            padded=self.padded or motion.pads,
            flipped=self.flipped or motion.flips,
        )
