"""What a transform tells of itself: how a recipe is planned and lowered knows nothing else of it.

A new transform is a frozen dataclass with one of these two as its base, and `Alone`: one of each is
added in docs/augment.md. Its arguments must be hashable: of a list, `keep` a tuple. It gets `draws`
numbers a sample, uniform from 0 up to but not 1; `draws.py` makes other things of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch

from streamloader.augment.draws import Floats, Ints
from streamloader.augment.program import Op
from streamloader.augment.view import Motion, View

__all__ = ["Geometric", "Pointwise", "Step", "keep"]


class Geometric(ABC):
    """A transform that moves pixels.

    Attributes:
        draws: How many uniform numbers it needs for a sample.
    """

    draws: ClassVar[int] = 0

    def check(self, channels: int) -> None:  # noqa: B027  # most take any
        """Refuses images of a number of channels that it cannot work on: TypeError, ValueError."""

    @property
    @abstractmethod
    def motion(self) -> Motion:
        """What it may do to a view; `fill` is in units of the dtype that images have by then."""

    def sizes(self, heights: Ints, widths: Ints) -> tuple[Ints, Ints]:
        """The sizes of what comes out, (N,) each, from those of what goes in; never drawn."""
        return heights, widths

    @abstractmethod
    def moved(self, view: View, uniform: Floats) -> View:
        """The view with this transform added, for all samples; `uniform` is (N, draws).

        `view.out_height` and `view.out_width` are the sizes of what goes in, (N,) each.
        """


class Pointwise(ABC):
    """A transform that leaves pixels where they are.

    Attributes:
        draws: How many uniform numbers it needs for a sample.
    """

    draws: ClassVar[int] = 0

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of its columns in the table."""
        return ()

    def check(self, channels: int) -> None:  # noqa: B027  # most take any
        """Refuses images of a number of channels that it cannot work on: TypeError, ValueError."""

    def decide(self, uniform: Floats, heights: Ints, widths: Ints) -> Floats:  # noqa: ARG002
        """Its columns, (N, fields), from (N, draws) uniform numbers and sizes, (N,) each."""
        return np.empty((len(heights), 0))

    def dtype_after(self, dtype: torch.dtype) -> torch.dtype:
        """What images of `dtype` are after it in torchvision."""
        return dtype

    @abstractmethod
    def op(self, column: int, dtype: torch.dtype) -> Op | None:
        """What an executor does, one of those in program.py; None if nothing.

        Its own columns, those of `fields`, begin with number `column` of the table's.

        `dtype` is what the images would be by then, which says what 1 means: ValueError if it
        cannot be done in that.
        """


Step: TypeAlias = Geometric | Pointwise


def keep(step: Step, **arguments: Any) -> None:
    """Sets arguments, in the form in which they are kept, on a transform, which is frozen."""
    for name, value in arguments.items():
        object.__setattr__(step, name, value)
