"""The article's augmentation of a batch on the device, and the same work without waits.

crop(128), resize(256), rotation(45), blur(7), normalise(0, 1), of uint8 images "b 3 256 256":

    PerImage    as the article does it, written anew from its description: roi_align crops, rotation
                loops over the images, the rest is torchvision's for the batch, one sigma for all
    Vectorised  one sampling for crop, resize and rotation; a separable blur with a sigma for each
                image. All is drawn on the device by one call, and nothing waits or comes from the
                host: it can be captured as a graph

The second is not the first to the bit: it samples once, bilinearly, where the first samples twice
and rotates to the nearest pixel.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks._require import require

__all__ = ["PerImage", "Vectorised"]

DEGREES = 45.0
SIGMAS = (0.1, 2.0)
REACH = 3
"""Of the blur, to each side."""


class PerImage:
    """The article's.

    Args:
        side: Of the images, in pixels; crops have half of it.
    """

    def __init__(self, side: int) -> None:
        transforms: Any = require("torchvision.transforms.v2")
        self._side, self._crop = side, side // 2
        self._roi_align = require("torchvision.ops").roi_align
        self._rotate = require("torchvision.transforms.v2.functional").rotate
        self._resize = transforms.Resize(side)
        self._blur = transforms.GaussianBlur(2 * REACH + 1)
        self._normalize = transforms.Normalize([0.0], [1.0])

    def __call__(self, images: Tensor) -> Tensor:
        """`images` augmented, float32."""
        resized = self._resize(self._cropped(images.float()))
        angles = torch.empty(len(images)).uniform_(-DEGREES, DEGREES).tolist()
        pairs = zip(resized, angles, strict=True)
        rotated = torch.stack([self._rotate(image, angle) for image, angle in pairs])
        out: Tensor = self._normalize(self._blur(rotated))
        return out

    def _cropped(self, images: Tensor) -> Tensor:
        count, free = len(images), self._side - self._crop + 1
        corner = torch.randint(0, free, (count, 2), device=images.device)
        number = torch.arange(count, device=images.device)[:, None]
        boxes = torch.cat([number, corner, corner + self._crop], 1).float()
        size = (self._crop, self._crop)
        out: Tensor = self._roi_align(images, boxes, size, sampling_ratio=1, aligned=True)
        return out


class Vectorised:
    """The same, with constant tensors of its own.

    There is no matrix product in it: that may need a library's workspace, which graphs may share.

    Args:
        side: Of the images, in pixels; crops have half of it.
        device: Where they are.
    """

    def __init__(self, side: int, device: torch.device) -> None:
        self._side, self._crop = side, side // 2
        middle = (side - 1) / 2
        self._from_middle = torch.arange(side, device=device, dtype=torch.float32) - middle
        self._middle = middle
        self._taps = torch.arange(-REACH, REACH + 1, device=device, dtype=torch.float32)

    def __call__(self, images: Tensor) -> Tensor:
        """`images` augmented, float32, with draws from torch's default generator of the device."""
        draws = torch.rand(4, len(images), 1, 1, device=images.device)
        corner = (draws[:2] * (self._side - self._crop + 1)).floor_()
        angle = (draws[2] * 2 - 1) * math.radians(DEGREES)
        sigma = SIGMAS[0] + draws[3] * (SIGMAS[1] - SIGMAS[0])
        return self.blurred(self.sampled(images.float(), corner, angle), sigma).sub_(0).div_(1)

    def sampled(self, images: Tensor, corner: Tensor, angle: Tensor) -> Tensor:
        """Cropped, resized and rotated.

        Args:
            images: Float.
            corner: "2 b 1 1", x and y of the crop's first pixel.
            angle: "b 1 1", in radians, counter-clockwise.
        """
        cos, sin = torch.cos(angle), torch.sin(angle)
        x, y = self._from_middle[None, None, :], self._from_middle[None, :, None]
        # Where in the resized crop an output pixel comes from ...
        turned = torch.stack([cos * x - sin * y, sin * x + cos * y]).add_(self._middle)
        half = self._middle + 0.5
        inside = ((turned - self._middle).abs_() <= half).all(0)
        # ... and where that is in the image, never beyond the crop's edge, as a share of it.
        scale = self._crop / self._side
        within = ((turned + 0.5) * scale - 0.5).clamp_(0, self._crop - 1)
        grid = (within + corner) * (2 / (self._side - 1)) - 1
        sampled = functional.grid_sample(
            images, grid.movedim(0, -1), padding_mode="border", align_corners=True
        )
        return sampled.mul_(inside[:, None])

    def blurred(self, images: Tensor, sigma: Tensor) -> Tensor:
        """Each image blurred by a `sigma` of its own, "b 1 1", first along rows."""
        count, channels, height, width = images.shape
        weights = torch.exp(-0.5 * (self._taps / sigma[:, :, 0]).square())
        weights = (weights / weights.sum(1, keepdim=True))[:, None].expand(-1, channels, -1)
        weights = weights.reshape(count * channels, len(self._taps))
        row, column = weights[:, None, None, :], weights[:, None, :, None]
        flat = functional.pad(images, (REACH,) * 4, mode="reflect").flatten(0, 1)[None]
        flat = functional.conv2d(flat, row, groups=count * channels)
        flat = functional.conv2d(flat, column, groups=count * channels)
        return flat.view(count, channels, height, width)
