"""Draw the pictures of `docs/augment.md`: what each transform makes of painted pictures.

    FIGURES          what is drawn: transforms with their arguments, and captions
    paint            pictures to start from, by make_shards' painter
    one, several     a row of cells: one transform's draws, or one cell for each of several
    mixed, imagenet  rows of a batch
    sheet            cells with captions below and a title above, as one picture
    draw, main       all of it, written

`python -m scripts.draw_augment` writes into docs/augment. The pixels depend on nothing but this
file, the package and the versions of numpy and Pillow: run it again after a change that shows.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageFont
from torch import Tensor

from scripts import make_shards
from streamloader import augment
from streamloader.augment.recipe import Recipe
from streamloader.context import Context

OUT = Path(__file__).parents[1] / "docs" / "augment"
SEED = 3
SIZE = (128, 96)  # of a painted picture: width and height
SQUARE = (88, 88)  # of those of a batch
MOOD = (0.95, 0.0, 0.3)  # of make_shards' canvases: large leaves, little texture
VIVID = 1.9  # times the painter's saturation, so that one sees colours change
WIDEST = 800  # pixels of a sheet
GAP, LINE = 2, 13  # pixels between two cells, and of a line of text
COLORS = 64  # of a file's palette
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Call = tuple[str, dict[str, Any]]
"""A transform of `augment` and its arguments."""

Cell = tuple[Image.Image, str]
"""A picture and its caption."""


@dataclass(frozen=True)
class Figure:
    """What a file shows.

    Attributes:
        calls: One transform, drawn for several times; or several, of which each is a cell.
        caption: Of one transform's cells, in the table's columns: what is in front of their last
            dot is left out.
    """

    calls: tuple[Call, ...]
    caption: str = ""


FIGURES = {
    "random_resized_crop": Figure(
        (("RandomResizedCrop", {"size": 80, "scale": (0.08, 1.0)}),),
        "{height:.0f} x {width:.0f} at {top:.0f}, {left:.0f}",
    ),
    "resize": Figure(
        (
            ("Resize", {"size": 64}),
            ("Resize", {"size": (96, 96)}),
            ("Resize", {"size": (48, 160), "antialias": False}),
            ("Resize", {"size": 64, "max_size": 72}),
        )
    ),
    "center_crop": Figure(
        (
            ("CenterCrop", {"size": 80}),
            ("CenterCrop", {"size": (48, 120)}),
            ("CenterCrop", {"size": 120}),
        )
    ),
    "random_crop": Figure(
        (("RandomCrop", {"size": 80, "padding": 16, "fill": 128}),),
        "at {window_top:.0f}, {window_left:.0f}",
    ),
    "random_horizontal_flip": Figure(
        (("RandomHorizontalFlip", {"p": 0.5}),), "flip_horizontal {flip_horizontal:.0f}"
    ),
    "random_vertical_flip": Figure(
        (("RandomVerticalFlip", {"p": 0.5}),), "flip_vertical {flip_vertical:.0f}"
    ),
    "color_jitter": Figure(
        (
            (
                "ColorJitter",
                {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
            ),
        ),
        "brightness {brightness:.2f}\ncontrast {contrast:.2f}\n"
        "saturation {saturation:.2f}\nhue {hue:+.2f}",
    ),
    "random_grayscale": Figure((("RandomGrayscale", {"p": 0.5}),), "flag {flag:.0f}"),
    "random_erasing": Figure(
        (("RandomErasing", {"p": 0.8, "value": 128}),),
        "{height:.0f} x {width:.0f} at {top:.0f}, {left:.0f}",
    ),
}  # fmt: skip


@functools.cache
def paint(count: int, size: tuple[int, int] = SIZE) -> Tensor:
    """Pictures, uint8 (count, 3, height, width), each of a canvas of its own: always the same."""
    rng = np.random.default_rng(SEED)
    texture = make_shards.pink(rng)
    vivid = []
    for _ in range(count):
        canvas = make_shards.synthesise(rng, texture, np.array(MOOD))
        picture = ImageEnhance.Color(make_shards.view(rng, canvas, *size)).enhance(VIVID)
        vivid.append(np.array(picture))
    return torch.from_numpy(np.stack(vivid)).permute(0, 3, 1, 2)


def written(call: Call) -> str:
    """A call as one writes it."""
    name, arguments = call
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def recipe_of(call: Call) -> Recipe:
    """The transform that a call makes."""
    name, arguments = call
    recipe = getattr(augment, name)(**arguments)
    assert isinstance(recipe, Recipe)
    return recipe


def pictures(images: Tensor) -> list[Image.Image]:
    """Each image of a batch; what was normalised is brought back."""
    return [Image.fromarray(augment.preview(image, mean=MEAN, std=STD).numpy()) for image in images]


def captions(template: str, columns: Sequence[str], table: Tensor) -> list[str]:
    """A caption a row."""
    names = [name.rpartition(".")[2] for name in columns]
    return [template.format_map(dict(zip(names, row, strict=True))) for row in table.tolist()]


def one(figure: Figure, image: Tensor) -> list[Cell]:
    """A row: the picture, and as many draws of one transform as there is room for."""
    recipe = recipe_of(figure.calls[0])
    width = int(recipe.layouts(augment.Layout.dense(1, *image.shape))[-1].widths[0])
    count = (WIDEST - image.shape[-1]) // (width + GAP)
    batch = image.expand(count, -1, -1, -1)
    table = recipe.plan(batch, Context(SEED, 0, 0, 0))
    cells = zip(
        pictures(recipe.run(batch, table)),
        captions(figure.caption, recipe.columns, table),
        strict=True,
    )
    return [(pictures(image[None])[0], "the image"), *cells]


def several(figure: Figure, image: Tensor) -> list[Cell]:
    """A row: the picture, and what each of several transforms makes of it."""
    cells = [
        (pictures(recipe_of(call)(image[None]))[0], written(call).replace("(", "\n(", 1))
        for call in figure.calls
    ]
    return [(pictures(image[None])[0], "the image"), *cells]


def mixed(mix: augment.MixUp | augment.CutMix) -> Image.Image:
    """Two rows: a batch, and what mixing makes of it."""
    images = paint(8, SQUARE)
    batch = (images / 255, torch.arange(len(images)))
    table = mix.plan(batch, Context(SEED, 0, 0, 0))
    out, _ = mix.run(batch, table)
    blended = [Image.fromarray(augment.preview(image).numpy()) for image in out]
    before = [(picture, f"sample {n}") for n, picture in enumerate(pictures(images))]
    after = zip(blended, captions("lambda {lambda:.2f}", mix.columns, table), strict=True)
    title = f"{type(mix).__name__}(alpha={mix.alpha}, num_classes={mix.num_classes})"
    return sheet(title, [before, list(after)])


def imagenet() -> Image.Image:
    """Three rows: pictures as they are decoded, and what a recipe makes of them in two epochs."""
    images = paint(8, SQUARE)
    recipe = augment.Compose(
        [
            augment.RandomResizedCrop(SQUARE),
            augment.RandomHorizontalFlip(),
            augment.ColorJitter(0.4, 0.4, 0.4),
            augment.Normalize(MEAN, STD),
            augment.RandomErasing(p=0.25),
        ]
    )
    rows = [list(zip(pictures(images), [f"sample {n}" for n in range(8)], strict=True))]
    for epoch in range(2):
        out = recipe.run(images, recipe.plan(images, Context(SEED, epoch, 0, 0)))
        rows.append([(picture, f"epoch {epoch}") for picture in pictures(out)])
    title = "RandomResizedCrop, RandomHorizontalFlip, ColorJitter(0.4, 0.4, 0.4), Normalize, "
    title += "RandomErasing(p=0.25)"
    return sheet(title, rows)


def wide(cell: Cell) -> int:
    """A cell's width: its picture's, or its caption's."""
    picture, text = cell
    pen = ImageDraw.Draw(picture)
    return max(picture.width, int(pen.textbbox((0, 0), text, small())[2]) + GAP)


def small() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """What captions are written in: Pillow's own, so that it is there."""
    return ImageFont.load_default(10)


def sheet(title: str, rows: Sequence[Sequence[Cell]]) -> Image.Image:
    """Rows of cells as one picture, with few colours."""
    heights = [
        max(cell.height for cell, _ in row) + LINE * max(text.count("\n") + 1 for _, text in row)
        for row in rows
    ]
    widths = [max(map(wide, column)) for column in zip(*rows, strict=True)]
    above = LINE * (title.count("\n") + 1) + 2 * GAP
    size = (sum(widths) + GAP * (len(widths) - 1), above + sum(heights) + GAP * len(heights))
    out = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(out)
    pen.text((0, 0), title, "black", ImageFont.load_default(11))
    y = above
    for row, height in zip(rows, heights, strict=True):
        x = 0
        for (cell, text), width in zip(row, widths, strict=True):
            out.paste(cell, (x, y))
            pen.text((x, y + cell.height), text, "black", small(), spacing=1)
            x += width + GAP
        y += height + GAP
    return out.quantize(COLORS, dither=Image.Dither.NONE)


def drawn() -> dict[str, Callable[[], Image.Image]]:
    """What draws each file, by its name without the ending."""
    image = paint(1)[0]

    def single(figure: Figure) -> Callable[[], Image.Image]:
        if len(figure.calls) > 1:
            return lambda: sheet(figure.calls[0][0], [several(figure, image)])
        return lambda: sheet(written(figure.calls[0]), [one(figure, image)])

    return {
        **{name: single(figure) for name, figure in FIGURES.items()},
        "mixup": lambda: mixed(augment.MixUp(num_classes=8)),
        "cutmix": lambda: mixed(augment.CutMix(num_classes=8)),
        "imagenet": imagenet,
    }


def draw(out: Path) -> list[Path]:
    """Writes all files; returns them."""
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, make in drawn().items():
        paths.append(out / f"{name}.png")
        make().save(paths[-1], optimize=True)
    return paths


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="The pictures of docs/augment.md")
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write")
    for path in draw(parser.parse_args().out):
        sys.stdout.write(f"{path} {path.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
