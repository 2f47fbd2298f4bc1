"""Which part of a batch holds the images, and how large they are."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from streamloader import tree
from streamloader.augment.layout import Layout
from streamloader.augment.ragged import Images, RaggedImages

__all__ = ["dense", "images", "layout", "replaced"]

MOVED_WITH = {"BoundingBoxes", "KeyPoints", "Mask", "Video"}
"""torchvision's classes of what would have to move with the image, and cannot yet."""


def images(batch: Any) -> tuple[Images, int]:
    """The images, and their place among the leaves: `RaggedImages` count as one.

    They are the first of those, or the first tensor of three or more dimensions, as a plain one.

    Raises:
        TypeError: There is none, or there is something that would have to move with the images.
        ValueError: It has more than four dimensions.
    """
    leaves = tree.leaves(batch, RaggedImages)
    for leaf in leaves:
        _refuse(leaf)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, RaggedImages):
            return leaf, place
        if isinstance(leaf, Tensor) and leaf.ndim >= 3:
            if leaf.ndim > 4:
                raise ValueError(f"images must be (N, C, H, W), got {tree.describe(leaf)}")
            return leaf.as_subclass(torch.Tensor), place
    raise TypeError(
        "the batch must hold images, a tensor (N, C, H, W), and they are its first one of three or "
        "more dimensions, or RaggedImages, which augment.collate makes, got "
        f"{tree.describe(batch)}"
    )


def dense(batch: Any) -> tuple[Tensor, int]:
    """`images`, where they have to be of one size.

    Raises:
        TypeError: As `images`.
        ValueError: They have more than four dimensions, or are ragged.
    """
    found, place = images(batch)
    if isinstance(found, RaggedImages):
        raise ValueError(
            f"images must be (N, C, H, W) here, of one size, got {found!r}: crop or resize them "
            "before, as in transform=[augment.Compose([...]), ...]"
        )
    return found, place


def _refuse(leaf: Any) -> None:
    """Raises for torchvision's boxes, masks and such, known by name: it is not imported.

    Raises:
        TypeError: It is one of them.
    """
    kind = type(leaf)
    if kind.__name__ in MOVED_WITH and kind.__module__.startswith("torchvision.tv_tensors"):
        raise TypeError(
            f"tv_tensors.{kind.__name__} cannot be augmented yet, and would no longer fit the "
            "images: take it out of the batch, or pick the images alone with on(...)"
        )


def layout(images: Images) -> Layout:
    """The sizes of (N, C, H, W), of (C, H, W), one image, or of ragged ones.

    Raises:
        ValueError: There is no image, or no pixel.
    """
    if isinstance(images, RaggedImages):
        found = images.layout
    else:
        count = len(images) if images.ndim == 4 else 1
        found = Layout.dense(count, *images.shape[-3:])
    if not (found.count and found.channels and found.heights.all() and found.widths.all()):
        raise ValueError(f"the batch must hold images with pixels, got {tree.describe(images)}")
    return found


def replaced(batch: Any, place: int, images: Tensor) -> Any:
    """`batch` with other images; the given batch is not written to."""
    places = itertools.count()
    return tree.replace(lambda leaf: images if next(places) == place else leaf, batch, RaggedImages)
