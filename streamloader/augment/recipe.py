"""A recipe: planned on the host, then carried out. `Compose` is one, and so is every transform.

plan(batch, context) ──► table ──► run(batch, table)
sizes alone, pure        a row     draws nothing
                         a sample
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from streamloader.augment import batches, execute, lower, plans
from streamloader.augment.layout import Layout
from streamloader.augment.program import Program
from streamloader.augment.step import Geometric, Pointwise, Step
from streamloader.context import Context
from streamloader.transforms import Planned, untraced

__all__ = ["Alone", "Recipe"]


class Recipe(Planned):
    """What `Compose` and each transform have in common."""

    memory_format: torch.memory_format = torch.contiguous_format

    @property
    def steps(self) -> tuple[Step, ...]:
        """The transforms, in order."""
        raise NotImplementedError

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of a table's columns: `view0.top`, `1.ColorJitter.hue`, ..."""
        return self.program(torch.float32).columns

    def program(self, dtype: torch.dtype) -> Program:
        """What an executor runs on images of that dtype.

        Raises:
            TypeError: Neither uint8 nor floating point.
            ValueError: A transform cannot do its work on that dtype.
        """
        return lower.lower(self.steps, dtype, self.memory_format)

    def layouts(self, layout: Layout) -> tuple[Layout, ...]:
        """The images' sizes as the batch comes in, and then after each pass of the program.

        Raises:
            ValueError: A transform cannot do its work on such images.
        """
        return plans.layouts(self.steps, self.program(torch.float32), layout)

    @override
    def plan(self, batch: Any, context: Context) -> Tensor:
        """All that is drawn and decided for one batch.

        Args:
            batch: The batch, of which only the images' sizes matter, or a `Layout`, those sizes.
            context: Which batch it is, a `streamloader.context.Context`; the same one gives the
                same table, bit for bit.

        Returns:
            float32 on the CPU, (N, `len(columns)`): a row a sample. The first rows are the same
            for a batch that has only the first samples.

        Raises:
            ValueError: A transform cannot do its work on such images, or they come out in
                different sizes.
        """
        layout = batch
        if not isinstance(batch, Layout):
            images, _ = batches.images(batch)
            layout = batches.layout(images)
        return plans.plan(self.steps, self.program(torch.float32), layout, context)

    @override
    def run(self, batch: Any, table: Tensor) -> Any:
        """Carries out a plan on a batch's images.

        They are its first `RaggedImages` or tensor of three or more dimensions.

        The same table gives the same images. `torch.compile` leaves it as it is: a graph break.

        Args:
            batch: (N, C, H, W), uint8 or floating point with values in 0 to 1, `RaggedImages`, or
                a container that holds such a thing; whatever else is in it passes. (C, H, W) is
                one image, as in torchvision, so grey images without a channel, (N, H, W), need
                `images[:, None]`.
            table: Of a batch with images of the same sizes, on their device.

        Returns:
            The batch, a new container, with other images, always a tensor of them; the given ones
            are not written to.

        Raises:
            ValueError: The table is another recipe's, or another batch size's.
        """
        return untraced(_run)(self, batch, table)


def _run(recipe: Recipe, batch: Any, table: Tensor) -> Any:
    """`Recipe.run`.

    Raises:
        ValueError: The table is another recipe's, or another batch size's.
    """
    images, found = batches.images(batch)
    layout, program = batches.layout(images), recipe.program(images.dtype)
    shape = (layout.count, len(program.columns))
    if tuple(table.shape) != shape:
        raise ValueError(
            f"table must have the shape {shape}, a row for each of the images and a column for "
            f"each name in columns, got {tuple(table.shape)}"
        )
    table = table.to(images.device, torch.float32).contiguous()
    out = execute.run(program, images, table, recipe.layouts(layout))
    return batches.replaced(batch, found, out)


class Alone(Recipe):
    """A recipe that is its only transform."""

    @property
    @override
    def steps(self) -> tuple[Step, ...]:
        assert isinstance(self, (Geometric, Pointwise))
        return (self,)
