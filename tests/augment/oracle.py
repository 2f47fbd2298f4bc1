"""torchvision v2's functional, sample by sample, told by a plan's table what to do."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional
from torchvision.transforms.v2.functional import _color

from streamloader import augment
from streamloader.augment.program import Resample
from streamloader.augment.recipe import Recipe
from streamloader.context import Context

TOLERANCE = 1e-5  # of images in 0..1, unless torchvision's own float32 is worse than half of it

Row = Mapping[str, float]


def context(number: int = 0) -> Context:
    return Context(seed=0, epoch=0, number=number, rank=0)


def layout(images: Tensor) -> augment.Layout:
    count, channels, height, width = images.shape
    return augment.Layout.dense(count, channels, height, width)


def planned(recipe: Recipe, images: Tensor, number: int = 0) -> Tensor:
    return recipe.plan(layout(images), context(number))


def rows(recipe: Recipe, table: Tensor) -> list[dict[str, float]]:
    return [dict(zip(recipe.columns, row, strict=True)) for row in table.tolist()]


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def bytes_(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


# -- what torchvision makes of a row -----------------------------------------------------------


def view(image: Tensor, row: Row, name: str, spec: Resample) -> Any:
    box, grid = (
        [int(row[f"{name}.{part}"]) for part in parts]
        for parts in (("top", "left", "height", "width"), ("grid_height", "grid_width"))
    )
    mode = InterpolationMode(spec.interpolation)
    image = resize(functional.crop(image, *box), grid, interpolation=mode, antialias=spec.antialias)
    top, left, height, width = (
        int(row[f"{name}.{part}"])
        for part in ("window_top", "window_left", "out_height", "out_width")
    )
    border = [max(-left, 0), max(-top, 0)]
    border += [max(left + width - grid[1], 0), max(top + height - grid[0], 0)]
    if any(border):
        unit = 255 if image.dtype == torch.uint8 else 1
        image = functional.pad(image, border, fill=[value * unit for value in spec.fill])
    image = functional.crop(image, top + border[1], left + border[0], height, width)
    image = functional.vertical_flip(image) if row[f"{name}.flip_vertical"] else image
    return functional.horizontal_flip(image) if row[f"{name}.flip_horizontal"] else image


def resize(image: Tensor, size: list[int], **how: Any) -> Any:
    """torchvision's, but where torch is wrong, or fails: on the CPU, antialiased, to a width of 1.

    There in floats, first across, and then two columns alike.
    """
    if size[1] > 1:
        return functional.resize(image, size, **how)
    values = image.float() if image.dtype == torch.uint8 else image
    line = functional.resize(values, [image.shape[1], 1], **how)
    values = functional.resize(line.repeat(1, 1, 2), [size[0], 2], **how)[:, :, :1]
    return values.round().clamp(0, 255).to(image.dtype) if image.dtype == torch.uint8 else values


def adjust_hue(image: Tensor, factor: float) -> Any:
    """torchvision's, but for its detour by float32 where the image is float64."""
    if image.dtype != torch.float64 or len(image) == 1:
        return functional.adjust_hue(image, factor)
    hue, saturation, value = _color._rgb_to_hsv(image)
    return _color._hsv_to_rgb(torch.stack(((hue + factor).remainder(1), saturation, value)))


ADJUST: list[tuple[str, Callable[[Tensor, float], Tensor]]] = [
    ("brightness", functional.adjust_brightness),
    ("contrast", functional.adjust_contrast),
    ("saturation", functional.adjust_saturation),
    ("hue", adjust_hue),
]


def jitter(image: Tensor, row: Row, name: str, step: Any) -> Tensor:
    for turn in ("first", "second", "third", "fourth"):
        factor, adjust = ADJUST[int(row[f"{name}.{turn}"])]
        if getattr(step, factor) is not None:
            image = adjust(image, row[f"{name}.{factor}"])
    return image


def grayscale(image: Tensor, row: Row, name: str, _: Any) -> Any:
    return functional.rgb_to_grayscale(image, len(image)) if row[f"{name}.flag"] else image


def normalize(image: Tensor, _row: Row, _name: str, step: Any) -> Any:
    return functional.normalize(image, step.mean, step.std)


def erase(image: Tensor, row: Row, name: str, step: Any) -> Any:
    top, left, height, width = (
        int(row[f"{name}.{part}"]) for part in ("top", "left", "height", "width")
    )
    value = torch.tensor(step.value, dtype=image.dtype)[:, None, None]
    return functional.erase(image, top, left, height, width, value)


def cast(image: Tensor, _row: Row, _name: str, step: Any) -> Any:
    keep = image.dtype == torch.float64 and step.dtype.is_floating_point
    return image if keep else functional.to_dtype(image, step.dtype, step.scale)


POINTWISE: dict[type, Callable[[Tensor, Row, str, Any], Tensor]] = {
    augment.ColorJitter: jitter,
    augment.RandomGrayscale: grayscale,
    augment.Normalize: normalize,
    augment.RandomErasing: erase,
    augment.ToDtype: cast,
}


def torchvision(recipe: Recipe, image: Tensor, row: Row) -> Tensor:
    """One image, (C, H, W), through torchvision's functions in the image's own dtype."""
    for number, part in enumerate(recipe.program(image.dtype).passes):
        if part.resample is not None:
            image = view(image, row, f"view{number}", part.resample)
        for place in part.places:
            step = recipe.steps[place]
            if type(step) in POINTWISE:
                name = f"{place}.{type(step).__name__}"
                image = POINTWISE[type(step)](image, row, name, step)
    return image


# -- how near it must be -----------------------------------------------------------------------


def assert_as_good(recipe: Recipe, images: Tensor, number: int = 0) -> Tensor:
    """Against float64: no worse than 1e-5, or twice torchvision's float32. Returns the table."""
    table = planned(recipe, images, number)
    before = images.clone()
    ours = recipe.run(images, table)
    assert torch.equal(images, before)
    for image, mine, row in zip(images, ours, rows(recipe, table), strict=True):
        exact = torchvision(recipe, image.double(), row)
        theirs = torchvision(recipe, image, row)
        assert mine.shape == theirs.shape
        assert mine.dtype == theirs.dtype
        allowed = max(TOLERANCE, 2 * (theirs.double() - exact).abs().max().item())
        assert (mine.double() - exact).abs().max().item() <= allowed
    return table


def assert_within_a_level(recipe: Recipe, images: Tensor, number: int = 0) -> None:
    """uint8 against torchvision's uint8."""
    table = planned(recipe, images, number)
    ours = recipe.run(images, table)
    assert ours.dtype == torch.uint8
    for image, mine, row in zip(images, ours, rows(recipe, table), strict=True):
        theirs = torchvision(recipe, image, row)
        assert mine.shape == theirs.shape
        assert (mine.int() - theirs.int()).abs().max().item() <= 1
