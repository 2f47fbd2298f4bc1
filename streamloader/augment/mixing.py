"""What mixes each sample with another one of its batch: planned on the host, then carried out.

sample n  ◄── mixed with ── sample n - 1, and the first with the last

plan    lambda, a box   a row a sample, from shapes and the context alone
run     images          plain torch, on whatever device they are, without waiting for it
        targets         the sample's own label counts lambda, its partner's 1 - lambda
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from streamloader import tree
from streamloader.augment import batches, labels
from streamloader.augment.draws import Floats
from streamloader.context import Context
from streamloader.transforms import Planned

__all__ = ["BOX", "Mix", "Rows"]

Rows: TypeAlias = dict[str, Floats]
"""Columns by name, (N,) each."""

BOX = ("top", "left", "height", "width")

PLACE = 1 << 32
"""Of the first draws: no recipe has as many transforms, and outside of a loader keys are alike."""


class _Parts(NamedTuple):
    """Where images and labels are among a batch's leaves."""

    images: Tensor
    images_place: int
    labels: Tensor
    labels_place: int


class Mix(Planned):
    """What all have in common: planned, run, called."""

    @property
    @abstractmethod
    def labelled(self) -> tuple[int | None, Any]:
        """How many classes there are, None if labels say so; and where the labels are."""

    @property
    @abstractmethod
    def blends(self) -> bool:
        """Whether pixels are weighed, or else picked."""

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The names of a table's columns."""

    @abstractmethod
    def rows(self, key: int, place: int, count: int, size: tuple[int, int]) -> Rows:
        """Draws: `columns` and maybe more, for `count` images of `size`, height and width."""

    @override
    def plan(self, batch: Any, context: Context) -> Tensor:
        """All that is drawn for one batch; only its shapes and dtypes are read.

        Args:
            batch: A container that holds images, its first tensor of three or more dimensions,
                (N, C, H, W), and labels, see `labels_getter`. Whatever else is in it passes.
            context: Which batch; the same one gives the same table, bit for bit.

        Returns:
            float32 on the CPU, (N, `len(columns)`): a row a sample. The first rows are the same
            for a batch that has only the first samples; the first sample's partner, the last one,
            is not.

        Raises:
            TypeError: There are no images or labels, or their dtype cannot be mixed.
            ValueError: They have another shape.
        """
        count, _, height, width = self._parts(batch).images.shape
        rows = self.rows(context.key(), PLACE, count, (height, width))
        table = np.column_stack([rows[name] for name in self.columns])
        return torch.from_numpy(table.astype(np.float32))

    @override
    def run(self, batch: Any, table: Tensor) -> Any:
        """Carries out what a plan has decided: the same table gives the same batch.

        Args:
            batch: As for `plan`.
            table: Of a batch with images of the same sizes.

        Returns:
            The batch, a new container: images of the same shape, dtype and memory format, and
            targets, float32, (N, num_classes). The given ones are not written to.

        Raises:
            TypeError: There are no images or labels, or their dtype cannot be mixed.
            ValueError: They have another shape, or the table is another transform's or another
                batch size's; a class is not below `num_classes` (told on the CPU only).
        """
        parts = self._parts(batch)
        shape = (len(parts.images), len(self.columns))
        if tuple(table.shape) != shape:
            raise ValueError(
                f"table must have the shape {shape}, a row for each of the images and a column for "
                f"each name in columns, got {tuple(table.shape)}"
            )
        images = self._mixed(parts.images, table.to(parts.images.device))
        targets = self._targets(parts.labels, table.to(parts.labels.device))
        batch = batches.replaced(batch, parts.images_place, images)
        return batches.replaced(batch, parts.labels_place, targets)

    def _parts(self, batch: Any) -> _Parts:
        """Images and labels.

        Raises:
            TypeError: There are none, or their dtype cannot be mixed.
            ValueError: They have another shape.
        """
        images, images_place = batches.dense(batch)
        shown = tree.describe(images)
        if images.ndim != 4 or not images.numel():
            raise ValueError(f"images must be (N, C, H, W), with pixels, to be mixed, got {shown}")
        if self.blends and not images.dtype.is_floating_point:
            raise TypeError(
                f"images must be floating point to be blended, got {shown}: put "
                "MixUp after Normalize, or after ToDtype(torch.float32, scale=True)"
            )
        num_classes, where = self.labelled
        found, place = labels.find(batch, where, images_place)
        labels.check(found, num_classes, len(images))
        return _Parts(images, images_place, found, place)

    def _mixed(self, images: Tensor, table: Tensor) -> Tensor:
        values = table.T.reshape(len(self.columns), -1, 1, 1, 1)
        row = dict(zip(self.columns, values, strict=True))
        if not self.blends:
            return torch.where(_inside(images, row), _partner(images), images)
        weight = row["lambda"]
        if "outside" in row:
            weight = row["outside"] * ~_inside(images, row)
        return _blended(images, weight).to(images.dtype)

    def _targets(self, found: Tensor, table: Tensor) -> Tensor:
        own = table[:, self.columns.index("lambda"), None]
        return _blended(labels.shares(found, self.labelled[0]), own)


def _partner(values: Tensor) -> Tensor:
    """Rolled by one, in the same memory format: `roll` may copy to another one first."""
    return torch.cat((values[-1:], values[:-1])) if len(values) > 1 else values


def _blended(values: Tensor, own: Tensor) -> Tensor:
    """A share of each and the rest of its partner: in float32 at least, which the shares are in."""
    return torch.addcmul(values * own, _partner(values), 1 - own)


def _inside(images: Tensor, row: Mapping[str, Tensor]) -> Tensor:
    """(N, 1, H, W): which pixels lie in their image's box."""
    height, width = images.shape[-2:]
    y = torch.arange(height, device=images.device)[:, None]
    x = torch.arange(width, device=images.device)
    high = (y >= row["top"]) & (y < row["top"] + row["height"])
    return high & (x >= row["left"]) & (x < row["left"] + row["width"])
