"""Random erasing: a rectangle is overwritten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from streamloader.augment import checks
from streamloader.augment.draws import ATTEMPTS, Floats, Ints, below, chance, first, sides
from streamloader.augment.program import LEVELS, Erase, per_channel
from streamloader.augment.recipe import Alone
from streamloader.augment.step import Pointwise, keep

__all__ = ["RandomErasing"]


@dataclass(frozen=True)
class RandomErasing(Pointwise, Alone):
    """Overwrites a rectangle of random area, shape and place (arXiv:1708.04896, as torchvision).

    A rectangle that is as high or as wide as the image is drawn again, ten times in all, and then
    there is none.

    Args:
        p: How likely, for each image.
        scale: The area's share of the image, least and most.
        ratio: Height by width, least and most.
        value: What is written, one number or one per channel, in the images' own units: 0 to 255
            if they are uint8 by then; or "random", normally distributed noise, for floats only.
        inplace: False; the input is never written to.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: `p` or `scale` is not within 0 to 1, a range falls, `value` is another word.
    """

    p: float = 0.5
    scale: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)
    value: float | Sequence[float] | str = 0.0
    inplace: bool = False

    draws = 1 + 2 * ATTEMPTS + 2 + 2

    def __post_init__(self) -> None:
        checks.inplace(self.inplace)
        if isinstance(self.value, str) and self.value != "random":
            raise ValueError(f'value must be numbers or "random", got {self.value!r}')
        arguments: dict[str, Any] = {
            "p": checks.probability("p", self.p),
            "scale": checks.span("scale", self.scale, low=0, high=1),
            "ratio": checks.ratio("ratio", self.ratio),
        }
        if self.value != "random":
            arguments["value"] = checks.numbers("value", self.value)
        keep(self, **arguments)

    @property
    @override
    def fields(self) -> tuple[str, ...]:
        rectangle = ("top", "left", "height", "width")
        return (*rectangle, "key_low", "key_high") if self.value == "random" else rectangle

    @override
    def check(self, channels: int) -> None:
        if self.value != "random":
            per_channel("value", checks.numbers("value", self.value), channels)

    @override
    def decide(self, uniform: Floats, heights: Ints, widths: Ints) -> Floats:
        attempts = slice(1, 1 + 2 * ATTEMPTS)
        high, wide = sides(uniform[:, attempts], heights * widths, self.scale, self.ratio)
        fits = (high < heights[:, None]) & (wide < widths[:, None])
        fits &= chance(uniform[:, :1], self.p) == 1
        none = np.zeros_like(heights)
        height, width = first(fits, high, none), first(fits, wide, none)
        top, left, key_low, key_high = uniform[:, attempts.stop :].T
        columns = [below(top, heights - height + 1), below(left, widths - width + 1), height, width]
        keys = [below(key_low, 1 << 24), below(key_high, 1 << 24)]  # exact in float32
        columns += keys if self.value == "random" else []
        return np.column_stack(columns).astype(np.float64)

    @override
    def op(self, column: int, dtype: torch.dtype) -> Erase:
        if self.value != "random":
            unit = LEVELS if dtype == torch.uint8 else 1.0
            values = checks.numbers("value", self.value)
            return Erase(column, tuple(value / unit for value in values))
        if dtype == torch.uint8:
            raise ValueError(
                'value="random" is noise around 0, which uint8 cannot hold: put RandomErasing '
                "after Normalize, or after ToDtype(torch.float32, scale=True)"
            )
        return Erase(column, None)
