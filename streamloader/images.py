"""From an encoded image's bytes to a uint8 square, on the CPU.

    decode                  torchcodec, and Pillow for what it refuses: RGB whatever comes
    Box, random_box         torchvision's random-resized-crop, its decisions alone: pure
    short_side, centre      torchvision's resize and centre crop, likewise
    training, evaluation    the pixels

Which decoder reads an image is decided by its content, never by its name. Images are cropped, then
resized by torch's uint8 kernel with antialiasing: the one that torchvision's v2 calls, so the same
pixels, in a quarter of the time that float takes. Decoding takes five times as long as that.
"""

from __future__ import annotations

import io
import math
import random
from typing import NamedTuple, cast

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.nn.functional import interpolate
from torchcodec.decoders import decode_jpeg

__all__ = [
    "Box",
    "centre",
    "decode",
    "evaluation",
    "random_box",
    "short_side",
    "training",
    "without_exif",
]

_START, _SCAN, _EXIF = 0xD8, 0xDA, 0xE1  # JPEG markers: of image, of its entropy-coded data, APP1
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # those with the image's size
_SLIMMEST = 16  # times its shorter side is what `evaluation` looks at of an image's longer one


def decode(data: bytes) -> Tensor:
    """The image in `data` as it is stored: an EXIF orientation is not applied.

    That is what torchvision's `ImageFolder` gives, and what the ImageNet models were trained on.
    Alpha is dropped, grey is repeated, palettes are looked up, CMYK is converted as Pillow does, 16
    bits are cut to the upper 8, and of an animation the first frame is taken. Pillow's limit,
    `PIL.Image.MAX_IMAGE_PIXELS`, is one for torchcodec too: a few bytes can claim gigabytes.

    Args:
        data: A JPEG, or anything that Pillow reads.

    Returns:
        uint8, (3, height, width), not contiguous: its memory holds pixel after pixel.

    Raises:
        ValueError: It is not an image, is broken, truncated or too large, or its pixels have no
            known range.
    """
    if data[:2] == bytes((0xFF, _START)):
        source = torch.frombuffer(without_exif(data), dtype=torch.uint8)
        try:
            return cast("Tensor", decode_jpeg(source, mode="RGB"))
        except RuntimeError:
            pass  # Pillow may read it still; if not, its reason is the one that is told
    try:
        with Image.open(io.BytesIO(data)) as image:
            pixels = _rgb(image)
    except Exception as error:  # its plugins raise half a dozen types, SyntaxError among them
        # Pillow names the object and its address, which would make each warning another one.
        unknown = isinstance(error, UnidentifiedImageError)
        reason = "cannot identify image file" if unknown else error
        raise ValueError(_undecodable(data, reason)) from error
    flat = torch.frombuffer(bytearray(pixels.tobytes()), dtype=torch.uint8)
    return flat.view(pixels.height, pixels.width, 3).permute(2, 0, 1)


def _undecodable(data: bytes, reason: object) -> str:
    return f"no image can be decoded from its {len(data)} bytes: {reason}"


def without_exif(jpeg: bytes) -> bytearray:
    """A JPEG without its EXIF and XMP segments, which torchcodec would turn it by.

    Their content is not looked at, so a broken one does no harm. The copy is one that torch can
    share: `frombuffer` warns of memory that cannot be written, as that of `bytes`.

    Raises:
        ValueError: It has, or says so, more pixels than `PIL.Image.MAX_IMAGE_PIXELS`.
    """
    data, at = bytearray(jpeg), 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != _SCAN:
        marker, end = data[at + 1], at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if marker in _FRAMES:
            _check_pixels(jpeg, bytes(data[at + 5 : at + 9]))
        if marker == _EXIF:
            del data[at:end]
        else:
            at = at + 1 if marker == 0xFF else end  # 0xFF may be repeated, as a filler
    return data


def _check_pixels(jpeg: bytes, sides: bytes) -> None:
    height, width = int.from_bytes(sides[:2], "big"), int.from_bytes(sides[2:], "big")
    most = Image.MAX_IMAGE_PIXELS
    if most is not None and height * width > most:
        reason = f"{width} x {height} pixels are more than PIL.Image.MAX_IMAGE_PIXELS, {most}"
        raise ValueError(_undecodable(jpeg, reason))


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode in {"I;16", "I;16B"}:
        # `convert` would clip at 255. The upper byte is what Pillow takes of 16-bit colour.
        upper = image.tobytes()[image.mode == "I;16" :: 2]
        return Image.frombytes("L", image.size, upper).convert("RGB")
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"pixels of mode {image.mode} have no known range")
    if "transparency" in image.info:
        image = image.convert("RGBA")  # in one step, Pillow may warn or take it for a colour
    return image.convert("RGB")


class Box(NamedTuple):
    """A part of an image, in pixels from its upper left corner."""

    top: int
    left: int
    height: int
    width: int

    def cut(self, image: Tensor) -> Tensor:
        """The part of `image`, (..., height, width), that the box covers: a view."""
        rows = image[..., self.top : self.top + self.height, :]
        return rows[..., self.left : self.left + self.width]


_AREA = (0.08, 1.0)  # of a crop, as a share of the image's
_RATIO = (3 / 4, 4 / 3)  # of a crop's width to its height
_TRIES = 10


def random_box(height: int, width: int, rng: random.Random) -> Box:
    """Decides a random-resized-crop with torchvision's parameters.

    Its area is 8 to 100 % of the image's, evenly; its width is 3/4 to 4/3 of its height, evenly on
    the logarithm. If ten draws do not fit, it is the largest centred one that has such a ratio.

    Args:
        height: The image's, in pixels.
        width: The image's, in pixels.
        rng: Drawn from four times, or more if draws do not fit.
    """
    for _ in range(_TRIES):
        area = height * width * rng.uniform(*_AREA)
        ratio = math.exp(rng.uniform(*map(math.log, _RATIO)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return Box(rng.randint(0, height - h), rng.randint(0, width - w), h, w)
    low, high = _RATIO
    w, h = min(width, round(height * high)), min(height, round(width / low))
    w, h = max(w, 1), max(h, 1)
    return Box((height - h) // 2, (width - w) // 2, h, w)


def short_side(height: int, width: int, short: int) -> tuple[int, int]:
    """Height and width after a resize that makes the shorter side `short` pixels long."""
    if height <= width:
        return short, int(short * width / height)
    return int(short * height / width), short


def centre(height: int, width: int, h: int, w: int) -> Box:
    """The box of `h` x `w` pixels in the middle of an image of `height` x `width`."""
    return Box(round((height - h) / 2), round((width - w) / 2), h, w)


def training(image: Tensor, size: int, rng: random.Random) -> Tensor:
    """A random-resized-crop of `image`, flipped half of the time: uint8, (3, size, size).

    Args:
        image: uint8, (3, height, width).
        size: Both sides of the result, in pixels.
        rng: What the crop and the flip are drawn from.
    """
    box = random_box(image.shape[1], image.shape[2], rng)
    crop = _resize(box.cut(image), (size, size))
    return (crop.flip(-1) if rng.random() < 0.5 else crop).contiguous()


def evaluation(image: Tensor, size: int) -> Tensor:
    """The middle of `image`, its shorter side resized to 256/224 of `size`: (3, size, size).

    The ends of an image that is longer than 16 times its shorter side are cut off before: the
    resize would make gigabytes of a line of pixels.
    """
    image = _stout(*image.shape[1:]).cut(image)
    shape = short_side(image.shape[1], image.shape[2], round(size * 256 / 224))
    return centre(*shape, size, size).cut(_resize(image, shape)).contiguous()


def _stout(height: int, width: int) -> Box:
    """The middle of an image, with an even number of pixels cut off its longer side."""
    longest = _SLIMMEST * min(height, width)
    h = height if height <= longest else longest + (height - longest) % 2
    w = width if width <= longest else longest + (width - longest) % 2
    return centre(height, width, h, w)


def _resize(image: Tensor, size: tuple[int, int]) -> Tensor:
    if image.shape[1:] == size:
        return image
    return interpolate(image[None], size, mode="bilinear", antialias=True)[0]
