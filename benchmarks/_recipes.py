"""Who augments: the workers, or the device by a recipe of `streamloader.augment`.

    --augment    from memory          from shards: workers ...      on the device
    cpu          of the model's size  decode, crop, resize, flip    normalise
    gpu          256/224 of it        decode                        crop, resize, flip, normalise
    gpu-jitter   256/224 of it        decode                        ... and colours
    gpu-full     256/224 of it        decode                        ... and grey, erased boxes
    gpu-cut      -                    decode, cut the box out       resize, flip, normalise

What a crop's box leaves out need not be sent; whole images of ImageNet are some 500 KB, their boxes
half of that, and what comes out of the crop 150 KB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks._models import IMAGE_MEAN, IMAGE_STD, Normalize

__all__ = ["AUGMENT", "DELIVER", "source_size", "transform"]

DELIVER = {
    "cpu": "squares",
    "gpu": "whole",
    "gpu-jitter": "whole",
    "gpu-full": "whole",
    "gpu-cut": "crops",
}
"""What workers make of an image of shards, as `shards.loader` calls it."""

AUGMENT = tuple(DELIVER)

JITTER = (0.4, 0.4, 0.4, 0.1)
"""Brightness, contrast, saturation, hue: what self-supervised training takes."""


def source_size(augment: str, image_size: int) -> int:
    """Width and height, in pixels, of the images that come from memory."""
    return image_size if augment == "cpu" else round(image_size * 256 / 224)


def transform(
    augment: str, image_size: int, device: torch.device, dtype: torch.dtype
) -> Callable[[Any], Tensor]:
    """From images as they come to the model's: `dtype`, channels_last.

    Args:
        augment: One of `AUGMENT`.
        image_size: Their width and height in pixels.
        device: Where they are.
        dtype: What the step takes.
    """
    if augment == "cpu":
        return Normalize(device, dtype)
    from streamloader import augment as recipes  # noqa: PLC0415  # it needs NumPy

    side = (image_size, image_size)
    crop = recipes.Resize(side) if augment == "gpu-cut" else recipes.RandomResizedCrop(side)
    full = augment == "gpu-full"
    colours = [recipes.ColorJitter(*JITTER)] if full or augment == "gpu-jitter" else []
    greys = [recipes.RandomGrayscale(0.2)] if full else []
    erased = [recipes.RandomErasing(0.25)] if full else []
    return recipes.Compose(
        [
            *(crop, recipes.RandomHorizontalFlip()),
            *(*colours, *greys),
            recipes.Normalize(IMAGE_MEAN, IMAGE_STD),
            *(*erased, recipes.ToDtype(dtype)),
        ],
        memory_format=torch.channels_last,
    )
