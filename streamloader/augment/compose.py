"""Transforms in a row, as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from streamloader.augment.recipe import Recipe
from streamloader.augment.step import Step

__all__ = ["Compose"]


@dataclass(frozen=True)
class Compose(Recipe):
    """Transforms in a row, carried out in as few passes over the images as they allow.

        augment.Compose(
            [augment.RandomResizedCrop(224), augment.RandomHorizontalFlip(),
             augment.Normalize(mean, std), augment.ToDtype(torch.bfloat16)],
            memory_format=torch.channels_last,
        )

    Crops, resizes and flips come first and become one resampling; colours, normalisation and
    erasing follow within the same pass. A second resize, or a crop after colours, begins another.

    Args:
        transforms: In order. Those of a `Compose` among them take its place.
        memory_format: Of the images that come out, `torch.contiguous_format` or `channels_last`.

    Raises:
        TypeError: An argument is of the wrong kind, or a transform is not of this package.
        ValueError: There is no transform.
    """

    transforms: Sequence[Recipe]
    memory_format: torch.memory_format = torch.contiguous_format

    def __post_init__(self) -> None:
        if not isinstance(self.transforms, Sequence):
            raise TypeError(f"transforms must be a sequence, got {self.transforms!r}")
        if not self.transforms:
            raise ValueError("transforms must hold at least one, got none")
        for transform in self.transforms:
            if not isinstance(transform, Recipe):
                raise TypeError(
                    "transforms must be those of streamloader.augment that work on single images, "
                    f"got {transform!r}: pass others to the loader beside this, as in "
                    "StreamLoader(..., transform=[augment.Compose([...]), another])"
                )
        if self.memory_format not in (torch.contiguous_format, torch.channels_last):
            raise TypeError(
                "memory_format must be torch.contiguous_format or torch.channels_last, got "
                f"{self.memory_format!r}"
            )
        object.__setattr__(self, "transforms", tuple(self.transforms))

    @property
    @override
    def steps(self) -> tuple[Step, ...]:
        return tuple(step for transform in self.transforms for step in transform.steps)
