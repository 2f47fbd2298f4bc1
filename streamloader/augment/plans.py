"""A plan: every transform's draws for one batch, resolved into a table. Pure."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from streamloader.augment import draws
from streamloader.augment.draws import Ints
from streamloader.augment.layout import Layout
from streamloader.augment.program import Program
from streamloader.augment.step import Geometric, Step
from streamloader.augment.view import View
from streamloader.context import Context

__all__ = ["layouts", "plan"]

EXACT = 1 << 22
"""Up to here float32 holds every whole number, and kernels find the first pixel of each."""


def layouts(steps: tuple[Step, ...], program: Program, layout: Layout) -> tuple[Layout, ...]:
    """The images' sizes at first and after each pass; sizes are never drawn.

    Raises:
        ValueError: A transform cannot do its work on such images, or not all come out in one size.
    """
    sizes = [layout]
    for part in program.passes:
        heights, widths = sizes[-1].heights, sizes[-1].widths
        for step in (steps[place] for place in part.places):
            step.check(layout.channels)
            if isinstance(step, Geometric):
                heights, widths = step.sizes(heights, widths)
        sizes.append(Layout(layout.channels, heights, widths))
    if layout.count and sizes[-1].size is None:
        raise ValueError(
            "images must come out in one size to be a batch, got heights from "
            f"{sizes[-1].heights.min()} to {sizes[-1].heights.max()} and widths from "
            f"{sizes[-1].widths.min()} to {sizes[-1].widths.max()}: end with a crop, or with "
            "Resize((height, width))"
        )
    return tuple(sizes)


def plan(steps: tuple[Step, ...], program: Program, layout: Layout, context: Context) -> Tensor:
    """The table: float32 on the CPU, a row a sample, `program.columns` its columns.

    Raises:
        ValueError: A transform cannot do its work on such images, or not all come out in one size,
            or one becomes too long on the way.
    """
    sizes = layouts(steps, program, layout)
    key = context.key()
    table = np.zeros((layout.count, len(program.columns)), np.float32)
    for part, before in zip(program.passes, sizes, strict=False):
        view = View.whole(before.heights, before.widths)
        for place in part.places:
            step, start = steps[place], program.starts[place]
            uniform = draws.uniforms(key, place, layout.count, step.draws)
            if isinstance(step, Geometric):
                view = step.moved(view, uniform)
            else:
                columns = slice(start, start + len(step.fields))
                table[:, columns] = step.decide(uniform, view.out_height, view.out_width)
        if part.resample is not None:
            start = part.resample.column
            table[:, start : start + part.resample.width] = _exact(np.stack(view, axis=1))
    return torch.from_numpy(table)


def _exact(cells: Ints) -> Ints:
    """`cells`, if float32 holds them exactly.

    Raises:
        ValueError: One is too large.
    """
    most = np.abs(cells).max(initial=0)
    if most > EXACT:
        raise ValueError(
            f"no edge may become longer than {EXACT} pixels, got {most}: crop before the resize, "
            "or give Resize a max_size"
        )
    return cells
